"""Views and checkpoints: restarts, forks, time travel, edits, deletions, interrupts, with real checkpointers.

The oracle is the same everywhere: the marks in what the model saw are exactly those of the messages in its branch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState

from graphs import (
    SAVERS,
    Chat,
    FakeSummarizer,
    Process,
    SavedState,
    ask,
    chat_graph,
    converse,
    converse_sync,
    idle_sync,
    marks,
    on,
    policy_of,
    sqlite_sync,
    summaries,
    true_to,
)
from helpers import fill
from smoothctx import FolderStore, Runtime
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph


@pytest.fixture(params=SAVERS.values(), ids=SAVERS.keys())
async def saver(request: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """Each asynchronous checkpointer in turn."""
    async with request.param(tmp_path) as opened:
        yield opened


def read_again(process: Process, texts: list[str]) -> set[int]:
    """The marks that these summaries cover and that this process's summariser was given raw."""
    given = [str(m["content"]) for request in process.summariser.inputs for m in request]
    raw = [HumanMessage(text) for text in given if "conversation_summary" not in text]
    return marks(raw) & marks([HumanMessage(text) for text in texts])


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
        assert not read_again(second, summaries(before)), "nothing is summarised twice"


async def test_restart_without_the_channel_reads_the_runtimes_store(tmp_path: Path) -> None:
    """Where the state has no private channel, a durable store brings back what was made: nothing is made twice."""
    saver = InMemorySaver()
    async with Process(saver, state=MessagesState, store=FolderStore(tmp_path)) as first:
        await first.talk(on("t"), range(8))
        before = first.chat.last
        assert summaries(before)
    async with Process(saver, state=MessagesState, store=FolderStore(tmp_path)) as second:
        await second.turn(on("t"), ask(8))
        after = summaries(second.chat.last)
        assert marks([HumanMessage(t) for t in summaries(before)]) <= marks([HumanMessage(t) for t in after])
        assert second.summariser.calls <= 1 and not read_again(second, after)


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
