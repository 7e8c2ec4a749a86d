"""The scheduler's step: each rule by an example, and all of them together against random histories."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from searching import machine_settings
from smoothctx.scheduler import (
    MAX_TENANTS,
    Cancel,
    Close,
    Defer,
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
    Tick,
    Wake,
    step,
)
from smoothctx.states import Reason


def new(concurrency: int = 1, max_pending: int = 8, **options: float) -> State:
    return State(concurrency=concurrency, max_pending=max_pending, **options)  # type: ignore[arg-type]


def submit(state: State, job_id: int, *, now: float = 0.0, tenant: str = "a", **fields: object) -> list[Effect]:
    return step(state, Submit(now=now, job=Job(id=job_id, tenant=tenant, **fields)))  # type: ignore[arg-type]


def finish_all(state: State, now: float = 0.0) -> list[int]:
    """Finish whatever runs, one after the other, and return the order in which the others started."""
    order: list[int] = []
    while state.running:
        for effect in step(state, Finish(now=now, job_id=next(iter(state.running)))):
            if isinstance(effect, Start):
                order.append(effect.job_id)
    return order


def test_starts_up_to_concurrency_and_queues_the_rest() -> None:
    """Slots are filled at once, the rest waits, and a finished job makes room for the next."""
    state = new(concurrency=2)
    assert submit(state, 1) == [Start(1)]
    assert submit(state, 2) == [Start(2)]
    assert submit(state, 3) == []
    assert step(state, Finish(now=1.0, job_id=1)) == [Start(3)]


def test_earliest_due_first_and_none_last() -> None:
    """Within a tenant the earliest predicted commit goes first; unknown ones last, in order of arrival."""
    state = new()
    submit(state, 1)
    for job_id, due in ((2, None), (3, 50.0), (4, 10.0), (5, None)):
        submit(state, job_id, due=due)
    assert finish_all(state) == [4, 3, 2, 5]


def test_promoted_first_in_order_of_promotion() -> None:
    """A promoted job goes before every lookahead, and promoted ones keep the order of their promotion."""
    state = new()
    submit(state, 1)
    for job_id in (2, 3, 4, 5):
        submit(state, job_id, due=float(job_id))
    step(state, Promote(now=0.0, job_id=1))  # it runs already
    step(state, Promote(now=0.0, job_id=5))
    step(state, Promote(now=0.0, job_id=4))
    step(state, Promote(now=0.0, job_id=5))
    assert finish_all(state) == [5, 4, 2, 3]


def test_a_promoted_job_does_not_wait_for_lookaheads() -> None:
    """A turn waits for it: it starts beside them, and waits for promoted ones only; nobody else starts meanwhile."""
    state = new(concurrency=2)
    for job_id in (1, 2, 3, 4, 5, 6):
        submit(state, job_id)
    assert step(state, Promote(now=0.0, job_id=4)) == [Start(4)]
    assert step(state, Promote(now=0.0, job_id=5)) == [Start(5)]
    assert step(state, Promote(now=0.0, job_id=6)) == [], "as many of them as there are slots"
    assert step(state, Finish(now=1.0, job_id=1)) == []
    assert step(state, Finish(now=1.0, job_id=4)) == [Start(6)]
    assert step(state, Finish(now=1.0, job_id=5)) == [], "one lookahead and one promoted one run: both slots are taken"
    assert step(state, Finish(now=1.0, job_id=2)) == [Start(3)]


def test_promise_10_promoted_jobs_that_hang_become_strays_as_well() -> None:
    """One that waits starts as soon as enough of those that hang may go on without a slot, and not before."""
    state = new(concurrency=2, stray_s=50.0)
    submit(state, 1)
    submit(state, 2, now=10.0)
    submit(state, 3, now=20.0, lane=Lane.PROMOTED)
    assert submit(state, 4, now=30.0) == [Wake(60.0)], "two of the three have to leave for one to get a slot"
    assert step(state, Tick(now=60.0)) == [Start(4)]
    assert (sorted(state.strays), sorted(state.running)) == ([1, 2], [3, 4])
    assert submit(state, 5, now=200.0) == [], "there are as many strays as slots"


def test_fair_between_tenants() -> None:
    """One tenant's flood does not keep another's single job waiting for more than the job that runs."""
    state = new(max_pending=300)
    for job_id in range(200):
        submit(state, job_id, tenant="flood", due=0.0)
    submit(state, 1000, tenant="quiet", due=9e9)
    assert finish_all(state, now=1e6)[0] == 1000


@pytest.mark.parametrize("due", [None, 9e9])
@pytest.mark.parametrize("each", [1, 2])
def test_promise_10_a_stream_of_new_tenants_does_not_starve_one_that_was_served(each: int, due: float | None) -> None:
    """However many come for the first time, and more than can be served: who waits longest is next."""
    state = new(max_pending=2000, starvation_s=30.0)
    submit(state, 1, tenant="old")
    submit(state, 2, tenant="old", due=due)
    (running,), next_id = [1], 3
    for second in range(1, 100):
        now = float(second)
        for _ in range(each):
            submit(state, next_id, now=now, tenant=f"new{next_id}", due=now + 1)
            next_id += 1
        (running,) = (e.job_id for e in step(state, Finish(now=now, job_id=running)) if isinstance(e, Start))
        if running == 2:
            break
    assert (running, second) == (2, 31), "just over starvation_s: nobody else waits longer"


def test_promise_10_a_tenant_whose_job_hangs_is_not_starved_by_others() -> None:
    """It has more running than those who come; after a while its next one goes first all the same, and only one."""
    state = new(concurrency=2, max_pending=100, starvation_s=30.0)
    submit(state, 1, tenant="slow")
    submit(state, 2, tenant="slow", now=1.0)
    for job_id in (3, 4):
        submit(state, job_id, tenant="slow", now=2.0)
    for job_id in range(10, 60):
        submit(state, job_id, tenant=f"new{job_id}", now=3.0)
    assert step(state, Finish(now=20.0, job_id=2)) == [Start(10)]
    assert step(state, Finish(now=32.5, job_id=10)) == [Start(3)]
    assert step(state, Finish(now=32.9, job_id=3)) == [Start(11)], "it was served just now"
    assert step(state, Finish(now=62.0, job_id=11)) == [Start(12)], "the others have waited longer"


def test_a_start_that_was_sent_back_is_no_service() -> None:
    """What admission puts off does not make its tenant's other jobs wait for ever."""
    state = new(max_pending=200, starvation_s=30.0)
    submit(state, 1, tenant="a")
    step(state, Defer(now=0.0, job_id=1, until=20.0))
    submit(state, 3, tenant="b")
    submit(state, 2, tenant="a")
    assert step(state, Finish(now=21.0, job_id=3)) == [Start(1)]
    for job_id in range(10, 60):
        submit(state, job_id, tenant=f"new{job_id}", now=21.5)
    assert step(state, Defer(now=22.0, job_id=1, until=50.0)) == [Start(10)]
    assert step(state, Finish(now=30.5, job_id=10)) == [Start(2)]


