"""Artifacts and offloaded content in LangGraph's own ``BaseStore``."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

from langgraph.store.base import BaseStore

from smoothctx.errors import ConfigurationError, StoreError

T = TypeVar("T")

#: characters of a key or a tenant that a store is asked to index; what is longer ends in its hash
_MAX_LABEL = 400


class GraphStore:
    """A smoothctx store on the ``BaseStore`` that a graph is compiled with, or on one of its own.

    Tenants are namespaces below ``namespace``. Values are never embedded (``index=False``). Expired values read as
    missing; a store that supports TTL removes them too.

    An asynchronous store such as ``AsyncSqliteStore`` belongs to the event loop on which it was opened, and calls
    are made there: from a runtime on the same loop directly, from another one (``Runtime.in_thread``) through that
    loop, which has to keep running. Closing the store is left to whoever opened it.

    Args:
        store: where the values go.
        namespace: stands before the tenant; labels without ``"."``, the first not ``"langgraph"``.
        ttl: seconds that a value lives when ``put`` names none; ``None`` for the store's own default.
        clock: seconds since the epoch: shared with other processes, so not monotonic.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        store: BaseStore,
        *,
        namespace: tuple[str, ...] = ("smoothctx",),
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,  # noqa: TID251 (the default of what is injected)
    ) -> None:
        if not isinstance(store, BaseStore):
            raise ConfigurationError(f"store={store!r}: expected a LangGraph BaseStore")
        labels = namespace if isinstance(namespace, tuple) else ()
        if not labels or not all(isinstance(n, str) and n and "." not in n and "\0" not in n for n in labels):
            raise ConfigurationError(f"namespace={namespace!r}: expected a tuple of texts without '.', none empty")
        if labels[0] == "langgraph":
            raise ConfigurationError(f"namespace={namespace!r}: 'langgraph' is LangGraph's own; expected another name")
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl > 0):
            raise ConfigurationError(f"ttl={ttl!r}: expected seconds above 0, or None")
        self._store = store
        self._namespace = namespace
        self._ttl = ttl
        self._clock = clock

    async def get(self, tenant: str, key: str) -> bytes | None:
        """The value, or ``None`` where there is none (any more).

        Raises:
            StoreError: when the store cannot be read.
        """
        item = await self._on_loop(lambda: self._store.aget(self._space(tenant), _label(key)))
        value = item.value if item is not None else None
        if not isinstance(value, dict):
            return None
        expires = value.get("expires")
        if isinstance(expires, int | float) and expires <= self._clock():
            return None
        try:
            if isinstance(text := value.get("text"), str):
                return text.encode()
            return base64.b64decode(value["base64"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"stored value is corrupt: {type(error).__name__}: {error}") from error

    async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Keep a value for ``ttl`` seconds.

        Raises:
            StoreError: when the store cannot be written.
        """
        lives = self._ttl if ttl is None else ttl
        held = _held(bytes(value))
        options: dict[str, Any] = {}
        if lives is not None:
            held["expires"] = self._clock() + lives
            # The asynchronous SQLite store has it without saying so; where a ttl is configured there is one.
            if self._store.supports_ttl or self._store.ttl_config:
                options["ttl"] = lives / 60
        await self._on_loop(
            lambda: self._store.aput(self._space(tenant), _label(key), held, index=False, **options),
        )

    async def delete(self, tenant: str, key: str) -> None:
        """Forget the key; no error when it is not there."""
        await self._on_loop(lambda: self._store.adelete(self._space(tenant), _label(key)))

    async def aclose(self) -> None:
        """Nothing: the store is its owner's to close."""

    def _space(self, tenant: str) -> tuple[str, ...]:
        return (*self._namespace, _label(tenant))

    async def _on_loop(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make a call on the loop that the store belongs to, if it belongs to one."""
        home = getattr(self._store, "_loop", None)
        try:
            if not isinstance(home, asyncio.AbstractEventLoop) or home is asyncio.get_running_loop():
                return await call()
            if not home.is_running():
                raise StoreError("the store's event loop is not running any more: open the store again")
            there = call()
            try:
                future = asyncio.run_coroutine_threadsafe(there, home)
            except RuntimeError:  # it was closed just now
                there.close()
                raise
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise StoreError("the store's event loop ended during the call") from error  # nobody cancelled us
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{type(self._store).__name__}: {type(error).__name__}: {error}") from error

    def __repr__(self) -> str:
        return f"GraphStore({type(self._store).__name__}, namespace={self._namespace!r})"


def _label(name: str) -> str:
    """A name that every store takes as a label and as a key: no dots, no control characters, not too long."""
    safe = quote(name, safe="/:~", errors="surrogatepass").replace(".", "%2E") or "%"
    if len(safe) <= _MAX_LABEL:
        return safe
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{safe[: _MAX_LABEL - 33]}~{digest}"


def _held(value: bytes) -> dict[str, Any]:
    """As text where it is one, to be read by people; a NUL character is more than some databases take."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    return {"base64": base64.b64encode(value).decode()} if "\0" in text else {"text": text}
