"""What background work cost: token usage as the model reported it, and the running totals of a runtime."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one or several model calls.

    ``cached_tokens`` is ``None`` where the server did not report it: a cache hit is never guessed.
    ``estimated`` is true where at least one call reported no usage and its tokens were estimated.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    calls: int = 0
    estimated: bool = False

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
        )

    @property
    def total_tokens(self) -> int:
        """Input plus output tokens."""
        return self.input_tokens + self.output_tokens


@dataclass(slots=True)
class Counters:
    """Running totals of a runtime (promise 15). ``stale`` counts every discard by its reason."""

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
