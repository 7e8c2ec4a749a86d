"""The events of a smoothctx runtime, as JSON lines: are rewrites visible, and what do they do to TTFT?"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .findings import Finding, seconds

_REWRITES = frozenset({"view.committed", "fallback.applied", "view.salvaged", "lookahead.committed"})
_CACHED = re.compile(r"\bcached_tokens=(\d+)")
_INPUT = re.compile(r"\binput_tokens=(\d+)")
_HOW = (
    "write every event as one JSON line, Runtime(on_event=lambda e: file.write(json.dumps(dataclasses.asdict(e), "
    "default=str) + '\\n')), make each model call inside session.foreground() with call.first_token(), and give the "
    "file with --events"
)


@dataclass(slots=True)
class Log:
    """What a file of events says."""

    lines: int = 0
    unreadable: int = 0
    rewrites: int = 0
    #: seconds to the first token: of turns that follow a rewrite of their session, and of the others
    rewritten_s: list[float] = field(default_factory=list)
    ordinary_s: list[float] = field(default_factory=list)
    discards: Counter[str] = field(default_factory=Counter)
    policies: set[str] = field(default_factory=set)
    #: what the transforms depend on, by their names
    localities: dict[str, str] = field(default_factory=dict)
    background_tokens: int = 0
    background_cached: int | None = None


def read(file: Path) -> Log:
    """Read a file of JSON lines; what is no event is counted and skipped.

    Raises:
        ConfigurationError: when it cannot be read.
    """
    log, fresh = Log(), set[str]()
    for event in _events(file, log):
        data = event.get("data")
        data = {**event, **data} if isinstance(data, dict) else event
        name, session = str(event.get("name") or event.get("event") or ""), str(event.get("session") or "")
        if name in _REWRITES:
            log.rewrites += name != "lookahead.committed"  # it comes with a view.committed
            fresh.add(session)
        elif name == "lookahead.discarded":
            log.discards[str(data.get("reason"))] += 1
        elif name == "usage":
            _background(log, data.get("usage"))
        if isinstance(data.get("discard"), str):
            log.policies.add(data["discard"])
        if isinstance(data.get("locality"), str):
            log.localities[str(data.get("transform") or "transform")] = data["locality"]
        ttft = _ttft(data) if "." not in name else None  # of admission.* it is what the load was, of no turn
        if ttft is not None:
            told = data.get("rewritten")  # by the session itself; else it is the first one since a rewrite
            rewritten = told if isinstance(told, bool) else session in fresh
            (log.rewritten_s if rewritten else log.ordinary_s).append(ttft)
            fresh.discard(session)
    return log


def _events(file: Path, log: Log) -> Iterator[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            for line in opened:
                if not line.strip():
                    continue
                log.lines += 1
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    event = None
                if isinstance(event, dict):
                    yield event
                else:
                    log.unreadable += 1
    except OSError as error:
        raise ConfigurationError(f"--events {file}: {error.strerror or error}") from None


def _ttft(data: Mapping[str, Any]) -> float | None:
    """What the user waited for the first token, the turn's own wait for a rewrite included, where it is told."""
    for key, unit in (("ttft_s", 1.0), ("ttft_ms", 0.001)):
        value = _time(data.get(key))
        if value is not None:
            return value * unit + (_time(data.get("waited_s")) or 0.0)
    return None


def _time(value: Any) -> float | None:
    sure = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e7
    return float(value) if sure else None


def _background(log: Log, usage: Any) -> None:
    """Add up background calls; a log handler may have written the usage as an object or as its repr."""
    if isinstance(usage, str):
        tokens, cached = _INPUT.search(usage), _CACHED.search(usage)
        usage = {
            "input_tokens": int(tokens.group(1)) if tokens else 0,
            "cached_tokens": int(cached.group(1)) if cached else None,
        }
    if isinstance(usage, dict) and isinstance(usage.get("input_tokens"), int):
        if isinstance(usage.get("cached_tokens"), int):
            log.background_tokens += usage["input_tokens"]
            log.background_cached = (log.background_cached or 0) + usage["cached_tokens"]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def check(log: Log | None) -> list[Finding]:
    """The questions that only a runtime's own events answer; without them, what to do about each."""
    if log is None:
        return [
            Finding(name="transform points", status="unknown", found="no events were given", advice=_HOW),
            _discard(Log()),
            _aligned(Log()),
        ]
    return [_points(log), _split(log), _discard(log), _aligned(log)]


