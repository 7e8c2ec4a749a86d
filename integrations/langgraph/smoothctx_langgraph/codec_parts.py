"""Content parts of LangChain messages: which kinds there are, and how each is read, digested and counted.

LangChain passes on what the providers use, so a list of parts may hold its own shapes (old and new) beside those of
OpenAI, Anthropic, Google and Bedrock. The same names mean the same in all of them. A dict of a kind that is not known
here is read by what it says of itself: the text in it, and the words of its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from smoothctx.codec_values import canonical
from smoothctx.tokens import MEDIA_TOKENS, count_text

TEXT = frozenset({"text", "input_text", "output_text", "refusal", "text-plain"})
THINKING = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "image_generation_call": "image",
    "audio": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "media": "file",
    "document": "document",
}
#: a tool call among the parts: mostly the mirror of one in ``tool_calls``
CALLS = frozenset(
    "tool_use tool_call function_call custom_tool_call computer_call tool_call_chunk invalid_tool_call".split()
)
#: what a provider ran by itself, and its marks; the model sees them, nothing has to answer them
SERVER = frozenset(
    {
        "cachePoint",
        "cache_point",
        "code_execution_result",
        "compaction",
        "executable_code",
        "guard_content",
        "input_json_delta",
        "json",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "non_standard",
        "search_result",
        "server_tool_call",
        "server_tool_call_chunk",
        "server_tool_result",
        "server_tool_use",
        "tool_reference",
        "tool_result",
    }
)
_SERVER_ENDINGS = ("_call", "_call_output", "_tool_result", "_tool_use")
#: bookkeeping inside a part: not for the model
_HIDDEN = frozenset({"cache_control", "index"})
_COUNTED = (
    "text",
    "thinking",
    "reasoning",
    "reasoning_content",
    "summary",
    "data",
    "encrypted_content",
    "refusal",
    "citations",
    "annotations",
)
_BASE64 = re.compile(r"[A-Za-z0-9+/_=-]{256}")
_WORD = re.compile(r"[A-Z]?[a-z]+")
#: words in the name of an unknown part that holds media
_MEDIA_WORDS = frozenset({"image", "audio", "video", "file", "document", "media", "inline"})
#: how deep an unknown part may hide its text
_DEPTH = 4


def type_of(part: Any) -> str | None:
    """The ``type`` of a part, where it is a dict that names one."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def is_media(part: Any) -> bool:
    """Is this a part that holds media and no text of its own?"""
    if not isinstance(part, dict):
        return False
    if type_of(part) in MEDIA:
        return not _document_text(part)
    return not _known(part) and _names_media(part) and not _inner_text(part)


def part_text(part: Any) -> str:
    """The readable text of a part: media as ``[image]``-like marks, thinking and mirrored calls left out."""
    if not isinstance(part, dict):
        return str(part)
    kind = type_of(part)
    if kind in THINKING or kind in CALLS:
        return ""
    if kind in MEDIA:
        return _document_text(part) or f"[{MEDIA[kind]}]"
    if kind in ("tool_result", "search_result"):
        return content_text(part.get("content"))
    if not _known(part):
        return _inner_text(part) or f"[{_name(part)}]"
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else "[document]" if kind == "text-plain" else f"[{kind}]"


