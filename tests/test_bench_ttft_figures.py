"""The figures, the aims and the plots of ``bench ttft``, on turns made by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from smoothctx.bench import plots
from smoothctx.bench.ttft_figures import arms, matched, of_arm, pairs, same_size, spread, weighted_percentile
from smoothctx.bench.ttft_reached import Claim, best, claims
from smoothctx.bench.ttft_report import figures, reached, text
from smoothctx.demo.report import percentile


def turn(ttft_ms: float, **fields: Any) -> dict[str, Any]:
    """One measured turn."""
    return {
        "number": 1,
        "kind": "turn",
        "at_s": 0.0,
        "ttft_ms": ttft_ms,
        "waited_ms": 0.0,
        "total_ms": ttft_ms + 500.0,
        "gaps_ms": [20.0, 20.0],
        "prompt_tokens": 2000,
        "cached_tokens": 1400,
        "output_tokens": 24,
        "new_tokens": 600,
        "history_tokens": 2000,
        "transform": False,
        "how": "",
        "warm": None,
        "tokens_before": None,
        "tokens_after": None,
        "beside": False,
        **fields,
    }


def rewrite(ttft_ms: float, how: str = "ready", **fields: Any) -> dict[str, Any]:
    """One with a rewrite."""
    return turn(ttft_ms, transform=True, how=how, **fields)


USAGE = {"input_tokens": 0, "output_tokens": 0, "cached_tokens": None, "calls": 0}


def cell(
    strategy: str, mode: str, turns: Sequence[dict[str, Any]], *, concurrency: int = 1, **fields: Any
) -> dict[str, Any]:
    """A cell with one session."""
    found = {
        "strategy": strategy,
        "mode": mode,
        "concurrency": concurrency,
        "batch": 0,
        "tool_s": 1.0,
        "wall_s": 100.0,
        "sessions": [{"name": "s", "number": 0, "wall_s": 100.0, "turns": list(turns)}],
        "lookaheads": [],
        "background": [],
        "counters": {"wasted_tokens": 0, "usage": USAGE, "preload_usage": USAGE},
        "errors": [],
    }
    return {**found, **fields}


def data(*cells: dict[str, Any]) -> dict[str, Any]:
    """A file with these cells."""
    return {
        "engine": "e#m",
        "settings": {},
        "calibration": {"prefill": 200.0, "decode": 40.0, "minimal_ms": 30.0},
        "cells": {str(k): c for k, c in enumerate(cells)},
    }


def claim(found: Sequence[Claim], aim: str, where: str = "") -> Claim:
    """The one claim of this aim."""
    mine = [c for c in found if c.aim == aim and where in c.where]
    assert len(mine) == 1, (aim, where, [(c.aim, c.where) for c in found])
    return mine[0]


# -- figures -----------------------------------------------------------------------------------------------------------


def test_spread_of_known_values() -> None:
    """Percentiles interpolate; nothing measured is nothing claimed."""
    assert spread([10.0, 20.0, 30.0, 40.0]) == {
        "n": 4,
        "mean_ms": 25.0,
        "p50_ms": 25.0,
        "p95_ms": 38.5,
        "p99_ms": 39.7,
        "max_ms": 40.0,
    }
    assert spread([])["n"] == 0 and spread([])["p95_ms"] is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1), st.floats(0.1, 10))
def test_equal_weights_are_no_weights(values: list[float], p: float, weight: float) -> None:
    """The weighted percentile of equal weights is the plain one."""
    assert weighted_percentile([(v, weight) for v in values], p) == pytest.approx(percentile(values, p), abs=1e-3)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.01, 10)), min_size=1, max_size=40), st.floats(0, 1))
def test_weighted_percentiles_stay_inside(values: list[tuple[float, float]], p: float) -> None:
    """Between the least and the greatest value, and never falling with ``p``."""
    found = weighted_percentile(values, p)
    assert min(v for v, _ in values) - 1e-6 <= found <= max(v for v, _ in values) + 1e-6
    assert weighted_percentile(values, 0.0) <= found + 1e-6 and found <= weighted_percentile(values, 1.0) + 1e-6


def test_turns_are_compared_with_their_like() -> None:
    """Each turn gives its likes one weight together; one without any is left out on both sides."""
    others = [turn(100, new_tokens=600), turn(200, new_tokens=620), turn(900, new_tokens=1200)]
    found, likes = matched(
        [turn(5, new_tokens=610), turn(6, new_tokens=1210), turn(7, new_tokens=60)], others, same_size
    )
    assert found == [5, 6]
    assert likes == [(100, 0.5), (200, 0.5), (900, 1.0)]


def test_rates_of_an_arm() -> None:
    """Hit, late, stale, waste, extra, use, cached shares, throughput: each against its definition."""
    lives = [
        {"started_s": 1, "ready_s": 2, "committed_s": 3},
        {"started_s": 1, "ready_s": 2, "committed_s": 3},
        {"started_s": 1, "ready_s": 2, "discarded_s": 3, "reason": "digest_mismatch"},
        {"started_s": 1, "ready_s": 2, "discarded_s": 9, "reason": "session_closed"},
    ]
    counters = {
        "wasted_tokens": 60,
        "usage": {"input_tokens": 700, "output_tokens": 100, "cached_tokens": 200},
        "preload_usage": {"input_tokens": 1000, "output_tokens": 5, "cached_tokens": 400},
    }
    background = [
        {"kind": "summary", "start_s": 0, "end_s": 1, "prompt_tokens": 1000, "cached_tokens": 900, "output_tokens": 9},
        {"kind": "preload", "start_s": 0, "end_s": 1, "prompt_tokens": 1000, "cached_tokens": 0, "output_tokens": 1},
    ]
    background += [
        {
            "kind": kind,
            "start_s": 0.5,
            "end_s": 1,
            "prompt_tokens": None,
            "cached_tokens": None,
            "output_tokens": None,
        }
        for kind in ("summary", "preload")
    ]
    turns = [turn(100), rewrite(100), rewrite(300, "promoted", cached_tokens=None)]
    made = cell("summarise", "lookahead", turns, lookaheads=lives, counters=counters, background=background)
    found = of_arm(arms(data(made))["summarise", 1, "lookahead"])
    assert (found["hit_rate"], found["late_rate"]) == (0.5, 0.5)
    assert (found["lookaheads"], found["committed"], found["stale"]) == (4, 2, 1)
    assert found["stale_rate"] == 0.25 and found["stale_by_reason"] == {"digest_mismatch": 1}
    assert found["use_rate"] == pytest.approx(2 / 3, abs=1e-4), "what the session's end took is nobody's fault"
    assert found["waste_rate"] == 0.01
    assert found["transform_tokens"] == 800 and found["preload_tokens"] == 600
    assert found["aborted_tokens"] == 100, "half a second at 200 tokens a second"
    assert found["extra_rate"] == pytest.approx((800 - 200 + 600 + 100) / 6000, abs=1e-4), (
        "what was cached cost nothing"
    )
    assert found["rewrites_cached"] == 0.7, "only what was reported"
    assert found["summaries_cached"] == 0.9
    assert found["turns_per_min"] == 1.8 and found["output_tokens_per_s"] == 0.72
    assert found["busy"] == pytest.approx(0.02)
    inline = of_arm(arms(data(cell("summarise", "inline", turns)))["summarise", 1, "inline"])
    assert inline["hit_rate"] is None and inline["late_rate"] is None, "in line there is nothing to hit"


def test_hand_overs_are_the_rewrites_of_isolate() -> None:
    """The agent's own rewrites are neither rewrites nor ordinary turns."""
    turns = [turn(100, kind="parent"), rewrite(900, kind="parent"), rewrite(50, kind="handover")]
    found = arms(data(cell("isolate", "lookahead", turns)))["isolate", 1, "lookahead"]
    assert [t["ttft_ms"] for t in found.rewrites] == [50] and [t["ttft_ms"] for t in found.ordinary] == [100]
    own = of_arm(found)["parent_rewrites"]
    assert (own["n"], own["max_ms"]) == (1, 900), "but they are counted, in a line of their own"
    assert re.search(r"parent's own +1 +900", text(data(cell("isolate", "lookahead", turns))))
    assert re.search(r"parent's own +0 +-", text(data(cell("isolate", "lookahead", turns[:1]))))
    assert "parent's own" not in text(data(cell("summarise", "lookahead", [turn(100), rewrite(900)])))


