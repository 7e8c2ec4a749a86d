"""A lookahead that waits in the queue while its conversation goes on is cut anew before it begins: it costs nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers import A, Events, FakeSummarizer, H, Message, S, chat, make_policy, make_runtime, marks, settle, virtual
from smoothctx import HandleState, Policy, Reason, Runtime, Session, Summarize, segments


async def turns(session: Session, messages: list[Message], count: int, *, size: int = 55) -> None:
    """So many turns of a session, of 0.8 s each: nothing that hangs has lost its slot by the end of sixty."""
    for _ in range(count):
        k = len(messages)
        messages.append(H(f"<{k}> question", size=size))
        await session.commit(messages)
        messages.append(A(f"<{k + 1}> answer", size=size))
        session.observe(messages)
        await settle(0.8)


async def busy(runtime: Runtime, model: FakeSummarizer) -> None:
    """The runtime's only slot is taken, until ``model`` is released."""
    runtime.session("slow", policy=make_policy(model)).observe(chat(12, size=60, first=1000))
    await model.started.wait()


@pytest.mark.parametrize("overrun", ["fallback", "promote"])
@virtual
async def test_what_fallbacks_took_is_not_summarised_afterwards(overrun: str) -> None:
    """It is dropped in the queue, not after it was paid for; the one that runs at last is of the view as it is then."""
    slow, model, events = FakeSummarizer("hold"), FakeSummarizer(), Events()
    options: dict[str, Any] = {"overrun": overrun, "max_wait": 5}
    async with make_runtime(on_event=events, concurrency=1) as runtime:
        await busy(runtime, slow)
        if overrun == "promote":  # which has room for one beside it: that one is taken as well
            stuck = runtime.session("stuck", policy=make_policy(slow))
            handle = stuck.observe(chat(12, size=60, first=2000))
            assert handle is not None
            handle.promote()
        session, messages = runtime.session("s", policy=make_policy(model, **options)), []
        await turns(session, messages, 60)
        fallbacks = [e for e in events.of("fallback.applied") if e.session == "s"]
        waited = [r.waited_s for r in session.receipts if r.waited_s]
        assert len(fallbacks) > 4 and model.calls == 0
        assert waited == ([] if overrun == "fallback" else [pytest.approx(5)]), "in vain once, not for each anew"
        while session.lookahead is None:
            await turns(session, messages, 1)
        covers = session.lookahead.run
        assert covers.end > fallbacks[-1].data["end"]
        slow.release.set()
        await turns(session, messages, 3)
        assert model.calls == 1 and marks(model.inputs[0]) >= set(range(covers.start, covers.end))
        assert [r.how for r in session.receipts][-1] == "ready" and runtime.counters.wasted_tokens == 0


@virtual
async def test_what_the_tail_has_outgrown_in_the_queue_is_cut_anew_in_its_old_place() -> None:
    """Once, with a longer run; the time that the first one has waited counts for the second one."""
    slow, model, events = FakeSummarizer("hold"), FakeSummarizer(), Events()
    async with make_runtime(on_event=events, concurrency=1) as runtime:
        await busy(runtime, slow)
        policy = make_policy(model, trigger=("fraction", 0.4), land_at=("fraction", 0.3), hard_limit=("fraction", 0.95))
        session, messages = runtime.session("s", policy=policy), []
        while session.lookahead is None:
            await turns(session, messages, 1)
        first = session.lookahead
        while session.lookahead is first:
            await turns(session, messages, 1)
        second = session.lookahead
        assert second is not None and second.run.end > first.run.end and second.state is HandleState.PENDING
        assert (first.state, first.reason) == (HandleState.DISCARDED, Reason.SUPERSEDED)
        assert second.flight.work is not None and second.flight.work.waited_s >= 1
        assert session.branch.fits(policy)
        while session.branch.tokens < 1800:
            await turns(session, messages, 1)
            assert session.lookahead is second, "once in a row"
        other = runtime.session("other", policy=make_policy(model))
        later = other.observe(chat(12, size=60, first=3000))
        slow.release.set()
        await settle(5)
        assert marks(model.inputs[0]) == set(range(second.run.start, second.run.end)), "it came first"
        assert later is not None and model.calls == 2


