"""Parts of OpenAI-style messages: what the model sees of them, their text, their tokens."""

from __future__ import annotations

import json
from typing import Any

from .codec_values import ToolCall, arguments_text, canonical, opaque
from .tokens import MEDIA_TOKENS, MESSAGE_TOKENS, count_text

__all__ = ["KNOWN", "THINKING", "content_tokens", "part_text", "read_call", "tool_use_tokens", "visible_field"]

THINKING = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
    "document": "document",
}
_TEXT = frozenset({"text", "input_text", "output_text", "refusal"})
_TOOLS = frozenset({"tool_use", "tool_result"})
KNOWN = THINKING | _MEDIA.keys() | _TEXT | _TOOLS


def visible_field(key: str, value: Any) -> Any:
    """One field as the model sees it: cache marks, stream indexes and ids of text parts are not for the model.

    Only where they are bookkeeping: inside call arguments the same names are content.
    """
    if key == "content" and isinstance(value, list):
        return [_visible_part(p) for p in value]
    if key == "tool_calls" and isinstance(value, list):
        return [
            {k: canonical(v) for k, v in c.items() if k not in ("cache_control", "index")}
            if isinstance(c, dict)
            else canonical(c)
            for c in value
        ]
    return canonical(value)


def _visible_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return canonical(part)
    hidden = ("cache_control", "id") if part.get("type") in _TEXT else ("cache_control",)
    nested = part.get("type") == "tool_result"
    return {
        k: visible_field(k, v) if nested and k == "content" else canonical(v)
        for k, v in part.items()
        if k not in hidden
    }


def part_text(part: Any) -> str:
    """One part as readable text: media as a mark, thinking and calls left out."""
    if not isinstance(part, dict):
        return str(part)
    kind = part.get("type")
    if kind in THINKING or kind == "tool_use":
        return ""
    if kind in _MEDIA:
        return f"[{_MEDIA[kind]}]"
    if kind == "tool_result":
        inner = part.get("content")
        return inner if isinstance(inner, str) else "\n".join(t for t in map(part_text, inner or ()) if t)
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else f"[{kind}]"


def content_tokens(content: Any) -> int:
    """Tokens of a content, without its ``tool_use`` parts."""
    if content is None:
        return 0
    if isinstance(content, str):
        return count_text(content)
    if not isinstance(content, list):
        return count_text(str(content))
    total = 0
    for part in content:
        if not isinstance(part, dict):
            total += count_text(str(part))
            continue
        kind = part.get("type")
        if kind in _MEDIA:
            total += MEDIA_TOKENS
        elif kind == "tool_use":
            continue
        elif kind == "tool_result":
            total += content_tokens(part.get("content"))
        elif kind in _TEXT or kind in THINKING:
            for key in ("text", "thinking", "reasoning", "summary", "data", "refusal", "citations"):
                if value := part.get(key):
                    total += count_text(value if isinstance(value, str) else json.dumps(value, default=opaque))
        else:
            total += count_text(json.dumps(part, default=opaque))
    return total


def tool_use_tokens(content: Any) -> int:
    """Tokens of the ``tool_use`` parts of a content."""
    parts = content if isinstance(content, list) else []
    return sum(
        MESSAGE_TOKENS + count_text(str(p.get("name", ""))) + count_text(arguments_text(p.get("input")))
        for p in parts
        if isinstance(p, dict) and p.get("type") == "tool_use"
    )


def read_call(call: Any) -> ToolCall:
    """A call as OpenAI writes it, or flat as some servers do."""
    if not isinstance(call, dict):
        return ToolCall("", "", str(call))
    f = call.get("function")
    if isinstance(f, dict):
        return ToolCall(str(call.get("id") or ""), str(f.get("name") or ""), arguments_text(f.get("arguments")))
    arguments = call.get("args", call.get("arguments", call.get("input")))
    return ToolCall(str(call.get("id") or ""), str(call.get("name") or ""), arguments_text(arguments))
