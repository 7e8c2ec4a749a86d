"""``smoothctx bench volume``: the figures, the cells, and going on after an interruption."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from smoothctx.bench import volume
from smoothctx.bench.statistics import similarity, spearman, variation
from smoothctx.bench.volume import QUICK, Settings, history, measure
from smoothctx.bench.volume_figures import summary, table
from smoothctx.bench.volume_simulated import Rates
from smoothctx.economics import Speed
from smoothctx.errors import ConfigurationError, EngineRefused, SmoothctxError
from smoothctx.testing import FakeEngine, run_virtual, valid_request

SOURCES = Path(volume.__file__).resolve().parent.parent
SMALL = replace(QUICK, blocks=(400, 800), details=("concise", "detailed"), runs=2)


# -- statistics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([1, 1, 2, 2], [1, 2, 3, 4], 2 / 5**0.5),
        ([1, 1, 1], [1, 2, 3], None),
        ([], [], None),
        ([1], [1], None),
    ],
)
def test_rank_correlation(left: list[float], right: list[float], expected: float | None) -> None:
    """Known values, with ties; nothing where there is nothing to say."""
    assert spearman(left, right) == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=20))
def test_rank_correlation_is_bounded_and_symmetric(pairs: list[tuple[int, int]]) -> None:
    """Between -1 and 1, whichever side comes first, and blind to any rising scale."""
    left, right = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    found = spearman(left, right)
    if found is not None:
        assert -1.000001 <= found <= 1.000001
        assert spearman(right, left) == pytest.approx(found)
        assert spearman([x**3 for x in left], right) == pytest.approx(found)


def test_spread_and_similarity() -> None:
    """Known values."""
    assert variation([2, 2, 2]) == 0 and variation([1, 3]) == pytest.approx(2**0.5 / 2)
    assert variation([5]) is None and variation([0, 0]) is None
    assert similarity(["a b", "a b"]) == pytest.approx(1) and similarity(["a b", "c d"]) == 0
    assert similarity(["a b", "b c"]) == pytest.approx(0.5) and similarity(["alone"]) is None


# -- cells ---------------------------------------------------------------------------------------------------------


def engine(**options: Any) -> FakeEngine:
    """Writes more when it is asked for more."""

    def answer(messages: list[dict[str, Any]]) -> str:
        text = str(messages[-1]["content"])
        return "words " * (200 if "TARGET_BLOCK" not in text else 30 if "Step by step" in text else 10)

    return FakeEngine(answer, strict=True, **{"speed": Speed(100_000.0, 100.0), **options})


def run_cells(settings: Settings, cells: dict[str, dict[str, Any]], **options: Any) -> FakeEngine:
    """Measure on a fake engine in virtual time."""
    used: list[FakeEngine] = []

    async def run() -> None:
        used.append(engine(**options))
        messages = await history(SOURCES, settings.tokens)
        loop = asyncio.get_running_loop()
        await measure(
            used[0], messages, settings, cells, done=lambda: None, say=lambda line: None, clock=lambda: loop.time()
        )

    run_virtual(run)
    return used[0]


def test_each_cell_is_measured_once() -> None:
    """Every block size, detail and run, as blocks and as one summary; all requests are valid."""
    cells: dict[str, dict[str, Any]] = {}
    used = run_cells(SMALL, cells)
    assert len(cells) == 2 * 2 * 2 * 2 and all(c["error"] is None for c in cells.values())
    assert all(valid_request(c.messages) == [] for c in used.calls)
    assert all(c["blocks"] == (1 if c["kind"] == "sequential" else c["calls"]) for c in cells.values())
    few, many = cells["800/concise/0"], cells["400/concise/0"]
    assert many["blocks"] > few["blocks"] > 1 and many["output_tokens"] > few["output_tokens"]
    for name, cell in cells.items():
        if cell["kind"] == "sequential":
            assert cell["output_tokens"] == cells[name.removeprefix("sequential/")]["output_tokens"], "matched volume"


def test_the_figures() -> None:
    """Volume follows blocks and detail, nothing is ended by the cap, and side by side is faster."""
    cells: dict[str, dict[str, Any]] = {}
    run_cells(SMALL, cells)
    figures = summary(cells, SMALL.blocks, SMALL.details)
    assert figures["ended_by_cap"] == 0 and figures["failed"] == 0 and len(figures["rows"]) == 4
    assert set(figures["spearman_blocks"]) == {"concise", "detailed"}
    assert all(v == pytest.approx(1) for v in figures["spearman_blocks"].values())
    assert all(v == pytest.approx(1) for v in figures["spearman_detail"].values())
    assert all(
        r["speedup"] > 1 and r["variation"] == 0 and r["similarity"] == pytest.approx(1) for r in figures["rows"]
    )
    assert "Spearman of tokens with detail" in table(figures)


def test_a_row_does_not_contradict_itself() -> None:
    """Tokens a second are the row's tokens by its seconds, and the gain is that of the seconds: a fast run counts no
    more than a slow one."""

    def one(kind: str, run: int, wall_s: float) -> dict[str, Any]:
        figures = {"output_tokens": 120, "tokens_per_s": 120 / wall_s, "wall_s": wall_s, "calls": 3, "ended_by_cap": 0}
        about = {"kind": kind, "block_tokens": 400, "detail": "concise", "run": run, "error": None, "raw_messages": 0}
        return {**about, **figures, "blocks": 3, "texts": ["a b"]}

    made = [one("parallel", 0, 3.4), one("parallel", 1, 0.2), one("sequential", 0, 7.6), one("sequential", 1, 0.4)]
    [found] = summary({str(k): c for k, c in enumerate(made)}, (400,), ("concise",))["rows"]
    assert found["tokens_per_s"] == pytest.approx(found["output_tokens"] / found["wall_s"]) == pytest.approx(240 / 3.6)
    assert found["sequential_tokens_per_s"] == pytest.approx(240 / 8.0)
    assert found["speedup"] == pytest.approx(found["sequential_wall_s"] / found["wall_s"]) == pytest.approx(8.0 / 3.6)
    still = [{**c, "wall_s": 0.0} for c in made]
    [found] = summary({str(k): c for k, c in enumerate(still)}, (400,), ("concise",))["rows"]
    assert (
        found["tokens_per_s"] is None and found["speedup"] is None and table({**summary({}, (), ()), "rows": [found]})
    )


def test_where_prefill_decides_blocks_are_slower() -> None:
    """Each block is read once more than by one summary: for short answers on a slow prefill that is the longer way."""
    cells: dict[str, dict[str, Any]] = {}
    run_cells(SMALL, cells, speed=Speed(1000.0, 1000.0))
    assert all(r["speedup"] < 1 for r in summary(cells, SMALL.blocks, SMALL.details)["rows"])


def test_what_is_there_is_not_measured_again() -> None:
    """A run goes on behind the last cell."""
    cells: dict[str, dict[str, Any]] = {}
    run_cells(SMALL, cells)
    kept = {k: c for k, c in list(cells.items())[:-3]}
    used = run_cells(SMALL, kept)
    assert list(kept) == list(cells)
    assert sum(c.max_tokens == 1 for c in used.calls) == 3, "one prefill for each of the missing cells"


def test_what_ends_at_the_cap_is_counted() -> None:
    """It is not asked for again: the volume is what came."""
    cells: dict[str, dict[str, Any]] = {}
    settings = replace(SMALL, max_tokens=20, runs=1)
    run_cells(settings, cells)
    figures = summary(cells, settings.blocks, settings.details)
    assert figures["failed"] == 0 and figures["ended_by_cap"] == 0.5, "the detailed ones"
    assert all(c["calls"] == c["blocks"] for c in cells.values())


def test_a_model_that_cannot_do_it_is_a_figure() -> None:
    """A cell without one usable summary has failed; the others are measured, and it has no sequential one."""
    cells: dict[str, dict[str, Any]] = {}

    async def run() -> None:
        used = FakeEngine(lambda sent: "" if "Step by step" in str(sent[-1]["content"]) else "words " * 10)
        messages = await history(SOURCES, SMALL.tokens)
        await measure(used, messages, SMALL, cells, done=lambda: None, say=lambda line: None, clock=lambda: 1.0)

    run_virtual(run)
    figures = summary(cells, SMALL.blocks, SMALL.details)
    assert figures["failed"] == 4 and len(figures["rows"]) == 2
    assert {c["detail"] for c in cells.values() if c["error"]} == {"detailed"}
    assert not any(c["kind"] == "sequential" and c["detail"] == "detailed" for c in cells.values())
    assert "failed cells: 4" in table(figures)


async def test_too_little_to_read_is_an_error(tmp_path: Path) -> None:
    """It names the folder."""
    (tmp_path / "a.md").write_text("short", encoding="utf-8")
    with pytest.raises(SmoothctxError, match="not enough readable text"):
        await history(tmp_path, 4000)


# -- the command ---------------------------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser()
    volume.add_parser(parser.add_subparsers())
    return parser.parse_args(["volume", *arguments])


def test_the_command_writes_its_cells_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that breaks in the middle leaves what was measured; the next run measures the rest."""
    file = tmp_path / "figures.json"
    made: list[FakeEngine] = []

    class Fast(FakeEngine):
        async def aclose(self) -> None:
            await super().aclose()

    def fake(*_: Any, **__: Any) -> FakeEngine:
        made.append(Fast("words " * 10, speed=Speed(float("inf"), float("inf"))))
        return made[-1]

    monkeypatch.setattr(volume, "OpenAIEngine", fake)
    options = parse("--url", "http://x/v1", "--name", "m", "--quick", "--json", str(file))
    real, count = volume._timed, 0

    async def breaks(*arguments: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return await real(*arguments)

    monkeypatch.setattr(volume, "_timed", breaks)
    with pytest.raises(KeyboardInterrupt):
        options.run(options)
    assert len(json.loads(file.read_text())["cells"]) == 3 and made[0]._closed
    assert options.run(options) == 0
    data = json.loads(file.read_text())
    assert len(data["cells"]) == 8 and count == 4 + 5 and data["figures"]["failed"] == 0
    assert "3 cells are there already" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="another measurement"):
        other = parse("--url", "http://x/v1", "--name", "m", "--quick", "--runs", "2", "--json", str(file))
        other.run(other)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="not a file of this benchmark"):
        options.run(options)


