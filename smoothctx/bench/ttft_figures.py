"""The figures of ``bench ttft``, from the turns that a file holds. Pure.

Times in milliseconds (``_ms``) or seconds (``_s``), sizes in tokens, rates as shares of one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..demo.report import percentile
from .ttft_plan import SATURATED

Turn = Mapping[str, Any]
Group = tuple[str, int]
#: why a lookahead ended that nobody decided against: its session was over
_OVER = frozenset({"session_closed", "shutdown"})
#: how near another turn's size must be to count as the same, and what is near in any case
_NEAR, _NEAR_TOKENS = 0.15, 24


@dataclass(frozen=True, slots=True)
class Arm:
    """Everything that was measured of one strategy at one concurrency in one mode, at this prefill rate."""

    strategy: str
    concurrency: int
    mode: str
    cells: Sequence[Mapping[str, Any]]
    prefill: float

    @property
    def sessions(self) -> list[Mapping[str, Any]]:
        """Its sessions, in the order of measuring."""
        return [s for cell in self.cells for s in cell["sessions"]]

    @property
    def turns(self) -> list[Turn]:
        """Its turns; the first one of a session is ordinary as well."""
        return [t for s in self.sessions for t in s["turns"] if t["kind"] != "opening"]

    @property
    def rewrites(self) -> list[Turn]:
        """The turns that are measured for their rewrite. Where sub-agents are, these are the hand-overs."""
        if self.strategy == "isolate":
            return [t for t in self.turns if t["kind"] == "handover"]
        return [t for t in self.turns if t["transform"]]

    @property
    def parent_rewrites(self) -> list[Turn]:
        """Where sub-agents are: the turns at which their parent's own context was rewritten. They are in no comparison,
        since the parent is kept small in the same way in both modes."""
        return [t for t in self.turns if t["kind"] == "parent" and t["transform"]]

    @property
    def ordinary(self) -> list[Turn]:
        """The turns without any rewrite."""
        return [t for t in self.turns if not t["transform"]]

    @property
    def lookaheads(self) -> list[Mapping[str, Any]]:
        """The lives of its lookaheads."""
        return [life for cell in self.cells for life in cell["lookaheads"]]

    def total(self, *path: str) -> int:
        """A counter, added up over the cells."""
        found = 0
        for cell in self.cells:
            value: Any = cell["counters"]
            for name in path:
                value = value[name]
            found += value or 0
        return found


def arms(data: Mapping[str, Any]) -> dict[tuple[str, int, str], Arm]:
    """The arms of a file, by strategy, concurrency and mode."""
    found: dict[tuple[str, int, str], list[Any]] = {}
    for cell in data["cells"].values():
        found.setdefault((cell["strategy"], cell["concurrency"], cell["mode"]), []).append(cell)
    prefill = data["calibration"]["prefill"]
    return {key: Arm(*key, cells, prefill) for key, cells in sorted(found.items())}


def pairs(data: Mapping[str, Any]) -> dict[Group, tuple[Arm, Arm]]:
    """In line and lookahead of each strategy and concurrency that has both."""
    known = arms(data)
    return {
        (strategy, concurrency): (arm, known[strategy, concurrency, "lookahead"])
        for (strategy, concurrency, mode), arm in known.items()
        if mode == "inline" and (strategy, concurrency, "lookahead") in known
    }


def saturated(data: Mapping[str, Any]) -> dict[int, tuple[Arm, Arm]]:
    """Without smoothctx and with it, by concurrency, where the engine was saturated."""
    known = arms(data)
    return {
        concurrency: (arm, known[SATURATED, concurrency, "lookahead"])
        for (strategy, concurrency, mode), arm in known.items()
        if mode == "off" and (SATURATED, concurrency, "lookahead") in known
    }


def ttfts(turns: Iterable[Turn]) -> list[float]:
    """Their times to first token, in milliseconds."""
    return [t["ttft_ms"] for t in turns]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Count, mean, percentiles and maximum; nothing but the count for none."""
    if not values:
        return {"n": 0, "mean_ms": None, "p50_ms": None, "p95_ms": None, "p99_ms": None, "max_ms": None}
    return {
        "n": len(values),
        "mean_ms": round(statistics.fmean(values), 1),
        "p50_ms": round(percentile(values, 0.50), 1),
        "p95_ms": round(percentile(values, 0.95), 1),
        "p99_ms": round(percentile(values, 0.99), 1),
        "max_ms": round(max(values), 1),
    }


