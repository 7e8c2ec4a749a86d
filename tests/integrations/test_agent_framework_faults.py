"""What goes wrong around a turn: summarisers, stores, limits, cancellation, errors, recursion."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from agent_framework import (
    ChatContext,
    ChatMiddleware,
    ChatMiddlewareLayer,
    Message,
    MiddlewareTermination,
)

from agent_framework_fakes import (
    CODEC,
    FakeClient,
    Plain,
    agent_of,
    ask,
    call,
    faults,
    lookup,
    marks,
    stored,
    summaries,
    text,
    user,
)
from driving import small_policy
from helpers import Events, FakeSummarizer, FlakyStore, Rateless, fill, make_runtime, now, settle, virtual
from smoothctx import ClosedError, KeepRecent, Policy, Runtime, Summarize, Usage
from smoothctx_autogen.agent_framework import ChatClientModel, LookaheadMiddleware

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def replies(**options: Any) -> FakeClient:
    """A client that answers at some length."""
    return FakeClient(reply=lambda messages: [text(fill("<900> reply", 60))], **options)


@STREAMS
@pytest.mark.parametrize("mode", ["fail", "hang", "stubborn", "garbage", "empty", "long", "cancel"])
@virtual
async def test_no_trouble_of_a_summariser_reaches_a_turn(mode: str, stream: bool) -> None:
    """Every run answers in its usual time; every request has all messages; the history is whole."""
    client, model = replies(delay=0.3), FakeSummarizer(mode, delay=0.1)
    async with make_runtime() as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6))))
        session = agent.create_session()
        took = set()
        for k in range(10):
            start = now()
            assert "reply" in await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
            took.add(round(now() - start, 6))
            await settle(1)
        assert len(took) == 1 and model.calls >= 1
        assert [len(r) for r in client.requests] == [2 * k + 1 for k in range(10)]
        assert len(stored(session)) == 20 and not faults(stored(session))


@pytest.mark.parametrize("mode", ["fail", "hang", "slow", "corrupt"])
@virtual
async def test_no_trouble_of_a_store_reaches_a_turn(mode: str) -> None:
    """A store that fails, hangs or lies: the runs go on, the summary is used from memory."""
    client = replies()
    async with make_runtime(store=FlakyStore(mode=mode)) as runtime:
        policy = small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6), model_id="m")
        agent = agent_of(client, LookaheadMiddleware(runtime, policy))
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(20)
        assert summaries(client.requests[-1]) and not faults(client.requests[-1])


@STREAMS
@virtual
async def test_hard_limit_always_fits(stream: bool) -> None:
    """With a summariser that never answers the local fallback makes the view fit, in the middle of tool loops too."""
    client, model = FakeClient(), FakeSummarizer("hang")
    client.reply = lambda messages: (
        [text("done")]
        if len(client.requests) % 4 == 0
        else [call(f"c{len(client.requests)}-{j}", key="1") for j in (0, 1)]
    )
    policy = Policy(
        Summarize(model, keep=("messages", 4)),
        context_window=1500,
        max_wait=2.0,
        fallback=KeepRecent(("messages", 4)),
    )
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, policy)
        agent = agent_of(client, middleware, tools=[lookup])
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
        assert len(client.requests) == 32
        for request in client.requests:
            assert not faults(request) and sum(map(CODEC.estimate, request)) <= 0.85 * 1500
        assert runtime.counters.fallbacks >= 1
        assert len(stored(session)) == 8 * 8 and not faults(stored(session))


@STREAMS
@pytest.mark.parametrize("odd", [math.nan, math.inf, -1])
@virtual
async def test_usage_that_is_no_number_of_tokens_is_no_report(odd: Any, stream: bool) -> None:
    """The agent has its answers, the summaries are made as ever, and nobody takes the odd number for a size."""
    client, events = replies(delay=0.3, usage=True), Events()
    client._usage = lambda *_: {
        "input_token_count": odd,
        "output_token_count": odd,
        "cache_read_input_token_count": odd,
    }
    async with make_runtime(on_event=events) as runtime:
        lookahead = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6)))
        agent = agent_of(client, lookahead)
        session = agent.create_session()
        for k in range(8):
            assert "reply" in await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
            await settle(1)
        (found,) = lookahead.sessions(session)
        assert found.receipts and 0 < found.branch.tokens < 10_000 and not events.of("error")
        assert all(call.usage == Usage(calls=1) for o in found.outcomes() for call in o.after)


@STREAMS
@pytest.mark.parametrize("broken", ["_elsewhere", "Turn.got_history", "Turn._cost"])
@virtual
async def test_nothing_of_ours_around_a_call_reaches_the_agent(
    broken: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails before, beside or behind the model call is an event; the run has its answer, and is over."""

    def fail(*_: Any) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(f"smoothctx_autogen.agent_framework.{broken}", fail)
    client, events = replies(delay=0.3, usage=True), Events()
    async with make_runtime(on_event=events) as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(FakeSummarizer())))
        session = agent.create_session()
        for k in range(3):
            assert "reply" in await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
        assert not runtime.foreground(None).busy
        assert events.of("error") and {e.data["where"] for e in events.of("error")} == {"agent_framework"}
    assert len(client.requests) == 3 and len(stored(session)) == 6


