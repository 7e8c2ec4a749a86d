"""Economics: the published bound, and gain against cost in seconds and money, checked against turn by turn counting."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from smoothctx import ConfigurationError, Usage
from smoothctx.economics import Expected, Prices, Speed, expect, latency_bound
from smoothctx.testing import FakeEngine, run_virtual

BOUND = {
    "summary_tokens": 2_000.0,
    "full_tokens": 10_000.0,
    "decoded_tokens": 246.0,
    "prefill_flops_per_token": 64e9,
    "kv_bytes_per_token": 377e3,
    "flops_per_byte": 206.0,
}
POSITIVE = st.floats(1e-3, 1e9)
TOKENS = st.floats(0, 1e6)
UNIT = st.floats(0, 1)


def bound(**changes: float) -> Any:
    """The bound with some arguments changed."""
    return latency_bound(**{**BOUND, **changes})


# -- the bound -------------------------------------------------------------------------------------------------------


def test_bound_of_known_settings() -> None:
    """A 32B model on an accelerator with 206 operations a byte: about 23%, and 54% with four times the window."""
    verdict = bound()
    assert verdict.bound == pytest.approx(0.23, abs=0.002)
    assert (verdict.ratio, verdict.holds) == (0.2, True)
    assert verdict.margin == verdict.bound - 0.2
    assert not bound(summary_tokens=2_400).holds
    assert bound(decoded_tokens=4 * 246).bound == pytest.approx(0.54, abs=0.01)
    assert bound(decoded_tokens=0).bound == 0 and not bound(decoded_tokens=0, summary_tokens=0).holds


@given(
    st.sampled_from(["decoded_tokens", "kv_bytes_per_token", "flops_per_byte", "full_tokens"]),
    st.lists(POSITIVE, min_size=2, max_size=2).map(sorted),
)
def test_bound_loosens(name: str, values: list[float]) -> None:
    """A longer window, heavier KV, a more arithmetic machine or a longer context never make it worse."""
    assert bound(**{name: values[0]}).margin <= bound(**{name: values[1]}).margin


@given(
    st.sampled_from(["summary_tokens", "prefill_flops_per_token"]),
    st.lists(POSITIVE, min_size=2, max_size=2).map(sorted),
)
def test_bound_tightens(name: str, values: list[float]) -> None:
    """A longer summary or a dearer prefill never make it better."""
    assert bound(**{name: values[0]}).margin >= bound(**{name: values[1]}).margin


@given(POSITIVE, POSITIVE)
def test_bound_knows_no_units(lengths: float, work: float) -> None:
    """It is a ratio on both sides: lengths may be in any unit, and so may operations."""
    scaled = bound(
        summary_tokens=2_000 * lengths,
        full_tokens=10_000 * lengths,
        prefill_flops_per_token=64e9 * work,
        flops_per_byte=206 * work,
    )
    assert scaled.ratio == pytest.approx(bound().ratio) and scaled.bound == pytest.approx(bound().bound)


@given(st.floats(0.01, 1e5), st.floats(1, 1e5), st.floats(1, 1e4), st.floats(1e8, 1e12), st.floats(1e3, 1e7), POSITIVE)
def test_bound_is_a_case_of_expect(
    summary: float, full: float, decoded: float, work: float, kv: float, bandwidth: float
) -> None:
    """A hidden summary, a whole new view to prefill, a cache that holds afterwards: both give one verdict."""
    intensity = 200.0
    verdict = latency_bound(
        summary_tokens=summary,
        full_tokens=full,
        decoded_tokens=decoded,
        prefill_flops_per_token=work,
        kv_bytes_per_token=kv,
        flops_per_byte=intensity,
    )
    assume(abs(verdict.margin) > 1e-9 * max(1.0, verdict.ratio))
    speed = Speed(bandwidth * intensity / work, math.inf, attention_s=kv / bandwidth)
    expected = expect(speed, turns=4, before_tokens=full, after_tokens=summary, output_tokens=decoded / 4)
    assert expected.pays == verdict.holds


@pytest.mark.parametrize("name", sorted(BOUND))
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 10**400, True, "5", None])
def test_bound_refuses_what_is_no_number(name: str, value: Any) -> None:
    """The option and its value are named."""
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}: expected a finite number"):
        bound(**{name: value})


@pytest.mark.parametrize("name", ["full_tokens", "prefill_flops_per_token", "kv_bytes_per_token", "flops_per_byte"])
def test_bound_refuses_zero_where_it_makes_no_sense(name: str) -> None:
    """What is divided by has to be above 0."""
    with pytest.raises(ConfigurationError, match=f"{name}=0: expected a finite number above 0"):
        bound(**{name: 0})


# -- gain against cost -----------------------------------------------------------------------------------------------

SPEED = Speed(1000.0, 50.0, attention_s=1e-6)
PRICES = Prices(3.0, 0.3, 15.0)
WHOLE: dict[str, float] = {
    "turns": 10,
    "before_tokens": 10_000,
    "after_tokens": 4_000,
    "uncached_tokens": 3_500,
    "output_tokens": 200,
    "cached_share": 0.9,
    "summary_input_tokens": 8_000,
    "summary_cached_tokens": 7_000,
    "summary_output_tokens": 500,
    "hidden": 0.25,
}


def test_money_of_one_setting() -> None:
    """By hand: 6,000 tokens less a turn; 3,500 tokens dearer once; 8,000 tokens read and 500 written."""
    expected = expect(PRICES, **{**WHOLE, "cached_share": 1.0})
    assert expected.unit == "money"
    assert expected.gain == pytest.approx(10 * 6_000 * 0.3e-6)
    assert expected.cost == pytest.approx(3_500 * 2.7e-6 + 1_000 * 3e-6 + 7_000 * 0.3e-6 + 500 * 15e-6)
    assert expected.net == expected.gain - expected.cost and not expected.pays
    assert expect(PRICES, **{**WHOLE, "turns": 100}).pays


def test_seconds_of_one_setting() -> None:
    """By hand: what the cache misses and what attention reads; three quarters of the work are not hidden."""
    expected = expect(SPEED, **WHOLE)
    assert expected.unit == "s"
    assert expected.gain == pytest.approx(10 * 6_000 * (0.1 / 1000 + 200e-6))
    summary = 1_000 / 1000 + 500 * (1 / 50 + 8_000e-6)
    assert expected.cost == pytest.approx(0.75 * (3_500 * 0.9 / 1000 + summary))


def test_the_whole_new_view_is_uncached_by_default() -> None:
    """Nothing of it is known to be cached."""
    some = {"turns": 1, "before_tokens": 100, "after_tokens": 40}
    assert expect(PRICES, **some) == expect(PRICES, **some, uncached_tokens=40)


@given(
    st.sampled_from([SPEED, PRICES]),
    st.sampled_from(["turns", "before_tokens", "summary_cached_tokens", "hidden"]),
    st.lists(UNIT, min_size=2, max_size=2).map(sorted),
)
def test_what_speaks_for_a_commit(rates: Speed | Prices, name: str, values: list[float]) -> None:
    """More turns ahead, a longer view, a cached prompt and hidden work never speak against it."""
    most = {"turns": 100, "before_tokens": 1e5, "summary_cached_tokens": 8_000, "hidden": 1}[name]
    low, high = (expect(rates, **{**WHOLE, name: most * v}).net for v in values)
    assert low <= high + 1e-12


@given(
    st.sampled_from([SPEED, PRICES]),
    st.sampled_from(["after_tokens", "uncached_tokens", "summary_input_tokens", "summary_output_tokens"]),
    st.lists(UNIT, min_size=2, max_size=2).map(sorted),
)
def test_what_speaks_against_a_commit(rates: Speed | Prices, name: str, values: list[float]) -> None:
    """A longer new view, more of it uncached, more to read and more to write never speak for it."""
    least, most = {"after_tokens": (3_500, 1e5), "uncached_tokens": (0, 4_000)}.get(name, (7_000, 1e5))
    low, high = (expect(rates, **{**WHOLE, name: least + (most - least) * v}).net for v in values)
    assert low >= high - 1e-12


@given(TOKENS, TOKENS, st.floats(0, 1e3), UNIT, st.floats(1e-3, 1e3))
def test_units_are_consistent(before: float, after: float, turns: float, share: float, factor: float) -> None:
    """Another currency or a faster machine scales gain and cost alike and leaves the verdict."""
    some = {"turns": turns, "before_tokens": before, "after_tokens": after, "output_tokens": 10, "cached_share": share}
    scaled = (
        (Prices(3.0, 0.3, 15.0), Prices(3.0 * factor, 0.3 * factor, 15.0 * factor)),
        (Speed(1000.0, 50.0, 1e-6), Speed(1000.0 / factor, 50.0 / factor, 1e-6 * factor)),
    )
    for rates, other in scaled:
        one, two = expect(rates, **some, summary_output_tokens=9), expect(other, **some, summary_output_tokens=9)
        assert two.gain == pytest.approx(one.gain * factor, rel=1e-9, abs=1e-12)
        assert two.cost == pytest.approx(one.cost * factor, rel=1e-9, abs=1e-12)
        if abs(one.net) > 1e-9 * (abs(one.gain) + one.cost):
            assert one.pays == two.pays


def test_an_engine_without_delay_has_nothing_to_gain() -> None:
    """Infinite rates: no gain, no cost, and so it does not pay."""
    assert expect(Speed(math.inf, math.inf), **WHOLE) == Expected(gain=0.0, cost=0.0, unit="s")
    assert not expect(Speed(math.inf, math.inf), **WHOLE).pays


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"turns": -1}, "turns=-1"),
        ({"before_tokens": math.inf}, "before_tokens=inf"),
        ({"uncached_tokens": 4_001}, "uncached_tokens=4001: expected a finite number of at least 0 and at most 4000"),
        ({"summary_cached_tokens": 8_001}, "summary_cached_tokens=8001"),
        ({"cached_share": 1.1}, "cached_share=1.1"),
        ({"hidden": -0.1}, "hidden=-0.1"),
        ({"output_tokens": True}, "output_tokens=True"),
    ],
)
def test_expect_refuses_wrong_numbers(changes: dict[str, float], said: str) -> None:
    """The option, its value and what is allowed are named."""
    with pytest.raises(ConfigurationError, match=said):
        expect(PRICES, **{**WHOLE, **changes})


def test_wrong_rates_are_refused() -> None:
    """At construction, and where neither kind is given."""
    for build in (lambda: Speed(0, 1), lambda: Speed(1, math.nan), lambda: Speed(1, 1, -1), lambda: Speed(True, 1)):
        with pytest.raises(ConfigurationError):
            build()
    for prices in ((-1, 0, 0), (0, math.inf, 0), (0, 0, "1")):
        with pytest.raises(ConfigurationError):
            Prices(*prices)
    with pytest.raises(ConfigurationError, match="rates=5"):
        expect(5, turns=1, before_tokens=1, after_tokens=1)  # type: ignore[arg-type]


# -- against a simulation --------------------------------------------------------------------------------------------

REPLY = "".join(f"r{k:03d}" for k in range(50))
FACTORS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.5, 2.0)


def text(tokens: int, letter: str) -> str:
    """A text of so many tokens of the fake engine."""
    return "".join(f"{letter}{k:03d}" for k in range(tokens))


@dataclass(frozen=True)
class Setting:
    """What is simulated: the kind of cache, the rates, and the sizes."""

    rates: Speed | Prices
    cached: bool
    after: int
    hidden: bool = False
    system: int = 50
    before: int = 1_000
    summary: int = 40

    def views(self) -> tuple[list[Any], list[Any]]:
        """The view as it is, and after the commit."""
        system = {"role": "system", "content": text(self.system - 2, "s")}
        tail = {"role": "user", "content": text(self.after - self.system - self.summary - 2, "t")}
        old = {"role": "user", "content": text(self.before - self.after + self.summary - 2, "o")}
        summary = {"role": "user", "content": text(self.summary - 2, "u")}
        return [system, old, tail], [system, summary, tail]

    def engine(self) -> FakeEngine:
        """A fresh engine with this cache."""
        speed = self.rates if isinstance(self.rates, Speed) else None
        return FakeEngine(REPLY, speed=speed, slots=1, block_tokens=1 if self.cached else 1_000_000)

    def expected(self, turns: float) -> Expected:
        """What the formula says."""
        engine, (raw, new) = self.engine(), self.views()
        asked = engine.count(raw) + 11
        return expect(
            self.rates,
            turns=turns,
            before_tokens=engine.count(raw),
            after_tokens=engine.count(new),
            uncached_tokens=engine.count(new[1:]),
            output_tokens=51,
            cached_share=1.0 if self.cached else 0.0,
            summary_input_tokens=asked,
            summary_cached_tokens=engine.count(raw) if self.cached else 0,
            summary_output_tokens=self.summary,
            hidden=float(self.hidden),
        )

    def break_even(self) -> float:
        """Turns from which on it pays."""
        return self.expected(1).cost / self.expected(1).gain


@dataclass
class Meter:
    """What an agent has spent, in the setting's unit, after each turn."""

    setting: Setting
    engine: FakeEngine
    spent: list[float] = field(default_factory=lambda: [0.0])

    async def call(self, messages: list[Any], *, counted: bool = True, max_tokens: int | None = None) -> float:
        """One call, and what it costs."""
        began = asyncio.get_running_loop().time()
        usage: Usage = (await self.engine.complete(messages, max_tokens=max_tokens)).usage
        if isinstance(self.setting.rates, Speed):
            return asyncio.get_running_loop().time() - began if counted else 0.0
        prices, hit = self.setting.rates, usage.cached_tokens or 0
        new = usage.input_tokens - hit
        return (new * prices.input + hit * prices.cached_input + usage.output_tokens * prices.output) / 1e6

    async def turns(self, view: list[Any], count: int) -> None:
        """The agent goes on with this view."""
        for turn in range(count):
            view = [*view, {"role": "user", "content": text(18, chr(97 + turn % 26))}]
            self.spent.append(self.spent[-1] + await self.call(view))
            view.append({"role": "assistant", "content": REPLY})