def of_arm(arm: Arm) -> dict[str, Any]:
    """All figures of one arm."""
    sessions, turns = arm.sessions, arm.turns
    wall = sum(cell["wall_s"] for cell in arm.cells)
    gaps = [g for t in turns for g in t["gaps_ms"]]
    prompt = sum(t["prompt_tokens"] for t in turns)
    return {
        "strategy": arm.strategy,
        "concurrency": arm.concurrency,
        "mode": arm.mode,
        "sessions": len(sessions),
        "rewrites": spread(ttfts(arm.rewrites)),
        "ordinary": spread(ttfts(arm.ordinary)),
        "parent_rewrites": spread(ttfts(arm.parent_rewrites)) if arm.strategy == "isolate" else None,
        "all": spread(ttfts(turns)),
        "gaps": spread(gaps),
        "session_s": _mean([s["wall_s"] for s in sessions]),
        "turns_per_min": round(60 * len(turns) / wall, 2) if wall else None,
        "output_tokens_per_s": round(sum(t["output_tokens"] for t in turns) / wall, 2) if wall else None,
        "busy": round(sum(t["total_ms"] for t in turns) / 1000 / wall / arm.concurrency, 3) if wall else None,
        "prompt_tokens": prompt,
        "cached": _share([t["cached_tokens"] for t in turns], [t["prompt_tokens"] for t in turns]),
        "rewrites_cached": _share(
            [t["cached_tokens"] for t in arm.rewrites], [t["prompt_tokens"] for t in arm.rewrites]
        ),
        **_work(arm, prompt),
    }


def _work(arm: Arm, prompt: int) -> dict[str, Any]:
    """What the background did, and what came of it."""
    rewrites, ahead = arm.rewrites, arm.mode == "lookahead"
    hits = sum(t["how"] in ("ready", "salvaged") for t in rewrites)
    finished, used = finished_lookaheads(arm), used_lookaheads(arm)
    stale = [life for life in arm.lookaheads if "discarded_s" in life and life.get("reason") not in _OVER]
    summaries = [c for cell in arm.cells for c in cell["background"] if c["kind"] == "summary" and c["prompt_tokens"]]
    started = len(arm.lookaheads)
    reasons: dict[str, int] = {}
    for life in stale:
        reason = str(life.get("reason"))
        reasons[reason] = reasons.get(reason, 0) + 1
    transform = arm.total("usage", "input_tokens") + arm.total("usage", "output_tokens")
    warmed = arm.total("preload_usage", "input_tokens") - arm.total("preload_usage", "cached_tokens")
    evaluated = transform - arm.total("usage", "cached_tokens") + warmed + aborted_tokens(arm)
    return {
        "lookaheads": started,
        "committed": sum("committed_s" in life for life in arm.lookaheads),
        "failed": sum("failed_s" in life for life in arm.lookaheads),
        "stale": len(stale),
        "stale_by_reason": reasons,
        "hit_rate": _ratio(hits, len(rewrites)) if ahead else None,
        "late_rate": _ratio(len(rewrites) - hits, len(rewrites)) if ahead else None,
        "stale_rate": _ratio(len(stale), started),
        "use_rate": _ratio(used, finished),
        "waste_rate": _ratio(arm.total("wasted_tokens"), prompt),
        "transform_tokens": transform,
        "preload_tokens": warmed,
        "aborted_tokens": aborted_tokens(arm),
        "extra_rate": _ratio(evaluated, prompt),
        "summaries_cached": _share([c["cached_tokens"] for c in summaries], [c["prompt_tokens"] for c in summaries]),
    }


def aborted_tokens(arm: Arm) -> int:
    """Tokens that preload requests evaluated before they gave way to a turn: estimated by their time and the prefill
    rate, since no server reports any. At most this many: a request may have waited at the server."""
    seconds: float = sum(
        c["end_s"] - c["start_s"]
        for cell in arm.cells
        for c in cell["background"]
        if c["kind"] == "preload" and c["prompt_tokens"] is None
    )
    return round(seconds * arm.prefill)