def content_text(content: Any) -> str:
    """The readable text of a whole content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(t for t in map(part_text, content) if t)


def content_visible(content: Any) -> Any:
    """The content as the model sees it: cache marks, stream indexes and generated ids left out."""
    if not isinstance(content, list):
        return canonical(content) if content else ""
    return [_part_visible(p) for p in content] or ""


def content_tokens(content: Any) -> int:
    """Estimated tokens of a content, without its tool calls (those are counted once, wherever they stand)."""
    if isinstance(content, str):
        return count_text(content)
    if not isinstance(content, list):
        return 0 if content is None else count_text(str(content))
    return sum(map(_part_tokens, content))


def value_tokens(value: Any) -> int:
    """Estimated tokens of any JSON-like value; binary data in it at the cost of one media part."""
    if isinstance(value, str):
        tokens = count_text(value)
        return min(tokens, MEDIA_TOKENS) if len(value) > 2048 and _BASE64.match(value) else tokens
    if isinstance(value, bytes | bytearray | memoryview):
        return MEDIA_TOKENS
    if isinstance(value, Mapping):
        return sum(1 + value_tokens(str(k)) + value_tokens(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(map(value_tokens, value))
    return 0 if value is None else count_text(str(value))


def part_call_id(part: dict[str, Any]) -> str:
    """The id that a result of this call has to name."""
    return str(part.get("call_id") or part.get("id") or "")


def part_arguments(part: dict[str, Any]) -> Any:
    """The arguments of a call among the parts: parsed, or as text; of a streamed one what came in pieces."""
    given = next((part[k] for k in ("input", "args", "arguments", "action") if part.get(k)), None)
    return given if given is not None else part.get("partial_json") or {}


def parsed(arguments: Any) -> Any:
    """Call arguments as an object where the text is one, so that both spellings of a call are the same."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value or {} if isinstance(value, dict | list) or value is None else arguments


def _part_visible(part: Any) -> Any:
    if not isinstance(part, dict):
        return canonical(part)
    kind = type_of(part)
    out = {}
    for key, value in part.items():
        generated = key == "id" and (kind in TEXT or (isinstance(value, str) and value.startswith("lc_")))
        if key in _HIDDEN or generated:
            continue
        if key == "content" and kind == "tool_result":
            out[key] = content_visible(value)
        else:
            out.update(canonical({key: value}))
    return out


def _part_tokens(part: Any) -> int:
    if not isinstance(part, dict):
        return value_tokens(part)
    kind = type_of(part)
    if kind in MEDIA:
        text = _document_text(part)
        return count_text(text) if text else MEDIA_TOKENS
    if kind in CALLS:
        return 0
    if kind == "tool_result":
        return content_tokens(part.get("content"))
    if kind == "text-plain":
        return count_text(part["text"]) if isinstance(part.get("text"), str) else MEDIA_TOKENS
    if kind in TEXT or kind in THINKING:
        return sum(value_tokens(part[k]) for k in _COUNTED if part.get(k))
    if not _known(part):
        least = MEDIA_TOKENS if is_media(part) else count_text(part_text(part))
        return max(least, value_tokens(part))
    return value_tokens(part)


def _known(part: dict[str, Any]) -> bool:
    """Is it a part of a kind that is named above?"""
    kind = type_of(part)
    kinds = (TEXT, THINKING, MEDIA, CALLS, SERVER)
    return kind is not None and (any(kind in k for k in kinds) or kind.endswith(_SERVER_ENDINGS))


def _name(part: dict[str, Any]) -> str:
    """What an unknown part is called: its type, or its first key, as Bedrock and Google write it."""
    return type_of(part) or str(next(iter(part), "part"))


def _names_media(part: dict[str, Any]) -> bool:
    return not _MEDIA_WORDS.isdisjoint(word.lower() for word in _WORD.findall(_name(part)))


def _inner_text(value: Any, depth: int = _DEPTH) -> str:
    """The text of an unknown part: its ``text``, else what its ``content`` or the field of its own name holds."""
    if not isinstance(value, dict) or not depth:
        return ""
    for key in ("text", "content", _name(value)):
        held = value.get(key)
        if isinstance(held, str) and key in ("text", "content"):
            text = held
        elif isinstance(held, list):
            text = "\n".join(t for h in held if (t := h if isinstance(h, str) else _inner_text(h, depth - 1)))
        else:
            text = _inner_text(held, depth - 1)
        if text:
            return text
    return ""


def _document_text(part: dict[str, Any]) -> str:
    """The text of a media part that holds plain text: an Anthropic document, or the old ``source_type``."""
    source = part.get("source")
    if isinstance(source, dict):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
        return content_text(source.get("content")) if source.get("type") == "content" else ""
    if part.get("source_type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    return ""
