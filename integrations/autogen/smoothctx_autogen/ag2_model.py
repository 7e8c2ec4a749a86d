"""A model from an AG2 1.x ``ModelConfig``, for ``Summarize`` and the like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ag2.events import (
    BaseEvent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextInput,
    ToolCallEvent,
    ToolCallsEvent,
    ToolResult,
    ToolResultEvent,
    ToolResultsEvent,
)
from fast_depends.pydantic import PydanticSerializer  # type: ignore[import-not-found]

from ag2 import Context, MemoryStream
from smoothctx.errors import ConfigurationError
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage, token_count

from .ag2_events import UNCACHED
from .checks import check_text


class ConfigModel:
    """Asks the client of a model config: ``Summarize(ConfigModel(OpenAIConfig("...")))``.

    Each call has a client and a stream of its own, so nothing of it reaches the agent's stream, observers or
    middleware. ``max_tokens`` is passed on where the config has such a field.

    Args:
        config: any ``ModelConfig`` of AG2.
        model_id: names the model in artifacts that outlive the process; by default provider, server and model.

    Raises:
        ConfigurationError: it is no config, does not say which model it is, or ``model_id`` is no text.
    """

    def __init__(self, config: Any, *, model_id: str | None = None) -> None:
        check_text("model_id", model_id, optional=True)
        if not callable(getattr(config, "create", None)) or not callable(getattr(config, "copy", None)):
            raise ConfigurationError(f"config={config!r}: expected a ModelConfig of AG2")
        self._config = config
        self._serializer = PydanticSerializer(
            pydantic_config={"arbitrary_types_allowed": True}, use_fastdepends_errors=False
        )
        self.identity = model_id or _name(config)
        if not self.identity:
            raise ConfigurationError(f"config={config!r}: it does not say which model it is; give model_id=")

    async def complete(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any) -> Any:
        """Ask the model; ``options`` of other engines are left out. What the client raises passes through."""
        prompt = [_text(m) for m in messages if m["role"] in ("system", "developer")]
        client = self._limited(max_tokens).create()
        response = await client(
            list(_events(messages)),
            Context(MemoryStream(), prompt=prompt),
            tools=[],
            response_schema=None,
            serializer=self._serializer,
        )
        return ModelReply(
            text=response.content or "",
            usage=usage_of(response),
            finish_reason=response.finish_reason,
            tool_calls=bool(response.tool_calls),
        )

    def _limited(self, max_tokens: int | None) -> Any:
        field = next((f for f in ("max_tokens", "max_output_tokens") if hasattr(self._config, f)), None)
        return self._config if max_tokens is None or field is None else self._config.copy(**{field: max_tokens})


def _name(config: Any) -> str:
    try:
        parts = [getattr(config.provider, "value", config.provider), getattr(config, "base_url", None), config.model]
    except NotImplementedError:
        return ""
    return "/".join(p for p in parts if isinstance(p, str) and p) if parts[-1] else ""


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content) if content else ""


def _events(messages: list[dict[str, Any]]) -> Iterator[BaseEvent]:
    """OpenAI-style dicts as events. Results that stand together answer one response, so they are one event."""
    results: list[ToolResultEvent] = []
    for message in messages:
        if message["role"] == "tool":
            call_id = str(message.get("tool_call_id") or "")
            results.append(ToolResultEvent(parent_id=call_id, result=ToolResult(_text(message))))
            continue
        if results:
            yield ToolResultsEvent(results)
            results = []
        if message["role"] == "user":
            yield ModelRequest([TextInput(_text(message))])
        elif message["role"] == "assistant":
            calls = [
                ToolCallEvent(c["function"]["name"], id=c["id"], arguments=c["function"]["arguments"])
                for c in message.get("tool_calls") or ()
            ]
            text = _text(message)
            yield ModelResponse(ModelMessage(text) if text else None, tool_calls=ToolCallsEvent(calls))
    if results:
        yield ToolResultsEvent(results)


def usage_of(response: Any) -> Usage:
    """What the provider says that one response cost; estimated where it says nothing."""
    usage = getattr(response, "usage", None)
    if not usage:
        return Usage(calls=1, estimated=True)
    cached, prompt = _count(usage, "cache_read_input_tokens"), _count(usage, "prompt_tokens") or 0
    if getattr(response, "provider", None) in UNCACHED:
        prompt += (cached or 0) + (_count(usage, "cache_creation_input_tokens") or 0)
    return Usage(
        input_tokens=prompt,
        output_tokens=_count(usage, "completion_tokens") or 0,
        cached_tokens=cached,
        calls=1,
    )


def _count(usage: Any, name: str) -> int | None:
    return token_count(getattr(usage, name, None))
