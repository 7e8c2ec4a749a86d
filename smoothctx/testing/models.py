"""A fake model: scripted answers, held back and let go by the test, and a record of what it was asked."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

import anyio

from ..codec import Codec, OpenAIMessages

_MARK = re.compile(r"<(\d+)>")


def marks(messages: Iterable[Any], *, codec: Codec | None = None) -> set[int]:
    """The marks, such as ``<12>``, in these messages' texts: what a summary by :class:`FakeModel` covers."""
    codec = codec or OpenAIMessages()
    return {int(mark) for message in messages for mark in _MARK.findall(codec.text(message))}


class Script:
    """Answers in turn, the last one again and again.

    An exception is raised, a callable is asked with the messages, anything else is the answer itself. With no
    answers at all, the answer is a short text with every mark that the messages have.
    """

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers = tuple(answers)
        self._given = 0

    def next(self, messages: Sequence[Any]) -> Any:
        """The next answer."""
        if not self._answers:
            return "The summary. " + "".join(f"<{mark}>" for mark in sorted(marks(messages)))
        answer = self._answers[min(self._given, len(self._answers) - 1)]
        self._given += 1
        if isinstance(answer, BaseException) or (isinstance(answer, type) and issubclass(answer, BaseException)):
            raise answer
        return answer(messages) if callable(answer) else answer


class FakeModel:
    """A plain async model: ``await model(messages, max_tokens=...)``. For use on one event loop.

    Args:
        answers: given in turn, the last one again and again: a ``str`` (or a ``ModelReply``, to report usage), an
            exception to raise, a callable that gets the messages and returns an answer, or anything else, as the
            garbage it is. Without any, the answer is a short text with every mark (``<12>``) of its input, so that
            a test can tell from a summary what it covers.
        delay_s: seconds that each answer takes, on the loop's clock.
        hold: wait with each answer until ``release`` is set.
    """

    def __init__(self, *answers: Any, delay_s: float = 0.0, hold: bool = False) -> None:
        self._script = Script(answers)
        self.delay_s = delay_s
        #: set with the first call; clear it to wait for the next
        self.started = asyncio.Event()
        #: the answers are held back while this is not set
        self.release = asyncio.Event()
        if not hold:
            self.release.set()
        #: what each call was given
        self.requests: list[list[dict[str, Any]]] = []
        #: the ``max_tokens`` of each call
        self.max_tokens: list[int | None] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0

    @property
    def calls(self) -> int:
        """How often it was asked."""
        return len(self.requests)

    @property
    def seen(self) -> set[int]:
        """Every mark that it was given so far."""
        return {mark for request in self.requests for mark in marks(request)}

    async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> Any:
        self.requests.append(copy.deepcopy(messages))
        self.max_tokens.append(max_tokens)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.started.set()
        try:
            if self.delay_s:
                await anyio.sleep(self.delay_s)
            await self.release.wait()
            return self._script.next(messages)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def __repr__(self) -> str:
        return f"FakeModel(calls={self.calls}, running={self.running})"
