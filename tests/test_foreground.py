"""The foreground: which turns are open, and who is told when that changes."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from helpers import FakeSummarizer, chat, make_policy, make_runtime, now, settle, virtual
from smoothctx.admission import RUN, Situation, admit
from smoothctx.demand import FEW
from smoothctx.foreground import CALL_S, Foreground
from smoothctx.testing import FakeEngine, Recorder


def fresh(lease_s: float = 120.0) -> Foreground:
    """On the running loop's clock."""
    return Foreground(asyncio.get_running_loop().time, lease_s=lease_s)


@virtual
async def test_a_turn_is_open_from_begin_to_end() -> None:
    """Busy while any is open; prefilling until its first token."""
    foreground = fresh()
    assert not foreground.busy
    foreground.begin("a")
    foreground.begin("b")
    assert foreground.busy
    assert foreground.prefilling
    foreground.first_token("a")
    foreground.first_token("never begun")
    assert foreground.prefilling
    foreground.first_token("b")
    assert not foreground.prefilling
    foreground.end("a")
    foreground.end("a")
    assert foreground.busy
    foreground.end("b")
    assert not foreground.busy


@virtual
async def test_promise_10_a_turn_that_never_ended_counts_for_its_lease_only() -> None:
    """A caller that died does not keep background work away for ever; waiters notice."""
    foreground = fresh(lease_s=30.0)
    foreground.begin("dead")
    await anyio.sleep(29)
    assert foreground.busy
    await foreground.wait_idle()
    assert now() == pytest.approx(30, abs=0.1)
    assert not foreground.busy


@virtual
async def test_promise_10_who_waits_is_woken_by_each_lease_that_runs_out() -> None:
    """Also by that of a turn which began while it waited already, and by no other's."""
    foreground = fresh(lease_s=30.0)
    foreground.begin("dead")
    async with anyio.create_task_group() as group:
        group.start_soon(foreground.wait_idle)
        await anyio.sleep(20)
        foreground.begin("dead too")
        foreground.begin("alive")
        await anyio.sleep(5)
        foreground.end("alive")
    assert now() == pytest.approx(50, abs=0.1)


