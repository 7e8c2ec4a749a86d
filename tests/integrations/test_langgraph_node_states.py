"""``lookahead_node``: states and updates in every form; what a node returns of its view never reaches the state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.types import Command, Overwrite, Send
from pydantic import BaseModel

from graphs import (
    Chat,
    ask,
    chat_graph,
    check,
    converse,
    idle,
    on,
    policy_of,
    summaries,
)
from smoothctx import Runtime
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.saved import Saved

pytestmark = pytest.mark.langgraph

TURNS = range(6)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime on the test's loop."""
    async with Runtime() as opened:
        yield opened


class Model(BaseModel):
    """A state that is a pydantic model."""

    messages: Annotated[list[Any], add_messages] = []
    topic: str = "t"


@dataclass(frozen=True)
class Data:
    """A state that is a frozen dataclass."""

    messages: Annotated[list[Any], add_messages] = field(default_factory=list)
    topic: str = "t"


@pytest.mark.parametrize("schema", [Model, Data])
async def test_states_that_are_objects(schema: Any, runtime: Runtime) -> None:
    """The node gets an object of its own kind with the view in it."""
    chat = Chat()

    @lookahead_node(runtime, policy_of())
    async def model(state: Any) -> dict[str, Any]:
        assert type(state) is schema and state.topic == "t"
        return {"messages": [await chat.ainvoke(state.messages)]}

    check(chat, await converse(chat_graph(model, state=schema, checkpointer=InMemorySaver()), runtime, on("t"), TURNS))


@pytest.mark.parametrize("schema", [Model, Data])
async def test_updates_that_are_objects(schema: Any, runtime: Runtime) -> None:
    """A node that returns its state as an object, the view in it, changes nothing but what it added."""
    chat = Chat()

    @lookahead_node(runtime, policy_of())
    async def model(state: Any) -> Any:
        return schema(messages=[*state.messages, await chat.ainvoke(state.messages)])

    check(chat, await converse(chat_graph(model, state=schema, checkpointer=InMemorySaver()), runtime, on("t"), TURNS))


async def test_a_state_that_is_the_list(runtime: Runtime) -> None:
    """A graph whose whole state is the list of messages."""
    chat = Chat()

    @lookahead_node(runtime, policy_of())
    async def model(messages: list[BaseMessage]) -> BaseMessage:
        return await chat.ainvoke(messages)

    builder = StateGraph(Annotated[list, add_messages])  # type: ignore[type-var,unused-ignore]
    builder.add_node("model", model)
    builder.add_edge(START, "model")
    graph = builder.compile(checkpointer=InMemorySaver())
    for k in TURNS:
        held = await graph.ainvoke([ask(k)], on("t"))  # type: ignore[arg-type,unused-ignore]
        await idle(runtime)
    check(chat, {"messages": held})


def returns(how: str, messages: list[BaseMessage], reply: BaseMessage) -> Any:
    """One way to return a reply together with everything that the node was given."""
    copies = [m.model_copy() for m in messages]
    return {
        "list": {"messages": [*messages, reply]},
        "copies": {"messages": [*copies, reply]},
        "alone": {"messages": reply},
        "dicts": {"messages": [*messages, {"role": "ai", "content": reply.content}]},
        "command": Command(update={"messages": [*messages, reply]}),
        "pairs": Command(update=[("messages", [*messages, reply])]),
        "goto": Command(update={"messages": [*messages, reply]}, goto=END),
        "commands": [Command(update={"messages": messages}), {"messages": [reply]}],
        "first only": {"messages": [messages[0], reply]},
        "tail": {"messages": [*messages[1:], reply]},
        "overwrite": {"messages": Overwrite([*messages, reply])},
        "overwrite as JSON": {"messages": {"__overwrite__": [*messages, reply]}},
        "clear": {"messages": [RemoveMessage("__remove_all__"), *messages, reply]},
    }[how]


WAYS = [
    "list",
    "copies",
    "alone",
    "dicts",
    "command",
    "pairs",
    "goto",
    "commands",
    "first only",
    "tail",
    "overwrite",
    "overwrite as JSON",
    "clear",
]


@pytest.mark.parametrize("how", WAYS)
async def test_a_returned_view_does_not_reach_the_state(how: str, runtime: Runtime) -> None:
    """Whatever a node returns of what it was given, the state keeps the raw messages in their order."""
    chat = Chat()

    @lookahead_node(runtime, policy_of())
    async def model(state: MessagesState) -> Any:
        return returns(how, state["messages"], await chat.ainvoke(state["messages"]))

    check(chat, await converse(chat_graph(model, checkpointer=InMemorySaver()), runtime, on("t"), TURNS))


class Replaced(MessagesState):
    """A list without a reducer: the node's return takes its place."""

    messages: list[BaseMessage]  # type: ignore[misc]


