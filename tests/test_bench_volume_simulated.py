"""``bench volume`` beside a simulation: what the measured rates of an engine let a parallel compaction gain."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from smoothctx.bench.volume_figures import summary, table
from smoothctx.bench.volume_simulated import Rates, measure_rates, simulate, with_simulation
from smoothctx.economics import Speed
from smoothctx.errors import ConfigurationError, EngineError, EngineOverloaded, EngineProtocolError
from smoothctx.testing import FakeEngine, run_virtual

#: of a small model on two cores: four at once decode at five sixths of the rate of one
RATES = Rates(prefill=900.0, decode_alone=18.6, decode_beside=15.6, workers=4)
CASE = {"blocks": 4, "block_tokens": 800, "tokens_each": 400}


def test_an_engine_that_batches_gains() -> None:
    """Four blocks of 400 tokens: the last one's prompt is there after four prefills, and then it decodes."""
    found = simulate(RATES, **CASE)
    assert found.sequential_s == pytest.approx(1600 / 18.6, rel=0.05)
    assert found.parallel_s == pytest.approx(4 * 1000 / 900 + 400 / 15.6, rel=0.1)
    assert found.gain > 1.3


def test_an_engine_that_cannot_batch_loses() -> None:
    """Four at once share the rate of one: every block's prompt comes on top, and nothing is gained."""
    serial = Rates(prefill=900.0, decode_alone=18.6, decode_beside=18.6 / 4, workers=4)
    assert 0.9 < simulate(serial, **CASE).gain < 1.0


def test_a_faster_batch_gains_more() -> None:
    """The gain grows with the rate beside others, up to the number of workers."""
    gains = [
        simulate(Rates(prefill=9e6, decode_alone=20.0, decode_beside=beside, workers=4), **CASE).gain
        for beside in (5.0, 10.0, 20.0)
    ]
    assert gains == [pytest.approx(1.0, rel=0.02), pytest.approx(2.0, rel=0.02), pytest.approx(4.0, rel=0.02)]


def test_more_blocks_than_workers_take_turns() -> None:
    """Eight blocks with four workers take twice as long as four."""
    rates = Rates(prefill=9e6, decode_alone=20.0, decode_beside=10.0, workers=4)
    four, eight = (simulate(rates, blocks=n, block_tokens=800, tokens_each=200).parallel_s for n in (4, 8))
    assert eight == pytest.approx(2 * four, rel=0.02)


def test_the_rates_of_an_engine_are_measured() -> None:
    """On a fake engine whose calls do not slow each other, the rates are its own."""

    async def run() -> Rates:
        engine = FakeEngine(*["count " * 60] * 40, speed=Speed(1000.0, 20.0))
        return await measure_rates(engine, workers=4, clock=asyncio.get_running_loop().time)

    rates = run_virtual(run)
    assert rates.prefill == pytest.approx(1000.0, rel=0.02) and rates.decode_alone == pytest.approx(20.0, rel=0.02)
    assert rates.decode_beside == pytest.approx(20.0, rel=0.1), "prefills are part of it" and rates.workers == 4


