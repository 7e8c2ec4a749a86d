"""Promotion ends with the wait: what no turn waits for any more stands before nobody's work, however the wait ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from block_fakes import block_policy
from helpers import Events, FakeSummarizer, chat, make_policy, make_runtime, now, settle, virtual
from smoothctx import HandleState, LookaheadHandle, Reason, Runtime, Session
from smoothctx.pool import TaskPool, Work
from smoothctx.testing import FakeEngine
from virtual import run_virtual

LIMIT = 20  #: turns with which a session of ``make_policy`` stands at its hard limit


def work_of(handle: LookaheadHandle | None) -> Work:
    assert handle is not None and handle.flight.work is not None
    return handle.flight.work


async def at_limit(sessions: list[Session], gone: str = "waited") -> None:
    """A turn of each session at the hard limit, all at the same time; 5 s later they are gone."""
    async with asyncio.TaskGroup() as group:
        turns = [group.create_task(s.commit(chat(LIMIT, size=60, first=100 * k))) for k, s in enumerate(sessions)]
        if gone == "cancelled":
            await settle(4.9)
            for turn in turns:
                turn.cancel()


@pytest.mark.parametrize("gone", ["waited", "cancelled"])
@virtual
async def test_works_whose_turns_have_gone_on_starve_no_other_tenant(gone: str) -> None:
    """Sixty turns of one tenant waited in vain, or were cancelled. Then nobody waits: the other tenant's lookahead is
    the next, though the works of the cancelled ones still stand in the queue."""
    model = FakeSummarizer(delay=40)
    async with make_runtime(concurrency=2) as runtime:
        sessions = [runtime.session(f"a{k}", tenant="A", policy=make_policy(model, max_wait=5)) for k in range(60)]
        await at_limit(sessions, gone)
        assert now() == pytest.approx(5, abs=0.2)
        queued = [s for s in sessions if s.lookahead is not None and s.lookahead.state is HandleState.PENDING]
        assert len(queued) == (0 if gone == "waited" else 58)
        assert model.running == 2 and not any(s.urgent() for s in sessions)
        other = runtime.session("b", tenant="B", policy=make_policy(model))
        handle = other.observe(chat(12, size=60))
        assert handle is not None
        await handle.wait(2 * 40 + 5)
        assert handle.state is HandleState.READY, "after one summary, of those that ran already"


@pytest.mark.parametrize("gone", ["waited", "cancelled"])
@pytest.mark.parametrize("concurrency", [1, 2, 4])
@virtual
async def test_sub_agents_whose_turns_have_gone_on_leave_room_for_their_parent(concurrency: int, gone: str) -> None:
    """Thirty of them stood at their limits: the parent's lookahead is done after one of theirs, and its own time."""
    model = FakeSummarizer(delay=15)
    async with make_runtime(concurrency=concurrency) as runtime:
        policy = make_policy(model, max_wait=5)
        parent = runtime.session("p", policy=policy)
        children = [runtime.session(f"k{k}", policy=policy, parent=parent) for k in range(30)]
        await at_limit(children, gone)
        began = now()
        handle = parent.observe(chat(12, size=60))
        assert handle is not None
        await handle.wait(60)
        assert handle.state is HandleState.READY and now() - began <= 30


@pytest.mark.parametrize("how", ["result", "time", "cancelled", "closed", "discarded"])
@virtual
async def test_a_wait_that_ends_takes_its_promotion_back(how: str) -> None:
    """By its result, its time, a cancelled turn, a closed session or a dropped handle: for another session's handle of
    the same work that is a lookahead again, and other background work keeps out of nobody's way."""
    model, events, engine = FakeSummarizer(delay=8), Events(), FakeEngine()
    policy = make_policy(model, max_wait=5.0 if how == "time" else 30.0, model_id="m")
    async with make_runtime(on_event=events) as runtime, asyncio.TaskGroup() as group:
        session, other = (runtime.session(name, policy=policy, engine=engine) for name in ("s", "other"))
        turn = group.create_task(session.commit(chat(LIMIT, size=60)))
        await settle(1)
        mine = session.lookahead
        assert mine is not None and mine.promoted and work_of(mine).promoted
        theirs = other.schedule_transform(policy.transform, chat(LIMIT, size=60))
        work, foreground = work_of(theirs), runtime.foreground(engine)
        assert theirs.flight is mine.flight and foreground.busy, "one work for both"
        if how == "cancelled":
            turn.cancel()
        elif how == "closed":
            await session.close()
        elif how == "discarded":
            mine.discard()
        await settle({"result": 8, "time": 5}.get(how, 0))
        assert turn.done() and not mine.promoted and not work.promoted and not theirs.promoted
        session.turn_over()
        assert not foreground.seen().in_flight
        assert await theirs.wait(60) is HandleState.READY and model.calls == 1
        assert len(events.of("lookahead.promoted")) == 1
        await other.close()


