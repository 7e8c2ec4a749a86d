"""``smoothctx demo``: runs both modes and shows the difference."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from ..engines import EmbeddedEngine, find_weights
from ..errors import ConfigurationError, SmoothctxError
from ..outputs import Output, check_file
from . import report
from .agent import ASK, MODES, Run, Settings, Turn, run
from .chunks import Chunk, chunks

QUICK = Settings(turns=11, context_window=3584, tool_s=0.5)


def add_parser(commands: Any) -> None:
    """Add the ``demo`` command."""
    parser = commands.add_parser(
        "demo",
        help="watch an agent work with in-line rewrites and with lookahead, on a real engine",
        description=(
            "An agent reads through the files of a folder, chunk by chunk, and writes a short note on each. Its "
            "context crosses the limits several times. The same turns run twice on the embedded engine: once with "
            "in-line rewrites, once with lookahead. Nothing leaves this machine."
        ),
    )
    parser.add_argument(
        "--path", metavar="DIR", type=Path, help="folder (or file) to read; default: smoothctx's own sources"
    )
    parser.add_argument("--turns", type=int, metavar="N", help="turns in each mode (default 28; 11 with --quick)")
    parser.add_argument(
        "--quick", action="store_true", help="about a minute: fewer turns, a smaller window, no percentiles"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured as JSON")
    parser.add_argument("--report", metavar="FILE.html", type=Path, help="write a page with the plot and every turn")
    parser.add_argument(
        "--model", metavar="FILE.gguf", type=Path, help="weights; default: Gemma 3 270M (see the README)"
    )
    parser.set_defaults(run=command)


def command(options: argparse.Namespace) -> int:
    """Run it. Returns the exit code."""
    settings = QUICK if options.quick else Settings()
    if options.turns is not None:
        if options.turns < 2:
            raise ConfigurationError(f"--turns {options.turns}: expected at least 2")
        settings = replace(settings, turns=options.turns)
    folder = options.path or Path(__file__).resolve().parent.parent
    if not folder.exists():
        raise ConfigurationError(f"--path {folder}: there is no such folder")
    check_file("--json", options.json)
    check_file("--report", options.report)
    data = anyio.run(_measure, folder, settings, options)
    print(f"\n{report.plot(data)}\n\n{report.summary(data)}")
    figures, page = Output("--json", options.json), Output("--report", options.report)
    figures.write(json.dumps(data, indent=2) + "\n")
    page.write(report.page(data))
    return max(figures.close("figures"), page.close("report"))


async def _measure(folder: Path, settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    weights = options.model or await anyio.to_thread.run_sync(find_weights)
    print(f"starting the embedded engine with {Path(weights).name} ...", flush=True)
    async with EmbeddedEngine(weights, context_window=settings.context_window, slots=2) as engine:
        found = await _chunks(folder, settings, engine)
        print(
            f"{len(found)} turns of about {settings.chunk_tokens} tokens from {folder}; window "
            f"{settings.context_window} tokens, notes {settings.note_tokens}, summaries {settings.summary_tokens}, "
            f"tool time {settings.tool_s} s, the same in both modes\n\n{report.header()}",
            flush=True,
        )
        runs: dict[str, Run] = {}
        load = os.getloadavg()[0]
        started = time.perf_counter()
        for mode in MODES:
            runs[mode] = await run(mode, engine, found, settings, partial(_show, mode))
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "model": Path(weights).name,
            "measured_s": round(time.perf_counter() - started, 1),
        }
    return report.as_json(runs, settings, quick=options.quick, machine=machine)


def _show(mode: str, turn: Turn) -> None:
    print(report.row(mode, turn), flush=True)


async def _chunks(folder: Path, settings: Settings, engine: EmbeddedEngine) -> list[Chunk]:
    """The turns' texts; the instruction around a chunk counts as part of its turn."""
    frame = await engine.count_tokens(ASK.format(file="engines/example.py", text="")) + 8
    found = await chunks(folder, turns=settings.turns, tokens=settings.chunk_tokens - frame, count=engine.count_tokens)
    if len(found) < 2:
        raise SmoothctxError(
            f"--path {folder}: not enough readable text there for two turns of {settings.chunk_tokens} tokens"
        )
    if len(found) < settings.turns:
        print(f"only {len(found)} turns: {folder} holds no more text", file=sys.stderr)
    return found
