"""Commit rules: when a ready result becomes part of the view. Values only; the boundary carries them out.

Besides the two that are named by a word: ``"ready"`` (at the next boundary) and ``"hard_limit"`` (the raw context as
long as it fits).
"""

from __future__ import annotations

import math
import sys
from dataclasses import KW_ONLY, dataclass
from typing import Any

from .economics import Expected, Prices, Speed, expect
from .errors import ConfigurationError

COMMITS = ("ready", "hard_limit")


@dataclass(frozen=True, slots=True)
class KStepOff:
    """The summary lags ``k`` turns behind the agent, and no turn ever waits for it, not even at the hard limit.

    A turn is one model call of the agent. A lookahead starts when ``k`` turns lie behind what the last summary
    covers, besides the last ``k``, which always stay raw. It is committed at the first boundary that finds it ready
    and warm (where the session's engine is preloaded; after ``k`` more turns also cold), at most once in ``k`` turns.
    Until then, and after a failure, the last summary serves on. At the hard limit the policy's fallback is applied
    at once.

    Under this rule the policy's ``trigger``, ``land_at`` and ``min_savings`` and the transform's ``keep`` say nothing:
    ``k`` decides what is rewritten and when, and a result only has to be smaller than what it replaces. With
    ``ParallelSummarize`` blocks are prepared as they fill, and those that end before the last ``k`` turns go in
    together, at most once in ``k`` turns.

    Args:
        k: turns, at least 1.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ConfigurationError(f"KStepOff(k)={self.k!r}: expected a whole number of turns of at least 1")


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A ready result is committed only when it pays on the turns still expected, by ``economics.expect``.

    What does not pay yet waits; at the hard limit it goes in anyway. What can never pay any more, and is not going to
    be needed at the hard limit either, is dropped as ``unprofitable``. Nothing is started that would not pay, unless
    the hard limit is expected within those turns. What a summary costs counts before it is started, in money; in
    seconds it runs beside the agent.

    Args:
        rates: ``Speed`` to count in seconds, ``Prices`` to count in money. ``None``: what the session's engine has
            shown, once ``smoothctx.engines.calibrate`` has measured it; a result is committed when it is ready until
            then.
        turns: model calls that a session makes in all. ``None``: as many are expected as it has made so far.
        output_tokens: tokens that a call decodes; by default the mean of the latest replies.
        cached_share: share of an unchanged view that the server finds in its cache at a turn, 0 to 1.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    rates: Speed | Prices | None = None
    _: KW_ONLY
    turns: float | None = None
    output_tokens: float | None = None
    cached_share: float = 1.0

    def __post_init__(self) -> None:
        if self.rates is not None and not isinstance(self.rates, Speed | Prices):
            raise ConfigurationError(f"BreakEven(rates)={self.rates!r}: expected Speed(...), Prices(...) or None")
        for option in ("turns", "output_tokens"):
            if getattr(self, option) is not None:
                _number(option, getattr(self, option), math.inf)
        _number("cached_share", self.cached_share, 1.0)

    def turns_left(self, made: int) -> float:
        """Model calls still expected of a session that has made so many, the next one included."""
        return float(made) if self.turns is None else max(0.0, self.turns - made)

    def expected(
        self,
        rates: Speed | Prices,
        *,
        made: int,
        before_tokens: float,
        after_tokens: float,
        uncached_tokens: float,
        output_tokens: float,
        summary_input_tokens: float = 0.0,
        summary_output_tokens: float = 0.0,
    ) -> Expected:
        """What a commit is expected to bring and to cost after so many turns; see ``expect``."""
        after = max(0.0, after_tokens)
        return expect(
            rates,
            turns=self.turns_left(made),
            before_tokens=max(0.0, before_tokens),
            after_tokens=after,
            uncached_tokens=min(max(0.0, uncached_tokens), after),
            output_tokens=output_tokens if self.output_tokens is None else self.output_tokens,
            cached_share=self.cached_share,
            summary_input_tokens=summary_input_tokens,
            summary_output_tokens=summary_output_tokens,
        )

    def may_improve(self, expected: Expected) -> bool:
        """May it pay at a later turn, as long as the view only grows? Not where the turns left only get fewer, or
        where there is nothing to gain."""
        return self.turns is None and expected.gain > 0


Rule = str | KStepOff | BreakEven


def check_rule(rule: Any) -> None:
    """Is it a commit rule?

    Raises:
        ConfigurationError: naming the value and what is allowed.
    """
    if not isinstance(rule, KStepOff | BreakEven) and not (isinstance(rule, str) and rule in COMMITS):
        names = ", ".join(map(repr, COMMITS))
        raise ConfigurationError(f"commit={rule!r}: expected one of {names}, KStepOff(k) or BreakEven(...)")


def _number(option: str, value: Any, most: float) -> None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not right or not 0 <= value <= most:
        bound = "of at least 0" + (f" and at most {most:g}" if math.isfinite(most) else "")
        raise ConfigurationError(f"BreakEven({option})={value!r}: expected a number {bound}")
