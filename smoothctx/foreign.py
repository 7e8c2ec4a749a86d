"""Foreign code: what is not ours runs in a task that we can leave behind.

A task group must wait for its children, and a child may refuse to be cancelled. So the user's code gets a task of
its own; we watch it for as long as it is worth, cancel it, and go on without it if that does not help.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

_background: contextvars.ContextVar[bool] = contextvars.ContextVar("smoothctx_background", default=False)


def in_background() -> bool:
    """Does this code run in a task pool, rather than in an agent's turn? Integrations let such model calls pass."""
    return _background.get()


def background_context() -> contextvars.Context:
    """A copy of the present context in which :func:`in_background` is true."""
    context = contextvars.copy_context()
    context.run(_background.set, True)
    return context


def spawn(run: Coroutine[Any, Any, Any], name: str, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
    """The one place where a task is made outside a task group. The caller holds it and sees to its end."""
    return asyncio.get_running_loop().create_task(run, name=name, context=context)


class Call:
    """One piece of foreign code under way. ``over``: it was cancelled, so nothing new may begin in it."""

    __slots__ = ("_foreign", "_scope", "over", "task")

    task: asyncio.Task[Any]

    def __init__(self, foreign: Foreign) -> None:
        self._foreign = foreign
        self._scope = anyio.CancelScope()
        self.over = False

    def stop(self) -> None:
        """Wake whoever watches: the code is not wanted any more."""
        self._scope.cancel()

    async def watch(self, timeout_s: float | None, grace_s: Callable[[], float]) -> bool:
        """Wait for it; true if it ended by itself.

        Otherwise (stopped, or ``timeout_s`` is over) it is cancelled, and left behind if it has not ended
        ``grace_s()`` seconds later. When the watcher itself is cancelled the same happens, and it stays cancelled.
        """
        try:
            with self._scope:
                await asyncio.wait({self.task}, timeout=timeout_s)
            if self.task.done():
                return True
            await self._call_off(grace_s())
            return False
        except asyncio.CancelledError:
            await self._call_off(grace_s())
            raise

    async def _call_off(self, grace_s: float) -> None:
        self.over = True
        self.task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({self.task}, timeout=grace_s)
        if not self.task.done():
            self._foreign.abandon(self.task, grace_s)


class Foreign:
    """The tasks with foreign code, and among them the ``abandoned`` ones. ``report`` hears of each of these."""

    def __init__(self, report: Callable[[BaseException, str], None]) -> None:
        self._report = report
        self.tasks: set[asyncio.Task[Any]] = set()
        self.abandoned: set[asyncio.Task[Any]] = set()

    def begin(self, make: Callable[[Call], Coroutine[Any, Any, Any]], name: str) -> Call:
        """Start ``make(call)`` in a task of its own, in a copy of the caller's context."""
        call = Call(self)
        call.task = spawn(make(call), name)
        self.tasks.add(call.task)
        call.task.add_done_callback(self._done)
        return call

    def abandon(self, task: asyncio.Task[Any], grace_s: float) -> None:
        """Leave a task behind: nothing waits for it any more."""
        self.abandoned.add(task)
        error = TimeoutError(f"did not end within {grace_s:g} s of its cancellation, and was left behind")
        self._report(error, task.get_name())

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        self.abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: an abandoned one has nobody else to do it