async def simulate(setting: Setting, turns: int) -> list[float]:
    """For each number of turns from 0 on: what the commit has saved in all, counted call by call."""
    raw, new = setting.views()
    meters = [Meter(setting, setting.engine()), Meter(setting, setting.engine())]
    for meter in meters:
        await meter.engine.prefill(raw)
    await meters[0].turns(raw, turns)
    committing = meters[1]
    instruction = {"role": "user", "content": text(8, "i")}
    counted = not setting.hidden
    committing.spent[0] += await committing.call([*raw, instruction], counted=counted, max_tokens=setting.summary)
    if setting.hidden:
        await committing.engine.prefill(new)
    await committing.turns(new, turns)
    return [a - b for a, b in zip(meters[0].spent, meters[1].spent, strict=True)]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(Prices(3.0, 0.3, 15.0), cached=True, after=700),
        Setting(Prices(2.5, 1.25, 10.0), cached=True, after=930),
        Setting(Prices(1.0, 0.5, 60.0), cached=False, after=850),
        Setting(Speed(1000.0, 50.0, attention_s=4e-6), cached=True, after=500),
        Setting(Speed(5000.0, 100.0, attention_s=1e-6), cached=True, after=700),
        Setting(Speed(1000.0, 50.0), cached=False, after=900),
    ],
    ids=lambda s: f"{type(s.rates).__name__}-{'cached' if s.cached else 'uncached'}-{s.after}",
)
def test_verdict_agrees_with_counting(setting: Setting) -> None:
    """Ten settings around break-even, in turns still to come: the formula and the simulation agree on most."""
    even = setting.break_even()
    assert 8 < even < 200, "so that the settings differ by whole turns"
    saved = run_virtual(lambda: simulate(setting, round(2 * even)))
    turns = [round(even * f) for f in FACTORS]
    agree = [setting.expected(n).pays == (saved[n] > 0) for n in turns]
    assert sum(agree) >= 8, (even, list(zip(turns, agree, [saved[n] for n in turns], strict=True)))
    # Not by luck: far from break-even the amounts are the same too, but for single tokens at the edges.
    assert setting.expected(turns[-1]).net == pytest.approx(saved[turns[-1]], rel=0.15)


def test_hidden_work_pays_at_once() -> None:
    """Summary and preload beside the resting agent: in seconds every turn is a gain, by counting too."""
    setting = Setting(Speed(1000.0, 50.0, attention_s=1e-6), cached=True, after=500, hidden=True)
    saved = run_virtual(lambda: simulate(setting, 5))
    assert [setting.expected(n).pays for n in range(6)] == [s > 1e-9 for s in saved] == [False] + [True] * 5
    assert setting.expected(5).net == pytest.approx(saved[5], rel=0.05)
