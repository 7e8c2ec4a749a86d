"""Forecast: how fast a session grows, how long it idles, how long its lookaheads take. Pure: time comes in.

From these follow the earliest-deadline order of the queue and the early start: a lookahead starts before the
trigger when its expected work exceeds the idle time that is left before the hard limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MARGIN = 1.25  # work is expected to take that many times what it usually does
_WEIGHT = 0.3  # of the newest sample; about the last five turns count
_TURNS = 16  # of so many the one that added most may come again: the output of a tool is long now and then
_LONGEST = 4  # and if it is: it is taken for a quarter of what fits, at most
_GAPS = 8  # idle times of late, most of which were longer than what counts as quiet


@dataclass(slots=True)
class Average:
    """An exponentially weighted mean; ``None`` before the first sample."""

    value: float | None = None

    def add(self, sample: float) -> None:
        """Take one more sample."""
        self.value = sample if self.value is None else self.value + _WEIGHT * (sample - self.value)


class Forecast:
    """What a session has seen of itself. Times in seconds of the runtime's clock, sizes in tokens."""

    __slots__ = (
        "_asked",
        "_boundary_at",
        "_boundary_tokens",
        "_gaps",
        "_grown",
        "_idle_since",
        "growth",
        "idle",
        "turn",
        "work",
        "write",
    )

    def __init__(self) -> None:
        self.growth = Average()  # tokens per turn
        self.idle = Average()  # seconds between the end of a turn and the start of the next
        self.turn = Average()  # seconds from boundary to boundary
        self.work = Average()  # seconds of background work per lookahead, preload included
        self.write = Average()  # seconds of it until the result is there
        self._grown: deque[int] = deque(maxlen=_TURNS)  # tokens that the last turns added
        self._gaps: deque[float] = deque(maxlen=_GAPS)  # the last idle times
        self._boundary_at: float | None = None
        self._boundary_tokens = 0
        self._idle_since: float | None = None
        self._asked = False  # a model was, for one of those in ``work`` and ``write``

    def boundary(self, now: float, tokens: int) -> None:
        """A turn begins. ``tokens`` were added until now, in all: as they were shown when they came."""
        if self._boundary_at is not None and tokens > self._boundary_tokens:
            self.growth.add(tokens - self._boundary_tokens)
            self._grown.append(tokens - self._boundary_tokens)
            self.turn.add(now - self._boundary_at)
        if self._idle_since is not None:
            self.idle.add(now - self._idle_since)
            self._gaps.append(now - self._idle_since)
            self._idle_since = None
        self._boundary_at, self._boundary_tokens = now, tokens

    def rested(self, now: float) -> None:
        """The turn's reply is there: idle time begins."""
        self._idle_since = now

    def landed(self, work: float, write: float, *, asked: bool) -> None:
        """A lookahead of the policy's transform has a result. ``asked``: a model was for it.

        Results that came without a model say nothing about those that need one.
        """
        if asked and not self._asked:
            self._asked, self.work, self.write = True, Average(), Average()
        if asked or not self._asked:
            self.work.add(work)
            self.write.add(write)

    def turns_left(self, tokens: int, limit: int | None) -> float | None:
        """Turns until a view of ``tokens`` grows over ``limit``; ``None`` while unknown."""
        if limit is None or not self.growth.value:
            return None
        return max(0.0, (limit - tokens) / self.growth.value)

    def due(self, now: float, tokens: int, limit: int | None) -> float | None:
        """When the hard limit is expected, on the runtime's clock; ``None`` while unknown."""
        turns = self.turns_left(tokens, limit)
        if turns is None or self.turn.value is None:
            return None
        return now + turns * self.turn.value

    def quiet(self, now: float, *, in_flight: bool) -> float | None:
        """Seconds for which the next turn is not expected: three of four idle times of late were longer. ``None`` while
        none was seen; nothing where the last turn ended unseen. While a turn is ``in_flight``, those after it."""
        if not self._gaps:
            return None
        usual = sorted(self._gaps)[len(self._gaps) // 4]
        if in_flight:
            return usual
        return 0.0 if self._idle_since is None else max(0.0, usual - (now - self._idle_since))

    def hurried(self, rate: float | None, remaining: int, tokens: int, limit: int | None) -> bool:
        """Is idle time alone too little to prefill ``remaining`` tokens at ``rate`` (tokens per second), and what
        the session adds meanwhile, before the limit?"""
        turns = self.turns_left(tokens, limit)
        if not rate or turns is None or self.idle.value is None or self.growth.value is None:
            return False
        times = int(turns) + 1  # the commit comes with the turn that passes the limit, after so many idle times
        spare = times * rate * self.idle.value - (times - 1) * self.growth.value
        return remaining * _MARGIN > spare

    def late(self, tokens: int, limit: int | None, work: float | None) -> bool:
        """Would a lookahead of ``work`` seconds that starts now end after the limit?

        ``work`` is only a first guess, where the session has seen no lookahead of its own yet. Those it has seen
        took their time beside its turns, so they are held against whole turns; a guess is held against idle time.
        The last turn before the limit cannot be used up, since the commit happens at its start; and it may be as long
        as the longest one of late (but for what no early start could make up for).
        """
        longest = min(max(self._grown, default=0), (limit or 0) // _LONGEST)
        turns = self.turns_left(tokens + longest, limit)
        if turns is None:
            return False
        if self.work.value is not None and self.turn.value is not None:
            return self.work.value * _MARGIN > turns * self.turn.value
        if work is not None and self.idle.value is not None:
            return work * _MARGIN > turns * self.idle.value
        return False

    def growth_during(self, work: float | None) -> int:
        """Tokens that the session is expected to add while a lookahead runs."""
        seconds = self.work.value if self.work.value is not None else work
        if seconds is None or not self.turn.value or not self.growth.value:
            return 0
        return int(self.growth.value * seconds / self.turn.value)
