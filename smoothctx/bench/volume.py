"""``smoothctx bench volume``: how well block size and detail control what a compaction keeps, and what it takes.

A cell is one compaction of the same history: with one block size and one detail, or as one sequential summary of as
many tokens as the blocks came to. Every cell is written down as soon as it is measured; with the same file a run
that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from ..codec import OpenAIMessages
from ..demo.chunks import chunks
from ..engines import EmbeddedEngine, OpenAIEngine, find_weights
from ..errors import ConfigurationError, SmoothctxError
from ..outputs import Output, check_file
from ..tokens import count_text
from ..transforms.base import TransformRequest
from ..transforms.parallel import ParallelSummarize
from ..transforms.parallel_block import MIN_SUMMARY
from ..transforms.prompts_blocks import DETAILS
from ..transforms.summarize import Summarize
from . import given
from .recorder import Recorder
from .volume_figures import row, summary, table, whole
from .volume_simulated import Rates, measure_rates, with_simulation

CODEC = OpenAIMessages()
#: tokens of one tool result in the measured history
CHUNK_TOKENS = 400
_CUT = frozenset({"length", "max_tokens"})


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. Sizes in tokens; another of these makes cells that cannot be compared."""

    tokens: int = 12_000
    blocks: tuple[int, ...] = (1000, 2000, 4000)
    details: tuple[str, ...] = tuple(DETAILS)
    runs: int = 3
    workers: int = 4
    max_tokens: int = 400
    temperature: float = 0.7


QUICK = Settings(
    tokens=1600, blocks=(400, 800), details=("concise", "very_detailed"), runs=1, workers=2, max_tokens=120
)


async def history(folder: Path, tokens: int) -> list[dict[str, Any]]:
    """An agent that read through a folder: about ``tokens`` tokens (estimated) in calls and their results.

    Raises:
        SmoothctxError: there is not enough readable text.
    """

    async def count(text: str) -> int:
        return count_text(text)

    turns = -(-tokens // CHUNK_TOKENS)
    found = await chunks(folder, turns=turns, tokens=CHUNK_TOKENS - 40, count=count)
    if len(found) < turns:
        raise SmoothctxError(f"--path {folder}: not enough readable text there for {tokens} tokens")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read the sources and tell me how they work."}]
    for k, chunk in enumerate(found):
        arguments = json.dumps({"file": chunk.file, "part": chunk.part})
        call = {"id": f"c{k}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{k}", "content": chunk.text})
    return messages


