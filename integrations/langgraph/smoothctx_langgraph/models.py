"""LangChain chat models as smoothctx models: isolated from the run, with their usage reported."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.fallbacks import RunnableWithFallbacks

from smoothctx.errors import ConfigurationError, TransformError
from smoothctx.tokens import count_text
from smoothctx.transforms.model import ModelReply, estimate
from smoothctx.usage import Usage, token_count

from .codec_openai import from_openai
from .codec_parts import CALLS
from .isolation import background_config, isolated

#: how integrations call the bound on the answer, as a field of the model and as an argument of a call
_LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict", "max_new_tokens")
_NAMES = ("model", "model_name", "model_id", "deployment_name", "azure_deployment", "repo_id", "endpoint_name")
_PLACES = (
    "base_url",
    "openai_api_base",
    "anthropic_api_url",
    "azure_endpoint",
    "endpoint_url",
    "endpoint",
    "region_name",
)
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "reasoning_effort", "thinking", "model_kwargs")
_SECRET = re.compile(r"key|secret|password|credential|authorization|header|access_?token|api_?token|_auth", re.I)
#: parameters that change how a model is called, not what it answers
_OPERATIONAL = re.compile(
    r"retries|timeout|streaming|verbose|callbacks|cache|metadata|tags|max_concurrency|client", re.I
)


class ChatModel:
    """Any LangChain chat model as the *model* of a transform: ``Summarize(ChatModel(init_chat_model(...)))``.

    A call takes nothing of the surrounding run with it: no callbacks, stream, tags or parent trace. Callbacks that were
    given to the chat model itself are its own and stay. ``with_retry``, ``with_fallbacks``, ``bind`` and
    ``with_config`` may be around it, and ``init_chat_model`` without a fixed model runs with its defaults.

    Args:
        model: the chat model.
        identity: names the model in fingerprints; by default its class, its name, where it runs and the parameters
            that change its answers (never secrets). A model that does not tell its name gets one that holds in this
            process only, so that nobody takes its work for another model's.
        context_window: its limit in tokens, where it is not in the model's own profile.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(self, model: Any, *, identity: str | None = None, context_window: int | None = None) -> None:
        inner = _chat_models(model)
        if not inner:
            raise ConfigurationError(
                f"model={model!r}: expected a LangChain chat model, or one with bind, with_retry or with_fallbacks"
            )
        if identity is not None and (not isinstance(identity, str) or not identity.strip()):
            raise ConfigurationError(f"identity={identity!r}: expected a text that names the model, or None")
        window = context_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ConfigurationError(f"context_window={window!r}: expected a number of tokens of at least 1, or None")
        #: the chat model as it was given
        self.model: Runnable[Any, Any] = model
        #: names the model in fingerprints
        self.identity: str = identity or _identity(model, inner)
        #: the model's limit in tokens, ``None`` where it is not known
        self.context_window: int | None = context_window or _window(inner)
        self._limit = _limit(inner)
        self._thinking = max(map(_thinking_budget, inner))

    async def complete(
        self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> ModelReply:
        """Ask the model. Of ``options`` only ``tools`` are used, and only by a chat model that takes tools.

        Raises:
            TransformError: when the answer is not a message.
        """
        arguments: dict[str, Any] = {}
        if max_tokens is not None and self._limit is not None:
            # where thinking has a budget of its own, it is part of the provider's bound
            arguments[self._limit] = max_tokens + self._thinking
        with isolated():
            model = _with_tools(self.model, options.get("tools"))
            answer = await model.ainvoke(from_openai(messages), background_config(), **arguments)
        if not isinstance(answer, AIMessage):
            raise TransformError(f"model: expected an AIMessage, got {type(answer).__name__}")
        text = str(answer.text)
        return ModelReply(
            text=text,
            usage=usage_of(answer) or _estimated(messages, text),
            finish_reason=_finish_reason(answer),
            tool_calls=_called(answer),
        )

    def __repr__(self) -> str:
        return f"ChatModel({self.identity!r})"


def _chat_models(model: Any) -> list[BaseChatModel]:
    """The chat models inside bindings, retries and fallbacks; none where it is anything else."""
    if isinstance(model, BaseChatModel):
        return [model]
    if isinstance(model, RunnableBindingBase):
        return _chat_models(model.bound)
    if isinstance(model, RunnableWithFallbacks):
        found = [_chat_models(m) for m in (model.runnable, *model.fallbacks)]
        return [m for ms in found for m in ms] if all(found) else []
    resolve = getattr(type(model), "_model", None)  # what init_chat_model returns when the model may be configured
    if isinstance(model, Runnable) and callable(resolve):
        try:
            return _chat_models(model._model())  # type: ignore[attr-defined]
        except Exception as error:
            raise ConfigurationError(f"model={model!r}: it has no usable default: {error}") from error
    return []


def _identity(model: Any, inner: Sequence[BaseChatModel]) -> str:
    names = [_described(m) for m in inner]
    bound = _bound_arguments(model)
    if bound:
        names.append(f"bind#{_hash(_answering(bound))}")
    return "+".join(names)


def _described(model: BaseChatModel) -> str:
    cls = type(model)
    params = {**{k: getattr(model, k, None) for k in _SAMPLING}, **model._identifying_params}
    name = next((str(v) for k in _NAMES if (v := getattr(model, k, None) or params.get(k))), None)
    place = next((_address(str(v)) for k in _PLACES if (v := getattr(model, k, None))), "")
    if name is None:
        return f"langchain:{cls.__module__}.{cls.__qualname__}:private-{uuid.uuid4().hex}"
    return f"langchain:{cls.__module__}.{cls.__qualname__}:{name}@{place}#{_hash(_answering(params))}"


def _bound_arguments(model: Any) -> dict[str, Any]:
    if isinstance(model, RunnableBindingBase):
        return {**_bound_arguments(model.bound), **model.kwargs}
    if isinstance(model, RunnableWithFallbacks):
        each = [_bound_arguments(m) for m in (model.runnable, *model.fallbacks)]
        return {str(k): found for k, found in enumerate(each) if found}
    if isinstance(model, BaseChatModel) or not callable(getattr(type(model), "_model", None)):
        return {}
    return _bound_arguments(model._model())


def _answering(value: Any) -> Any:
    """What of these parameters decides an answer, as JSON; secrets and what is no plain value are left out."""
    if isinstance(value, Mapping):
        kept = {str(k): _answering(v) for k, v in value.items() if not _SECRET.search(str(k)) and v is not None}
        return {k: v for k, v in kept.items() if not _OPERATIONAL.search(k) and v is not None}
    if isinstance(value, list | tuple):
        return [_answering(v) for v in value]
    return value if isinstance(value, str | int | float | bool) else None


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _address(url: str) -> str:
    """Host and path of a URL: whatever else it holds may be a secret."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    port = parts.netloc.rpartition("@")[2]
    return f"{port}{parts.path}".rstrip("/")


def _window(inner: Sequence[BaseChatModel]) -> int | None:
    """The smallest window among the models' own profiles."""
    profiles = [getattr(m, "profile", None) for m in inner]
    sizes = [p.get("max_input_tokens") for p in profiles if isinstance(p, Mapping)]
    known = [s for s in sizes if isinstance(s, int) and s > 0]
    return min(known) if len(known) == len(inner) else None


def _limit(inner: Sequence[BaseChatModel]) -> str | None:
    """How every one of these models calls the bound on its answer; ``None`` where they do not agree or have none."""
    names = {next((n for n in _LIMITS if n in type(m).model_fields), None) for m in inner}
    return names.pop() if len(names) == 1 else None


def _thinking_budget(model: BaseChatModel) -> int:
    thinking = getattr(model, "thinking", None)
    budget = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    return budget if isinstance(budget, int) and budget > 0 else 0


def _with_tools(model: Runnable[Any, Any], tools: Any) -> Runnable[Any, Any]:
    """The model with the agent's tools declared, where it takes any: a prompt's cache begins with them."""
    if not tools or not isinstance(model, BaseChatModel):
        return model
    try:
        return model.bind_tools(tools)
    except (NotImplementedError, TypeError, ValueError):
        return model


def usage_of(answer: AIMessage) -> Usage | None:
    """What the provider says that this answer cost; ``None`` where it says nothing."""
    reported = answer.usage_metadata
    asked = token_count(reported.get("input_tokens")) if reported else None
    if not reported or not asked:
        return None
    return Usage(
        input_tokens=asked,
        output_tokens=token_count(reported.get("output_tokens")) or 0,
        cached_tokens=token_count((reported.get("input_token_details") or {}).get("cache_read")),
        calls=1,
    )


def _estimated(messages: Sequence[Mapping[str, Any]], text: str) -> Usage:
    return Usage(input_tokens=estimate(messages), output_tokens=count_text(text), calls=1, estimated=True)


def _finish_reason(answer: AIMessage) -> str | None:
    """Why it ended, in OpenAI's words: providers differ in the name of the field and in its spelling."""
    metadata = answer.response_metadata
    reason = next(
        (v for k in ("finish_reason", "stop_reason", "done_reason") if isinstance(v := metadata.get(k), str)), None
    )
    if reason is None and metadata.get("status") == "incomplete":
        details = metadata.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, Mapping) else "length"
    if not isinstance(reason, str):
        return None
    word = reason.lower()
    if word == "safety" or word == "refusal":
        return "content_filter"
    return "length" if word in ("max_tokens", "max_output_tokens", "model_context_window_exceeded") else word


def _called(answer: AIMessage) -> bool:
    parts = answer.content if isinstance(answer.content, list) else []
    mirrored = any(isinstance(p, dict) and p.get("type") in CALLS for p in parts)
    return bool(answer.tool_calls or answer.invalid_tool_calls) or mirrored
