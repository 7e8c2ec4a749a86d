"""The scheduler: which waiting job starts next. Pure: no clock, no I/O, no tasks.

:func:`step` takes the state and one event, changes the state, and returns what the owner has to do. Every way a
job can go (submit, start, finish, defer, cancel, promote, demote, close) passes through it.

A job is *waiting* (``state.queue``), *running* (``state.running``) or gone::

    Submit -> waiting -> Start -> running -> Finish -> gone
                 |  ^                |  |
                 |  +---- Defer -----+  +-- Cancel: Stop is asked for, the slot is free at Finish
                 |                      +-- runs far too long: a stray (``state.strays``), its slot is free at once
                 |                      +-- Idle: it only waits from now on (``state.idle``), its slot is free at once
                 +-> Drop (queue_full, admission_denied, shutdown, a Cancel's reason) -> gone

While fewer than ``concurrency`` jobs run, the next one starts; a promoted one also while fewer than ``concurrency``
*promoted* jobs run (and fewer than twice that many jobs in all): a turn waits for it, and must not wait for what only
looks ahead. When no turn waits for it any more it is demoted, and is what it was before: a lookahead that came when it
came. The next one is, in this order of rules:

1. Jobs that were deferred wait until their time; promoting one ends that.
2. Promoted jobs. They know no budget: a turn waits for them.
3. Sub-agents' budget: a tenant's sub-agents that already hold ``child_slots`` slots come after every other job of their
   tenant that could start, and while they are not starved (rule 5) after every other tenant's too; so nothing idles for
   it. Where their share is less than one slot (always with a ``concurrency`` of 1) they also take turns with the others
   of their tenant: after a start of a sub-agent's job another one's goes first.
4. Fair between tenants: starved tenants first, the one that waits longest first of them; then the tenant with the
   fewest running jobs, then the one whose last start is longest ago (never: before all others). A tenant is starved
   when one of its jobs that could start has waited longer than ``starvation_s``, and no job of it was started in that
   time. A start that admission sent back was none.
5. Within a tenant: promoted jobs in the order of their promotion. Others: starved jobs without a due time (waiting
   longer than ``starvation_s``) first, the oldest of them first; then the earliest due (none: last); then first in,
   first out.

When one job too many waits, the tenant with the most of them that wait loses one: the one that came last if that is its
own, else the one of its jobs that would go last. Promoted ones stay as long as a lookahead can make room.

A job that hangs does not hold its slot for ever: one that runs longer than its ``patience_s`` (default ``stray_s``)
while another one could start becomes a *stray*. It goes on, and counts as running in rule 4, but holds no slot. There
are at most ``concurrency`` strays; beyond it a job keeps its slot. So at most three times that many jobs run.

Neither does a job that has its result and only warms a cache in the idle time of others: it says so (``Idle``), and
counts nowhere from then on. There are at most ``max_idle`` of these; of more the one whose commit is expected last, of
the tenant that has the most, is asked to stop. While the pool drains nothing waits for idle time.

The starvation bound: within its tenant, a starved job waits for promoted and for older jobs only (a sub-agent's also
for others by rule 3, while sub-agents hold their share). One with a due time needs no such rule: jobs that come after
that time are due later than it. And a starved tenant waits for the jobs for which a turn waits just then, and for one
job of each tenant that waits longer than it, whatever the others have queued or hold, and however many tenants come for
the first time. So neither a flood of one tenant nor a stream of new ones starves anybody, and a promotion counts only
for as long as somebody waits.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from .states import Reason

#: tenants whose last start is remembered; the one served longest ago is forgotten first, which changes no order
MAX_TENANTS = 4096
#: jobs that wait for idle time after their result
MAX_IDLE = 64


class Lane(IntEnum):
    """The priority scale of background work; higher goes first. The foreground is above both and not ours."""

    LOOKAHEAD = 0
    PROMOTED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One waiting or running job.

    ``child``: it is a sub-agent's. ``due``: when its commit is expected, in the clock's seconds, if known.
    ``patience_s``: seconds after which it may lose its slot, ``None`` for the state's ``stray_s``. ``waited_s``: the
    seconds that the job has waited whose place it takes; they count as its own.
    ``lane``, ``queued_at``, ``order``, ``raised``, ``not_before``, ``deferred_at``, ``started_at`` and ``stray_at`` are
    kept by :func:`step`; ``raised`` is the number of its promotion, as ``order`` is that of its submission.
    """

    id: int
    tenant: str
    session: str = ""
    child: bool = False
    due: float | None = None
    patience_s: float | None = None
    waited_s: float = 0.0
    lane: Lane = Lane.LOOKAHEAD
    queued_at: float = 0.0
    order: int = 0
    raised: int = 0
    not_before: float = -math.inf
    deferred_at: float | None = None
    started_at: float = -math.inf
    stray_at: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A new job. Its id must be new."""

    now: float
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A running job has ended, however it ended."""

    now: float
    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """A job is not wanted any more."""

    now: float
    job_id: int
    reason: Reason = Reason.CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """A turn waits for this job now."""

    now: float
    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demote:
    """No turn waits for this job any more."""

    now: float
    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A running job's result is there; what is left of it waits for idle time and may be given up."""

    now: float
    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Defer:
    """Admission sent a job back: it waits until ``until``, or until it has been put off for ``max_defer_s``.

    Then it is asked about once more; another ``Defer`` drops it as ``admission_denied``. A promoted one is neither put
    off nor dropped: a turn has begun to wait for it since admission answered.
    """

    now: float
    job_id: int
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time of a :class:`Wake` has come."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """No more jobs. ``drain``: those that wait or run may finish; otherwise they are dropped and stopped."""

    now: float
    drain: bool = False


Event = Submit | Finish | Cancel | Promote | Demote | Idle | Defer | Tick | Close


@dataclass(frozen=True, slots=True)
class Start:
    """Start this job; answer with ``Finish`` or ``Defer``."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask this running job to stop; its slot is free at ``Finish``."""

    job_id: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Drop:
    """This job will not run."""

    job_id: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a ``Tick`` at this time. Each step says anew whether and when: it replaces the earlier one."""

    at: float


Effect = Start | Stop | Drop | Wake


@dataclass(slots=True)
class Served:
    """What a tenant got: the number of its last start, whether that was a sub-agent's job, and when the latest of its
    jobs that are over was started."""

    number: int = 0
    child: bool = False
    at: float = -math.inf


@dataclass(slots=True, kw_only=True)
class State:
    """What waits and what runs. Changed by :func:`step` only.

    ``concurrency``: jobs that run at once. ``max_pending``: jobs that wait. ``starvation_s``: seconds after
    which a job goes before its tenant's due order, and its tenant before the others. ``max_defer_s``: seconds that
    admission may put one job off. ``child_share``: the part of ``concurrency`` that a tenant's sub-agents get while
    others wait.
    ``stray_s``: seconds after which a running job gives its slot to one that waits. ``running`` has those that
    hold a slot, ``strays`` those that run without one, ``idle`` those whose result is there: ``max_idle`` at most.
    """

    concurrency: int
    max_pending: int
    starvation_s: float = 30.0
    max_defer_s: float = 60.0
    child_share: float = 0.5
    stray_s: float = math.inf
    max_idle: int = MAX_IDLE
    queue: dict[int, Job] = field(default_factory=dict)
    running: dict[int, Job] = field(default_factory=dict)
    strays: dict[int, Job] = field(default_factory=dict)
    idle: dict[int, Job] = field(default_factory=dict)
    served: OrderedDict[str, Served] = field(default_factory=OrderedDict)
    closed: bool = False
    counter: int = 0

    @property
    def child_slots(self) -> int:
        """Slots that one tenant's sub-agents may hold while others wait: at least one."""
        return max(1, int(self.concurrency * self.child_share))

    @property
    def takes_turns(self) -> bool:
        """Is that one slot more than their share? Then they may not have it all the time."""
        return self.child_slots > self.concurrency * self.child_share

    def next_number(self) -> int:
        """Counts submissions, promotions and starts; what came first has the smaller number."""
        self.counter += 1
        return self.counter