async def test_a_list_without_a_reducer_stays_whole(runtime: Runtime) -> None:
    """Where the returned list replaces the state's, it holds the raw messages again."""
    chat = Chat()

    @lookahead_node(runtime, policy_of())
    async def model(state: Replaced) -> Any:
        return {"messages": [*state["messages"], await chat.ainvoke(state["messages"])]}

    graph = chat_graph(model, state=Replaced)
    held: list[BaseMessage] = []
    for k in TURNS:
        held = (await graph.ainvoke({"messages": [*held, ask(k)]}, on("t")))["messages"]
        await idle(runtime)
    check(chat, {"messages": held})


async def test_edits_in_place_leak_into_nothing(runtime: Runtime) -> None:
    """The list and our messages belong to the node: it may change them, and the next view is what it was."""
    chat = Chat()

    @lookahead_node(runtime, policy_of())
    async def model(state: MessagesState) -> Any:
        reply = await chat.ainvoke(state["messages"])
        if summaries(state["messages"]):
            state["messages"][0].content = "vandalised"
        state["messages"].clear()
        return {"messages": [reply]}

    check(chat, await converse(chat_graph(model, checkpointer=InMemorySaver()), runtime, on("t"), TURNS))


async def test_none_is_returned_as_it_is(runtime: Runtime) -> None:
    """A node that changes nothing."""

    @lookahead_node(runtime, policy_of())
    async def look(state: MessagesState) -> None:
        assert state["messages"]

    state = await chat_graph(look).ainvoke({"messages": [ask(k) for k in range(6)]}, on("t"))
    assert len(state["messages"]) == 6


async def test_a_command_to_the_parent_graph(runtime: Runtime) -> None:
    """A subgraph's node that hands off to the parent, with everything that it saw, hands off the raw messages."""
    chat = Chat()

    @lookahead_node(runtime, policy_of())
    async def model(state: MessagesState) -> Any:
        reply = await chat.ainvoke(state["messages"])
        return Command(graph=Command.PARENT, goto="after", update={"messages": [*state["messages"], reply]})

    sub = StateGraph(MessagesState)
    sub.add_node("model", model)
    sub.add_edge(START, "model")
    builder = StateGraph(MessagesState)
    builder.add_node("sub", sub.compile())
    builder.add_node("after", lambda state: None)
    builder.add_edge(START, "sub")
    check(chat, await converse(builder.compile(checkpointer=InMemorySaver()), runtime, on("t"), TURNS))


async def test_what_a_node_sends_on_is_what_the_state_holds(runtime: Runtime) -> None:
    """A ``Send`` with the whole list carries the raw messages."""
    chat, got = Chat(), []

    @lookahead_node(runtime, policy_of())
    async def model(state: MessagesState) -> Any:
        reply = await chat.ainvoke(state["messages"])
        return Command(update={"messages": [reply]}, goto=[Send("worker", {"messages": state["messages"]})])

    builder = StateGraph(MessagesState)
    builder.add_node("model", model)
    builder.add_node("worker", lambda state: got.append(state["messages"]))
    builder.add_edge(START, "model")
    state = await converse(builder.compile(checkpointer=InMemorySaver()), runtime, on("t"), TURNS)
    check(chat, state)
    assert len(got[-1]) == len(state["messages"]) - 1 and not summaries(got[-1])


async def test_another_key_for_the_messages(runtime: Runtime) -> None:
    """The messages may have any name in the state."""

    class Named(MessagesState):
        talk: Annotated[list[BaseMessage], add_messages]

    chat = Chat()

    @lookahead_node(runtime, policy_of(), messages_key="talk")
    async def model(state: Named) -> Any:
        return {"talk": [await chat.ainvoke(state["talk"])]}

    graph = chat_graph(model, state=Named, checkpointer=InMemorySaver())
    for k in TURNS:
        state = await graph.ainvoke({"talk": [ask(k)]}, on("t"))
        await idle(runtime)
    check(chat, {"messages": state["talk"]})


class SavedModel(Model):
    """A pydantic state with the private channel."""

    smoothctx: Saved = {}


@dataclass
class SavedData:
    """A dataclass with the private channel."""

    messages: Annotated[list[Any], add_messages] = field(default_factory=list)
    smoothctx: Saved = field(default_factory=dict)


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("schema", [SavedModel, SavedData])
async def test_the_private_channel_of_objects(schema: Any, as_object: bool) -> None:
    """What is committed goes into the channel and comes back from it, whatever kind of state and update."""
    saver, texts = InMemorySaver(), []
    for turns in (range(8), range(8, 9)):
        chat = Chat()
        async with Runtime() as runtime:

            @lookahead_node(runtime, policy_of())
            async def model(state: Any, chat: Chat = chat) -> Any:
                reply = await chat.ainvoke(state.messages)
                return schema(messages=[reply]) if as_object else {"messages": [reply]}

            graph = chat_graph(model, state=schema, checkpointer=saver)
            state = await converse(graph, runtime, on("t"), turns)
            assert len(state["smoothctx"]["model"]) <= 2
            texts.append(summaries(chat.last))
    assert texts[0] and texts[0] == texts[1]