def test_the_rates_are_measured_first_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--rates`` on the engine of the cells, before them; what a simulation gains stands in the table."""
    engine = FakeEngine("words " * 10, speed=Speed(float("inf"), float("inf")))
    asked: list[tuple[Any, int, int]] = []

    async def rates(used: Any, *, workers: int) -> Rates:
        asked.append((used, workers, len(used.calls)))
        return Rates(prefill=900.0, decode_alone=18.0, decode_beside=15.0, workers=workers)

    monkeypatch.setattr(volume, "OpenAIEngine", lambda *_, **__: engine)
    monkeypatch.setattr(volume, "measure_rates", rates)
    file = tmp_path / "figures.json"
    options = parse("--url", "http://x/v1", "--name", "m", "--quick", "--rates", "--json", str(file))
    assert options.run(options) == 0
    assert asked == [(engine, 2, 0)]
    data, said = json.loads(file.read_text()), capsys.readouterr().out
    assert data["rates"] == {"prefill": 900.0, "decode_alone": 18.0, "decode_beside": 15.0, "workers": 2}
    assert all(row["simulated_gain"] > 0 for row in data["figures"]["rows"])
    assert "gain  simulated" in said and "each of 2 beside 15.0" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--url", "http://x/v1"], "--name"),
        (["--runs", "0"], "--runs 0"),
        (["--blocks", "800", "50"], "--blocks 50: expected at least 96"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--temperature", "9"], "--temperature 9"),
        (["--path", "/nowhere/at/all"], "--path /nowhere/at/all"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json"),
        (["--json", "/"], "--json /: that is a folder"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], named: str) -> None:
    """Before anything is started."""
    options = parse(*arguments)
    with pytest.raises(ConfigurationError, match=named):
        options.run(options)


def test_an_engine_that_fails_makes_failed_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it fails before the first summary; they are measured again by the next run."""
    file, refuses = tmp_path / "figures.json", [True]

    def server(*_: Any, **__: Any) -> FakeEngine:
        window = {"context_window": 100} if refuses[0] else {}
        return FakeEngine("words " * 10, speed=Speed(float("inf"), float("inf")), **window)

    monkeypatch.setattr(volume, "OpenAIEngine", server)
    options = parse("--url", "http://x/v1", "--name", "m", "--quick", "--json", str(file))
    assert options.run(options) == 1
    data = json.loads(file.read_text())
    assert len(data["cells"]) == 4 and data["figures"]["failed"] == 4 and data["figures"]["rows"] == []
    assert all("context window" in c["error"] for c in data["cells"].values())
    assert "failed cells: 4" in capsys.readouterr().out
    refuses[0] = False
    assert options.run(options) == 0
    data = json.loads(file.read_text())
    assert len(data["cells"]) == 8 and data["figures"]["failed"] == 0


