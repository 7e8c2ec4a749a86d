"""smoothctx for AutoGen, AG2 and Microsoft Agent Framework.

The names here are for AutoGen (``autogen-core``, ``autogen-agentchat``) and are imported when they are first used;
``smoothctx_autogen.ag2``, ``.ag2_classic`` and ``.agent_framework`` are modules of their own. Importing this package
imports no framework.

    from smoothctx_autogen import LookaheadChatCompletionContext, LookaheadOptions

    context = LookaheadChatCompletionContext(model_client, options=LookaheadOptions(context_window=128_000))
    agent = AssistantAgent("assistant", model_client, model_context=context)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codec import AutoGenMessages
    from .config import LookaheadContextConfig, LookaheadOptions
    from .context import LookaheadChatCompletionContext
    from .model import ChatClientModel, client_model
    from .process import close_default_runtime, default_runtime, set_default_runtime

__all__ = (
    "AutoGenMessages",
    "ChatClientModel",
    "LookaheadChatCompletionContext",
    "LookaheadContextConfig",
    "LookaheadOptions",
    "client_model",
    "close_default_runtime",
    "default_runtime",
    "set_default_runtime",
)

_WHERE = {
    "AutoGenMessages": "codec",
    "ChatClientModel": "model",
    "LookaheadChatCompletionContext": "context",
    "LookaheadContextConfig": "config",
    "LookaheadOptions": "config",
    "client_model": "model",
    "close_default_runtime": "process",
    "default_runtime": "process",
    "set_default_runtime": "process",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module; a missing framework is an ``ImportError`` that names the extra."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("autogen_core", "autogen_agentchat"):
            raise
        raise ImportError(
            f"{__name__}.{name} needs AutoGen, which is not installed ({error}): pip install 'smoothctx[autogen]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
