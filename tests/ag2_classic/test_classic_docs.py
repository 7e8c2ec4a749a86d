"""The page, the example and the benchmark of AG2 classic run here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(r"^```python\n# needs-ag2-classic\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(*command: str, cwd: Path) -> str:
    """Run Python with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_sends_less_than_it_holds(tmp_path: Path) -> None:
    """Its last line says how much was held and read."""
    code = FENCE.findall((ROOT / "docs" / "ag2.md").read_text())[0]
    held, read = map(int, re.findall(r"\d+", run("-c", code, cwd=tmp_path).strip().splitlines()[-1]))
    assert held == 80 and read < 40


def test_the_retrieve_snippet_reads_what_was_offloaded(tmp_path: Path) -> None:
    """The model gets the end of the log that it could not see."""
    _, code = FENCE.findall((ROOT / "docs" / "ag2.md").read_text())
    lines = run("-c", code, cwd=tmp_path).strip().splitlines()
    assert any(line.startswith("[retrieve id=") for line in lines) and lines[-1] == "The disk was full."


def test_the_example_rewrites_without_waiting(tmp_path: Path) -> None:
    """It runs as a script."""
    lines = run(str(ROOT / "examples" / "ag2_classic" / "chat.py"), cwd=tmp_path).strip().splitlines()
    assert "messages read" in lines[0] and len(lines) >= 2


def test_transform_turns_of_the_benchmark_are_ordinary_ones(tmp_path: Path) -> None:
    """In virtual time: in line a rewrite stops its turn for two seconds, with lookahead for nothing."""
    command = (str(ROOT / "benchmarks" / "ag2_stall.py"), "--clock", "virtual", "--json", "found.json")
    run(*command, cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())["frameworks"]["AG2 classic"]
    assert found["in_line"]["transform_turns"] >= 1 and found["in_line"]["ratio"] > 7
    assert found["lookahead"]["transform_turns"] >= 1 and found["lookahead"]["ratio"] < 1.1
