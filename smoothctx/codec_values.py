"""Values inside messages: frozen, compared and written down the same way by every codec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ToolCall", "arguments_text", "canonical", "encode", "opaque", "structure"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an assistant message. ``id`` may be empty or repeated: some servers do that."""

    id: str
    name: str
    arguments: str


def opaque(value: Any) -> Any:
    """What JSON cannot write, in a form that it can: bytes by their hash."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "blake2b:" + hashlib.blake2b(bytes(value), digest_size=16).hexdigest()
    if isinstance(value, Mapping):
        return dict(value)
    return repr(value)


#: one text for one value: sorted keys, nothing escaped that need not be
encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=opaque).encode


def structure(value: Any) -> Any:
    """A copy of the containers that shares its immutable leaves: equal until edited in place."""
    if type(value) is str:
        return value
    if isinstance(value, dict):
        return {k: (v if type(v) is str else structure(v)) for k, v in value.items()}
    if isinstance(value, list):
        return [structure(v) for v in value]
    if isinstance(value, tuple):
        return tuple(structure(v) for v in value)
    return bytes(value) if isinstance(value, bytearray) else value


def canonical(value: Any) -> Any:
    """Long binary data by its hash. A text cannot pass for one: what starts like it is marked with ``=``."""
    if isinstance(value, str):
        if len(value) > 4096 and value.startswith("data:"):
            return "blake2b:" + _hash(value.encode("utf-8", "surrogatepass"))
        return "=" + value if value.startswith(("blake2b:", "=")) else value
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else f"{type(k).__name__}:{k}": canonical(v) for k, v in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return "blake2b:bytes:" + _hash(bytes(value))
    return value


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def arguments_text(value: Any) -> str:
    """Call arguments as text: as sent, or as compact JSON where a framework parsed them."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=opaque)
