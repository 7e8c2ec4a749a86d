"""Positions: how the model encodes them, where its server or its files tell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .findings import Finding

#: bytes at the head of a GGUF file that hold its metadata
_METADATA = 16 * 1024 * 1024
_ROPE = re.compile(
    r"llama|qwen|mi[sx]tral|ministral|gemma|phi-?[2-9]|smollm|deepseek|glm-|command-r|olmo|granite|falcon-?[3h]|gpt-oss"
    r"|yi-|internlm|lfm2|kimi|minimax|nemotron|gpt-?neox|pythia",
    re.IGNORECASE,
)
_ABSOLUTE = re.compile(r"gpt-?2|(?:^|[/-])opt-|gpt-?neo-|starcoder-?base|santacoder", re.IGNORECASE)
_ALIBI = re.compile(r"bloom|mpt-", re.IGNORECASE)
_TEXTS = {
    "rope": "rotary (RoPE)",
    "absolute": "absolute (learned)",
    "alibi": "relative (ALiBi)",
}


def check(model: str, told: Mapping[str, Any]) -> Finding:
    """What is known of a model's positions. ``told``: the server's own entry of the model, and where its files are."""
    kind, by = _kind(model, told)
    if kind is None:
        return Finding(
            name="positions",
            status="unknown",
            found="neither the server nor the model's name tells; see rope_theta or position_embedding_type in its "
            "config.json",
        )
    absolute = kind == "absolute"
    return Finding(
        name="positions",
        status="warn" if absolute else "ok",
        found=f"{_TEXTS[kind]}, by {by}",
        advice="with absolute positions no part of the cache behind a changed middle can ever be reused: keep what "
        "stays in front, and rewrite seldom"
        if absolute
        else "",
        data={"positions": kind, "by": by},
    )


def _kind(model: str, told: Mapping[str, Any]) -> tuple[str | None, str]:
    for value in (told.get("model_path"), told.get("root")):
        if isinstance(value, str) and value.startswith("/") and (kind := _file(Path(value))) is not None:
            return kind, "the model's own file"
    for name in (model, told.get("root"), told.get("model_path")):
        if not isinstance(name, str):
            continue
        name = name.rsplit("/", 1)[-1] if name.startswith("/") else name
        for kind, pattern in (("absolute", _ABSOLUTE), ("alibi", _ALIBI), ("rope", _ROPE)):
            if pattern.search(name):
                return kind, f"the model's name ({name})"
    return None, ""


def _file(path: Path) -> str | None:
    """A GGUF file's metadata or a ``config.json``, where this is the server's own machine."""
    try:
        if path.is_dir():
            return _config(json.loads((path / "config.json").read_text(encoding="utf-8")))
        with path.open("rb") as opened:
            data = opened.read(_METADATA)
    except (OSError, ValueError, RecursionError):
        return None
    if not data.startswith(b"GGUF"):
        return None
    if b".rope." in data:
        return "rope"
    return "absolute" if b"position_embd" in data else None


def _config(config: Any) -> str | None:
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    if config.get("rope_theta") or config.get("rope_parameters") or config.get("rope_scaling"):
        return "rope"
    if config.get("alibi") is True:
        return "alibi"
    return "absolute" if config.get("n_positions") or config.get("position_embedding_type") == "absolute" else None