def test_tenant_with_fewest_running_first_then_least_recently_served() -> None:
    """Slots are shared evenly, and ties go round."""
    state = new(concurrency=2)
    submit(state, 1, tenant="a")
    submit(state, 2, tenant="b")
    for job_id, tenant in ((3, "a"), (4, "a"), (5, "b"), (6, "c")):
        submit(state, job_id, tenant=tenant)
    assert step(state, Finish(now=0.0, job_id=2)) == [Start(6)]
    assert step(state, Finish(now=0.0, job_id=6)) == [Start(5)]


def test_a_starved_job_goes_before_due_order() -> None:
    """A job without a due time is not overtaken for ever by urgent ones."""
    state = new(starvation_s=30.0)
    submit(state, 1)
    submit(state, 2, now=0.0)
    submit(state, 3, now=5.0, due=6.0)
    submit(state, 4, now=31.0, due=32.0)
    assert step(state, Finish(now=31.0, job_id=1)) == [Start(2)]
    assert step(state, Finish(now=31.0, job_id=2)) == [Start(3)]


def test_sub_agents_leave_room_for_their_parents() -> None:
    """Sub-agents over their share wait while another job could start, and use what is idle otherwise."""
    state = new(concurrency=4)
    for job_id in (1, 2, 3):
        submit(state, job_id, child=True)
    assert len(state.running) == 3, "nothing else waits: they may have it"
    submit(state, 4, child=True)
    submit(state, 5, child=True, due=1.0)
    submit(state, 6, due=2.0)
    assert step(state, Finish(now=0.0, job_id=1)) == [Start(6)]
    assert step(state, Finish(now=0.0, job_id=2)) == [Start(5)]


