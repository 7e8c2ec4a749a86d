"""Virtual time for tests: an event loop whose clock jumps to the next timer instead of waiting for it.

An hour's sleep takes no time, every run gives the same result, and a deadlock is an error instead of a hang.

    from virtual import run_virtual

    def test_something() -> None:
        async def main() -> None:
            await anyio.sleep(3600)

        run_virtual(main)

Limit: work in threads takes real time. ``loop.run_in_executor`` (and so ``asyncio.to_thread``) is counted, and
while it runs the loop waits for it and the clock stands still. Threads that the loop cannot see (such as
``anyio.to_thread`` or a ``threading.Thread`` that calls back) must be announced by raising
``loop.threads_in_flight`` for that time; otherwise waiting for them alone is taken for a deadlock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task is blocked and no timer is pending."""


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the loop's clock where others would wait."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.loop.threads_in_flight:
            return super().select(timeout)  # real work: never jump past it
        if timeout is None:
            raise DeadlockError("all tasks are blocked and no timer is pending")
        self.loop.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never waits. asyncio and anyio both run on it unchanged."""

    def __init__(self) -> None:
        self._now = 0.0
        self.threads_in_flight = 0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override,unused-ignore]
        """As in asyncio; the clock stands still until the thread is done."""
        self.threads_in_flight += 1
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: object) -> None:
        self.threads_in_flight -= 1


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` on a new :class:`VirtualTimeLoop` and return its result; the loop is closed afterwards."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())
