"""What background work cost: token usage as the model reported it, and the running totals of a runtime."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one or several model calls.

    ``cached_tokens`` is ``None`` where the server did not report it: a cache hit is never guessed.
    ``estimated`` is true where at least one call reported no usage and its tokens were estimated.
    ``unreported_tokens``: where ``cached_tokens`` is known, the input tokens of those calls among them that reported
    none.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    calls: int = 0
    estimated: bool = False
    unreported_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        cached = (
            None
            if self.cached_tokens is None and other.cached_tokens is None
            else (self.cached_tokens or 0) + (other.cached_tokens or 0)
        )
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=cached,
            calls=self.calls + other.calls,
            estimated=self.estimated or other.estimated,
            unreported_tokens=0 if cached is None else self._unreported + other._unreported,
        )

    @property
    def _unreported(self) -> int:
        return self.input_tokens if self.cached_tokens is None else self.unreported_tokens

    @property
    def cached_share(self) -> float | None:
        """Share of the input tokens that the server found in its cache, between 0 and 1, over the calls that reported
        it; ``None`` where none did."""
        reported = self.input_tokens - self._unreported
        return None if self.cached_tokens is None or reported <= 0 else self.cached_tokens / reported

    @property
    def total_tokens(self) -> int:
        """Input plus output tokens."""
        return self.input_tokens + self.output_tokens


def token_count(value: object) -> int | None:
    """A number of tokens as a server reports it; ``None`` where it is no such number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return int(value) if 0 <= value < math.inf else None


@dataclass(slots=True)
class Cost:
    """What one result has cost, held in common by all that may still bring it into a view: it may be found again on a
    shelf after it was dropped."""

    usage: Usage = Usage()
    #: it was spent on a result that was made here, not found in a store
    made: bool = False
    #: the result is in a view, or has been
    used: bool = False
    #: how many may bring it into a view
    holders: int = 1
    #: tokens of it that count as wasted
    wasted: int = 0

    def shared(self) -> Cost:
        """The same, for one more holder."""
        self.holders += 1
        return self

    def dropped(self) -> int:
        """A holder will not use it: tokens that are wasted by that."""
        self.holders -= 1
        if self.used or self.holders > 0:
            return 0
        before, self.wasted = self.wasted, self.usage.total_tokens
        return self.wasted - before

    def settled(self) -> int:
        """It is in use: tokens that had counted as wasted until now."""
        before, self.wasted, self.used = self.wasted, 0, True
        return before


@dataclass(slots=True)
class Counters:
    """Running totals of a runtime (promise 15). ``stale`` counts every discard by its reason. ``wasted_tokens`` falls
    where a result that was dropped is used after all."""

    started: int = 0
    committed: int = 0
    failed: int = 0
    fallbacks: int = 0
    salvaged: int = 0
    stale: dict[str, int] = field(default_factory=dict)
    wasted_tokens: int = 0
    usage: Usage = field(default_factory=Usage)
    preload_usage: Usage = field(default_factory=Usage)

    @property
    def stale_total(self) -> int:
        """All discarded lookaheads, whatever the reason."""
        return sum(self.stale.values())

    @property
    def cached_share(self) -> float | None:
        """Share of the transforms' prompts that the servers reported as cached (``usage.cached_share``)."""
        return self.usage.cached_share
