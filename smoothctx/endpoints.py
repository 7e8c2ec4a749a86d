"""Endpoints: one model endpoint serves many agents. A bounded, fair lane for the calls of transforms to each.

Calls beyond the limit wait: those that a turn waits for first, then fairly between tenants and between the sessions of
one tenant (whoever has the fewest calls in flight, then whoever was served longest ago). The queue is bounded too: when
it is full, the tenant with the most calls in it loses one (of its sessions the one with the most), but none that a turn
waits for as long as another can make room. What does not fit ends as ``queue_full``. All of it happens on the runtime's
loop; nothing is held over a call but its place.

The limit adapts. An overloaded server (429, 5xx) halves it, once for all the calls that were in flight together; so
does, on a hosted API, a call that ended while the foreground's first tokens came late. Each success raises it a little,
up to what was configured. While a server has asked us to stay away (``Retry-After``) nobody is given a place.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from .errors import EngineOverloaded, TransformError, refuses_messages
from .foreground import Foreground
from .retry import retry_after

#: seconds: a call waits that long at most for an endpoint that asked us to stay away; no such wish counts for longer
REST_WAIT_S, MAX_REST_S = 60.0, 3600.0
#: under which names errors tell an HTTP status
_STATUS = ("status", "status_code", "code")
#: endpoints whose lower limit is remembered while nobody uses them
MAX_REMEMBERED = 256


class EndpointFull(TransformError):
    """Too many calls wait for this endpoint, or it rests too long. It says nothing against the transform."""

    breaker_neutral = True
    retryable = False


def overload(error: BaseException) -> float | None:
    """Seconds that a server asks us to stay away with this error, 0 if it does not say; ``None``: it is no overload.

    Model clients of others show the status and the headers of an answer under the names that are looked for here, on
    the error or on its ``response``.
    """
    response = _of(error, "response")
    status = next((s for s in (*map(partial(_of, error), _STATUS), _of(response, "status_code")) if _failing(s)), None)
    if status is not None and status != 429 and refuses_messages(str(error)):
        return None  # a chat template that does not take the messages: llama.cpp says 500
    if not isinstance(error, EngineOverloaded) and status is None:
        return None
    asked: Any = _of(error, "retry_after_s")
    if asked is None:
        headers = _of(response, "headers")
        try:
            asked = retry_after(_of(error, "headers") if headers is None else headers)
        except (AttributeError, TypeError):
            return 0.0
    known = isinstance(asked, int | float) and 0 < asked < math.inf
    return min(MAX_REST_S, float(asked)) if known else 0.0


def _of(thing: Any, name: str) -> Any:
    """A field of somebody else's object; ``None`` where it has none, or cannot say."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _failing(status: Any) -> bool:
    return isinstance(status, int) and (status == 429 or 500 <= status < 600)


def _never() -> bool:
    return False


def _key(model: Any, identity: str | None) -> Hashable:
    """What names a model's endpoint. A bound method is a new object at each look: what stays is whose it is."""
    if identity is not None:
        return identity
    return (id(model.__self__), id(model.__func__)) if inspect.ismethod(model) else id(model)


@dataclass(slots=True, eq=False)
class _Waiter:
    tenant: str
    session: str
    turn: asyncio.Future[None]
    urgent: Callable[[], bool]
    queued: bool = True
    #: its place in the queue was needed
    refused: bool = False


