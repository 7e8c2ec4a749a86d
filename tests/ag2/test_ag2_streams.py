"""AG2 1.x: the middleware on real agents and streams, with fake models."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from ag2.compact import CompactTrigger, TailWindowCompact
from ag2.events import ModelMessage, ModelRequest, ModelResponse, TextInput, ToolResultsEvent, UsageEvent
from ag2.events.types import Usage as StreamUsage
from ag2.knowledge import MemoryKnowledgeStore
from streams import FILLER, Model, agent, converse, faults, seen, small, stream_of, summarised

from ag2 import KnowledgeConfig, MemoryStream, Middleware
from helpers import Events, FakeSummarizer, make_runtime, virtual
from smoothctx import ConfigurationError, Reason, Runtime
from smoothctx.usage import Usage
from smoothctx_autogen.ag2 import MAX_OPTIONS, MAX_SAVED, LookaheadMiddleware, forget, restore, sessions


@virtual
async def test_transform_turns_take_no_longer_than_others() -> None:
    """Thirty turns of 0.3 s with a summariser of 2 s: each takes 0.3 s, those that rewrite as well."""
    summariser, model = FakeSummarizer(delay=2.0), Model(delay=0.3)
    async with make_runtime() as runtime:
        reply = await converse(agent(model, runtime, small(summariser, trigger=("messages", 20))), 30)
        gaps = [round(b - a, 6) for a, b in zip(model.asked, model.asked[1:], strict=False)]
        assert gaps == [0.3] * 29
        (session,) = sessions(runtime, reply.context.stream)
        assert len(session.receipts) >= 2
        assert {(r.how, r.waited_s) for r in session.receipts} == {("ready", 0.0)}
    assert summarised(model.requests[-1]) and len(model.requests[-1]) < 40
    assert seen(model.requests[-1]) == set(range(59)), "the summary and the kept messages cover every message"
    assert not any(faults(r) for r in model.requests)


@pytest.mark.parametrize("mode", ["hang", "stubborn", "fail", "garbage", "empty", "long", "cancel"])
@virtual
async def test_whatever_the_summariser_does_no_turn_waits_or_fails(mode: str) -> None:
    """The turns take what the model takes, and the whole history is sent."""
    model = Model(delay=0.3)
    async with make_runtime() as runtime:
        await converse(agent(model, runtime, small(FakeSummarizer(mode))), 12)
        assert asyncio.get_running_loop().time() == pytest.approx(3.6)
    assert [len(r) for r in model.requests] == list(range(1, 24, 2))


@virtual
async def test_the_history_of_the_stream_is_never_changed() -> None:
    """With and without us the stream holds equal events, and what is not replaced is sent as the same objects."""
    records = []
    for on in (False, True):
        model = Model(lambda events: ["a", "b"] if isinstance(events[-1], ModelRequest) else f"answer {FILLER}")
        stream = MemoryStream()
        async with make_runtime() as runtime:
            one = agent(model, runtime if on else None, small(FakeSummarizer(delay=0.1)))
            await converse(one, 8, stream=stream, pause=1.0)
        history = [e for e in await stream.history.get_events() if not isinstance(e, UsageEvent)]
        assert any(map(summarised, model.requests)) is on
        held = set(map(id, history))
        for request in model.requests:
            ours = [e for e in request if id(e) not in held]
            assert len(ours) <= 1 and all(isinstance(e, ModelRequest) for e in ours)
        # What the tools of one turn send comes in the order in which the framework's threads get to it.
        ordered = [e for e in history if isinstance(e, (ModelRequest, ModelResponse, ToolResultsEvent))]
        records.append((ordered, Counter(type(e).__name__ for e in history)))
    assert records[0] == records[1]


@virtual
async def test_at_the_hard_limit_a_turn_waits_for_the_promoted_lookahead() -> None:
    """Bounded by ``max_wait``; the view that comes back fits."""
    model = Model(delay=0.1)
    policy = small(FakeSummarizer(delay=1.0), trigger=("messages", 8), hard_limit=("messages", 8), max_wait=5.0)
    async with make_runtime() as runtime:
        reply = await converse(agent(model, runtime, policy), 12)
        (session,) = sessions(runtime, reply.context.stream)
        assert {r.how for r in session.receipts} == {"promoted"}
        assert all(r.waited_s == pytest.approx(1.0, abs=0.2) for r in session.receipts)
    assert max(map(len, model.requests)) <= 8 and not any(faults(r) for r in model.requests)


@virtual
async def test_at_the_hard_limit_a_hanging_lookahead_gives_way_to_the_fallback() -> None:
    """After ``max_wait`` the oldest messages are left out of the view, and the view fits."""
    model = Model(delay=0.1)
    policy = small(FakeSummarizer("hang"), trigger=("messages", 8), hard_limit=("messages", 8), max_wait=2.0)
    async with make_runtime() as runtime:
        reply = await converse(agent(model, runtime, policy), 8)
        (session,) = sessions(runtime, reply.context.stream)
        assert session.receipts[0].how == "fallback" and session.receipts[0].waited_s == pytest.approx(2.0)
    assert max(map(len, model.requests)) <= 8 and not any(faults(r) for r in model.requests)


@virtual
async def test_a_cancelled_turn_neither_loses_nor_repeats_an_event() -> None:
    """Cancelled in the middle of a model call: it stays cancelled, and the next turn sends what the stream holds."""
    summariser, model, stream = FakeSummarizer(delay=0.5), Model(delay=0.3), MemoryStream()
    async with make_runtime() as runtime:
        one = agent(model, runtime, small(summariser, trigger=("messages", 10)))
        async with asyncio.TaskGroup() as group:
            run = group.create_task(converse(one, 100, stream=stream))
            await asyncio.sleep(0.3 * 6 + 0.1)
            run.cancel()
        assert run.cancelled()
        before = list(await stream.history.get_events())
        await asyncio.sleep(5)
        after = [e for e in await stream.history.get_events() if not isinstance(e, UsageEvent)]
        assert after == before and summariser.cancelled == 0, "the lookahead went on"
        await one.ask("<900> again", stream=stream)
        assert summarised(model.requests[-1])
        assert seen(model.requests[-1]) == {*range(13), 900}


@pytest.mark.parametrize("how", ["forget", "drop", "replace"])
@virtual
async def test_a_cleared_stream_is_cancelled_and_forgotten(how: str) -> None:
    """Told, or seen at the next turn: the lookahead ends, and nothing of it comes back."""
    summariser, model, stream = FakeSummarizer("hang"), Model(delay=0.1), stream_of(7)
    async with make_runtime() as runtime:
        one = agent(model, runtime, small(summariser))
        await converse(one, 6, stream=stream)
        (session,) = sessions(runtime, stream)
        handle = session.lookahead
        assert handle is not None and summariser.running == 1
        if how == "replace":
            await stream.history.replace([])
        else:
            await stream.history.storage.drop_history(stream.id)
        if how == "forget":
            await forget(runtime, stream)
            assert session.closed and sessions(runtime, stream) == []
        await one.ask("<500> hello", stream=stream)
        assert session.closed and handle.reason is Reason.SESSION_CLOSED
        await asyncio.sleep(0.1)
        assert summariser.cancelled == 1 and seen(model.requests[-1]) == {500}
        (new,) = sessions(runtime, stream.id)
        assert new.id == session.id


@virtual
async def test_streams_are_kept_apart() -> None:
    """Two conversations of one agent that open alike, at once: nobody reads the other's messages."""
    model, summariser = Model(delay=0.1), FakeSummarizer(delay=0.2)
    async with make_runtime() as runtime:
        one = agent(model, runtime, small(summariser))

        async def talk(base: int) -> None:
            stream = MemoryStream()
            await one.ask("hello", stream=stream)
            for turn in range(12):
                await one.ask(f"<{base + turn}> mine {FILLER}", stream=stream)

        async with asyncio.TaskGroup() as group:
            group.create_task(talk(1000))
            group.create_task(talk(2000))
    for request in model.requests:
        mine = {m for m in seen(request) if m >= 1000}
        assert not mine or {m // 1000 for m in mine} in ({1}, {2})
    assert any(map(summarised, model.requests))


@virtual
async def test_two_agents_on_one_stream() -> None:
    """Each has its policy and its session; both read the whole conversation."""
    models = [Model(delay=0.1), Model(delay=0.1)]
    stream = MemoryStream()
    async with make_runtime() as runtime:
        pair = [
            agent(models[0], runtime, small(FakeSummarizer(delay=0.1)), name="one"),
            agent(models[1], runtime, small(FakeSummarizer(delay=0.1), trigger=("messages", 9)), name="two"),
        ]
        for turn in range(10):
            for k, one in enumerate(pair):
                await one.ask(f"<{100 * k + turn}> question {FILLER}", stream=stream)
        assert len(sessions(runtime, stream)) == 2
    for model in models:
        assert any(map(summarised, model.requests)) and not any(faults(r) for r in model.requests)
        assert seen(model.requests[-1]) >= {*range(9), *range(100, 109)}


@virtual
async def test_tenants_have_sessions_of_their_own() -> None:
    """One stream, two tenants: neither finds the other's artifacts."""
    stream, summariser = MemoryStream(), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        policy = small(summariser)
        for tenant in ("a", "b"):
            await converse(agent(Model(), runtime, policy, tenant=tenant), 5, stream=stream, pause=0.5)
        assert {s.tenant for s in sessions(runtime, stream)} == {"a", "b"}


@virtual
async def test_an_edited_history_is_not_answered_with_a_stale_summary() -> None:
    """An event that the summary covers is replaced: the view shows what is there now."""
    model, stream = Model(delay=0.1), MemoryStream()
    async with make_runtime() as runtime:
        one = agent(model, runtime, small(FakeSummarizer(delay=0.1)))
        await converse(one, 8, stream=stream, pause=0.5)
        assert summarised(model.requests[-1])
        events = list(await stream.history.get_events())
        await stream.history.replace([events[0], events[1], ModelRequest([TextInput("<777> edited")]), *events[3:]])
        await one.ask("<900> and now?", stream=stream)
        assert 777 in seen(model.requests[-1]) and 2 not in seen(model.requests[-1])


@virtual
async def test_beside_the_compaction_of_the_framework() -> None:
    """AG2's own compaction replaces the history between turns: the view follows, and stays valid."""
    model, stream = Model(delay=0.1), MemoryStream()
    knowledge = KnowledgeConfig(
        store=MemoryKnowledgeStore(), compact=TailWindowCompact(6), compact_trigger=CompactTrigger(max_events=16)
    )
    async with make_runtime() as runtime:
        one = agent(model, runtime, small(FakeSummarizer(delay=0.1)), knowledge=knowledge)
        await converse(one, 25, stream=stream, pause=0.3)
    assert not any(faults(r) for r in model.requests) and any(map(summarised, model.requests))


@virtual
async def test_the_usage_of_background_calls_is_put_on_the_stream() -> None:
    """As the framework does it for its own compaction; once per call, and nothing that is only estimated."""
    summariser, model, stream = FakeSummarizer(delay=0.1), Model(), MemoryStream()
    summariser.usage = Usage(input_tokens=100, output_tokens=20, calls=1)
    async with make_runtime() as runtime:
        reply = await converse(agent(model, runtime, small(summariser)), 9, stream=stream, pause=1.0)
        report = await reply.usage()
        spent = [e for e in await stream.history.get_events() if isinstance(e, UsageEvent)]
        assert summariser.calls >= 2
        assert [(e.kind, e.usage.prompt_tokens, e.usage.completion_tokens) for e in spent] == [
            ("compaction", 100, 20)
        ] * summariser.calls
        assert report.total.total_tokens == 120 * summariser.calls
        assert runtime.counters.usage.total_tokens == 120 * summariser.calls
    for options, usage in (({"report_usage": False}, summariser.usage), ({}, None)):
        quiet, stream = FakeSummarizer(delay=0.1), MemoryStream()
        quiet.usage = usage
        async with make_runtime() as runtime:
            await converse(agent(Model(), runtime, small(quiet), **options), 6, stream=stream, pause=1.0)
            assert quiet.calls and not [e for e in await stream.history.get_events() if isinstance(e, UsageEvent)]


@virtual
async def test_background_calls_never_reach_the_stream() -> None:
    """A subscriber sees the events of the turns, and of the background nothing but what it cost."""
    stream, published = MemoryStream(), []
    stream.subscribe(lambda event: published.append(event), sync_to_thread=False)
    summariser = FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        await converse(agent(Model(), runtime, small(summariser)), 8, stream=stream, pause=1.0)
    assert summariser.calls and not any("The summary" in repr(e) for e in published)


@virtual
async def test_a_runtime_that_was_closed_leaves_the_history(caplog: pytest.LogCaptureFixture) -> None:
    """The agent goes on with its whole history; an event and a warning say why, once."""
    events, model = Events(), Model()
    runtime = make_runtime(on_event=events)
    async with runtime:
        one = agent(model, runtime, small(FakeSummarizer()))
    await converse(one, 5)
    assert [len(r) for r in model.requests] == [1, 3, 5, 7, 9]
    (event,) = events.of("turn.raw")
    assert event.data["where"] == "ag2" and "raw messages" in event.data["why"]
    assert [(r.name, r.levelname) for r in caplog.records] == [("smoothctx.ag2", "WARNING")]
    assert not events.of("error")


@virtual
async def test_an_error_of_the_model_is_the_turns_own() -> None:
    """It passes through unchanged, and the next turn works."""

    def answer(events: Any) -> str:
        if len(model.requests) == 3:
            raise RuntimeError("503")
        return f"answer {FILLER}"

    model, stream = Model(answer), MemoryStream()
    async with make_runtime() as runtime:
        one = agent(model, runtime, small(FakeSummarizer(delay=0.1)))
        await converse(one, 2, stream=stream)
        with pytest.raises(RuntimeError, match="503"):
            await one.ask("<50> fails", stream=stream)
        await one.ask("<51> works", stream=stream)
    assert seen(model.requests[-1]) >= {50, 51}


@virtual
async def test_what_is_kept_is_bounded() -> None:
    """A policy of its own for every request, and saved texts for streams that never go on."""
    async with make_runtime() as runtime:
        stream = MemoryStream()
        for k in range(MAX_OPTIONS + 5):
            await converse(agent(Model(), runtime, small(FakeSummarizer())), 1, stream=stream, first=k)
        for _ in range(MAX_SAVED + 5):
            restore(runtime, MemoryStream(), ["{}"])
        kept = vars(runtime)["_smoothctx_ag2"]
        assert (len(kept.lines), len(kept.saved)) == (MAX_OPTIONS, MAX_SAVED)


@pytest.mark.parametrize("change", ["runtime", "policy"])
async def test_wrong_values_are_named(change: str) -> None:
    """Configuration mistakes are raised in the caller's words."""
    async with Runtime() as runtime:
        given = {"runtime": runtime, "policy": small(FakeSummarizer()), change: "x"}
        one = agent(Model(), None, None, middleware=[Middleware(LookaheadMiddleware, **given)])
        with pytest.raises(ConfigurationError, match=f"^{change}="):
            await one.ask("hello")


def test_from_an_event_loop_per_request() -> None:
    """``asyncio.run`` for every question, with the runtime in a thread: nothing is bound to a loop that is gone."""
    from ag2.history import MemoryStorage

    storage, model = MemoryStorage(), Model()
    with Runtime.in_thread() as runtime:
        one = agent(model, runtime, small(FakeSummarizer(delay=0.0)))

        async def request(turn: int) -> None:
            stream = MemoryStream(storage, id=stream_of(3).id)
            await one.ask(f"<{2 * turn}> question {FILLER}", stream=stream)

        for turn in range(10):
            asyncio.run(request(turn))
            for session in sessions(runtime, stream_of(3)):
                if session.lookahead is not None:
                    session.lookahead.wait_sync(30)
        assert len(sessions(runtime, stream_of(3))) == 1
    assert any(map(summarised, model.requests)) and not any(faults(r) for r in model.requests)


@pytest.mark.parametrize(("provider", "prompt"), [("openai", 100), ("anthropic", 190)])
@virtual
async def test_what_the_calls_around_a_commit_cost_is_known(provider: str, prompt: int) -> None:
    """The usage of the agent's own calls stands in ``session.outcomes()``, the cached part included."""
    used = StreamUsage(prompt_tokens=100, completion_tokens=7, cache_read_input_tokens=90)
    model = Model(delay=0.3)
    model.answer = lambda events: ModelResponse(ModelMessage(f"answer {FILLER}"), usage=used, provider=provider)
    async with make_runtime() as runtime:
        reply = await converse(agent(model, runtime, small(FakeSummarizer(delay=0.1))), 12, pause=0.5)
        (session,) = sessions(runtime, reply.context.stream)
        calls = [c for o in session.outcomes() for c in (*o.before, *o.after)]
        assert len(calls) >= 10
        assert {c.usage for c in calls} == {Usage(input_tokens=prompt, output_tokens=7, cached_tokens=90, calls=1)}
        assert session.outcomes()[-1].uncached_first_tokens == prompt - 90


@virtual
async def test_calls_that_report_nothing_leave_the_cost_open() -> None:
    """Nothing is guessed."""
    async with make_runtime() as runtime:
        reply = await converse(agent(Model(), runtime, small(FakeSummarizer(delay=0.1))), 12, pause=0.5)
        (session,) = sessions(runtime, reply.context.stream)
        assert session.outcomes() and all(c.usage is None for o in session.outcomes() for c in o.after)
