"""The benchmark of the lagging memory model: no turn waits, and the bound's verdict is the measured one."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "lagging.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("lagging", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lagging", module)
    spec.loader.exec_module(module)
    return module


def test_no_turn_of_two_hundred_waits(bench: ModuleType) -> None:
    """A memory model three times slower than a turn: zero waits, a bounded view, and the staleness as a figure."""
    found = bench.staleness(bench.Setting(k=4, slower=3.0), 200)
    assert found["waits"] == 0 and found["longest_wait_s"] == 0.0
    assert 200 // 8 <= found["commits"] <= 200 // 4
    assert 4 <= found["lag_least"] <= found["lag_mean"] <= found["lag_most"] <= 2 * 4 + 5
    assert found["view_most_tokens"] < found["history_tokens"] / 10


@pytest.mark.parametrize("changes", [{"k": 4}, {"k": 2, "prefill": 800.0, "summary": 600}])
def test_the_bound_agrees_with_what_is_measured(bench: ModuleType, changes: dict[str, float]) -> None:
    """On at least eight of ten settings around break-even; below it nothing is saved, and above it is."""
    verdicts = bench.around_break_even(replace(bench.Setting(), **changes))
    assert [v.factor for v in verdicts] == list(bench.FACTORS) and len(verdicts) == 10
    assert sum(v.agrees for v in verdicts) >= 8, bench.table([], verdicts)
    assert (verdicts[0].saves, verdicts[-1].saves) == (False, True)
    assert {v.bound.holds for v in verdicts} == {False, True}


def test_the_tables_and_the_figures(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed, and the same for machines."""
    monkeypatch.setattr(bench, "FACTORS", (0.5, 2.0))
    bench.main(["--turns", "20", "--k", "2", "--json", str(tmp_path / "lag.json")])
    shown = capsys.readouterr().out
    assert "longest wait" in shown and "agrees in 2 of 2 settings" in shown
    data = json.loads((tmp_path / "lag.json").read_text())
    assert data["waits"][0]["waits"] == 0 and [row["holds"] for row in data["bound"]] == [False, True]
    assert all(row["agrees"] for row in data["bound"])