def step(state: State, event: Event) -> list[Effect]:
    """Apply one event and return what is to be done, in order.

    Events about jobs that are not there (any more) change nothing: they race with the job's end.

    Raises:
        ValueError: a submitted job's id is in use.
    """
    effects: list[Effect] = []
    newcomer: int | None = None
    match event:
        case Submit(job=job):
            if any(job.id in jobs for jobs in (state.queue, *_going(state))):
                raise ValueError(f"job id {job.id} is in use")
            if state.closed:
                return [Drop(job.id, Reason.SHUTDOWN), *_wake(state)]
            newcomer = job.id
            number = state.next_number()
            state.queue[job.id] = replace(job, queued_at=event.now - job.waited_s, order=number, raised=number)
        case Finish(job_id=job_id):
            ended = _ended(state, job_id)
            if ended is not None and (served := state.served.get(ended.tenant)) is not None:
                served.at = max(served.at, ended.started_at)
        case Cancel(job_id=job_id, reason=reason):
            if state.queue.pop(job_id, None) is not None:
                effects.append(Drop(job_id, reason))
            elif any(job_id in jobs for jobs in _going(state)):
                effects.append(Stop(job_id, reason))
        case Promote(job_id=job_id):
            _promote(state, job_id)
        case Demote(job_id=job_id):
            _demote(state, job_id)
        case Idle(job_id=job_id):
            effects += _rest(state, job_id)
        case Defer(job_id=job_id):
            newcomer = job_id
            effects += _defer(state, event)
        case Close(drain=drain):
            state.closed = True
            if drain:
                effects += [Stop(job_id, Reason.QUEUE_FULL) for job_id in state.idle]
            else:
                effects += [Drop(job_id, Reason.SHUTDOWN) for job_id in state.queue]
                effects += [Stop(job_id, Reason.SHUTDOWN) for jobs in _going(state) for job_id in jobs]
                state.queue.clear()
        case Tick():
            pass
    effects += _fill(state, event.now)
    if newcomer is not None and len(state.queue) > state.max_pending:
        effects.append(_overflow(state, newcomer, event.now))
    return effects + _wake(state)


