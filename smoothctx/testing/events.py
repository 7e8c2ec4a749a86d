"""A recorder of events."""

from __future__ import annotations

import asyncio
import threading

from ..events import Event


class Recorder(list[Event]):
    """Keeps every event in order: ``Runtime(on_event=recorder)``. Works from any thread and any loop."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.append(event)
            self._changed.notify_all()
            for loop, waiter in self._waiting:
                try:
                    loop.call_soon_threadsafe(waiter.set)
                except RuntimeError:
                    pass  # its loop was closed: nobody waits there any more

    def names(self) -> list[str]:
        """The names in order."""
        return [event.name for event in self]

    def of(self, name: str) -> list[Event]:
        """The events of one name."""
        return [event for event in self if event.name == name]

    async def seen(self, name: str, count: int = 1) -> list[Event]:
        """Wait until ``count`` events of this name have come, and return them."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            self._waiting.append(waiter)
        try:
            while len(found := self.of(name)) < count:
                await waiter[1].wait()
                waiter[1].clear()
            return found
        finally:
            with self._changed:
                self._waiting.remove(waiter)

    def seen_sync(self, name: str, count: int = 1, *, timeout: float = 30.0) -> list[Event]:
        """:meth:`seen` for synchronous callers; at most ``timeout`` seconds.

        Raises:
            TimeoutError: when they have not come by then.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.of(name)) >= count, timeout):
                raise TimeoutError(f"{len(self.of(name))} of {count} events {name!r} came: {self.names()}")
            return self.of(name)
