"""Contents: what the model sees of each kind of the framework's ``Content``, as structure, text and tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from agent_framework import Content

from smoothctx.tokens import MEDIA_TOKENS, MESSAGE_TOKENS, count_text

# What the model sees of each content kind. Ids of an occurrence, statuses, annotations, additional properties and
# raw representations are bookkeeping: the framework adds them later, or loses them on the way through its stores.
FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "text_reasoning": ("text", "protected_data"),
    "data": ("uri", "media_type", "name"),
    "uri": ("uri", "media_type"),
    "error": ("message", "error_code", "error_details"),
    "function_call": ("call_id", "name", "arguments"),
    "function_result": ("call_id", "result", "items"),
    "usage": (),
    "hosted_file": ("file_id", "media_type", "name"),
    "hosted_vector_store": ("vector_store_id",),
    "code_interpreter_tool_call": ("call_id", "inputs"),
    "code_interpreter_tool_result": ("call_id", "outputs"),
    "image_generation_tool_call": ("image_id",),
    "image_generation_tool_result": ("image_id", "outputs"),
    "mcp_server_tool_call": ("call_id", "server_name", "tool_name", "arguments"),
    "mcp_server_tool_result": ("call_id", "output"),
    "search_tool_call": ("call_id", "tool_name", "arguments"),
    "search_tool_result": ("call_id", "tool_name", "result", "items"),
    "shell_tool_call": ("call_id", "commands"),
    "shell_tool_result": ("call_id", "outputs"),
    "shell_command_output": ("stdout", "stderr", "exit_code", "timed_out"),
    "computer_tool_call": ("call_id", "actions"),
    "computer_tool_result": ("call_id", "screenshot"),
    "function_approval_request": ("function_call",),
    "function_approval_response": ("function_call", "approved"),
    "oauth_consent_request": ("consent_link",),
}
CALLS = frozenset(k for k, fields in FIELDS.items() if k.endswith("_call") and "call_id" in fields)
RESULTS = frozenset(k for k, fields in FIELDS.items() if k.endswith("_result") and "call_id" in fields)
APPROVALS = frozenset({"function_approval_request", "function_approval_response"})
MEDIA = frozenset({"data", "uri", "hosted_file"})


def is_visible(content: Any) -> bool:
    """Usage is no content for the model, and approvals of local tools are settled before the model is called."""
    if not isinstance(content, Content):
        return True
    if content.type == "usage":
        return False
    if content.type in APPROVALS:
        call = content.function_call
        return call is None or call.type != "function_call" or bool(call.hosted)
    return True


def structure(value: Any) -> Any:
    """Containers anew, leaves as they are; a text content as its text."""
    if isinstance(value, Content):
        if value.type == "text":
            return value.text
        fields = {f: structure(v) for f in FIELDS.get(value.type, ()) if (v := getattr(value, f)) is not None}
        return {"type": value.type, **fields}
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(k): structure(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [structure(v) for v in value]
    as_dict = getattr(value, "to_dict", None) or getattr(value, "model_dump", None)
    return structure(as_dict()) if callable(as_dict) else value


def media_kind(content: Content) -> str | None:
    """``"image"``, ``"audio"``, ``"video"`` or ``"file"``; ``None`` where it is no media."""
    if content.type not in MEDIA:
        return None
    kind = (content.media_type or "").split("/")[0].strip().lower()
    return kind if kind in ("image", "audio", "video") else "file"


def text_of(value: Any) -> str:
    """One content, or what stands in one, as text for a reader."""
    if isinstance(value, list | tuple):
        return "\n".join(t for t in map(text_of, value) if t)
    if not isinstance(value, Content):
        return value if isinstance(value, str) else "" if value is None else _json(value)
    kind = value.type
    if kind == "text":
        return value.text or ""
    if kind == "text_reasoning" or not is_visible(value):
        return ""
    if media := media_kind(value):
        return f"[{media}]"
    if kind in ("function_result", "search_tool_result"):
        return text_of(value.items) or text_of(value.result)
    if kind == "mcp_server_tool_result":
        return text_of(value.output)
    if kind.endswith("_result"):
        return text_of(value.screenshot if kind == "computer_tool_result" else value.outputs)
    if kind == "shell_command_output":
        code = f"[exit code {value.exit_code}]" if value.exit_code else ""
        return "\n".join(t for t in (value.stdout, value.stderr, code) if t)
    if kind in CALLS:
        return f"[{call_name(value)}({call_arguments(value)})]"
    fields = [
        str(v) for f in FIELDS.get(kind, ()) if (v := getattr(value, f)) is not None and not isinstance(v, Content)
    ]
    return f"[{kind}{': ' if fields else ''}{', '.join(fields)}]"


def call_name(call: Content) -> str:
    """The tool's name; of a hosted tool without one its kind."""
    if call.type == "function_call":
        return call.name or ""
    return call.tool_name or call.type.removesuffix("_tool_call").removesuffix("_call")


def call_arguments(call: Content) -> str:
    """The arguments as text: as sent, or as compact JSON."""
    if call.arguments is not None:
        return call.arguments if isinstance(call.arguments, str) else _json(dict(call.arguments))
    given: Any = call.commands or call.actions
    if not given:
        given = [t for c in call.inputs or () if (t := text_of(c))]
    return _json(given) if given else ""


def with_answer(result: Content, text: str) -> Content:
    """The result with another text; its media stay."""
    made = copy.copy(result)
    made.raw_representation = None
    if result.type in ("function_result", "search_tool_result"):
        made.result = text
        made.items = [Content.from_text(text), *(c for c in result.items or () if c.type in MEDIA)]
    elif result.type == "mcp_server_tool_result":
        made.output = [Content.from_text(text)]
    elif result.type != "computer_tool_result":  # which is a picture
        made.outputs = [Content.from_text(text)]
    return made


def tokens_of(value: Any) -> int:
    """Estimated tokens of one content, or of what stands in one."""
    if isinstance(value, list | tuple):
        return sum(map(tokens_of, value))
    if not isinstance(value, Content):
        return 0 if value is None else count_text(value if isinstance(value, str) else _json(value))
    kind = value.type
    if not is_visible(value):
        return 0
    if kind in MEDIA or kind == "image_generation_tool_call":
        return MEDIA_TOKENS
    if kind in CALLS:
        return MESSAGE_TOKENS + count_text(call_name(value)) + count_text(call_arguments(value))
    if kind in ("function_result", "search_tool_result"):
        return MESSAGE_TOKENS + (tokens_of(value.items) or tokens_of(value.result))
    return sum(tokens_of(getattr(value, f)) for f in FIELDS.get(kind, ()))


def _json(value: Any) -> str:
    return json.dumps(structure(value), ensure_ascii=False, separators=(",", ":"), default=str)
