"""One cell of ``bench ttft``: sessions that work at once, in one mode, and everything that is kept of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import anyio

from ..events import Event
from ..runtime import Runtime
from .ttft_agent import Agent, Bench, Line, Pools, Turn
from .ttft_engine import BackgroundCall
from .ttft_plan import SATURATED, Cell, session_name
from .ttft_saturated import Crowd


class _Lookaheads:
    """The life of every lookahead, from the events: when it started, was ready, was used, and why it was not."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.found: dict[tuple[str, Any], dict[str, Any]] = {}
        self.errors: list[str] = []

    def __call__(self, event: Event) -> None:
        if event.name == "error":
            self.errors.append(f"{event.data.get('where')}: {event.data.get('error')}")
        kind, _, what = event.name.partition(".")
        if kind != "lookahead" or "handle" not in event.data:
            return
        life = self.found.setdefault((event.session, event.data["handle"]), {"session": event.session})
        life.setdefault(f"{what}_s", round(event.time - self._started, 3))
        if "reason" in event.data:
            life["reason"] = str(event.data["reason"])


async def measure(bench: Bench, cell: Cell, pools: Pools, *, tool_s: float) -> dict[str, Any]:
    """Measure one cell, with ``tool_s`` seconds between turns. The result is what the file keeps of it.

    Raises:
        EngineError: when the engine fails in the middle of it.
    """
    if hasattr(bench.engine, "clear"):
        await bench.engine.clear()
    bench.engine.background.clear()
    started = bench.clock()
    lives = _Lookaheads(started)
    lines = [Line(session_name(cell, i), cell.batch * cell.concurrency + i) for i in range(cell.concurrency)]
    # In line nothing of ours stands in the way of a rewrite; the default is what users of lookahead have.
    several: dict[str, Any] = {"concurrency": max(2, cell.concurrency)} if cell.mode == "inline" else {}
    async with Runtime(clock=bench.clock, on_event=lives, **several) as runtime:
        async with anyio.create_task_group() as group:
            for place, line in enumerate(lines):
                kind = Crowd if cell.strategy == SATURATED else Agent
                group.start_soon(kind(bench, cell, runtime, line, place, started, tool_s).work, pools)
        ended = bench.clock()
        counters = runtime.counters
    calls = [_call(call, started) for call in bench.engine.background]
    return {
        **asdict(cell),
        "tool_s": tool_s,
        "wall_s": round(ended - started, 3),
        "sessions": [
            {
                "name": line.name,
                "number": line.number,
                "wall_s": round(line.wall_s, 3),
                "turns": [{**asdict(t), "beside": _beside(t, calls)} for t in line.turns],
            }
            for line in lines
        ],
        "lookaheads": list(lives.found.values()),
        "background": calls,
        "counters": asdict(counters),
        "errors": lives.errors[:100],
    }


def _call(call: BackgroundCall, started: float) -> dict[str, Any]:
    usage = call.usage
    return {
        "kind": call.kind,
        "start_s": round((call.end if call.start is None else call.start) - started, 4),
        "end_s": round(call.end - started, 4),
        "prompt_tokens": usage.input_tokens if usage is not None else None,
        "cached_tokens": usage.cached_tokens if usage is not None else None,
        "output_tokens": usage.output_tokens if usage is not None else None,
    }


def _beside(turn: Turn, calls: Sequence[Mapping[str, Any]]) -> bool:
    first = turn.at_s + turn.ttft_ms / 1000
    return any(c["start_s"] < first and c["end_s"] > turn.at_s for c in calls)
