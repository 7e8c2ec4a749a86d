"""Calibrate: measure what an engine can do, with a few unique prompts, for ``BreakEven`` and the like."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from ..economics import Speed, check_number
from ..errors import ConfigurationError, EngineProtocolError
from .completion import Completion

#: tokens that a call has to decode, besides the first, for its rate to count
MIN_DECODED = 8
_LINE = "Item {number:04d} of list {salt}: the value is {value:06d}."
_TASK = "Count upwards from one, in words, one number a line. Do not stop."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call: ``input_tokens`` of which ``cached_tokens`` were found in the cache (``None``: not reported), seconds
    to the first token and to the end, and the tokens decoded."""

    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    ttft_s: float
    total_s: float

    @property
    def context(self) -> float:
        """Mean tokens that a decoded token had before it."""
        return self.input_tokens + self.output_tokens / 2

    @property
    def token_s(self) -> float:
        """Mean seconds for a decoded token after the first."""
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Calibration(Speed):
    """The ``Speed`` that was measured, with the calls that it comes from and the constant seconds of each."""

    overhead_s: float = 0.0
    samples: tuple[Sample, ...] = ()


class Calibrated(Protocol):
    """An engine that can be measured: every completion says when its first token came, and its usage."""

    async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Completion:
        """Ask the model."""
        ...


async def calibrate(
    engine: Calibrated,
    *,
    prompt_tokens: Sequence[int] = (256, 1024),
    output_tokens: int = 32,
    rounds: int = 2,
    timeout_s: float = 120.0,
    **options: Any,
) -> Calibration:
    """Measure the prefill rate, the decode rate, and what context costs a decoded token.

    Each round asks once at each of two prompt sizes, with prompts that nobody has asked before. The difference between
    the sizes gives the rates, so constant costs (network, template) fall out. The call of each size with the least
    seconds to the first token counts for prefill, the one with the least seconds a token for decode. It costs
    ``rounds * sum(prompt_tokens)`` tokens of input, about, one short call before, and ``output_tokens`` for each.
    Nothing else should run on the engine meanwhile.

    The engine remembers it (``engine.rates``, where it has one): ``BreakEven()`` without rates uses that.

    Args:
        prompt_tokens: about how many tokens the short and the long prompt have.
        output_tokens: decoded at each call.
        rounds: how often, at least 1.
        timeout_s: for all of it.
        options: go with every call, such as ``ignore_eos=True`` where the engine understands it.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
        EngineError: a call failed, or did not show what is to be measured.
        TimeoutError: ``timeout_s`` seconds have passed.
    """
    short, long = _sizes(prompt_tokens)
    for option, value, least in (("output_tokens", output_tokens, MIN_DECODED + 1), ("rounds", rounds, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{option}={value!r}: expected a whole number of at least {least}")
    check_number("timeout_s", timeout_s, above=True, infinite=True)
    found: dict[int, list[Sample]] = {short: [], long: []}
    with anyio.fail_after(timeout_s):
        await engine.complete(_prompt(16), max_tokens=2, **options)  # what is loaded lazily is there now
        for _ in range(rounds):
            for size, samples in found.items():
                done = await engine.complete(_prompt(size), max_tokens=output_tokens, **options)
                samples.append(_sample(done))
    speed = _solve(found[short], found[long])
    if (rates := getattr(engine, "rates", None)) is not None:
        rates.prefill, rates.decode = speed.prefill_tokens_per_s, speed.decode_tokens_per_s
        rates.attention_s = speed.attention_s
    return speed


def _solve(short: Sequence[Sample], long: Sequence[Sample]) -> Calibration:
    first, second = (min(s, key=lambda x: x.ttft_s) for s in (short, long))
    new = [s.input_tokens - (s.cached_tokens or 0) for s in (first, second)]
    seconds = second.ttft_s - first.ttft_s
    if new[1] <= new[0] or seconds <= 0:
        raise EngineProtocolError(
            f"calibrate: {new[1]} new tokens took {second.ttft_s:.4f} s and {new[0]} took {first.ttft_s:.4f} s: "
            "no prefill rate can be told from that; try larger prompt_tokens, on an engine that rests"
        )
    prefill = (new[1] - new[0]) / seconds
    near, far = (min(s, key=lambda x: x.token_s) for s in (short, long))
    attention = max(0.0, (far.token_s - near.token_s) / (far.context - near.context))
    token_s = near.token_s - near.context * attention
    if token_s <= 0:  # noise: all of it cannot be the context
        attention, token_s = 0.0, near.token_s
    if token_s <= 0:
        raise EngineProtocolError("calibrate: decoding took no time: the engine does not stream its answer")
    return Calibration(
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=1 / token_s,
        attention_s=attention,
        overhead_s=max(0.0, first.ttft_s - new[0] / prefill),
        samples=(*short, *long),
    )


def _sample(done: Completion) -> Sample:
    usage = done.usage
    if done.ttft_s is None or usage.estimated or usage.output_tokens <= MIN_DECODED or not usage.input_tokens:
        why = f"{usage.output_tokens} tokens came, expected more than {MIN_DECODED}"
        if not usage.input_tokens:
            why = "the engine's usage says prompt_tokens: 0"
        if done.ttft_s is None or usage.estimated:
            why = "the engine reports no usage, or no first token"
        raise EngineProtocolError(f"calibrate: {why}")
    return Sample(
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        ttft_s=done.ttft_s,
        total_s=done.total_s,
    )


def _prompt(tokens: int) -> list[dict[str, str]]:
    """About so many tokens that no cache holds: the salt stands at their beginning."""
    salt = secrets.token_hex(6)
    lines = [f"List {salt}."]
    while sum(map(len, lines)) < tokens * 3:  # such lines have about three characters a token
        lines.append(_LINE.format(number=len(lines), salt=salt, value=secrets.randbelow(1_000_000)))
    return [{"role": "user", "content": "\n".join([*lines, _TASK])}]


def _sizes(prompt_tokens: Sequence[int]) -> tuple[int, int]:
    sizes = list(prompt_tokens) if isinstance(prompt_tokens, list | tuple) else []
    whole = len(sizes) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
    if not whole or not 16 <= sizes[0] or not 2 * sizes[0] <= sizes[1]:
        raise ConfigurationError(
            f"prompt_tokens={prompt_tokens!r}: expected two whole numbers, the first at least 16 and the second at "
            "least twice that"
        )
    return sizes[0], sizes[1]
