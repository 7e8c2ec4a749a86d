"""The collected cases of other projects, in the framework's own messages, through real agents and real runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from agent_framework import Content, Message, tool

from agent_framework_fakes import (
    CODEC,
    FakeClient,
    agent_of,
    answer,
    ask,
    assistant,
    call,
    faults,
    marks,
    results,
    summaries,
    text,
    user,
)
from driving import small_policy
from helpers import Events, FakeSummarizer, fill, make_policy, make_runtime, settle, virtual
from smoothctx import KeepRecent, Offload, Policy, Summarize
from smoothctx_autogen.agent_framework import ChatClientModel, LookaheadMiddleware


async def grow(messages: Sequence[Message], policy: Policy, *, events: Events | None = None) -> list[list[Message]]:
    """The request of a run on each beginning of the list that a model may be asked about, with time between."""
    client = FakeClient()
    async with make_runtime(on_event=events) as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, policy))
        for k, message in enumerate(messages):
            more = messages[k + 1] if k + 1 < len(messages) else None
            if CODEC.role(message) in ("user", "tool") and (more is None or CODEC.role(more) != "tool"):
                held = list(messages[: k + 1])
                had = faults(held)
                await agent.run(held)
                assert len(faults(client.requests[-1])) <= len(had), (faults(client.requests[-1]), had)
                assert CODEC.role(client.requests[-1][0]) in ("system", "user")
                await settle(10)
    return client.requests


def separate(*ids: str, size: int = 0) -> list[Message]:
    """The same results as a message each."""
    return [results(i, size=size) for i in ids]


H, A = user, assistant
A1 = [H("<1>"), A(None, "1"), results("1"), A("<2>")]
PAIRS: dict[str, list[Message]] = {
    "B01": [H("<1>"), A(None, "a"), H("<2>"), A(None, "b"), *separate("a", "b"), H("<3>")],
    "B02": [m for k in range(6) for m in (H(f"<{k}>"), A(None, f"c{k}"), results(f"c{k}"))],
    "B03": [*A1, H("<3>"), A("<4>"), H("<5>")],
    "B04": [H("<1>"), A(None, "1", "2"), results("1", size=5000), results("2", size=200), A("<2>"), H("<3>"), H("<4>")],
    "B05": [H("<1>"), A("<2>"), H("<3>"), A(None, "1"), results("1"), A("<4>"), H("<5>")],
    "B16": [H("<1>"), *(m for k in range(6) for m in (A(None, f"c{k}"), results(f"c{k}")))],
    "B21": [H("<1>"), A("<2>"), H("<3>"), A(None, "1", "2"), *separate("1", "2"), H("<4>")],
    "B23": [m for k in range(5) for m in (H(f"<{k}>"), A(None, "call_0"), results("call_0"))],
    "B24": [*A1, H("<3>"), A(None, "9"), H("<4>"), A("<5>"), H("<6>")],
    "B27": [H("<1>"), A(None, "1", "2"), results("1", "2"), H("<2>"), A(None, "3", "4"), *separate("3", "4"), H("<3>")],
    "empty ids": [m for k in range(5) for m in (H(f"<{k}>"), A(None, "", ""), results("", ""))],
    "late": [H("<1>"), A(None, "1", "2"), results("1"), H("<2>"), A("<3>"), results("2"), H("<4>"), A("<5>"), H("<6>")],
    "orphan": [H("<1>"), results("lost"), A("<2>"), H("<3>"), A("<4>"), H("<5>"), A("<6>"), H("<7>")],
    "several and one orphan": [H("<1>"), A(None, "1"), results("1", "lost"), A("<2>"), H("<3>"), A("<4>"), H("<5>")],
}


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
@pytest.mark.parametrize("case", PAIRS)
@virtual
async def test_calls_and_results_are_never_parted(case: str, keep: int) -> None:
    """Wherever the kept tail would begin: one result per call, no result without its call, nothing lost."""
    messages = PAIRS[case]
    requests = await grow(messages, small_policy(FakeSummarizer(delay=0.1), keep=("messages", keep)))
    assert marks(requests[-1]) == marks(messages)


@pytest.mark.parametrize("case", PAIRS)
@virtual
async def test_dropping_never_parts_them_either(case: str) -> None:
    """The same with nothing but the local fallback (B05, B07, B11, B13)."""
    policy = Policy(
        KeepRecent(("messages", 2)), trigger=("messages", 4), hard_limit=("messages", 5), land_at=("messages", 3)
    )
    await grow(PAIRS[case], policy)


@tool(approval_mode="never_require")
async def slow(key: str) -> str:
    """Takes far longer than a summary."""
    await settle(20)
    return f"<{key}> found"


@virtual
async def test_running_calls_pin_themselves() -> None:
    """B17, B20, B24: summaries become ready while two tools run; call and results are whole in the next request."""
    client = FakeClient()
    client.reply = lambda messages: (
        [text(fill("<900> done", 60))]
        if messages[-1].role == "tool"
        else [call(f"c{len(client.requests)}-{j}", "slow", key=f"{700 + j}") for j in (0, 1)]
    )
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), keep=("messages", 0)))
        agent = agent_of(client, middleware, tools=[slow])
        session = agent.create_session()
        for k in range(6):
            await ask(agent, fill(f"<{k}> question", 60), session)
            assert [m.role for m in client.requests[-1]][-2:] == ["assistant", "tool"]
            assert {700, 701} <= marks(client.requests[-1][-1:])
            assert not faults(client.requests[-1])
            assert any(CODEC.text(m).startswith(f"<{k}> question") for m in client.requests[-1])
        assert events.of("view.committed") and summaries(client.requests[-1])


@virtual
async def test_unread_results_of_the_current_turn_stay() -> None:
    """B15, B25: what the model has not read yet is there word for word."""
    messages = [
        H("<1>"),
        *(m for k in range(8) for m in (A(None, f"c{k}"), Message("tool", [answer(f"c{k}", f"<{k}>")]))),
    ]
    for request in await grow(messages, small_policy(FakeSummarizer(delay=0.1), keep=("messages", 1))):
        assert CODEC.visible(request[-1]) in [CODEC.visible(m) for m in messages]


@virtual
async def test_thinking_of_older_turns_goes_with_the_prefix() -> None:
    """B114, B115, B118: kept turns lose their reasoning when the prefix is rewritten; the open loop keeps its own."""

    def think(k: int, *ids: str) -> Message:
        thought = Content.from_text_reasoning(text=f"hm {k}", protected_data="signature")
        return Message("assistant", [thought, text(f"<{k}> so"), *(call(i, key=i) for i in ids)])

    messages: list[Message] = []
    for k in range(0, 12, 2):
        messages += [H(f"<{k}> q", size=40), think(k + 1)]
    messages += [H("<20> q"), think(21, "x"), results("x"), think(22, "y"), results("y")]
    policy = small_policy(
        FakeSummarizer(delay=0.1), keep=("messages", 8), trigger=("messages", 12), land_at=("messages", 9)
    )
    request = (await grow(messages, policy))[-1]
    assert any(k in marks([m]) for m in request for k in (9, 11) if not CODEC.summary_text(m)), "an older turn is kept"
    assert summaries(request)
    thinking = [CODEC.text(m) for m in request if any(c.type == "text_reasoning" for c in m.contents)]
    assert thinking == ["<21> so", "<22> so"]
    assert all(any(c.type == "text_reasoning" for c in m.contents) for m in messages if m.role == "assistant")


@virtual
async def test_big_results_in_several_shapes_are_offloaded() -> None:
    """B10, B109, B111, B196: also as nested items, beside pictures, and as one of several in one message."""
    picture = Content.from_data(b"x" * 300_000, "image/png")
    big = "found it " * 4000
    shapes = [
        Message("tool", [answer("1", big), answer("2", "short")]),
        Message("tool", [Content.from_function_result("1", result=[text(big), picture]), answer("2", "short")]),
        Message(
            "tool", [answer("2", "short"), Content.from_function_result("1", result=[text(big[:9000]), text(big)])]
        ),
    ]
    for shape in shapes:
        client = FakeClient()
        async with make_runtime() as runtime:
            policy = make_policy(FakeSummarizer(), window=8000, max_message_tokens=500)
            agent = agent_of(client, LookaheadMiddleware(runtime, policy))
            before = CODEC.visible(shape)
            await agent.run([H("<1>"), A(None, "1", "2"), shape])
            (request,) = client.requests
            assert CODEC.visible(shape) == before, "the caller's own is what it was"
            assert not faults(request) and sorted(c.call_id or "" for c in request[2].contents) == ["1", "2"]
            said = CODEC.text(request[2])
            assert "[offloaded:" in said and len(said) < 3000
            assert all(len(c.result or "") < 3000 for c in request[2].contents)


@virtual
async def test_a_summary_is_never_a_tool_call_or_a_lone_thought() -> None:
    """B63, B66, B67, B68, B171: such replies of a chat client are refused, and their usage is counted."""
    for contents, finish in (
        ([Content.from_text_reasoning(text="hm")], "stop"),
        ([call("c1", key="x")], "tool_calls"),
        ([text('<tool_call>{"name": "lookup", "arguments": {}}</tool_call>')], "stop"),
        ([text("It was")], "length"),
        ([text("No.")], "content_filter"),
    ):
        client, events = FakeClient(), Events()
        other = FakeClient(usage=True, reply=lambda messages, contents=contents: contents)
        other.finish_reason = finish
        policy = Policy(
            Summarize(ChatClientModel(other), keep=("messages", 2)),
            trigger=("messages", 6),
            hard_limit=("messages", 50),
            land_at=("messages", 4),
            min_savings=0.0,
        )
        async with make_runtime(on_event=events) as runtime:
            agent = agent_of(client, LookaheadMiddleware(runtime, policy))
            session = agent.create_session()
            for k in range(6):
                await ask(agent, fill(f"<{k}> question", 60), session)
                await settle(1)
            assert not any(summaries(r) for r in client.requests)
            assert events.of("lookahead.failed") and not events.of("view.committed")
            assert runtime.counters.usage.calls == len(other.requests) > 0
            assert runtime.counters.usage.input_tokens > 100


@virtual
async def test_the_running_question_is_always_there_word_for_word() -> None:
    """B89, B94, B96: also with keep 0 and a large result behind it."""
    messages = [H("<1>", size=60), A("<2>", size=60), H("<3> this one"), A(None, "1"), results("1", size=800)]
    for keep in (0, 1):
        requests = await grow(messages, small_policy(FakeSummarizer(delay=0.1), keep=("messages", keep)))
        assert any(m is messages[2] or CODEC.text(m) == "<3> this one" for m in requests[-1])


@virtual
async def test_views_keep_their_bytes_between_commits() -> None:
    """B84, B195: from one request to the next it only grows at its end, save where a commit rewrote it."""
    client, events = FakeClient(reply=lambda messages: [text(fill("reply", 60))]), Events()
    async with make_runtime(on_event=events) as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 8)))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        commits = 0
        for k in range(20):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
            if k and len(events.of("view.committed")) == commits:
                before, after = ([CODEC.visible(m) for m in r] for r in client.requests[-2:])
                assert after[: len(before)] == before
            commits = len(events.of("view.committed"))
        assert 2 <= commits < 10


@virtual
async def test_the_same_middleware_offloads_and_retrieves_per_tenant() -> None:
    """B162, B168, B139: what one tenant offloaded another cannot read."""
    policy = Policy(
        Offload(min_tokens=100, keep_recent=0),
        trigger=("messages", 3),
        hard_limit=("messages", 100),
        land_at=("messages", 2),
        min_savings=0.0,
        max_message_tokens=200,
    )
    async with make_runtime() as runtime:
        found: list[Any] = []
        for tenant in ("ann", "ben"):
            client = FakeClient()
            middleware = LookaheadMiddleware(runtime, policy, tenant=tenant)
            agent = agent_of(client, middleware)
            session = agent.create_session()
            if tenant == "ann":
                await agent.run([H("<1>"), A(None, "1"), results("1", size=900)], session=session)
                stub = CODEC.text(client.requests[-1][-1])
                content_id = stub.split('id="')[1].split('"')[0]
            else:
                await agent.run([H("<1>")], session=session)
            await settle(1)
            found.append(await middleware.sessions(session)[0].retrieve(content_id))
        assert found[0].startswith("[retrieve id=") and found[1].startswith("error: no offloaded content")