@virtual
async def test_a_runtime_that_is_closed_leaves_the_agent_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """The runs go on with their own messages; an event and a warning say why, once."""
    client, events = replies(), Events()
    runtime = make_runtime(on_event=events)
    agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(FakeSummarizer())))
    session = agent.create_session()
    async with runtime:
        await ask(agent, "within", session)
    for k in range(3):
        await ask(agent, f"after {k}", session)
    assert [len(r) for r in client.requests] == [1, 3, 5, 7]
    (event,) = events.of("turn.raw")
    assert event.data["where"] == "agent_framework" and "raw messages" in event.data["why"]
    assert [(r.name, r.levelname) for r in caplog.records] == [("smoothctx.agent_framework", "WARNING")]
    assert not events.of("error")


@pytest.mark.parametrize("error", [RuntimeError("no rates"), ClosedError("it was closed")], ids=repr)
@virtual
async def test_an_engine_that_no_session_can_be_had_with_leaves_the_agent_as_it_was(error: Exception) -> None:
    """It is no runtime that was never opened, whatever the engine raises: the runs go on, and events tell of it."""
    client, events = replies(), Events()
    async with make_runtime(on_event=events) as runtime:
        ours = LookaheadMiddleware(runtime, small_policy(FakeSummarizer()), engine=Rateless(error))
        agent = agent_of(client, ours)
        session = agent.create_session()
        for k in range(3):
            await ask(agent, f"question {k}", session)
    assert [len(r) for r in client.requests] == [1, 3, 5]
    assert [e.data["where"] for e in events.of("error")] == ["lines"] * 3 and not events.of("turn.raw")


@virtual
async def test_an_unreadable_message_is_passed_through() -> None:
    """A role that the framework allows and we do not know: an event, and the messages as they are."""
    client, events = replies(), Events()
    async with make_runtime(on_event=events) as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(FakeSummarizer())))
        odd = Message("narrator", ["meanwhile"])
        for held in ([user(), odd, user()], [odd, user()]):
            await agent.run(held)
            assert [m.role for m in client.requests[-1]] == [m.role for m in held]
        assert len(events.of("message.unreadable")) + len(events.of("error")) == 2


@STREAMS
@virtual
async def test_a_cancelled_run_neither_loses_nor_doubles_messages(stream: bool) -> None:
    """The model is still thinking when the run is cancelled; what is prepared goes on, the next run has everything."""
    client, model = replies(), FakeSummarizer(delay=3.0)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        for k in range(6):
            await ask(agent, fill(f"<{k}> question", 60), session)
        before = len(stored(session))
        client.hold = True
        client.started.clear()
        running = asyncio.get_running_loop().create_task(ask(agent, "<50> question", session, stream=stream))
        await client.started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(client.requests) == 7, "a cancelled call is not made again"
        assert not runtime.foreground(None).busy
        await settle(10)
        assert model.cancelled == 0 and model.calls >= 1
        client.hold = False
        await settle(10)
        await ask(agent, "<51> question", session, stream=stream)
        kept = len(stored(session)) - before
        assert kept in (2, 3)  # the framework decides whether the question of the cancelled run stays
        assert marks(client.requests[-1]) == {*range(6), 900, 51} | ({50} if kept == 3 else set())
        assert not faults(client.requests[-1])
        await settle(10)
        await ask(agent, "<52> question", session, stream=stream)
        assert summaries(client.requests[-1]) and not faults(client.requests[-1])
        assert len(middleware.sessions(session)) == 1


