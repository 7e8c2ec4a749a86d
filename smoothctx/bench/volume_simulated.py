"""What a parallel compaction takes on an engine of known rates, in virtual time: the account beside the measurement.

Three rates of an engine are measured: prefill, one call's decode alone, and each call's decode beside others. The same
transforms then run on a fake engine of these rates, which prefills one prompt after another, with the agent's prefix
cached. Where an engine cannot batch, this says how much of the gain that costs, and what it would be otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import anyio

from ..codec import OpenAIMessages
from ..economics import Speed
from ..engines.calibration import calibrate
from ..errors import ConfigurationError, EngineError, EngineProtocolError, SmoothctxError
from ..testing import FakeEngine, run_virtual
from ..testing.engine import TOKEN_CHARS
from ..transforms.base import Transform, TransformRequest
from ..transforms.parallel import ParallelSummarize
from ..transforms.parallel_block import FRAME, MIN_SUMMARY
from ..transforms.summarize import Summarize

CODEC = OpenAIMessages()
#: a summary has to be smaller than its block by its frame, and by a little more
LEAST_SAVED = FRAME + 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured of an engine, in tokens a second: prefill of one prompt, decode of a call that is alone, and
    decode of each of ``workers`` calls at once.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    prefill: float
    decode_alone: float
    decode_beside: float
    workers: int

    def __post_init__(self) -> None:
        Speed(self.prefill, self.decode_alone)
        Speed(self.prefill, self.decode_beside)
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise ConfigurationError(f"workers={self.workers!r}: expected a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds of a parallel compaction, and of one sequential summary of as many tokens."""

    parallel_s: float
    sequential_s: float

    @property
    def gain(self) -> float:
        """How many times faster the parallel one is."""
        return self.sequential_s / self.parallel_s


async def measure_rates(
    engine: Any,
    *,
    workers: int,
    output_tokens: int = 48,
    timeout_s: float = 120.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure the three rates; nothing else should run on the engine meanwhile.

    Raises:
        EngineError: a call failed, did not show what is to be measured, or the calls alone or side by side took more
            than ``timeout_s`` seconds.
    """
    try:
        speed = await calibrate(engine, output_tokens=output_tokens, timeout_s=timeout_s, ignore_eos=True)
        with anyio.fail_after(timeout_s):
            beside = await _beside(engine, workers, output_tokens, clock)
    except TimeoutError as late:
        raise EngineError(f"the engine's rates could not be measured within {timeout_s:g} s") from late
    return Rates(
        prefill=speed.prefill_tokens_per_s,
        decode_alone=speed.decode_tokens_per_s,
        decode_beside=beside,
        workers=workers,
    )


async def _beside(engine: Any, workers: int, output_tokens: int, clock: Callable[[], float]) -> float:
    """Tokens a second of each of so many calls at once."""
    decoded: list[int] = []
    failed: list[SmoothctxError] = []

    async def ask(k: int) -> None:
        asked = [{"role": "user", "content": f"{k}: count upwards in words, without an end."}]
        try:
            done = await engine.complete(asked, max_tokens=output_tokens, ignore_eos=True)
        except SmoothctxError as error:  # raised below: out of the group it would come wrapped
            failed.append(error)
            group.cancel_scope.cancel()
        else:
            decoded.append(done.usage.output_tokens)

    started = clock()
    async with anyio.create_task_group() as group:
        for k in range(workers):
            group.start_soon(ask, k)
    took = clock() - started
    if failed:
        raise failed[0]
    if not sum(decoded) or took <= 0:
        raise EngineProtocolError(f"{workers} calls at once: {sum(decoded)} tokens came in {took:.4f} s")
    return sum(decoded) / workers / took


@lru_cache(maxsize=256)
def simulate(rates: Rates, *, blocks: int, block_tokens: int, tokens_each: int) -> Simulated:
    """A compaction of so many blocks to so many tokens each. Not on a running event loop: it has one of its own.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    for option, value, least in (
        ("blocks", blocks, 1),
        ("block_tokens", block_tokens, 2 * MIN_SUMMARY),
        ("tokens_each", tokens_each, 1),
    ):
        if value < least:
            raise ConfigurationError(f"{option}={value!r}: expected at least {least}")
    each = min(tokens_each, block_tokens - LEAST_SAVED)
    beside = rates.decode_beside if min(blocks, rates.workers) > 1 else rates.decode_alone
    parallel = run_virtual(
        lambda: _seconds(
            lambda engine: ParallelSummarize(
                engine,
                block_tokens=block_tokens,
                workers=rates.workers,
                max_tokens=each,
                facts=False,
                fixed_tokens=True,
            ),
            Speed(rates.prefill, beside),
            blocks,
            block_tokens,
            [each] * blocks,
        )
    )
    sequential = run_virtual(
        lambda: _seconds(
            lambda engine: Summarize(engine, max_tokens=each * blocks, facts=False, fixed_tokens=True),
            Speed(rates.prefill, rates.decode_alone),
            blocks,
            block_tokens,
            [each * blocks],
        )
    )
    return Simulated(parallel_s=parallel, sequential_s=sequential)


async def _seconds(
    transform: Callable[[Any], Transform], speed: Speed, blocks: int, block_tokens: int, answers: list[int]
) -> float:
    engine = FakeEngine(*[_text(tokens, k) for k, tokens in enumerate(answers)], speed=speed)
    messages = [{"role": "user", "content": _text(block_tokens, k)} for k in range(blocks)]
    system = {"role": "system", "content": "You are an agent."}
    await engine.prefill([system, *messages])  # as the agent left it
    clock = asyncio.get_running_loop().time
    started = clock()
    await transform(engine).apply(TransformRequest(messages=messages, before=[system], codec=CODEC))
    return clock() - started


def _text(tokens: int, number: int) -> str:
    return (f"w{number:02d} " * tokens)[: tokens * TOKEN_CHARS]


def with_simulation(figures: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """The figures of ``bench volume`` with what the simulation says beside each row. Not on a running event loop."""
    rows = []
    for row in figures["rows"]:
        blocks = round(row["blocks"] or 0)
        if not blocks or not row["output_tokens"]:
            rows.append({**row, "simulated_gain": None, "simulated_wall_s": None})
            continue
        each = max(1, round(row["output_tokens"] / blocks))
        found = simulate(rates, blocks=blocks, block_tokens=row["block_tokens"], tokens_each=each)
        rows.append({**row, "simulated_gain": found.gain, "simulated_wall_s": found.parallel_s})
    return {**figures, "rows": rows, "rates": asdict(rates)}
