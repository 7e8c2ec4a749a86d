"""Promotions that come and go, shares of sub-agents, and who makes room: the scheduler's step between tenants."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, strategies as st

from smoothctx.scheduler import (
    Cancel,
    Demote,
    Drop,
    Effect,
    Event,
    Finish,
    Idle,
    Job,
    Lane,
    Promote,
    Start,
    State,
    Stop,
    Submit,
    step,
)
from smoothctx.states import Reason


def submit(state: State, job_id: int, *, now: float = 0.0, tenant: str = "a", **fields: object) -> list[Effect]:
    return step(state, Submit(now=now, job=Job(id=job_id, tenant=tenant, **fields)))  # type: ignore[arg-type]


def finish(state: State, job_id: int, now: float = 0.0) -> list[Effect]:
    return step(state, Finish(now=now, job_id=job_id))


def order_of(state: State, now: float = 0.0) -> list[int]:
    """Finish whatever runs, one after the other, and return the order in which the others started."""
    order: list[int] = []
    while state.running:
        order += [e.job_id for e in finish(state, next(iter(state.running)), now) if isinstance(e, Start)]
    return order


def test_a_demoted_job_is_back_in_its_old_place() -> None:
    """As if it had never been promoted; and a later promotion goes behind those that came meanwhile."""
    state = State(concurrency=1, max_pending=9)
    for job_id in (1, 2, 3, 4, 5):
        submit(state, job_id)
    step(state, Promote(now=0.0, job_id=1))  # it runs already: no other one may start beside it
    for job_id in (4, 5):
        step(state, Promote(now=0.0, job_id=job_id))
    for job_id in (4, 4, 99):
        assert step(state, Demote(now=0.0, job_id=job_id)) == []
    assert order_of(state) == [5, 2, 3, 4]
    submit(state, 6)
    for job_id, lane in ((7, Lane.PROMOTED), (8, Lane.LOOKAHEAD), (9, Lane.LOOKAHEAD)):
        submit(state, job_id, lane=lane)
    step(state, Demote(now=0.0, job_id=7))
    step(state, Promote(now=0.0, job_id=9))
    step(state, Promote(now=0.0, job_id=7))
    assert order_of(state)[-1] == 8


def test_promise_10_promotions_that_come_and_go_start_no_more_than_twice_as_many_jobs() -> None:
    """What was started beside the others goes on when no turn waits for it, and the next one has to wait for it."""
    state = State(concurrency=2, max_pending=99)
    for job_id in range(10):
        submit(state, job_id)
    started = []
    for job_id in range(2, 9):
        started += [e for e in step(state, Promote(now=1.0, job_id=job_id)) if isinstance(e, Start)]
        step(state, Demote(now=1.0, job_id=job_id))
    assert started == [Start(2), Start(3)] and len(state.running) == 4
    step(state, Promote(now=1.0, job_id=8))
    assert finish(state, 0) == [Start(8)]
    assert finish(state, 1) == finish(state, 2) == []
    assert finish(state, 3) == [Start(4)], "one promoted and one lookahead"


def test_a_deferred_job_that_is_demoted_is_not_deferred_again() -> None:
    """Promotion ended its deferral; admission is asked when it starts."""
    state = State(concurrency=1, max_pending=9)
    submit(state, 1)
    submit(state, 2)
    step(state, Promote(now=0.0, job_id=1))
    step(state, Promote(now=0.0, job_id=2))
    step(state, Demote(now=0.0, job_id=2))
    assert state.queue[2].lane is Lane.LOOKAHEAD and finish(state, 1) == [Start(2)]


def test_promoted_jobs_are_fair_between_tenants() -> None:
    """Sixty turns of one tenant wait: the turn of another one does not wait behind them all."""
    state = State(concurrency=1, max_pending=99)
    for job_id in range(60):
        submit(state, job_id, tenant="flood", lane=Lane.PROMOTED)
    submit(state, 100, tenant="quiet", lane=Lane.PROMOTED, now=1.0)
    submit(state, 101, tenant="quiet", now=1.0)
    assert finish(state, 0, now=2.0) == [Start(100)]
    assert finish(state, 100, now=2.0) == [Start(1)], "a lookahead waits for what turns wait for"


@given(
    concurrency=st.integers(1, 3),
    flood=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=25),
    promotions=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60), st.integers(0, 24)), max_size=25),
    quiet_at=st.integers(0, 100),
)
def test_a_flood_of_promotions_that_end_delays_another_tenant_by_two_jobs_at_most(
    concurrency: int, flood: list[tuple[int, int]], promotions: list[tuple[int, int, int]], quiet_at: int
) -> None:
    """However many turns of one tenant have waited: once they wait no longer, the other tenant's only job starts when
    the first slot is free, or the second, where the flood's own jobs take longer than ``starvation_s``."""
    state = State(concurrency=concurrency, max_pending=99)
    happens: list[Event] = [Submit(now=at, job=Job(id=job_id, tenant="flood")) for job_id, (at, _) in enumerate(flood)]
    for at, lasts, job_id in promotions:
        happens += [Promote(now=at, job_id=job_id), Demote(now=at + lasts, job_id=job_id)]
    happens.append(Submit(now=quiet_at, job=Job(id=1000, tenant="quiet")))
    queue = [(event.now, number, event) for number, event in enumerate(happens)]
    heapq.heapify(queue)
    started: dict[int, float] = {}
    while queue:
        now, _, event = heapq.heappop(queue)
        for effect in step(state, event):
            if isinstance(effect, Start):
                started[effect.job_id] = now
                over = now + (1 if effect.job_id == 1000 else flood[effect.job_id][1])
                heapq.heappush(queue, (over, len(happens) + len(started), Finish(now=over, job_id=effect.job_id)))
        assert len(state.running) <= 2 * concurrency
    ended = max((at + lasts for at, lasts, _ in promotions), default=0)
    longest = max(seconds for _, seconds in flood)
    assert len(started) == len(flood) + 1
    assert started[1000] <= max(quiet_at, ended) + longest * (1 if longest < state.starvation_s else 2)