def _going(state: State) -> tuple[dict[int, Job], ...]:
    """What was started and has not ended."""
    return state.running, state.strays, state.idle


def _ended(state: State, job_id: int) -> Job | None:
    return next((jobs.pop(job_id) for jobs in _going(state) if job_id in jobs), None)


def _rest(state: State, job_id: int) -> list[Effect]:
    """It holds no slot any more. With one too many, the least urgent is asked to stop, in its place until it has."""
    place = next((jobs for jobs in (state.running, state.strays) if job_id in jobs), None)
    if place is None:
        return []
    if state.closed:
        return [Stop(job_id, Reason.QUEUE_FULL)]
    state.idle[job_id] = place.pop(job_id)
    if len(state.idle) <= state.max_idle:
        return []
    surplus = max(_of_the_most(state.idle.values(), job_id), key=_last_due).id
    place[surplus] = state.idle.pop(surplus)
    return [Stop(surplus, Reason.QUEUE_FULL)]


def _promote(state: State, job_id: int) -> None:
    for jobs in (state.queue, *_going(state)):
        job = jobs.get(job_id)
        if job is not None and job.lane is not Lane.PROMOTED:
            jobs[job_id] = replace(job, lane=Lane.PROMOTED, raised=state.next_number(), not_before=-math.inf)


def _demote(state: State, job_id: int) -> None:
    """It is a lookahead again, in its old place. One that was started beside the others goes on."""
    for jobs in (state.queue, *_going(state)):
        job = jobs.get(job_id)
        if job is not None:
            jobs[job_id] = replace(job, lane=Lane.LOOKAHEAD)


def _defer(state: State, event: Defer) -> list[Effect]:
    job = _ended(state, event.job_id)
    if job is None:
        return []
    since = event.now if job.deferred_at is None else job.deferred_at
    last = since + state.max_defer_s
    if job.lane is Lane.PROMOTED:  # just now, when admission had already answered for a lookahead
        state.queue[job.id] = replace(job, deferred_at=since)
        return []
    if event.now >= last:
        return [Drop(job.id, Reason.ADMISSION_DENIED)]
    state.queue[job.id] = replace(job, deferred_at=since, not_before=min(event.until, last))
    return []


def _fill(state: State, now: float) -> list[Effect]:
    """Start jobs while there are slots for them, or running ones that have had theirs for too long."""
    started: list[Effect] = []
    while (job := _next(state, now)) is not None:
        if not _room(state, job):
            leaving = _overdue(state)
            if not leaving or leaving[-1].stray_at > now:
                break
            for stray in leaving:
                state.strays[stray.id] = state.running.pop(stray.id)
        del state.queue[job.id]
        patience = state.stray_s if job.patience_s is None else job.patience_s
        state.running[job.id] = replace(job, started_at=now, stray_at=now + patience)
        served = state.served.setdefault(job.tenant, Served())
        served.number, served.child = state.next_number(), job.child
        state.served.move_to_end(job.tenant)
        if len(state.served) > MAX_TENANTS:
            state.served.popitem(last=False)
        started.append(Start(job.id))
    return started


def _room(state: State, job: Job) -> bool:
    """May it start beside what runs?"""
    if len(state.running) < state.concurrency:
        return True
    promoted = sum(other.lane is Lane.PROMOTED for other in state.running.values())
    beside = promoted < state.concurrency and len(state.running) < 2 * state.concurrency
    return job.lane is Lane.PROMOTED and beside


