"""Promise 10: queue, sessions, receipts, artifacts, stores: everything is bounded, and full means a typed discard."""

from __future__ import annotations

from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    chat,
    coherent,
    make_policy,
    make_runtime,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, MemoryStore, Reason, Salvage
from smoothctx.conversation import MAX_RECEIPTS
from smoothctx.shelf import MAX_ARTIFACTS
from smoothctx.states import FINAL


@virtual
async def test_promise_10_a_full_queue_is_a_typed_discard() -> None:
    """One runs, one waits, the others are discarded as ``queue_full``; their turns go out raw and work later."""
    model, events = FakeSummarizer("hold"), Events()
    async with make_runtime(concurrency=1, max_pending=1, on_event=events) as runtime:
        sessions = [runtime.session(f"s{k}", policy=make_policy(model)) for k in range(5)]
        histories = [chat(12, size=55, first=100 * k) for k in range(5)]
        for session, messages in zip(sessions, histories, strict=True):
            assert same_objects(await session.commit(messages), messages)
            await settle()
        assert runtime.counters.started == 5
        assert runtime.counters.stale == {Reason.QUEUE_FULL: 3}
        assert {e.data["reason"] for e in events.of("lookahead.discarded")} == {"queue_full"}
        coherent(sessions[0], runtime, live=2)
        model.release.set()
        await settle(5)
        sessions[4].observe(histories[4])
        await settle(5)
        assert summaries(await sessions[4].commit(histories[4]))


@virtual
async def test_promise_10_a_lookahead_that_found_the_queue_full_is_not_the_live_one() -> None:
    """Discarded before ``observe`` returned: the session has no live handle, as ``observe`` says."""
    model = FakeSummarizer("hold")
    async with make_runtime(concurrency=1, max_pending=1) as runtime:
        sessions = [runtime.session(f"s{k}", policy=make_policy(model)) for k in range(3)]
        started = []
        for k, session in enumerate(sessions):
            started.append(session.observe(chat(12, size=55, first=100 * k)))
            await settle()
        assert [h is None for h in started] == [False, False, True]
        assert sessions[2].lookahead is None


@virtual
async def test_promise_10_no_more_model_calls_at_once_than_concurrency() -> None:
    """Twenty sessions reach their trigger together: three calls run at a time, and all of them are served."""
    model = FakeSummarizer(delay=1)
    async with make_runtime(concurrency=3) as runtime:
        policy = make_policy(model)
        for k in range(20):
            runtime.session(f"s{k}", policy=policy).observe(chat(12, size=55, first=100 * k))
        await settle(30)
        assert model.calls == 20 and model.most_running == 3


@virtual
async def test_promise_10_receipts_are_capped() -> None:
    """Going back and forth between two branches a thousand times and more: the last 1,000 receipts are kept."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(12, size=55)
        session.observe(messages)
        await settle(5)
        await session.commit(messages)
        first = session.receipts[0]
        for _ in range(MAX_RECEIPTS + 5):
            await session.commit(messages[:3])
            await session.commit(messages)
        assert runtime.counters.salvaged == MAX_RECEIPTS + 5
        assert len(session.receipts) == MAX_RECEIPTS == 1000
        assert first not in session.receipts


@virtual
async def test_promise_10_artifacts_are_bounded_in_number() -> None:
    """A session that is given another history every turn holds a bounded number of artifacts, the newest ones."""
    events, turns = Events(), MAX_ARTIFACTS + 20
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=0.1)))
        for k in range(turns):
            messages = chat(12, size=55, first=1000 * k)
            await session.commit(messages)
            await settle(1)
            assert summaries(await session.commit(messages))
            assert len(session.branches()) <= MAX_ARTIFACTS
        assert session.branches()[-1].in_view
        assert len(events.of("artifact.dropped")) == turns - MAX_ARTIFACTS
        assert {e.data["reason"] for e in events.of("artifact.dropped")} == {str(Reason.EVICTED)}


@virtual
async def test_promise_10_artifacts_are_bounded_in_bytes_and_age() -> None:
    """``Salvage(max_bytes=...)`` and ``Salvage(ttl=...)`` bound what dead branches leave; the view's own stays."""
    for discard, reason in ((Salvage(max_bytes=1000), "evicted"), (Salvage(ttl=5), "expired")):
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=0.1), discard=discard))
            for k in range(30):
                messages = chat(12, size=55, first=1000 * k)
                await session.commit(messages)
                await settle(1)
                assert summaries(await session.commit(messages))
            held = session.branches()
            assert 1 <= len(held) < 15 and held[-1].in_view
            if reason == "evicted":
                assert sum(b.tokens for b in held) * 4 <= 1000
            assert {e.data["reason"] for e in events.of("artifact.dropped")} == {reason}


@virtual
async def test_promise_10_explicit_handles_are_bounded() -> None:
    """A caller that schedules and never commits: the oldest handles are discarded as ``evicted``."""
    model = FakeSummarizer("hold")
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, window=40_000))
        handles = [session.schedule_transform("summarize", messages, target_segments=[0, 1]) for _ in range(200)]
        alive = [h for h in handles if h.state not in FINAL]
        assert MAX_ARTIFACTS <= len(alive) <= MAX_ARTIFACTS + 1
        assert alive == handles[-len(alive) :]
        assert {h.reason for h in handles[: -len(alive)]} == {Reason.EVICTED}
        coherent(session, runtime, live=len(alive))


@virtual
async def test_promise_10_a_bounded_store_stays_bounded_and_the_view_is_right() -> None:
    """A tiny store loses its oldest entries instead of growing; sessions that are open do not notice."""
    store = MemoryStore(max_entries=5, max_bytes=20_000, clock=lambda: 0.0)
    async with make_runtime(store=store) as runtime:
        policy = make_policy(FakeSummarizer(delay=0.1), model_id="m")
        for k in range(20):
            session = runtime.session(f"s{k}", policy=policy)
            messages = chat(12, size=55, first=1000 * k)
            await session.commit(messages)
            await settle(1)
            assert summaries(await session.commit(messages))
            await settle(1)
            assert 1 <= len(store) <= 5


@virtual
async def test_promise_10_sessions_are_bounded() -> None:
    """Beyond ``max_sessions`` the least recently used one is closed, its lookahead with a typed reason."""
    model = FakeSummarizer("hang")
    async with make_runtime(max_sessions=3) as runtime:
        policy = make_policy(model)
        first = runtime.session("s0", policy=policy)
        handle = first.observe(chat(12, size=55))
        assert handle is not None
        others = [runtime.session(f"s{k}", policy=policy) for k in range(1, 20)]
        assert sum(not s.closed for s in (first, *others)) == 3
        assert first.closed and handle.state is HandleState.DISCARDED and handle.reason is Reason.EVICTED
        await settle()
        assert model.running == 0
        assert await first.commit([H("a"), A("b"), H("c")]) == [H("a"), A("b"), H("c")]