class Endpoint:
    """The lane of one endpoint: at most ``limit`` calls in flight, ``ceiling`` in good times, and ``max_waiting`` that
    wait."""

    def __init__(self, ceiling: int, max_waiting: int) -> None:
        self.ceiling = ceiling
        self.max_waiting = max_waiting
        self.in_flight = 0
        self._limit = float(ceiling)
        self._cut_at = self._rests_until = -math.inf
        self._now: Callable[[], float] | None = None  # the clock of the loop on which it rests; asked from any thread
        #: the model that it is the lane of, where that has no identity
        self.model: weakref.ref[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Waiter]]] = OrderedDict()
        self._count = 0
        self._running: Counter[Hashable] = Counter()

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return self._count

    @property
    def limit(self) -> int:
        """Calls that may be in flight now."""
        return max(1, int(self._limit))

    @property
    def rests_s(self) -> float:
        """Seconds for which the endpoint has asked us to stay away."""
        return 0.0 if self._now is None else max(0.0, self._rests_until - self._now())

    @property
    def adapted(self) -> bool:
        """Does it serve less than in good times?"""
        return self._limit < self.ceiling or self.rests_s > 0

    @asynccontextmanager
    async def place(
        self, tenant: str, session: str, urgent: Callable[[], bool], slower: Callable[[], bool] = _never
    ) -> AsyncGenerator[None]:
        """A place among the calls in flight. ``slower()``: the foreground's first tokens come late.

        Raises:
            EndpointFull: too many wait already, or it rests for long.
        """
        if self.in_flight < self.limit and not self._count and not self.rests_s:
            self._enter(tenant, session)
        else:
            await self._wait(tenant, session, urgent)
        began = asyncio.get_running_loop().time()
        try:
            yield
        except Exception as error:
            asked = overload(error)
            if asked is not None:
                self._cut(began, asked)
            raise
        else:
            if slower():
                self._cut(began)
            elif self._limit < self.ceiling:
                self._limit = min(self.ceiling, self._limit + 1 / self._limit)
        finally:
            self._leave(tenant, session)

    def cut(self, rest_s: float = 0.0) -> None:
        """A call that took no place here was told that the server is overloaded."""
        self._cut(asyncio.get_running_loop().time(), rest_s)

    def _cut(self, began: float, rest_s: float = 0.0) -> None:
        """Half as many from now on; what was in flight then already says nothing more."""
        self._now = asyncio.get_running_loop().time
        now = self._now()
        self._rests_until = max(self._rests_until, now + rest_s) if rest_s else self._rests_until
        if began >= self._cut_at:
            self._limit, self._cut_at = max(1.0, self._limit / 2), now

    async def _wait(self, tenant: str, session: str, urgent: Callable[[], bool]) -> None:
        if self.rests_s > REST_WAIT_S:
            raise EndpointFull(f"this endpoint has asked for {self.rests_s:.0f} s without calls")
        waiter = _Waiter(tenant, session, asyncio.get_running_loop().create_future(), urgent)
        if self._count >= self.max_waiting:
            self._make_room(waiter)
        self._waiting.setdefault(tenant, OrderedDict()).setdefault(session, deque()).append(waiter)
        self._count += 1
        self._set_timer()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.queued:
                self._remove(waiter)
                self._set_timer()
            elif not waiter.turn.cancelled() and not waiter.refused:
                self._leave(tenant, session)  # it was given a place at the same moment
            raise
        if waiter.refused:
            raise self._full()

    def _full(self) -> EndpointFull:
        return EndpointFull(f"{self._count} calls wait for this endpoint already")

    def _make_room(self, newcomer: _Waiter) -> None:
        """The queue is full. One of those that have the most in it goes: no urgent one if another can, and the newcomer
        itself, with an error, if it is one of these."""
        waiting = [w for sessions in self._waiting.values() for waiters in sessions.values() for w in waiters]
        everybody = [*waiting, newcomer]
        candidates = [w for w in everybody if not w.urgent()] or everybody
        tenants = Counter(w.tenant for w in candidates)
        sessions = Counter((w.tenant, w.session) for w in candidates)

        def share(waiter: _Waiter) -> tuple[int, int]:
            return tenants[waiter.tenant], sessions[waiter.tenant, waiter.session]

        most = max(map(share, candidates))
        victim = [w for w in candidates if share(w) == most][-1]  # of several the newcomer, else one that came late
        if victim is newcomer:
            raise self._full()
        self._remove(victim)
        victim.refused = True
        if not victim.turn.cancelled():  # else it is about to notice
            victim.turn.set_result(None)

    def _enter(self, tenant: str, session: str) -> None:
        self.in_flight += 1
        self._running[tenant] += 1
        self._running[tenant, session] += 1

    def _leave(self, tenant: str, session: str) -> None:
        self.in_flight -= 1
        for key in (tenant, (tenant, session)):
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
        self._fill()

    def _fill(self) -> None:
        while self.in_flight < self.limit and self._count and not self.rests_s:
            waiter = self._next()
            self._remove(waiter)
            if not waiter.turn.cancelled():  # else it is about to notice
                self._enter(waiter.tenant, waiter.session)
                waiter.turn.set_result(None)

        self._set_timer()

    def _set_timer(self) -> None:
        """Look again when the endpoint has rested, if anybody waits for that."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._count and self.rests_s:
            self._timer = asyncio.get_running_loop().call_later(self.rests_s, self._fill)

    def _next(self) -> _Waiter:
        for sessions in self._waiting.values():
            for waiters in sessions.values():
                for waiter in waiters:
                    if waiter.urgent():
                        return waiter
        tenant = min(self._waiting, key=lambda t: self._running[t])
        session = min(self._waiting[tenant], key=lambda s: self._running[tenant, s])
        return self._waiting[tenant][session][0]

    def _remove(self, waiter: _Waiter) -> None:
        """It waits no longer; its tenant and session go behind the others."""
        tenant, session = waiter.tenant, waiter.session
        sessions = self._waiting[tenant]
        sessions[session].remove(waiter)
        waiter.queued = False
        self._count -= 1
        if sessions[session]:
            sessions.move_to_end(session)
        else:
            del sessions[session]
        if sessions:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]


class Endpoints:
    """The lanes of one runtime, by endpoint, for as long as anybody uses them.

    Args:
        concurrency: calls in flight to one endpoint, where the engine does not say (its ``max_in_flight``).
        max_waiting: calls that wait for one endpoint.
    """

    def __init__(self, *, concurrency: int, max_waiting: int) -> None:
        self._concurrency = concurrency
        self._max_waiting = max_waiting
        self._lanes: dict[Hashable, Endpoint] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def in_flight(self, engine: Any) -> int:
        """Calls of ours to this engine."""
        lane = self._lane(engine, getattr(engine, "identity", None))
        return 0 if lane is None else lane.in_flight

    def rests(self, model: Any, identity: str | None = None) -> float:
        """Seconds for which this model's server has asked us to stay away; ``identity`` where it is not the model's
        own. From any thread."""
        lane = self._lane(model, identity or getattr(model, "identity", None))
        return 0.0 if lane is None else lane.rests_s

    def overloaded(self, model: Any, error: BaseException) -> bool:
        """Did this error of a call outside the lane say that the model's server is overloaded? The lane then serves
        less, and rests as the server asked. On the runtime's loop."""
        asked = overload(error)
        if asked is None:
            return False
        key = _key(model, getattr(model, "identity", None))
        lane = self._lanes.get(key) or self._new(model, key)
        lane.cut(asked)
        self._tidy(key, lane)
        return True

    def _lane(self, model: Any, identity: str | None) -> Endpoint | None:
        return self._lanes.get(_key(model, identity))

    def _new(self, model: Any, key: Hashable) -> Endpoint:
        own = getattr(model, "max_in_flight", None)
        limit = own if isinstance(own, int) and not isinstance(own, bool) and own > 0 else self._concurrency
        lane = self._lanes[key] = Endpoint(limit, self._max_waiting)
        if not isinstance(key, str):
            lanes = self._lanes

            def gone(_: object) -> None:  # another object may get its number from now on
                if lanes.get(key) is lane:
                    lanes.pop(key, None)

            try:
                lane.model = weakref.ref(model.__self__ if inspect.ismethod(model) else model, gone)
            except TypeError:  # it cannot be held weakly: nothing is remembered of it
                pass
        return lane

    @asynccontextmanager
    async def place(
        self,
        model: Any,
        identity: str | None,
        tenant: str,
        session: str,
        urgent: Callable[[], bool],
        slower: Callable[[], bool] = _never,
    ) -> AsyncGenerator[None]:
        """A place for one call to this model. Without an identity the object itself is the endpoint; of a method, the
        object that it belongs to and the method.

        ``slower()``: the foreground's first tokens come late. It counts on hosted APIs; on servers of one's own
        admission sees to it.

        Raises:
            EndpointFull: too many wait already, or it rests for long.
        """
        key = _key(model, identity)
        lane = self._lanes.get(key) or self._new(model, key)
        known = getattr(model, "capabilities", None)
        hosted = known is None or known.flavour == "hosted"
        try:
            async with lane.place(tenant, session, urgent, slower if hosted else _never):
                yield
        finally:
            self._tidy(key, lane)

    def _tidy(self, key: Hashable, lane: Endpoint) -> None:
        """Forget a lane that nobody uses, unless it has learned something: of those the latest are kept."""
        if lane.in_flight or lane.waiting or self._lanes.get(key) is not lane:
            return
        del self._lanes[key]
        if lane.adapted and (isinstance(key, str) or lane.model is not None):
            self._lanes[key] = lane
            idle = [k for k, known in list(self._lanes.items()) if not known.in_flight and not known.waiting]
            for old in idle[: max(0, len(idle) - MAX_REMEMBERED)]:
                self._lanes.pop(old, None)


