"""A store with switchable faults and a revision number."""

from __future__ import annotations

import asyncio

from ..errors import StoreError
from ..store import Store
from ..stores import MemoryStore
from .faults import Faults


def _unreachable() -> Exception:
    return StoreError("the store is unreachable")


class FlakyStore:
    """A store whose faults are switched on by the test. For use on one event loop.

    ``store.reads.fail()``, ``store.writes.hang()`` and so on, see :class:`Faults`; a read that meets ``garbage()``
    gets other bytes than were written. ``revision`` counts the writes that took effect, and
    ``await store.reached(n)`` waits for the n-th one, so that a test needs no sleep.

    Args:
        store: where the values are, by default a memory store of its own that forgets nothing by time.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store: Store = store if store is not None else MemoryStore(clock=lambda: 0.0)
        #: faults of ``get``
        self.reads = Faults(_unreachable)
        #: faults of ``put`` and ``delete``
        self.writes = Faults(_unreachable)
        #: writes that took effect
        self.revision = 0
        self.gets: list[tuple[str, str]] = []
        self.puts: list[tuple[str, str]] = []
        self.closed = False
        self._waiting: list[asyncio.Event] = []

    async def get(self, tenant: str, key: str) -> bytes | None:
        """The value, if no fault is in the way."""
        self.gets.append((tenant, key))
        garbage = await self.reads.strike()
        value = await self._store.get(tenant, key)
        return b"\xff\x00{" + value[3:] if value is not None and garbage else value

    async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Keep the value, if no fault is in the way; garbage is written as garbage."""
        self.puts.append((tenant, key))
        garbage = await self.writes.strike()
        await self._store.put(tenant, key, b"\xff\x00{" + value[3:] if garbage else value, ttl=ttl)
        self._wrote()

    async def delete(self, tenant: str, key: str) -> None:
        """Forget the key, if no fault is in the way."""
        await self.writes.strike()
        await self._store.delete(tenant, key)
        self._wrote()

    async def aclose(self) -> None:
        """Remember that it was closed; what it holds stays, as on a server."""
        self.closed = True

    async def reached(self, revision: int) -> None:
        """Return once ``revision`` writes have taken effect."""
        event = asyncio.Event()
        self._waiting.append(event)
        try:
            while self.revision < revision:
                await event.wait()
                event.clear()
        finally:
            self._waiting.remove(event)

    def _wrote(self) -> None:
        self.revision += 1
        for event in self._waiting:
            event.set()

    def __repr__(self) -> str:
        return f"FlakyStore(revision={self.revision}, reads={self.reads!r}, writes={self.writes!r})"
