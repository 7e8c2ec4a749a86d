"""State mode: a commit is written into the state by the messages' ids, beside what the node returns."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from hypothesis import given, strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph, add_messages
from langgraph.types import Command, Overwrite, Send

from graphs import (
    Chat,
    Events,
    FakeSummarizer,
    ask,
    chat_graph,
    converse,
    converse_sync,
    idle,
    marks,
    on,
    policy_of,
    summaries,
)
from helpers import fill
from smoothctx import Runtime
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.rewrite import Gap, by_id, fill as filled, gaps, raw, rewritten

try:
    from langgraph.channels import DeltaChannel
    from langgraph.graph.message import _messages_delta_reducer
except ImportError:  # older than the delta channel
    DeltaChannel = None  # type: ignore[assignment,misc]

pytestmark = pytest.mark.langgraph

TURNS = range(10)


def state_node(chat: Chat, decorate: Any, returns: Callable[[list[Any], Any], Any] | None = None) -> Any:
    """A model node that returns its reply in some form."""

    @decorate
    async def model(state: Any) -> Any:
        reply = await chat.ainvoke(state["messages"])
        return returns(state["messages"], reply) if returns else {"messages": [reply]}

    return model


def schemas() -> list[Any]:
    """States whose reducers know ids."""
    found: list[Any] = [pytest.param(MessagesState, id="add_messages")]
    if DeltaChannel is not None:

        class Delta(MessagesState):
            messages: Annotated[list[Any], DeltaChannel(_messages_delta_reducer)]  # type: ignore[misc]

        found.append(pytest.param(Delta, id="delta"))
    return found


@pytest.mark.parametrize("schema", schemas())
async def test_the_state_shrinks_and_keeps_its_order(schema: Any) -> None:
    """The summary takes the place of what it covers, the model sees what the state holds, nothing is lost."""
    chat, events = Chat(), Events()
    async with Runtime(on_event=events) as runtime:
        node = state_node(chat, lookahead_node(runtime, policy_of(), mode="state"))
        graph = chat_graph(node, state=schema, checkpointer=InMemorySaver())
        state = await converse(graph, runtime, on("t"), TURNS)
        held = state["messages"]
        assert len(held) <= 8 and len(summaries(held)) == 1
        assert marks(held) == set(range(20)), "in order and whole"
        assert [m.content for m in held[:-1]] == [m.content for m in chat.last]
        assert not any(isinstance(m, RemoveMessage) for m in held)
        assert len({m.id for m in held}) == len(held) and all(m.id for m in held)
        assert events.of("view.rebased") and not events.of("state.kept") and not events.of("error")


def test_the_same_for_synchronous_callers() -> None:
    """``invoke`` and a synchronous node."""
    chat = Chat()
    with Runtime.in_thread() as runtime:

        @lookahead_node(runtime, policy_of(), mode="state")
        def model(state: MessagesState) -> Any:
            return {"messages": [chat.invoke(state["messages"])]}

        state = converse_sync(chat_graph(model, checkpointer=InMemorySaver()), runtime, on("t"), TURNS)
        assert len(state["messages"]) <= 8 and marks(state["messages"]) == set(range(20))
        assert len(summaries(state["messages"])) == 1


RETURNS: dict[str, Callable[[list[Any], Any], Any]] = {
    "message": lambda messages, reply: {"messages": reply},
    "whole list": lambda messages, reply: {"messages": [*messages, reply]},
    "command": lambda messages, reply: Command(update={"messages": [reply]}),
    "pairs": lambda messages, reply: Command(update=[("messages", [reply])]),
    "commands": lambda messages, reply: [Command(update={"messages": [reply]}), Command(goto="after")],
    "goto": lambda messages, reply: Command(update={"messages": messages + [reply]}, goto="after"),
    "dict": lambda messages, reply: {"messages": [{"role": "ai", "content": reply.content}]},
}


@pytest.mark.parametrize("how", RETURNS)
async def test_every_form_of_return(how: str) -> None:
    """The rewrite goes out with whatever the node returns."""
    chat = Chat()
    async with Runtime() as runtime:
        builder = StateGraph(MessagesState)
        builder.add_node("model", state_node(chat, lookahead_node(runtime, policy_of(), mode="state"), RETURNS[how]))
        builder.add_node("after", lambda state: None)
        builder.add_edge(START, "model")
        graph = builder.compile(checkpointer=InMemorySaver())
        state = await converse(graph, runtime, on("t"), TURNS)
        assert len(state["messages"]) <= 8 and marks(state["messages"]) == set(range(20))
        assert len(summaries(state["messages"])) == 1


async def test_a_node_that_returns_none() -> None:
    """A node that only looks still commits."""
    seen: list[int] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(trigger=("messages", 6)), mode="state")
        async def look(state: MessagesState) -> None:
            seen.append(len(state["messages"]))

        graph = chat_graph(look, checkpointer=InMemorySaver())
        state = await converse(graph, runtime, on("t"), range(20))
        assert max(seen) <= 10 and summaries(state["messages"]) and marks(state["messages"]) == set(range(0, 40, 2))


async def test_a_state_that_is_the_list() -> None:
    """The root channel is rewritten as well."""
    chat = Chat()
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(), mode="state")
        async def model(messages: list[BaseMessage]) -> Any:
            return await chat.ainvoke(messages)

        builder = StateGraph(Annotated[list, add_messages])  # type: ignore[type-var,unused-ignore]
        builder.add_node("model", model)
        builder.add_edge(START, "model")
        graph: Any = builder.compile(checkpointer=InMemorySaver())
        for k in TURNS:
            held = await graph.ainvoke([ask(k)], on("t"))
            await idle(runtime)
        assert len(held) <= 8 and marks(held) == set(range(20)) and len(summaries(held)) == 1


@pytest.mark.parametrize("names", [("a_model", "z_other"), ("z_model", "a_other")])
@pytest.mark.parametrize("schema", schemas())
async def test_parallel_writes_survive(schema: Any, names: tuple[str, str]) -> None:
    """Another node that appends in the same step loses nothing, whichever is applied first."""
    chat = Chat()
    async with Runtime() as runtime:
        builder = StateGraph(schema)
        builder.add_node(names[0], state_node(chat, lookahead_node(runtime, policy_of(), mode="state")))
        noted = iter(range(500, 600))
        builder.add_node(names[1], lambda state: {"messages": [HumanMessage(fill(f"<{next(noted)}> note", 60))]})
        builder.add_edge(START, names[0])
        builder.add_edge(START, names[1])
        graph = builder.compile(checkpointer=InMemorySaver())
        for k in range(8):
            state = await graph.ainvoke({"messages": [ask(500 + 10 * k)]}, on("t"))
            await idle(runtime)
        held = state["messages"]
        assert set(range(500, 508)) <= marks(held) and len(summaries(held)) == 1
        assert len(held) < 24 and {1000 + 20 * k for k in range(8)} <= marks(held)


async def test_two_rewriting_nodes_in_one_step() -> None:
    """Two nodes that would both rewrite: one does, since LangGraph refuses to remove a message twice."""
    one, two = Chat(), Chat()
    async with Runtime() as runtime:
        decorate = lookahead_node(runtime, policy_of(), mode="state")
        other = lookahead_node(runtime, policy_of(), mode="state")
        builder = StateGraph(MessagesState)
        builder.add_node("one", state_node(one, decorate))
        builder.add_node("two", state_node(two, other))
        builder.add_node("many", state_node(two, other))
        builder.add_edge(START, "one")
        builder.add_edge(START, "two")
        builder.add_conditional_edges(START, lambda state: [Send("many", state), Send("many", state)])
        graph = builder.compile(checkpointer=InMemorySaver())
        for k in range(8):
            state = await graph.ainvoke({"messages": [ask(100 * k)]}, on("t"))
            await idle(runtime)
        held = state["messages"]
        assert summaries(held) and len(held) < 40
        assert {200 * k for k in range(8)} <= marks(held)


class Added(MessagesState):
    """A reducer that only appends."""

    messages: Annotated[list[Any], operator.add]  # type: ignore[misc]


class Last(MessagesState):
    """No reducer at all."""

    messages: list[Any]  # type: ignore[misc]


@pytest.mark.parametrize("ids", [True, False])
async def test_a_reducer_that_does_not_shrink_is_reported_once(ids: bool, caplog: pytest.LogCaptureFixture) -> None:
    """``operator.add``: an event and one warning, the model sees views, the state stays as it is, no loop."""
    chat, events, summariser = Chat(), Events(), FakeSummarizer(delay=0)

    def reply(messages: list[Any], answer: Any) -> Any:
        return {"messages": [answer if ids else answer.model_copy(update={"id": None})]}

    async with Runtime(on_event=events) as runtime:
        node = state_node(chat, lookahead_node(runtime, policy_of(summariser), mode="state"), reply)
        graph = chat_graph(node, state=Added, checkpointer=InMemorySaver())
        with caplog.at_level(logging.WARNING, logger="smoothctx.langgraph"):
            for k in TURNS:
                question = ask(k, id=f"q{k}") if ids else ask(k)
                state = await graph.ainvoke({"messages": [question]}, on("t"))
                await idle(runtime)
        assert len(state["messages"]) == 20 and not summaries(state["messages"])
        assert summaries(chat.last) and marks(chat.last) == set(range(19))
        assert len(events.of("state.kept")) == 1 and len(caplog.records) == 1
        assert ("ids" in caplog.text) and summariser.calls <= 10


async def test_a_list_without_a_reducer_falls_back() -> None:
    """A plain value cannot be rewritten by ids: the view is used, what the node returns is kept raw."""
    chat, events = Chat(), Events()
    async with Runtime(on_event=events) as runtime:
        node = state_node(
            chat,
            lookahead_node(runtime, policy_of(), mode="state"),
            lambda messages, reply: {"messages": [*messages, reply]},
        )
        graph = chat_graph(node, state=Last)
        held: list[Any] = []
        for k in TURNS:
            held = (await graph.ainvoke({"messages": [*held, ask(k, id=f"q{k}")]}, on("t")))["messages"]
            await idle(runtime)
        assert len(held) == 20 and summaries(chat.last) and not summaries(held)
        assert len(events.of("state.kept")) == 1


async def test_messages_that_a_send_carries_are_not_the_states() -> None:
    """A worker on a list of its own sees views; the state's channel is left alone."""
    chat, events = Chat(), Events()
    async with Runtime(on_event=events) as runtime:
        builder = StateGraph(MessagesState)
        builder.add_node("worker", state_node(chat, lookahead_node(runtime, policy_of(), mode="state")))
        talk: list[BaseMessage] = []
        builder.add_conditional_edges(START, lambda state: [Send("worker", {"messages": list(talk)})])
        graph = builder.compile(checkpointer=InMemorySaver())
        for k in TURNS:
            talk.append(ask(k, id=f"q{k}"))
            state = await graph.ainvoke({"messages": []}, on("t"))
            await idle(runtime)
            talk.append(state["messages"][-1])
        assert summaries(chat.last) and len(state["messages"]) == 10 and len(events.of("state.kept")) == 1


