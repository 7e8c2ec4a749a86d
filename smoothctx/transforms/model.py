"""Models: whatever the user gave as *model*, as one internal callable with one kind of reply."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints, runtime_checkable

from .. import urgency
from ..endpoints import endpoint
from ..errors import ConfigurationError, TransformError
from ..tokens import MESSAGE_TOKENS, count_text
from ..usage import Usage

EXPECTED = (
    "an async function `async def model(messages: list[dict], *, max_tokens: int | None = None) -> str`, "
    "or an engine with an `identity` and an async `complete(messages, *, max_tokens=None, **options)`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """One answer of a model. ``tool_calls``: it asked for tools (instead of, or beside, a text).

    A plain async model may return one of these instead of a ``str``, to report its true usage.
    """

    text: str
    usage: Usage = Usage()
    finish_reason: str | None = None
    tool_calls: bool = False


@runtime_checkable
class ModelEngine(Protocol):
    """What a transform needs of an engine.

    The reply of ``complete`` has ``text: str``, ``usage: Usage`` and ``finish_reason: str | None``, and may
    have ``tool_calls`` (truthy when the model asked for tools). An engine may also have
    ``context_window: int | None``, its own limit in tokens.
    """

    @property
    def identity(self) -> str:
        """The server's URL and the model's name: part of every fingerprint."""
        ...

    async def complete(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any) -> Any:
        """Ask the model. Raises ``EngineError``."""
        ...


class Model:
    """A user's model, ready to be asked. ``identity`` is ``None`` for an anonymous callable."""

    def __init__(self, model: Any, *, model_id: str | None = None, option: str = "model") -> None:
        """Check and wrap ``model``.

        Raises:
            ConfigurationError: when it is neither an async function nor an engine.
        """
        if model_id is not None and (not isinstance(model_id, str) or not model_id.strip()):
            raise ConfigurationError(f"model_id={model_id!r}: expected a text that names the model, or None")
        self.is_engine = inspect.iscoroutinefunction(getattr(model, "complete", None))
        self.window: int | None = None
        self.identity = model_id
        if self.is_engine:
            identity = getattr(model, "identity", None)
            if not isinstance(identity, str) or not identity:
                raise ConfigurationError(
                    f"{option}={model!r}: its identity is {identity!r}; expected URL and model name"
                )
            self.identity = model_id or identity
            window = getattr(model, "context_window", None)
            self.window = window if isinstance(window, int) and window > 0 else None
        elif not callable(model) or isinstance(model, type):
            raise ConfigurationError(f"{option}={model!r}: expected {EXPECTED}")
        elif not _takes_max_tokens(model):
            raise ConfigurationError(f"{option}={model!r}: it does not accept max_tokens=; expected {EXPECTED}")
        elif is_plain(model):
            raise ConfigurationError(f"{option}={model!r}: it is not async; expected {EXPECTED}")
        #: what was given
        self.given: Any = model
        #: the engine, where the model is one
        self.engine = model if self.is_engine else None

    async def ask(
        self, messages: Sequence[dict[str, Any]], *, max_tokens: int, options: Mapping[str, Any] | None = None
    ) -> ModelReply:
        """Ask the model. ``options`` go to an engine only. What the model does to its input stays with it.

        Raises:
            TransformError: when the answer is not of the expected type, or too many calls wait for this model.
        """
        own = copy.deepcopy(list(messages))
        async with endpoint(self.given, self.identity):
            return await self._asked(own, max_tokens, options)

    async def _asked(self, own: list[dict[str, Any]], max_tokens: int, options: Mapping[str, Any] | None) -> ModelReply:
        if self.is_engine:
            return _read(await urgency.complete(self.given, own, max_tokens=max_tokens, options=options or {}))
        answer = self.given(own, max_tokens=max_tokens)
        if not inspect.isawaitable(answer):
            raise TransformError(f"model: it returned {type(answer).__name__} at once; expected {EXPECTED}")
        answer = await answer
        if isinstance(answer, ModelReply):
            return answer
        if not isinstance(answer, str):
            raise TransformError(f"model: expected a str (or a ModelReply), got {type(answer).__name__}")
        usage = Usage(input_tokens=estimate(own), output_tokens=count_text(answer), calls=1, estimated=True)
        return ModelReply(text=answer, usage=usage)


def estimate(messages: Sequence[Mapping[str, Any]]) -> int:
    """Estimated tokens of OpenAI-style dicts, by the default codec."""
    from ..codec import OpenAIMessages

    codec = OpenAIMessages()
    return sum(codec.estimate(dict(m)) for m in messages)


def options_tokens(options: Mapping[str, Any]) -> int:
    """Tokens that request options add to a prompt: the tool schemas."""
    tools = options.get("tools")
    return count_text(json.dumps(tools, default=str)) + MESSAGE_TOKENS if tools else 0


def _read(reply: Any) -> ModelReply:
    text = getattr(reply, "text", None)
    if text is not None and not isinstance(text, str):
        raise TransformError(f"engine reply: expected .text to be a str, got {type(text).__name__}")
    if text is None and not hasattr(reply, "text"):
        raise TransformError(f"engine reply: expected an object with .text, .usage and .finish_reason, got {reply!r}")
    usage = getattr(reply, "usage", None)
    return ModelReply(
        text=text or "",
        usage=usage if isinstance(usage, Usage) else Usage(calls=1, estimated=True),
        finish_reason=getattr(reply, "finish_reason", None),
        tool_calls=bool(getattr(reply, "tool_calls", False)),
    )


def _takes_max_tokens(model: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return True  # cannot be known before the first call
    return any(
        p.kind is p.VAR_KEYWORD or (p.name == "max_tokens" and p.kind is not p.POSITIONAL_ONLY) for p in parameters
    )


def is_plain(fn: Any) -> bool:
    """A function or method by ``def`` that does not say that it returns an awaitable.

    A lambda, an object with ``__call__`` and a wrapper of an async function may do so without saying it.
    """
    if not (inspect.isfunction(fn) or inspect.ismethod(fn)) or fn.__name__ == "<lambda>":
        return False
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inspect.unwrap(fn)):
        return False
    try:
        returned = get_type_hints(fn).get("return")
    except Exception:  # a name that cannot be looked up
        returned = inspect.signature(fn).return_annotation
    kinds = get_args(returned) if isinstance(returned, UnionType) or get_origin(returned) is Union else (returned,)
    return not any(map(_says_awaitable, kinds))


def _says_awaitable(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return re.search(r"\b(Awaitable|Coroutine|CoroutineType|Future|Task)\b", annotation) is not None
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Awaitable)
