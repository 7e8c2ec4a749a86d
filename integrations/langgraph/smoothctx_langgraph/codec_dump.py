"""LangChain messages as JSON, and back: what stores and saved states hold."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    BaseMessage,
    convert_to_messages,
    message_chunk_to_message,
    messages_from_dict,
)

from smoothctx.errors import MessageError

#: marks what JSON has no form for; a dict that has this key by itself is spelled out as pairs
_MARK = "smoothctx:packed"
# Not kept: usage and the rest of the response's metadata, and a tool's artifact (any object, not for the model).
_FIELDS = (
    "content",
    "name",
    "id",
    "additional_kwargs",
    "tool_calls",
    "invalid_tool_calls",
    "tool_call_id",
    "status",
    "role",
)
#: these decide how an integration reads the content
_METADATA = ("output_version", "model_provider")


def dump(messages: Sequence[BaseMessage]) -> bytes:
    """JSON, UTF-8: ``type`` and ``data`` of each message, as LangChain's own ``messages_to_dict`` lays them out."""
    out = []
    for message in map(message_chunk_to_message, messages):
        data = {k: pack(getattr(message, k)) for k in _FIELDS if getattr(message, k, None)}
        metadata = {k: v for k in _METADATA if (v := message.response_metadata.get(k))}
        if metadata:
            data["response_metadata"] = metadata
        if "tool_call_id" in type(message).model_fields:
            data.setdefault("tool_call_id", "")
        out.append({"type": message.type, "data": {"content": "", **data}})
    return json.dumps(out, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def load(data: bytes) -> list[BaseMessage]:
    """Read back what :func:`dump` wrote, or LangChain wrote itself (``messages_to_dict``, ``dumpd``, or chat dicts).

    Raises:
        MessageError: when the data is not a list of messages.
    """
    try:
        rows = json.loads(data.decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise MessageError(f"stored messages are not JSON: {error}") from error
    if not isinstance(rows, list):
        raise MessageError("stored messages: expected a list")
    return [_message(unpack(row), i) for i, row in enumerate(rows)]


def pack(value: Any) -> Any:
    """A value as plain JSON; bytes and keys that are no text are spelled out, other objects become their text."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return {_MARK: base64.b64encode(bytes(value)).decode()}
    if isinstance(value, list | tuple):
        return [pack(v) for v in value]
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and k != _MARK for k in value):
            return {k: pack(v) for k, v in value.items()}
        return {_MARK: [[pack(k), pack(v)] for k, v in value.items()]}
    return repr(value)


def unpack(value: Any) -> Any:
    """What :func:`pack` was given."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_MARK}:
        held = value[_MARK]
        if isinstance(held, str):
            return base64.b64decode(held)
        return {unpack(k): unpack(v) for k, v in held}
    return {k: unpack(v) for k, v in value.items()}


def _message(row: Any, index: int) -> BaseMessage:
    try:
        if isinstance(row, dict) and isinstance(row.get("data"), dict):
            return messages_from_dict([row])[0]
        if not isinstance(row, dict):
            raise TypeError(f"expected a dict, got {type(row).__name__}")
        return convert_to_messages([row])[0]
    except Exception as error:
        raise MessageError(f"stored messages[{index}]: {type(error).__name__}: {error}") from error