# -- aims --------------------------------------------------------------------------------------------------------------


def both(strategy: str, slow: float, fast: float, *, n: int = 20, concurrency: int = 1) -> list[dict[str, Any]]:
    """In line and lookahead, ``n`` rewrites and 40 ordinary turns of 1 s each."""
    ordinary = [turn(1000.0) for _ in range(40)]
    inline = cell(
        strategy, "inline", [*ordinary, *(rewrite(slow, "promoted") for _ in range(n))], concurrency=concurrency
    )
    ahead = cell(strategy, "lookahead", [*ordinary, *(rewrite(fast) for _ in range(n))], concurrency=concurrency)
    return [inline, ahead]


def test_excess_removed() -> None:
    """(in line - lookahead) / (in line - ordinary p50)."""
    found = claims(data(*both("summarise", 11_000, 1500)))
    assert claim(found, "excess removed").value == 0.95 and claim(found, "excess removed").reached is True
    found = claims(data(*both("summarise", 11_000, 3000)))
    assert claim(found, "excess removed").value == 0.8 and claim(found, "excess removed").reached is False


def test_too_few_turns_claim_nothing() -> None:
    """Whatever the value is."""
    found = claims(data(*both("summarise", 11_000, 1000, n=19)))
    one = claim(found, "excess removed")
    assert one.value == 1.0 and one.reached is None and one.n == 19
    assert "too few" in reached([one])


