"""The writer: what is to be kept goes to the store in the background, in order, and can be read meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import final

import anyio

from .events import EventSink
from .pool import Outcome, TaskPool, Work
from .store import Store

#: background writes waiting for the store; more are dropped, oldest first, with an event
MAX_WRITES = 1024
#: seconds that one write may take
WRITE_TIMEOUT = 10.0
#: seconds that the end gives the store for what is still to be written
LAST_WRITES = 5.0


@final
class Writer:
    """Writes to one store through the pool. Thread-safe."""

    def __init__(self, store: Store, pool: TaskPool, events: EventSink) -> None:
        self._store = store
        self._pool = pool
        self._events = events
        self._writes: deque[tuple[str, str, bytes]] = deque()
        self._writing = False
        self._lock = threading.Lock()
        #: the pool takes nothing any more: what waits is written by :meth:`aclose`
        self.closing = False

    def write(self, tenant: str, key: str, value: bytes) -> None:
        """Put something into the store, in the background. Full means the oldest write is dropped, with an event."""
        lost = None
        with self._lock:
            self._writes.append((tenant, key, value))
            if len(self._writes) > MAX_WRITES:
                _, lost, _ = self._writes.popleft()
        if lost is not None:
            error = f"too many writes are waiting: {lost} was dropped"
            self._events.emit("store.error", tenant=tenant, error=error)
        self._start()

    def pending(self, tenant: str, key: str) -> bytes | None:
        """What waits to be written under a key: it can be read before the store has it."""
        with self._lock:
            return next((v for t, k, v in reversed(self._writes) if t == tenant and k == key), None)

    async def aclose(self) -> None:
        """Write what still waits, within ``LAST_WRITES`` seconds."""
        with anyio.move_on_after(LAST_WRITES):
            await self._write_all()
        self._writes.clear()

    def _start(self) -> None:
        with self._lock:
            if self._writing or self.closing or not self._writes:
                return
            self._writing = True
            tenant = self._writes[0][0]
        work = Work(
            key="store.write",
            tenant=tenant,
            session="",
            child=False,
            due=None,
            timeout_s=None,
            name="store.write",
            run=self._write_all,
            on_start=lambda: None,
            on_done=self._written,
            promoted=True,
            internal=True,
        )
        self._pool.submit(work)

    async def _write_all(self) -> None:
        while self._writes:
            entry = self._writes[0]  # it stays in line until it is written: `aclose` may cancel us and write the rest
            await self._write_one(*entry)
            with self._lock:
                if self._writes and self._writes[0] is entry:
                    self._writes.popleft()

    async def _write_one(self, tenant: str, key: str, value: bytes) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                await self._store.put(tenant, key, value)
        except Exception as error:
            self._events.emit("store.error", tenant=tenant, error=f"{type(error).__name__}: {error}", key=key)

    def _written(self, outcome: Outcome) -> None:
        with self._lock:
            self._writing = False
            again = outcome.reason is None and bool(self._writes) and not self.closing
        if again:  # one came while the last was being written
            self._start()