@pytest.mark.parametrize("how", ["edit", "remove", "clear", "overwrite"])
async def test_a_node_that_changes_what_would_be_replaced_goes_first(how: str) -> None:
    """Where the node itself says what becomes of these messages, its word counts; the next turns go on from there."""
    chat, done = Chat(), []

    def changes(messages: list[Any], reply: Any) -> Any:
        if not summaries(messages) or done:
            return {"messages": [reply]}
        done.append(how)
        anew = HumanMessage(fill("<901> anew", 60), id="anew")
        return {
            "edit": {"messages": [HumanMessage(fill("<900> edited", 60), id="q0"), reply]},
            "remove": {"messages": [RemoveMessage("q0"), reply]},
            "clear": {"messages": [RemoveMessage("__remove_all__"), anew, reply]},
            "overwrite": {"messages": Overwrite([anew, reply])},
        }[how]

    async with Runtime() as runtime:
        node = state_node(chat, lookahead_node(runtime, policy_of(), mode="state"), changes)
        graph = chat_graph(node, checkpointer=InMemorySaver())
        before: set[int] = set()
        for k in range(12):
            first = not done
            state = await graph.ainvoke({"messages": [ask(500 + k, id=f"q{k}")]}, on("t"))
            held = marks(state["messages"])
            if first and done:
                assert 1000 not in held and not summaries(state["messages"])
                if how in ("edit", "remove"):
                    assert before - {1000} <= held and (900 in held) == (how == "edit")
                else:
                    assert 901 in held and not before & held, "only what the node put there"
            before = held
            await idle(runtime)
        assert done and summaries(state["messages"]) and 1000 not in marks(state["messages"])
        assert ({"edit": 900}.get(how, 901) in before) or how == "remove"


