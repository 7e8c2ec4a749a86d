"""Lookahead as middleware that rewrites the agent's state: what a commit replaced is gone from there too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain.agents.middleware.types import AgentMiddleware, AgentState
from langchain_core.messages import BaseMessage

from smoothctx import Policy, Runtime

from .codec import LangChainMessages
from .identity import identity
from .middleware import tools_of, turns_of
from .node_channel import claims_of, takes
from .rewrite import by_id
from .turns import Turn, Turns

#: where a commit shows: in what the model is sent alone, or in the state
MODES = ("view", "state")


class LookaheadStateMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Writes the view into the agent's state before each model call (state mode).

    It replaces messages by their ids: their order stays, whatever other nodes append meanwhile stays, and nothing of
    it appears in the token stream. Earlier checkpoints keep what they held, so forks and time travel find the raw
    messages. Each step of the hook is a checkpoint of its own; :class:`LookaheadMiddleware` needs none.

    The arguments are those of :class:`LookaheadMiddleware`.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        runtime: Runtime,
        policy: Policy,
        *,
        name: str = "LookaheadStateMiddleware",
        codec: LangChainMessages | None = None,
        tenant: str | Callable[[Mapping[str, Any]], str] = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
        retrieve: bool | None = None,
    ) -> None:
        super().__init__()
        self._turns = turns_of(runtime, policy, name, codec=codec, tenant=tenant, engine=engine, request=request)
        self._name = name
        self.tools = tools_of(self._turns, name, tenant, retrieve)

    @property
    def name(self) -> str:
        """The name that was given."""
        return self._name

    def before_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Rewrite the state where something is to be committed."""
        messages = state["messages"]
        with self._turns.turn_sync(messages, place=self._name, saved=None) as turn:
            writes = writes_of(self._turns, messages, turn)
        return {"messages": writes} if writes else None

    async def abefore_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """:meth:`before_model` under ``ainvoke`` and ``astream``."""
        messages = state["messages"]
        async with self._turns.turn(messages, place=self._name, saved=None) as turn:
            writes = writes_of(self._turns, messages, turn)
        return {"messages": writes} if writes else None


def writes_of(
    turns: Turns, messages: Sequence[BaseMessage], turn: Turn, key: str = "messages"
) -> list[BaseMessage] | None:
    """What turns the messages in the state into the view; ``None``, and an event, where the state cannot take it."""
    try:
        return _writes(turns, messages, turn, key) if turn.gaps else []
    except Exception as error:  # ours: the turn goes on with what the state holds
        turns.runtime.events.error(error, where="state")
        return None


def _writes(turns: Turns, messages: Sequence[BaseMessage], turn: Turn, key: str) -> list[BaseMessage] | None:
    where = identity()
    if where is None:
        return None
    writes = by_id(messages, turn.gaps)
    refusal = "messages without ids of their own cannot be replaced"
    if writes is not None:
        found = takes(where, key, writes, turn.view)
        if found is None and claims_of(turns.runtime).take(where, key):
            turn.held = turn.view
            return writes
        refusal = found or "another node of this step rewrites them"
    turns.runtime.events.emit("state.kept", node=where.node, why=f"the messages stay in the state: {refusal}")
    return None