@pytest.mark.parametrize("waited", [0.0, 100.0])
def test_with_one_slot_sub_agents_and_others_take_turns(waited: float) -> None:
    """Thirty sub-agents came first, and wait too long already: every second start is the parent's all the same."""
    state = State(concurrency=1, max_pending=99)
    for job_id in range(30):
        submit(state, job_id, child=True)
    for job_id in (100, 101, 102):
        submit(state, job_id, now=1.0)
    order = order_of(state, now=1.0 + waited)
    assert order[:6] == [100, 1, 101, 2, 102, 3] and len(order) == 32


def test_with_one_slot_a_stream_of_the_parents_jobs_does_not_starve_a_sub_agent() -> None:
    """However urgent they are: one of them goes before a sub-agent that waits too long."""
    state = State(concurrency=1, max_pending=99)
    submit(state, 0)
    submit(state, 1, child=True)
    running = 0
    for second in range(1, 100):
        submit(state, 10 + second, now=float(second), due=float(second))
        (running,) = (e.job_id for e in finish(state, running, float(second)) if isinstance(e, Start))
        if running == 1:
            break
    assert (running, second) == (1, 31)


def test_with_one_slot_the_sub_agents_of_a_tenant_stand_behind_no_other_tenant() -> None:
    """Taking turns is between the jobs of one tenant."""
    state = State(concurrency=1, max_pending=99)
    submit(state, 1, child=True)
    submit(state, 2, child=True)
    submit(state, 3, tenant="b")
    submit(state, 4, tenant="b")
    assert order_of(state) == [3, 2, 4]


def test_sub_agents_that_wait_too_long_still_leave_their_parents_slots() -> None:
    """They hold their share, so the next slot of the tenant is another job's."""
    state = State(concurrency=2, max_pending=99)
    for job_id in range(10):
        submit(state, job_id, child=True)
    submit(state, 100, now=40.0)
    assert finish(state, 0, now=41.0) == [Start(100)]
    assert finish(state, 1, now=41.0) == [Start(2)], "they hold none: the oldest of them"


def test_a_share_of_everything_is_no_budget() -> None:
    """``child_share=1``: sub-agents are like all others, in the order in which they came."""
    state = State(concurrency=1, max_pending=99, child_share=1.0)
    for job_id in (1, 2, 3):
        submit(state, job_id, child=True)
    submit(state, 4)
    assert order_of(state) == [2, 3, 4]


