"""A model from an AG2 classic ``llm_config``, for ``Summarize`` and the like."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from autogen import OpenAIWrapper

from smoothctx.errors import ConfigurationError, TransformError
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage, token_count

from .checks import check_text

_NAMING = ("api_type", "base_url", "model")


class WrapperModel:
    """Asks through an ``OpenAIWrapper`` of its own: ``Summarize(WrapperModel(llm_config))``.

    Its clients are synchronous, so each call runs in a worker thread. A call that is cancelled is not waited for, but
    its thread only ends when the client does: set ``timeout`` in the config. Streaming and caching are switched off,
    and the agent's own usage summary does not count these calls; the runtime's does.

    Args:
        config: an ``LLMConfig``, a dict for ``OpenAIWrapper``, or a wrapper (with its model clients registered).
        model_id: names the model in artifacts that outlive the process; by default the models and URLs of the config.
            A wrapper does not tell these, so it needs one.

    Raises:
        ConfigurationError: it is none of these, ``model_id`` is no text, or no name is known.
    """

    def __init__(self, config: Any, *, model_id: str | None = None) -> None:
        check_text("model_id", model_id, optional=True)
        if isinstance(config, OpenAIWrapper):
            self._wrapper = config
        elif config and (isinstance(config, Mapping) or hasattr(config, "config_list")):
            self._wrapper = OpenAIWrapper(**config)
        else:
            raise ConfigurationError(f"config={config!r}: expected an LLMConfig, a dict with a model, or OpenAIWrapper")
        self.identity = model_id or _names(config)
        if not self.identity:
            raise ConfigurationError(f"config={config!r}: no model is named in it; give model_id=")

    async def complete(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any) -> Any:
        """Ask the model.

        Raises:
            TransformError: when its reply cannot be read. What the client raises passes through.
        """
        create: dict[str, Any] = {**options, "messages": messages, "stream": False, "cache_seed": None}
        if max_tokens is not None:
            create["max_tokens"] = max_tokens
        # A thread of the executor starts without the caller's context, so nothing here reaches the chat's streams.
        ask = partial(self._wrapper.create, **create)
        return _reply(await asyncio.get_running_loop().run_in_executor(None, ask))


def _names(config: Any) -> str:
    """The models and servers that a config names."""
    if isinstance(config, OpenAIWrapper):
        return ""
    entries = dict(**config).get("config_list") or [config]
    found = []
    for entry in entries:
        fields = entry if isinstance(entry, Mapping) else {k: getattr(entry, k, None) for k in _NAMING}
        if fields.get("model"):
            found.append("/".join(str(fields[k]) for k in _NAMING if fields.get(k)))
    return ",".join(found)


def _reply(response: Any) -> ModelReply:
    """An OpenAI-style completion as one of ours."""
    try:
        choice = response.choices[0]
        message = choice.message
        content = message if isinstance(message, str) else getattr(message, "content", None)
    except (AttributeError, IndexError) as error:
        raise TransformError(f"model: expected a chat completion, got {type(response).__name__}") from error
    usage = getattr(response, "usage", None)
    asked, written = (token_count(getattr(usage, name, None)) for name in ("prompt_tokens", "completion_tokens"))
    return ModelReply(
        text=content if isinstance(content, str) else "",
        usage=Usage(input_tokens=asked, output_tokens=written, calls=1)
        if asked is not None and written is not None
        else Usage(calls=1, estimated=True),
        finish_reason=getattr(choice, "finish_reason", None),
        tool_calls=bool(getattr(message, "tool_calls", None)),
    )
