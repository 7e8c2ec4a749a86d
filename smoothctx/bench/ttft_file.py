"""The file of ``bench ttft``: every measured cell, written whole as soon as it is there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..demo.chunks import Chunk
from ..errors import ConfigurationError
from ..outputs import Output
from .shapes import Shape, flag, number, perhaps, text, wrong
from .ttft_plan import MODES, SATURATED_MODES

FORMAT = "smoothctx ttft 1"
#: what the figures are made of; a file may hold more
_TURN: Shape = {
    **dict.fromkeys(("number", "ttft_ms", "total_ms", "prompt_tokens", "output_tokens", "new_tokens"), number),
    **dict.fromkeys(("kind", "how"), text),
    **dict.fromkeys(("transform", "beside"), flag),
    "cached_tokens": perhaps,
    "gaps_ms": [number],
}
_CALL: Shape = {"kind": text, "start_s": number, "end_s": number, "prompt_tokens": perhaps, "cached_tokens": perhaps}
_USAGE: Shape = dict.fromkeys(("input_tokens", "output_tokens", "cached_tokens"), perhaps)
_CELL: Shape = {
    "strategy": text,
    "mode": lambda value: value in (*MODES, *SATURATED_MODES),
    "concurrency": lambda value: number(value) and value >= 1,
    "tool_s": number,
    "wall_s": number,
    "sessions": [{"wall_s": number, "turns": [_TURN]}],
    "lookaheads": [{}],
    "background": [_CALL],
    "counters": {"wasted_tokens": perhaps, "usage": _USAGE, "preload_usage": _USAGE},
}
_FILE: Shape = {
    "engine": text,
    "settings": {},
    "calibration": dict.fromkeys(("prefill", "decode", "minimal_ms"), number),
    "cells": {"*": _CELL},
}


def read(file: Path) -> dict[str, Any]:
    """What a run has left.

    Raises:
        ConfigurationError: there is no such file, or it is not one of these.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: it cannot be read as a file of this benchmark ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigurationError(f"{file}: it is not a file of this benchmark")
    if (what := wrong(data, _FILE)) is not None:
        raise ConfigurationError(f"{file}: it is not a whole file of this benchmark ({what})")
    return data


def go_on(file: Path | None, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an interrupted run left, if it measured with the same settings; ``None`` where there is nothing yet.

    Raises:
        ConfigurationError: the file is of another measurement, or no such file at all.
    """
    if file is None or not file.exists():
        return None
    data = read(file)
    there = {name: data.get(name) for name in about}
    wanted = json.loads(json.dumps(about))
    if there != wanted:
        differ = [name for name in wanted if there[name] != wanted[name]]
        detail = "; ".join(_difference(name, there[name], wanted[name]) for name in differ)
        raise ConfigurationError(
            f"--json {file}: it holds a measurement with other settings ({detail}); name another file, or remove it"
        )
    return data


def digest(texts: Sequence[Chunk]) -> str:
    """Names what the agents read by its content."""
    found = hashlib.blake2b(digest_size=16)
    for chunk in texts:
        found.update(f"{len(chunk.text)} {chunk.text}".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def check_texts(file: Path, data: Mapping[str, Any], texts: str) -> bool:
    """Are these the texts of the cells that are there? ``False`` where an older version did not write that down.

    Raises:
        ConfigurationError: they are others.
    """
    there = data.get("texts_digest")
    if there not in (None, texts):
        raise ConfigurationError(
            f"--json {file}: its agents read other texts (what is below --path has changed since); name another file, "
            "or remove it"
        )
    return there is not None


def _difference(name: str, there: Any, wanted: Any) -> str:
    if isinstance(there, dict) and isinstance(wanted, dict):
        keys = [k for k in {**there, **wanted} if there.get(k) != wanted.get(k)]
        return ", ".join(f"{k}: {there.get(k)!r} there, {wanted.get(k)!r} now" for k in keys)
    return f"{name}: {there!r} there, {wanted!r} now"


def write(out: Output, data: Mapping[str, Any]) -> None:
    """All of it or nothing; without a file nothing."""
    if out.file is not None:
        out.write(json.dumps(data, separators=(",", ":")) + "\n")
