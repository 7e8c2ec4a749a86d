"""``lookahead_node``: makes a node of a StateGraph a lookahead-aware one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from smoothctx import Policy, Runtime
from smoothctx.errors import ConfigurationError

from .codec import LangChainMessages
from .identity import Identity, identity
from .node_channel import claims_of, read_channel, say_missing, takes
from .node_state import add_update, added, map_messages, messages_of, overwrites, returned, with_messages
from .options import Tenant, check_messages_key, check_mode
from .rewrite import by_id, ours, raw, touches
from .saved import SAVED_KEY, change_of, read_saved
from .turns import Turn, Turns

Node = TypeVar("Node")


def lookahead_node(
    runtime: Runtime,
    policy: Policy,
    *,
    mode: str = "view",
    messages_key: str = "messages",
    codec: LangChainMessages | None = None,
    tenant: Tenant = "default",
    engine: Any = None,
    request: Mapping[str, Any] | None = None,
) -> Callable[[Node], Node]:
    """A decorator for nodes: the node sees the view of the state's messages, prepared ahead.

    It takes what ``add_node`` takes: functions and coroutine functions, methods, partials, callable objects and
    runnables. Name, signature, type hints and injected arguments stay as they are. Outside a graph, or where the
    state has no messages, the node is called as it is; where the graph knows no ``messages_key``, a warning and the
    event ``messages.missing`` say which keys there are.

    In view mode the messages in the state stay as they are, whatever the node returns of its view. What is committed
    is kept in the state where that has the channel of :class:`LookaheadState`, else in the session alone (and in the
    runtime's store, if it has one).

    In state mode a commit is written into the state: the messages that the view replaced take its place, by their
    ids, together with what the node returns. Where the state's reducer cannot do that, a warning and the event
    ``state.kept`` say so, and the node works as in view mode. What a policy offloads is then in the runtime's store
    alone; without one a warning and the event ``state.unstored`` say so.

    Args:
        runtime: open for as long as the graph is used; ``Runtime.in_thread()`` where the graph is called
            synchronously, or with one event loop per request.
        policy: what happens with the context.
        mode: ``"view"`` or ``"state"``.
        messages_key: where the messages stand in the state.
        codec: how messages are read.
        tenant: whose conversations these are: a name, or a function of the run's config. Where that fails the model
            sees the messages as they are, and a warning and the event ``turn.raw`` say so.
        engine: the agent's own engine, to preload the view that a commit will produce.
        request: the constant part of the agent's request.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    check_mode(mode)
    check_messages_key(messages_key)
    rewrites = mode == "state"
    turns = Turns(runtime, policy, codec=codec, tenant=tenant, engine=engine, request=request, rewrites=rewrites)
    lookahead = _Lookahead(turns, messages_key, rewrites)

    def decorate(node: Node) -> Node:
        return cast(Node, _decorated(lookahead, node))

    return decorate


def _decorated(lookahead: _Lookahead, node: Any) -> Any:
    if isinstance(node, staticmethod | classmethod):
        return type(node)(_decorated(lookahead, node.__func__))
    if isinstance(node, Runnable):
        return _RunnableNode(lookahead, node)
    if not callable(node):
        raise ConfigurationError(f"lookahead_node(...)({node!r}): expected a function, a callable or a Runnable")
    told: Any = node  # what says how it is called
    if not inspect.isroutine(node) and not isinstance(node, functools.partial):
        told = node.__call__
    if inspect.isgeneratorfunction(told) or inspect.isasyncgenfunction(told):
        return _RunnableNode(lookahead, RunnableLambda(node))
    make = _async_node if inspect.iscoroutinefunction(told) else _sync_node
    wrapped: Any = functools.wraps(told)(make(lookahead, node, _state_position(node)))
    # What LangGraph would name the node after: partials and objects have no name of their own.
    wrapped.__name__ = getattr(node, "__name__", type(node).__name__)
    return wrapped


def _async_node(lookahead: _Lookahead, node: Any, at: tuple[int, str]) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Any:
        run = lookahead.begin(args, kwargs, at)
        if run is None:
            return await node(*args, **kwargs)
        async with lookahead.turns.turn(run.messages, place=run.where.node, saved=run.saved) as turn:
            return lookahead.end(run, turn, await node(*run.args(turn), **run.kwargs(turn)))

    return call


def _sync_node(lookahead: _Lookahead, node: Any, at: tuple[int, str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        run = lookahead.begin(args, kwargs, at)
        if run is None:
            return node(*args, **kwargs)
        with lookahead.turns.turn_sync(run.messages, place=run.where.node, saved=run.saved) as turn:
            return lookahead.end(run, turn, node(*run.args(turn), **run.kwargs(turn)))

    return call


class _RunnableNode(RunnableLambda[Any, Any]):
    """A runnable as a node. It adds no run of its own to traces and streams."""

    def __init__(self, lookahead: _Lookahead, node: Runnable[Any, Any]) -> None:
        async def afunc(state: Any, config: RunnableConfig) -> Any:
            return await self.ainvoke(state, config)

        asynchronous = not isinstance(node, RunnableLambda) or hasattr(node, "afunc")
        super().__init__(lambda state, config: self.invoke(state, config), afunc if asynchronous else None)
        self.name = node.get_name()
        self._lookahead = lookahead
        self._node = node

    @functools.cached_property
    def deps(self) -> list[Runnable[Any, Any]]:
        """The node: LangGraph looks here for subgraphs."""
        return [self._node]

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        lookahead = self._lookahead
        run = lookahead.begin((input,), {}, (0, "input"))
        if run is None:
            return self._node.invoke(input, config, **kwargs)
        with lookahead.turns.turn_sync(run.messages, place=run.where.node, saved=run.saved) as turn:
            return lookahead.end(run, turn, self._node.invoke(run.args(turn)[0], config, **kwargs))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        lookahead = self._lookahead
        run = lookahead.begin((input,), {}, (0, "input"))
        if run is None:
            return await self._node.ainvoke(input, config, **kwargs)
        async with lookahead.turns.turn(run.messages, place=run.where.node, saved=run.saved) as turn:
            return lookahead.end(run, turn, await self._node.ainvoke(run.args(turn)[0], config, **kwargs))


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of a decorated node inside a graph."""

    where: Identity
    given: tuple[Any, ...]
    named: Mapping[str, Any]
    at: int | str
    key: str
    state: Any
    messages: list[BaseMessage]
    saved: list[str] | None

    def args(self, turn: Turn) -> tuple[Any, ...]:
        """The positional arguments, with the view in the state."""
        if isinstance(self.at, str):
            return self.given
        return (*self.given[: self.at], self._seen(turn), *self.given[self.at + 1 :])

    def kwargs(self, turn: Turn) -> dict[str, Any]:
        """The named arguments, with the view in the state."""
        return {**self.named, self.at: self._seen(turn)} if isinstance(self.at, str) else dict(self.named)

    def _seen(self, turn: Turn) -> Any:
        state = self.state
        if isinstance(state, dict) and SAVED_KEY in state:  # ours: a node that returns its state must not write it
            state = {key: value for key, value in state.items() if key != SAVED_KEY}
        return with_messages(state, self.key, list(turn.view))


class _Lookahead:
    """What one decorator does before and after a node."""

    def __init__(self, turns: Turns, key: str, rewrites: bool) -> None:
        self.turns = turns
        self._key = key
        self._rewrites = rewrites

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], at: tuple[int, str]) -> _Run | None:
        """The call, if it is one of a node in a graph whose state has messages."""
        try:
            where = identity()
            return None if where is None else self._begun(where, args, kwargs, at)
        except Exception as error:
            self.turns.runtime.events.error(error, where="node")
            return None

    def _begun(
        self, where: Identity, args: tuple[Any, ...], kwargs: Mapping[str, Any], at: tuple[int, str]
    ) -> _Run | None:
        position: int | str = at[0]
        if len(args) <= at[0]:
            position = at[1]
            if position not in kwargs:
                return None
        state = args[position] if isinstance(position, int) else kwargs[position]
        messages = messages_of(state, self._key)
        if messages is None:
            say_missing(self.turns.notices, state, self._key)
            return None
        saved: list[str] | None = None
        if not self._rewrites:
            there, held = read_channel(where)
            saved = read_saved(held, where.node) if there else None
        return _Run(where, args, kwargs, position, self._key, state, messages, saved)

    def end(self, run: _Run, turn: Turn, result: Any) -> Any:
        """What the node returned, as it goes into the state."""
        try:
            kept = map_messages(result, self._key, lambda found: self._raw(run, turn, found))
            turn.reply = added(kept, self._key, run.messages)
            if self._rewrites and turn.gaps:
                done = self._rewritten(run, turn, result)
                if done is not None:
                    turn.held = turn.view
                    return done
            return self._remembering(run, turn, kept)
        except Exception as error:  # ours: the node's own were raised before
            self.turns.runtime.events.error(error, where="node")
            return result

    def _raw(self, run: _Run, turn: Turn, found: list[Any]) -> list[Any]:
        return raw(found, run.messages, turn.view, turn.gaps, self.turns.codec.without_thinking)

    def _remembering(self, run: _Run, turn: Turn, result: Any) -> Any:
        """The node's update, with what is committed beside it where that changed."""
        if turn.saved is None or turn.session is None:
            return result
        change = change_of(run.saved or (), turn.saved, turn.session.branch.history.chain)
        if change is None:
            return result
        told = add_update(result, {SAVED_KEY: {run.where.node: change}}, self._key)
        return result if told is None else told

    def _rewritten(self, run: _Run, turn: Turn, result: Any) -> Any:
        """The node's update with the rewrite before it; ``None`` where the state keeps its messages this time."""
        root = isinstance(run.state, list)
        where, key = run.where, "__root__" if root else self._key
        writes = by_id(run.messages, turn.gaps)
        if writes is None:
            return self._keep(run, "messages without ids of their own cannot be replaced")
        refusal = takes(where, key, writes, turn.view)
        if refusal is not None:
            return self._keep(run, refusal)
        found = returned(result, key)
        mine = [m for m in found if not any(m is p for p in turn.view)]
        if overwrites(result, key) or touches(mine, run.messages, turn.gaps):
            return None  # the node says itself what becomes of these messages
        update = map_messages(result, key, lambda found: ours(found, turn.gaps, writes))
        done = add_update(update, {key: writes}, key, root=root)
        if done is None or not claims_of(self.turns.runtime).take(where, key):
            return None
        return done

    def _keep(self, run: _Run, why: str) -> None:
        """Say once per node why its state is not rewritten."""
        node = run.where.node
        said = f"{node}: the messages stay in the state, the model sees the view: {why}"
        self.turns.notices.once("state.kept", node, said, node=node)


def _state_position(node: Any) -> tuple[int, str]:
    """Where the state stands among a node's arguments, and its name."""
    try:
        names = list(inspect.signature(node).parameters)
    except (TypeError, ValueError):
        return 0, "state"
    # A function decorated inside its class gets the instance first.
    first = 1 if inspect.isfunction(node) and names[:1] in (["self"], ["cls"]) else 0
    return first, names[first] if len(names) > first else "state"