def _overdue(state: State) -> list[Job]:
    """The running jobs that have to go on without a slot for another one to get one, those first whose time is up
    first; none where that would be too many strays."""
    needed = len(state.running) - state.concurrency + 1
    if len(state.strays) + needed > state.concurrency:
        return []
    return sorted(state.running.values(), key=lambda job: job.stray_at)[:needed]


def _next(state: State, now: float) -> Job | None:
    """The job that the rules of this module name, if one can start."""
    ready = [job for job in state.queue.values() if job.not_before <= now]
    promoted = [job for job in ready if job.lane is Lane.PROMOTED]
    allowed = promoted or _within_budget(state, ready, now)
    running = Counter(job.tenant for jobs in (state.running, state.strays) for job in jobs.values())
    since = _waiting_since(state, allowed)

    def rank(job: Job) -> tuple[float, ...]:
        left_out = now - since[job.tenant] > state.starvation_s
        first = (0, since[job.tenant]) if left_out else (1, running[job.tenant])
        served = state.served.get(job.tenant)
        return *first, 0 if served is None else served.number, *_place(state, job, now)

    return min(allowed, key=rank, default=None)


def _starved(state: State, job: Job, now: float) -> bool:
    return now - job.queued_at > state.starvation_s


def _place(state: State, job: Job, now: float) -> tuple[float, ...]:
    """Within its tenant the job with the smallest one goes first."""
    if job.lane is Lane.PROMOTED:
        return 0, job.raised
    if job.due is None and _starved(state, job, now):
        return 1, job.queued_at, job.order
    return 2, math.inf if job.due is None else job.due, job.queued_at, job.order


def _within_budget(state: State, ready: list[Job], now: float) -> list[Job]:
    """Those that sub-agents' budget lets start before the others."""
    held = Counter(job.tenant for job in state.running.values() if job.child)
    with_others = {job.tenant for job in ready if not job.child}

    def over_budget(job: Job) -> bool:
        if not job.child:
            return False
        spent = held[job.tenant] >= state.child_slots
        if job.tenant not in with_others:
            return spent and not _starved(state, job, now)
        served = state.served.get(job.tenant)
        return spent or (state.takes_turns and served is not None and served.child)

    return [job for job in ready if not over_budget(job)] or ready


def _waiting_since(state: State, waiting: Iterable[Job]) -> dict[str, float]:
    """By tenant: when its oldest waiting job came, or its last job that was not sent back was started, if later."""
    since: dict[str, float] = {}
    for job in waiting:
        since[job.tenant] = min(since.get(job.tenant, math.inf), job.queued_at)
    for tenant in since:
        if (served := state.served.get(tenant)) is not None:
            since[tenant] = max(since[tenant], served.at)
    for jobs in _going(state):
        for job in jobs.values():
            if job.tenant in since:
                since[job.tenant] = max(since[job.tenant], job.started_at)
    return since


def _overflow(state: State, newcomer: int, now: float) -> Drop:
    """The queue is one too long: the tenant that has the most in it loses one, a lookahead as long as there is one."""
    lookaheads = [job for job in state.queue.values() if job.lane is Lane.LOOKAHEAD]
    found = _of_the_most(lookaheads or state.queue.values(), newcomer)
    victim = next((job for job in found if job.id == newcomer), None) or max(found, key=lambda j: _place(state, j, now))
    del state.queue[victim.id]
    return Drop(victim.id, Reason.QUEUE_FULL)


def _of_the_most(jobs: Iterable[Job], newcomer: int) -> list[Job]:
    """The jobs of the tenant that has the most of these; of several such tenants the newcomer's, else any."""
    of: dict[str, list[Job]] = {}
    for job in jobs:
        of.setdefault(job.tenant, []).append(job)
    return max(of.values(), key=lambda own: (len(own), any(job.id == newcomer for job in own)))


def _last_due(job: Job) -> tuple[float, int]:
    return math.inf if job.due is None else job.due, job.order


def _wake(state: State) -> list[Effect]:
    """With a free slot, everything that waits was deferred: say when the first of them may start. Without one, when
    the first of those that run may lose its slot to it."""
    if not state.queue:
        return []
    at = min(job.not_before for job in state.queue.values())
    if len(state.running) >= state.concurrency:
        leaving = _overdue(state)
        if not leaving or leaving[-1].stray_at == math.inf:
            return []
        at = max(at, leaving[-1].stray_at)
    return [Wake(at)]
