"""The stall benchmark, with virtual time: turns with a rewrite are like other turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "agent_framework_stall.py"


def test_rewrites_cost_a_turn_nothing(tmp_path: Path) -> None:
    """The framework's own summaries stall their turns for the summariser's time; with lookahead no turn is longer."""
    out = tmp_path / "stall.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), "--clock", "virtual", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    theirs, ours = found["in_line"], found["lookahead"]
    assert len(theirs["turns_ms"]) == len(ours["turns_ms"]) == 30
    assert len(theirs["rewrites"]) >= 2 and len(ours["rewrites"]) >= 2
    assert theirs["rewrite_median_ms"] >= found["summariser_ms"] + found["model_ms"] - 1
    assert ours["rewrite_max_ms"] <= 1.1 * ours["ordinary_median_ms"]
    assert ours["max_ms"] <= 350
    assert "lookahead" in done.stdout and "in_line" in done.stdout
