"""The handle: one scheduled lookahead and its state, as the caller sees it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from .cuts import Run
from .errors import HandleNotReady
from .receipts import Receipt
from .states import FINAL, WORKING, HandleState, Reason
from .transforms.base import Transform

if TYPE_CHECKING:
    from .flight import Flight
    from .session import Session
    from .view import Artifact

_ids = itertools.count(1)


@final
class LookaheadHandle:
    """One lookahead of one session. Made by ``observe`` and ``schedule_transform``, never directly.

    Safe to use from any thread and any event loop.
    """

    def __init__(self, session: Session, transform: Transform, run: Run, flight: Flight, *, explicit: bool) -> None:
        self.id = next(_ids)
        self.transform = transform
        self.run = run
        self.explicit = explicit
        self.receipt: Receipt | None = None
        self.error: Exception | None = None
        #: a turn has waited for it at the hard limit for as long as it may
        self.waited_out = False
        #: messages that the history had when it was started: what came later is its future
        self.snapshot = len(session.branch.history)
        #: what the session chose among the candidates of its result, if it had any
        self.chosen: Artifact | None = None
        self._session = session
        self._flight = flight
        self._state = HandleState.PENDING
        self._reason: Reason | None = None
        self._asked = False  # the caller has promoted it
        self._turns = 0  # that wait for it now
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._on_result: list[Callable[[], None]] = []

    @property
    def session(self) -> Session:
        """The session that it belongs to."""
        return self._session

    @property
    def state(self) -> HandleState:
        """Where it is in its life."""
        return self._state

    @property
    def reason(self) -> Reason | None:
        """Why it was discarded or failed; ``None`` otherwise."""
        return self._reason

    @property
    def flight(self) -> Flight:
        """The work behind it, shared by every handle of the same artifact."""
        return self._flight

    @property
    def artifact(self) -> Artifact | None:
        """Its result: of several candidates the chosen one; ``None`` while there is none."""
        return self.chosen if self.chosen is not None else self._flight.artifact

    def done(self) -> bool:
        """Has the work ended, one way or another? (Neither pending nor running.)"""
        return self._state not in WORKING

    async def wait(self, timeout: float | None = None) -> HandleState:
        """Wait until the work has ended and return the state. A failed transform is a state, not an exception.

        Cancelling the wait never cancels the work.

        Raises:
            TimeoutError: when ``timeout`` seconds have passed.
        """
        if not self.done():
            await self._wait(self._when_done, timeout)
        return self._state

    async def wait_result(self, timeout: float) -> None:
        """Wait until there is a result to commit (preload may still go on) or the work has ended.

        Raises:
            TimeoutError: when ``timeout`` seconds have passed.
        """
        await self._wait(self._when_result, timeout)

    async def _wait(self, subscribe: Callable[[Callable[[], None]], None], timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not ended.done():
                ended.set_result(None)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish)

        subscribe(wake)
        try:
            async with asyncio.timeout(timeout):
                await ended
        finally:
            self._forget(wake)

    def wait_sync(self, timeout: float | None = None) -> HandleState:
        """:meth:`wait` for synchronous callers. Never call it on the runtime's own event loop.

        Raises:
            TimeoutError: when ``timeout`` seconds have passed.
        """
        self._wait_sync(self._when_done, timeout)
        return self._state

    def wait_result_sync(self, timeout: float) -> None:
        """:meth:`wait_result` for synchronous callers."""
        self._wait_sync(self._when_result, timeout)

    def _wait_sync(self, subscribe: Callable[[Callable[[], None]], None], timeout: float | None) -> None:
        ended = threading.Event()
        wake = ended.set
        subscribe(wake)
        try:
            if not ended.wait(timeout):
                raise TimeoutError(f"lookahead {self.id} is still {self._state} after {timeout} s")
        finally:
            self._forget(wake)

    def commit(self, messages: Sequence[Any]) -> list[Any]:
        """Make the result part of the session's view, as ``session.commit`` would, and return the view.

        Raises:
            HandleNotReady: without a result (look at ``state`` and ``reason``).
            StaleHandle: when the result does not fit ``messages`` any more.
        """
        # An opening replaces nothing: it may be taken while its preload still goes on.
        early = self._state is HandleState.RUNNING and self._flight.opening is not None
        if not early and self._state is not HandleState.READY and self._state is not HandleState.COMMITTED:
            why = f" ({self._reason})" if self._reason else ""
            raise HandleNotReady(f"lookahead {self.id} is {self._state}{why}: only a ready one can be committed")
        return self._session.commit_handle(self, messages)

    def promote(self) -> None:
        """Move it to the front of the queue: its commit is due. It stays there."""
        self._asked = True
        self._session.promote_handle(self)

    @property
    def promoted(self) -> bool:
        """Is it at the front of the queue: was it promoted by the caller, or does a turn wait for it now?"""
        return self._asked or self._turns > 0

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """A turn waits for it inside: it is promoted for that long. However the wait ends, what nobody waits for any
        more must not stand before the work of others."""
        with self._lock:
            self._turns += 1
        self._session.promote_handle(self)
        try:
            yield
        finally:
            with self._lock:
                self._turns -= 1
            self._session.release_handle(self)

    def discard(self, reason: Reason = Reason.CANCELLED) -> None:
        """Drop it; work that nobody else needs is cancelled. No effect once it is final."""
        self._session.discard_handle(self, reason)

    def __repr__(self) -> str:
        why = f", reason={self._reason}" if self._reason else ""
        return f"<LookaheadHandle {self.id} {self.transform.name} [{self.run.start}:{self.run.end}] {self._state}{why}>"

    # -- used by the session and the flight, under the session's lock ------------------------------------

    def move(self, state: HandleState, reason: Reason | None = None, error: Exception | None = None) -> bool:
        """Go to ``state`` unless already final. Returns whether it moved."""
        with self._lock:
            if self._state in FINAL:
                return False
            self._state, self._reason, self.error = state, reason, error
            callbacks: list[Callable[[], None]] = []
            if self.done():
                callbacks = [*self._callbacks, *self._on_result]
                self._callbacks, self._on_result = [], []
        for callback in callbacks:
            callback()
        return True

    def arrived(self) -> None:
        """There is a result; the preload may still go on."""
        with self._lock:
            callbacks, self._on_result = self._on_result, []
        for callback in callbacks:
            callback()

    def _when_result(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.done() and self._flight.artifact is None:
                self._on_result.append(callback)
                return
        callback()

    def _when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback()

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks = [c for c in self._callbacks if c is not callback]
            self._on_result = [c for c in self._on_result if c is not callback]
