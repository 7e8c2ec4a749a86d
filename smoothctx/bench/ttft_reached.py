"""What ``bench ttft`` claims: each aim with its bound, the value, and how many turns stand behind it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..demo.report import percentile
from .ttft_figures import (
    Arm,
    excess_by_size,
    excess_removed,
    finished_lookaheads,
    matched,
    near,
    pairs,
    same_place,
    same_size,
    saturated,
    ttfts,
    used_lookaheads,
    weighted_percentile,
)
from .ttft_plan import STRATEGIES

#: fewer turns than these claim nothing
LEAST = 20
#: aims that one of the engines has to reach
_ON_ONE = frozenset({"p95 lower", "max lower", "p95 times lower", "max times lower"})
LEVELS: Mapping[int, str] = {1: "low", 2: "medium"}


@dataclass(frozen=True, slots=True)
class Claim:
    """One aim. ``reached`` is ``None`` where too little was measured to say; ``n`` is what it rests on."""

    aim: str
    where: str
    bound: str
    value: float | None
    unit: str
    reached: bool | None
    n: int
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the file of figures."""
        return asdict(self)


def level(concurrency: int) -> str:
    """The load level of so many sessions at once."""
    return LEVELS.get(concurrency, "high" if concurrency >= 4 else "medium")


def claims(data: Mapping[str, Any]) -> list[Claim]:
    """Every aim that this file says something about."""
    both = pairs(data)
    found: list[Claim] = []
    for (strategy, concurrency), (inline, ahead) in both.items():
        where = f"{strategy}, {concurrency} at once ({level(concurrency)})"
        found += _excess(where, inline, ahead)
    found += _tails(both)
    for (strategy, concurrency), (_, ahead) in both.items():
        found.append(_spike(f"{strategy}, {concurrency} at once ({level(concurrency)})", ahead))
    for concurrency in sorted({c for _, c in both}):
        group = [arms for (_, c), arms in both.items() if c == concurrency]
        found.append(_harm(f"{concurrency} at once ({level(concurrency)})", group, data["calibration"]["minimal_ms"]))
    for concurrency, (off, on) in saturated(data).items():
        found += _saturation(f"saturated by {concurrency} sessions", off, on)
    for (strategy, concurrency), (inline, ahead) in both.items():
        found.append(_session_time(f"{strategy}, {concurrency} at once ({level(concurrency)})", inline, ahead))
    found += _use([ahead for _, ahead in both.values()])
    return found


def best(files: Mapping[str, Sequence[Claim]]) -> list[Claim]:
    """The aims that one engine has to reach, from the claims of all of them: the best value that rests on enough."""
    found: dict[tuple[str, str], Claim] = {}
    for name, known in files.items():
        for claim in known:
            if claim.aim in _ON_ONE and claim.reached is not None and claim.value is not None:
                key = (claim.aim, claim.where)
                other = found.get(key)
                if other is None or other.value is None or claim.value > other.value:
                    found[key] = replace(claim, where=f"{claim.where}: best engine", note=name)
    return list(found.values())


def _claim(
    aim: str,
    where: str,
    bound: str,
    value: float | None,
    unit: str,
    ok: bool,
    n: int,
    least: int = LEAST,
    note: str = "",
) -> Claim:
    enough = value is not None and n >= least
    return Claim(aim, where, bound, None if value is None else round(value, 4), unit, ok if enough else None, n, note)


def _excess(where: str, inline: Arm, ahead: Arm) -> list[Claim]:
    n = min(len(inline.rewrites), len(ahead.rewrites))
    ways = {"excess removed": excess_removed(inline, ahead), "the same by size": excess_by_size(inline, ahead)}
    return [_claim(aim, where, ">= 0.9", v, "", v is not None and v >= 0.9, n) for aim, v in ways.items()]


def _tails(both: Mapping[tuple[str, int], tuple[Arm, Arm]]) -> list[Claim]:
    """Plain ratios of the tail at rewrites: how much lower for the mean of the strategies, how many times for one."""
    found: list[Claim] = []
    for concurrency in sorted({c for _, c in both}):
        where = f"{concurrency} at once ({level(concurrency)})"
        group = {s: both[s, concurrency] for s in STRATEGIES if (s, concurrency) in both}
        for name, tail in (("p95", lambda v: percentile(v, 0.95)), ("max", max)):
            # An engine that answers in no time has no tail to compare.
            group = {s: arms for s, arms in group.items() if all(a.rewrites and tail(ttfts(a.rewrites)) for a in arms)}
            ratios = {s: tail(ttfts(b.rewrites)) / tail(ttfts(a.rewrites)) for s, (a, b) in group.items()}
            n = min((min(len(a.rewrites), len(b.rewrites)) for a, b in group.values()), default=0)
            if len(group) == len(STRATEGIES):
                lower = 1 - statistics.fmean(ratios.values())
                note = ", ".join(f"{s} {1 - r:.0%}" for s, r in ratios.items())
                found.append(
                    _claim(
                        f"{name} lower",
                        f"mean of strategies, {where}",
                        ">= 0.62",
                        lower,
                        "",
                        lower >= 0.62,
                        n,
                        note=note,
                    )
                )
            if "summarise" in group:
                n = min(len(arm.rewrites) for arm in group["summarise"])
                times = 1 / ratios["summarise"]
                found.append(_claim(f"{name} times lower", f"summarise, {where}", ">= 12", times, "x", times >= 12, n))
    return found


