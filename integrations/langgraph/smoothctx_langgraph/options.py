"""The options that every form takes, checked where they are given: a mistake is told before there is any turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable

from smoothctx import Policy, Runtime
from smoothctx.codec import Codec
from smoothctx.errors import ConfigurationError, MessageError
from smoothctx.request import check_request

#: whose conversations: a name, or a function of the run's config
Tenant = str | Callable[[Mapping[str, Any]], str]
#: where a commit shows: in what the model is sent alone, or in the state
MODES = ("view", "state")

_CODEC = [name for name, made in vars(Codec).items() if inspect.isfunction(made) and not name.startswith("_")]


def check_turns(runtime: Any, policy: Any, *, codec: Any, tenant: Any, engine: Any, request: Any) -> None:
    """Raise ``ConfigurationError`` for what no turn could work with."""
    if not isinstance(runtime, Runtime):
        raise ConfigurationError(f"runtime={runtime!r}: expected a Runtime")
    if not isinstance(policy, Policy):
        raise ConfigurationError(f"policy={policy!r}: expected a Policy")
    if codec is not None:
        _check_codec(codec)
    if not _is_name(tenant) and (not callable(tenant) or _is_async(tenant)):
        raise ConfigurationError(
            f"tenant={tenant!r}: expected a text that is not empty, or a function (not async) of the run's config"
        )
    if engine is not None and not _is_engine(engine):
        raise ConfigurationError(f"engine={engine!r}: expected an engine such as OpenAIEngine(...), or None")
    check_request(request)


def check_mode(mode: Any) -> None:
    """Raise ``ConfigurationError`` for another mode."""
    if mode not in MODES:
        raise ConfigurationError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")


def check_name(name: Any) -> None:
    """Raise ``ConfigurationError`` for what names nothing."""
    if not _is_name(name):
        raise ConfigurationError(f"name={name!r}: expected a text that is not empty")


def check_messages_key(key: Any) -> None:
    """Raise ``ConfigurationError`` for what cannot be a key of a state."""
    if not _is_name(key):
        raise ConfigurationError(f"messages_key={key!r}: expected a name in the state")


def check_wish(option: str, wish: Any) -> None:
    """Raise ``ConfigurationError`` for what is neither yes nor no nor left open."""
    if wish is not None and not isinstance(wish, bool):
        raise ConfigurationError(f"{option}={wish!r}: expected True, False or None")


def tenant_of(tenant: Tenant, config: Mapping[str, Any]) -> str:
    """Whose run this is.

    Raises:
        ValueError: the function gave no name.
    """
    if isinstance(tenant, str):
        return tenant
    who: Any = tenant(config)
    if not _is_name(who):
        if inspect.iscoroutine(who):
            who.close()
        raise ValueError(f"expected a text that is not empty, got {who!r}")
    return str(who)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_async(function: Any) -> bool:
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004 (which)
    return inspect.iscoroutinefunction(called)


def _is_engine(engine: Any) -> bool:
    if isinstance(engine, type | Runnable):  # a chat model has a `bind` too, which is something else
        return False
    return any(callable(getattr(engine, name, None)) for name in ("bind", "complete"))


def _check_codec(codec: Any) -> None:
    missing = [name for name in _CODEC if not callable(getattr(codec, name, None))]
    if isinstance(codec, type) or missing or not isinstance(getattr(codec, "name", None), str):
        raise ConfigurationError(f"codec={codec!r}: expected a Codec such as LangChainMessages(), or None")
    try:
        codec.check(HumanMessage("."), 0)
    except MessageError as error:
        raise ConfigurationError(f"codec={codec!r}: expected one that reads LangChain's messages ({error})") from error