async def measure(
    engine: Any,
    messages: Sequence[dict[str, Any]],
    settings: Settings,
    cells: dict[str, dict[str, Any]],
    *,
    done: Callable[[], None],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Measure every cell that is not there yet; ``done`` is called after each one. Where blocks stayed raw there is no
    sequential summary of as many tokens to compare with."""
    for run in range(settings.runs):
        for size in settings.blocks:
            for detail in settings.details:
                name = f"{size}/{detail}/{run}"
                if name not in cells:
                    cells[name] = await _parallel(engine, messages, settings, size, detail, run, clock)
                    say(row(cells[name]))
                    done()
                matched = f"sequential/{name}"
                if matched not in cells and whole(cells[name]):
                    cells[matched] = await _sequential(engine, messages, settings, cells[name], clock)
                    say(row(cells[matched]))
                    done()


async def _parallel(
    engine: Any,
    messages: Sequence[dict[str, Any]],
    settings: Settings,
    size: int,
    detail: str,
    run: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    # No seed: each run samples by itself, and vLLM on CPU (0.32.0) dies of a seed where a prompt comes in chunks.
    model = Recorder(engine, temperature=settings.temperature)
    transform = ParallelSummarize(
        model,
        block_tokens=size,
        detail=detail,
        workers=settings.workers,
        max_tokens=settings.max_tokens,
        facts=False,
        fixed_tokens=True,  # what ends at the cap is counted, not asked for again
    )
    about = {"kind": "parallel", "block_tokens": size, "detail": detail, "run": run}
    return await _timed(engine, transform, model, messages, about, clock)


async def _sequential(
    engine: Any,
    messages: Sequence[dict[str, Any]],
    settings: Settings,
    of: Mapping[str, Any],
    clock: Callable[[], float],
) -> dict[str, Any]:
    """One summary of as many tokens as the blocks had: it may not end before."""
    wanted = max(16, int(of["output_tokens"]))
    run = int(of["run"])
    model = Recorder(engine, temperature=settings.temperature, ignore_eos=True)
    transform = Summarize(model, max_tokens=wanted, facts=False, fixed_tokens=True)
    about = {"kind": "sequential", "block_tokens": of["block_tokens"], "detail": of["detail"], "run": run}
    return await _timed(engine, transform, model, messages, about, clock)


async def _timed(
    engine: Any,
    transform: Any,
    model: Recorder,
    messages: Sequence[dict[str, Any]],
    about: dict[str, Any],
    clock: Callable[[], float],
) -> dict[str, Any]:
    # A conversation of its own for each cell, as the agent left it: its prefix is cached, and no other cell's is.
    own = {"role": "system", "content": f"You are an agent. Conversation {'/'.join(map(str, about.values()))}."}
    request = TransformRequest(messages=list(messages), before=[own], codec=CODEC)
    started = clock()
    error, texts, tokens, calls, raw = None, [], 0, 0, 0
    try:
        await engine.prefill([own, *messages])
        started = clock()
        rewrite = await transform.apply(request)
    except SmoothctxError as failed:  # a model that cannot do it is a figure too
        error = f"{type(failed).__name__}: {failed}"
    else:
        texts = [t for t in map(CODEC.summary_text, rewrite.messages) if t is not None]
        tokens, calls, raw = rewrite.usage.output_tokens, rewrite.usage.calls, len(rewrite.messages) - len(texts)
    wall = clock() - started
    return {
        **about,
        "blocks": len(texts),
        "raw_messages": raw,
        "raw_because": model.failed[-1] if raw and model.failed else None,
        "output_tokens": tokens,
        "calls": calls,
        "ended_by_cap": sum(end in _CUT for end in model.ends),
        "wall_s": round(wall, 3),
        "tokens_per_s": round(tokens / wall, 2) if wall > 0 else None,
        "texts": texts,
        "error": error,
    }


# -- the command ----------------------------------------------------------------------------------------------------


def add_parser(kinds: Any) -> None:
    """Add ``bench volume``."""
    parser = kinds.add_parser(
        "volume",
        help="how block size and detail control what a parallel compaction keeps, and its wall time",
        description=(
            "Compacts one history with every block size and detail, several times, and as one sequential summary of "
            "as many tokens. On the embedded engine, or on any OpenAI-compatible server."
        ),
    )
    given.add_engine(parser)
    parser.add_argument("--path", metavar="DIR", type=Path, help="what the agent has read; default: these sources")
    parser.add_argument("--tokens", type=int, metavar="N", help="size of the history (default 12000)")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="block sizes (default 1000 2000 4000)")
    parser.add_argument("--details", nargs="+", choices=list(DETAILS), metavar="DETAIL", help="default: all four")
    parser.add_argument("--runs", type=int, metavar="N", help="times that each cell is measured (default 3)")
    parser.add_argument("--workers", type=int, metavar="N", help="blocks at once (default 4)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="cap of each summary (default 400)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of sampling (default 0.7); none where it is refused"
    )
    parser.add_argument(
        "--rates", action="store_true", help="also measure the engine's rates, and what a simulation of them gains"
    )
    parser.add_argument("--quick", action="store_true", help="a few cells, to see that it works")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every cell; an interrupted run goes on from it"
    )
    parser.set_defaults(run=command)


def command(options: argparse.Namespace) -> int:
    """Run it. Returns the exit code."""
    settings = _settings(options)
    given.check_engine(options)
    folder = given.folder(options)
    check_file("--json", options.json)
    out = Output("--json", options.json)
    data, rates = anyio.run(_run, options, settings, folder, out)
    if rates is not None:
        data["rates"] = asdict(rates)
        data["figures"] = with_simulation(data["figures"], rates)
    print("\n" + table(data["figures"]))
    out.write(json.dumps(data, indent=1) + "\n")
    return max(out.close("figures"), 0 if data["figures"]["rows"] else 1)


def _settings(options: argparse.Namespace) -> Settings:
    own = asdict(QUICK if options.quick else Settings())
    for name in own:
        given = getattr(options, name)
        if given is not None:
            own[name] = tuple(dict.fromkeys(given)) if isinstance(given, list) else given
    for name in ("tokens", "runs", "workers", "max_tokens"):
        if own[name] < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} {own[name]}: expected at least 1")
    least = 2 * MIN_SUMMARY
    if small := [size for size in own["blocks"] if size < least]:
        raise ConfigurationError(f"--blocks {small[0]}: expected at least {least}")
    if not 0 <= own["temperature"] <= 2:
        raise ConfigurationError(f"--temperature {own['temperature']}: expected a number between 0 and 2")
    return replace(Settings(), **own)


async def _run(
    options: argparse.Namespace, settings: Settings, folder: Path, out: Output
) -> tuple[dict[str, Any], Rates | None]:
    """Everything for the file, and the rates where they are wanted."""
    messages = await history(folder, settings.tokens)
    async with _engine(options, settings) as engine:
        about = {"engine": engine.identity, "settings": asdict(settings), "history": _digest(messages)}
        cells = await anyio.to_thread.run_sync(_read, options.json, about)
        if cells:
            print(f"{len(cells)} cells are there already", flush=True)

        def data() -> dict[str, Any]:
            return {**about, "cells": cells, "figures": summary(cells, settings.blocks, settings.details)}

        def done() -> None:
            out.write(json.dumps(data(), indent=1) + "\n")

        rates = await measure_rates(engine, workers=settings.workers) if options.rates else None
        await measure(engine, messages, settings, cells, done=done, say=lambda line: print(line, flush=True))
    return data(), rates


@asynccontextmanager
async def _engine(options: argparse.Namespace, settings: Settings) -> AsyncGenerator[Any]:
    if options.url:
        async with OpenAIEngine(options.url, options.name, api_key=options.api_key) as server:
            yield server
        return
    weights = options.model or await anyio.to_thread.run_sync(find_weights)
    # A model's own tokenizer makes more of source text than is estimated.
    window = 2 * settings.tokens + 2 * settings.max_tokens + 2048
    print(f"starting the embedded engine with {Path(weights).name} ...", flush=True)
    async with EmbeddedEngine(weights, context_window=window, slots=settings.workers) as engine:
        yield engine


def _digest(messages: Sequence[dict[str, Any]]) -> str:
    from ..digest import chain

    return chain(CODEC, messages)[-1].hex()


def _read(file: Path | None, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The cells that an interrupted run left, if it measured the same. Those that failed are measured again, and those
    where blocks stayed raw.

    Raises:
        ConfigurationError: the file is of another measurement, or no such file at all.
    """
    if file is None or not file.exists():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        same = all(data[name] == json.loads(json.dumps(value)) for name, value in about.items())
        cells: dict[str, dict[str, Any]] = {name: {"error": None, **cell} for name, cell in data["cells"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--json {file}: it is not a file of this benchmark ({error})") from error
    if not same:
        raise ConfigurationError(f"--json {file}: it holds another measurement; name another file, or remove it")
    kept = {name: cell for name, cell in cells.items() if whole(cell)}
    # a sequential summary is as long as the blocks were: it goes with them
    return {name: cell for name, cell in kept.items() if name.removeprefix("sequential/") in kept}
