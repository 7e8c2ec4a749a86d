"""The runtime of those who bring none: one per process, on an event loop and a thread of its own.

A context loaded from a config cannot carry a runtime with it, and AutoGen programs often run each turn with an
``asyncio.run`` of its own. This runtime outlives those loops. It starts with its first use and ends with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable

from smoothctx import ConfigurationError, Runtime

#: seconds that starting and ending may take
PATIENCE = 5.0


class _Thread:
    """A runtime on a daemon thread: one that is not would keep the interpreter from ever reaching ``atexit``."""

    def __init__(self) -> None:
        self.runtime = Runtime()
        self._opened = threading.Event()
        self._end: Callable[[], object] = lambda: None
        # An empty context: nothing of the run that needed it first is seen by what runs here.
        self._thread = threading.Thread(
            target=contextvars.Context().run, args=(self._main,), name="smoothctx", daemon=True
        )
        self._thread.start()
        self._opened.wait(PATIENCE)

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._end = lambda: loop.call_soon_threadsafe(ended.set)
        try:
            async with self.runtime:
                self._opened.set()
                await ended.wait()
        finally:
            self._opened.set()

    def close(self) -> None:
        try:
            self._end()
        except RuntimeError:
            return  # its loop has ended already
        self._thread.join(PATIENCE)


_lock = threading.Lock()
_running: _Thread | None = None
_given: Runtime | None = None


def set_default_runtime(runtime: Runtime | None) -> None:
    """Let contexts that were given no runtime use this one from now on, such as one with a durable store for a team
    that was loaded from a config. It stays yours to open and close. ``None``: our own again.

    Raises:
        ConfigurationError: it is no ``Runtime``.
    """
    global _given
    if runtime is not None and not isinstance(runtime, Runtime):
        raise ConfigurationError(f"runtime={runtime!r}: expected a Runtime, or None")
    _given = runtime


def default_runtime() -> Runtime:
    """The runtime of contexts that were given none: the one that was set, else our own, open until the process ends."""
    global _running
    with _lock:
        if _given is not None:
            return _given
        if _running is None:
            _running = _Thread()
            atexit.register(close_default_runtime)
        return _running.runtime


def is_own(runtime: Runtime) -> bool:
    """Is it the one that we opened ourselves?"""
    with _lock:
        return _running is not None and _running.runtime is runtime


def close_default_runtime() -> None:
    """End our own now: its sessions are closed and no task or thread of it is left. The next use starts another."""
    global _running
    with _lock:
        running, _running = _running, None
    if running is not None:
        atexit.unregister(close_default_runtime)
        running.close()


def _forget() -> None:
    """In a forked child: the thread is not there, and its lock may be held for ever."""
    global _lock, _running
    _lock, _running = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
