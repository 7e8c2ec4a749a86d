"""Lookahead as middleware that rewrites the agent's state: what a commit replaced is gone from there too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from langchain.agents.middleware.types import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain_core.messages import BaseMessage

from smoothctx import Policy, Runtime

from .codec import LangChainMessages
from .identity import identity
from .middleware import tools_of, turns_of
from .node_channel import claims_of, takes
from .options import Tenant
from .rewrite import by_id
from .turns import Turn, Turns

#: seconds within which the model's node begins behind the hook: checkpoints and other hooks stand between them
DUE_S = 10.0


class LookaheadStateMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Writes the view into the agent's state before each model call (state mode).

    It replaces messages by their ids: their order stays, whatever other nodes append meanwhile stays, and nothing of
    it appears in the token stream. Earlier checkpoints keep what they held, so forks and time travel find the raw
    messages. Each step of the hook is a checkpoint of its own; :class:`LookaheadMiddleware` needs none. What a policy
    offloads is in the runtime's store alone; without one a warning and the event ``state.unstored`` say so.

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
        tenant: Tenant = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
        retrieve: bool | None = None,
    ) -> None:
        super().__init__()
        self._turns = turns_of(
            runtime, policy, name, codec=codec, tenant=tenant, engine=engine, request=request, rewrites=True
        )
        self._name = name
        self.tools = tools_of(self._turns, name, retrieve)

    @property
    def name(self) -> str:
        """The name that was given."""
        return self._name

    def before_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Rewrite the state where something is to be committed."""
        messages = state["messages"]
        with self._turns.turn_sync(messages, place=self._name, saved=None, due_s=DUE_S) as turn:
            writes = writes_of(self._turns, messages, turn)
        return {"messages": writes} if writes else None

    async def abefore_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """:meth:`before_model` under ``ainvoke`` and ``astream``."""
        messages = state["messages"]
        async with self._turns.turn(messages, place=self._name, saved=None, due_s=DUE_S) as turn:
            writes = writes_of(self._turns, messages, turn)
        return {"messages": writes} if writes else None

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """The model call, as it is; background work keeps out of its way until it is over."""
        with self._turns.call(request.state.get("messages", []), place=self._name, asked=request):
            return handler(request)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """:meth:`wrap_model_call` under ``ainvoke`` and ``astream``."""
        with self._turns.call(request.state.get("messages", []), place=self._name, asked=request):
            return await handler(request)


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
    refusal: str | None = "messages without ids of their own cannot be replaced"
    if writes is not None:
        refusal = takes(where, key, writes, turn.view)
        if refusal is None and claims_of(turns.runtime).take(where, key):
            turn.held = turn.view
            return writes
    if refusal is not None:  # else another node of this step rewrites them
        why = f"{where.node}: the messages stay in the state: {refusal}"
        turns.notices.once("state.kept", where.node, why, node=where.node)
    return None