def test_rewrites_at_long_turns_do_not_count_as_excess() -> None:
    """By size, a rewrite is compared with the ordinary turns that add as much."""
    ordinary = [turn(1000.0) for _ in range(20)] + [turn(2000.0, new_tokens=1250) for _ in range(20)]
    inline = cell("offload", "inline", [*ordinary, *(rewrite(6000, "promoted") for _ in range(20))])
    ahead = cell("offload", "lookahead", [*ordinary, *(rewrite(2000, new_tokens=1250) for _ in range(20))])
    found = claims(data(inline, ahead))
    assert claim(found, "the same by size").value == 1.0
    assert claim(found, "excess removed").value == pytest.approx((6000 - 2000) / (6000 - 1500), abs=1e-3)
    assert claim(found, "no spike").value == 1.0


def test_tails() -> None:
    """The mean of the four strategies, and summarise alone; without all four there is no mean."""
    made = [c for s in ("summarise", "keep-recent", "offload", "isolate") for c in both(s, 10_000, 2000)]
    for c in made[-2:]:
        c["sessions"][0]["turns"] = [
            {**t, "kind": "handover" if t["transform"] else "parent"} for t in c["sessions"][0]["turns"]
        ]
    found = claims(data(*made))
    for tail in ("p95", "max"):
        assert claim(found, f"{tail} lower").value == 0.8 and claim(found, f"{tail} lower").reached is True
        assert claim(found, f"{tail} times lower").value == 5.0
        assert claim(found, f"{tail} times lower").reached is False
    assert not [c for c in claims(data(*made[:2])) if c.aim == "p95 lower"]
    fast = claims(data(*both("summarise", 26_000, 2000)))
    chosen = best({"slow": found, "fast": fast})
    assert claim(chosen, "p95 times lower").note == "fast" and claim(chosen, "p95 times lower").reached is True
    assert claim(chosen, "p95 lower").note == "slow"


def test_spikes() -> None:
    """p95 of turns with a rewrite against p95 of ordinary ones of their size."""
    assert claim(claims(data(*both("summarise", 9000, 1190))), "no spike").reached is True
    found = claim(claims(data(*both("summarise", 9000, 1250, concurrency=2))), "no spike")
    assert found.value == 1.25 and found.reached is False and "2 at once (medium)" in found.where


def test_harm_is_measured_at_the_same_place() -> None:
    """Later turns are slower by themselves: only such of the same length are compared."""
    early = [turn(1000.0, prompt_tokens=1000) for _ in range(30)]
    late = [turn(2000.0, prompt_tokens=3000) for _ in range(30)]
    beside = [turn(2050.0, prompt_tokens=3000, beside=True) for _ in range(25)]
    ahead = cell("summarise", "lookahead", [*early, *beside])
    found = claim(claims(data(cell("summarise", "inline", [*early, *late]), ahead)), "no harm")
    assert found.value == 50.0 and found.reached is True and found.n == 25
    assert found.bound == "<= 150 ms", "15 % of the ordinary p50"
    worse = cell("summarise", "lookahead", [*early, *({**t, "ttft_ms": 2400.0} for t in beside)])
    found = claim(claims(data(cell("summarise", "inline", [*early, *late]), worse)), "no harm")
    assert found.value == 400.0 and found.reached is False


def test_saturation_compares_with_smoothctx_switched_off() -> None:
    """TTFT and the time between tokens of ordinary turns; the first call on a long history is not among them."""
    first = turn(90_000.0, kind="opening")
    off = cell("saturated", "off", [first, *(turn(1000.0) for _ in range(30))], concurrency=4)
    on = cell("saturated", "lookahead", [*(turn(1040.0, gaps_ms=[22.0, 22.0]) for _ in range(30))], concurrency=4)
    found = claims(data(off, on))
    assert claim(found, "p95 TTFT").value == 1.04 and claim(found, "p95 TTFT").reached is True
    assert claim(found, "p95 between tokens").value == 1.1 and claim(found, "p95 between tokens").reached is False
    assert not pairs(data(off, on))