def _points(log: Log) -> Finding:
    name, junk = "transform points", f"; {log.unreadable} of {log.lines} lines are no JSON" if log.unreadable else ""
    if log.rewrites:
        return Finding(name=name, status="ok", found=f"{log.rewrites} rewrites are logged{junk}")
    return Finding(name=name, status="bad", found=f"no rewrite among {log.lines} lines{junk}", advice=_HOW)


def _split(log: Log) -> Finding:
    name = "TTFT by turn"
    if not log.rewritten_s or not log.ordinary_s:
        return Finding(
            name=name,
            status="unknown",
            found=f"TTFT of {len(log.rewritten_s)} rewritten and {len(log.ordinary_s)} ordinary turns: not enough",
            advice="make every model call inside session.foreground() and say call.first_token(), or log its TTFT into "
            "the same file ({'session': ..., 'ttft_s': ...}): the mean hides the rewritten turns",
        )
    figures = {
        kind: {"turns": len(values), "p50_s": percentile(values, 0.5), "p95_s": percentile(values, 0.95)}
        for kind, values in (("rewritten", log.rewritten_s), ("ordinary", log.ordinary_s))
    }
    slow, usual = figures["rewritten"], figures["ordinary"]
    spike = slow["p95_s"] > 1.2 * usual["p95_s"]
    return Finding(
        name=name,
        status="warn" if spike else "ok",
        found=f"rewritten turns ({slow['turns']}): p50 {seconds(slow['p50_s'])}, p95 {seconds(slow['p95_s'])}; "
        f"ordinary ones ({usual['turns']}): p50 {seconds(usual['p50_s'])}, p95 {seconds(usual['p95_s'])}",
        advice="rewritten turns are slower: start earlier (a lower trigger), and let the engine be preloaded "
        "(Policy(preload_kv=True))"
        if spike
        else "",
        effect_s=slow["p95_s"] - usual["p95_s"] if spike else None,
        data=figures,
    )


def _discard(log: Log) -> Finding:
    name = "discard policy"
    reasons = ", ".join(f"{reason} {count}" for reason, count in log.discards.most_common())
    found = f"discarded: {reasons}" if reasons else "nothing was discarded" if log.lines else "no events were given"
    if log.policies:
        return Finding(name=name, status="ok", found=f"{', '.join(sorted(log.policies))}; {found}")
    return Finding(
        name=name,
        status="unknown",
        found=found,
        advice="say what becomes of a lookahead whose branch died: Policy(discard=Salvage(ttl=...)) keeps it in case "
        "the branch comes back (the default), Immediate() frees its slot and tokens at once",
    )


def _aligned(log: Log) -> Finding:
    name = "summary prompt"
    local = ", ".join(f"{transform} is {locality}-local" for transform, locality in sorted(log.localities.items()))
    if log.background_cached is None or not log.background_tokens:
        return Finding(
            name=name,
            status="unknown",
            found="; ".join(filter(None, (local, "no background call reported cached tokens"))),
            advice="let the summariser extend the agent's own prefix: Summarize(engine, layout='aligned') with "
            "session(engine=the same, request=the agent's constant options)",
        )
    share = log.background_cached / log.background_tokens
    good = share >= 0.5
    return Finding(
        name=name,
        status="ok" if good else "warn",
        found="; ".join(
            filter(
                None,
                (local, f"{share:.0%} of the background calls' {log.background_tokens:,} prompt tokens were cached"),
            )
        ),
        advice=""
        if good
        else "the summariser hardly reuses the agent's prefix: give it the agent's engine and request options, and "
        "layout='aligned'; its prompt must depend on nothing after its block",
        data={"cached_share": share},
    )
