"""The report of ``bench ttft``: tables for people, figures for machines, plots as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import plots
from .ttft_figures import Arm, arms, of_arm, pairs, ttfts
from .ttft_reached import Claim, claims

NAMES = {"inline": "in line", "lookahead": "lookahead", "off": "switched off"}
#: what the turns of a figure are called in the table
_KINDS = {"rewrites": "rewrites", "ordinary": "ordinary", "parent_rewrites": "parent's own", "all": "all"}
_SAID = {True: "yes", False: "NO", None: "too few"}


def figures(data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the report says, for machines."""
    return {
        "engine": data["engine"],
        "settings": data["settings"],
        "calibration": data["calibration"],
        "arms": [of_arm(arm) for arm in arms(data).values()],
        "claims": [claim.as_json() for claim in claims(data)],
    }


def text(data: Mapping[str, Any]) -> str:
    """The whole report of one file."""
    calibration = data["calibration"]
    head = (
        f"{data['engine']}: prefill {calibration['prefill']:.0f} and decode {calibration['decode']:.0f} tokens/s, "
        f"a minimal request {calibration['minimal_ms']:.0f} ms; {len(data['cells'])} cells"
    )
    known = [of_arm(arm) for arm in arms(data).values()]
    return "\n\n".join([head, _ttft(known), _work(known), reached(claims(data))])


def _ttft(known: Sequence[Mapping[str, Any]]) -> str:
    """TTFT of every arm: at rewrites, at ordinary turns, at rewrites of a sub-agent's parent, at all."""
    rows = []
    for figure in known:
        name = f"{figure['strategy']}, {figure['concurrency']} at once, {NAMES[figure['mode']]}"
        for kind, label in _KINDS.items():
            values = figure[kind]
            if values is None:
                continue
            cells = [values[k] for k in ("mean_ms", "p50_ms", "p95_ms", "p99_ms", "max_ms")]
            rows.append([name, label, str(values["n"]), *("-" if c is None else f"{c:.0f}" for c in cells)])
            name = ""
    return _table(["TTFT in ms", "turns", "n", "mean", "p50", "p95", "p99", "max"], rows)


def _work(known: Sequence[Mapping[str, Any]]) -> str:
    """What the background did in every arm, how long sessions took, and what it cost."""
    columns = {
        "hit": "hit_rate",
        "late": "late_rate",
        "stale": "stale_rate",
        "waste": "waste_rate",
        "extra": "extra_rate",
        "cached": "rewrites_cached",
        "summaries": "summaries_cached",
        "busy": "busy",
    }
    rows = [
        [
            f"{f['strategy']}, {f['concurrency']} at once, {NAMES[f['mode']]}",
            *("-" if f[key] is None else f"{f[key]:.0%}" for key in columns.values()),
            "-" if f["session_s"] is None else f"{f['session_s']:.0f}",
            "-" if f["turns_per_min"] is None else f"{f['turns_per_min']:.1f}",
            "-" if f["output_tokens_per_s"] is None else f"{f['output_tokens_per_s']:.1f}",
        ]
        for f in known
    ]
    table = _table(["rates", *columns, "session s", "turns/min", "tokens/s"], rows)
    return (
        table
        + "\n(hit, late: of the turns with a rewrite; stale: of the lookaheads; waste, extra: of the prompt tokens; "
        + "cached: at rewrites,\nsummaries: of the summariser's input, as the server reported; busy: time in turns)"
    )


def reached(found: Sequence[Claim]) -> str:
    """Every aim: value, bound, yes or no, and the number of turns behind it."""
    rows = []
    for claim in found:
        value = (
            "-"
            if claim.value is None
            else f"{claim.value:.0f} ms"
            if claim.unit == "ms"
            else f"{claim.value:.3g}{claim.unit}"
        )
        rows.append([claim.aim, claim.where, value, claim.bound, _SAID[claim.reached], str(claim.n), claim.note])
    return _table(["reached?", "", "value", "bound", "", "n", ""], rows, left={0, 1, 6})


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: frozenset[int] | set[int] = frozenset({0, 1})
) -> str:
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


# -- plots ------------------------------------------------------------------------------------------------------------


def pictures(data: Mapping[str, Any], name: str) -> dict[str, str]:
    """By file name, as SVG: TTFT per turn and its distribution for each strategy and concurrency, and before and
    after."""
    made: dict[str, str] = {}
    for (strategy, concurrency), both in pairs(data).items():
        title = f"{strategy}, {concurrency} at once"
        base = f"{name}-{strategy}-{concurrency}"
        made[f"{base}-turns.svg"] = plots.lines(
            f"TTFT per turn in seconds: {title}", "turn", {NAMES[arm.mode]: _per_turn(arm) for arm in both}
        )
        made[f"{base}-cdf.svg"] = plots.cdf(
            f"TTFT at turns with a rewrite, in seconds: {title}",
            {NAMES[arm.mode]: [v / 1000 for v in ttfts(arm.rewrites)] for arm in both},
        )
    groups = {
        f"{strategy} {concurrency}x": {NAMES[a.mode]: _p95_s(a) for a in both}
        for (strategy, concurrency), both in pairs(data).items()
    }
    made[f"{name}-before-after.svg"] = plots.bars("p95 TTFT at turns with a rewrite, in seconds", groups)
    return made


def _per_turn(arm: Arm) -> list[plots.Point]:
    """Mean over the sessions for each turn; marked where at least one of them rewrote."""
    by_number: dict[float, list[Mapping[str, Any]]] = {}
    for turn in arm.turns:  # a sub-agent's call stands behind the turn after which it came
        by_number.setdefault(turn["number"] + 0.5 * (turn["kind"] == "handover"), []).append(turn)
    marked = arm.rewrites
    return [
        plots.Point(number, sum(ttfts(turns)) / len(turns) / 1000, any(t in marked for t in turns))
        for number, turns in sorted(by_number.items())
    ]


def _p95_s(arm: Arm) -> float | None:
    p95 = of_arm(arm)["rewrites"]["p95_ms"]
    return None if p95 is None else p95 / 1000