def test_an_engine_that_takes_no_time_claims_nothing() -> None:
    """Tokens that come in one packet have no time between them, and a first token at once has no tail."""
    turns = [turn(0.0, gaps_ms=[0.0, 0.0]), rewrite(0.0)] * 20
    arms_ = [cell("summarise", mode, turns) for mode in ("inline", "lookahead")]
    arms_ += [cell("saturated", mode, turns, concurrency=4) for mode in ("off", "lookahead")]
    found = claims(data(*arms_))
    for aim in ("no spike", "p95 TTFT", "p95 between tokens", "mean between tokens"):
        assert claim(found, aim).value is None and claim(found, aim).reached is None
    assert not [c for c in found if "lower" in c.aim]


def test_session_time_use_and_waste() -> None:
    """Never longer than in line; finished lookaheads are used; little is wasted."""
    lives = [{"started_s": 1, "ready_s": 2, "committed_s": 3}] * 19 + [
        {"started_s": 1, "ready_s": 2, "discarded_s": 3, "reason": "not_smaller"}
    ]
    inline, ahead = both("summarise", 9000, 1000)
    ahead["lookaheads"] = lives
    ahead["counters"] = {**ahead["counters"], "wasted_tokens": 12_000}
    for made in (inline, ahead):
        made["sessions"] *= 2
    ahead["sessions"] = [{**s, "wall_s": 90.0} for s in ahead["sessions"]]
    found = claims(data(inline, ahead))
    assert claim(found, "session time").value == 0.9 and claim(found, "session time").reached is True
    assert claim(found, "use").value == 0.95 and claim(found, "use").reached is True
    assert claim(found, "waste").value == 0.05 and claim(found, "waste").reached is False


def test_the_report_of_anything_is_text() -> None:
    """Also of a file with a single cell, with no rewrites, or with nothing at all."""
    for made in (data(), data(cell("summarise", "inline", [turn(1.0)])), data(*both("summarise", 9.0, 1.0, n=0))):
        assert "reached?" in text(made)
        assert figures(made)["arms"] is not None
    whole = text(data(*both("summarise", 9000, 1000)))
    assert re.search(r"summarise, 1 at once, in line +rewrites +20 +9000 +9000 +9000 +9000 +9000", whole)
    assert all(not line.endswith(" ") for line in whole.splitlines())


# -- plots ------------------------------------------------------------------------------------------------------------


def parts(picture: str, name: str) -> list[ElementTree.Element]:
    """The elements of this name; the picture is well-formed."""
    return list(ElementTree.fromstring(picture).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def test_lines_mark_their_points() -> None:
    """One line for each series, a dot for each marked point (and in the legend), names as text, not as markup."""
    series = {
        "a <b>": [plots.Point(1, 0.5), plots.Point(2, 3.0, True)],
        "c": [plots.Point(1, 1.0), plots.Point(2, 1.0)],
    }
    picture = plots.lines("title & more", "turn", series)
    assert len(parts(picture, "polyline")) == 2 and len(parts(picture, "circle")) == 3
    assert "a <b>, turn 2: 3.00" in [t.text for t in parts(picture, "title")]


def test_a_distribution_rises_to_one() -> None:
    """From the bottom to the top, never falling."""
    picture = plots.cdf("t", {"x": [3.0, 1.0, 2.0]})
    points = [p.split(",") for p in parts(picture, "polyline")[0].attrib["points"].split()]
    heights = [float(y) for _, y in points]
    assert heights == sorted(heights, reverse=True) and len(points) == 7
    assert heights[-1] < heights[0]


def test_bars_leave_out_what_is_missing() -> None:
    """A value that is not known has no bar, and is not zero."""
    picture = plots.bars("t", {"g": {"before": 2.0, "after": None}, "h": {"before": 1.0, "after": 0.5}})
    assert len(parts(picture, "rect")) == 1 + 3, "the background and three bars"


def test_pictures_of_nothing() -> None:
    """Are pictures."""
    for picture in (plots.lines("t", "x", {}), plots.cdf("t", {"a": []}), plots.bars("t", {})):
        assert parts(picture, "text")


@given(st.floats(1e-6, 1e9), st.integers(5, 12))
def test_ticks_are_few_and_reach_the_top(high: float, most: int) -> None:
    """From zero, at most that many steps, the last one less than a step below the top."""
    found = plots.ticks(high, most)
    assert found[0] == 0 and 2 <= len(found) <= most + 1
    assert found[-1] <= high * (1 + 1e-6) and high - found[-1] <= (found[1] - found[0]) * (1 + 1e-6)
