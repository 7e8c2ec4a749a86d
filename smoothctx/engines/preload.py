"""Preload: warm an engine's prefix cache in growing prefixes, preemptible on unmodified engines.

Each request extends what the last one cached by one chunk, and the next goes out only while no foreground call
is in flight or due; one that is under way when a turn begins is aborted. So the foreground waits for one chunk
at most (one batch of the engine, where it notices the abort earlier).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from ..foreground import Foreground
from ..usage import Usage

#: seconds that one chunk may take, so that a foreground call waits no longer
CHUNK_DELAY_S = 0.1
#: characters of the first chunk, before a rate is known, and of the smallest one
FIRST_CHUNK = 512
MIN_CHUNK = 128
MAX_CHUNK = 65_536

Messages = Sequence[Mapping[str, Any]]
Send = Callable[[Messages], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadReport:
    """What a preload did. ``complete``: the whole view was evaluated, by the server's own answer.

    ``tokens`` is the size of the last prompt as the server counted it; ``aborted`` counts chunks that gave way
    to the foreground.
    """

    complete: bool
    tokens: int = 0
    requests: int = 0
    aborted: int = 0
    usage: Usage = Usage()


class Preloader:
    """Sends growing prefixes and learns the engine's prefill rate from them. One per session."""

    def __init__(self, *, chunk_delay_s: float = CHUNK_DELAY_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._delay = chunk_delay_s
        self._now = clock
        self._rate: float | None = None  # characters per second

    async def run(
        self, send: Send, view: Callable[[], Messages], *, foreground: Foreground, needed: Callable[[], bool]
    ) -> PreloadReport:
        """Warm ``view()`` until nothing is left of it, or until it is not needed any more."""
        warm, requests, aborted, tokens = 0, 0, 0, 0
        usage = Usage()
        while needed():
            await foreground.wait_idle()
            if not needed():
                break
            messages = view()
            total = sum(map(_size, messages))
            if warm >= total:
                return PreloadReport(complete=True, tokens=tokens, requests=requests, aborted=aborted, usage=usage)
            chunk = self._chunk()
            upto = total if total - warm <= chunk * 1.25 else warm + chunk
            started = self._now()
            reply = await _unless_busy(send, head(messages, upto), foreground)
            if reply is None:
                aborted += 1
                continue
            requests += 1
            self._learn(upto - warm, self._now() - started)
            usage = usage + reply.usage
            tokens = reply.usage.input_tokens
            warm = upto
        return PreloadReport(complete=False, tokens=tokens, requests=requests, aborted=aborted, usage=usage)

    def _chunk(self) -> int:
        if self._rate is None:
            return FIRST_CHUNK
        return max(MIN_CHUNK, min(MAX_CHUNK, int(self._rate * self._delay)))

    def _learn(self, characters: int, seconds: float) -> None:
        if seconds > 0 and characters > 0:
            rate = characters / seconds
            self._rate = rate if self._rate is None else self._rate + 0.3 * (rate - self._rate)


async def _unless_busy(send: Send, messages: Messages, foreground: Foreground) -> Any:
    """The reply, or ``None`` if a foreground turn began first: the request is then aborted."""
    reply: Any = None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while not foreground.busy:
                await foreground.changed(1.0)
            group.cancel_scope.cancel()

        group.start_soon(watch, name="smoothctx-preload-watch")
        reply = await send(messages)
        group.cancel_scope.cancel()
    return reply


def _size(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) and content else 1


def head(messages: Messages, size: int) -> list[Mapping[str, Any]]:
    """The first ``size`` characters of a conversation: whole messages, the last one cut where its text allows."""
    taken: list[Mapping[str, Any]] = []
    for message in messages:
        own = _size(message)
        if own <= size:
            taken.append(message)
            size -= own
            continue
        content = message.get("content")
        if size > 0 and isinstance(content, str) and not message.get("tool_calls"):
            taken.append({**message, "content": content[:size]})
        break
    return taken or list(messages[:1])
