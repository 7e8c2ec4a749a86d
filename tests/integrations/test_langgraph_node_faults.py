"""``lookahead_node`` when something of ours fails, and in the functional API and error handlers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph

from graphs import (
    HANG_S,
    Chat,
    Events,
    FakeSummarizer,
    ask,
    chat_graph,
    check,
    converse,
    idle,
    model_node,
    on,
    policy_of,
    summaries,
)
from helpers import Rateless
from smoothctx import ClosedError, Event, Runtime
from smoothctx_langgraph.node import lookahead_node

try:
    from langgraph.errors import NodeError
except ImportError:  # older than error handlers
    NodeError = None  # type: ignore[assignment,misc]

pytestmark = pytest.mark.langgraph

TURNS = range(6)


async def swallow(run: Any) -> None:
    """Await something that will be cancelled."""
    try:
        await run
    except asyncio.CancelledError:
        return


async def test_a_run_cancelled_while_it_waits_at_the_limit_is_not_pinned_to_the_raw_messages() -> None:
    """The cancelled turn had no view yet: when it is tried again, it gets one that fits."""
    chat, summariser = Chat(), FakeSummarizer("hang")
    promoted = asyncio.Event()
    policy = policy_of(summariser, hard_limit=("messages", 6), trigger=("messages", 6), max_wait=1e6)

    def heard(event: Event) -> None:
        if event.name == "lookahead.promoted":
            promoted.set()

    async with Runtime(on_event=heard) as runtime:
        graph = chat_graph(model_node(chat, lookahead_node(runtime, policy)), checkpointer=InMemorySaver())
        for k in range(3):
            await graph.ainvoke({"messages": [ask(k)]}, on("t"))
        async with asyncio.TaskGroup() as group:
            run = group.create_task(swallow(graph.ainvoke({"messages": [ask(3)]}, on("t"))))
            await asyncio.wait_for(promoted.wait(), HANG_S)
            run.cancel()
        assert len(chat.seen) == 3, "the cancelled turn never reached its model"
        summariser.mode = "answer"
        for session in list(runtime._sessions.values()):
            if session.lookahead is not None:
                session.lookahead.discard()
        await graph.ainvoke(None, on("t"))
        assert len(chat.last) <= 6 and summaries(chat.last)


async def test_an_error_in_finding_the_view_means_raw_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong inside, the node runs on what the state holds, and an event tells of it."""
    events, chat = Events(), Chat()
    async with Runtime(on_event=events) as runtime:
        graph = chat_graph(model_node(chat, lookahead_node(runtime, policy_of())), checkpointer=InMemorySaver())
        await converse(graph, runtime, on("t"), range(5))

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("ours")

        with monkeypatch.context() as patched:
            patched.setattr("smoothctx_langgraph.turns.gaps", broken)
            state = await graph.ainvoke({"messages": [ask(5)]}, on("t"))
            assert len(chat.last) == 11 and len(state["messages"]) == 12
        with monkeypatch.context() as patched:
            patched.setattr("smoothctx_langgraph.turns._bucket", broken)
            await graph.ainvoke({"messages": [ask(6)]}, on("t"))
            assert len(chat.last) == 13
        with monkeypatch.context() as patched:
            patched.setattr("smoothctx_langgraph.node.read_channel", broken)
            await graph.ainvoke({"messages": [ask(7)]}, on("t"))
            assert len(chat.last) == 15
        assert len([e for e in events if "ours" in str(e.data)]) == 3
        await converse(graph, runtime, on("t"), range(8, 11))
        assert summaries(chat.last)


@pytest.mark.parametrize("error", [RuntimeError("no rates"), ClosedError("it was closed")], ids=repr)
async def test_an_engine_that_no_session_can_be_had_with_means_raw_messages(error: Exception) -> None:
    """It is no runtime that was never opened, whatever the engine raises: the turns go on, and events tell of it."""
    events, chat = Events(), Chat()
    async with Runtime(on_event=events) as runtime:
        node = lookahead_node(runtime, policy_of(), engine=Rateless(error))
        await converse(chat_graph(model_node(chat, node), checkpointer=InMemorySaver()), runtime, on("t"), range(3))
        assert len(chat.last) == 5
    assert [e.data["where"] for e in events.of("error")] == ["lines"] * 3 and not events.of("turn.raw")


async def test_an_error_behind_the_node_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the node returned goes into the state even if our own look at it fails."""
    events, chat = Events(), Chat()
    async with Runtime(on_event=events) as runtime:
        graph = chat_graph(model_node(chat, lookahead_node(runtime, policy_of())), checkpointer=InMemorySaver())

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr("smoothctx_langgraph.node.map_messages", broken)
        state = await graph.ainvoke({"messages": [ask(0)]}, on("t"))
        assert len(state["messages"]) == 2 and [e for e in events if "ours" in str(e.data)]


# -- elsewhere ---------------------------------------------------------------------------------------------------------


async def test_a_task_of_the_functional_api() -> None:
    """A ``@task`` whose argument is the list of messages is a node like any other."""
    chat = Chat()
    async with Runtime() as runtime:

        @task
        @lookahead_node(runtime, policy_of())
        async def call_model(messages: list[BaseMessage]) -> BaseMessage:
            return await chat.ainvoke(messages)

        @entrypoint(checkpointer=InMemorySaver())
        async def flow(question: BaseMessage, *, previous: Any = None) -> list[BaseMessage]:
            messages = [*(previous or []), question]
            return [*messages, await call_model(messages)]

        for k in TURNS:
            held = await flow.ainvoke(ask(k), on("t"))
            await idle(runtime)
        check(chat, {"messages": held})


async def test_an_error_handler_is_given_its_error() -> None:
    """A decorated node that fails, and a decorated handler with ``error``, where this LangGraph has handlers."""
    if NodeError is None:
        return
    async with Runtime() as runtime:
        decorate = lookahead_node(runtime, policy_of())

        @decorate
        async def fails(state: MessagesState) -> None:
            raise ConnectionError("down")

        @decorate
        async def handles(state: MessagesState, error: NodeError) -> Any:
            return {"messages": [("ai", type(error.error).__name__)]}

        builder = StateGraph(MessagesState)
        builder.add_node("fails", fails, error_handler=handles)
        builder.add_edge(START, "fails")
        state = await builder.compile(checkpointer=InMemorySaver()).ainvoke({"messages": [ask(0)]}, on("t"))
        assert state["messages"][-1].content == "ConnectionError"
