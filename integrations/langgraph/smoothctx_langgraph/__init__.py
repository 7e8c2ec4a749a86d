"""smoothctx for LangGraph and LangChain.

builder.add_node("model", lookahead_node(runtime, policy)(call_model))          # a node of a StateGraph
agent = create_agent(model, tools, middleware=[LookaheadMiddleware(runtime, policy)])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codec import LangChainMessages
    from .isolation import isolated
    from .middleware import LookaheadMiddleware
    from .middleware_commit import LookaheadStateMiddleware
    from .middleware_state import LookaheadAgentState, ViewState, model_input
    from .models import ChatModel
    from .node import lookahead_node
    from .premodel import premodel_node
    from .saved import LookaheadState, Saved, merge_saved
    from .stock import StockTransform, lookahead_stock
    from .stores import GraphStore
    from .tools import retrieve_tool

__all__ = (
    "ChatModel",
    "GraphStore",
    "LangChainMessages",
    "LookaheadAgentState",
    "LookaheadMiddleware",
    "LookaheadState",
    "LookaheadStateMiddleware",
    "Saved",
    "StockTransform",
    "ViewState",
    "isolated",
    "lookahead_node",
    "lookahead_stock",
    "merge_saved",
    "model_input",
    "premodel_node",
    "retrieve_tool",
)

# Each name is loaded when it is first used: who decorates a node does not wait for LangChain's agents.
_MODULES = {
    "ChatModel": "models",
    "GraphStore": "stores",
    "LangChainMessages": "codec",
    "LookaheadAgentState": "middleware_state",
    "LookaheadMiddleware": "middleware",
    "LookaheadState": "saved",
    "LookaheadStateMiddleware": "middleware_commit",
    "Saved": "saved",
    "StockTransform": "stock",
    "ViewState": "middleware_state",
    "isolated": "isolation",
    "lookahead_node": "node",
    "lookahead_stock": "stock",
    "merge_saved": "saved",
    "model_input": "middleware_state",
    "premodel_node": "premodel",
    "retrieve_tool": "tools",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("langchain", "langchain_core", "langgraph", "langsmith"):
            raise
        raise ImportError(f"{name} needs {missing}: pip install 'smoothctx[langgraph]'", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