async def test_an_engine_that_counts_no_prompt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its usage says 0 for every prompt: no rate can come of it."""
    engine = FakeEngine("count " * 60, speed=Speed(float("inf"), float("inf")))
    real = engine._completion

    def counts_nothing(*arguments: Any) -> Any:
        done = real(*arguments)
        return replace(done, usage=replace(done.usage, input_tokens=0, cached_tokens=0))

    monkeypatch.setattr(engine, "_completion", counts_nothing)
    with pytest.raises(EngineProtocolError, match="prompt_tokens: 0"):
        await measure_rates(engine, workers=2)


def cell(kind: str, tokens: int, wall_s: float) -> dict[str, Any]:
    """One measured cell of ``bench volume``."""
    return {
        "kind": kind, "block_tokens": 800, "detail": "concise", "run": 0, "blocks": 4 if kind == "parallel" else 1,
        "output_tokens": tokens, "wall_s": wall_s, "tokens_per_s": tokens / wall_s, "texts": ["a"], "calls": 4,
        "ended_by_cap": 0, "error": None,
    }  # fmt: skip


def test_it_is_printed_beside_the_measured_gain() -> None:
    """A column of its own, and the rates; without rates the table is as it was."""
    cells = {"a": cell("parallel", 1600, 29.4), "b": cell("sequential", 1600, 87.4)}
    figures = summary(cells, [800], ["concise"])
    assert "simulated" not in table(figures)
    both = with_simulation(figures, RATES)
    row = both["rows"][0]
    assert row["speedup"] == pytest.approx(2.97, abs=0.01)
    assert row["simulated_gain"] == pytest.approx(simulate(RATES, **CASE).gain)
    shown = table(both).splitlines()
    assert shown[0].endswith("gain  simulated") and shown[1].split()[-2:] == ["2.97", f"{row['simulated_gain']:.2f}"]
    assert "each of 4 beside 15.6" in shown[-1] and both["rates"]["prefill"] == 900.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"prefill": 0}, "prefill_tokens_per_s=0"), ({"decode_beside": -1}, "=-1"), ({"workers": 0}, "workers=0")],
)
def test_wrong_rates_are_named(changes: dict[str, float], said: str) -> None:
    """The option and its value."""
    good = {"prefill": 1.0, "decode_alone": 1.0, "decode_beside": 1.0, "workers": 1}
    with pytest.raises(ConfigurationError, match=said):
        Rates(**{**good, **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="blocks=0"):
        simulate(RATES, blocks=0, block_tokens=800, tokens_each=10)


def counting(**options: Any) -> FakeEngine:
    """An engine that answers at length."""
    return FakeEngine(*["count " * 60] * 40, speed=Speed(1000.0, 20.0), **options)


@pytest.mark.parametrize("when", ["alone", "beside"])
def test_rates_that_do_not_come_in_time_are_an_error_of_the_engine(when: str) -> None:
    """The limit holds for the calls alone and for those side by side."""

    async def run() -> None:
        hanging = counting()
        real = hanging.complete

        async def complete(messages: Any, **options: Any) -> Any:
            beside = "count upwards in words, without an end" in messages[0]["content"]
            if beside is (when == "beside"):
                await asyncio.Event().wait()
            return await real(messages, **options)

        hanging.complete = complete  # type: ignore[method-assign]
        await measure_rates(hanging, workers=2, clock=asyncio.get_running_loop().time)

    with pytest.raises(EngineError, match="could not be measured within 120 s"):
        run_virtual(run)


def test_an_engine_that_fails_beside_others_says_why() -> None:
    """Its own error comes, and the other calls are called off."""

    async def run() -> None:
        failing = counting()
        real, seen = failing.complete, [0]

        async def complete(messages: Any, **options: Any) -> Any:
            if "count upwards in words, without an end" not in messages[0]["content"]:
                return await real(messages, **options)
            seen[0] += 1
            if seen[0] == 2:
                raise EngineOverloaded("boom", status=500)
            await asyncio.Event().wait()

        failing.complete = complete  # type: ignore[method-assign]
        await measure_rates(failing, workers=3, clock=asyncio.get_running_loop().time)

    with pytest.raises(EngineOverloaded, match="boom"):
        run_virtual(run)


@pytest.mark.parametrize("block_tokens", [96, 100, 128])
def test_the_smallest_blocks_are_simulated(block_tokens: int) -> None:
    """Every size that can be measured; a summary that would not be smaller is as long as one can be."""
    found = simulate(RATES, blocks=3, block_tokens=block_tokens, tokens_each=block_tokens)
    assert found.sequential_s == pytest.approx(3 * (block_tokens - 64) / RATES.decode_alone, rel=0.3)