def finished_lookaheads(arm: Arm) -> int:
    """Lookaheads that came to a result whose fate was decided before the session's end."""
    return sum(
        "ready_s" in life and ("committed_s" in life or life.get("reason") not in (None, *_OVER))
        for life in arm.lookaheads
    )


def used_lookaheads(arm: Arm) -> int:
    """Those of them that were committed."""
    return sum("ready_s" in life and "committed_s" in life for life in arm.lookaheads)


def excess_removed(inline: Arm, ahead: Arm) -> float | None:
    """(in line - lookahead) / (in line - ordinary p50), by the mean TTFT at rewrites; ``None`` where one is missing."""
    if not inline.rewrites or not ahead.rewrites or not inline.ordinary:
        return None
    before, after = statistics.fmean(ttfts(inline.rewrites)), statistics.fmean(ttfts(ahead.rewrites))
    base = statistics.median(ttfts(inline.ordinary))
    return (before - after) / (before - base) if before > base else None


def excess_by_size(inline: Arm, ahead: Arm) -> float | None:
    """The same with the ordinary p50 of turns that add as much, where there are such: rewrites may fall upon other
    turns in one mode than in the other. ``None`` without any."""
    before, after = (_excesses(arm, inline.ordinary) for arm in (inline, ahead))
    if not before or not after:
        return None
    mean = statistics.fmean(before)
    return 1 - statistics.fmean(after) / mean if mean > 0 else None


def _excesses(arm: Arm, ordinary: Sequence[Turn]) -> list[float]:
    """Milliseconds of each rewrite above the ordinary turns of its size; of a hand-over, which has none, above all."""
    found = []
    for turn in arm.rewrites:
        alike = [t for t in ordinary if turn["kind"] == "handover" or same_size(turn, t)]
        if alike:
            found.append(turn["ttft_ms"] - statistics.median(ttfts(alike)))
    return found


def near(left: float, right: float) -> bool:
    """Are these sizes the same, near enough?"""
    return abs(left - right) <= max(_NEAR_TOKENS, _NEAR * max(left, right))


def same_size(turn: Turn, other: Turn) -> bool:
    """Do both add as many tokens?"""
    return near(turn["new_tokens"], other["new_tokens"])


def same_place(turn: Turn, other: Turn) -> bool:
    """Do both add as many tokens to a prompt of the same length?"""
    return same_size(turn, other) and near(turn["prompt_tokens"], other["prompt_tokens"])


def matched(
    turns: Sequence[Turn], others: Sequence[Turn], same: Callable[[Turn, Turn], bool]
) -> tuple[list[float], list[tuple[float, float]]]:
    """TTFT of the turns that have their like among the others, and that of their likes, with weights.

    Each turn gives its likes a weight of one together: both sides then are of the same sizes.
    """
    found: list[float] = []
    weights: dict[int, float] = {}
    for turn in turns:
        alike = [k for k, other in enumerate(others) if same(turn, other)]
        if alike:
            found.append(turn["ttft_ms"])
            for k in alike:
                weights[k] = weights.get(k, 0.0) + 1 / len(alike)
    return found, [(others[k]["ttft_ms"], weight) for k, weight in weights.items()]


def weighted_percentile(values: Sequence[tuple[float, float]], p: float) -> float:
    """Percentile of (value, weight); with equal weights it is :func:`percentile`."""
    ordered = sorted(values)
    total = sum(weight for _, weight in ordered) - ordered[-1][1]
    if total <= 0:
        return ordered[-1][0]
    at, before = p * total, 0.0
    for (value, weight), (following, _) in zip(ordered, ordered[1:], strict=False):
        if at <= before + weight:
            return value + (following - value) * max(0.0, at - before) / weight
        before += weight
    return ordered[-1][0]


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 2) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _share(cached: Sequence[int | None], prompts: Sequence[int]) -> float | None:
    """Cached prompt tokens of those prompts whose cached tokens were reported."""
    known = [(c, p) for c, p in zip(cached, prompts, strict=True) if c is not None]
    return _ratio(sum(c for c, _ in known), sum(p for _, p in known))
