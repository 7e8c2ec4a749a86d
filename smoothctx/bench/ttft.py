"""``smoothctx bench ttft``: time to first token at the turns that rewrite their context, in line and with lookahead.

A cell is some sessions at once, in one mode; the cells of both modes take turns. Every cell is written down as soon
as it is measured, with every turn; with the same file a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import anyio

from .. import __version__
from ..demo.chunks import Count
from ..engines import find_weights
from ..engines.http import without_user
from ..engines.preload import STRATEGIES as PRELOADS
from ..errors import ConfigurationError, EngineOverloaded, SmoothctxError
from ..outputs import Output, check_file, check_folder
from ..patience import patiently
from . import given, ttft_file, ttft_report
from .ttft_agent import Bench, Pools, Turn
from .ttft_engine import Calibration, calibrate, embedded, server
from .ttft_plan import (
    ABORT,
    DEFAULT_PLAN,
    GROWING,
    SATURATED,
    STRATEGIES,
    Cell,
    Settings,
    cells,
    pool,
    read_plan,
    tool_time,
    window,
)
from .ttft_reached import best, claims
from .ttft_run import measure

Plan = Mapping[str, Mapping[int, int]]
Say = Callable[[str], None]
#: how often a cell is tried before the run ends with the engine's error
_TRIES = 2


def add_parser(kinds: Any) -> None:
    """Add ``bench ttft``."""
    parser = kinds.add_parser(
        "ttft",
        help="time to first token at turns that rewrite their context, in line and with lookahead",
        description=(
            "Agents read through a folder; their context is rewritten every few turns, in line or with lookahead. "
            "On the embedded engine, or on any OpenAI-compatible server. An interrupted run goes on from its file."
        ),
    )
    given.add_engine(parser)
    parser.add_argument("--path", metavar="DIR", type=Path, help="what the agents read; default: these sources")
    parser.add_argument("--plan", metavar="PLAN", help="STRATEGY:CONCURRENCY:SESSIONS,... in place of the next three")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, metavar="NAME", help="default: all four")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N", help="sessions at once (default: the plan's)"
    )
    parser.add_argument("--sessions", type=int, metavar="N", help="sessions of each strategy, mode and concurrency")
    parser.add_argument(
        "--saturated", type=int, nargs="?", const=4, metavar="N", help="also with the engine saturated by N sessions"
    )
    for name, kind, what in (
        ("turns", int, "turns of a session"),
        ("turn_tokens", int, "tokens that a turn adds"),
        ("reply_tokens", int, "tokens of an answer"),
        ("summary_tokens", int, "tokens of a summary"),
        ("window", int, "the policy's context window in tokens"),
        ("long", int, "how many times as many tokens in turns 9, 18, 27"),
    ):
        default = getattr(Settings(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=f"{what} (default {default})")
    parser.add_argument(
        "--tool", dest="tool_s", type=float, metavar="S", help="seconds between turns; default: measured"
    )
    parser.add_argument(
        "--preload",
        choices=PRELOADS,
        metavar="HOW",
        help=f"how views are preloaded ({', '.join(PRELOADS)}); default: the engine's",
    )
    parser.add_argument("--report", nargs="+", metavar="FILE", type=Path, help="measure nothing: report these files")
    parser.add_argument("--figures", metavar="FILE", type=Path, help="write every figure of the report as JSON")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write the plots as SVG files")
    parser.add_argument("--verbose", action="store_true", help="a line for each turn")
    parser.add_argument("--json", metavar="FILE", type=Path, help="every turn; an interrupted run goes on from it")
    parser.set_defaults(run=command)


def command(options: argparse.Namespace) -> int:
    """Run it. Returns the exit code."""
    check_file("--json", options.json)
    check_file("--figures", options.figures)
    check_folder("--plots", options.plots)
    measured = [*(options.report or ()), *([] if options.json is None else [options.json])]
    if options.figures is not None and options.figures.resolve() in [file.resolve() for file in measured]:
        raise ConfigurationError(f"--figures {options.figures}: that is the file of the turns; name another one")
    if options.report is not None:
        return _report({name: ttft_file.read(file) for name, file in _names(options.report).items()}, options)
    settings, plan = _settings(options), _plan(options)
    given.check_engine(options)
    folder = given.folder(options)
    out = Output("--json", options.json)
    data = anyio.run(_run, options, settings, plan, folder, out)
    reported = _report({"ttft" if options.json is None else options.json.stem: data}, options)
    return max(reported, out.close("every turn"))


def _names(files: Sequence[Path]) -> dict[str, Path]:
    """A name for each file: its stem, with as many of its folders before it as tell all of them apart."""
    places = list(dict.fromkeys(file.resolve() for file in files))
    for depth in range(max(len(place.parts) for place in places) - 1):
        names = ["-".join([*place.parts[1:-1], place.stem][-1 - depth :]) for place in places]
        if len(set(names)) == len(names):
            return dict(zip(names, places, strict=True))
    return {f"{k}-{place.stem}": place for k, place in enumerate(places, 1)}  # t.json and t.txt in one folder


def _report(files: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> int:
    """Tables of each file, what came of all of them together, and the files that were asked for. Returns 1 where one of
    these could not be written."""
    for name, data in files.items():
        print(f"\n{name}: {ttft_report.text(data)}" if len(files) > 1 else f"\n{ttft_report.text(data)}")
    if len(files) > 1:
        print("\n" + ttft_report.reached(best({name: claims(data) for name, data in files.items()})))
    figures = Output("--figures", options.figures)
    if options.figures is not None:
        made = {name: ttft_report.figures(data) for name, data in files.items()}
        figures.write(json.dumps(made, indent=1) + "\n")
    failed = figures.close("figures")
    if options.plots is not None:
        for name, data in files.items():
            for file, picture in ttft_report.pictures(data, name).items():
                plot = Output("--plots", options.plots / file)
                plot.write(picture)
                failed |= plot.close("plot")
    return failed


def _settings(options: argparse.Namespace) -> Settings:
    given = {f.name: getattr(options, f.name, None) for f in fields(Settings)}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    settings.check()
    return settings


def _plan(options: argparse.Namespace) -> Plan:
    levels, sessions = options.concurrency or [], options.sessions
    for name, values in (("concurrency", levels), ("sessions", [sessions]), ("saturated", [options.saturated])):
        if any(v is not None and v < 1 for v in values):
            raise ConfigurationError(f"--{name} {' '.join(map(str, values))}: expected at least 1")
    plan: dict[str, dict[int, int]] = {}
    if options.plan is not None:
        if options.strategies or levels or sessions:
            raise ConfigurationError("--plan: stands for --strategies, --concurrency and --sessions; leave these out")
        plan = read_plan(options.plan)
    else:
        for strategy in options.strategies or STRATEGIES:
            own = DEFAULT_PLAN[strategy]
            plan[strategy] = {c: sessions or own.get(c, max(own.values())) for c in levels or own}
    if options.saturated is not None:
        plan.setdefault(SATURATED, {}).setdefault(options.saturated, 2 * options.saturated)
    return plan


async def _run(
    options: argparse.Namespace, settings: Settings, plan: Plan, folder: Path, out: Output
) -> dict[str, Any]:
    def say(line: str) -> None:
        print(line, flush=True)

    async with _engine(options, settings, plan, say) as engine:
        return await run(
            engine, settings, plan, folder, out=out, say=say, verbose=options.verbose, clock=time.perf_counter
        )


@asynccontextmanager
async def _engine(options: argparse.Namespace, settings: Settings, plan: Plan, say: Say) -> AsyncGenerator[Any]:
    if options.url:
        async with server(settings, options.url, options.name, options.api_key) as remote:
            found = await remote.probe()
            say(f"{without_user(options.url)}: {found.flavour} {found.version or ''}".rstrip())
            needed = max(int(0.85 * window(s, settings)) + settings.long * settings.turn_tokens for s in plan)
            if found.context_window is not None and found.context_window < needed:
                raise ConfigurationError(
                    f"--window {settings.window}: the server's context window of {found.context_window} tokens is too "
                    f"small for it; {needed} are needed"
                )
            yield remote
        return
    weights = options.model or await anyio.to_thread.run_sync(find_weights)
    # A session that works ahead has two slots, and a sub-agent as many.
    slots = max(c * (4 if strategy == "isolate" else 2) for strategy, levels in plan.items() for c in levels)
    say(f"starting the embedded engine with {Path(weights).name} ...")
    async with embedded(settings, model=weights, slots=max(4, slots)) as engine:
        yield engine


async def run(
    engine: Any,
    settings: Settings,
    plan: Plan,
    folder: Path,
    *,
    out: Output,
    say: Say,
    verbose: bool = False,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Measure every cell of the plan that the file of ``out`` does not hold yet; returns what it then holds, also where
    it could not be written.

    Raises:
        ConfigurationError: the file is of another measurement.
        EngineError: the engine failed twice in one cell, or stayed overloaded (see ``patiently``).
    """
    about = {"engine": engine.identity, "settings": asdict(settings), "texts": folder.name}
    data = ttft_file.go_on(out.file, about)
    count = _counter(engine, say)
    turns = await pool(folder, settings, count)
    small = [] if SATURATED not in plan else await pool(folder, settings, count, tokens=settings.saturated_turn_tokens)
    texts = ttft_file.digest(turns)
    if data is not None and out.file is not None and not ttft_file.check_texts(out.file, data, texts):
        say(f"{out.file} does not tell which texts were read (an older version wrote it); its cells are kept")
    if data is None:
        say("calibrating ...")
        calibration = await calibrate(engine, settings, turns[0].text + turns[1].text, clock=clock, say=say)
        data = {
            "format": ttft_file.FORMAT,
            **about,
            "texts_digest": texts,
            "version": __version__,
            "machine": {"cpus": os.cpu_count(), "machine": platform.machine()},
            "capabilities": _capabilities(engine),
            "calibration": calibration.as_json(),
            "cells": {},
        }
    calibration = Calibration(**data["calibration"])
    wanted = [c for c in cells(plan) if c.strategy != "offload" or calibration.tools]
    if len(wanted) < len(cells(plan)):
        say("offload is left out: the server's chat template takes no tool results")
    todo = [c for c in wanted if c.key not in data["cells"]]
    warming = ABORT if _gives_way(engine, settings) else GROWING
    tool_s = {(c.strategy, c.concurrency): _tool_s(data, settings, calibration, c, warming) for c in wanted}
    _tell(settings, calibration, tool_s, wanted, todo, say)

    def on_turn(cell: Cell, name: str, turn: Turn) -> None:
        if verbose:
            say(_row(cell, name, turn))

    bench = Bench(engine, settings, calibration, clock, on_turn)
    begun, expected = clock(), sum(_expected_s(settings, calibration, c, tool_s) for c in todo)
    spent = 0.0
    for k, cell in enumerate(todo):
        result = await _tried(bench, cell, Pools(turns, small), tool_s[cell.strategy, cell.concurrency], say)
        data["cells"][cell.key] = result
        ttft_file.write(out, data)  # nothing else runs between cells
        spent += _expected_s(settings, calibration, cell, tool_s)
        left = (clock() - begun) / spent * (expected - spent)
        say(f"{k + 1:>3}/{len(todo)}  {_line(cell, result)}  {left / 60:.0f} min left")
    return data


