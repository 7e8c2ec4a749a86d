"""Promise 15: numbers are true. Everything that was started is accounted for, waste is counted once, hits are
claimed only where the server reported them."""

from __future__ import annotations

from collections import Counter

import pytest

from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    chat,
    coherent,
    make_policy,
    make_runtime,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, KeepRecent, Locality, Policy, Reason, Rewrite, TransformRequest, Usage

PAID = Usage(input_tokens=100, output_tokens=20, calls=1)


def paid(mode: str = "answer", **options: object) -> FakeSummarizer:
    """A model that reports what its calls cost."""
    model = FakeSummarizer(mode, **options)  # type: ignore[arg-type]
    model.usage = PAID
    return model


@virtual
async def test_promise_15_what_was_started_is_committed_stale_failed_or_alive() -> None:
    """Many sessions with every kind of end: at each point the counters add up, by state and by reason."""
    events = Events()
    modes = ["answer", "fail", "empty", "garbage", "hang", "cancel", "long"]
    async with make_runtime(on_event=events, concurrency=3, max_pending=4) as runtime:
        sessions = [
            runtime.session(f"s{k}", policy=make_policy(FakeSummarizer(modes[k % len(modes)]), overrun="raw"))
            for k in range(14)
        ]
        for step in range(12):
            for k, session in enumerate(sessions):
                messages = chat(9 + step, size=60, first=1000 * k + 100 * (step == 7))
                await session.commit(messages)
                session.observe(messages)
                live = {h.id for s in sessions for h in [s.lookahead] if h is not None and not is_final(h.state)}
                coherent(session, runtime, live=len(live))
            await settle(0.7)
            if step == 9:
                await sessions[4].close()
    c = runtime.counters
    assert c.started == c.committed + c.stale_total + c.failed
    assert c.committed and c.failed and len(c.stale) >= 3
    names = Counter(events.names())
    assert names["lookahead.started"] == c.started
    assert names["lookahead.committed"] == c.committed
    assert names["lookahead.failed"] == c.failed
    assert Counter(e.data["reason"] for e in events.of("lookahead.discarded")) == Counter(c.stale)


def is_final(state: HandleState) -> bool:
    """Has a handle of this state ended for good?"""
    return state in (HandleState.COMMITTED, HandleState.DISCARDED, HandleState.FAILED)


@virtual
async def test_promise_15_a_commit_wastes_nothing_and_its_receipt_has_the_cost() -> None:
    """A summary that is used is paid for, and not wasted."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(paid()))
        session.observe(messages)
        await settle(5)
        view = await session.commit(messages)
        (receipt,) = session.receipts
        assert runtime.counters.usage == receipt.usage == PAID
        assert runtime.counters.wasted_tokens == 0
        assert receipt.tokens_after == session.branch.tokens < receipt.tokens_before
        assert receipt.messages_replaced == len(messages) - (len(view) - 1)


@virtual
async def test_promise_15_waste_is_counted_once_per_call() -> None:
    """Two sessions share a call and both drop it: 120 tokens wasted, not 240; if one commits, none are."""
    for commit, wasted in ((False, 120), (True, 0)):
        messages, model = chat(12, size=55), paid()
        async with make_runtime() as runtime:
            policy = make_policy(model, model_id="m")
            sessions = [runtime.session(name, policy=policy) for name in "ab"]
            handles = [s.observe(messages) for s in sessions]
            await settle(5)
            assert model.calls == 1
            if commit:
                await sessions[0].commit(messages)
            for handle in handles:
                assert handle is not None
                handle.discard()
                handle.discard()
            assert runtime.counters.wasted_tokens == wasted
            coherent(sessions[0], runtime)
        assert runtime.counters.wasted_tokens == wasted
        assert runtime.counters.usage == PAID


@virtual
async def test_promise_15_a_dropped_result_that_is_used_after_all_was_not_wasted() -> None:
    """A look at an earlier point of the conversation drops what was prepared, and coming back finds it again: as long
    as nobody uses it, it is waste, once; when it goes in, its receipt has the cost."""
    messages, model = chat(12, size=55), paid()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, overrun="raw"))
        counters = runtime.counters
        await session.commit(messages)
        session.observe(messages)
        await settle(10)
        for _ in range(2):
            await session.commit([*messages[:10], H("another question")])
            assert counters.wasted_tokens == PAID.total_tokens
            await session.commit(messages)
        session.observe(messages)
        await settle(5)
        assert summaries(await session.commit([*messages, A("x"), H("y")]))
        (receipt,) = session.receipts
        assert (receipt.usage, counters.usage, model.calls) == (PAID, PAID, 1)
        assert counters.wasted_tokens == 0 and counters.stale == {"branch_diverged": 2}
        coherent(session, runtime)
    assert counters.wasted_tokens == 0


@pytest.mark.parametrize("when", ["before", "after"])
@virtual
async def test_promise_15_what_a_fork_uses_is_not_wasted_by_its_parent(when: str) -> None:
    """The parent drops its result, before or after the fork commits the same one; the fork's receipt has the cost."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        parent = runtime.session("s", policy=make_policy(paid(), overrun="raw"))
        parent.observe(messages)
        await settle(10)
        fork = parent.fork("t")
        if when == "before":
            await parent.close()
            assert runtime.counters.wasted_tokens == PAID.total_tokens
        fork.observe(messages)
        assert summaries(await fork.commit([*messages, A("x"), H("y")]))
        await parent.close()
        assert [r.usage for r in fork.receipts] == [PAID] and runtime.counters.wasted_tokens == 0
    assert runtime.counters.wasted_tokens == 0 and runtime.counters.usage == PAID


