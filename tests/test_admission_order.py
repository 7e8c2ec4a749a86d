"""Order: earliest deadline first has fewer late commits than first in, first out, on the same trace."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "order.py"


@pytest.fixture(name="order")
def load_benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("order_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "order_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_deadline_order_has_fewer_late_commits(order: Any) -> None:
    """At eight staggered sessions on one engine, in virtual time."""
    deadline, fifo = (order.measure(arm, 3, 15.0) for arm in ("deadline", "fifo"))
    assert deadline.turns == fifo.turns > 150 and deadline.commits > 25
    assert deadline.late < fifo.late and deadline.waited_s < fifo.waited_s


def test_the_table_and_the_json(
    order: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both arms of each trace, and their sums."""
    file = tmp_path / "order.json"
    monkeypatch.setattr(sys, "argv", ["order.py", "--traces", "1", "--minutes", "2", "--json", str(file)])
    order.main()
    deadline, fifo = json.loads(file.read_text())
    assert (deadline["order"], fifo["order"], deadline["turns"]) == ("deadline", "fifo", fifo["turns"])
    assert f"all deadline  late {deadline['late']} of {deadline['commits']} commits" in capsys.readouterr().out