def test_sub_agents_are_not_starved() -> None:
    """A starved sub-agent's job is exempt from the share where others of its tenant do not wait."""
    state = new(concurrency=2, starvation_s=30.0)
    for job_id in (1, 2, 3):
        submit(state, job_id, child=True)
    submit(state, 4, now=29.0, tenant="b")
    submit(state, 5, now=29.0, tenant="c")
    assert step(state, Finish(now=30.0, job_id=1)) == [Start(4)], "they hold their share"
    assert step(state, Finish(now=31.0, job_id=4)) == [Start(3)]


def test_promise_10_full_queue_drops_the_newcomer() -> None:
    """A full queue is a typed discard, not growth."""
    state = new(max_pending=1)
    submit(state, 1)
    submit(state, 2)
    assert submit(state, 3, due=0.0) == [Drop(3, Reason.QUEUE_FULL)]
    assert list(state.queue) == [2]


def test_full_queue_a_promoted_newcomer_displaces_the_latest_due() -> None:
    """A turn that waits finds room as long as a mere lookahead holds some."""
    state = new(max_pending=2)
    submit(state, 1, lane=Lane.PROMOTED)
    submit(state, 2, due=5.0)
    submit(state, 3, due=9.0)
    assert submit(state, 4, lane=Lane.PROMOTED) == [Drop(3, Reason.QUEUE_FULL)]
    assert submit(state, 5, lane=Lane.PROMOTED) == [Drop(2, Reason.QUEUE_FULL)]
    assert submit(state, 6, lane=Lane.PROMOTED) == [Drop(6, Reason.QUEUE_FULL)]


def test_deferred_waits_until_its_time_and_frees_its_slot() -> None:
    """A deferred job makes room, asks to be woken, and starts when its time has come."""
    state = new()
    submit(state, 1)
    submit(state, 2)
    assert step(state, Defer(now=0.0, job_id=1, until=5.0)) == [Start(2)]
    assert step(state, Finish(now=1.0, job_id=2)) == [Wake(5.0)]
    assert step(state, Tick(now=4.0)) == [Wake(5.0)]
    assert step(state, Tick(now=5.0)) == [Start(1)]


def test_deferral_is_bounded() -> None:
    """Admission may put a job off for ``max_defer_s`` in all; it is asked once more then, and a no is final."""
    state = new(max_defer_s=60.0)
    submit(state, 1)
    assert step(state, Defer(now=0.0, job_id=1, until=50.0)) == [Wake(50.0)]
    assert step(state, Tick(now=50.0)) == [Start(1)]
    assert step(state, Defer(now=50.0, job_id=1, until=1e9)) == [Wake(60.0)]
    assert step(state, Tick(now=60.0)) == [Start(1)]
    assert step(state, Defer(now=60.0, job_id=1, until=61.0)) == [Drop(1, Reason.ADMISSION_DENIED)]


def test_promotion_ends_a_deferral() -> None:
    """A turn does not wait for a deferral to end."""
    state = new()
    submit(state, 1)
    step(state, Defer(now=0.0, job_id=1, until=50.0))
    assert step(state, Promote(now=1.0, job_id=1)) == [Start(1)]


@pytest.mark.parametrize("deferred_s", [0.0, 60.0])
def test_a_promotion_that_comes_while_admission_is_asked_ends_the_deferral_too(deferred_s: float) -> None:
    """Admission answered for a lookahead, and a turn has begun to wait for it meanwhile: it is neither put off nor, at
    the end of all its deferrals, dropped."""
    state = new(max_defer_s=60.0)
    submit(state, 1)
    if deferred_s:
        step(state, Defer(now=0.0, job_id=1, until=1e9))
        assert step(state, Tick(now=deferred_s)) == [Start(1)]
    assert step(state, Promote(now=deferred_s, job_id=1)) == []
    assert step(state, Defer(now=deferred_s, job_id=1, until=deferred_s + 30.0)) == [Start(1)]