@virtual
async def test_promise_11_a_turn_cancelled_at_the_hard_limit_is_over() -> None:
    """Nothing will observe it: what waits for idle time goes on as soon as the summary that it asked for is there."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=5)))
        foreground = runtime.foreground(None)
        with anyio.move_on_after(1) as scope:
            await session.commit(chat(20, size=100))
        assert scope.cancelled_caught
        await settle(10)
        assert not foreground.busy
        await session.commit(chat(20, size=100))
        assert foreground.busy, "the next turn counts as ever"


@pytest.mark.parametrize("end", ["close", "evicted", "runtime"])
@virtual
async def test_promise_10_a_session_that_ends_at_the_hard_limit_leaves_no_turn(end: str) -> None:
    """Closed, pushed out or shut down while its commit waits: no model call of its is due any more."""
    engine = FakeEngine()
    async with make_runtime(max_sessions=1) as runtime:
        policy = make_policy(FakeSummarizer("hang"))
        session = runtime.session("s", policy=policy, engine=engine)
        foreground = runtime.foreground(engine)
        async with anyio.create_task_group() as group:
            group.start_soon(session.commit, chat(20, size=100))
            await settle(1)
            assert session.lookahead is not None and session.lookahead.promoted, "the commit waits"
            if end == "close":
                await session.close()
            elif end == "evicted":
                runtime.session("other", policy=policy)
            else:
                await runtime.aclose()
        await settle(1)
        session.observe(chat(20, size=100))
        assert session.closed and not foreground.busy and not foreground.seen().in_flight


@virtual
async def test_a_call_counts_until_it_ends_however_long_it_takes() -> None:
    """Only turns have a lease that nobody renews: a call that we see in full is in flight for as long as it is."""
    engine = FakeEngine()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        foreground = runtime.foreground(engine)
        await session.commit(chat(3))
        async with session.foreground() as call:
            await anyio.sleep(600)
            assert foreground.prefilling and foreground.seen().in_flight == 1
            call.first_token()
            await anyio.sleep(600)
            assert foreground.busy and not foreground.prefilling
        assert not foreground.busy, "the turn's own lease is long over"


@virtual
async def test_promise_10_a_call_that_never_ends_does_not_count_for_ever() -> None:
    """Its caller may have gone with its event loop."""
    engine = FakeEngine()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        foreground = runtime.foreground(engine)
        with session.foreground_sync():
            await anyio.sleep(CALL_S - 1)
            assert foreground.busy
            await foreground.wait_idle()
            assert now() == pytest.approx(CALL_S, abs=0.1)


@virtual
async def test_a_turn_whose_call_begins_elsewhere_goes_on_for_a_while() -> None:
    """After ``observe(due_s=)``: until it is said to be over, and for so long at most."""
    engine, messages = FakeEngine(), chat(3)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        foreground = runtime.foreground(engine)
        await session.commit(messages)
        session.observe(messages, due_s=10.0)
        await anyio.sleep(9)
        assert foreground.prefilling
        session.turn_over()
        assert not foreground.busy
        session.observe(messages, due_s=10.0)
        await anyio.sleep(11)
        assert not foreground.busy
        session.observe(messages, due_s=10.0)
        session.observe(messages)
        assert not foreground.busy
        await session.close()
        session.observe(messages, due_s=10.0)
        assert not foreground.busy


@pytest.mark.parametrize(
    ("due_s", "lasts_s"),
    [(math.inf, CALL_S), (1e300, CALL_S), (10**400, CALL_S), (0, 0)],
    ids=["for ever", "long", "too long for a float", "not at all"],
)
@virtual
async def test_promise_10_a_turn_whose_call_begins_elsewhere_goes_on_for_an_hour_at_most(
    due_s: float, lasts_s: float
) -> None:
    """However long its caller would wait for the call: nobody may ever tell that none came."""
    engine, messages = FakeEngine(), chat(3)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        foreground = runtime.foreground(engine)
        await session.commit(messages)
        session.observe(messages, due_s=due_s)
        assert foreground.busy is (lasts_s > 0)
        await anyio.sleep(max(0, lasts_s - 1))
        assert foreground.busy is (lasts_s > 0)
        await anyio.sleep(2)
        assert not foreground.busy


@pytest.mark.parametrize("due_s", [math.nan, -1, "5", True, [5]])
@virtual
async def test_what_is_no_number_of_seconds_is_an_event_and_the_turn_goes_on_as_ever(due_s: Any) -> None:
    """It counts for a turn's lease, and the lookahead that is due starts all the same."""
    engine, messages, events = FakeEngine(), chat(16, size=100), Recorder()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        foreground = runtime.foreground(engine)
        assert session.observe(messages, due_s=due_s) is not None
        (error,) = events.of("error")
        assert f"due_s={due_s!r}" in error.data["error"] and error.data["where"] == "observe"
        await anyio.sleep(119)
        assert foreground.busy
        await anyio.sleep(2)
        assert not foreground.busy


@virtual
async def test_a_turn_may_begin_again_without_a_commit() -> None:
    """Its call is tried again, or goes on after a pause, with the view that it had: until it is over once more."""
    engine, messages = FakeEngine(), chat(3)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        foreground = runtime.foreground(engine)
        await session.commit(messages)
        session.observe(messages)
        for over in (lambda: session.observe(messages), session.turn_over):
            session.turn_begins()
            assert foreground.prefilling and foreground.seen().in_flight == 1
            over()
            assert not foreground.busy
        session.turn_begins()
        await session.close()
        session.turn_begins()
        assert not foreground.busy, "a session that is closed has no turn"


