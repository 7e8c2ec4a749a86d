"""Foreground: which turns are in flight on an engine, so that background work can keep out of their way.

A turn is open from its commit (a model call is due) to its observe (the reply is there), for as long as its lease at
most: nobody may ever tell of its end. Calls that we see in full are more exact: they say when the first token came, and
they end for certain. Everything here is thread-safe and never blocks.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import anyio

from .demand import Busy, Demand, Latency

T = TypeVar("T")

#: a first token counts as late from this many times what it takes on a calm engine, and this many seconds more
GROWTH, GROWTH_S = 1.5, 0.1
#: requests of preloads that an engine gets at once
WARMING = 2
#: seconds for which a call counts at most: longer than any that is still waited for
CALL_S = 3600.0
#: seconds between two looks at leases that are about to run out, at least
LEAST_LOOK_S = 0.01


@dataclass(slots=True)
class _Open:
    until: float
    owner: Hashable
    decoding: bool = False
    #: nothing else was in flight beside it, background work included
    alone: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a foreground is like now: users with a turn in flight, background works, the last seconds, TTFT."""

    in_flight: int = 0
    working: int = 0
    busy: Busy = Busy()
    latency: Latency | None = None

    @property
    def slower(self) -> bool | None:
        """Do first tokens take clearly longer than on a calm engine? ``None`` while unknown."""
        if self.latency is None:
            return None
        return self.latency.now_s > max(GROWTH * self.latency.calm_s, self.latency.calm_s + GROWTH_S)