def test_a_deferred_job_does_not_overfill_the_queue() -> None:
    """A job that comes back to a full queue is dropped."""
    state = new(max_pending=1)
    submit(state, 1)
    step(state, Defer(now=0.0, job_id=1, until=50.0))
    submit(state, 2)
    assert step(state, Defer(now=0.0, job_id=2, until=50.0)) == [Drop(2, Reason.QUEUE_FULL), Wake(50.0)]


def test_cancel_and_close() -> None:
    """What waits is dropped, what runs is asked to stop, and a closed scheduler takes nothing more."""
    state = new()
    submit(state, 1)
    submit(state, 2)
    submit(state, 3)
    assert step(state, Cancel(now=0.0, job_id=2, reason=Reason.SUPERSEDED)) == [Drop(2, Reason.SUPERSEDED)]
    assert step(state, Cancel(now=0.0, job_id=1)) == [Stop(1, Reason.CANCELLED)]
    assert step(state, Close(now=0.0, drain=True)) == []
    assert submit(state, 4) == [Drop(4, Reason.SHUTDOWN)]
    assert step(state, Close(now=0.0)) == [Drop(3, Reason.SHUTDOWN), Stop(1, Reason.SHUTDOWN)]
    assert step(state, Finish(now=0.0, job_id=1)) == []


def test_late_events_change_nothing_and_ids_are_unique() -> None:
    """Events about a job that is gone are harmless; an id in use is a mistake."""
    state = new()
    late: list[Event] = [Finish(now=0.0, job_id=9), Cancel(now=0.0, job_id=9), Promote(now=0.0, job_id=9)]
    for event in [*late, Defer(now=0.0, job_id=9, until=1.0)]:
        assert step(state, event) == []
    submit(state, 1)
    with pytest.raises(ValueError, match="id 1 is in use"):
        submit(state, 1)


def test_promise_10_tenants_that_are_gone_are_forgotten() -> None:
    """The memory of who was served is bounded."""
    state = new()
    for job_id in range(MAX_TENANTS + 10):
        submit(state, job_id, tenant=f"t{job_id}")
        step(state, Finish(now=0.0, job_id=job_id))
    assert len(state.served) == MAX_TENANTS


def test_promise_10_a_job_that_hangs_gives_its_slot_to_one_that_waits() -> None:
    """After its patience, not before, and only to somebody; it counts no more, and its end frees nothing twice."""
    state = new(stray_s=60.0)
    assert submit(state, 1) == [Start(1)]
    assert step(state, Tick(now=100.0)) == [] and not state.strays, "nobody waits: it keeps its slot"
    assert submit(state, 2, now=100.0) == [Start(2)]
    assert (list(state.strays), list(state.running)) == ([1], [2])
    assert submit(state, 3, now=110.0) == [], "there is one stray for each slot"
    assert step(state, Finish(now=120.0, job_id=1)) == [Wake(160.0)]
    assert step(state, Tick(now=159.0)) == [Wake(160.0)]
    assert step(state, Tick(now=160.0)) == [Start(3)]
    assert (list(state.strays), list(state.running)) == ([2], [3])
    assert step(state, Finish(now=161.0, job_id=3)) == []
    assert submit(state, 4, now=161.0) == [Start(4)], "the slot is free, though the stray still runs"


def test_a_job_may_have_a_patience_of_its_own() -> None:
    """Where its usual duration is known; and the one that is over time the longest goes first."""
    state = new(concurrency=2, stray_s=60.0)
    submit(state, 1)
    submit(state, 2, patience_s=10.0)
    assert submit(state, 3, now=1.0) == [Wake(10.0)]
    assert step(state, Tick(now=10.0)) == [Start(3)] and list(state.strays) == [2]
    assert submit(state, 4, now=65.0) == [Start(4)] and list(state.strays) == [2, 1]
    assert submit(state, 5, now=66.0) == [], "no more strays than slots, so no alarm either"


