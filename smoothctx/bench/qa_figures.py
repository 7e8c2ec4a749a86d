"""The cells of ``bench qa``, their means, and how they are shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .statistics import mean

#: the setting in which nothing is compacted
RAW = "raw"
#: under this share of right answers from the raw context, the answers say more about the model than about a summary
WEAK = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One question under one setting. ``left_raw`` is the share of the messages' tokens that was not compacted
    (``None``: a cell of an earlier version).
    ``equivalence`` is for actions, the other scores are for answers: ``held`` says whether the answer stands in the
    context. ``error`` is what went wrong instead."""

    key: str
    setting: str
    kind: str
    item: str
    raw_tokens: int = 0
    context_tokens: int = 0
    left_raw: float | None = None
    answer: str = ""
    held: float | None = None
    exact_match: float | None = None
    f1: float | None = None
    equivalence: float | None = None
    error: str = ""


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The means for each setting and kind; ``None`` where there is nothing to take one of."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.kind, cell.setting), []).append(cell)
    found = []
    for (kind, setting), group in groups.items():
        right = [c for c in group if not c.error]
        raw = sum(c.raw_tokens for c in right)
        found.append(
            {
                "kind": kind,
                "setting": setting,
                "cells": len(group),
                "errors": len(group) - len(right),
                "context_tokens": mean([float(c.context_tokens) for c in right]),
                "kept": sum(c.context_tokens for c in right) / raw if raw else None,
                "left_raw": mean([c.left_raw for c in right if c.left_raw is not None]),
                "held": mean([c.held for c in right if c.held is not None]),
                "exact_match": mean([c.exact_match for c in right if c.exact_match is not None]),
                "f1": mean([c.f1 for c in right if c.f1 is not None]),
                "equivalence": mean([c.equivalence for c in right if c.equivalence is not None]),
            }
        )
    return found


def table(cells: Sequence[Cell]) -> str:
    """The table for people: one line for each kind and setting."""
    scores_head = " ".join(f"{name:>5}" for name in ("held", "EM", "F1", "same"))
    head = f"{'kind':<10} {'setting':<26} {'n':>3} {'err':>3} {'tokens':>7} {'kept':>6} {'raw':>5} {scores_head}"
    lines = [head, "-" * len(head)]
    for row in rows(cells):
        scores = " ".join(_score(row[k]) for k in ("held", "exact_match", "f1", "equivalence"))
        tokens = "-" if row["context_tokens"] is None else f"{row['context_tokens']:.0f}"
        kept, left = ("-" if row[k] is None else f"{row[k]:.0%}" for k in ("kept", "left_raw"))
        counts = f"{row['cells']:>3} {row['errors']:>3} {tokens:>7} {kept:>6} {left:>5}"
        lines.append(f"{row['kind']:<10} {row['setting']:<26} {counts} {scores}")
    return "\n".join(lines)


def weakness(cells: Sequence[Cell]) -> str:
    """What to think of the answers where the model is weak already with the raw context; empty where it is not."""
    raw = [c for c in cells if c.setting == RAW and not c.error]
    right = [c.exact_match for c in raw if c.exact_match is not None]
    called = [c.equivalence is not None for c in raw if c.kind == "action"]
    notes = []
    if right and sum(right) < WEAK * len(right):
        notes.append(
            f"This model answers {sum(right):.0f} of {len(right)} questions from the raw context: EM and F1 say little "
            "about the summaries here. Read 'held', which asks no model."
        )
    if called and sum(called) < WEAK * len(called):
        notes.append(f"It calls a tool in {sum(called)} of {len(called)} actions with the raw context.")
    return "\n".join(notes)


def _score(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>5}"
