"""Endpoints: one model endpoint serves many agents. A bounded, fair lane for the calls of transforms to each.

Calls beyond the limit wait: those that a turn waits for first, then fairly between tenants and between the sessions of
one tenant (whoever has the fewest calls in flight, then whoever was served longest ago). The queue is bounded too: what
does not fit ends as ``queue_full``. All of it happens on the runtime's loop; nothing is held over a call but its place.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .errors import TransformError


class EndpointFull(TransformError):
    """Too many calls wait for this endpoint. It says nothing against the transform."""

    breaker_neutral = True
    retryable = False


@dataclass(slots=True, eq=False)
class _Waiter:
    turn: asyncio.Future[None]
    urgent: Callable[[], bool]
    queued: bool = True


class Endpoint:
    """The lane of one endpoint: at most ``limit`` calls in flight and ``max_waiting`` that wait."""

    def __init__(self, limit: int, max_waiting: int) -> None:
        self.limit = limit
        self.max_waiting = max_waiting
        self.in_flight = 0
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Waiter]]] = OrderedDict()
        self._count = 0
        self._running: Counter[Hashable] = Counter()

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return self._count

    @asynccontextmanager
    async def place(self, tenant: str, session: str, urgent: Callable[[], bool]) -> AsyncGenerator[None]:
        """A place among the calls in flight.

        Raises:
            EndpointFull: too many wait already.
        """
        if self.in_flight < self.limit and not self._count:
            self._enter(tenant, session)
        else:
            await self._wait(tenant, session, urgent)
        try:
            yield
        finally:
            self._leave(tenant, session)

    async def _wait(self, tenant: str, session: str, urgent: Callable[[], bool]) -> None:
        if self._count >= self.max_waiting:
            raise EndpointFull(f"{self._count} calls wait for this endpoint already")
        waiter = _Waiter(asyncio.get_running_loop().create_future(), urgent)
        self._waiting.setdefault(tenant, OrderedDict()).setdefault(session, deque()).append(waiter)
        self._count += 1
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.queued:
                self._remove(tenant, session, waiter)
            elif not waiter.turn.cancelled():
                self._leave(tenant, session)  # it was given a place at the same moment
            raise

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
        while self.in_flight < self.limit and self._count:
            tenant, session, waiter = self._next()
            self._remove(tenant, session, waiter)
            if not waiter.turn.cancelled():  # else it is about to notice
                self._enter(tenant, session)
                waiter.turn.set_result(None)

    def _next(self) -> tuple[str, str, _Waiter]:
        for tenant, sessions in self._waiting.items():
            for session, waiters in sessions.items():
                for waiter in waiters:
                    if waiter.urgent():
                        return tenant, session, waiter
        tenant = min(self._waiting, key=lambda t: self._running[t])
        session = min(self._waiting[tenant], key=lambda s: self._running[tenant, s])
        return tenant, session, self._waiting[tenant][session][0]

    def _remove(self, tenant: str, session: str, waiter: _Waiter) -> None:
        """It waits no longer; its tenant and session go behind the others."""
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

    @asynccontextmanager
    async def place(
        self, model: Any, identity: str | None, tenant: str, session: str, urgent: Callable[[], bool]
    ) -> AsyncGenerator[None]:
        """A place for one call to this model. Without an identity the object itself is the endpoint.

        Raises:
            EndpointFull: too many wait already.
        """
        key: Hashable = identity if identity is not None else id(model)
        lane = self._lanes.get(key)
        if lane is None:
            own = getattr(model, "max_in_flight", None)
            limit = own if isinstance(own, int) and not isinstance(own, bool) and own > 0 else self._concurrency
            lane = self._lanes[key] = Endpoint(limit, self._max_waiting)
        try:
            async with lane.place(tenant, session, urgent):
                yield
        finally:
            if not lane.in_flight and not lane.waiting and self._lanes.get(key) is lane:
                del self._lanes[key]


@dataclass(frozen=True, slots=True)
class _Caller:
    endpoints: Endpoints
    tenant: str
    session: str
    urgent: Callable[[], bool]


_caller: ContextVar[_Caller | None] = ContextVar("smoothctx_endpoint_caller", default=None)


@contextmanager
def calling(endpoints: Endpoints, tenant: str, session: str, urgent: Callable[[], bool]) -> Iterator[None]:
    """Calls of models inside are made for this session, through these endpoints."""
    token = _caller.set(_Caller(endpoints, tenant, session, urgent))
    try:
        yield
    finally:
        _caller.reset(token)


@asynccontextmanager
async def endpoint(model: Any, identity: str | None) -> AsyncGenerator[None]:
    """A place for one call to this model; at once where nobody counts.

    Raises:
        EndpointFull: too many wait already.
    """
    caller = _caller.get()
    if caller is None:
        yield
        return
    async with caller.endpoints.place(model, identity, caller.tenant, caller.session, caller.urgent):
        yield
