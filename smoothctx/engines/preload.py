"""Preload: warm an engine's prefix cache in growing prefixes, preemptible on unmodified engines.

Each request extends what the last one cached by one chunk, and the next goes out only while no foreground call
is in flight or due; one that is under way when a turn begins is aborted. So the foreground waits for one chunk
at most (one batch of the engine, where it notices the abort earlier).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..foreground import Foreground
from ..usage import Usage

#: seconds that one chunk may take, so that a foreground call waits no longer
CHUNK_DELAY_S = 0.1
#: characters of the first chunk, before a rate is known, and of the smallest and the largest one
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
        self._rate: float | None = None  # new characters per second
        self._last = FIRST_CHUNK

    async def run(
        self, send: Send, view: Callable[[], Messages], *, foreground: Foreground, needed: Callable[[], bool]
    ) -> PreloadReport:
        """Warm ``view()`` until nothing is left of it, or until it is not needed any more.

        Raises:
            Exception: whatever ``send`` raises, as it is.
        """
        warm: Messages = ()  # what the server has evaluated, without the stubs
        done, requests, aborted, tokens = 0, 0, 0, 0
        usage = Usage()
        complete = False
        while needed():
            messages = view()
            if done and head(messages, done)[0] != warm:
                done = 0  # another view than before: nothing of it is known to be warm
            total = sum(map(_size, messages))
            if done >= total:
                complete = True
                break
            await foreground.wait_idle()
            if not needed():
                break
            chunk = self._chunk()
            part, upto = head(messages, total if total - done <= chunk * 1.25 else done + chunk)
            prompt = messages if upto >= total else valid(part, messages)
            started = self._now()
            reply = await foreground.unless(lambda: foreground.busy or not needed(), partial(send, prompt))
            if reply is None:
                aborted += 1
                continue
            requests += 1
            self._learn(upto - done, upto, reply.usage, self._now() - started)
            usage = usage + reply.usage
            tokens = reply.usage.input_tokens
            warm, done = part, upto
        return PreloadReport(complete=complete, tokens=tokens, requests=requests, aborted=aborted, usage=usage)

    def _chunk(self) -> int:
        if self._rate is None:
            return FIRST_CHUNK
        # What the server had cached already looks fast: grow step by step.
        return max(MIN_CHUNK, min(MAX_CHUNK, 2 * self._last, int(self._rate * self._delay)))

    def _learn(self, sent: int, upto: int, usage: Usage, seconds: float) -> None:
        """Take one chunk: only characters that were really evaluated say something of the rate."""
        self._last = max(MIN_CHUNK, sent)
        new = sent
        if usage.cached_tokens is not None and usage.input_tokens > 0:
            new = min(sent, upto * (usage.input_tokens - usage.cached_tokens) // usage.input_tokens)
        if seconds > 0 and new >= MIN_CHUNK // 2:
            rate = new / seconds
            self._rate = rate if self._rate is None else self._rate + 0.3 * (rate - self._rate)


def _size(message: Mapping[str, Any]) -> int:
    """Characters of a message's text and calls, at least one."""
    content = message.get("content")
    size = len(content) if isinstance(content, str) else 0
    if isinstance(content, list):
        size = sum(len(p["text"]) for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str))
    for call in message.get("tool_calls") or ():
        size += len(str(call))
    return max(1, size)


def head(messages: Messages, size: int) -> tuple[list[Mapping[str, Any]], int]:
    """The first ``size`` characters of a conversation, and how many they are.

    Whole messages, the last one cut where its text allows; else it is taken whole.
    """
    taken: list[Mapping[str, Any]] = []
    done = 0
    for message in messages:
        own = _size(message)
        left = size - done
        if left <= 0 and taken:
            break
        content = message.get("content")
        if own > left > 0 and isinstance(content, str) and not message.get("tool_calls"):
            taken.append({**message, "content": content[:left]})
            return taken, size
        taken.append(message)
        done += own
    return taken, done


def valid(part: Sequence[Mapping[str, Any]], messages: Messages) -> list[Mapping[str, Any]]:
    """A cut conversation that servers accept: a result for each call, and a user's message.

    The stubs stand after the cut, so what was evaluated before it stays the prefix of the whole.
    """
    fixed = list(part)
    last = max((k for k, m in enumerate(part) if m.get("tool_calls")), default=None)
    if last is not None and all(m.get("role") == "tool" for m in part[last + 1 :]):
        answered = {m.get("tool_call_id") for m in part[last + 1 :]}
        for call in part[last]["tool_calls"]:
            if call.get("id") not in answered:
                fixed.append({"role": "tool", "tool_call_id": call.get("id"), "content": ""})
    if not any(m.get("role") == "user" for m in part) and any(m.get("role") == "user" for m in messages):
        fixed.append({"role": "user", "content": "."})
    return fixed
