"""The task pool: carries out what the scheduler decides, in tasks of its own.

One owner task holds a task group; a worker in it looks after each job that runs. Code that is not ours (the work
itself, admission) runs beside the group, where it can be left behind (see :mod:`smoothctx.foreign`). A run that was
left behind keeps its slot until it ends or becomes a stray, so these are bounded too.

Every work gets exactly one :class:`Outcome`, whatever happens: to the work, to the pool, or to the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, final

from . import scheduler
from .breaker import Breakers
from .errors import ClosedError, ConfigurationError
from .foreign import background_context, spawn
from .retry import RetryBudget, jitter
from .scheduler import (
    Cancel,
    Close,
    Defer,
    Demote,
    Drop,
    Finish,
    Idle,
    Job,
    Lane,
    Promote,
    Start,
    Stop,
    Submit,
    Tick,
    Wake,
)
from .states import Reason
from .work import (
    MAX_DEFER_S,
    Admission as Admission,
    Outcome as Outcome,
    PoolStatistics as PoolStatistics,
    Work as Work,
)
from .worker import Entry, Worker

#: seconds: no timer is shorter, so that a clock that runs apart from the loop's cannot make it spin
MIN_TIMER_S = 0.001
#: seconds that cancelled code may take to end where somebody waits for it
BRIEF_GRACE_S = 0.005

#: owners that run: the event loop itself holds tasks weakly only, and a pool may be forgotten unclosed
_owners: set[asyncio.Task[None]] = set()


@dataclass(slots=True)
class _Command:
    """A call from another thread, to be carried out on the loop."""

    act: Callable[[Work, Reason], None]
    work: Work
    reason: Reason = Reason.SHUTDOWN


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@final
class TaskPool:
    """Runs :class:`Work`, a bounded number at once, in the order of :mod:`smoothctx.scheduler`.

    Args:
        concurrency: works that run at once.
        max_pending: works that wait at most; of more the latest of the tenant that has the most ends as ``queue_full``.
        clock: seconds, monotonic.
        admission: asked before each work starts.
        on_error: called with an error that was kept from everybody, and where it happened.
        breakers: the circuit breakers; by default 3 failures in a row make a key rest for 60 s.
        retry_budget: shared by all works.
        rng: the jitter of retries.
        starvation_s, max_defer_s, child_share, stray_s: see :class:`smoothctx.scheduler.State`.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        *,
        concurrency: int = 2,
        max_pending: int = 256,
        clock: Callable[[], float],
        admission: Admission | None = None,
        on_error: Callable[[BaseException, str], None] | None = None,
        breakers: Breakers | None = None,
        retry_budget: RetryBudget | None = None,
        rng: random.Random | None = None,
        starvation_s: float = 30.0,
        max_defer_s: float = MAX_DEFER_S,
        child_share: float = 0.5,
        stray_s: float = math.inf,
    ) -> None:
        for option, whole in (("concurrency", concurrency), ("max_pending", max_pending)):
            if isinstance(whole, bool) or not isinstance(whole, int) or whole < 1:
                raise ConfigurationError(f"{option}={whole!r}: expected a whole number of at least 1")
        for option, seconds in (("starvation_s", starvation_s), ("max_defer_s", max_defer_s), ("stray_s", stray_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
                raise ConfigurationError(f"{option}={seconds!r}: expected seconds, at least 0")
        if isinstance(child_share, bool) or not isinstance(child_share, int | float) or not 0 <= child_share <= 1:
            raise ConfigurationError(f"child_share={child_share!r}: expected a number from 0 to 1")
        self._state = scheduler.State(
            concurrency=concurrency,
            max_pending=max_pending,
            starvation_s=starvation_s,
            max_defer_s=max_defer_s,
            child_share=child_share,
            stray_s=stray_s,
        )
        self._now = clock
        self._on_error = on_error
        self._worker = Worker(
            clock=clock,
            admission=admission,
            breakers=breakers if breakers is not None else Breakers(),
            budget=retry_budget or RetryBudget(clock),
            rng=rng or jitter(),
            report=self._report,
        )
        self._ids = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._by_work: dict[Work, Entry] = {}
        self._starting: deque[Entry] = deque()
        self._live: set[Entry] = set()
        self._left: dict[asyncio.Task[Any], int] = {}  # runs left behind, and the jobs whose slots they hold
        self._events: deque[scheduler.Event] = deque()
        self._stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self._submitted = 0
        self._finished = 0
        self._unfinished: Counter[Reason] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        # what other threads asked for; the lock guards these two only and is never held around a call out
        self._inbox: deque[_Command] = deque()
        self._ended = False
        self._lock = threading.Lock()

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin, on the running loop. Background work sees a copy of this caller's context.

        Raises:
            ClosedError: it was started or closed before.
        """
        if self._loop is not None or self._ended:
            raise ClosedError("a TaskPool starts once: make a new one")
        self._loop = asyncio.get_running_loop()
        self._owner = spawn(self._main(), "smoothctx-pool", background_context())
        _owners.difference_update([task for task in _owners if task.get_loop().is_closed()])
        _owners.add(self._owner)
        self._owner.add_done_callback(self._owner_done)

    async def aclose(self, *, drain: bool = False, grace_s: float = 5.0) -> None:
        """Accept nothing more, end everything, and return when no task of ours is left.

        With ``drain`` what waits or runs may finish; otherwise it is cancelled and ends as ``shutdown``. What
        does not stop within ``grace_s`` seconds of its cancellation is reported and left behind.

        Calling it again is fine (to give up on a drain, for one); so is cancelling it: what has begun goes on,
        and the next call waits for it. A work that closes its own pool is cancelled like any other.

        Raises:
            RuntimeError: a work drains its own pool.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            self._finish()
            return
        if loop is not asyncio.get_running_loop():
            if not loop.is_running():
                self._finish()
                return
            closing = self.aclose(drain=drain, grace_s=grace_s)
            try:
                there = asyncio.run_coroutine_threadsafe(closing, loop)
            except RuntimeError:  # closed just now
                closing.close()
                self._finish()
                return
            await asyncio.wrap_future(there)
            return
        if drain and asyncio.current_task() in self._worker.foreign.tasks:
            raise RuntimeError("a work cannot drain its own pool: it would wait for itself")
        self._worker.grace_s = grace_s
        self._take()
        self._step(Close(now=self._now(), drain=drain))
        for left in list(self._left):  # what waits must not wait for them any longer
            self._free_left(left)
        self._wake.set()
        if self._owner is not None:
            await asyncio.wait({self._owner})

    async def _main(self) -> None:
        """The owner: starts workers, in its own context, until the pool is closed and empty."""
        try:
            # asyncio's own group: a child that somebody else cancels is that child's business only, and one that is
            # cancelled before its first step leaves no coroutine behind that was never awaited
            async with asyncio.TaskGroup() as group:
                while not self._state.closed or self._state.queue or self._live:
                    await self._wake.wait()
                    self._wake.clear()
                    while self._starting:
                        entry = self._starting.popleft()
                        worker = group.create_task(self._serve(entry), name=f"smoothctx-worker:{entry.work.name}")
                        worker.add_done_callback(partial(self._served, entry))
        finally:
            self._finish()

    def _owner_done(self, owner: asyncio.Task[None]) -> None:
        _owners.discard(owner)
        self._finish()  # it may have been cancelled before its first step
        error = None if owner.cancelled() else owner.exception()
        if error is not None:
            self._report(error, "pool")

    def _finish(self) -> None:
        """The last thing, once, however the owner went: whoever still waits for an outcome gets it."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._step(Close(now=self._now()))
        self._take()
        for entry in list(self._entries.values()):
            self._settle(entry, Outcome(reason=Reason.SHUTDOWN))
        self._starting.clear()
        self._live.clear()  # those that were given a slot too late

    # -- what callers do; from any thread ----------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Queue a work. Never blocks; a closed pool answers with the outcome ``shutdown``.

        A work that is queued or running already is not queued again.

        Raises:
            ClosedError: the pool was never started.
        """
        if self._loop is None and not self._ended:
            raise ClosedError("the TaskPool was not started")
        self._do(_Command(self._submit, work))

    def promote(self, work: Work) -> None:
        """Move a work to the front: a turn waits for it. Nothing happens if it has ended."""
        self._do(_Command(self._promote, work))

    def demote(self, work: Work) -> None:
        """Put a work back to where it was before :meth:`promote`, unless somebody wants it (``work.wanted()``) by the
        time that this is carried out."""
        self._do(_Command(self._demote, work))

    def rests_s(self, breaker_key: str) -> float:
        """Seconds for which works of this key are known not to be started, since they failed too often; ``inf`` while
        one of them is tried. From any thread."""
        return self._worker.breakers.rests_s(breaker_key, self._now())

    def cancel(self, work: Work, reason: Reason = Reason.CANCELLED) -> None:
        """End a work with this reason. One that runs is cancelled, and its outcome comes when it has stopped."""
        self._do(_Command(self._cancel, work, reason))

    def idle(self, work: Work) -> None:
        """A running work has its result, and what is left of it only waits for the idle time of others: it holds no
        slot any more, and may be ended as ``queue_full`` when too many do so."""
        self._do(_Command(self._idle, work))

    async def briefly(self, name: str, run: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> bool:
        """Run code that is not ours, beside all works, for so long; did it end? What does not end soon after it was
        cancelled is left behind. On the pool's loop.

        Raises:
            Exception: whatever ``run`` raised.
        """
        call = self._worker.foreign.begin(lambda _: run(), f"smoothctx:{name}")
        ended = await call.watch(seconds, lambda: BRIEF_GRACE_S)
        if ended and not call.task.cancelled():
            call.task.result()
        return ended

    def statistics(self) -> PoolStatistics:
        """A snapshot of now."""
        return PoolStatistics(
            queued=len(self._state.queue),
            running=len(self._live),
            strays=len(self._state.strays),
            idle=len(self._state.idle),
            abandoned=len(self._worker.foreign.abandoned),
            resting=self._worker.breakers.resting(),
            submitted=self._submitted,
            finished=self._finished,
            unfinished=MappingProxyType(dict(self._unfinished)),
        )

    def __repr__(self) -> str:
        s = self._state
        life = "ended" if self._ended else "new" if self._loop is None else "closing" if s.closed else "open"
        strays = f" and {len(s.strays)} strays" if s.strays else ""
        idle = f", {len(s.idle)} idle" if s.idle else ""
        live = sum(entry.id not in s.strays and entry.id not in s.idle for entry in self._live)
        return f"<TaskPool {life}, {live}/{s.concurrency}{strays} running{idle}, {len(s.queue)}/{s.max_pending} queued>"

    def _do(self, command: _Command) -> None:
        """Carry a command out: at once on our loop, soon from elsewhere."""
        with self._lock:
            ended = self._ended
            if not ended:
                self._inbox.append(command)
        loop = self._loop
        if ended or loop is None:
            if command.act == self._submit:
                self._tell(command.work, Outcome(reason=Reason.SHUTDOWN))
        elif loop.is_closed():
            self._finish()
        elif _running_loop() is loop:
            self._take()
        else:
            try:
                loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # closed just now
                self._finish()

    def _take(self) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            command.act(command.work, command.reason)

    def _submit(self, work: Work, _: Reason) -> None:
        if work in self._by_work:
            return
        entry = Entry(next(self._ids), work, promoted=work.promoted)
        self._entries[entry.id] = self._by_work[work] = entry
        self._submitted += 1
        lane = Lane.PROMOTED if work.promoted else Lane.LOOKAHEAD
        job = Job(
            id=entry.id,
            tenant=work.tenant,
            session=work.session,
            child=work.child,
            due=work.due,
            patience_s=work.patience_s,
            waited_s=work.waited_s,
            lane=lane,
        )
        self._step(Submit(now=self._now(), job=job))

    def _promote(self, work: Work, _: Reason) -> None:
        entry = self._by_work.get(work)
        if entry is not None:
            entry.promoted = work.promoted = True
            self._step(Promote(now=self._now(), job_id=entry.id))

    def _demote(self, work: Work, _: Reason) -> None:
        entry = self._by_work.get(work)
        if entry is not None and entry.promoted and not work.wanted():
            entry.promoted = work.promoted = False
            self._step(Demote(now=self._now(), job_id=entry.id))

    def _cancel(self, work: Work, reason: Reason) -> None:
        entry = self._by_work.get(work)
        if entry is not None:
            self._step(Cancel(now=self._now(), job_id=entry.id, reason=reason))

    def _idle(self, work: Work, _: Reason) -> None:
        entry = self._by_work.get(work)
        if entry is not None:
            self._step(Idle(now=self._now(), job_id=entry.id))

    # -- from the scheduler's decisions to tasks -----------------------------------------------------------------

    def _step(self, event: scheduler.Event) -> None:
        """Tell the scheduler, and do what it says. A callback may come back here: its event waits its turn."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                effects = scheduler.step(self._state, self._events.popleft())
                self._set_timer(next((effect.at for effect in effects if isinstance(effect, Wake)), None))
                for effect in effects:
                    self._carry_out(effect)
        finally:
            self._stepping = False

    def _carry_out(self, effect: scheduler.Effect) -> None:
        match effect:
            case Start(job_id=job_id):
                starting = self._entries.get(job_id)
                if starting is not None:
                    self._live.add(starting)
                    self._starting.append(starting)
                    self._wake.set()
            case Stop(job_id=job_id, reason=reason):
                stopping = self._entries.get(job_id)
                if stopping is not None and stopping.stop is None:
                    stopping.stop = reason
                    if stopping.call is not None and not self._ended:
                        stopping.call.stop()
            case Drop(job_id=job_id, reason=reason):
                dropped = self._entries.get(job_id)
                if dropped is not None:
                    self._settle(dropped, Outcome(reason=reason))
            case Wake():
                pass

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None and self._loop is not None and not self._ended:
            delay = max(MIN_TIMER_S, at - self._now())
            self._timer = self._loop.call_later(delay, lambda: self._step(Tick(now=self._now())))

    def _settle(self, entry: Entry, outcome: Outcome) -> None:
        """Give a work its outcome. The only caller of ``on_done``; the entry is gone before it, so once."""
        if self._entries.pop(entry.id, None) is None:
            return
        del self._by_work[entry.work]
        if outcome.reason is None:
            self._finished += 1
        else:
            self._unfinished[outcome.reason] += 1
        self._tell(entry.work, outcome)

    def _tell(self, work: Work, outcome: Outcome) -> None:
        try:
            work.on_done(outcome)
        except Exception as error:
            self._report(error, f"on_done of {work.name}")

    def _report(self, error: BaseException, where: str) -> None:
        if self._on_error is None:
            return
        try:
            self._on_error(error, where)
        except Exception:
            logging.getLogger("smoothctx").warning("on_error raised for %s", where, exc_info=True)

    # -- workers -----------------------------------------------------------------------------------------------

    async def _serve(self, entry: Entry) -> Outcome | float:
        """One job, from its start to its outcome (or the seconds for which admission put it off)."""
        try:
            return await self._worker.serve(entry)
        except Exception as error:  # a mistake of ours; the work must not be lost for it
            self._report(error, f"worker of {entry.work.name}")
            return Outcome(reason=Reason.FAILED, error=error)

    def _served(self, entry: Entry, worker: asyncio.Task[Outcome | float]) -> None:
        """A worker is gone; also when it was cancelled before its first step."""
        self._live.discard(entry)
        ending = Outcome(reason=entry.stop or Reason.SHUTDOWN) if worker.cancelled() else worker.result()
        if isinstance(ending, Outcome):
            self._free(entry)
            self._settle(entry, ending)
        else:
            now = self._now()
            self._step(Defer(now=now, job_id=entry.id, until=now + ending))
        self._wake.set()

    def _free(self, entry: Entry) -> None:
        """Its slot is free, unless its run was left behind and still needs it."""
        if entry.left is None or entry.left.done() or self._state.closed:
            self._step(Finish(now=self._now(), job_id=entry.id))
        else:
            self._left[entry.left] = entry.id
            entry.left.add_done_callback(self._free_left)

    def _free_left(self, task: asyncio.Task[Any]) -> None:
        job_id = self._left.pop(task, None)
        if job_id is not None:
            self._step(Finish(now=self._now(), job_id=job_id))
