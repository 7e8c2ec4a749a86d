"""Calls: what a session learns of a model call that its caller makes itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .conversation import Conversation
from .endpoints import overload
from .engines.wire import read_usage
from .foreground import CALL_S
from .outcomes import ForegroundSeen
from .serving import Serving
from .usage import Usage

if TYPE_CHECKING:
    from .runtime import Runtime


class ForegroundCall:
    """A model call that the caller makes itself: tell us of its first token, and of what it cost."""

    def __init__(self, first_token: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._first_token = first_token
        self._failed = failed
        self.usage: Usage | None = None

    def first_token(self) -> None:
        """The first token came: background prefill still waits, background decode may go on."""
        self._first_token()

    def report(self, usage: object) -> None:
        """What the server said that it cost: for ``session.outcomes()``.

        A ``Usage``, or the ``response.usage`` of an OpenAI-compatible client, as an object or a mapping; ``None``
        (the server reported none) says nothing. What cannot be read is an event: no call fails by it.
        """
        if isinstance(usage, Usage):
            self.usage = usage
        elif usage is not None:
            try:
                read = read_usage(usage)
                if not read.total_tokens:
                    raise TypeError(f"usage: expected a Usage or an OpenAI-style usage, got {type(usage).__name__}")
                self.usage = read
            except Exception as error:
                self._failed(error)


class Calls:
    """The foreground calls of one session, to its ``engine`` where that is known. ``lock`` is the session's."""

    def __init__(
        self, runtime: Runtime, conversation: Conversation, serving: Serving, lock: threading.RLock, engine: Any
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._conversation = conversation
        self._serving = serving
        self._lock = lock

    @contextmanager
    def watched(self, turn: object) -> Iterator[ForegroundCall]:
        """A call in this turn is under way. One that ended well is kept beside the commits around it."""
        who, started = object(), self._runtime.now()
        first: list[float] = []

        def first_token() -> None:
            first.append(self._runtime.now() - started)
            self._serving.first_token(who, turn)
            if len(first) == 1 and self._runtime.events.heard:
                receipt = self._conversation.outcomes.rewrite(mark)
                waited = 0.0 if receipt is None else receipt.waited_s
                self._conversation.emit("ttft", ttft_s=first[0], rewritten=receipt is not None, waited_s=waited)

        call = ForegroundCall(first_token, lambda error: self._conversation.error(error, "foreground.report"))
        with self._lock:
            mark = self._conversation.outcomes.began()
        self._serving.begin(who, CALL_S)
        try:
            yield call
            seen = ForegroundSeen(
                ttft_s=first[0] if first else None, total_s=self._runtime.now() - started, usage=call.usage
            )
            try:
                if first:
                    self._serving.answered(who, first[0], call.usage)
                with self._lock:
                    self._conversation.outcomes.ended(mark, seen)
            except Exception as error:  # what is written down of a call never fails it
                self._conversation.error(error, "foreground")
        except BaseException as error:  # the call failed or was cancelled: until it is tried again no turn is due
            self._serving.end(turn)
            if isinstance(error, Exception):
                self._refused(error)
            raise
        finally:
            self._serving.end(who)

    def _refused(self, error: Exception) -> None:
        """The agent's own call failed: where its engine says that it is overloaded, background calls leave it alone."""
        engine, endpoints = self._engine, self._runtime.endpoints

        def tell() -> None:
            endpoints.overloaded(engine, error)

        try:
            if engine is not None and overload(error) is not None:
                self._runtime.soon(tell)
        except Exception as wrong:  # whatever the error is made of: the caller gets it as it is
            self._conversation.error(wrong, "foreground")
