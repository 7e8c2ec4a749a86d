"""A node that stands before the model's: for ``create_react_agent(pre_model_hook=)`` and graphs of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableLambda

from smoothctx import Policy, Runtime
from smoothctx.errors import ConfigurationError

from .codec import LangChainMessages
from .middleware import turns_of
from .middleware_commit import writes_of
from .middleware_state import VIEW_KEY, read
from .node_channel import say_missing
from .options import Tenant, check_messages_key, check_mode
from .saved import SAVED_KEY, read_saved
from .turns import Turn


def premodel_node(
    runtime: Runtime,
    policy: Policy,
    *,
    mode: str = "view",
    name: str = "premodel",
    messages_key: str = "messages",
    codec: LangChainMessages | None = None,
    tenant: Tenant = "default",
    engine: Any = None,
    request: Mapping[str, Any] | None = None,
) -> Runnable[Any, Any]:
    """A node that prepares what the model is sent. Works under ``invoke`` and ``ainvoke``.

    In view mode it returns ``{"llm_input_messages": view}``. ``create_react_agent`` reads that by itself; a node of
    your own calls ``model_input(state)``. What is committed stays in the state where that has the channels of
    ``ViewState``, else in the session alone (and in the runtime's store, if it has one).

    In state mode it rewrites the messages in the state by their ids, and the model's node reads those. Where the
    state's reducer cannot do that, the event ``state.kept`` says so, and the view is returned as in view mode. For what
    is offloaded, for a ``messages_key`` that is not there, and for a tenant that cannot be told, see
    :func:`lookahead_node`.

    Args:
        runtime: open for as long as the graph is used; ``Runtime.in_thread()`` where it is called synchronously.
        policy: what happens with the context.
        mode: ``"view"`` or ``"state"``.
        name: tells apart two of these in one graph.
        messages_key: where the messages stand in the state.
        codec: how messages are read.
        tenant: whose conversations these are: a name, or a function of the run's config.
        engine: the agent's own engine, to preload the view that a commit will produce. The node's turn is over before
            the model's node begins, so a preload may run beside that.
        request: the constant part of the agent's request.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    check_mode(mode)
    check_messages_key(messages_key)
    turns = turns_of(
        runtime, policy, name, codec=codec, tenant=tenant, engine=engine, request=request, rewrites=mode == "state"
    )

    def given(state: Any) -> tuple[list[BaseMessage], list[str] | None]:
        saved = read_saved(read(state, SAVED_KEY), name) if mode == "view" else None
        messages = read(state, messages_key)
        if messages is None:
            say_missing(turns.notices, state, messages_key)
        return list(messages or ()), saved

    def update(messages: Sequence[BaseMessage], turn: Turn) -> dict[str, Any]:
        if mode == "state":
            writes = writes_of(turns, messages, turn, messages_key)
            if writes is not None:  # an empty list would be the whole of a channel without a reducer
                return {messages_key: writes, VIEW_KEY: []} if writes else {VIEW_KEY: []}
        out: dict[str, Any] = {VIEW_KEY: known_by_id(turn.view, messages)}
        if turn.saved is not None:
            out[SAVED_KEY] = {name: turn.saved}
        return out

    def prepare(state: Any) -> dict[str, Any]:
        messages, saved = given(state)
        with turns.turn_sync(messages, place=name, saved=saved) as turn:
            return update(messages, turn)

    async def aprepare(state: Any) -> dict[str, Any]:
        messages, saved = given(state)
        async with turns.turn(messages, place=name, saved=saved) as turn:
            return update(messages, turn)

    return _PremodelNode(prepare, aprepare, name=name)


class _PremodelNode(RunnableLambda[Any, Any]):
    """The node. It is none of the decorators, and says so."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigurationError(
            "premodel_node(...) is a node by itself, such as add_node('prepare', premodel_node(runtime, policy)); "
            "to decorate a node use lookahead_node(runtime, policy)"
        )


def known_by_id(view: Sequence[BaseMessage], messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The view; a message that we made goes under the id of one that it stands for.

    LangGraph streams every message in a node's output whose id is not in the node's input, and a summary is not for
    the user's token stream.
    """
    known = {m.id for m in messages if m.id is not None}
    shown = {m.id for m in view}
    free = iter([m.id for m in messages if m.id is not None and m.id not in shown])
    return [m if m.id is not None and m.id in known else m.model_copy(update={"id": next(free, m.id)}) for m in view]
