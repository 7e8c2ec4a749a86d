"""Where artifacts and offloaded content are kept: the protocol. See ``stores.py`` for the stores."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """A bounded key-value store of bytes, namespaced by tenant.

    Values may vanish at any time (size bound, ttl): a reader must cope with ``None``.
    """

    async def get(self, tenant: str, key: str) -> bytes | None:
        """The value, or ``None`` where there is none (any more)."""
        ...

    async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Keep ``value`` under ``key`` for ``ttl`` seconds (``None``: until evicted)."""
        ...

    async def delete(self, tenant: str, key: str) -> None:
        """Forget the key; no error when it is not there."""
        ...

    async def aclose(self) -> None:
        """Release what the store holds."""
        ...
