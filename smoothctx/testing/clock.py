"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

An hour's sleep takes no time, every run gives the same result, and a deadlock is an error instead of a hang:

    def test_something() -> None:
        async def main() -> None:
            await anyio.sleep(3600)

        run_virtual(main)

Threads take real time. ``loop.run_in_executor`` (and so ``asyncio.to_thread``) is counted: while it runs the loop
waits for it and the clock stands still. Threads that the loop cannot see (``anyio.to_thread``, a
``threading.Thread`` that calls back, a server on a real socket) are announced with :func:`announce_thread`;
waiting for them alone is taken for a deadlock otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import selectors
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from ..retry import seeded

T = TypeVar("T")

#: seconds below which asyncio takes two times for one
_RESOLUTION = 1e-9
#: parts of file names whose frames say how a task waits, not where
_PLUMBING = ("/asyncio/", "/anyio/", "/contextlib.py")


class DeadlockError(RuntimeError):
    """Every task is blocked and no timer is pending.

    ``stuck`` has one line for each blocked task: its name, and the coroutines and lines at which it waits. The
    cause (``__cause__``) is an error that a callback or a task died of before that, if there was one.
    """

    def __init__(self, stuck: tuple[str, ...] = (), *, hint: str = "") -> None:
        self.stuck = stuck
        lines = "".join(f"\n  {line}" for line in stuck)
        super().__init__(f"all tasks are blocked and no timer is pending{hint}{':' if stuck else ''}{lines}")


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
            raise self.loop.deadlock()
        self.loop.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never waits. asyncio and anyio both run on it unchanged."""

    def __init__(self) -> None:
        self._now = 0.0
        #: threads whose end the loop waits for in real time
        self.threads_in_flight = 0
        self._threads_lock = threading.Lock()
        self._lost: BaseException | None = None
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self._now += seconds
        if self._now + _RESOLUTION == self._now:
            # asyncio runs what is due before `now + resolution`: here that would be nothing, for ever.
            self._now = math.nextafter(self._now, math.inf)

    def thread_began(self) -> None:
        """A thread works for a task of this loop: wait for it in real time. May be called from any thread."""
        with self._threads_lock:
            self.threads_in_flight += 1

    def thread_ended(self) -> None:
        """It works no longer. May be called from any thread, after it called back."""
        with self._threads_lock:
            self.threads_in_flight -= 1
        with contextlib.suppress(RuntimeError):  # a closed loop waits for nobody
            self.call_soon_threadsafe(_nothing)  # it may be waiting for this thread alone: let it look again

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override,unused-ignore]
        """As in asyncio; the clock stands still until the thread is done."""
        self.thread_began()
        try:
            future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        except BaseException:
            self.thread_ended()
            raise
        future.add_done_callback(lambda _: self.thread_ended())
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """As in asyncio, which waits in a thread for the executor's threads to end."""
        with announce_thread(self):
            await super().shutdown_default_executor(*args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As in asyncio, but what is no ``Exception`` (a test runner's time limit, say) ends the run.

        Such a thing is raised at any line; where that happens to be a callback, asyncio would log it and go on,
        and what the callback had to do would be missing: not a fault of the code under test.
        """
        error = context.get("exception")
        if isinstance(error, BaseException):
            if "handle" in context and _foreign(error):
                raise error
            self._lost = self._lost or error
        super().call_exception_handler(context)

    def deadlock(self) -> BaseException:
        """The error for a loop in which nothing can happen any more: who waits, and where."""
        lost = self._lost_in_tasks() or self._lost
        self._lost = None
        if lost is not None and _foreign(lost):
            return lost
        tasks = sorted(asyncio.all_tasks(self), key=lambda t: t.get_name())
        stuck = tuple(f"{t.get_name()}: {_place(t.get_coro())}" for t in tasks)
        hint = ""
        if any("in_worker_thread" in line for line in stuck):
            hint = " (a thread that the loop cannot see has to be announced: announce_thread)"
        error = DeadlockError(stuck, hint=hint)
        error.__cause__ = lost
        return error

    def _lost_in_tasks(self) -> BaseException | None:
        """What an ended task died of, if nobody looked at it, or if it is nothing that a task dies of by itself."""
        found: BaseException | None = None
        for task in (o for o in gc.get_objects() if issubclass(type(o), asyncio.Task)):
            if task.get_loop() is self and task.done() and not task.cancelled():
                unseen = getattr(task, "_log_traceback", False)
                error: BaseException | None = task.exception()
                if error is not None and _foreign(error):
                    return error
                if unseen and found is None:
                    found = error
        return found


def _nothing() -> None:
    pass


def _foreign(error: BaseException) -> bool:
    return not isinstance(error, Exception | asyncio.CancelledError | GeneratorExit)


def _frames(coro: Any) -> Iterator[tuple[str, FrameType]]:
    """The suspended frames of a coroutine, outermost first."""
    while coro is not None:
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(coro, f"{k}_frame")), None)
        frame = getattr(coro, f"{kind}_frame") if kind is not None else None
        if frame is None:
            return
        yield getattr(coro, "__qualname__", "?"), frame
        coro = getattr(coro, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _place(coro: Any) -> str:
    """Where a suspended coroutine stands: its frames with their lines, from the outside in, but for the plumbing
    between them; of the plumbing only the innermost name."""
    frames = list(_frames(coro))
    if not frames:
        return f"{getattr(coro, '__qualname__', coro)} (not suspended)"
    steps = []
    for name, frame in frames:
        file = frame.f_code.co_filename
        if not any(part in file.replace("\\", "/") for part in _PLUMBING):
            steps.append(f"{name} ({file}:{frame.f_lineno})")
        elif frame is frames[-1][1]:
            steps.append(name)
    return " > ".join(steps)


@contextmanager
def announce_thread(loop: asyncio.AbstractEventLoop | None = None) -> Generator[None]:
    """Say that a thread works for this loop's tasks, for as long as the ``with`` block lasts.

    A :class:`VirtualTimeLoop` then waits in real time, its clock standing still, instead of jumping to the next
    timer or taking the wait for a deadlock. For any other loop it does nothing. ``loop`` is the running one by
    default; from another thread it has to be given.
    """
    loop = asyncio.get_running_loop() if loop is None else loop
    if not isinstance(loop, VirtualTimeLoop):
        yield
        return
    loop.thread_began()
    try:
        yield
    finally:
        loop.thread_ended()


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` on a new :class:`VirtualTimeLoop` and return its result; the loop is closed afterwards. The waits
    between retries have the same jitter at each run.

    Raises:
        DeadlockError: when every task waits for another.
    """
    with seeded(0), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())