def test_strays_can_be_stopped_promoted_and_deferred() -> None:
    """A stray is a running job in every other respect, its id is in use, and deferred jobs take no slot from it."""
    state = new(concurrency=2, stray_s=10.0)
    submit(state, 1)
    submit(state, 2)
    submit(state, 3, now=10.0)
    submit(state, 4, now=10.0)
    assert sorted(state.strays) == [1, 2] and sorted(state.running) == [3, 4]
    with pytest.raises(ValueError, match="in use"):
        submit(state, 1, now=11.0)
    step(state, Promote(now=11.0, job_id=1))
    assert state.strays[1].lane is Lane.PROMOTED
    assert step(state, Cancel(now=11.0, job_id=1)) == [Stop(1, Reason.CANCELLED)]
    assert step(state, Defer(now=11.0, job_id=2, until=50.0)) == [Wake(50.0)], "not before its own time"
    stopped = step(state, Close(now=12.0))
    assert {e.job_id for e in stopped if isinstance(e, Stop)} == {1, 3, 4}


def test_promise_10_what_waits_for_idle_time_holds_no_slot() -> None:
    """Its slot is free at once, it counts nowhere, and it can be promoted, stopped and finished as before."""
    state = new(concurrency=1, stray_s=10.0)
    for job_id in (1, 2, 3):
        submit(state, job_id, child=True)
    assert step(state, Idle(now=1.0, job_id=1)) == [Start(2), Wake(11.0)] and list(state.idle) == [1]
    assert step(state, Idle(now=1.0, job_id=1)) == step(state, Idle(now=1.0, job_id=9)) == [Wake(11.0)]
    assert step(state, Tick(now=11.0)) == [Start(3)] and list(state.strays) == [2]
    assert step(state, Idle(now=12.0, job_id=2)) == [] and not state.strays and list(state.idle) == [1, 2]
    with pytest.raises(ValueError, match="in use"):
        submit(state, 1, now=12.0)
    step(state, Promote(now=12.0, job_id=1))
    assert state.idle[1].lane is Lane.PROMOTED
    assert step(state, Cancel(now=12.0, job_id=1)) == [Stop(1, Reason.CANCELLED)]
    assert step(state, Finish(now=13.0, job_id=1)) == [] and list(state.idle) == [2]
    assert step(state, Close(now=14.0)) == [Stop(3, Reason.SHUTDOWN), Stop(2, Reason.SHUTDOWN)]


def test_promise_10_few_wait_for_idle_time() -> None:
    """Of more the one that is due last gives up, and holds a slot again until it has."""
    state = new(concurrency=1, max_idle=2)
    submit(state, 1, due=50.0)
    step(state, Idle(now=0.0, job_id=1))
    submit(state, 2)
    step(state, Idle(now=0.0, job_id=2))
    submit(state, 3, due=90.0)
    assert step(state, Idle(now=0.0, job_id=3)) == [Stop(2, Reason.QUEUE_FULL)]
    assert (list(state.idle), list(state.running)) == ([1, 3], [2])
    assert submit(state, 4, due=95.0) == []
    assert step(state, Finish(now=1.0, job_id=2)) == [Start(4)]
    assert step(state, Idle(now=2.0, job_id=4)) == [Stop(4, Reason.QUEUE_FULL)], "it is the last one itself"


def test_nothing_waits_for_idle_time_while_the_pool_drains() -> None:
    """Results are what a drain waits for."""
    state = new(concurrency=2)
    for job_id in (1, 2):
        submit(state, job_id)
    step(state, Idle(now=0.0, job_id=1))
    assert step(state, Close(now=1.0, drain=True)) == [Stop(1, Reason.QUEUE_FULL)]
    assert step(state, Idle(now=2.0, job_id=2)) == [Stop(2, Reason.QUEUE_FULL)]


