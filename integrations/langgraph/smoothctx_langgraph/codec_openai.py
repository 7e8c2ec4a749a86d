"""LangChain messages as OpenAI-style dicts, and back: for the requests that smoothctx makes itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from smoothctx.codec import ToolCall

from .codec_parts import MEDIA, part_text, type_of

_NAME = re.compile(r"[^\s<|\\/>]{1,64}")
_SYSTEM = frozenset({"system", "developer"})
#: stands before a system message from the middle of a conversation, which not every provider takes
SYSTEM_NOTE = "[system message]\n"


def openai_content(content: Any, role: str) -> str | list[dict[str, Any]]:
    """Content that every OpenAI-compatible server takes: parts for users only, everything else as text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if role != "user":
        return "\n".join(t for t in map(part_text, parts) if t)
    out = []
    for part in parts:
        media = _openai_media(part) if type_of(part) in MEDIA else None
        if media is not None:
            out.append(media)
        elif text := part_text(part):
            out.append({"type": "text", "text": text})
    return out or ""


def openai_call(call: ToolCall) -> dict[str, Any]:
    """A tool call as OpenAI writes it; its arguments are JSON whatever the model once sent."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _json_object(call)}}


def openai_name(name: Any) -> str | None:
    """The name of a message, where it is one that OpenAI takes."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def from_openai(messages: Sequence[Mapping[str, Any]]) -> list[BaseMessage]:
    """OpenAI-style dicts as LangChain messages, in a form that every provider's integration takes.

    System messages behind the first other message become user messages: several providers refuse them there.
    """
    out: list[BaseMessage] = []
    for message in messages:
        role, content = message.get("role"), message.get("content") or ""
        name = message.get("name") or None
        if role in _SYSTEM and all(isinstance(m, SystemMessage) for m in out):
            out.append(SystemMessage(content, name=name))
        elif role in _SYSTEM:
            out.append(HumanMessage(SYSTEM_NOTE + openai_text(content)))
        elif role == "assistant":
            out.append(_assistant(message, content, name))
        elif role in ("tool", "function"):
            out.append(ToolMessage(content, name=name, tool_call_id=str(message.get("tool_call_id") or "")))
        else:
            out.append(HumanMessage(content, name=name))
    return out


def openai_text(content: Any) -> str:
    """The text of an OpenAI-style content."""
    return str(openai_content(content, "system"))


def _assistant(message: Mapping[str, Any], content: Any, name: str | None) -> AIMessage:
    calls: list[dict[str, Any]] = []
    invalid: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        text = function.get("arguments") or "{}"
        head = {"id": call.get("id"), "name": function.get("name") or ""}
        try:
            args = json.loads(text) if isinstance(text, str) else text
        except ValueError:
            args = None
        if isinstance(args, dict):
            calls.append({**head, "args": args, "type": "tool_call"})
        else:
            invalid.append({**head, "args": text, "error": None, "type": "invalid_tool_call"})
    kept = {k: message[k] for k in ("reasoning_content",) if message.get(k)}
    return AIMessage(content, name=name, tool_calls=calls, invalid_tool_calls=invalid, additional_kwargs=kept)


def _json_object(call: ToolCall) -> str:
    try:
        value = json.loads(call.arguments) if call.arguments else {}
    except ValueError:
        value = None
    if isinstance(value, dict):
        return call.arguments or "{}"
    return json.dumps({"invalid_arguments": call.arguments}, ensure_ascii=False)


def _openai_media(part: dict[str, Any]) -> dict[str, Any] | None:
    """A media part in OpenAI's shape; ``None`` where there is none for it (a video, a provider's file id)."""
    kind = part["type"]
    if kind in ("image_url", "input_audio") and isinstance(part.get(kind), dict):
        return {"type": kind, kind: part[kind]}
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "file", "file": part["file"]}
    url = part.get("image_url") if kind in ("image_url", "input_image") else part.get("url")
    mime, data = _data(part)
    if MEDIA[kind] == "image" or (mime or "").startswith("image/"):
        link = url if isinstance(url, str) else f"data:{mime or 'image/png'};base64,{data}" if data else None
        return {"type": "image_url", "image_url": {"url": link}} if link else None
    if MEDIA[kind] == "audio" and data:
        return {"type": "input_audio", "input_audio": {"data": data, "format": (mime or "audio/wav").split("/")[-1]}}
    if MEDIA[kind] in ("file", "document") and data and mime:
        name = part.get("filename") or part.get("title") or "file"
        return {"type": "file", "file": {"filename": str(name), "file_data": f"data:{mime};base64,{data}"}}
    return None


def _data(part: dict[str, Any]) -> tuple[str | None, str | None]:
    """Media type and base64 data, from the new shape, the old one, Anthropic's, or Google's."""
    source = part.get("source")
    if isinstance(source, dict):
        mime, data = source.get("media_type"), source.get("data") if source.get("type") == "base64" else None
    else:
        mime, data = part.get("mime_type"), part.get("base64", part.get("data"))
    return mime if isinstance(mime, str) else None, data if isinstance(data, str) else None
