"""Channels of the middleware and of the pre-model node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware.types import AgentState, PrivateStateAttr
from langchain_core.messages import AnyMessage, BaseMessage
from langgraph.channels.untracked_value import UntrackedValue

from smoothctx.errors import ConfigurationError

from .saved import LookaheadState, Saved, merge_saved

#: where the view of a pre-model node goes
VIEW_KEY = "llm_input_messages"


class LookaheadAgentState(AgentState[Any]):
    """The state of an agent with a lookahead middleware. The channel is private: not for input, not in the output."""

    # LangGraph takes the last item for the reducer.
    smoothctx: Annotated[NotRequired[Saved], PrivateStateAttr, merge_saved]


class ViewState(LookaheadState, total=False):
    """Channels for a pre-model node: mix it into the state of a graph of your own.

    The view is never written to a checkpoint; a run that resumes between the two nodes does not have it, which is what
    :func:`model_input` is for. What is committed is.
    """

    llm_input_messages: Annotated[list[AnyMessage], UntrackedValue]


def model_input(state: Any, messages_key: str = "messages") -> list[BaseMessage]:
    """What to send to the model behind a pre-model node: its view, or the messages where there is none.

    Raises:
        ConfigurationError: this is no state of a graph.
    """
    if state is None or isinstance(state, str | list | tuple):
        raise ConfigurationError(f"state={state!r}: expected the graph's state, which has {messages_key!r}")
    return list(read(state, VIEW_KEY) or read(state, messages_key) or ())


def read(state: Any, key: str) -> Any:
    """A field of a state that is a mapping or an object; ``None`` where it is not set."""
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