@virtual
async def test_promise_15_a_result_that_a_validator_rejects_is_waste() -> None:
    """It was paid for: usage, waste and a usage event, each once, and the lookahead counts as failed."""
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(paid(), validators=[lambda *_: False]))
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.FAILED and handle.reason is Reason.INVALID_OUTPUT
        assert runtime.counters.usage == PAID
        assert runtime.counters.wasted_tokens == 120
        assert [e.data["usage"] for e in events.of("usage")] == [PAID]
        assert runtime.counters.failed == 1
        coherent(session, runtime)
    assert runtime.counters.wasted_tokens == 120


class Dies:
    """A transform that pays for one call and fails in the next one."""

    name = "dies"
    locality = Locality.PREFIX
    fingerprint = None
    keep = ("messages", 4)

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Report one call's usage, then fail."""
        assert request.on_usage is not None
        request.on_usage(PAID)
        raise ValueError("the second call failed")


@virtual
async def test_promise_15_a_failed_job_reports_what_it_spent() -> None:
    """The calls that came through before the failure are in the usage event, the counters and the waste."""
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        policy = Policy(Dies(), context_window=2000, fallback=KeepRecent(("messages", 4)))
        session = runtime.session("s", policy=policy)
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.FAILED
        told = events.of("usage")
        assert len(told) == 1
        spent = told[0].data["usage"]
        assert spent.calls >= 1 and spent.total_tokens == 120 * spent.calls
        assert runtime.counters.usage == spent
        assert runtime.counters.wasted_tokens == spent.total_tokens


@pytest.mark.parametrize(("reported", "claimed"), [(None, None), (0, 0), (64, 64)])
@virtual
async def test_promise_15_cached_tokens_are_what_the_engine_reported(reported: int | None, claimed: int | None) -> None:
    """Not reported is ``None``, never 0 and never a guess; a committed view is not called warm without an engine."""
    model = FakeSummarizer()
    model.usage = Usage(input_tokens=100, output_tokens=20, calls=1, cached_tokens=reported)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        assert runtime.counters.usage.cached_tokens is None
        session = runtime.session("s", policy=make_policy(model))
        session.observe(messages)
        await settle(5)
        await session.commit(messages)
        assert session.receipts[0].usage.cached_tokens == claimed
        assert runtime.counters.usage.cached_tokens == claimed
        assert session.receipts[0].warm is False
        assert runtime.counters.preload_usage == Usage()


@virtual
async def test_promise_15_usage_that_was_not_reported_is_marked_as_estimated() -> None:
    """A model that gives a text only: the tokens are an estimate and say so."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        session.observe(messages)
        await settle(5)
        usage = runtime.counters.usage
        assert usage.estimated and usage.calls == 1 and usage.total_tokens > 0 and usage.cached_tokens is None
        assert not PAID.estimated


@virtual
async def test_promise_15_a_call_that_was_cancelled_is_stale_by_its_own_reason() -> None:
    """The history changed under it: one start, one discard for a diverged branch, no commit, no failure."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(12, size=55)
        session.observe(messages)
        await settle(1)
        await session.commit([messages[0], H("another question")])
        c = runtime.counters
        assert (c.started, c.committed, c.failed, c.stale) == (1, 0, 0, {"branch_diverged": 1})
