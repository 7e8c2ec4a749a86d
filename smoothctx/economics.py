"""Economics: does a commit pay? Pure arithmetic over rates or prices that the caller measured or looked up.

A rewritten view is shorter, so every later turn costs less; but the engine has not cached it yet, and the summary
itself costs a model call. :func:`expect` puts both sides in one unit, seconds or money. :func:`latency_bound` is
the published inequality that remains of it under fixed assumptions.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigurationError

#: what a price is for
PER_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Speed:
    """What an engine can do.

    ``prefill_tokens_per_s`` and ``decode_tokens_per_s`` are for one request, at an empty context; infinite means
    that it takes no time. ``attention_s`` is what one token of context adds to one decoded token, in seconds (the
    reading of its KV cache; what a shorter context saves while the prefix cache holds).

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    attention_s: float = 0.0

    def __post_init__(self) -> None:
        check_number("prefill_tokens_per_s", self.prefill_tokens_per_s, above=True, infinite=True)
        check_number("decode_tokens_per_s", self.decode_tokens_per_s, above=True, infinite=True)
        check_number("attention_s", self.attention_s)


@dataclass(frozen=True, slots=True)
class Prices:
    """What a hosted API takes for a million tokens, in any one currency: new input, cached input, output.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    input: float
    cached_input: float
    output: float

    def __post_init__(self) -> None:
        for name in ("input", "cached_input", "output"):
            check_number(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBound:
    """The verdict of :func:`latency_bound`. ``ratio`` is L_sum/L_full; it has to lie below ``bound``."""

    ratio: float
    bound: float

    @property
    def holds(self) -> bool:
        """Does the shorter context save more time than its uncached prefill costs?"""
        return self.ratio < self.bound

    @property
    def margin(self) -> float:
        """``bound - ratio``: positive where it holds."""
        return self.bound - self.ratio


def latency_bound(
    *,
    summary_tokens: float,
    full_tokens: float,
    decoded_tokens: float,
    prefill_flops_per_token: float,
    kv_bytes_per_token: float,
    flops_per_byte: float,
) -> LatencyBound:
    """CoMem's bound (arXiv:2605.30842, Eq. 7): ``L_sum/L_full < 1 / (1 + W/(Y*S'*P))``.

    The window of decoding that follows one uncached prefill of the shorter context has to save more memory traffic
    than the prefill costs arithmetic. Assumed: the summary is written in hidden time, attention is small in prefill,
    weights are read once for a large batch, nobody queues. The symbols' meaning below is the one under which the
    inequality follows from those assumptions.

    Args:
        summary_tokens: L_sum, tokens of the context after the commit.
        full_tokens: L_full, tokens of the context that it replaces.
        decoded_tokens: Y, tokens decoded for each uncached prefill: turns between commits times tokens a turn.
        prefill_flops_per_token: W, floating-point operations for one prefilled token (about twice the active
            parameters).
        kv_bytes_per_token: S', bytes of KV cache of one token.
        flops_per_byte: P, the accelerator's operations per second over its memory bytes per second.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    summary = check_number("summary_tokens", summary_tokens)
    full = check_number("full_tokens", full_tokens, above=True)
    decoded = check_number("decoded_tokens", decoded_tokens)
    work = check_number("prefill_flops_per_token", prefill_flops_per_token, above=True)
    kv = check_number("kv_bytes_per_token", kv_bytes_per_token, above=True)
    intensity = check_number("flops_per_byte", flops_per_byte, above=True)
    saved = decoded * kv * intensity
    return LatencyBound(ratio=summary / full, bound=1 / (1 + work / saved) if saved > 0 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a commit is expected to bring and to cost, both in ``unit``: seconds, or the currency of the prices."""

    gain: float
    cost: float
    unit: Literal["s", "money"]

    @property
    def net(self) -> float:
        """``gain - cost``."""
        return self.gain - self.cost

    @property
    def pays(self) -> bool:
        """Does it bring more than it costs?"""
        return self.gain > self.cost


def expect(
    rates: Speed | Prices,
    *,
    turns: float,
    before_tokens: float,
    after_tokens: float,
    uncached_tokens: float | None = None,
    output_tokens: float = 0.0,
    cached_share: float = 1.0,
    summary_input_tokens: float = 0.0,
    summary_cached_tokens: float = 0.0,
    summary_output_tokens: float = 0.0,
    hidden: float = 0.0,
) -> Expected:
    """What a commit saves over the turns still expected, against what it costs.

    *Gain*, for each turn: the tokens that the view is shorter by, each at what a held token costs a turn. In money:
    the cached price for the share found in the cache, the full one for the rest. In seconds: prefill of the share
    that is not found, and ``attention_s`` for each decoded token.

    *Cost*: the tokens of the new view that lose their place in the cache once (they are prefilled, or billed at the
    full price, where the share ``cached_share`` of them would have been found), and the summary's own call.

    What grows behind the view is the same with and without the commit, and falls out. Pass no summary tokens when
    the summary has been paid for already and only the commit is to be decided.

    Args:
        rates: :class:`Speed` for an answer in seconds, :class:`Prices` for one in money.
        turns: model calls still expected with the new view, the next one included.
        before_tokens: tokens of the view as it is.
        after_tokens: tokens of the view after the commit.
        uncached_tokens: tokens of the new view from its first change on; by default all of it.
        output_tokens: tokens decoded in one turn.
        cached_share: share of an unchanged view that the server finds in its cache at a turn, 0 to 1.
        summary_input_tokens: prompt of the summary's call.
        summary_cached_tokens: how much of that prompt is found in the cache.
        summary_output_tokens: length of the summary.
        hidden: share of the summary's and the re-prefill's seconds that pass while the agent would rest anyway,
            0 to 1. Money is paid in any case.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    if not isinstance(rates, Speed | Prices):
        raise ConfigurationError(f"rates={rates!r}: expected Speed(...) for seconds or Prices(...) for money")
    turns = check_number("turns", turns)
    before = check_number("before_tokens", before_tokens)
    after = check_number("after_tokens", after_tokens)
    uncached = after if uncached_tokens is None else check_number("uncached_tokens", uncached_tokens, most=after)
    output = check_number("output_tokens", output_tokens)
    share = check_number("cached_share", cached_share, most=1.0)
    asked = check_number("summary_input_tokens", summary_input_tokens)
    known = check_number("summary_cached_tokens", summary_cached_tokens, most=asked)
    written = check_number("summary_output_tokens", summary_output_tokens)
    hidden = check_number("hidden", hidden, most=1.0)
    if isinstance(rates, Speed):
        prefill, decode = 1 / rates.prefill_tokens_per_s, 1 / rates.decode_tokens_per_s
        held = (1 - share) * prefill + output * rates.attention_s
        summary = (asked - known) * prefill + written * (decode + asked * rates.attention_s)
        cost = (1 - hidden) * (uncached * share * prefill + summary)
        return Expected(gain=turns * (before - after) * held, cost=cost, unit="s")
    held = ((1 - share) * rates.input + share * rates.cached_input) / PER_TOKENS
    lost = uncached * share * (rates.input - rates.cached_input)
    summary = (asked - known) * rates.input + known * rates.cached_input + written * rates.output
    return Expected(gain=turns * (before - after) * held, cost=(lost + summary) / PER_TOKENS, unit="money")


def check_number(
    option: str, value: float, *, above: bool = False, most: float | None = None, infinite: bool = False
) -> float:
    """``value`` as a float of at least 0: above 0 with ``above``, at most ``most``, infinite with ``infinite`` alone.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    low = "above 0" if above else "of at least 0"
    allowed = f"a {'' if infinite else 'finite '}number {low}" + (f" and at most {most:g}" if most is not None else "")
    right = isinstance(value, int | float) and not isinstance(value, bool)
    # a whole number may be too large for a float
    right = right and (0 <= value <= sys.float_info.max or (infinite and value == math.inf))
    right = right and (value > 0 or not above)
    if not right or (most is not None and value > most):
        raise ConfigurationError(f"{option}={value!r}: expected {allowed}")
    return float(value)