async def _tried(bench: Bench, cell: Cell, pools: Pools, tool_s: float, say: Say) -> dict[str, Any]:
    """A cell in which the engine failed is dropped whole, and measured once more; where the engine was overloaded or
    limits requests, when it wishes."""
    load = os.getloadavg()[0]

    async def once() -> dict[str, Any]:
        try:
            return await measure(bench, cell, pools, tool_s=tool_s)
        except ExceptionGroup as group:
            raise _first(group) from group

    for attempt in range(1, _TRIES + 1):
        try:
            result, _ = await patiently(once, lambda line: say(f"{cell.key}: {line}"))
        except SmoothctxError as error:
            if attempt == _TRIES or isinstance(error, EngineOverloaded):
                raise
            say(f"{cell.key}: {error}; once more")
        else:
            return {**result, "load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
    raise AssertionError("unreachable")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of several sessions'."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _counter(engine: Any, say: Say) -> Count:
    """The engine's own tokenizer, where it tells; else an estimate."""
    known = getattr(engine, "capabilities", None)

    async def counted(text: str) -> int:
        found: int
        found, _ = await patiently(lambda: engine.count_tokens(text), say)
        return found

    async def estimate(text: str) -> int:
        return -(-len(text) // 4)

    return counted if known is not None and known.tokenize else estimate


def _capabilities(engine: Any) -> dict[str, Any]:
    known = getattr(engine, "capabilities", None)
    return {} if known is None else asdict(known)


def _gives_way(engine: Any, settings: Settings) -> bool:
    """Is a view preloaded by long requests that give way to turns, and not by growing prefixes?"""
    known = getattr(engine, "capabilities", None)
    flavour = None if known is None else known.flavour
    return (settings.preload or ("timed" if flavour == "llama.cpp" else "growing")) != "growing"


def _tool_s(data: Mapping[str, Any], settings: Settings, calibration: Calibration, cell: Cell, warming: float) -> float:
    """Seconds between two turns: what the file's cells of this kind had, else by the calibration."""
    if cell.strategy == SATURATED:
        return 0.0
    for there in data["cells"].values():
        if (there["strategy"], there["concurrency"]) == (cell.strategy, cell.concurrency):
            return float(there["tool_s"])
    rates = calibration.prefill, calibration.decode
    return tool_time(settings, cell.strategy, cell.concurrency, *rates, warming=warming)


def _expected_s(
    settings: Settings, calibration: Calibration, cell: Cell, tool_s: Mapping[tuple[str, int], float]
) -> float:
    turn = settings.turn_tokens / calibration.prefill + settings.reply_tokens / calibration.decode
    if cell.strategy == SATURATED:
        small = settings.saturated_turn_tokens / calibration.prefill + settings.reply_tokens / calibration.decode
        return settings.saturated_rounds * cell.concurrency * (6 * small + 0.6 * settings.window / calibration.prefill)
    waits = 0.0
    if cell.strategy == "summarise" and cell.mode == "inline":  # about every fifth turn, for the whole summary
        waits = settings.summary_tokens / calibration.decode / 5
    between = tool_s[cell.strategy, cell.concurrency]
    return settings.turns * (between + waits + turn * (1.3 if cell.mode == "lookahead" else 1.8))


def _tell(
    settings: Settings,
    calibration: Calibration,
    tool_s: Mapping[tuple[str, int], float],
    wanted: list[Cell],
    todo: list[Cell],
    say: Say,
) -> None:
    tools = ", ".join(f"{s:g} s for {name} at {c}" for (name, c), s in tool_s.items() if name != SATURATED)
    minutes = sum(_expected_s(settings, calibration, c, tool_s) for c in todo) / 60
    say(
        f"prefill {calibration.prefill:.0f} and decode {calibration.decode:.0f} tokens/s, a minimal request "
        f"{calibration.minimal_ms:.0f} ms; tool time {tools or 'none'} at once"
        + (f"; refused options: {', '.join(calibration.refused)}" if calibration.refused else "")
    )
    there = f", {len(wanted) - len(todo)} are there already" if len(todo) < len(wanted) else ""
    say(f"{len(wanted)} cells{there}; about {minutes:.0f} minutes")


def _row(cell: Cell, name: str, turn: Turn) -> str:
    cached = "-" if turn.cached_tokens is None else str(turn.cached_tokens)
    what = f"{turn.kind} {turn.how or 'rewrite'}" if turn.transform else turn.kind if turn.kind != "turn" else ""
    return (
        f"  {cell.strategy:>11} {cell.mode:>9} {name.rpartition('/')[2]:>2}  {turn.number:>3}  {turn.prompt_tokens:>6}"
        f"  {cached:>6}  {turn.ttft_ms:>8.0f} ms  {what}"
    )


def _line(cell: Cell, result: Mapping[str, Any]) -> str:
    turns = [t for s in result["sessions"] for t in s["turns"]]
    rewrites = [t["ttft_ms"] for t in turns if t["transform"]]
    mean = f"{sum(rewrites) / len(rewrites):.0f} ms" if rewrites else "-"
    return (
        f"{cell.strategy:>11} {cell.mode:>9}, {cell.concurrency} at once: {result['wall_s']:.0f} s, "
        f"{len(turns)} turns, {len(rewrites)} with a rewrite (mean TTFT {mean})"
    )