class SchedulerMachine(RuleBasedStateMachine):
    """Random histories of jobs, checked after every step against what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State(concurrency=3, max_pending=5, starvation_s=30.0, max_defer_s=60.0, stray_s=50.0, max_idle=2)
        self.now = 0.0
        self.jobs: dict[int, Job] = {}
        self.where: dict[int, str] = {}
        self.queued_at: dict[int, float] = {}
        self.not_before: dict[int, float] = {}
        self.stray_at: dict[int, float] = {}
        self.strays: set[int] = set()
        self.promoted: list[int] = []
        self.started_at: dict[int, float] = {}
        # by lane and starved tenant: since when, and who went before it
        self.passed: dict[tuple[bool, str], tuple[float, set[str]]] = {}
        self.given_up: set[int] = set()
        self.closed = self.came_as_stray = False
        self.wake: float | None = None

    # -- the owner: carries out effects, and checks each of them -------------------------------------------------

    def send(self, event: Event) -> None:
        waiting = {job_id for job_id, where in self.where.items() if where == "waiting"}
        if isinstance(event, Submit):
            waiting.add(event.job.id)
        if isinstance(event, Defer):
            waiting.add(event.job_id)
        self.wake = None
        for effect in step(self.state, event):
            match effect:
                case Start(job_id=job_id):
                    assert self.where[job_id] == "waiting", "started twice, or after its end"
                    self.check_choice(job_id, waiting)
                    waiting.discard(job_id)
                    self.make_room(job_id)
                    self.where[job_id] = "running"
                    self.started_at[job_id] = self.now
                    patience = self.jobs[job_id].patience_s
                    self.stray_at[job_id] = self.now + (50.0 if patience is None else patience)
                case Drop(job_id=job_id, reason=reason):
                    assert self.where[job_id] == "waiting", "dropped twice, or while it runs"
                    if reason is Reason.QUEUE_FULL:
                        self.check_victim(job_id, event, waiting)
                    waiting.discard(job_id)
                    self.where[job_id] = f"dropped {reason}"
                case Stop(job_id=job_id, reason=Reason.QUEUE_FULL) if not self.closed:
                    self.give_up(job_id, event)
                case Stop(job_id=job_id):
                    assert self.where[job_id] in ("running", "idle")
                case Wake(at=at):
                    self.wake = at
        if isinstance(event, Close) and not event.drain:
            assert not self.state.queue

    def give_up(self, job_id: int, event: Event) -> None:
        """Too many wait for idle time: of the tenant that has the most, the one that is due last takes the place of the
        one that came."""
        assert isinstance(event, Idle)
        idle = [i for i, where in self.where.items() if where == "idle"]
        of = Counter(self.jobs[i].tenant for i in idle)
        own = [i for i in idle if self.jobs[i].tenant == self.jobs[job_id].tenant]
        due = {i: math.inf if self.jobs[i].due is None else self.jobs[i].due for i in own}
        assert len(idle) == 3 and len(own) == max(of.values())
        assert due[job_id] == max(due.values())  # type: ignore[type-var]
        self.where[job_id] = "running"
        self.given_up.add(job_id)
        if self.came_as_stray:
            self.strays.add(job_id)

    def check_victim(self, dropped: int, event: Event, waiting: set[int]) -> None:
        """The queue was full: the tenant with the most in it loses one, its newcomer if it has one, and a promoted job
        only where no other could go."""
        assert isinstance(event, Submit | Defer)
        newcomer = event.job.id if isinstance(event, Submit) else event.job_id
        candidates = [i for i in waiting if i not in self.promoted] or list(waiting)
        of = Counter(self.jobs[i].tenant for i in candidates)
        most = max(of.values())
        assert len(waiting) == 6 and dropped in candidates and of[self.jobs[dropped].tenant] == most
        if newcomer in candidates and of[self.jobs[newcomer].tenant] == most:
            assert dropped == newcomer

    @property
    def holding(self) -> list[int]:
        """Those that hold a slot."""
        return [i for i, where in self.where.items() if where == "running" and i not in self.strays]

    def make_room(self, starting: int) -> None:
        """A job starts: there is a slot, or it is promoted and fewer such jobs run than there are slots, or those that
        are over their time the longest have to leave theirs."""
        if starting in self.promoted and sum(i in self.promoted for i in self.holding) < 3 and len(self.holding) < 6:
            return
        while len(self.holding) >= 3:
            stray = min(self.holding, key=self.stray_at.__getitem__)
            assert self.stray_at[stray] <= self.now and len(self.strays) < 3
            self.strays.add(stray)

    def check_choice(self, chosen: int, waiting: set[int]) -> None:
        ready = [job_id for job_id in waiting if self.not_before[job_id] <= self.now]
        assert chosen in ready
        urgent = [job_id for job_id in self.promoted if job_id in ready]
        job = self.jobs[chosen]
        running = [self.jobs[job_id] for job_id, where in self.where.items() if where == "running"]
        running_of = Counter(other.tenant for other in running)
        starved = {job_id for job_id in ready if self.now - self.queued_at[job_id] > 30.0}
        held = [self.jobs[job_id] for job_id in self.holding]
        children = Counter(other.tenant for other in held if other.child)
        with_others = {self.jobs[i].tenant for i in ready if not self.jobs[i].child}
        over = [i for i in ready if self.jobs[i].child and children[self.jobs[i].tenant] >= 1]
        over = [i for i in over if i not in starved or self.jobs[i].tenant in with_others]
        ready = urgent or [i for i in ready if i not in over] or ready
        assert chosen in ready, "promoted ones first; sub-agents over their share come last"
        left_out = self.left_out(ready)
        if left_out:
            assert left_out.get(job.tenant) == min(left_out.values()), "starved tenants, who waits longest first"
        else:
            assert all(running_of[job.tenant] <= running_of[self.jobs[i].tenant] for i in ready), "fair between tenants"
        self.count_passing(job.tenant, left_out, bool(urgent))
        own = [i for i in ready if self.jobs[i].tenant == job.tenant]
        if urgent:
            assert chosen == own[0], "in the order of promotion"
            return
        late = [i for i in own if i in starved and self.jobs[i].due is None]
        if late:
            assert chosen in late
            assert self.queued_at[chosen] == min(self.queued_at[i] for i in late), "the oldest starved one"
        else:
            due = {i: math.inf if self.jobs[i].due is None else self.jobs[i].due for i in own}
            assert all(due[chosen] <= due[i] for i in own), "earliest due first"  # type: ignore[operator]

    def left_out(self, ready: list[int]) -> dict[str, float]:
        """The tenants that got nothing for 30 seconds while they waited, and since when."""
        found: dict[str, float] = {}
        for tenant in {self.jobs[i].tenant for i in ready}:
            began = min(self.queued_at[i] for i in ready if self.jobs[i].tenant == tenant)
            got = max((at for i, at in self.started_at.items() if self.jobs[i].tenant == tenant), default=-math.inf)
            if self.now - max(began, got) > 30.0:
                found[tenant] = max(began, got)
        return found

    def count_passing(self, chosen: str, left_out: dict[str, float], promoted: bool) -> None:
        """The bound: one job of each other tenant, at most, goes before a starved one's of the same lane."""
        self.passed = {
            (lane, t): (s, seen)
            for (lane, t), (s, seen) in self.passed.items()
            if lane != promoted or (left_out.get(t) == s and t != chosen)
        }
        for tenant, since in left_out.items():
            if tenant != chosen:
                _, seen = self.passed.setdefault((promoted, tenant), (since, set()))
                assert chosen not in seen, "twice before a tenant that is starved"
                seen.add(chosen)

    # -- what happens --------------------------------------------------------------------------------------------

    @rule(
        tenant=st.sampled_from([*"abc", "new"]),
        child=st.booleans(),
        due=st.none() | st.floats(0, 500),
        promoted=st.integers(0, 9).map(lambda n: n == 0),
        patience_s=st.none() | st.floats(0, 200),
    )
    def submit(self, tenant: str, child: bool, due: float | None, promoted: bool, patience_s: float | None) -> None:
        job_id = len(self.jobs) + 1
        tenant = tenant if tenant != "new" else f"new{job_id}"
        lane = Lane.PROMOTED if promoted else Lane.LOOKAHEAD
        self.jobs[job_id] = Job(id=job_id, tenant=tenant, child=child, due=due, lane=lane, patience_s=patience_s)
        self.where[job_id] = "waiting"
        self.queued_at[job_id] = self.now
        self.not_before[job_id] = -math.inf
        if promoted:
            self.promoted.append(job_id)
        self.send(Submit(now=self.now, job=self.jobs[job_id]))
        if self.closed:
            assert self.where[job_id] == "dropped shutdown"

    def some(self, data: st.DataObject, *where: str) -> int:
        return data.draw(st.sampled_from(sorted(i for i, w in self.where.items() if w in where)))

    def any_in(self, *where: str) -> bool:
        return any(w in where for w in self.where.values())

    def ended(self, job_id: int, where: str) -> None:
        self.where[job_id] = where
        self.strays.discard(job_id)
        self.given_up.discard(job_id)

    @precondition(lambda self: self.any_in("running"))
    @rule(data=st.data())
    def rest(self, data: st.DataObject) -> None:
        job_id = self.some(data, "running")
        if self.closed or job_id in self.given_up:
            return
        self.came_as_stray = job_id in self.strays
        self.ended(job_id, "idle")
        self.send(Idle(now=self.now, job_id=job_id))

    @precondition(lambda self: self.any_in("running", "idle"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        job_id = self.some(data, "running", "idle")
        self.ended(job_id, "finished")
        self.send(Finish(now=self.now, job_id=job_id))

    @precondition(lambda self: self.any_in("running"))
    @rule(data=st.data(), seconds=st.floats(0, 90))
    def defer(self, data: st.DataObject, seconds: float) -> None:
        job_id = self.some(data, "running")
        del self.started_at[job_id]
        for _, seen in self.passed.values():  # it was sent back: it went before nobody
            seen.discard(self.jobs[job_id].tenant)
        running_since = (self.state.running | self.state.strays)[job_id].deferred_at
        self.ended(job_id, "waiting")
        until = min(self.now + seconds, (running_since or self.now) + 60.0)
        self.not_before[job_id] = -math.inf if job_id in self.promoted else until
        self.send(Defer(now=self.now, job_id=job_id, until=self.now + seconds))

    @precondition(lambda self: self.any_in("waiting", "running"))
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        job_id = self.some(data, "waiting", "running")
        if job_id not in self.promoted:
            self.promoted.append(job_id)
            self.not_before[job_id] = -math.inf
        self.send(Promote(now=self.now, job_id=job_id))

    @precondition(lambda self: self.any_in("waiting", "running", "idle"))
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        job_id = self.some(data, "waiting", "running", "idle")
        if job_id in self.promoted:
            self.promoted.remove(job_id)
        self.send(Demote(now=self.now, job_id=job_id))

    @precondition(lambda self: self.any_in("waiting", "running", "idle"))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.send(Cancel(now=self.now, job_id=self.some(data, "waiting", "running", "idle")))

    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wake is not None and self.wake <= until:
            self.now = max(self.now, self.wake)
            self.send(Tick(now=self.now))
        self.now = until

    @precondition(lambda self: len(self.jobs) > 10)
    @rule(drain=st.booleans())
    def close(self, drain: bool) -> None:
        self.closed = True
        self.send(Close(now=self.now, drain=drain))

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def bounded_and_complete(self) -> None:
        """The bounds hold, and every job is exactly where the owner thinks it is: none lost, none twice."""
        assert len(self.state.running) <= 6 and len(self.state.strays) <= 3
        assert sorted(self.state.idle) == sorted(i for i, w in self.where.items() if w == "idle")
        assert len(self.state.idle) <= 2
        assert len(self.state.queue) <= 5
        assert sorted(self.state.queue) == sorted(i for i, w in self.where.items() if w == "waiting")
        assert sorted(self.state.running) == sorted(self.holding)
        assert set(self.state.strays) == self.strays

    @invariant()
    def nothing_idles(self) -> None:
        """A free slot and a job that may start never go together, and a deferred one has its alarm set. Nor do one
        that waits and one that is over its time, as long as there may be more strays."""
        if not self.state.queue:
            return
        ready = any(self.not_before[i] <= self.now for i in self.state.queue)
        if len(self.holding) < 3:
            assert self.wake is not None and not ready
            return
        promoted = sum(i in self.promoted for i in self.holding)
        full = promoted >= 3 or len(self.holding) >= 6
        assert full or not any(self.not_before[i] <= self.now for i in self.state.queue if i in self.promoted)
        leaving = len(self.holding) - 2
        if len(self.strays) + leaving <= 3:
            assert self.wake is not None and self.wake >= sorted(self.stray_at[i] for i in self.holding)[leaving - 1]
            assert not ready or self.wake > self.now

    def teardown(self) -> None:
        """When running jobs finish, everything that waits comes to its end."""
        for _ in range(1000):
            running = [i for i, w in self.where.items() if w == "running"]
            if running:
                self.ended(running[0], "finished")
                self.send(Finish(now=self.now, job_id=running[0]))
            elif self.wake is not None:
                self.now = max(self.now, self.wake)
                self.send(Tick(now=self.now))
            else:
                break
        assert not self.any_in("waiting", "running")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = machine_settings(examples=80, steps=40)