@virtual
async def test_a_work_is_promoted_while_any_turn_waits_for_it() -> None:
    """Two sessions share one: the first one's turn goes on after 5 s, the second one's waits for the result."""
    model = FakeSummarizer(delay=20)
    async with make_runtime() as runtime, asyncio.TaskGroup() as group:
        first = runtime.session("first", policy=make_policy(model, max_wait=5, model_id="m"))
        second = runtime.session("second", policy=make_policy(model, max_wait=30, model_id="m"))
        group.create_task(first.commit(chat(LIMIT, size=60)))
        await settle(1)
        turn = group.create_task(second.commit(chat(LIMIT, size=60)))
        await settle(5)
        work = work_of(second.lookahead)
        assert work is work_of(first.lookahead) and not turn.done()
        assert first.receipts[-1].how == "fallback" and not first.urgent()
        assert second.urgent() and work.promoted
        await turn
        assert second.receipts[-1].how == "promoted" and not work.promoted and model.calls == 1


@pytest.mark.parametrize("when", ["before", "while", "after"])
@virtual
async def test_what_the_caller_has_promoted_stays_promoted(when: str) -> None:
    """Whether a turn waited for it as well or not; until the caller drops it."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime, asyncio.TaskGroup() as group:
        session = runtime.session("s", policy=make_policy(model, max_wait=5, model_id="m"))
        other = runtime.session("other", policy=make_policy(model, model_id="m"))
        if when == "before":
            handle = session.observe(chat(LIMIT, size=60))
            assert handle is not None
            handle.promote()
        turn = group.create_task(session.commit(chat(LIMIT, size=60)))
        await settle(1)
        handle = session.lookahead
        assert handle is not None
        if when == "while":
            handle.promote()
        await turn
        assert handle.promoted is (when != "after")
        handle.promote()
        theirs = other.schedule_transform(other.policy.transform, chat(LIMIT, size=60))
        assert handle.promoted and work_of(theirs).promoted and theirs.flight is handle.flight
        handle.discard()
        await settle()
        assert not work_of(theirs).promoted and theirs.state is HandleState.RUNNING


@virtual
async def test_every_block_that_a_turn_has_waited_for_is_demoted() -> None:
    """With a transform of blocks the turn waits for all that are under way."""
    events = Events()
    async with make_runtime(on_event=events, concurrency=1) as runtime, asyncio.TaskGroup() as group:
        policy = block_policy(FakeSummarizer("hang"), workers=3, max_wait=5, window=2000)
        session = runtime.session("s", policy=policy)
        turn = group.create_task(session.commit(chat(16, size=60)))
        await settle(1)
        handles = session.lookaheads
        assert len(handles) == 3 and all(work_of(h).promoted and h.promoted for h in handles)
        await turn
        assert not any(work_of(h).promoted or h.promoted for h in handles) and len(events.of("lookahead.promoted")) == 3


def test_the_wait_of_a_synchronous_turn_ends_like_any_other() -> None:
    """`commit_sync` from a thread: promoted while it waits, and no longer."""
    with Runtime.in_thread() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("hang"), max_wait=0.01))
        session.commit_sync(chat(LIMIT, size=60))
        work = work_of(session.lookahead)
        done = threading.Event()
        runtime.background("look", lambda: _set(done), session, lambda: None)
        assert done.wait(30) and not work.promoted and not session.urgent()


async def _set(done: threading.Event) -> None:
    done.set()


def test_a_promotion_that_comes_with_a_demotion_wins_in_either_order() -> None:
    """One turn goes on while another begins to wait, on two threads: what is true in the end counts."""

    async def main() -> None:
        pool = TaskPool(clock=now, concurrency=1)
        await pool.start()
        waiting = False

        async def run() -> None:
            await asyncio.sleep(60)

        work = Work(key="k", tenant="t", session="s", run=run, on_done=lambda _: None, wanted=lambda: waiting)
        pool.submit(work)
        pool.promote(work)
        pool.demote(work)
        assert not work.promoted
        waiting = True
        for act in (pool.promote, pool.demote):
            act(work)
            assert work.promoted
        waiting = False
        pool.demote(work)
        assert not work.promoted
        pool.cancel(work, Reason.CANCELLED)
        await pool.aclose()

    run_virtual(main)
