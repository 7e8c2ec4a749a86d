"""The stall benchmark, in virtual time: rewriting a context ahead of time adds nothing to a turn."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "autogen_stall.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("autogen_stall", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "autogen_stall", module)
    spec.loader.exec_module(module)
    return module


def test_transform_turns_take_what_ordinary_ones_take(bench: ModuleType) -> None:
    """In line each rewrite adds the summariser's two seconds; ahead of time it adds nothing."""
    found = bench.measure(bench.autogen, bench.Settings(), virtual=True)
    in_line, ahead = found["in_line"], found["lookahead"]
    for row in (in_line, ahead):
        assert row["turns"] == 30 and row["transform_turns"] >= 2
        assert row["ordinary_p50_ms"] == pytest.approx(300) and row["ordinary_max_ms"] == pytest.approx(300)
    assert in_line["transform_p50_ms"] == pytest.approx(2300)
    assert ahead["transform_max_ms"] == pytest.approx(300) and ahead["ratio"] == pytest.approx(1.0)


def test_it_prints_a_table_and_writes_json(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One row for each way; without a rewrite its columns are empty."""
    file = tmp_path / "out.json"
    monkeypatch.setattr(bench, "FORMS", {"AutoGen": bench.FORMS["AutoGen"], "Missing": ("no_such_framework", None)})
    monkeypatch.setattr(sys, "argv", ["x", "--turns", "5", "--clock", "virtual", "--json", str(file)])
    bench.main()
    out = capsys.readouterr().out
    assert "AutoGen, in line" in out and "AutoGen, lookahead" in out and "Missing" not in out
    written = json.loads(file.read_text())
    assert written["clock"] == "virtual" and written["frameworks"]["AutoGen"]["lookahead"]["ratio"] is None
    monkeypatch.setattr(bench, "FORMS", {"Missing": ("no_such_framework", None)})
    with pytest.raises(SystemExit):
        bench.main()
    assert "none of these is installed: Missing" in capsys.readouterr().err
