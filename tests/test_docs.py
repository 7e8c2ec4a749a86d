"""Every Python snippet of the README and the docs runs, and so do the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets() -> list[object]:
    """One parameter per fence; those on the embedded engine carry its mark."""
    found: list[object] = []
    for page in PAGES:
        for k, code in enumerate(FENCE.findall(page.read_text())):
            if "# needs-ag2" in code:
                continue  # another environment: tests/ag2 and tests/ag2_classic run these
            marks = [pytest.mark.engine] if "# needs-engine" in code else []
            found.append(pytest.param(code, id=f"{page.name}-{k + 1}", marks=marks))
    return found


def run(code: str, cwd: Path) -> str:
    """Run Python code as a script of its own, warnings being errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("code", snippets())
def test_snippet_runs_and_prints(code: str, tmp_path: Path) -> None:
    """It runs on its own, without a warning, and shows something."""
    assert run(code, tmp_path).strip()


def test_readme_snippet_rewrites_without_waiting(tmp_path: Path) -> None:
    """The first snippet shows what it claims: far fewer messages sent than held, no turn waited."""
    code = FENCE.findall((ROOT / "README.md").read_text())[0]
    lines = run(code, tmp_path).strip().splitlines()
    held, sent, rewrites = map(int, re.findall(r"\d+", lines[0]))
    assert held == 201 and sent < held / 2 and rewrites == len(lines) - 1 >= 2
    assert all(line.startswith("ready") and "waited 0.0 s" in line for line in lines[1:])


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    """Each example runs as a script."""
    assert run(example.read_text(), tmp_path).strip()


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link names a file that is there."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
