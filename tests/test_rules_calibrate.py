"""Calibrate: the rates of an engine, exact on one whose rates are known."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from helpers import virtual
from smoothctx import ConfigurationError, EngineProtocolError, EngineUnreachable, Speed
from smoothctx.engines import Calibration, EmbeddedEngine, calibrate, find_weights
from smoothctx.testing import FakeEngine
from smoothctx.verdict import speed_of
from virtual import run_virtual

LONG = "w" * 4000


def engine(speed: Speed, **options: Any) -> FakeEngine:
    """One that answers at length."""
    return FakeEngine(*[LONG] * 50, speed=speed, **options)


@pytest.mark.parametrize(
    "speed", [Speed(1000.0, 50.0), Speed(4000.0, 80.0, 2e-6), Speed(120.0, 5.0, 1e-4), Speed(90_000.0, 300.0, 1e-7)]
)
@virtual
async def test_known_rates_are_found(speed: Speed) -> None:
    """Prefill, decode and attention, to rounding; the raw calls are there, none of them cached."""
    fake = engine(speed)
    found = await calibrate(fake, prompt_tokens=(100, 800), output_tokens=20, rounds=3)
    assert isinstance(found, Calibration) and isinstance(found, Speed)
    assert found.prefill_tokens_per_s == pytest.approx(speed.prefill_tokens_per_s, rel=1e-6)
    assert found.decode_tokens_per_s == pytest.approx(speed.decode_tokens_per_s, rel=1e-6)
    assert found.attention_s == pytest.approx(speed.attention_s, rel=1e-4, abs=1e-12)
    assert found.overhead_s == pytest.approx(0, abs=1e-9)
    assert len(found.samples) == 6 and {s.cached_tokens for s in found.samples} == {0}
    assert {s.output_tokens for s in found.samples} == {20}
    # What it cost is bounded: about the tokens that were asked for.
    assert len(fake.calls) == 7
    assert sum(c.input_tokens for c in fake.calls) < 1.5 * 3 * 900 + 100


@virtual
async def test_the_engine_remembers() -> None:
    """``engine.rates`` is complete from then on, which ``BreakEven()`` asks; what its calls alone show is not."""
    fake = engine(Speed(2000.0, 40.0, 1e-6))
    assert speed_of(fake.rates) is None
    await fake.complete([{"role": "user", "content": LONG}], max_tokens=50)
    assert fake.rates.prefill and fake.rates.decode and speed_of(fake.rates) is None
    found = await calibrate(fake)
    assert speed_of(fake.rates) == Speed(found.prefill_tokens_per_s, found.decode_tokens_per_s, found.attention_s)


@virtual
async def test_a_constant_delay_is_told_apart() -> None:
    """Seconds that every call takes are no part of the rate."""
    fake = engine(Speed(1000.0, 50.0))
    whole = fake.complete

    async def delayed(messages: Any, **options: Any) -> Any:
        done = await whole(messages, **options)
        object.__setattr__(done, "ttft_s", (done.ttft_s or 0) + 0.25)
        object.__setattr__(done, "total_s", done.total_s + 0.25)
        return done

    fake.complete = delayed  # type: ignore[method-assign]
    found = await calibrate(fake)
    assert found.prefill_tokens_per_s == pytest.approx(1000.0)
    assert found.decode_tokens_per_s == pytest.approx(50.0)
    assert found.overhead_s == pytest.approx(0.25)


def test_an_engine_that_shows_nothing_is_refused() -> None:
    """Short answers, an engine without delay, one that is not there: an error that says what was missing."""

    async def ask(fake: FakeEngine) -> None:
        await calibrate(fake, timeout_s=60)

    with pytest.raises(EngineProtocolError, match="2 tokens came, expected more than 8"):
        run_virtual(lambda: ask(FakeEngine(*["ok"] * 9)))
    with pytest.raises(EngineProtocolError, match="no prefill rate"):
        run_virtual(lambda: ask(engine(Speed(float("inf"), 50.0))))
    with pytest.raises(EngineProtocolError, match="took no time"):
        run_virtual(lambda: ask(engine(Speed(1000.0, float("inf")))))
    with pytest.raises(TimeoutError):
        run_virtual(lambda: ask(engine(Speed(1.0, 1.0))))
    down = engine(Speed(1000.0, 50.0))
    down.faults.fail(1)
    with pytest.raises(EngineUnreachable):
        run_virtual(lambda: ask(down))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": (100,)},
        {"prompt_tokens": (100, 150)},
        {"prompt_tokens": 100},
        {"prompt_tokens": (4, 100)},
        {"output_tokens": 8},
        {"rounds": 0},
        {"rounds": True},
        {"timeout_s": 0},
        {"timeout_s": "x"},
        {"timeout_s": float("nan")},
    ],
)
@virtual
async def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    """By name and value, before anything is asked."""
    fake = engine(Speed(1000.0, 50.0))
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        await calibrate(fake, **wrong)
    assert not fake.calls


@pytest.mark.engine
@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the extra 'local'")
async def test_the_embedded_engine_is_measured() -> None:
    """Real weights: nothing of the prompts was cached, and the rates are those that its calls show."""
    async with EmbeddedEngine(find_weights(), context_window=2048, slots=1, start_timeout_s=300.0) as real:
        found = await calibrate(real, prompt_tokens=(64, 512), output_tokens=16, timeout_s=300.0, ignore_eos=True)
        assert found.prefill_tokens_per_s > 0 and found.decode_tokens_per_s > 0 and found.attention_s >= 0
        assert len(found.samples) == 4 and all(s.output_tokens == 16 for s in found.samples)
        assert all((s.cached_tokens or 0) < 0.5 * s.input_tokens for s in found.samples)
        assert real.rates.prefill == found.prefill_tokens_per_s
