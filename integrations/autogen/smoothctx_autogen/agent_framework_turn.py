"""One model call of the Agent Framework under way, also where it goes on as a stream."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from agent_framework import ChatContext, ChatResponse, ChatResponseUpdate, Message

from smoothctx import Session
from smoothctx.lines import Lines

from .agent_framework_codec import AgentFrameworkMessages
from .agent_framework_model import usage_of
from .checks import guarded


class Turn:
    """One model call under way: holds its session until the call is over, however it ends. ``failed`` hears of what
    goes wrong in looking at a stream."""

    def __init__(self, codec: AgentFrameworkMessages, failed: Callable[[Exception], None]) -> None:
        self.streams = False
        self.view: list[Message] = []
        self._codec, self._failed = codec, failed
        self._held = ExitStack()
        self._session: Session | None = None
        self._messages: list[Message] = []
        self._over = False
        self._foreground: Any = None
        self._call: Any = None
        self._first = False

    def enter(self, lines: Lines, bucket: str, messages: list[Message]) -> Session:
        """Take the session that these messages belong to."""
        session = self._held.enter_context(lines.using(bucket, messages))
        self._session, self._messages = session, messages
        return session

    def call_begins(self) -> None:
        """From now on the call is in the foreground."""
        assert self._session is not None
        self._foreground = self._session.foreground()
        self._call = _now(self._foreground.__aenter__())

    def got_history(self, messages: Sequence[Message]) -> bool:
        """Did something behind us put messages that a provider had stored before the view?"""
        if not messages or any(m is messages[0] for m in self.view):
            return False
        source = messages[0].additional_properties.get("_attribution")
        return isinstance(source, Mapping) and "source_id" in source

    def answered(self, response: ChatResponse[Any]) -> None:
        """The reply is there, with what the provider says it cost."""
        self._cost(response.usage_details)
        reply = list(response.messages)
        if self._session is None or not reply:
            return
        self._codec.report(reply[-1], response.usage_details)
        self._messages = [*self._messages, *reply]
        if self._over:  # a stream ends before its response is put together
            self._session.observe(self._messages)

    def follow(self, context: ChatContext) -> None:
        """The call goes on as a stream, which somebody else reads, perhaps not to its end."""
        context.stream_cleanup_hooks.append(self.end)
        self.streams = True
        context.stream_update_transforms.append(self._update)
        context.stream_result_transforms.append(self._result)
        # Dropped without a word: it may be found at any point of any code, so nothing may be locked there.
        dropped = weakref.finalize(context.result, _later, asyncio.get_running_loop(), self.end)
        dropped.atexit = False

    def _update(self, update: ChatResponseUpdate) -> ChatResponseUpdate:
        with guarded(self._failed):
            if self._call is not None and not self._first:
                self._first = True
                self._call.first_token()
            for content in update.contents or ():
                if content.type == "usage":
                    self._cost(content.usage_details)
        return update

    def _cost(self, details: Mapping[str, Any] | None) -> None:
        """What the call cost, as far as it is known before it is over."""
        if self._call is not None and details:
            self._call.report(usage_of(details))

    def _result(self, response: ChatResponse[Any]) -> None:
        with guarded(self._failed):
            self.answered(response)

    def end(self) -> None:
        """The call is over: with its reply, or without. Ending twice is fine."""
        if self._over:
            return
        self._over = True
        if self._foreground is not None:
            _now(self._foreground.__aexit__(None, None, None))
        if self._session is not None:
            self._session.observe(self._messages)
        self._held.close()


def _now(step: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing: a stream ends where nobody can await."""
    try:
        step.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("entering and leaving the foreground never waits")


def _later(loop: asyncio.AbstractEventLoop, run: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:  # the loop was closed, and every call on it with it
        pass
