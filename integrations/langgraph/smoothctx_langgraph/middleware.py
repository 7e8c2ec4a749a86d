"""Lookahead as middleware of ``create_agent``: the model sees the view, the agent's state keeps what was said."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from langchain.agents.middleware.types import AgentMiddleware, ExtendedModelResponse, ModelRequest, ModelResponse
from langgraph.types import Command

from smoothctx import ClosedError, Policy, Runtime, Session

from .codec import LangChainMessages
from .identity import identity
from .middleware_state import LookaheadAgentState
from .options import Tenant, check_name, check_wish
from .saved import SAVED_KEY, read_saved
from .tools import offloads, retrieve_tool
from .turns import Turn, Turns


class LookaheadMiddleware(AgentMiddleware[LookaheadAgentState, Any, Any]):
    """Gives the model the view of the messages (view mode).

    The messages in the state stay as they are; what is committed is kept beside them in a private channel, so it is
    right for each branch of a thread and after a restart. One instance serves any number of concurrent runs.

    A system prompt and tools are not among the messages: say what they take in ``Policy(reserved_tokens=...)`` unless
    the model reports its usage, from which it is known after the first reply.

    Args:
        runtime: open for as long as the agent is used; ``Runtime.in_thread()`` for ``invoke`` and ``stream``, and where
            each request has an event loop of its own.
        policy: what happens with the context.
        name: tells apart two of these in one agent. deepagents has its own summaries under the name
            ``"SummarizationMiddleware"``: ours takes their place under that name.
        codec: how messages are read.
        tenant: whose conversations these are: a name, or a function of the run's config. Where that fails the model
            sees the messages as they are, and a warning and the event ``turn.raw`` say so.
        engine: the agent's own engine, to preload the view that a commit will produce.
        request: the constant part of the agent's request, where more is known of it than its system prompt and tools,
            which are seen with each turn.
        retrieve: give the agent the ``retrieve`` tool; by default where the policy offloads.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    state_schema = LookaheadAgentState

    def __init__(
        self,
        runtime: Runtime,
        policy: Policy,
        *,
        name: str = "LookaheadMiddleware",
        codec: LangChainMessages | None = None,
        tenant: Tenant = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
        retrieve: bool | None = None,
    ) -> None:
        super().__init__()
        self._turns = turns_of(runtime, policy, name, codec=codec, tenant=tenant, engine=engine, request=request)
        self._name = name
        self.tools = tools_of(self._turns, name, retrieve)

    @property
    def name(self) -> str:
        """The name that was given."""
        return self._name

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """Call the model with the view."""
        saved = self._saved(request)
        with self._turns.turn_sync(request.messages, place=self._name, saved=saved, asked=request) as turn:
            with turn.calling():
                response = handler(request.override(messages=cast("list[Any]", turn.view)))
            turn.reply = response.result
        return self._answer(turn, response)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """:meth:`wrap_model_call` under ``ainvoke`` and ``astream``."""
        saved = self._saved(request)
        async with self._turns.turn(request.messages, place=self._name, saved=saved, asked=request) as turn:
            with turn.calling():
                response = await handler(request.override(messages=cast("list[Any]", turn.view)))
            turn.reply = response.result
        return self._answer(turn, response)

    def _saved(self, request: ModelRequest[Any]) -> list[str]:
        return read_saved(request.state.get(SAVED_KEY), self._name)

    def _answer(self, turn: Turn, response: ModelResponse[Any]) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """The response; with what is to be kept, where that changed."""
        if turn.saved is None:
            return response
        return ExtendedModelResponse(
            model_response=response, command=Command(update={SAVED_KEY: {self._name: turn.saved}})
        )


def turns_of(runtime: Runtime, policy: Policy, name: str, **options: Any) -> Turns:
    """The turns of one middleware or node, its arguments checked."""
    turns = Turns(runtime, policy, **options)
    check_name(name)
    return turns


def tools_of(turns: Turns, name: str, wish: bool | None) -> list[Any]:
    """The ``retrieve`` tool, where something may be offloaded. It reads for the tenant of the run that calls it."""
    check_wish("retrieve", wish)
    policy = turns.policy
    if not (offloads(policy) if wish is None else wish):
        return []

    def reader() -> Session | None:
        where = identity()
        who = turns.tenant(where.config if where is not None else {})
        if who is None:
            return None
        try:
            return turns.runtime.session(f"{name}/retrieve", policy=policy, codec=turns.codec, tenant=who)
        except ClosedError:
            return None

    return [retrieve_tool(reader)]
