"""Demand: how busy the foreground of one engine was lately, and how fast its turns were answered. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import final

#: seconds that count as lately: for how busy it was, and for how fast
WINDOW_S, FAST_S = 10.0, 30.0
#: seconds for which a call on a calm engine says how fast that is
CALM_S = 600.0
#: changes and calls that are remembered at most
MAX_STEPS, MAX_RECENT, MAX_CALM = 512, 16, 64
#: calls from which a median is taken at least
FEW = 3
#: new tokens below which a first token's time says nothing of them: it is all overhead
LEAST_NEW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The last seconds (``span_s`` of them are known): the share with any turn in flight, and how many on average."""

    share: float = 0.0
    mean: float = 0.0
    span_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Median seconds to the first token of the latest calls that were not alone, and what a calm engine takes."""

    now_s: float
    calm_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    at: float
    ttft_s: float
    new_tokens: int | None


@final
class Demand:
    """What the foreground asked of one engine. Bounded, and cheap: a turn adds a few numbers."""

    __slots__ = ("_calm", "_recent", "_steps")

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=MAX_STEPS)  # since when, and how many in flight
        self._recent: deque[_Call] = deque(maxlen=MAX_RECENT)
        self._calm: deque[_Call] = deque(maxlen=MAX_CALM)

    def changed(self, now: float, in_flight: int) -> None:
        """So many users of the engine have a turn in flight from now on."""
        if self._steps and self._steps[-1][1] == in_flight:
            return
        self._steps.append((now, in_flight))
        while len(self._steps) > 1 and self._steps[1][0] <= now - WINDOW_S:
            self._steps.popleft()

    def answered(self, now: float, ttft_s: float, *, new_tokens: int | None, calm: bool) -> None:
        """A call's first token came after so long. ``calm``: nothing else was in flight beside it."""
        (self._calm if calm else self._recent).append(_Call(now, ttft_s, new_tokens))

    def busy(self, now: float) -> Busy:
        """How busy it was in the last ``WINDOW_S`` seconds, or since the first turn."""
        if not self._steps:
            return Busy()
        since = max(now - WINDOW_S, self._steps[0][0])
        span = now - since
        if span <= 0:
            return Busy()
        busy = total = 0.0
        ends = [at for at, _ in list(self._steps)[1:]] + [now]
        for (began, count), ended in zip(self._steps, ends, strict=True):
            seconds = max(0.0, min(ended, now) - max(began, since))
            busy += seconds if count else 0.0
            total += seconds * count
        return Busy(share=min(1.0, busy / span), mean=total / span, span_s=span)

    def latency(self, now: float) -> Latency | None:
        """The latest calls that were not alone against those that were, by new token where both tell them; ``None``
        while too few are known. (An agent alone is not slowed by anybody, however long its prompts grow.)"""
        recent = [call for call in self._recent if call.at > now - FAST_S]
        calm = [call for call in self._calm if call.at > now - CALM_S]
        if len(recent) < FEW or len(calm) < FEW:
            return None
        lately = median(call.ttft_s for call in recent)
        fast, slow = _by_token(calm), _by_token(recent)
        if len(fast) >= FEW and len(slow) >= FEW and median(slow) > 0:
            return Latency(now_s=lately, calm_s=lately * median(fast) / median(slow))
        return Latency(now_s=lately, calm_s=median(call.ttft_s for call in calm))


def _by_token(calls: list[_Call]) -> list[float]:
    return [call.ttft_s / max(LEAST_NEW, call.new_tokens) for call in calls if call.new_tokens is not None]
