"""Findings: what the doctor saw, and how it is shown to people and to machines."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..engines import Capabilities

Status = Literal["ok", "warn", "bad", "unknown"]

_MARKS: Mapping[Status, str] = {"ok": "ok", "warn": "warn", "bad": "BAD", "unknown": "?"}
_ORDER: Mapping[Status, int] = {"bad": 0, "warn": 1, "unknown": 2, "ok": 3}
_NAME = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answered question.

    ``advice`` is what to change, empty where nothing is; ``effect_s`` is what that saves on a turn that it concerns,
    in seconds, where it was measured; ``data`` holds the figures behind ``found``.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    effect_s: float | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """What is to be changed, the largest effect first; what has no measured one after that, by how bad it is."""
    changes = [f for f in findings if f.advice]
    return sorted(changes, key=lambda f: (f.effect_s is None, -(f.effect_s or 0.0), _ORDER[f.status]))


def as_json(url: str, model: str, known: Capabilities, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything for machines."""
    return {
        "url": url,
        "model": model,
        "capabilities": asdict(known),
        "findings": [asdict(f) for f in findings],
        "changes": [{"name": f.name, "advice": f.advice, "effect_s": f.effect_s} for f in in_order(findings)],
    }


def as_text(url: str, model: str, known: Capabilities, findings: Sequence[Finding]) -> str:
    """The table and the list of changes for people."""
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    what = known.flavour + (f" {known.version}" if known.version else "")
    window = f", window {known.context_window:,} tokens" if known.context_window else ""
    lines = [f"{url}: {what}, model {model}{window}", ""]
    indent = " " * (8 + _NAME)
    for f in findings:
        start = f"  {_MARKS[f.status]:<5} {f.name:<{_NAME}}"
        lines += textwrap.wrap(f.found, width, initial_indent=start, subsequent_indent=indent) or [start.rstrip()]
    changes = in_order(findings)
    lines += ["", "What to change, in order of effect:" if changes else "Nothing to change."]
    for k, f in enumerate(changes, 1):
        saves = f" (saves about {seconds(f.effect_s)} a turn)" if f.effect_s else ""
        start = f"  {k}. "
        lines += textwrap.wrap(
            f"{f.name}: {f.advice}{saves}", width, initial_indent=start, subsequent_indent=" " * len(start)
        )
    return "\n".join(lines)


def seconds(value: float) -> str:
    """A time for people."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
