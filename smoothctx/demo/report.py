"""What the demo shows: live rows, the summary, the JSON, the plot in the terminal and as an HTML file."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any

from .agent import MODES, Run, Settings, Turn

NAMES = {"inline": "in line", "lookahead": "lookahead"}


def percentile(values: Sequence[float], p: float) -> float:
    """Percentile by linear interpolation between the closest ranks (as numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * p
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (position - low))


def figures(turns: Sequence[Turn], *, percentiles: bool = True) -> dict[str, Any]:
    """TTFT of some turns in milliseconds. Without ``percentiles`` (few turns) only count, mean and maximum."""
    values = [t.ttft_ms for t in turns]
    claims = bool(values) and percentiles
    return {
        "n": len(values),
        "p50_ms": round(percentile(values, 0.50), 1) if claims else None,
        "p95_ms": round(percentile(values, 0.95), 1) if claims else None,
        "max_ms": round(max(values), 1) if values else None,
        "mean_ms": round(statistics.fmean(values), 1) if values else None,
    }


def as_json(runs: dict[str, Run], settings: Settings, *, quick: bool, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured. Times in ms or s, sizes in tokens, as the names say."""
    counters = runs["lookahead"].counters
    return {
        "settings": {
            "turns": len(runs["inline"].turns),
            "chunk_tokens": settings.chunk_tokens,
            "note_tokens": settings.note_tokens,
            "summary_tokens": settings.summary_tokens,
            "context_window": settings.context_window,
            "tool_s": settings.tool_s,
            "quick": quick,
        },
        "machine": machine,
        "modes": {mode: _mode(run, quick) for mode, run in runs.items()},
        "lookahead": {
            "started": counters.started,
            "committed": counters.committed,
            "stale": counters.stale_total,
            "stale_by_reason": dict(counters.stale),
            "failed": counters.failed,
            "fallbacks": counters.fallbacks,
            "wasted_tokens": counters.wasted_tokens,
            "transform_tokens": counters.usage.total_tokens,
            "cached_share": counters.cached_share,
            "preload_tokens": counters.preload_usage.input_tokens - (counters.preload_usage.cached_tokens or 0),
        },
        "excess_removed": excess_removed(runs),
    }


def _mode(run: Run, quick: bool) -> dict[str, Any]:
    return {
        "transform_turns": figures([t for t in run.turns if t.transform], percentiles=not quick),
        "ordinary_turns": figures([t for t in run.turns if not t.transform], percentiles=not quick),
        "session_s": round(run.session_s, 2),
        "waited_ms": round(sum(t.waited_ms for t in run.turns), 1),
        "turns": [
            {
                "turn": t.number,
                "ttft_ms": round(t.ttft_ms, 1),
                "total_ms": round(t.total_ms, 1),
                "prompt_tokens": t.prompt_tokens,
                "cached_tokens": t.cached_tokens,
                "transform": t.transform,
                "how": t.how,
                "waited_ms": round(t.waited_ms, 1),
            }
            for t in run.turns
        ],
    }


def excess_removed(runs: dict[str, Run]) -> float | None:
    """(in line - lookahead) / (in line - ordinary p50), with mean TTFT of transform turns; None without any."""
    slow = [t.ttft_ms for t in runs["inline"].turns if t.transform]
    fast = [t.ttft_ms for t in runs["lookahead"].turns if t.transform]
    ordinary = [t.ttft_ms for t in runs["inline"].turns if not t.transform]
    if not slow or not fast or not ordinary:
        return None
    before, after, base = statistics.fmean(slow), statistics.fmean(fast), statistics.median(ordinary)
    return round((before - after) / (before - base), 3) if before > base else None


def header() -> str:
    """The live table's head."""
    return f"{'mode':>9}  {'turn':>4}  {'tokens':>6}  {'cached':>6}  {'TTFT':>8}   what happened"


def row(mode: str, turn: Turn) -> str:
    """One live row."""
    what = list(turn.happened)
    if turn.transform and mode == "inline":
        what = [f"rewrote its context, {turn.waited_ms / 1000:.1f} s for the summary"]
    elif turn.transform:
        what.append("TRANSFORM TURN" if turn.how == "ready" else f"TRANSFORM TURN ({turn.how})")
    cached = "-" if turn.cached_tokens is None else str(turn.cached_tokens)
    return (
        f"{NAMES[mode]:>9}  {turn.number:>4}  {turn.prompt_tokens:>6}  {cached:>6}  {turn.ttft_ms / 1000:>7.2f}s   "
        + ", ".join(what)
    )


def summary(data: dict[str, Any]) -> str:
    """The closing table."""
    quick = data["settings"]["quick"]
    lines = [f"{'TTFT in ms':<28}{'n':>4}" + ("" if quick else f"{'p50':>9}{'p95':>9}") + f"{'max':>9}{'mean':>9}"]
    for mode in MODES:
        for kind, name in (("transform_turns", "transform turns"), ("ordinary_turns", "other turns")):
            f = data["modes"][mode][kind]
            cells = [f["max_ms"], f["mean_ms"]] if quick else [f["p50_ms"], f["p95_ms"], f["max_ms"], f["mean_ms"]]
            lines.append(
                f"{NAMES[mode] + ', ' + name:<28}{f['n']:>4}"
                + "".join(f"{'-' if c is None else f'{c:.0f}':>9}" for c in cells)
            )
    la = data["lookahead"]
    lines += [
        "",
        f"session: {data['modes']['inline']['session_s']:.0f} s in line, "
        f"{data['modes']['lookahead']['session_s']:.0f} s with lookahead",
        f"lookaheads: {la['started']} started, {la['committed']} committed, {la['stale']} stale, "
        f"{la['failed']} failed; {la['wasted_tokens']} tokens wasted",
    ]
    if la["cached_share"] is not None:
        lines.append(f"prompts of the summaries found in the cache, as reported: {la['cached_share']:.0%}")
    a, b = data["modes"]["inline"]["transform_turns"], data["modes"]["lookahead"]["transform_turns"]
    if not quick and a["p95_ms"] and b["p95_ms"]:
        lines.append(f"p95 of transform turns: {a['p95_ms'] / b['p95_ms']:.1f} times lower with lookahead")
    if data["excess_removed"] is not None:
        lines.append(f"excess over an ordinary turn removed: {data['excess_removed']:.0%}")
    return "\n".join(lines)


def plot(data: dict[str, Any], *, height: int = 10) -> str:
    """TTFT per turn of both modes, in characters."""
    series = {mode: [t["ttft_ms"] / 1000 for t in data["modes"][mode]["turns"]] for mode in MODES}
    top = max((max(v) for v in series.values() if v), default=1.0)
    lines = [f"TTFT per turn (up to {top:.1f} s):   # in line   o lookahead   @ both"]
    n = max(len(v) for v in series.values())
    for level in range(height, 0, -1):
        cells = []
        for k in range(n):
            a = k < len(series["inline"]) and series["inline"][k] > top * (level - 1) / height
            b = k < len(series["lookahead"]) and series["lookahead"][k] > top * (level - 1) / height
            cells.append("@" if a and b else "#" if a else "o" if b else " ")
        lines.append(f"{top * level / height:6.1f} | " + " ".join(cells))
    lines.append(" " * 7 + "+" + "-" * (2 * n))
    return "\n".join(lines)


_COLOURS = {"inline": "#c2410c", "lookahead": "#1d4ed8"}


def svg(data: dict[str, Any], *, width: int = 860, height: int = 340) -> str:
    """TTFT per turn of both modes as an SVG picture; transform turns are marked."""
    left, right, top, bottom = 56, 16, 44, 40
    series = {mode: data["modes"][mode]["turns"] for mode in MODES}
    n = max(len(turns) for turns in series.values())
    high = max(t["ttft_ms"] for turns in series.values() for t in turns) / 1000 * 1.08
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if high / s <= 7)

    def x(turn: int) -> float:
        return left + (turn - 1) * (width - left - right) / max(1, n - 1)

    def y(seconds: float) -> float:
        return float(height - bottom - seconds * (height - top - bottom) / high)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="18" font-size="14" fill="#111">Time to first token per turn, in seconds</text>',
    ]
    k = 0
    while k * step <= high:
        out.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(k * step):.1f}" y2="{y(k * step):.1f}" stroke="#e5e7eb"/>'
        )
        out.append(f'<text x="{left - 8}" y="{y(k * step) + 4:.1f}" text-anchor="end" fill="#555">{k * step:g}</text>')
        k += 1
    for turn in range(1, n + 1, max(1, n // 14)):
        out.append(f'<text x="{x(turn):.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#555">{turn}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle" fill="#555">turn</text>')
    for i, mode in enumerate(MODES):
        colour = _COLOURS[mode]
        points = " ".join(f"{x(t['turn']):.1f},{y(t['ttft_ms'] / 1000):.1f}" for t in series[mode])
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for t in series[mode]:
            if t["transform"]:
                what = f"{NAMES[mode]}, turn {t['turn']}: {t['ttft_ms'] / 1000:.2f} s"
                at = f'cx="{x(t["turn"]):.1f}" cy="{y(t["ttft_ms"] / 1000):.1f}"'
                out.append(f'<circle {at} r="4.5" fill="{colour}"><title>{what}</title></circle>')
        legend = left + 300 + 190 * i
        out.append(f'<circle cx="{legend}" cy="32" r="4.5" fill="{colour}"/>')
        out.append(f'<text x="{legend + 10}" y="36" fill="#111">{NAMES[mode]} (dot: rewrite)</text>')
    out.append("</svg>")
    return "\n".join(out)


def page(data: dict[str, Any]) -> str:
    """A page of its own: the plot, the figures, every turn."""
    rows = "".join(
        f"<tr><td>{NAMES[mode]}</td><td>{t['turn']}</td><td>{t['prompt_tokens']}</td><td>{t['cached_tokens']}</td>"
        f"<td>{t['ttft_ms'] / 1000:.2f}</td><td>{t['how']}</td></tr>"
        for mode in MODES
        for t in data["modes"][mode]["turns"]
    )
    settings = ", ".join(f"{k} {v}" for k, v in data["settings"].items())
    machine = ", ".join(f"{k}: {v}" for k, v in data["machine"].items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>smoothctx demo</title>"
        "<style>body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:900px;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:2px 12px;text-align:right;border-bottom:1px solid #eee}"
        "pre{background:#f6f6f6;padding:1rem;overflow-x:auto}</style>"
        f"<h1>smoothctx demo</h1>{svg(data)}<pre>{html.escape(summary(data))}</pre>"
        f"<p>Settings: {html.escape(settings)}.<br>Machine: {html.escape(machine)}.</p>"
        "<table><tr><th>mode<th>turn<th>prompt tokens<th>cached<th>TTFT s<th>commit</tr>"
        f"{rows}</table></html>"
    )
