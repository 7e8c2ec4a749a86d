"""Foreground: which turns are in flight on an engine, so that background work can keep out of their way.

A turn is open from its commit (a model call is due) to its observe (the reply is there). Calls that we see in
full are more exact: they say when the first token came. Everything here is thread-safe and never blocks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import anyio

T = TypeVar("T")


@dataclass(slots=True)
class _Open:
    since: float
    decoding: bool = False


class Foreground:
    """The foreground of one engine. ``lease_s`` bounds how long a turn counts that never reported its end."""

    def __init__(self, clock: Callable[[], float], *, lease_s: float = 120.0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._open: dict[Hashable, _Open] = {}
        self._waiters: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = []
        self._lock = threading.Lock()

    def begin(self, who: Hashable) -> None:
        """A turn or call of ``who`` is due: background prefill stays away from now on."""
        with self._lock:
            self._open[who] = _Open(self._clock())
            self._wake()

    def first_token(self, who: Hashable) -> None:
        """Its prefill is over; it decodes."""
        with self._lock:
            if who in self._open:
                self._open[who].decoding = True
                self._wake()

    def end(self, who: Hashable) -> None:
        """The call or turn is over."""
        with self._lock:
            self._open.pop(who, None)
            self._wake()

    def poke(self) -> None:
        """Let everybody who waits ask again."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        for loop, callback in self._waiters:
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:
                pass  # its loop was closed: nobody waits there any more

    def _live(self) -> list[_Open]:
        limit = self._clock() - self._lease_s
        for who in [w for w, o in self._open.items() if o.since <= limit]:
            del self._open[who]
        return list(self._open.values())

    @property
    def busy(self) -> bool:
        """Is any turn in flight or due?"""
        with self._lock:
            return bool(self._live())

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

    async def wait_until(self, allowed: Callable[[], bool]) -> None:
        """Return once ``allowed()`` holds; it is asked again whenever the foreground changes."""
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event.set)
        with self._lock:
            self._waiters.append(waiter)  # before the first look: no change from another thread is missed
        try:
            while not allowed():
                with anyio.move_on_after(self._lease_s):
                    await event.wait()
                event.clear()
        finally:
            self._drop(waiter)

    async def wait_idle(self) -> None:
        """Return once no turn is in flight or due."""
        await self.wait_until(lambda: not self.busy)
