"""What a caller may get wrong with the Agent Framework, a middleware that is in effect twice, and results beside a huge
one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_framework import AgentSession, ChatMiddleware, Content, tool

from agent_framework_fakes import CODEC, FakeClient, agent_of, ask, call, faults, summaries, text
from driving import small_policy
from helpers import Events, FakeSummarizer, fill, make_runtime, settle, virtual
from smoothctx import ClosedError, ConfigurationError, Offload, Policy, Runtime
from smoothctx_autogen.agent_framework import ChatClientModel, LookaheadMiddleware

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def replies(**options: Any) -> FakeClient:
    """A client that answers at some length."""
    return FakeClient(reply=lambda messages: [text(fill("<900> reply", 60))], **options)


@STREAMS
@pytest.mark.parametrize("where", ["agent", "client", "both"])
@virtual
async def test_the_second_of_one_call_does_nothing(where: str, stream: bool) -> None:
    """Listed twice on either, or on both: the same requests and the same summaries as with one."""
    found: list[Any] = []
    for twice in (False, True):
        summariser = FakeSummarizer(delay=0.1)
        async with make_runtime() as runtime:
            policy = small_policy(summariser, trigger=("messages", 6))
            ours = LookaheadMiddleware(runtime, policy)
            again = LookaheadMiddleware(runtime, policy, name="again") if where == "both" else ours
            behind = {"agent": 0, "client": 2, "both": 1}[where] if twice else int(where == "client")
            client = replies(middleware=[ours, again][:behind] or None)
            agent = agent_of(client, None if where == "client" else again if twice else ours)
            if twice and where == "agent":
                agent = agent_of(client, None)
                agent.middleware = [ours, ours]
            session = agent.create_session()
            for k in range(12):
                await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
                await settle(1)
            lines = [*ours.sessions(session), *(again.sessions(session) if again is not ours else [])]
            receipts = [(r.how, r.tokens_before, r.tokens_after) for line in lines for r in line.receipts]
            assert len(lines) == 1 and receipts and not any(map(faults, client.requests))
            found.append((summariser.calls, receipts, [list(map(CODEC.text, r)) for r in client.requests]))
    assert found[0] == found[1]


@virtual
async def test_two_that_differ_are_both_at_work() -> None:
    """Another policy is not the same again, and neither is the next call of a middleware that asks twice."""

    class Twice(ChatMiddleware):
        async def process(self, context: Any, call_next: Any) -> None:
            await call_next()
            await call_next()

    client, summariser, offers = replies(), FakeSummarizer(delay=0.1), []
    async with make_runtime() as runtime:
        first = Policy(Offload(), trigger=("messages", 5), hard_limit=("messages", 100), land_at=("messages", 3))
        outer, inner = (
            LookaheadMiddleware(runtime, first),
            LookaheadMiddleware(runtime, small_policy(summariser, trigger=("messages", 6)), name="inner"),
        )
        agent = agent_of(client, None)
        agent.middleware = [Twice(), outer, inner]
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
            offers.append(len(client.requests))
        assert outer.sessions(session) and inner.sessions(session)
    assert offers == list(range(2, 18, 2)) and all(summaries(r) for r in client.requests[-2:])


@STREAMS
@virtual
async def test_a_runtime_that_was_never_opened_is_the_callers_mistake(stream: bool) -> None:
    """The first run raises, before the model is asked; once it is open everything works."""
    client, events = replies(), Events()
    runtime = make_runtime(on_event=events)
    agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(FakeSummarizer())))
    for _ in range(2):
        with pytest.raises(ClosedError, match="async with Runtime"):
            await ask(agent, "hello", agent.create_session(), stream=stream)
    assert client.requests == [] and events == []
    async with runtime:
        assert await ask(agent, "hello", agent.create_session(), stream=stream)


@pytest.mark.parametrize(
    "given", [{"name": ""}, {"name": 3}, {"tenant": ""}, {"tenant": None}, {"engine": "x"}, {"request": []}]
)
def test_wrong_options_are_named(given: dict[str, Any]) -> None:
    """At construction."""
    (option,) = given
    with pytest.raises(ConfigurationError, match=f"^{option}=.*: expected"):
        LookaheadMiddleware(Runtime(), small_policy(FakeSummarizer()), **given)


@pytest.mark.parametrize("model", ["", " ", 3])
def test_a_wrong_model_name_is_named(model: Any) -> None:
    """Also where the client would name one itself."""
    with pytest.raises(ConfigurationError, match="^model="):
        ChatClientModel(FakeClient(), model=model)


@pytest.mark.parametrize("session", ["x", None, {}])
@virtual
async def test_what_is_no_session_is_named(session: Any) -> None:
    """In each of the methods that take one."""
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer()))
        with pytest.raises(ConfigurationError, match="^session=.*AgentSession"):
            middleware.sessions(session)
        with pytest.raises(ConfigurationError, match="^session=.*AgentSession"):
            await middleware.forget(session)
        assert middleware.sessions(AgentSession()) == []


@pytest.mark.parametrize("how", ["max_message_tokens", "offload"])
@virtual
async def test_a_small_result_beside_a_huge_one_stays(how: str) -> None:
    """Parallel calls: the huge result becomes a stub, the small one is read as it is."""

    @tool(approval_mode="never_require")
    async def read_log(key: str) -> str:
        """Read the log."""
        return "log line\n" * 20_000

    @tool(approval_mode="never_require")
    async def balance(key: str) -> str:
        """Tell the balance."""
        return f"BALANCE={key}"

    def reply(messages: Any) -> list[Content]:
        if messages[-1].role == "tool":
            return [text("done")]
        n = len(client.requests)
        return [call(f"log{n}", "read_log", key=str(n)), call(f"balance{n}", "balance", key=str(n))]

    client = FakeClient(reply=reply)
    limits: dict[str, Any] = {"hard_limit": ("tokens", 400_000), "min_savings": 0.0}
    policy = (
        small_policy(FakeSummarizer(), trigger=("tokens", 300_000), max_message_tokens=500, **limits)
        if how == "max_message_tokens"
        else Policy(
            Offload(min_tokens=500, keep_recent=0), trigger=("tokens", 20_000), land_at=("tokens", 10), **limits
        )
    )
    async with make_runtime() as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, policy), tools=[read_log, balance])
        session = agent.create_session()
        for k in range(3):
            await ask(agent, f"<{k}> question", session)
            await settle(1)
    request = client.requests[-1]
    told = {c.call_id: str(c.result) for m in request for c in m.contents if c.type == "function_result"}
    logs = [t for i, t in told.items() if i.startswith("log")]
    assert {i: t for i, t in told.items() if i.startswith("balance")} == {
        f"balance{n}": f"BALANCE={n}" for n in (1, 3, 5)
    }
    assert not faults(request) and len(logs) == 3
    assert sum("[offloaded:" in t for t in logs) >= (3 if how == "max_message_tokens" else 1)


def test_the_retrieve_snippet_reads_what_was_offloaded(tmp_path: Path) -> None:
    """The page's agent gets the end of the log that it could not see."""
    page = (Path(__file__).parents[2] / "docs" / "agent_framework.md").read_text()
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "retrieve" in c]
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("[retrieve id=") and lines[-1] == "The disk was full."
