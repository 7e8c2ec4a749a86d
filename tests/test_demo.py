"""The demo and the command line: chunks, figures, errors, and one quick run on the embedded engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smoothctx.cli import main
from smoothctx.demo.agent import Run, Settings, Turn
from smoothctx.demo.chunks import chunks
from smoothctx.demo.report import as_json, excess_removed, figures, page, percentile, plot, row, summary, svg

ROOT = Path(__file__).parent.parent


async def words(text: str) -> int:
    """A token counter for tests: words."""
    return len(text.split())


def folder(tmp_path: Path) -> Path:
    """Three files of text, and things that a reader must skip."""
    for k in range(3):
        (tmp_path / f"part{k}.py").write_text("\n".join(f"line {k} {n} of the file" for n in range(400)))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\x00latin")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.txt").write_text("hidden " * 5000)
    return tmp_path


async def test_chunks_are_even_and_lose_nothing(tmp_path: Path) -> None:
    """Every chunk is within 10% of the target, in order, and only readable files are read."""
    found = await chunks(folder(tmp_path), turns=12, tokens=300, count=words)
    assert len(found) == 12
    assert all(270 <= c.tokens <= 330 and c.tokens == len(c.text.split()) for c in found)
    text = "".join(c.text for c in found)
    assert text.startswith("# part0.py\nline 0 0 of the file") and "hidden" not in text
    numbers = [line.split()[2] for line in text.splitlines() if line.startswith("line 0 ")]
    assert numbers == [str(n) for n in range(len(numbers))]


async def test_chunks_of_a_small_folder_and_of_a_file(tmp_path: Path) -> None:
    """A folder that holds less gives fewer turns; a single file works; no text gives none."""
    folder(tmp_path)
    assert 5 < len(await chunks(tmp_path, turns=1000, tokens=300, count=words)) < 1000
    assert len(await chunks(tmp_path / "part1.py", turns=2, tokens=300, count=words)) == 2
    assert await chunks(tmp_path / ".git", turns=2, tokens=10**6, count=words) == []


def turn(number: int, ttft_ms: float, *, transform: bool = False, waited_ms: float = 0.0) -> Turn:
    """A measured turn."""
    return Turn(
        number=number,
        ttft_ms=ttft_ms,
        prompt_tokens=1000,
        cached_tokens=900,
        transform=transform,
        how="ready" if transform else "",
        waited_ms=waited_ms,
        total_ms=ttft_ms + 500,
        note="a <b> note",
        happened=("committed",) if transform else (),
    )


def runs() -> dict[str, Run]:
    """Two small runs with known figures."""
    slow = [turn(1, 1000), turn(2, 1000), turn(3, 11000, transform=True, waited_ms=5000), turn(4, 1200)]
    fast = [turn(1, 1000), turn(2, 1100), turn(3, 2000, transform=True), turn(4, 1200)]
    return {"inline": Run("inline", slow, 30.0), "lookahead": Run("lookahead", fast, 25.0)}


def test_figures() -> None:
    """Percentiles interpolate; quick runs make no percentile claims; nothing measured is nothing claimed."""
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([10], 0.95) == 10
    assert figures([turn(1, 100), turn(2, 300)]) == {
        "n": 2,
        "p50_ms": 200,
        "p95_ms": 290,
        "max_ms": 300,
        "mean_ms": 200,
    }
    assert figures([turn(1, 100)], percentiles=False)["p95_ms"] is None
    assert figures([]) == {"n": 0, "p50_ms": None, "p95_ms": None, "max_ms": None, "mean_ms": None}
    assert excess_removed(runs()) == 0.9
    assert excess_removed({"inline": Run("inline"), "lookahead": Run("lookahead")}) is None


@pytest.mark.parametrize("quick", [False, True])
def test_report_formats(quick: bool) -> None:
    """JSON, table, plot, SVG and page are made of the same figures."""
    data = as_json(runs(), Settings(), quick=quick, machine={"cpus": 2})
    assert data["modes"]["inline"]["transform_turns"]["n"] == 1
    assert data["modes"]["inline"]["session_s"] == 30.0
    assert {"started", "committed", "stale", "wasted_tokens"} <= data["lookahead"].keys()
    assert ("p95" in summary(data)) is not quick
    assert "11.0 s" in plot(data) and len(plot(data).splitlines()) == 12
    assert svg(data).count("<circle") == 4
    assert "5.0 s for the summary" in row("inline", runs()["inline"].turns[2])
    assert "TRANSFORM TURN" in row("lookahead", runs()["lookahead"].turns[2])
    assert "<svg" in page(data)
    json.dumps(data)


def test_help_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Help says what the command does; wrong arguments are answered in the caller's words."""
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    assert "--path DIR" in capsys.readouterr().out
    for argv, said in (
        (["demo", "--path", str(tmp_path / "none")], "there is no such folder"),
        (["demo", "--turns", "1"], "--turns 1: expected at least 2"),
        (["demo", "--json", str(tmp_path / "no" / "x.json")], "does not exist"),
    ):
        assert main(argv) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--turns", "many"])
    assert stop.value.code == 2


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_quick_demo_on_the_embedded_engine(tmp_path: Path) -> None:
    """Both modes rewrite their context; with lookahead no turn waits for a summary. Timing is not asserted."""
    file, shown = tmp_path / "demo.json", tmp_path / "demo.html"
    done = subprocess.run(
        [sys.executable, "-m", "smoothctx", "demo", "--quick", "--json", str(file), "--report", str(shown)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(file.read_text())
    inline, ahead = data["modes"]["inline"], data["modes"]["lookahead"]
    assert inline["transform_turns"]["n"] >= 1 and inline["waited_ms"] > 0
    assert inline["transform_turns"]["n"] + inline["ordinary_turns"]["n"] == data["settings"]["turns"]
    assert ahead["transform_turns"]["n"] >= 1
    assert data["lookahead"]["started"] >= data["lookahead"]["committed"] >= 1
    assert inline["transform_turns"]["p95_ms"] is None
    assert shown.exists() and "TRANSFORM TURN" in done.stdout
    # The summariser extended the agent's own cache: most of its input was cached, as the server reported it.
    assert data["lookahead"]["transform_tokens"] > 0


@pytest.mark.engine
def test_interrupt_ends_cleanly(tmp_path: Path) -> None:
    """Ctrl-C: exit code 130, one line, no traceback, no process left."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "smoothctx", "demo", "--quick"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "what happened" in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
