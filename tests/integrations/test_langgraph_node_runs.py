"""``lookahead_node`` in runs that are retried, cached, cancelled or concurrent: one loop, many loops, many threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import CachePolicy, RetryPolicy

from graphs import (
    HANG_S,
    Chat,
    Events,
    FakeSummarizer,
    Gate,
    SavedState,
    ask,
    chat_graph,
    check,
    converse,
    idle,
    idle_sync,
    marks,
    model_node,
    on,
    policy_of,
    summaries,
    true_to,
)
from helpers import fill
from smoothctx import Runtime
from smoothctx.errors import ClosedError
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph

TURNS = range(6)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime on the test's loop."""
    async with Runtime() as opened:
        yield opened


async def test_retries_see_the_same_view_and_start_one_lookahead(runtime: Runtime) -> None:
    """A node that fails twice in each turn is shown the same messages three times; nothing is prepared twice."""
    chat, summariser = Chat(), FakeSummarizer(delay=0)
    attempts: list[list[str]] = []

    @lookahead_node(runtime, policy_of(summariser))
    async def model(state: MessagesState) -> Any:
        attempts.append([str(m.content) for m in state["messages"]])
        if len(attempts) % 3:
            raise ConnectionError("try again")
        return {"messages": [await chat.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    policy = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False, retry_on=ConnectionError)
    builder.add_node("model", model, retry_policy=policy)
    builder.add_edge(START, "model")
    graph = builder.compile(checkpointer=InMemorySaver())
    state = await converse(graph, runtime, on("t"), TURNS)
    check(chat, state)
    for k in range(0, len(attempts), 3):
        assert attempts[k] == attempts[k + 1] == attempts[k + 2]
    inputs = [tuple(sorted(marks_of_input(i))) for i in summariser.inputs]
    assert len(set(inputs)) == len(inputs)


def marks_of_input(request: list[dict[str, Any]]) -> set[int]:
    """The marks in a request of the summariser."""
    return marks([HumanMessage(str(m.get("content") or "")) for m in request])


async def test_a_cached_node_does_not_run(runtime: Runtime) -> None:
    """``CachePolicy``: on a hit neither the node nor the decorator runs."""
    runs: list[int] = []

    @lookahead_node(runtime, policy_of())
    def model(state: MessagesState) -> Any:
        runs.append(len(state["messages"]))
        return {"messages": [AIMessage("<1> answer", id="a")]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", model, cache_policy=CachePolicy())
    builder.add_edge(START, "model")
    graph = builder.compile(cache=InMemoryCache())
    for _ in range(3):
        state = await graph.ainvoke({"messages": [ask(0, id="q")]})
        assert len(state["messages"]) == 2
    assert runs == [1]


async def test_no_thread_and_no_checkpointer(runtime: Runtime) -> None:
    """A caller that keeps the list and passes it whole each time: its opening names the conversation."""
    chat = Chat()
    graph = chat_graph(lookahead_node(runtime, policy_of())(model_node(chat, lambda node: node)))
    held: list[BaseMessage] = []
    for k in TURNS:
        held = (await graph.ainvoke({"messages": [*held, ask(k)]}))["messages"]
        await idle(runtime)
    check(chat, {"messages": held})
    other = await graph.ainvoke({"messages": [HumanMessage("<100> another conversation")]})
    assert true_to(chat.last, other["messages"][:-1])


async def test_a_closed_runtime_means_raw_messages(caplog: pytest.LogCaptureFixture) -> None:
    """After shutdown the node goes on with what the state holds, and one event and one warning say so."""
    events, chat = Events(), Chat()
    async with Runtime(on_event=events) as runtime:
        graph = chat_graph(model_node(chat, lookahead_node(runtime, policy_of())), checkpointer=InMemorySaver())
        await converse(graph, runtime, on("t"), TURNS)
    with caplog.at_level(logging.WARNING, logger="smoothctx.langgraph"):
        for k in range(6, 8):
            await graph.ainvoke({"messages": [ask(k)]}, on("t"))
    assert len(chat.last) == 15 and not summaries(chat.last)
    assert len(events.of("turn.raw")) == 1 and "closed" in caplog.text and len(caplog.records) == 1


async def test_a_runtime_that_was_never_opened_is_an_error() -> None:
    """That is a mistake, and it says how to open one."""
    graph = chat_graph(model_node(Chat(), lookahead_node(Runtime(), policy_of())))
    with pytest.raises(ClosedError, match="not open"):
        await graph.ainvoke({"messages": [ask(0)]}, on("t"))


async def test_tenants_by_config_never_meet(runtime: Runtime) -> None:
    """The tenant may come from the run's config: the same thread id of two tenants is two conversations."""
    chat, summariser = Chat(), FakeSummarizer(delay=0)
    policy = policy_of(summariser)
    decorate = lookahead_node(runtime, policy, tenant=lambda config: config["configurable"]["user"])
    graph = chat_graph(model_node(chat, decorate))
    for user in ("ann", "bob"):
        held: list[BaseMessage] = []
        for k in TURNS:
            config = on("t", user=user)
            held = (await graph.ainvoke({"messages": [*held, ask(k)]}, config))["messages"]
            await idle(runtime)
        check(chat, {"messages": held})
    half = len(summariser.inputs) // 2
    assert half and len(summariser.inputs) == 2 * half, "bob's summaries are made anew"


def test_one_event_loop_per_request() -> None:
    """``asyncio.run`` for each request: the work goes on between them, on the runtime's own loop."""
    chat, saver = Chat(), InMemorySaver()
    with Runtime.in_thread() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: SavedState) -> Any:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        for k in range(10):
            graph = chat_graph(model, state=SavedState, checkpointer=saver)
            state = asyncio.run(graph.ainvoke({"messages": [ask(k)]}, on("t")))
            assert true_to(chat.last, state["messages"][:-1])
            idle_sync(runtime)
        assert summaries(chat.last) and len(state["messages"]) == 20


def test_a_server_with_many_threads() -> None:
    """Eight threads, each with conversations of its own, on one decorated node: nobody sees anything of another's."""
    chats: dict[str, Chat] = {}
    gate = Gate(8)
    with Runtime.in_thread() as runtime:

        @lookahead_node(runtime, policy_of())
        def model(state: MessagesState, config: RunnableConfig) -> Any:
            return {"messages": [chats[config["configurable"]["thread_id"]].invoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())

        def serve(who: int) -> dict[str, Any]:
            name = f"user-{who}"
            chats[name] = Chat()
            state: dict[str, Any] = {}
            for k in range(8):
                gate.arrive()
                state = graph.invoke({"messages": [ask(500 * who + k)]}, on(name))
                idle_sync(runtime)
                assert true_to(chats[name].last, state["messages"][:-1])
            return state

        with ThreadPoolExecutor(8) as pool:
            states = list(pool.map(serve, range(8)))
        for who, state in enumerate(states):
            assert marks(state["messages"]) == set(range(1000 * who, 1000 * who + 16))
            assert summaries(chats[f"user-{who}"].last)
        assert len(runtime._sessions) == 8


async def test_concurrent_runs_on_one_loop() -> None:
    """Twenty threads of one graph at once, in one loop."""
    chat = Chat()
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: MessagesState) -> Any:
            await asyncio.sleep(0)
            return {"messages": [await chat.ainvoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in range(6):
            chat.seen.clear()
            async with asyncio.TaskGroup() as group:
                for who in range(20):
                    group.create_task(graph.ainvoke({"messages": [ask(500 * who + k)]}, on(f"t{who}")))
            for view in chat.seen:
                who = max(marks(view)) // 1000
                assert marks(view) == set(range(1000 * who, 1000 * who + 2 * k + 1))
            await idle(runtime)
        assert all(summaries(view) for view in chat.seen)


async def test_concurrent_runs_on_one_thread_id() -> None:
    """LangGraph does not serialise them: each run still sees exactly its own history."""
    chat = Chat()
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: MessagesState) -> Any:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in range(6):
            chat.seen.clear()
            base = marks((await graph.aget_state(on("t"))).values.get("messages", []))
            asked = {1000 * k + 100 * who for who in range(3)}
            async with asyncio.TaskGroup() as group:
                for question in asked:
                    group.create_task(graph.ainvoke({"messages": [ask(question // 2)]}, on("t")))
            for view in chat.seen:
                own = marks(view) - base
                assert own and own <= asked | {q + 1 for q in asked}
                assert base <= marks(view)
            await idle(runtime)


async def test_a_cancelled_run_is_cancelled() -> None:
    """Cancelling a run ends its node and nothing else: the next one sees what it should."""
    chat, waiting = Chat(), asyncio.Event()
    hang = True
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: MessagesState) -> Any:
            if hang and len(chat.seen) == 5:
                waiting.set()
                await asyncio.Event().wait()
            return {"messages": [await chat.ainvoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in range(5):
            await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            await idle(runtime)
        async with asyncio.TaskGroup() as group:
            run = group.create_task(swallow(graph.ainvoke({"messages": [ask(5)]}, on("t"))))
            await asyncio.wait_for(waiting.wait(), HANG_S)
            run.cancel()
        hang = False
        state = await graph.ainvoke(None, on("t"))
        assert true_to(chat.last, state["messages"][:-1]) and len(state["messages"]) == 12


async def swallow(run: Any) -> None:
    """Await something that will be cancelled."""
    try:
        await run
    except asyncio.CancelledError:
        return


async def test_a_node_that_times_out_is_tried_again() -> None:
    """``TimeoutPolicy`` cancels an attempt; the next one sees the same view."""
    try:
        from langgraph.types import RetryPolicy, TimeoutPolicy
    except ImportError:
        return  # older than timeouts
    seen: list[list[str]] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: MessagesState) -> Any:
            seen.append([str(m.content) for m in state["messages"]])
            if len(seen) % 2:
                await asyncio.Event().wait()
            return {"messages": [("ai", fill(f"<{1000 + len(seen)}> ok", 60))]}

        builder = StateGraph(MessagesState)
        builder.add_node(
            "model",
            model,
            timeout=TimeoutPolicy(run_timeout=0.2),
            retry_policy=RetryPolicy(max_attempts=9, initial_interval=0.001, jitter=False),
        )
        builder.add_edge(START, "model")
        graph = builder.compile(checkpointer=InMemorySaver())
        for k in range(6):
            await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            await idle(runtime)
        assert any("conversation_summary" in text for text in seen[-1])


async def test_a_synchronous_node_under_ainvoke_at_the_hard_limit() -> None:
    """It waits in its own thread, bounded, while the loop goes on and the summary is made on it."""
    chat = Chat()
    names: list[str] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(hard_limit=("messages", 6)))
        def model(state: MessagesState) -> Any:
            names.append(threading.current_thread().name)
            return {"messages": [chat.invoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        state = None
        for k in range(10):
            state = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
        assert all(len(view) <= 6 for view in chat.seen) and state is not None
        assert threading.main_thread().name not in names and len(state["messages"]) == 20