def test_promise_10_turns_that_nobody_ended_do_not_make_the_engine_look_crowded_later() -> None:
    """They count until their lease runs out, and for nothing afterwards: the next agent has the engine for itself."""
    time = [0.0]
    foreground = Foreground(lambda: time[0])
    foreground.begin("one", "first user")
    foreground.begin("two", "second user")
    time[0] = 1000.0
    foreground.begin("three", "third user")
    for _ in range(FEW):
        foreground.answered("three", 0.5, 500)
    time[0] += 0.5
    seen = foreground.seen()
    assert seen.in_flight == 1 and admit(Situation(seen=seen)) == RUN
    assert seen.busy.share == pytest.approx(0.05) and seen.busy.mean == pytest.approx(0.05)
    foreground.begin("four", "fourth user")
    for _ in range(FEW):
        foreground.answered("four", 2.0, 500)
    assert foreground.seen().slower, "the calls of the third user were alone, and so a measure"


def test_a_turn_that_is_ended_after_its_lease_was_over_with_the_lease() -> None:
    """Whoever ends it late, or looks late, learns how busy it was then."""
    time = [0.0]
    foreground = Foreground(lambda: time[0], lease_s=10.0)
    foreground.begin("late", "user")
    time[0] = 12.0
    foreground.end("late")
    assert foreground.seen().busy.share == pytest.approx(0.8)
    foreground.begin("dead", "user")
    foreground.begin("dead too", "other")
    time[0] = 26.0
    assert not foreground.busy and not foreground.serves("user")
    assert foreground.seen().busy.mean == pytest.approx(2 * 6.0 / 10.0)


@virtual
async def test_waiting_ends_when_the_foreground_changes() -> None:
    """``changed`` at the next change or its timeout; ``wait_idle`` when the last turn is over."""
    foreground = fresh()
    await foreground.changed(5)
    assert now() == 5
    foreground.begin("a")
    async with anyio.create_task_group() as group:
        group.start_soon(foreground.wait_idle)
        await anyio.sleep(1)
        foreground.end("a")
    assert now() == 6


@virtual
async def test_unless_cancels_the_call_as_soon_as_it_has_to_stop() -> None:
    """A background call is given up when a turn begins; one that ends first gives its result."""
    foreground = fresh()
    begun = 0

    async def call() -> str:
        nonlocal begun
        begun += 1
        await anyio.sleep(10)
        return "done"

    assert await foreground.unless(lambda: foreground.busy, call) == "done"
    async with anyio.create_task_group() as group:

        async def turn() -> None:
            await anyio.sleep(3)
            foreground.begin("a")

        group.start_soon(turn)
        start = now()
        assert await foreground.unless(lambda: foreground.busy, call) is None
        assert now() == start + 3
    assert await foreground.unless(lambda: foreground.busy, call) is None
    assert begun == 2


async def test_it_may_be_told_from_any_thread() -> None:
    """A synchronous caller in another thread ends the wait of the loop."""
    foreground = Foreground(asyncio.get_running_loop().time)
    foreground.begin("a")
    thread = threading.Thread(target=foreground.end, args=("a",))
    async with anyio.create_task_group() as group:
        group.start_soon(foreground.wait_idle)
        await anyio.lowlevel.checkpoint()
        thread.start()
    thread.join()
    assert not foreground.busy


@virtual
async def test_sessions_open_and_end_turns_by_themselves() -> None:
    """Commit opens a turn, observe ends it; ``foreground()`` says more exactly; close ends everything."""
    messages = chat(3)
    async with make_runtime() as runtime:
        foreground = runtime.foreground(None)
        session = runtime.session("s", policy=make_policy(lambda m, *, max_tokens=None: None))
        await session.commit(messages)
        assert foreground.prefilling
        async with session.foreground() as call:
            call.first_token()
            assert foreground.busy
            assert not foreground.prefilling
        session.observe(messages)
        assert not foreground.busy
        await session.commit(messages)
        await session.close()
        assert not foreground.busy
        await settle()