def test_promise_10_the_tenant_that_fills_the_queue_makes_room_in_it() -> None:
    """Another tenant's newcomer gets in, the last of the flood goes; the flood's own newcomer is refused."""
    state = State(concurrency=1, max_pending=4)
    submit(state, 0, tenant="flood")
    for job_id, due in ((1, 50.0), (2, 90.0), (3, None), (4, 10.0)):
        submit(state, job_id, tenant="flood", due=due)
    assert submit(state, 5, tenant="flood", due=0.0) == [Drop(5, Reason.QUEUE_FULL)]
    assert submit(state, 6, tenant="quiet") == [Drop(3, Reason.QUEUE_FULL)], "it would have been the last"
    assert submit(state, 7, tenant="other") == [Drop(2, Reason.QUEUE_FULL)]
    assert submit(state, 8, tenant="third") == [Drop(1, Reason.QUEUE_FULL)]
    assert submit(state, 9, tenant="fourth") == [Drop(9, Reason.QUEUE_FULL)], "nobody has more than one"


def test_room_is_not_made_by_a_job_that_is_next() -> None:
    """One that waits too long for want of a due time would have been next, not last."""
    state = State(concurrency=1, max_pending=2, starvation_s=30.0)
    submit(state, 0, tenant="flood")
    submit(state, 1, tenant="flood")
    submit(state, 2, tenant="flood", due=100.0)
    assert submit(state, 3, tenant="quiet", now=40.0) == [Drop(2, Reason.QUEUE_FULL)]


def test_among_promoted_jobs_the_tenant_with_the_most_makes_room_too() -> None:
    """And a lookahead as long as there is one, of the tenant that has the most of these."""
    state = State(concurrency=1, max_pending=4)
    submit(state, 0, lane=Lane.PROMOTED)
    submit(state, 1, tenant="b")
    for job_id in (2, 3, 4):
        submit(state, job_id, lane=Lane.PROMOTED)
    assert submit(state, 5, tenant="c", lane=Lane.PROMOTED) == [Drop(1, Reason.QUEUE_FULL)]
    assert submit(state, 6, tenant="d", lane=Lane.PROMOTED) == [Drop(4, Reason.QUEUE_FULL)]
    assert submit(state, 7, tenant="e", lane=Lane.PROMOTED) == [Drop(3, Reason.QUEUE_FULL)]
    assert submit(state, 8, tenant="c", lane=Lane.PROMOTED) == [Drop(8, Reason.QUEUE_FULL)]
    step(state, Demote(now=0.0, job_id=7))
    assert submit(state, 9, tenant="c", lane=Lane.PROMOTED) == [Drop(7, Reason.QUEUE_FULL)]


def test_promise_10_of_those_that_wait_for_idle_time_the_tenant_with_the_most_gives_one_up() -> None:
    """Another tenant's is not given up for being due later."""
    state = State(concurrency=1, max_pending=9, max_idle=2)
    for job_id, tenant, due in ((1, "flood", 5.0), (2, "flood", 9.0), (3, "quiet", None)):
        submit(state, job_id, tenant=tenant, due=due)
        effects = step(state, Idle(now=0.0, job_id=job_id))
    assert effects == [Stop(2, Reason.QUEUE_FULL)] and list(state.idle) == [1, 3]


def test_a_job_may_take_the_place_of_one_that_was_dropped() -> None:
    """The time that this one has waited counts for it: within its tenant, and between tenants."""
    state = State(concurrency=1, max_pending=9, starvation_s=30.0)
    submit(state, 1)
    submit(state, 2, now=1.0)
    submit(state, 3, now=2.0)
    assert step(state, Cancel(now=20.0, job_id=2)) == [Drop(2, Reason.CANCELLED)]
    submit(state, 4, now=20.0, waited_s=19.0)
    assert order_of(state, now=21.0) == [4, 3]
    submit(state, 5, now=50.0)
    submit(state, 6, now=50.0, waited_s=31.0)
    for job_id in range(10, 13):
        submit(state, job_id, now=50.0, tenant=f"new{job_id}")
    assert finish(state, 5, now=50.5)[0] == Start(10), "its tenant was served just now"
