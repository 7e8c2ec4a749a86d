"""Views and checkpoints: restarts, forks, time travel, edits, deletions, interrupts, with real checkpointers.

The oracle is the same everywhere: the marks in what the model saw are exactly those of the messages in its branch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from graphs import (
    Chat,
    FakeSummarizer,
    Process,
    SavedState,
    ask,
    chat_graph,
    converse,
    converse_sync,
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
from smoothctx import FolderStore, Runtime
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph


@asynccontextmanager
async def memory(folder: Path) -> AsyncIterator[Any]:
    """LangGraph's checkpointer in memory."""
    yield InMemorySaver()


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[Any]:
    """A real file."""
    async with AsyncSqliteSaver.from_conn_string(str(folder / "checkpoints.db")) as saver:
        yield saver


@pytest.fixture(params=[memory, sqlite], ids=["memory", "sqlite"])
async def saver(request: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """Each asynchronous checkpointer in turn."""
    async with request.param(tmp_path) as opened:
        yield opened


async def test_restart_uses_the_committed_summary_and_pays_for_none(saver: Any) -> None:
    """A new runtime and graph over the same checkpointer: the first view has the summary, and nobody made it anew."""
    async with Process(saver) as first:
        await first.talk(on("t"), range(8))
        before = first.chat.last
        assert summaries(before)
    async with Process(saver) as second:
        await second.turn(on("t"), ask(8))
        view = second.chat.last
        assert summaries(view) == summaries(before), "the very same text"
        assert [m.content for m in view[: len(before)]] == [m.content for m in before], "the prefix stays"
        made = [m for request in second.summariser.inputs for m in request]
        covered = marks([HumanMessage(summaries(before)[0])])
        raw = [m for m in made if "conversation_summary" not in str(m["content"]) and "<" in str(m["content"])]
        assert not covered & marks([HumanMessage(str(m["content"])) for m in raw]), "nothing is summarised twice"


async def test_restart_without_the_channel_reads_the_runtimes_store(tmp_path: Path) -> None:
    """Where the state has no private channel, a durable store brings the summary back."""
    saver = InMemorySaver()
    async with Process(saver, state=MessagesState, store=FolderStore(tmp_path)) as first:
        await first.talk(on("t"), range(8))
        before = first.chat.last
        assert summaries(before)
    async with Process(saver, state=MessagesState, store=FolderStore(tmp_path)) as second:
        await second.turn(on("t"), ask(8))
        assert summaries(second.chat.last) == summaries(before)


async def test_a_wider_hint_on_the_node_is_enough(saver: Any) -> None:
    """The channel may be private to the node: its parameter names a state that has it, the graph's does not."""
    texts = []
    for turns in (range(8), range(8, 9)):
        chat = Chat()
        async with Runtime() as runtime:

            @lookahead_node(runtime, policy_of())
            async def model(state: SavedState, chat: Chat = chat) -> dict[str, Any]:
                assert "smoothctx" not in state, "the node sees the state that its graph has"
                return {"messages": [await chat.ainvoke(state["messages"])]}

            graph = chat_graph(model, state=MessagesState, checkpointer=saver)
            state = await converse(graph, runtime, on("t"), turns)
            assert state.keys() == {"messages"}
            texts.append(summaries(chat.last))
    assert texts[0] and texts[0] == texts[1]


async def test_restart_with_neither_goes_on_raw_and_prepares_anew(saver: Any) -> None:
    """With nothing kept, the first turn is raw, and a summary is prepared beside it."""
    async with Process(saver, state=MessagesState) as first:
        await first.talk(on("t"), range(6))
    async with Process(saver, state=MessagesState) as second:
        await second.turn(on("t"), ask(6))
        assert not summaries(second.chat.last) and len(second.chat.last) == 13
        await second.talk(on("t"), range(7, 9))
        assert summaries(second.chat.last)


async def test_edit_under_the_same_id(saver: Any) -> None:
    """An early message edited in place: no view tells of the old text, and what lies before the edit is reused."""
    async with Process(saver) as process:
        state = await process.talk(on("t"), range(8))
        early = state["messages"][2]
        edited = HumanMessage(fill("<500> edited", 60), id=early.id)
        await process.graph.aupdate_state(on("t"), {"messages": [edited]})
        state = await process.turn(on("t"), ask(8))
        assert 500 in marks(process.chat.last) and 2 not in marks(process.chat.last)
        assert state["messages"][2].content == edited.content
        await process.talk(on("t"), range(9, 11))
        assert summaries(process.chat.last) and 500 in marks(process.chat.last)


async def test_edit_behind_the_summary_keeps_it(saver: Any) -> None:
    """An edit of a message that no summary covers leaves the summary in the view."""
    async with Process(saver) as process:
        state = await process.talk(on("t"), range(8))
        before = summaries(process.chat.last)
        made = process.summariser.calls
        late = state["messages"][-1]
        edited = AIMessage(fill("<500> edited", 60), id=late.id)
        await process.graph.aupdate_state(on("t"), {"messages": [edited]}, as_node="model")
        await process.graph.ainvoke({"messages": [ask(400)]}, on("t"))
        assert 500 in marks(process.chat.last) and late.content not in [m.content for m in process.chat.last]
        assert before and summaries(process.chat.last), (made, process.summariser.calls)


async def test_a_fork_and_its_origin_each_see_their_own(saver: Any) -> None:
    """An edited fork of a checkpoint and the thread's end, in turns: never the other's text, nothing done twice."""
    async with Process(saver) as process:
        await process.talk(on("t"), range(8))
        end = (await process.graph.aget_state(on("t"))).config
        old = await process.checkpoint_of(on("t"), 10)
        fork = await process.graph.aupdate_state(old, {"messages": [HumanMessage("<700> fork")]}, as_node="model")
        for k in range(3):
            state = await process.turn(fork, HumanMessage(fill(f"<{710 + 2 * k}> forked", 60)))
            fork = (await process.graph.aget_state(on("t"))).config
            assert 700 in marks(state["messages"]) and 12 not in marks(process.chat.last)
            state = await process.turn(end, HumanMessage(fill(f"<{810 + 2 * k}> main", 60)))
            end = (await process.graph.aget_state(on("t"))).config
            assert 14 in marks(process.chat.last) and 700 not in marks(process.chat.last)
            assert summaries(process.chat.last)
        inputs = [tuple(sorted(marks([HumanMessage(str(m["content"])) for m in i]))) for i in process.summariser.inputs]
        assert len(set(inputs)) == len(inputs), "one flight per artifact"


async def test_time_travel_reuses_what_still_holds(saver: Any) -> None:
    """Back to an old checkpoint: only the part of its own past is summarised, with the summary of that time."""
    async with Process(saver) as process:
        await process.talk(on("t"), range(8))
        made = process.summariser.calls
        old = await process.checkpoint_of(on("t"), 10)
        state = await process.turn(old, HumanMessage(fill("<900> again", 60)))
        assert len(state["messages"]) == 12 and max(marks(process.chat.last)) == 900
        assert summaries(process.chat.last), "what was committed on the way there is in the view at once"
        assert process.summariser.calls <= made + 1, "only what this branch adds is prepared"


async def test_replay_of_a_checkpoint(saver: Any) -> None:
    """The node that follows an old checkpoint runs again: it sees its own past."""
    async with Process(saver) as process:
        await process.talk(on("t"), range(8))
        async for snapshot in process.graph.aget_state_history(on("t")):
            if snapshot.next == ("model",) and len(snapshot.values["messages"]) == 9:
                state = await process.graph.ainvoke(None, snapshot.config)
                break
        assert len(state["messages"]) == 10 and true_to(process.chat.last, state["messages"][:-1])


async def test_deletion_of_covered_messages(saver: Any) -> None:
    """Messages removed from the state are gone from every later view."""
    async with Process(saver) as process:
        state = await process.talk(on("t"), range(8))
        gone = [RemoveMessage(m.id) for m in state["messages"][:4]]
        await process.graph.aupdate_state(on("t"), {"messages": gone})
        await process.turn(on("t"), ask(8))
        assert not {0, 1, 2, 3} & marks(process.chat.last)
        await process.talk(on("t"), range(9, 11))
        assert summaries(process.chat.last) and not {0, 1, 2, 3} & marks(process.chat.last)


async def test_a_restart_on_a_fork(saver: Any) -> None:
    """A new process that starts on a fork takes from the checkpoint what that branch committed, and nothing else."""
    async with Process(saver) as first:
        await first.talk(on("t"), range(8))
        old = await first.checkpoint_of(on("t"), 10)
    async with Process(saver) as second:
        state = await second.turn(old, HumanMessage(fill("<900> again", 60)))
        assert len(state["messages"]) == 12
        assert summaries(second.chat.last) and max(marks(second.chat.last)) == 900


async def test_an_edit_before_a_restart(saver: Any) -> None:
    """The channel still holds a summary of the text before the edit: a new process does not use it."""
    async with Process(saver) as first:
        state = await first.talk(on("t"), range(8))
        edited = HumanMessage(fill("<500> edited", 60), id=state["messages"][0].id)
        await first.graph.aupdate_state(on("t"), {"messages": [edited]})
    async with Process(saver) as second:
        await second.turn(on("t"), ask(8))
        assert 500 in marks(second.chat.last) and 0 not in marks(second.chat.last)


async def test_the_channel_stays_small(saver: Any) -> None:
    """Fifty turns: it holds what is in the view, not every summary that ever was."""
    async with Process(saver) as process:
        await process.talk(on("t"), range(50))
        held = (await process.graph.aget_state(on("t"))).values["smoothctx"]["model"]
        assert 1 <= len(held) <= 2, len(held)


async def test_the_channel_is_hidden_from_input_and_output(saver: Any) -> None:
    """With input and output schemas of its own the graph takes and gives messages only."""
    async with Process(saver) as process:
        state = await process.talk(on("t"), range(6))
        assert state.keys() == {"messages"} and "smoothctx" not in process.graph.get_input_jsonschema()["properties"]
        updates = [u async for u in process.graph.astream({"messages": [ask(6)]}, on("t"), stream_mode="updates")]
        assert [u["model"].keys() for u in updates] == [{"messages"}]


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


@contextmanager
def sqlite_sync(folder: Path) -> Iterator[Any]:
    """The synchronous SQLite checkpointer."""
    with SqliteSaver.from_conn_string(str(folder / "checkpoints.db")) as opened:
        yield opened


def test_synchronous_restart(tmp_path: Path) -> None:
    """``invoke`` with SQLite, and again in another runtime: the summary is the same text, and none was made for it."""
    texts, calls = [], []
    for turns in (range(8), range(8, 9)):
        chat, summariser = Chat(), FakeSummarizer(delay=0)
        with sqlite_sync(tmp_path) as saver, Runtime.in_thread() as runtime:

            @lookahead_node(runtime, policy_of(summariser))
            def model(state: SavedState, chat: Chat = chat) -> dict[str, Any]:
                return {"messages": [chat.invoke(state["messages"])]}

            state = converse_sync(chat_graph(model, state=SavedState, checkpointer=saver), runtime, on("t"), turns)
            assert true_to(chat.last, state["messages"][:-1])
            texts.append(summaries(chat.last))
            calls.append(summariser.calls)
    assert texts[0] and texts[0] == texts[1] and calls[1] <= 1


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


def test_edits_under_synchronous_invoke(tmp_path: Path) -> None:
    """The synchronous path rejects a stale summary just as well."""
    chat = Chat()
    with sqlite_sync(tmp_path) as saver, Runtime.in_thread() as runtime:

        @lookahead_node(runtime, policy_of())
        def model(state: SavedState) -> dict[str, Any]:
            return {"messages": [chat.invoke(state["messages"])]}

        graph = chat_graph(model, state=SavedState, checkpointer=saver)
        state = converse_sync(graph, runtime, on("t"), range(8))
        assert summaries(chat.last)
        edited = HumanMessage(fill("<500> edited", 60), id=state["messages"][0].id)
        graph.update_state(on("t"), {"messages": [edited]})
        state = graph.invoke({"messages": [ask(8)]}, on("t"))
        assert true_to(chat.last, state["messages"][:-1]) and 500 in marks(chat.last)
        idle_sync(runtime)


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
