"""The figures of ``bench volume`` and how they are shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .statistics import mean, similarity, spearman, variation

#: part of the blocks' tokens that a sequential summary must have to be compared with them
NEARLY = 0.9


def whole(cell: Mapping[str, Any]) -> bool:
    """Was everything compacted? If not, its figures are of a part of the history."""
    return cell["error"] is None and not cell.get("raw_messages")


def summary(cells: Mapping[str, Mapping[str, Any]], blocks: Sequence[int], details: Sequence[str]) -> dict[str, Any]:
    """The figures over all runs: a row for each block size and detail, and the rank correlations. Cells that failed, or
    where blocks stayed raw, are counted and are in no figure."""
    rows: list[dict[str, Any]] = []
    for size in blocks:
        for detail in details:
            mine = [
                [c for c in cells.values() if (c["kind"], c["block_tokens"], c["detail"]) == (kind, size, detail)]
                for kind in ("parallel", "sequential")
            ]
            parallel = [c for c in mine[0] if whole(c)]
            if not parallel:
                continue
            runs = {c["run"] for c in parallel}
            sequential = [c for c in mine[1] if whole(c) and c["run"] in runs]
            figures = {
                "block_tokens": size,
                "detail": detail,
                "blocks": mean([c["blocks"] for c in parallel]),
                "output_tokens": mean([c["output_tokens"] for c in parallel]),
                "variation": variation([c["output_tokens"] for c in parallel]),
                "similarity": similarity(["\n".join(c["texts"]) for c in parallel]),
                "wall_s": mean([c["wall_s"] for c in parallel]),
                "tokens_per_s": _rate(parallel),
                "sequential_tokens": mean([c["output_tokens"] for c in sequential]),
                "sequential_wall_s": mean([c["wall_s"] for c in sequential]),
                "sequential_tokens_per_s": _rate(sequential),
            }
            figures["matched"] = _matched(parallel, sequential)
            figures["speedup"] = _speedup(figures) if figures["matched"] else None
            rows.append(figures)
    made = [c for c in cells.values() if c["kind"] == "parallel"]
    good = [c for c in made if whole(c)]
    partly = [c for c in made if c["error"] is None and not whole(c)]
    calls = sum(c["calls"] for c in good)
    detail_rank = {detail: k for k, detail in enumerate(details)}
    return {
        "rows": rows,
        "spearman_blocks": {d: spearman(*_columns([c for c in good if c["detail"] == d], "blocks")) for d in details},
        "spearman_detail": {
            str(size): spearman(
                [detail_rank[c["detail"]] for c in good if c["block_tokens"] == size],
                [c["output_tokens"] for c in good if c["block_tokens"] == size],
            )
            for size in blocks
        },
        "ended_by_cap": sum(c["ended_by_cap"] for c in good) / calls if calls else None,
        "failed": len(made) - len(good) - len(partly),
        "partly_raw": len(partly),
        "partly_raw_of": list(dict.fromkeys(f"{c['block_tokens']} {c['detail']}" for c in partly)),
    }


def _rate(cells: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens a second of these cells together, as their mean tokens and seconds say. A mean of their rates would be led
    by the fastest."""
    seconds = sum(c["wall_s"] for c in cells)
    return sum(c["output_tokens"] for c in cells) / seconds if seconds > 0 else None


def _columns(cells: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    return [c[name] for c in cells], [c["output_tokens"] for c in cells]


def _matched(parallel: Sequence[Mapping[str, Any]], sequential: Sequence[Mapping[str, Any]]) -> bool:
    """Does every sequential summary have (nearly) as many tokens as the blocks of its run?"""
    volumes = {c["run"]: c["output_tokens"] for c in parallel}
    return all(c["output_tokens"] >= NEARLY * volumes.get(c["run"], 0) for c in sequential)


def _speedup(row: Mapping[str, Any]) -> float | None:
    """Sequential wall time over parallel, at the parallel volume: seconds per token decide where they differ."""
    own, other = row["tokens_per_s"], row["sequential_tokens_per_s"]
    return own / other if own and other else None


# -- printing ------------------------------------------------------------------------------------------------------


def row(cell: Mapping[str, Any]) -> str:
    """One cell in a line."""
    state = cell["error"] or f"{cell['blocks']} summaries"
    if cell["error"] is None and not whole(cell):
        why = cell.get("raw_because") or "no summary of use that was smaller"
        state += f"; {cell['raw_messages']} messages stayed raw ({why})"
    return (
        f"{cell['kind']:<11}{cell['block_tokens']:>7}  {cell['detail']:<14}run {cell['run']}: "
        f"{cell['output_tokens']:>6} tokens {cell['wall_s']:>8.1f} s  {state}"
    )


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a person to read."""
    simulated = figures.get("rates")
    head = "block  detail         blocks  tokens     CV  similar   wall s  tok/s  sequential s  tok/s  gain"
    lines = [head + ("  simulated" if simulated else "")]
    for r in figures["rows"]:
        lines.append(
            f"{r['block_tokens']:>5}  {r['detail']:<14}{_n(r['blocks'], 0):>7}{_n(r['output_tokens'], 0):>8}"
            f"{_n(r['variation'], 2):>7}{_n(r['similarity'], 2):>9}{_n(r['wall_s'], 1):>9}{_n(r['tokens_per_s'], 1):>7}"
            f"{_n(r['sequential_wall_s'], 1):>14}{_n(r['sequential_tokens_per_s'], 1):>7}{_n(r['speedup'], 2):>6}"
            + (f"{_n(r['simulated_gain'], 2):>11}" if simulated else "")
        )
    for name, values in (
        ("number of blocks, by detail", figures["spearman_blocks"]),
        ("detail, by block size", figures["spearman_detail"]),
    ):
        lines.append(f"Spearman of tokens with {name}: " + ", ".join(f"{k} {_n(v, 2)}" for k, v in values.items()))
    short = [f"{r['block_tokens']} {r['detail']}" for r in figures["rows"] if not r.get("matched", True)]
    if short:
        lines.append(
            f"no gain for {', '.join(short)}: the sequential summary ended before it had as many tokens as the blocks "
            "(the server does not take ignore_eos)"
        )
    lines.append(
        f"summaries ended by the cap: {_n(figures['ended_by_cap'], 2)}; failed cells: {figures['failed']}; "
        f"cells with blocks that stayed raw: {figures['partly_raw']}"
    )
    if figures["partly_raw"]:
        lines.append(
            f"blocks stayed raw in {', '.join(figures['partly_raw_of'])}: those cells are in no figure above; with "
            "--json FILE the next run measures them again"
        )
    if simulated:
        lines.append(
            f"simulated with the engine's own rates, tokens a second: prefill {simulated['prefill']:.0f}, decode alone "
            f"{simulated['decode_alone']:.1f}, each of {simulated['workers']} beside {simulated['decode_beside']:.1f}"
        )
    return "\n".join(lines)


def _n(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