def _spike(where: str, ahead: Arm) -> Claim:
    """Turns with a rewrite against ordinary ones that add as much. A hand-over has none of its size: against all."""
    rewrites, ordinary, note = ahead.rewrites, ahead.ordinary, ""
    if ahead.strategy == "isolate":
        values, likes = ttfts(rewrites), [(t, 1.0) for t in ttfts(ordinary)]
        note = "the sub-agent's first call against the agent's ordinary turns"
    else:
        values, likes = matched(rewrites, ordinary, same_size)
        if len(values) < len(rewrites):
            note = f"{len(rewrites) - len(values)} turns have no ordinary one of their size"
    if not values or not likes:
        return _claim("no spike", where, "<= 1.2", None, "x", False, len(values), note=note)
    value = _ratio(percentile(values, 0.95), weighted_percentile(likes, 0.95))
    ok = value is not None and value <= 1.2
    return _claim("no spike", where, "<= 1.2", value, "x", ok, min(len(values), len(likes)), note=note)


def _harm(where: str, group: Sequence[tuple[Arm, Arm]], minimal_ms: float) -> Claim:
    """Ordinary turns beside background work against such at the same place in the conversation without any."""
    values: list[float] = []
    likes: list[tuple[float, float]] = []
    ordinary: list[float] = []
    beside = 0
    for inline, ahead in group:
        alone = [t for t in (*ahead.ordinary, *inline.ordinary) if not t["beside"]]
        usual = statistics.median([t["new_tokens"] for t in ahead.ordinary] or [0])
        # The few long ones would decide a 95th percentile by their number alone.
        with_work = [t for t in ahead.ordinary if t["beside"] and near(t["new_tokens"], usual)]
        mine, theirs = matched(with_work, alone, same_place)
        beside += len(with_work)
        ordinary += ttfts(alone)
        values, likes = values + mine, likes + theirs
    if not values or not ordinary:
        return _claim(
            "no harm", where, "max(100 ms, 15 %, minimal)", None, "ms", False, 0, note=f"{beside} turns beside"
        )
    allowed = max(100.0, 0.15 * percentile(ordinary, 0.5), minimal_ms)
    value = percentile(values, 0.95) - weighted_percentile(likes, 0.95)
    note = f"{len(values)} of {beside} turns beside background work, against {len(likes)} like them without"
    return _claim("no harm", where, f"<= {allowed:.0f} ms", value, "ms", value <= allowed, len(values), note=note)


def _ratio(value: float, to: float) -> float | None:
    """``None`` where there is nothing to compare with: tokens of one packet have no time between them."""
    return value / to if to else None


def _p95(values: Sequence[float]) -> float:
    return percentile(values, 0.95)


def _saturation(where: str, off: Arm, on: Arm) -> list[Claim]:
    found = []
    ran = sum(1 for cell in on.cells for _ in cell["background"])
    for aim, values in (
        ("p95 TTFT", lambda arm: ttfts(arm.ordinary)),
        ("p95 between tokens", lambda arm: [g for t in arm.ordinary for g in t["gaps_ms"]]),
        ("mean between tokens", lambda arm: [g for t in arm.ordinary for g in t["gaps_ms"]]),
    ):
        a, b = values(off), values(on)
        ratio = None
        if a and b:
            value = statistics.fmean if aim.startswith("mean") else _p95
            ratio = _ratio(value(b), value(a))
        n = min(len(off.ordinary), len(on.ordinary))
        ok = ratio is not None and ratio <= 1.05
        found.append(_claim(aim, where, "<= 1.05", ratio, "x", ok, n, note=f"{ran} background calls ran"))
    return found


def _session_time(where: str, inline: Arm, ahead: Arm) -> Claim:
    a, b = ([s["wall_s"] for s in arm.sessions] for arm in (inline, ahead))
    ratio = statistics.fmean(b) / statistics.fmean(a) if a and b and sum(a) else None
    n = min(len(a), len(b))
    ok = ratio is not None and ratio <= 1
    return _claim("session time", where, "<= 1", ratio, "x", ok, n, least=2, note=f"{n} sessions")


def _use(group: Sequence[Arm]) -> list[Claim]:
    """Over all sessions with lookahead: nobody disturbed them."""
    finished, used = sum(map(finished_lookaheads, group)), sum(map(used_lookaheads, group))
    prompt = sum(t["prompt_tokens"] for arm in group for t in arm.turns)
    wasted = sum(arm.total("wasted_tokens") for arm in group)
    share = used / finished if finished else None
    waste = wasted / prompt if prompt else None
    return [
        _claim("use", "finished lookaheads", ">= 0.95", share, "", share is not None and share >= 0.95, finished),
        _claim("waste", "of the prompt tokens", "< 0.05", waste, "", waste is not None and waste < 0.05, finished),
    ]
