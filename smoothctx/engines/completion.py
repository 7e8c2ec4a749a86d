"""Completion: one finished call, the stream that it came by, and what the calls showed of the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from ..errors import EngineError, EngineProtocolError
from ..tokens import MESSAGE_TOKENS, count_text
from ..usage import Usage
from .wire import DONE, dicts, raise_for_event, read_usage, shown

#: seconds that a server gets to end its answer after the last event, so that the connection can be used again
_END_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished model call.

    ``ttft_s`` and ``total_s`` are seconds from sending the request to the first token (``None`` when not
    streamed, or nothing came) and to the end. ``tool_calls`` says that the model called a tool.
    """

    text: str
    usage: Usage
    finish_reason: str | None
    tool_calls: bool = False
    ttft_s: float | None = None
    total_s: float = 0.0


class Rates:
    """What the calls of one client showed of its server, in tokens per second; ``None`` while unknown."""

    def __init__(self) -> None:
        self.prefill: float | None = None
        self.decode: float | None = None
        #: seconds that one token of context adds to a decoded one; only ``calibrate`` measures it
        self.attention_s: float | None = None

    def learn(self, completion: Completion) -> None:
        """Take one finished stream; only what the server reported counts."""
        usage, ttft = completion.usage, completion.ttft_s
        if ttft is None or usage.cached_tokens is None:
            return
        new, more = usage.input_tokens - usage.cached_tokens, usage.output_tokens - 1
        if new >= 64 and ttft > 0:
            self.prefill = running_mean(self.prefill, new / ttft)
        if more >= 8 and completion.total_s > ttft:
            self.decode = running_mean(self.decode, more / (completion.total_s - ttft))


def running_mean(old: float | None, new: float) -> float:
    """What is measured again and again: the newest counts three tenths."""
    return new if old is None else old + 0.3 * (new - old)


class Stream:
    """A running completion: iterate over its text; ``completion`` is there when the iteration has ended.

    ``on_token`` may be set before: it is called whenever tokens come, also such that are no text (reasoning, the call
    of a tool). ``evaluated``: see :class:`~smoothctx.engines.binding.Prepared`.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any]],
        now: Callable[[], float],
        url: str,
        rates: Rates,
        *,
        started: float,
        prompt: Sequence[Mapping[str, Any]] = (),
        evaluated: int | None = 0,
    ) -> None:
        self._events = events
        self._rates = rates
        self._now = now
        self._url = url
        self._started = started
        self._prompt = prompt
        self._evaluated = evaluated
        self.completion: Completion | None = None
        self.on_token: Callable[[], object] | None = None

    async def __aiter__(self) -> AsyncGenerator[str]:
        parts: list[str] = []
        usage: Usage | None = None
        finish: str | None = None
        ttft: float | None = None
        tools = ended = answered = False
        async for event in self._events:
            if event is DONE:
                ended = True
                break
            raise_for_event(self._url, event)
            if isinstance(event.get("usage"), dict):
                usage = read_usage(event["usage"])
            for choice in dicts(event.get("choices")):
                answered = True
                delta = choice.get("delta")
                delta = delta if isinstance(delta, dict) else {}
                text = delta.get("content")
                called = bool(delta.get("tool_calls") or delta.get("function_call"))
                tools = tools or called
                finish = choice.get("finish_reason") or finish
                if text or called or delta.get("reasoning_content") or delta.get("reasoning"):
                    if ttft is None:
                        ttft = self._now() - self._started
                    if self.on_token is not None:
                        self.on_token()
                if isinstance(text, str) and text:
                    parts.append(text)
                    yield text
        total = self._now() - self._started
        if not answered:
            raise EngineProtocolError(f"{self._url}: the stream held no answer: is it an OpenAI-compatible server?")
        if finish is None and not ended:
            raise EngineProtocolError(f"{self._url}: the stream ended in the middle of the answer")
        if ended:
            await self._finish()
        self.completion = Completion(
            text="".join(parts),
            usage=usage or self._estimate("".join(parts)),
            finish_reason=finish,
            tool_calls=tools,
            ttft_s=ttft,
            total_s=total,
        )
        self._rates.learn(self.completion)
        self.completion = replace(self.completion, usage=self._honest(self.completion.usage))

    def _honest(self, usage: Usage) -> Usage:
        """What was evaluated for this call just before is no hit of the cache."""
        if self._evaluated == 0 or usage.cached_tokens is None:
            return usage
        return replace(
            usage, cached_tokens=None if self._evaluated is None else max(0, usage.cached_tokens - self._evaluated)
        )

    async def _finish(self) -> None:
        """Read the end of the body, which is due now: the connection can then be used again."""
        with anyio.move_on_after(_END_S):
            try:
                async for _ in self._events:
                    pass
            except EngineError:
                pass  # the answer is whole

    def _estimate(self, text: str) -> Usage:
        tokens = sum(count_text(shown(m)) + MESSAGE_TOKENS for m in self._prompt)
        return Usage(input_tokens=tokens, output_tokens=count_text(text), calls=1, estimated=True)

    async def drain(self) -> Completion:
        """Read to the end and return the completion."""
        async for _ in self:
            pass
        assert self.completion is not None
        return self.completion