@virtual
async def test_what_has_begun_is_not_cut_anew() -> None:
    """It is paid for already: it goes on, and its result is dropped or used as ever."""
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=make_policy(model, overrun="fallback")), []
        while not model.calls:
            await turns(session, messages, 1)
        handle = session.lookahead
        assert handle is not None
        while not session.receipts:
            await turns(session, messages, 1)
            assert session.lookahead is handle and handle.state is HandleState.RUNNING
        await turns(session, messages, 2)
        assert session.lookahead is handle and model.calls == 1
        model.release.set()


@virtual
async def test_a_lookahead_of_another_session_goes_on_when_this_ones_is_cut_anew() -> None:
    """Two sessions share one that waits: only the one that has gone on needs another."""
    slow, model = FakeSummarizer("hold"), FakeSummarizer()
    async with make_runtime(concurrency=1) as runtime:
        await busy(runtime, slow)
        policy = make_policy(model, overrun="fallback", model_id="m")
        session, messages = runtime.session("s", policy=policy), []
        while session.lookahead is None:
            await turns(session, messages, 1)
        other = runtime.session("other", policy=policy)
        run = session.lookahead.run
        same = [k for k, segment in enumerate(segments(messages)) if segment.end <= run.end]
        theirs = other.schedule_transform(policy.transform, list(messages), target_segments=same)
        assert theirs.flight is session.lookahead.flight
        while session.lookahead is None or session.lookahead.flight is theirs.flight:
            await turns(session, messages, 1)
        assert session.receipts[-1].how == "fallback" and theirs.state is HandleState.PENDING
        slow.release.set()
        assert await theirs.wait(60) is HandleState.READY


@virtual
async def test_a_place_that_was_kept_is_given_up_after_a_while() -> None:
    """A lookahead was waited for in vain and dropped in the queue. An hour later a turn at the limit waits for the next
    one, which is ready at once, rather than falling back."""
    blocked = [True]

    async def quick(messages: Any, *, max_tokens: int | None = None) -> str:
        await asyncio.sleep(0.5)
        return "short summary"

    async def slow(messages: Any, *, max_tokens: int | None = None) -> str:
        await asyncio.sleep(1000 if blocked[0] else 2)
        return "slow summary"

    def policy(model: Any) -> Policy:
        transform = Summarize(model, max_tokens=100, keep=("messages", 2))
        return Policy(transform, context_window=6000, max_wait=3, timeout=2000)

    async with make_runtime(concurrency=1) as runtime:
        holders = []
        for k in range(2):  # other tenants hold every place
            other = runtime.session(f"b{k}", tenant=f"b{k}", policy=policy(slow))
            history = [S("b"), *[m for _ in range(6) for m in (H("x" * 400), A("x" * 400))]]
            await other.commit(history)
            holders.append(other.schedule_transform("summarize", history, target_segments=range(1, 5)))
            holders[-1].promote()
        session, messages = runtime.session("a", policy=policy(quick)), [S("You are A")]

        async def turn(size: int) -> None:
            messages.append(H("word " * size))
            await session.commit(messages)
            await asyncio.sleep(1)
            messages.append(A("ok"))
            session.observe(messages)
            await asyncio.sleep(1)

        while not session.receipts:
            await turn(300)
        assert session.receipts[0].how == "fallback"
        blocked[0] = False
        for holder in holders:
            holder.discard("not_needed")
        await asyncio.sleep(3600)
        for _ in range(3):
            await turn(60)
        before = len(session.receipts)
        await turn(3000)
        assert [r.how for r in list(session.receipts)[before:]] == ["promoted"]