@dataclass(slots=True, eq=False)
class Caller:
    """For whom a transform's model calls are made.

    ``urgent()``: a turn waits for them. ``foreground``: whose turns they may disturb. ``calls``: those in flight.
    ``usable``: there is something that a turn could use, while they go on for something better. ``aside_s``: seconds
    that they may still wait for the first tokens of turns, in all. ``ends_at``: when their time is over, on the loop's
    clock.
    """

    endpoints: Endpoints
    tenant: str
    session: str
    urgent: Callable[[], bool]
    foreground: Foreground | None
    aside_s: float = 0.0
    ends_at: float = math.inf
    calls: int = 0
    usable: bool = False

    def slower(self) -> bool:
        """Do the foreground's first tokens come late?"""
        return self.foreground is not None and bool(self.foreground.seen().slower)


_caller: ContextVar[Caller | None] = ContextVar("smoothctx_endpoint_caller", default=None)


@contextmanager
def calling(
    endpoints: Endpoints,
    tenant: str,
    session: str,
    urgent: Callable[[], bool],
    foreground: Foreground | None = None,
    aside_s: float = 0.0,
    ends_at: float = math.inf,
) -> Iterator[Caller]:
    """Calls of models inside are made for this session, through these endpoints."""
    who = Caller(endpoints, tenant, session, urgent, foreground, aside_s, ends_at)
    token = _caller.set(who)
    try:
        yield who
    finally:
        _caller.reset(token)


def caller() -> Caller | None:
    """For whom the running code calls models; ``None`` outside any runtime."""
    return _caller.get()


@asynccontextmanager
async def endpoint(model: Any, identity: str | None) -> AsyncGenerator[None]:
    """A place for one call to this model; at once where nobody counts.

    Raises:
        EndpointFull: too many wait already.
    """
    who = caller()
    if who is None:
        yield
        return
    async with who.endpoints.place(model, identity, who.tenant, who.session, who.urgent, who.slower):
        who.calls += 1
        try:
            yield
        finally:
            who.calls -= 1
