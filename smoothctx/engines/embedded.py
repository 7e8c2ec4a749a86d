"""The embedded engine: a llama.cpp server of one's own, with nothing to set up and no network.

It runs in a process of its own, which ends with ours whatever happens; see ``_child``.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import struct
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from ..errors import ClosedError, ConfigurationError, EngineProtocolError, EngineUnreachable
from ._child import Child
from .binding import EngineBinding
from .client import OpenAIEngine
from .flavours import Capabilities
from .preload import CHUNK_DELAY_S, Strategy
from .slot_table import SlotTable
from .slots import SlotBinding
from .weights import check_gguf, find_weights
from .wire import Answer

#: bytes of a GGUF file that may hold its metadata
_METADATA = 64 * 1024 * 1024
#: llama.cpp's own templates for models whose file brings none (base models); else it would take ChatML
_TEMPLATES = {"gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma"}


class EmbeddedEngine(OpenAIEngine):
    """A llama.cpp server in a child process: ``async with EmbeddedEngine("model.gguf") as engine: ...``.

    Args:
        model: a GGUF file; by default the demo's weights (see ``find_weights``).
        context_window: tokens of each slot.
        slots: sequences with a KV cache of their own; a session that works ahead uses two.
        threads: of the computation; by default the CPUs that this process may use (half of them beyond four, at
            most eight).
        batch: tokens evaluated at a time: what a foreground call waits for a background one at most.
        chat_template: a template's name that llama.cpp knows; by default the model's own.
        preload_strategy: see ``OpenAIEngine``; by default ``"timed"`` while one session is open.
        chunk_delay_s: seconds that one chunk of a growing preload may cost a turn.
        start_timeout_s: seconds for loading the model.
        timeout_s: seconds without any byte from the server before a call fails.

    Raises:
        ConfigurationError: when an option cannot work, or the extra is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        context_window: int = 4096,
        slots: int = 3,
        threads: int | None = None,
        batch: int = 128,
        chat_template: str | None = None,
        preload_strategy: Strategy | None = None,
        chunk_delay_s: float = CHUNK_DELAY_S,
        start_timeout_s: float = 60.0,
        timeout_s: float = 300.0,
    ) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise ConfigurationError("the embedded engine needs the extra 'local': pip install 'smoothctx[local]'")
        for option, value, least in (
            ("context_window", context_window, 64),
            ("slots", slots, 1),
            ("threads", 1 if threads is None else threads, 1),
            ("batch", batch, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{option}={value!r}: expected a whole number of at least {least}")
        if isinstance(start_timeout_s, bool) or not isinstance(start_timeout_s, int | float) or not start_timeout_s > 0:
            raise ConfigurationError(f"start_timeout_s={start_timeout_s!r}: expected seconds above 0")
        if chat_template is not None and (not isinstance(chat_template, str) or not chat_template):
            raise ConfigurationError(f"chat_template={chat_template!r}: expected the name of a template, or None")
        weights = find_weights() if model is None else check_gguf(model, "model")
        super().__init__(
            "http://127.0.0.1",
            weights.name,
            context_window=context_window,
            timeout_s=timeout_s,
            preload=True,
            preload_strategy=preload_strategy,
            chunk_delay_s=chunk_delay_s,
        )
        self.slots = self.max_in_flight = slots
        self._trust_env = False  # a proxy has no way to our own process
        self._weights = weights
        self._start_timeout_s = start_timeout_s
        self._settings = {
            "model": str(weights),
            "context_window": context_window,
            "slots": slots,
            "threads": threads or _threads(),
            "batch": batch,
            "chat_template": chat_template or _template(weights),
        }
        self._table = self._slots = SlotTable(slots)
        self.capabilities = Capabilities(
            flavour="llama.cpp",
            context_window=context_window,
            preload=True,
            slots=slots,
            metrics=True,
            cached_tokens=True,
            tokenize=True,
            block_size=1,
        )
        self._child: Child | None = None
        self._finalizer: weakref.finalize[..., EmbeddedEngine] | None = None

    @property
    def identity(self) -> str:
        """The weights and the template: the address is another one each time, the model is the same."""
        size = self._weights.stat().st_size if self._weights.exists() else 0
        return f"embedded:{self._weights.name}:{size}#{self._settings['chat_template'] or 'own'}"

    @property
    def pid(self) -> int | None:
        """The id of the server's process, ``None`` before the start and after the end."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the server and wait until it answers; ``async with`` does it.

        Raises:
            EngineError: when it dies or is not ready in time. No process is left then.
            ClosedError: after ``aclose``.
        """
        if self._closed:
            raise ClosedError("this embedded engine was closed: make a new one")
        if self._child is not None:
            return
        child = self._child = Child(self._settings)
        self._finalizer = weakref.finalize(self, child.stop_now)
        started = False
        try:
            self.root = await child.ready(self._start_timeout_s)
            self.url = f"{self.root}/v1"
            self._headers = {"Authorization": f"Bearer {child.key}"}
            await self.get_json("/health")
            started = True
        finally:
            if not started:
                await self._stop()

    async def clear(self) -> None:
        """Empty every slot's cache.

        Raises:
            EngineError: see its subclasses.
        """
        for slot in range(self.slots):
            await self.post_json(f"/slots/{slot}?action=erase", {})

    def bind(self, session_id: str) -> EngineBinding:
        """One session's slots of this engine. With a single slot, nothing is ever put into it beside the agent's."""
        return SlotBinding(self, self._slots, session_id, preloader=self.preloader())

    async def aclose(self) -> None:
        """End the server, in bounded time. A second call does nothing."""
        self._closed = True
        await self._stop()

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.stop()
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        with anyio.CancelScope(shield=True):
            await self.disconnect()

    async def __aenter__(self) -> EmbeddedEngine:
        await self.start()
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not started" if self._child is None else f"pid {self._child.pid}"
        return f"EmbeddedEngine({str(self._weights)!r}, {state})"

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx.Response]:
        async with self._explained(), super()._post(path, body) as response:
            yield response

    async def _answer(self, client: httpx.AsyncClient, request: httpx.Request) -> Answer:
        async with self._explained():
            return await super()._answer(client, request)

    @asynccontextmanager
    async def _explained(self) -> AsyncGenerator[None]:
        """A broken connection, told as what it is when the process has died."""
        child = self._child
        if child is None:
            raise ClosedError(
                "this embedded engine was closed"
                if self._closed
                else "this embedded engine was not started: async with EmbeddedEngine(...) as engine"
            )
        try:
            yield
        except (EngineUnreachable, EngineProtocolError) as error:
            code = await child.died(0.5)
            if code is None or self._closed:
                raise
            said = child.errors()
            raise EngineUnreachable(
                f"the embedded engine's process died (exit code {code})" + (f":\n{said}" if said else "")
            ) from error


def _threads() -> int:
    """Threads that compute: more than there are cores makes every one of them wait."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        count = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no limit, or none that we can read
    return count if count <= 4 else max(4, min(8, count // 2))


def _template(weights: Path) -> str | None:
    """The template for a model whose file brings none, by its architecture."""
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"tokenizer.chat_template", 0, _METADATA) >= 0:
            return None
        key = b"general.architecture"
        at = data.find(key, 0, _METADATA)
        if at < 0 or at + len(key) + 12 > len(data):
            return None
        kind, length = struct.unpack_from("<IQ", data, at + len(key))
        start = at + len(key) + 12
        name = data[start : start + length] if kind == 8 and length < 64 else b""
    return _TEMPLATES.get(name.decode("ascii", "replace"))