def test_a_sequential_summary_that_ended_early_gives_no_gain() -> None:
    """On a server that does not take ``ignore_eos`` fewer tokens are not compared with many."""
    cells: dict[str, dict[str, Any]] = {}
    run_cells(SMALL, cells)
    for run in range(2):
        cells[f"sequential/400/detailed/{run}"]["output_tokens"] = 20
    figures = summary(cells, SMALL.blocks, SMALL.details)
    gains = {(r["block_tokens"], r["detail"]): r["speedup"] for r in figures["rows"]}
    assert gains.pop((400, "detailed")) is None and all(gain > 1 for gain in gains.values())
    shown = table(figures)
    assert "no gain for 400 detailed: the sequential summary ended before" in shown
    cells["sequential/400/detailed/0"]["output_tokens"] = cells["400/detailed/0"]["output_tokens"]
    assert summary(cells, SMALL.blocks, SMALL.details)["rows"][1]["speedup"] is None, "one of two runs is too short"


def test_blocks_that_stayed_raw_are_counted_and_in_no_figure() -> None:
    """A server that refuses some blocks: what is left is no compaction of the history, whatever it took."""
    cells: dict[str, dict[str, Any]] = {}
    said: list[str] = []
    settings = replace(SMALL, blocks=(400,), runs=2)

    async def run() -> None:
        refusing, asked = engine(), [0]
        real = refusing.complete

        async def complete(messages: Any, **options: Any) -> Any:
            detailed = "Step by step" in str(messages[-1]["content"])
            asked[0] += detailed
            if detailed and asked[0] == 2:
                raise EngineRefused("bad block", status=400)
            return await real(messages, **options)

        refusing.complete = complete  # type: ignore[method-assign]
        messages = await history(SOURCES, settings.tokens)
        await measure(refusing, messages, settings, cells, done=lambda: None, say=said.append)

    run_virtual(run)
    partial = cells["400/detailed/0"]
    assert partial["error"] is None and partial["raw_messages"] > 0 and "sequential/400/detailed/0" not in cells
    assert sum("messages stayed raw (EngineRefused: bad block)" in line for line in said) == 1
    figures = summary(cells, settings.blocks, settings.details)
    assert (figures["partly_raw"], figures["failed"]) == (1, 0)
    assert [r["blocks"] for r in figures["rows"]] == [cells["400/concise/0"]["blocks"]] * 2, (
        "the whole run alone counts"
    )
    shown = table(figures)
    assert "failed cells: 0; cells with blocks that stayed raw: 1" in shown and "stayed raw in 400 detailed:" in shown
    only = {name: cell for name, cell in cells.items() if name.endswith("/0")}
    only["sequential/400/detailed/0"] = dict(cells["sequential/400/detailed/1"], run=0)
    figures = summary(only, settings.blocks, settings.details)
    assert [r["detail"] for r in figures["rows"]] == ["concise"] and figures["spearman_detail"] == {"400": None}


def test_cells_with_blocks_that_stayed_raw_are_measured_again(tmp_path: Path) -> None:
    """With the sequential summary that is as long as they were, also of files of earlier versions."""
    file, about = tmp_path / "figures.json", {"engine": "e"}
    whole = {"error": None, "raw_messages": 0}
    cells = {
        "400/concise/0": whole,
        "sequential/400/concise/0": whole,
        "800/concise/0": {"error": None, "raw_messages": 2},
        "sequential/800/concise/0": whole,
        "800/detailed/0": whole,
        "sequential/800/detailed/0": {"error": "EngineError: no", "raw_messages": 0},
    }
    file.write_text(json.dumps({**about, "cells": cells}), encoding="utf-8")
    assert list(volume._read(file, about)) == ["400/concise/0", "sequential/400/concise/0", "800/detailed/0"]


def test_the_same_size_twice_is_measured_once() -> None:
    """And stands in one row."""
    settings = volume._settings(parse("--blocks", "800", "400", "800", "--details", "concise", "concise"))
    assert settings.blocks == (800, 400) and settings.details == ("concise",)
