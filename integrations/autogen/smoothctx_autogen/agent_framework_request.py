"""What an agent of the Agent Framework sends beside its messages: instructions and tools, as an engine gets them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any


def request_of(options: Mapping[str, Any] | None, given: Container[str] = ()) -> dict[str, Any]:
    """The constant part of a chat request, as ``Runtime.session(request=)`` takes it, without what was ``given``.

    Raises:
        TypeError: a tool or instructions of a kind that only the client can write.
    """
    options, found = options or {}, dict[str, Any]()
    said = options.get("instructions") or [] if "messages" not in given else []
    texts = [said] if isinstance(said, str) else said
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError("instructions that are no texts are written by their own client alone")
    if texts := [text for text in texts if text.strip()]:  # one message each, as the framework's clients send them
        found["messages"] = [{"role": "system", "content": text} for text in texts]
    tools = options.get("tools") or [] if "tools" not in given else []
    if tools:
        found["tools"] = [_schema(tool) for tool in (tools if isinstance(tools, list | tuple) else [tools])]
    return found


def _schema(tool: Any) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    write = getattr(tool, "to_json_schema_spec", None)
    if write is None:
        raise TypeError(f"a tool of type {type(tool).__name__} has no schema that could be sent ahead")
    return dict(write())