async def test_time_travel_before_the_rewrite() -> None:
    """An old checkpoint still holds the raw messages: the branch starts from them and is rewritten on its own."""
    chat = Chat()
    async with Runtime() as runtime:
        node = state_node(chat, lookahead_node(runtime, policy_of(), mode="state"))
        graph = chat_graph(node, checkpointer=InMemorySaver())
        await converse(graph, runtime, on("t"), TURNS)
        old = [
            s.config
            async for s in graph.aget_state_history(on("t"))
            if not s.next and len(s.values["messages"]) == 4 and not summaries(s.values["messages"])
        ]
        state = await graph.ainvoke({"messages": [HumanMessage(fill("<900> again", 60))]}, old[0])
        assert marks(state["messages"]) == {0, 1, 2, 3, 900, 901} and max(marks(chat.last)) == 900


async def test_a_restart_in_state_mode_needs_nothing() -> None:
    """The state itself holds the summary: a new process goes on from it, and summarises no message again."""
    saver = InMemorySaver()
    for turns in (range(8), range(8, 14)):
        chat, summariser = Chat(), FakeSummarizer(delay=0)
        async with Runtime() as runtime:
            node = state_node(chat, lookahead_node(runtime, policy_of(summariser), mode="state"))
            graph = chat_graph(node, checkpointer=saver)
            before = (await graph.aget_state(on("t"))).values.get("messages", [])
            state = await converse(graph, runtime, on("t"), turns)
        if before:
            covered = marks([m for m in before if summaries([m])])
            raw_again = [
                str(m["content"])
                for request in summariser.inputs
                for m in request
                if str(m["content"]).startswith("<") and not str(m["content"]).startswith("<conversation_summary")
            ]
            assert covered and not covered & marks([HumanMessage(t) for t in raw_again])
            assert marks(state["messages"]) == set(range(28)) and len(summaries(state["messages"])) == 1


