"""Demand: how busy the foreground of one engine was lately, and how fast its turns were answered. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median, median_low
from typing import final

#: seconds that count as lately: for how busy it was, and for how fast
WINDOW_S, FAST_S = 10.0, 30.0
#: seconds for which a call on a calm engine says how fast that is
CALM_S = 600.0
#: changes and calls that are remembered at most
MAX_STEPS, MAX_RECENT, MAX_CALM, MAX_SPELLS = 512, 16, 64, 20
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
    """Median seconds to the first token of the latest calls that were not alone, and what a calm engine takes (at the
    most, where no call ever has it for itself)."""

    now_s: float
    calm_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    at: float
    ttft_s: float
    new_tokens: int | None


@dataclass(frozen=True, slots=True)
class _Spell:
    """What calls that were not alone took for some time: the upper quartile, in seconds and by new token."""

    until: float
    ttft_s: float
    by_token: float


@final
class Demand:
    """What the foreground asked of one engine. Bounded, and cheap: a turn adds a few numbers."""

    __slots__ = ("_calm", "_crowded", "_recent", "_since", "_spells", "_steps")

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=MAX_STEPS)  # since when, and how many in flight
        self._recent: deque[_Call] = deque(maxlen=MAX_RECENT)
        self._calm: deque[_Call] = deque(maxlen=MAX_CALM)
        self._crowded: deque[_Call] = deque(maxlen=MAX_CALM)  # of the present spell, and since when that is
        self._since = 0.0
        self._spells: deque[_Spell] = deque(maxlen=MAX_SPELLS)

    def changed(self, now: float, in_flight: int) -> None:
        """So many users of the engine have a turn in flight from now on."""
        if self._steps and self._steps[-1][1] == in_flight:
            return
        self._steps.append((now, in_flight))
        while len(self._steps) > 1 and self._steps[1][0] <= now - WINDOW_S:
            self._steps.popleft()

    def answered(self, now: float, ttft_s: float, *, new_tokens: int | None, calm: bool) -> None:
        """A call's first token came after so long. ``calm``: nothing else was in flight beside it."""
        call = _Call(now, ttft_s, new_tokens)
        (self._calm if calm else self._recent).append(call)
        if calm or new_tokens is None:
            return
        if len(self._crowded) >= MAX_RECENT and now - self._since >= FAST_S:
            self._spells.append(_spell(self._crowded))
            self._crowded.clear()
        if not self._crowded:
            self._since = now
        self._crowded.append(call)

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
        while too few are known. (An agent alone is not slowed by anybody, however long its prompts grow.) Where users
        always overlap, against what calls beside others took in better times."""
        recent = [call for call in self._recent if call.at > now - FAST_S]
        calm = [call for call in self._calm if call.at > now - CALM_S]
        if len(calm) < FEW:
            spells = [spell for spell in self._spells if spell.until > now - CALM_S]
            return _against(spells, [call for call in recent if call.new_tokens is not None])
        if len(recent) < FEW:
            return None
        lately = median(call.ttft_s for call in recent)
        fast, slow = _by_token(calm), _by_token(recent)
        if len(fast) >= FEW and len(slow) >= FEW and median(slow) > 0:
            return Latency(now_s=lately, calm_s=lately * median(fast) / median(slow))
        return Latency(now_s=lately, calm_s=median(call.ttft_s for call in calm))


def _by_token(calls: list[_Call]) -> list[float]:
    return [call.ttft_s / max(LEAST_NEW, call.new_tokens) for call in calls if call.new_tokens is not None]


def _against(spells: list[_Spell], recent: list[_Call]) -> Latency | None:
    """The latest calls against the better spells of the last minutes, each of which says what these calls would take at
    the most on an engine as it was then.

    That is the greater of its seconds and of its seconds for so many new tokens: as long as a first token takes a
    constant time and so much for each new token, longer prompts take less by token and shorter ones less in all, so no
    change of the prompts looks like a slower engine.
    """
    if len(recent) < 2 * FEW or len(spells) < FEW:
        return None
    lately, by_token = median_low(call.ttft_s for call in recent), median_low(map(_each, recent))
    if by_token <= 0:
        return None
    expected = sorted(max(spell.ttft_s, lately * spell.by_token / by_token) for spell in spells)
    return Latency(now_s=lately, calm_s=expected[len(expected) // 4])


def _spell(calls: deque[_Call]) -> _Spell:
    upper = 3 * len(calls) // 4
    return _Spell(
        until=calls[-1].at,
        ttft_s=sorted(call.ttft_s for call in calls)[upper],
        by_token=sorted(map(_each, calls))[upper],
    )


def _each(call: _Call) -> float:
    return call.ttft_s / max(1, call.new_tokens or 0)
