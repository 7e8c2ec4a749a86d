"""smoothctx for LangGraph and LangChain.

builder.add_node("model", lookahead_node(runtime, policy)(call_model))          # a node of a StateGraph
agent = create_agent(model, tools, middleware=[LookaheadMiddleware(runtime, policy)])
"""

from __future__ import annotations

from importlib.util import find_spec


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


for _module in ("langgraph.graph", "langchain.agents"):
    if not _installed(_module):
        raise ImportError(
            f"smoothctx_langgraph needs {_module.partition('.')[0]}: pip install 'smoothctx[langgraph]'", name=_module
        )

from .codec import LangChainMessages  # noqa: E402
from .isolation import isolated  # noqa: E402
from .middleware import LookaheadMiddleware  # noqa: E402
from .middleware_commit import LookaheadStateMiddleware  # noqa: E402
from .middleware_state import LookaheadAgentState, ViewState, model_input  # noqa: E402
from .models import ChatModel  # noqa: E402
from .node import lookahead_node  # noqa: E402
from .premodel import premodel_node  # noqa: E402
from .saved import LookaheadState, Saved, merge_saved  # noqa: E402
from .stock import StockTransform, lookahead_stock  # noqa: E402
from .stores import GraphStore  # noqa: E402
from .tools import retrieve_tool  # noqa: E402

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