# -- the pure functions ------------------------------------------------------------------------------------------------


def made(n: int) -> list[BaseMessage]:
    """Messages with ids."""
    return [HumanMessage(f"<{k}>", id=f"m{k}") if k % 2 == 0 else AIMessage(f"<{k}>", id=f"m{k}") for k in range(n)]


@st.composite
def rewrites(draw: st.DrawFn) -> tuple[list[BaseMessage], list[BaseMessage]]:
    """A list of messages, and a view of it in which some runs are replaced by at most as many messages."""
    messages = made(draw(st.integers(0, 12)))
    view: list[BaseMessage] = []
    i = 0
    while i < len(messages):
        size = draw(st.integers(0, 3))
        if size == 0:
            view.append(messages[i])
            i += 1
            continue
        run = messages[i : i + size]
        view += [HumanMessage(f"S{i}-{k}") for k in range(draw(st.integers(0, len(run))))]
        i += size
    return messages, view


@given(rewrites())
def test_gaps_and_fill_are_inverse(case: tuple[list[BaseMessage], list[BaseMessage]]) -> None:
    """The gaps of a view, filled, are the view: the same objects."""
    messages, view = case
    again = filled(messages, gaps(messages, view))
    assert len(again) == len(view) and all(a is b for a, b in zip(again, view, strict=True))


@given(rewrites(), st.integers(0, 3))
def test_rewriting_by_id_gives_the_view(case: tuple[list[BaseMessage], list[BaseMessage]], more: int) -> None:
    """``add_messages`` makes the view of it, with parallel appends before or after still there."""
    messages, view = case
    writes = rewritten(messages, view)
    appended: list[Any] = [AIMessage(f"new{k}", id=f"new{k}") for k in range(more)]
    for first, second in ((writes, appended), (appended, writes)):
        held = add_messages(add_messages(list(messages), first), second)
        assert [m.content for m in held] == [m.content for m in [*view, *appended]]  # type: ignore[union-attr]


@given(rewrites())
def test_a_returned_view_is_the_messages_again(case: tuple[list[BaseMessage], list[BaseMessage]]) -> None:
    """Raw of the whole view, with a reply behind it, is every message and the reply."""
    messages, view = case
    reply = AIMessage("reply", id="reply")
    done = raw([*view, reply], messages, view, gaps(messages, view))
    assert done == [*messages, reply]


def test_what_ids_cannot_say() -> None:
    """No ids, ids twice, or more messages than they replace: no writes at all."""
    summary = HumanMessage("S")
    assert by_id([HumanMessage("a"), HumanMessage("b")], [Gap(0, 1, (summary,))]) is None
    assert by_id([HumanMessage("a", id="x"), HumanMessage("b", id="x")], [Gap(0, 1, (summary,))]) is None
    assert by_id(made(2), [Gap(0, 1, (summary, summary))]) is None
    assert by_id(made(2), [Gap(1, 1, (summary,))]) is None
    assert rewritten(made(2), [summary, summary, summary]) == []


def test_originals_are_not_touched() -> None:
    """Writes are copies under other ids; the view's and the state's messages keep theirs."""
    messages, summary = made(4), HumanMessage("S", id="s")
    writes = by_id(messages, [Gap(0, 3, (summary,))])
    assert writes is not None and [m.id for m in writes] == ["m0", "m1", "m2"]
    assert summary.id == "s" and [m.id for m in messages] == ["m0", "m1", "m2", "m3"]