class Foreground:
    """The foreground of one engine. ``lease_s`` bounds how long a turn counts that never reported its end."""

    def __init__(self, clock: Callable[[], float], *, lease_s: float = 120.0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._open: dict[Hashable, _Open] = {}
        self._owners: Counter[Hashable] = Counter()
        self._working = self._warming = 0
        self._demand = Demand()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = []
        self._lock = threading.Lock()

    def begin(self, who: Hashable, owner: Hashable = None, *, lease_s: float | None = None) -> None:
        """A turn or call of ``who`` is due: background prefill stays away from now on.

        ``owner``: whose it is; a turn and the call in it count as one user of the engine. ``lease_s``: seconds for
        which it counts at most, where that is not a turn's lease (``CALL_S`` for a call that we see in full, and never
        more than that).
        """
        with self._lock:
            now = self._lapse()
            self._close(who)
            mine = who if owner is None else owner
            others = len(self._owners) - (mine in self._owners)
            if others == 1:  # with more of them none was alone before
                for other in self._open.values():
                    other.alone = False
            until = now + (self._lease_s if lease_s is None else max(0.0, min(CALL_S, lease_s)))
            self._open[who] = _Open(until, mine, alone=not others and not self._working)
            self._owners[mine] += 1
            self._changed(now)

    def first_token(self, who: Hashable) -> None:
        """Its prefill is over; it decodes."""
        with self._lock:
            if who in self._open:
                self._open[who].decoding = True
                self._wake()

    def end(self, who: Hashable) -> None:
        """The call or turn is over."""
        with self._lock:
            now = self._lapse()
            self._close(who)
            self._changed(now)

    def answered(self, who: Hashable, ttft_s: float, new_tokens: int | None) -> None:
        """The call ``who``, which is still open, had its first token after so long; ``new_tokens``: of its prompt
        those that were not cached, where known."""
        with self._lock:
            if (call := self._open.get(who)) is not None:
                self._demand.answered(self._clock(), ttft_s, new_tokens=new_tokens, calm=call.alone)

    def work_began(self) -> None:
        """Background work of ours runs on the engine."""
        with self._lock:
            self._working += 1
            for call in self._open.values():
                call.alone = False

    def work_ended(self) -> None:
        """It runs no longer."""
        with self._lock:
            self._working -= 1

    @contextmanager
    def warming(self) -> Iterator[None]:
        """One request of a preload is under way; begin it only where ``room`` says so."""
        self.work_began()
        self._warming += 1
        try:
            yield
        finally:
            self._warming -= 1
            self.work_ended()
            self.poke()

    @property
    def room(self) -> bool:
        """May one more request of a preload go out beside those that are under way?"""
        return self._warming < WARMING

    def seen(self) -> Seen:
        """What it is like now."""
        with self._lock:
            now = self._lapse()
            self._demand.changed(now, len(self._owners))
            return Seen(
                in_flight=len(self._owners),
                working=self._working,
                busy=self._demand.busy(now),
                latency=self._demand.latency(now),
            )

    def poke(self) -> None:
        """Let everybody who waits ask again."""
        with self._lock:
            self._wake()

    def _close(self, who: Hashable) -> None:
        closed = self._open.pop(who, None)
        if closed is not None:
            self._owners[closed.owner] -= 1
            if not self._owners[closed.owner]:
                del self._owners[closed.owner]

    def _changed(self, now: float) -> None:
        self._demand.changed(now, len(self._owners))
        self._wake()

    def _wake(self) -> None:
        for loop, callback in self._waiters:
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:
                pass  # its loop was closed: nobody waits there any more

    def _lapse(self) -> float:
        """Close what nobody has ended in time, as of when its lease ran out; returns the time."""
        now = self._clock()
        for until, who in sorted(((o.until, w) for w, o in self._open.items() if o.until <= now), key=itemgetter(0)):
            self._close(who)
            self._demand.changed(until, len(self._owners))
        return now

    def _live(self) -> list[_Open]:
        self._lapse()
        return list(self._open.values())

    @property
    def busy(self) -> bool:
        """Is any turn in flight or due?"""
        with self._lock:
            return bool(self._live())

    def serves(self, owner: Hashable) -> bool:
        """Is a turn or a call of this owner in flight or due?"""
        with self._lock:
            self._live()
            return owner in self._owners

    @property
    def prefilling(self) -> bool:
        """Is any turn waiting for its first token?"""
        with self._lock:
            return any(not o.decoding for o in self._live())

    async def changed(self, timeout: float) -> None:
        """Wait until a turn begins, ends or gets its first token, at most ``timeout`` seconds."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event.set)
        with self._lock:
            self._waiters.append(waiter)
        try:
            with anyio.move_on_after(timeout):
                await event.wait()
        finally:
            self._drop(waiter)

    async def unless(self, stop: Callable[[], bool], call: Callable[[], Awaitable[T]]) -> T | None:
        """``await call()``, or ``None`` when ``stop()`` became true first: the call is then cancelled.

        It is not even begun where ``stop()`` is true already. ``stop`` is asked again whenever the foreground changes.
        """
        with anyio.CancelScope() as scope:
            ended = False

            def check() -> None:
                if not ended and stop():
                    scope.cancel()

            waiter = (asyncio.get_running_loop(), check)
            with self._lock:
                self._waiters.append(waiter)
            try:
                if stop():
                    return None
                return await call()
            finally:
                ended = True
                self._drop(waiter)
        return None

    def _drop(self, waiter: tuple[asyncio.AbstractEventLoop, Callable[[], object]]) -> None:
        with self._lock:
            self._waiters = [w for w in self._waiters if w is not waiter]

    def _until_lapse(self) -> float:
        """Seconds until the next lease runs out: nobody tells those who wait of that."""
        with self._lock:
            known = len(self._open)
            live = self._live()
            if len(live) < known:  # just now
                return 0.0
            now = self._clock()
            return max(LEAST_LOOK_S, min((o.until for o in live), default=now + self._lease_s) - now)

    async def wait_until(self, allowed: Callable[[], bool]) -> None:
        """Return once ``allowed()`` holds; it is asked again whenever the foreground changes, or a lease runs out."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event.set)
        with self._lock:
            self._waiters.append(waiter)  # before the first look: no change from another thread is missed
        try:
            while not allowed():
                with anyio.move_on_after(self._until_lapse()):
                    await event.wait()
                event.clear()
        finally:
            self._drop(waiter)

    async def wait_idle(self) -> None:
        """Return once no turn is in flight or due."""
        await self.wait_until(lambda: not self.busy)
