"""Nodes that run again or side by side over real checkpointers: interrupts, retries, subgraphs, parallel workers.

Whatever brings a node to run, it sees exactly the branch that its state holds, and a second run what the first one saw.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from graphs import (
    SAVERS,
    Chat,
    FakeSummarizer,
    SavedState,
    ask,
    chat_graph,
    converse,
    idle,
    marks,
    model_node,
    on,
    policy_of,
    summaries,
    true_to,
)
from helpers import fill
from smoothctx import Runtime
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph


@pytest.fixture(params=SAVERS.values(), ids=SAVERS.keys())
async def saver(request: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """Each asynchronous checkpointer in turn."""
    async with request.param(tmp_path) as opened:
        yield opened


async def test_interrupt_and_resume_see_one_view(saver: Any) -> None:
    """A node that waits for a person runs again when it resumes: it is shown the very same messages, even though a
    summary became ready meanwhile."""
    seen: list[list[str]] = []
    summariser = FakeSummarizer(delay=0)
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(summariser))
        async def model(state: SavedState) -> dict[str, Any]:
            seen.append([str(m.content) for m in state["messages"]])
            word = interrupt("go on?")
            return {"messages": [AIMessage(fill(f"<{1000 + len(seen)}> {word}", 60))]}

        graph = chat_graph(model, state=SavedState, checkpointer=saver)
        for k in range(6):
            paused = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            assert paused["__interrupt__"][0].value == "go on?"
            await idle(runtime)
            state = await graph.ainvoke(Command(resume="yes"), on("t"))
            assert seen[-1] == seen[-2], "pinned for the task"
            await idle(runtime)
        assert any("conversation_summary" in text for text in seen[-1])
        assert len(state["messages"]) == 12 and not summaries(state["messages"])


async def test_interrupt_and_an_edit_before_resuming(saver: Any) -> None:
    """What was pinned for a task holds only for its messages: the resumed node sees the edit."""
    seen: list[set[int]] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: SavedState) -> dict[str, Any]:
            seen.append(marks(state["messages"]))
            interrupt("go on?")
            return {"messages": [AIMessage(fill(f"<{1000 + len(seen)}> ok", 60))]}

        graph = chat_graph(model, state=SavedState, checkpointer=saver)
        for k in range(5):
            await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            await idle(runtime)
            if k < 4:
                await graph.ainvoke(Command(resume="yes"), on("t"))
        first = (await graph.aget_state(on("t"))).values["messages"][0]
        edited = await graph.aupdate_state(on("t"), {"messages": [HumanMessage("<500> edited", id=first.id)]}, START)
        await graph.ainvoke(None, edited)
        assert 500 in seen[-1] and 0 not in seen[-1]


async def test_subgraphs_with_and_without_memory(saver: Any) -> None:
    """A decorated node inside a subgraph: the names of its namespace are alike in each turn, the ids are not."""
    for own_memory in (None, True):
        chat = Chat()
        async with Runtime() as runtime:
            sub = chat_graph(model_node(chat, lookahead_node(runtime, policy_of())), checkpointer=own_memory)
            builder = StateGraph(MessagesState)
            builder.add_node("sub", sub)
            builder.add_edge(START, "sub")
            graph = builder.compile(checkpointer=saver)
            state = await converse(graph, runtime, on(f"sub-{own_memory}"), range(8))
            assert summaries(chat.last) and true_to(chat.last, state["messages"][:-1])
            assert len(runtime._sessions) == 1, "one conversation"


async def test_a_subgraph_that_shares_the_channel(saver: Any) -> None:
    """Parent and subgraph with the private channel: it passes through both, and a restart uses it."""
    texts = []
    for turns in (range(8), range(8, 9)):
        chat, summariser = Chat(), FakeSummarizer(delay=0)
        async with Runtime() as runtime:
            inner = StateGraph(SavedState)
            inner.add_node("model", model_node(chat, lookahead_node(runtime, policy_of(summariser))))
            inner.add_edge(START, "model")
            builder = StateGraph(SavedState)
            builder.add_node("sub", inner.compile())
            builder.add_edge(START, "sub")
            state = await converse(builder.compile(checkpointer=saver), runtime, on("shared"), turns)
            assert true_to(chat.last, state["messages"][:-1])
            texts.append(summaries(chat.last))
    assert texts[0] and texts[0] == texts[1]


async def test_parallel_branches_keep_apart(saver: Any) -> None:
    """Three workers by ``Send``, each with a conversation of its own, in one step of each turn."""
    chat = Chat()
    async with Runtime() as runtime:
        worker = model_node(chat, lookahead_node(runtime, policy_of()))

        class Talks(SavedState):
            talks: list[list[BaseMessage]]

        builder = StateGraph(Talks)
        builder.add_node("worker", worker)
        builder.add_conditional_edges(
            START, lambda state: [Send("worker", {"messages": talk}) for talk in state["talks"]]
        )
        graph = builder.compile(checkpointer=saver)
        talks: list[list[BaseMessage]] = [[], [], []]
        for k in range(8):
            for who, talk in enumerate(talks):
                talk.append(HumanMessage(fill(f"<{1000 * who + 2 * k}> question", 60)))
            await graph.ainvoke({"talks": talks, "messages": []}, on("t"))
            await idle(runtime)
            for talk in talks:
                view = next(v for v in chat.seen[-3:] if v[-1].content == talk[-1].content)
                assert true_to(view, talk), (marks(view), marks(talk))
                assert k < 4 or summaries(view)
                talk.append(AIMessage(fill(f"<{max(marks(talk)) + 1}> answer", 60)))
        held = (await graph.aget_state(on("t"))).values["smoothctx"]["worker"]
        assert len(held) >= 3, "what each worker committed"


async def test_two_nodes_in_one_step_share_the_history(saver: Any) -> None:
    """Two decorated nodes answer in parallel: each has a session of its own, both are true to the state."""
    one, two = Chat(), Chat()
    async with Runtime() as runtime:
        decorate = lookahead_node(runtime, policy_of())
        builder = StateGraph(SavedState)
        builder.add_node("one", model_node(one, decorate))
        builder.add_node("two", model_node(two, decorate))
        builder.add_edge(START, "one")
        builder.add_edge(START, "two")
        graph = builder.compile(checkpointer=saver)
        for k in range(8):
            state = await graph.ainvoke({"messages": [ask(10 * k)]}, on("t"))
            for chat in (one, two):
                assert true_to(chat.last, state["messages"][:-2])
            await idle(runtime)
        assert summaries(one.last) and summaries(two.last)


async def test_a_retry_after_a_failed_step(saver: Any) -> None:
    """A run that broke is continued: the node runs again on the same checkpoint and sees what it saw."""
    seen: list[list[str]] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: SavedState) -> dict[str, Any]:
            seen.append([str(m.content) for m in state["messages"]])
            if len(seen) % 2:
                raise ConnectionError("the line is down")
            return {"messages": [AIMessage(fill(f"<{1000 + len(seen)}> ok", 60))]}

        graph = chat_graph(model, state=SavedState, checkpointer=saver)
        for k in range(6):
            with pytest.raises(ConnectionError):
                await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            await idle(runtime)
            await graph.ainvoke(None, on("t"))
            await idle(runtime)
            assert seen[-1] == seen[-2]
        assert any("conversation_summary" in text for text in seen[-1])


async def test_retry_policy_and_saver_together(saver: Any) -> None:
    """``RetryPolicy`` over a real checkpointer: attempts of one task see one view, also across a restart's history."""
    seen: list[list[str]] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: SavedState) -> dict[str, Any]:
            seen.append([str(m.content) for m in state["messages"]])
            if len(seen) % 2:
                raise ConnectionError("once")
            return {"messages": [AIMessage(fill(f"<{1000 + len(seen)}> ok", 60))]}

        builder = StateGraph(SavedState)
        retry = RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False, retry_on=ConnectionError)
        builder.add_node("model", model, retry_policy=retry)
        builder.add_edge(START, "model")
        builder.add_edge("model", END)
        await converse(builder.compile(checkpointer=saver), runtime, on("t"), range(6))
        assert all(a == b for a, b in zip(seen[::2], seen[1::2], strict=True))
