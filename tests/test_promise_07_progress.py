"""Promise 7: progress. What does not shrink is not tried in a loop, and what keeps failing rests."""

from __future__ import annotations

import pytest

from block_fakes import block_policy
from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    Message,
    chat,
    coherent,
    make_policy,
    make_runtime,
    marks,
    now,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, Reason
from smoothctx.breaker import BreakerOpen


@virtual
async def test_promise_07_a_result_that_saves_too_little_is_dropped_once() -> None:
    """A summary as long as its source is discarded as ``not_smaller``; the same prefix is never asked for again."""
    model = FakeSummarizer(text="word " * 700)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_tokens=1024))
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.DISCARDED
        assert handle.reason is Reason.NOT_SMALLER
        for _ in range(10):
            assert session.observe(messages) is None
            assert same_objects(await session.commit(messages), messages)
            await settle(100)
        assert model.calls == 1
        assert runtime.counters.stale == {Reason.NOT_SMALLER: 1}
        coherent(session, runtime)


@virtual
async def test_promise_07_a_barren_prefix_is_tried_again_when_it_has_grown() -> None:
    """What did not shrink once is no verdict for ever: with clearly more to rewrite the model is asked again."""
    model = FakeSummarizer(text="word " * 700)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session(
            "s", policy=make_policy(model, max_tokens=1024, window=8000, trigger=("tokens", 1200))
        )
        session.observe(messages)
        await settle(5)
        assert model.calls == 1
        model.text = "short"
        messages += chat(1, size=55, first=12, system=False)
        assert session.observe(messages) is None
        messages += chat(11, size=55, first=13, system=False)
        assert session.observe(messages) is not None
        await settle(5)
        assert model.calls == 2
        assert summaries(await session.commit(messages))
        coherent(session, runtime)


@virtual
async def test_promise_07_with_nothing_new_to_rewrite_nothing_starts() -> None:
    """Above the trigger with only the kept tail behind the summary: no start, one event, no second one."""
    events, model = Events(), FakeSummarizer()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model))
        session.observe(messages)
        await settle(5)
        view = await session.commit(messages)
        messages += [A("<900> short"), H("<901> long", size=900)]
        for _ in range(10):
            assert same_objects((await session.commit(messages))[: len(view)], view)
            assert session.observe(messages) is None
            await settle(100)
        assert model.calls == 1
        assert runtime.counters.started == 1
        assert len(events.of("nothing_to_rewrite")) == 1


@virtual
async def test_promise_07_compaction_ends_even_when_no_summary_can_bring_the_view_down() -> None:
    """Every turn ends above the trigger (a huge newest message): the calls are bounded by what is new, not endless."""
    model = FakeSummarizer(delay=0.1)
    messages = chat(6, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=2, overrun="raw", min_savings=0.1))
        messages += [H("<100> huge", size=1600)]
        for _ in range(50):
            view = await session.commit(messages)
            session.observe(messages)
            await settle(10)
        assert marks(view) == marks(messages)
        assert 1 <= model.calls <= 2
        assert len(session.receipts) == model.calls
        coherent(session, runtime)


@virtual
async def test_promise_07_the_breaker_rests_a_failing_transform_and_lets_it_work_again() -> None:
    """While it rests the model is not asked and the turn goes out raw; after the cooldown it works as before."""
    model = FakeSummarizer("fail", delay=0.1)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        for _ in range(30):  # 3 failures in a row open the breaker for 60 s
            handle = session.observe(messages)
            if handle is not None:
                await handle.wait()
        asked = model.calls
        assert asked > 0
        model.mode = "answer"
        for _ in range(5):
            assert same_objects(await session.commit(messages), messages)
            handle = session.observe(messages)
            if handle is not None:
                assert await handle.wait() in (HandleState.FAILED, HandleState.DISCARDED)
        assert model.calls == asked
        await settle(61)
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.READY
        assert model.calls == asked + 1
        assert summaries(await session.commit(messages))
        coherent(session, runtime)


@virtual
async def test_promise_07_one_failing_transform_does_not_rest_another() -> None:
    """The breaker is per transform: a session with another model works on while the first one rests."""
    bad, good = FakeSummarizer("fail", delay=0.1), FakeSummarizer()
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        first = runtime.session("a", policy=make_policy(bad))
        second = runtime.session("b", policy=make_policy(good))
        for _ in range(10):
            handle = first.observe(messages)
            if handle is not None:
                await handle.wait()
        handle = second.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.READY
        assert good.calls == 1


@pytest.mark.parametrize("blocks", [False, True])
@virtual
async def test_promise_07_while_the_breaker_rests_nothing_is_started_to_fail_at_once(blocks: bool) -> None:
    """Not at any boundary of any session, at the hard limit neither. Each says so once; then one of them tries it
    again, the others wait for what comes of that, and with a failure all of them rest again."""
    model, events = FakeSummarizer("fail", delay=0.1), Events()
    async with make_runtime(on_event=events) as runtime:
        policy = block_policy(model, window=2000, workers=1) if blocks else make_policy(model)
        sessions = [runtime.session(f"s{k}", policy=policy) for k in range(3)]
        histories: list[list[Message]] = [[], [], []]

        async def until(end: float) -> None:
            while now() < end:
                for session, messages in zip(sessions, histories, strict=True):
                    messages.append(H(f"{session.id} question {len(messages)}", size=55))
                    await session.commit(messages)
                    messages.append(A("answer", size=55))
                    session.observe(messages)
                    await settle(0.25)

        def count(name: str, since: float, before: float) -> int:
            return sum(since < e.time < before for e in events.of(name))

        while len(resting := events.of("lookahead.resting")) < 3:
            await until(now() + 1)
            assert now() < 60
        over = resting[0].time + resting[0].data["rests_s"]
        model.delay = 5.0
        await until(over + 4)
        assert {e.session for e in resting} == {"s0", "s1", "s2"} and resting[-1].time < over - 40
        assert count("fallback.applied", resting[-1].time, over) >= 3, "turns went on, at the limit too"
        for name in ("lookahead.started", "lookahead.failed"):
            assert count(name, resting[-1].time, over) == 0
        assert count("lookahead.started", over, over + 4) == 1, "one of them tries it again"
        await until(over + 60)
        assert count("lookahead.failed", over, over + 60) == 1, "and with it they all rest again"
        assert len(events.of("lookahead.resting")) <= 6
        model.mode = "answer"
        await until(over + 90)
        assert events.of("lookahead.ready")


@virtual
async def test_promise_07_what_the_caller_schedules_itself_fails_while_the_breaker_rests() -> None:
    """With a handle that says why and for how long; the policy's own lookaheads are not even started."""
    model = FakeSummarizer("fail", delay=0.1)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        while (handle := session.observe(messages)) is not None:
            await handle.wait()
        asked = model.calls
        explicit = session.schedule_transform("summarize", messages)
        assert await explicit.wait(30) is HandleState.FAILED and model.calls == asked
        assert isinstance(explicit.error, BreakerOpen) and 0 < explicit.error.retry_in_s <= 60
