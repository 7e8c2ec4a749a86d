"""``lookahead_node`` on every kind of node, with everything that LangGraph does to nodes."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, get_type_hints

import pytest
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.runtime import Runtime as GraphRuntime
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, Send, StreamWriter

import smoothctx_langgraph
from graphs import (
    Chat,
    ask,
    chat_graph,
    check,
    converse,
    converse_sync,
    on,
    policy_of,
)
from smoothctx import Runtime
from smoothctx.errors import ConfigurationError
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph

TURNS = range(6)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime on the test's loop."""
    async with Runtime() as opened:
        yield opened


@pytest.fixture
def threaded() -> Iterator[Runtime]:
    """A runtime on a loop of its own, for synchronous tests."""
    with Runtime.in_thread() as opened:
        yield opened


def reply_to(chat: Chat, messages: list[BaseMessage]) -> dict[str, Any]:
    """What a model node does."""
    return {"messages": [chat.invoke(messages)]}


class Nodes:
    """Methods as nodes."""

    def __init__(self, chat: Chat, decorate: Any) -> None:
        self.chat = chat
        self.bound = decorate(self.plain)

    def plain(self, state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        """A method that is decorated when it is bound."""
        assert config["configurable"]["thread_id"] == "t"
        return reply_to(self.chat, state["messages"])


class CallableNode:
    """A callable object as a node."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def __call__(self, state: MessagesState, *, runtime: GraphRuntime[None]) -> dict[str, Any]:
        """Needs the graph's runtime."""
        assert runtime.execution_info is not None
        return reply_to(self.chat, state["messages"])


class AsyncCallable:
    """A callable object whose call is a coroutine function."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    async def __call__(self, state: MessagesState) -> dict[str, Any]:
        """Ask the model."""
        return {"messages": [await self.chat.ainvoke(state["messages"])]}


def with_dependency(chat: Chat, state: MessagesState, writer: StreamWriter) -> dict[str, Any]:
    """Becomes a node by ``partial``."""
    writer({"seen": len(state["messages"])})
    return reply_to(chat, state["messages"])


async def async_with_dependency(chat: Chat, state: MessagesState) -> dict[str, Any]:
    """Becomes an asynchronous node by ``partial``."""
    return {"messages": [await chat.ainvoke(state["messages"])]}


def make(kind: str, chat: Chat, decorate: Any) -> Any:
    """A decorated node of this kind."""
    if kind == "def":

        @decorate
        def model(state: MessagesState) -> dict[str, Any]:
            return reply_to(chat, state["messages"])

        return model
    if kind == "async def":

        @decorate
        async def model(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        return model
    if kind == "bound method":
        return Nodes(chat, decorate).bound
    if kind == "in the class":

        class Agent:
            @decorate
            def model(self, state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
                assert config["configurable"]["thread_id"] == "t"
                return reply_to(chat, state["messages"])

        return Agent().model
    if kind == "async in the class":

        class AsyncAgent:
            @decorate
            async def model(self, state: MessagesState) -> dict[str, Any]:
                return {"messages": [await chat.ainvoke(state["messages"])]}

        return AsyncAgent().model
    if kind == "static":

        class Static:
            @decorate
            @staticmethod
            def model(state: MessagesState) -> dict[str, Any]:
                return reply_to(chat, state["messages"])

        return Static.model
    if kind == "class method":

        class ByClass:
            @decorate
            @classmethod
            def model(cls, state: MessagesState) -> dict[str, Any]:
                return reply_to(chat, state["messages"])

        return ByClass.model
    nodes: dict[str, Any] = {
        "lambda": lambda state: reply_to(chat, state["messages"]),
        "partial": functools.partial(with_dependency, chat),
        "async partial": functools.partial(async_with_dependency, chat),
        "object": CallableNode(chat),
        "async object": AsyncCallable(chat),
        "runnable": RunnableLambda(lambda state: reply_to(chat, state["messages"]), name="model"),
        "sequence": RunnableLambda(lambda state: state["messages"]) | chat | (lambda reply: {"messages": [reply]}),
        "generator": generator(chat),
        "subgraph": chat_graph(lambda state: reply_to(chat, state["messages"])),
    }
    return decorate(nodes[kind])


def generator(chat: Chat) -> Any:
    """A node that yields its update."""

    def model(state: MessagesState) -> Iterator[dict[str, Any]]:
        yield reply_to(chat, state["messages"])

    return model


BOTH = [
    "def",
    "bound method",
    "in the class",
    "static",
    "class method",
    "lambda",
    "partial",
    "object",
    "runnable",
    "sequence",
    "generator",
    "subgraph",
]
ASYNC = ["async def", "async in the class", "async partial", "async object"]


def named_graph(node: Any) -> Any:
    """A graph with this node under a name of ours."""
    builder = StateGraph(MessagesState)
    builder.add_node("model", node)
    builder.add_edge(START, "model")
    builder.add_edge("model", END)
    return builder.compile(checkpointer=InMemorySaver())


@pytest.mark.parametrize("kind", BOTH + ASYNC)
async def test_every_kind_of_node_under_ainvoke(kind: str, runtime: Runtime) -> None:
    """Each kind of node sees views, and the state keeps what was said."""
    chat = Chat()
    graph = named_graph(make(kind, chat, lookahead_node(runtime, policy_of())))
    check(chat, await converse(graph, runtime, on("t"), TURNS))


@pytest.mark.parametrize("kind", BOTH)
def test_every_kind_of_node_under_invoke(kind: str, threaded: Runtime) -> None:
    """The same for synchronous callers."""
    chat = Chat()
    graph = named_graph(make(kind, chat, lookahead_node(threaded, policy_of())))
    check(chat, converse_sync(graph, threaded, on("t"), TURNS))


@pytest.mark.parametrize("kind", ["def", "async def", "partial", "object", "async object", "bound method"])
async def test_signature_name_and_hints_are_the_nodes_own(kind: str, runtime: Runtime) -> None:
    """What LangGraph reads of a node is what it would read of the undecorated one."""
    chat = Chat()
    plain, decorated = make(kind, chat, lambda node: node), make(kind, chat, lookahead_node(runtime, policy_of()))
    assert inspect.signature(decorated) == inspect.signature(plain)
    is_async = inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(plain.__call__)
    assert inspect.iscoroutinefunction(decorated) == is_async
    names = []
    for node in (plain, decorated):
        builder = StateGraph(MessagesState)
        builder.add_node(node)
        names += list(builder.nodes)
    assert names[0] == names[1]
    if kind != "partial":
        hinted = plain if inspect.isroutine(plain) else plain.__call__
        assert get_type_hints(decorated) == get_type_hints(hinted)


class Extra(MessagesState):
    """A wider state."""

    topic: str


def routed(state: Extra) -> Command[Literal["done"]]:
    """Its hints say which input it takes and where it goes."""
    return Command(update={"topic": "x"}, goto="done")


def test_input_schema_and_destinations_are_inferred(threaded: Runtime) -> None:
    """``add_node`` reads the input schema and the ends from the hints, as without the decorator."""
    builder = StateGraph(MessagesState)
    builder.add_node("a", lookahead_node(threaded, policy_of())(routed))
    builder.add_node("done", lambda state: None)
    builder.add_edge(START, "a")
    assert builder.nodes["a"].input_schema is Extra and builder.nodes["a"].ends == ("done",)
    edges = {(e.source, e.target) for e in builder.compile().get_graph().edges}
    assert ("a", "done") in edges


async def test_every_injected_argument_arrives(runtime: Runtime) -> None:
    """config, store, writer, runtime and previous reach the node by name."""
    given: dict[str, Any] = {}

    @lookahead_node(runtime, policy_of())
    async def model(
        state: MessagesState,
        config: RunnableConfig,
        *,
        store: BaseStore,
        writer: StreamWriter,
        runtime: GraphRuntime[None],
        previous: Any,
    ) -> dict[str, Any]:
        given.update(config=config, store=store, runtime=runtime, previous=previous)
        writer("custom")
        return {"messages": [AIMessage("<1> answer")]}

    store = InMemoryStore()
    graph = chat_graph(model, store=store, checkpointer=InMemorySaver())
    parts = [p async for p in graph.astream({"messages": [ask(0)]}, on("t"), stream_mode="custom")]
    assert parts == ["custom"] and given["store"] is store
    assert given["config"]["configurable"]["thread_id"] == "t"
    assert given["runtime"].store is store and given["previous"] is None


async def test_outside_a_graph_it_is_a_plain_call(runtime: Runtime) -> None:
    """In a unit test of the node itself nothing of ours happens."""
    seen = []

    @lookahead_node(runtime, policy_of())
    def model(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(state)
        return state

    state = {"messages": [ask(k) for k in range(20)]}
    assert model(state) is state and seen[0] is state
    node = lookahead_node(runtime, policy_of())(RunnableLambda(model))
    assert (await node.ainvoke(state))["messages"] == state["messages"] and node.invoke(state) is not None
    assert runtime.counters.started == 0


async def test_state_without_messages_passes_through(runtime: Runtime) -> None:
    """What a ``Send`` carries, or another state, is none of our business."""
    got: list[Any] = []

    @lookahead_node(runtime, policy_of())
    def work(item: Any) -> dict[str, Any]:
        got.append(item)
        return {"messages": [AIMessage(f"did {item}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("work", work)
    builder.add_conditional_edges(START, lambda state: [Send("work", "a"), Send("work", {"n": 1}), Send("work", 7)])
    builder.add_edge("work", END)
    state = await builder.compile().ainvoke({"messages": [ask(0)]})
    assert sorted(map(str, got)) == ["7", "a", "{'n': 1}"] and len(state["messages"]) == 4


async def test_something_that_is_no_node_is_named(runtime: Runtime) -> None:
    """Only what can be called can be decorated."""
    with pytest.raises(ConfigurationError, match="expected a function"):
        lookahead_node(runtime, policy_of())(42)


def test_every_public_name_is_there() -> None:
    """What the package names in ``__all__`` can be imported from it, sorted, and nothing else is made up."""
    assert list(smoothctx_langgraph.__all__) == sorted(smoothctx_langgraph.__all__)
    assert all(getattr(smoothctx_langgraph, name) is not None for name in smoothctx_langgraph.__all__)
    assert set(smoothctx_langgraph.__all__) <= set(dir(smoothctx_langgraph))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        smoothctx_langgraph.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("missing", "name"), [("langgraph", "lookahead_node"), ("langchain", "LookaheadMiddleware"), ("tomllib2", "x")]
)
def test_a_missing_framework_is_named_with_its_extra(missing: str, name: str) -> None:
    """Where LangGraph or LangChain is not installed, the error says what to install."""
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom smoothctx_langgraph import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    if name == "x":
        assert "cannot import name 'x'" in last
    else:
        assert last == f"ImportError: {name} needs {missing}: pip install 'smoothctx[langgraph]'"
