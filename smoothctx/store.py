"""Where artifacts and offloaded content are kept: the protocol. See ``stores.py`` for the stores."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from .errors import ConfigurationError


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


def check_store(store: Any) -> None:
    """What can be said of a store before it is used.

    Raises:
        ConfigurationError: it lacks a method, or has one that is not asynchronous.
    """
    methods = {m: getattr(store, m, None) for m in ("get", "put", "delete")}
    if isinstance(store, type) or not all(map(callable, methods.values())):
        raise ConfigurationError(f"store={store!r}: expected a Store (async get, put, delete), or None")
    plain = [
        m
        for m, method in methods.items()
        if (inspect.isfunction(method) or inspect.ismethod(method))
        and not inspect.iscoroutinefunction(inspect.unwrap(method))
    ]
    if plain:
        raise ConfigurationError(
            f"store={store!r}: {', '.join(plain)}: expected 'async def' (see smoothctx.store.Store); "
            "a framework's own store needs its adapter, such as smoothctx_langgraph.GraphStore(store)"
        )