@virtual
async def test_cancelling_while_a_turn_waits_at_the_limit_cancels_it() -> None:
    """At the hard limit, before the model is called: the run ends, the summary is finished and used next time."""
    client, model = replies(), FakeSummarizer("hold")
    policy = small_policy(model, trigger=("messages", 6), hard_limit=("messages", 8), max_wait=60.0)
    async with make_runtime() as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, policy))
        chat = [m for k in range(4) for m in (user(f"<{k}> q", size=60), Message("assistant", [fill("a", 60)]))]
        running = asyncio.get_running_loop().create_task(agent.run([*chat, user("<50> next")]))
        await model.started.wait()
        await settle(1)
        assert not running.done() and not client.requests
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not client.requests
        model.release.set()  # until now others kept out of the way of the summary that was promoted
        await settle(1)
        assert not runtime.foreground(None).busy
        await agent.run([*chat, user("<50> next")])
        assert summaries(client.requests[0]) and marks(client.requests[0]) == {0, 1, 2, 3, 50}


@virtual
async def test_an_error_of_the_model_is_the_agents_own() -> None:
    """It passes through unchanged, the turn is over, the next run is served."""
    client, events = replies(), Events()
    async with make_runtime(on_event=events) as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(FakeSummarizer())))
        session = agent.create_session()
        good = client.reply

        def bad(messages: Any) -> Any:
            raise RuntimeError("the model failed")

        client.reply = bad
        with pytest.raises(RuntimeError, match="the model failed"):
            await ask(agent, "<1> question", session)
        assert not runtime.foreground(None).busy and not events.of("error")
        client.reply = good
        assert "reply" in await ask(agent, "<2> question", session)


class Bare(ChatMiddlewareLayer, Plain):
    """A client without function invocation, which expects an answer."""


class Ends(ChatMiddleware):
    """Ends the pipeline behind us without a model call."""

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        raise MiddlewareTermination


@STREAMS
@virtual
async def test_a_pipeline_that_ends_early_ends_the_turn(stream: bool) -> None:
    """Another middleware's termination passes through us; nothing stays in the foreground."""
    client, events = Bare(), Events()
    async with make_runtime(on_event=events) as runtime:
        mine = LookaheadMiddleware(runtime, small_policy(FakeSummarizer()))
        client.chat_middleware = [mine, Ends()]
        if stream:
            async for _ in client.get_response([user()], stream=True):
                raise AssertionError("there is nothing to read")
        else:
            assert await client.get_response([user()]) is None
        assert not client.requests and not runtime.foreground(None).busy and not events.of("error")


# -- recursion -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["ChatClientModel", "own function"])
@virtual
async def test_a_summariser_on_the_same_client_is_no_turn(own: bool) -> None:
    """Client-level middleware sees the background calls too: they pass as they are, and start nothing."""
    client = replies()
    client.reply = lambda messages: [text("It was long." if "ummar" in messages[-1].text else fill("<900> reply", 60))]

    async def model(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
        return (await client.get_response([Message(m["role"], [m["content"]]) for m in messages])).text

    summarise = Summarize(model if own else ChatClientModel(client), keep=("messages", 2), facts=False)
    policy = Policy(
        summarise, trigger=("messages", 6), hard_limit=("messages", 30), land_at=("messages", 4), min_savings=0.0
    )
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, policy)
        client.chat_middleware = [middleware]
        agent = agent_of(client, None)
        session = agent.create_session()
        for k in range(10):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
        asked = [r for r in client.requests if "ummar" in r[-1].text and CODEC.summary_text(r[-1]) is None]
        assert len(client.requests) == 10 + len(asked) and len(asked) == runtime.counters.usage.calls >= 2
        turns = [r for r in client.requests if r not in asked]
        assert "It was long." in summaries(turns[-1])[0]
        assert len(middleware.sessions(session)) == 1
        assert runtime.counters.started == len(asked), "no lookahead was started for a lookahead"


# -- the package ---------------------------------------------------------------------------------------------------


def test_a_missing_framework_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; importing the package alone needs no framework."""
    import smoothctx_autogen

    for name in [n for n in sys.modules if n.startswith("smoothctx_autogen.agent_framework")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(smoothctx_autogen, "agent_framework", raising=False)
    monkeypatch.setitem(sys.modules, "agent_framework", None)
    with pytest.raises(ImportError, match=r"pip install 'smoothctx\[agent-framework\]'"):
        importlib.import_module("smoothctx_autogen.agent_framework")


def test_runtime_type_is_the_real_one() -> None:
    """(Guards the fakes above: nothing here stands in for the runtime.)"""
    assert Runtime.__module__ == "smoothctx.runtime"
