"""Single flight: handles of the same artifact share one flight. Who joins, who leaves, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from .events import EventSink
from .flight import Flight, reason_of
from .handle import LookaheadHandle
from .pool import Outcome, TaskPool, Work
from .states import HandleState, Reason
from .tally import Tally
from .transforms.base import Transform
from .usage import Cost, Usage

#: seconds after which a lookahead may lose its slot to another one: where its session's usual duration is known,
#: that many times of it, at least the second; otherwise ``STRAY_S``
STRAY_TIMES, LEAST_STRAY_S, STRAY_S = 4.0, 10.0, 60.0


@final
class Flights:
    """The flights of one runtime that have not ended. Thread-safe."""

    def __init__(self, pool: TaskPool, events: EventSink, tally: Tally, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._events = events
        self._tally = tally
        self._now = clock
        self._lock = threading.RLock()
        #: by tenant and artifact key
        self.listed: dict[tuple[str, str], Flight] = {}

    def find(self, tenant: str, key: str) -> Flight | None:
        """The flight under way for this artifact, if any (single flight)."""
        with self._lock:
            found = self.listed.get((tenant, key))
            return found if found is not None and not found.ended else None

    def claim(self, flight: Flight) -> Flight:
        """Register a new flight, unless another thread was faster: then that one."""
        with self._lock:
            return self.find(flight.tenant, flight.plan.key) or self.listed.setdefault(
                (flight.tenant, flight.plan.key), flight
            )

    def join(
        self,
        flight: Flight,
        handle: LookaheadHandle,
        *,
        due: float | None,
        usual_s: float | None = None,
        waited_s: float = 0.0,
    ) -> bool:
        """Add a handle to a flight, and put the flight into the queue if it is new. ``waited_s``: seconds that the one
        has waited there whose place it takes. False where the flight was given up since it was found: the last handle
        has left, and what becomes of it is nobody else's."""
        session = handle.session
        with self._lock:
            new, over = flight.work is None, flight.ended
            if not new and not flight.handles and (not over or flight.artifact is None or flight.reason is not None):
                return False
            flight.handles.append(handle)
            if new:
                flight.idle = lambda: self._idle(flight)
                flight.overdue = lambda: self._overdue(flight)
                flight.queued_at, flight.waited_s = self._now(), waited_s
                flight.work = Work(
                    key=flight.plan.key,
                    tenant=flight.tenant,
                    session=session.id,
                    child=session.parent is not None,
                    due=due,
                    wanted=flight.urgent,
                    waited_s=waited_s,
                    engine=flight.engine,
                    foreground=flight.foreground,
                    usual_s=usual_s,
                    timeout_s=None,
                    patience_s=None if usual_s is None else max(LEAST_STRAY_S, STRAY_TIMES * usual_s),
                    name=f"lookahead:{flight.plan.transform.name}:{session.id}",
                    run=flight.run,
                    on_start=lambda: self._started(flight),
                    on_done=lambda outcome: self._ended(flight, outcome),
                    breaker_key=_breaker_key(flight.tenant, flight.plan.transform),
                )
        self.started(handle)
        if new and flight.work is not None:
            self._pool.submit(flight.work)
            return True
        if flight.started_at is not None:
            handle.move(HandleState.RUNNING)
        if over:  # it ended on the loop while we joined
            session.ended(handle, flight.reason, flight.error)
        return True

    def started(self, handle: LookaheadHandle) -> None:
        """Count a new handle and say so."""
        plan, session = handle.flight.plan, handle.session
        self._tally.count("started")
        self._events.emit(
            "lookahead.started",
            session=session.id,
            tenant=session.tenant,
            handle=handle.id,
            transform=plan.transform.name,
            start=plan.start,
            end=plan.end,
            tokens=plan.source_tokens,
        )

    def leave(self, flight: Flight, handle: LookaheadHandle, reason: Reason) -> None:
        """A handle does not need its flight any more; the last one to leave cancels it."""
        with self._lock:
            if handle in flight.handles:
                flight.handles.remove(handle)
            last = not flight.handles and not flight.ended
            if last:
                self._unlist(flight)  # whoever asks for this key from now on gets a flight that is not cancelled
        self._tally.stale(reason)
        if last and flight.work is not None:
            self._pool.cancel(flight.work, reason)
        elif not flight.ended:
            self.release(flight)  # its promotion leaves with it
        if flight.ended and not flight.handles:
            self.wasted(flight, reason)

    def rests_s(self, tenant: str, transform: Transform) -> float:
        """Seconds for which this tenant's works by this transform are known not to be started, since they failed too
        often; ``inf`` while one of them is tried."""
        return self._pool.rests_s(_breaker_key(tenant, transform))

    def promote(self, flight: Flight) -> None:
        """Move a flight to the front of the queue, and other background work out of its way."""
        if flight.work is not None:
            with self._lock:
                flight.hurry()
            self._pool.promote(flight.work)

    def release(self, flight: Flight) -> None:
        """A turn waits for it no longer: without another one it is a lookahead like the others again."""
        with self._lock:
            if flight.work is None or flight.urgent():
                return
            flight.settled()
        self._pool.demote(flight.work)

    def wasted(self, flight: Flight, reason: Reason) -> None:
        """Tokens that were spent on a result nobody uses, counted once per flight."""
        with self._lock:
            if flight.accounted:
                return
            flight.accounted = flight.lost = True
            warmed, tokens = flight.warmed, flight.cost.dropped()
        self._tally.waste(tokens)
        self._tally.wasted(_evaluated(warmed))

    def used(self, flight: Flight) -> None:
        """Its result is in use: what was spent on it is no waste, or not any more."""
        with self._lock:
            flight.accounted = True
            tokens = flight.cost.settled()
        self._tally.waste(-tokens)

    def share(self, cost: Cost | None) -> Cost:
        """For one who finds a result again that was not used yet: what that has cost."""
        with self._lock:
            return Cost() if cost is None or cost.used else cost.shared()

    def warmed(self, flight: Flight | None, usage: Usage) -> None:
        """What a preload of the flight's result cost: wasted with it, if nobody uses that."""
        self._tally.preloaded(usage)
        if flight is None:
            return
        with self._lock:
            flight.warmed = flight.warmed + usage
            lost = flight.lost
        if lost:
            self._tally.wasted(_evaluated(usage))

    def cooled(self, flight: Flight) -> None:
        """What was warmed of its result is of no use any more, whatever becomes of that: wasted."""
        with self._lock:
            lost, flight.warmed = Usage() if flight.lost else flight.warmed, Usage()
        self._tally.wasted(_evaluated(lost))

    def _started(self, flight: Flight) -> None:
        flight.started_at = self._now()
        if flight.foreground is not None:
            flight.burdens = True
            flight.foreground.work_began()
        for handle in list(flight.handles):
            handle.move(HandleState.RUNNING)
            self._events.emit("lookahead.running", session=handle.session.id, tenant=flight.tenant, handle=handle.id)

    def _idle(self, flight: Flight) -> None:
        """Its result is there, and its preload waits for idle time: nobody else has to wait for that."""
        self._lighten(flight)
        if flight.work is not None:
            self._pool.idle(flight.work)

    def _overdue(self, flight: Flight) -> None:
        if flight.work is not None:
            self._pool.cancel(flight.work, Reason.TIMEOUT)

    def _lighten(self, flight: Flight) -> None:
        if flight.foreground is not None and flight.burdens:
            flight.burdens = False
            flight.foreground.work_ended()

    def _ended(self, flight: Flight, outcome: Outcome) -> None:
        error = outcome.error if isinstance(outcome.error, Exception) else None
        reason = outcome.reason
        if error is not None and reason is Reason.FAILED:
            reason = reason_of(error)
        if flight.artifact is not None and reason in (Reason.TIMEOUT, Reason.FAILED, Reason.QUEUE_FULL):
            reason, error = None, None  # only the preload went wrong or gave up: a cold commit is slower, never wrong
        flight.ended_at = self._now()
        with self._lock:
            flight.ended, flight.reason, flight.error = True, reason, error
            self._unlist(flight)
            handles = list(flight.handles)
        flight.settled()
        self._lighten(flight)
        self._tally.spent(flight.usage)
        if flight.usage.calls:
            self._events.emit(
                "usage",
                tenant=flight.tenant,
                session=flight.plan.request.session_id,
                transform=flight.plan.transform.name,
                usage=flight.usage,
            )
        for handle in handles:
            handle.session.ended(handle, reason, error)
        if not handles:
            self.wasted(flight, reason or Reason.CANCELLED)

    def _unlist(self, flight: Flight) -> None:
        if self.listed.get((flight.tenant, flight.plan.key)) is flight:
            del self.listed[(flight.tenant, flight.plan.key)]


def _breaker_key(tenant: str, transform: Transform) -> str:
    return f"{tenant}:{transform.fingerprint or id(transform)}"


def _evaluated(usage: Usage) -> Usage:
    """Of a preload only what was not cached: each request sends again what the one before it has warmed."""
    return Usage(input_tokens=usage.input_tokens - (usage.cached_tokens or 0))
