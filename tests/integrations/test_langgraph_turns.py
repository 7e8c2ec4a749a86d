"""Turns and identity: which session a node's messages belong to, and what is remembered of a turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from graphs import Events, FakeSummarizer, ask, chat_graph, idle, marks, on, policy_of, summaries
from helpers import fill
from smoothctx import Runtime
from smoothctx_langgraph.identity import Identity, identity
from smoothctx_langgraph.saved import MAX_OTHERS, change_of, merge_saved, read_saved
from smoothctx_langgraph.turns import MAX_PINS, Turn, Turns

pytestmark = pytest.mark.langgraph


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime on the test's loop."""
    async with Runtime() as opened:
        yield opened


def answer(k: int) -> AIMessage:
    """The reply of turn ``k``."""
    return AIMessage(fill(f"<{2 * k + 1}> answer", 60))


def inside(body: Callable[[list[BaseMessage]], Any], **compiled: Any) -> Any:
    """A graph whose node calls ``body`` with its messages; what it returns is added."""

    async def node(state: MessagesState) -> dict[str, Any]:
        added = await body(state["messages"])
        return {"messages": added or []}

    return chat_graph(node, **compiled)


# -- identity ----------------------------------------------------------------------------------------------------------


def test_outside_a_graph_nobody_runs() -> None:
    """Neither in plain code nor inside a runnable of no graph."""
    assert identity() is None
    seen: list[Identity | None] = []
    RunnableLambda(lambda _: seen.append(identity())).invoke(0)
    assert seen == [None]


async def test_names_stay_and_ids_change() -> None:
    """The namespace is alike in each turn of a subgraph, its owner is not; the task is the node's execution."""
    seen: list[Identity] = []

    async def node(state: MessagesState) -> None:
        where = identity()
        assert where is not None
        seen.append(where)

    inner = StateGraph(MessagesState)
    inner.add_node("deep", node)
    inner.add_edge(START, "deep")
    outer = StateGraph(MessagesState)
    outer.add_node("sub", inner.compile())
    outer.add_node("flat", node)
    outer.add_edge(START, "sub")
    outer.add_edge("sub", "flat")
    graph = outer.compile(checkpointer=InMemorySaver())
    for k in range(2):
        await graph.ainvoke({"messages": [ask(k)]}, on("t"))
    assert [(w.node, w.namespace) for w in seen] == [("deep", "sub"), ("flat", "")] * 2
    assert all(w.thread == "t" for w in seen) and len({w.task for w in seen}) == 4
    assert seen[0].owner != seen[2].owner and seen[1].owner == seen[3].owner == ""


async def test_the_calls_of_one_task_are_numbered_and_share_a_name() -> None:
    """A node that calls a subgraph several times: LangGraph counts the calls, the conversation is one."""
    seen: list[Identity] = []

    async def deep(state: MessagesState) -> None:
        where = identity()
        assert where is not None
        seen.append(where)

    sub = chat_graph(deep)

    async def outer(state: MessagesState) -> None:
        for _ in range(3):
            await sub.ainvoke(state)

    await chat_graph(outer, checkpointer=InMemorySaver()).ainvoke({"messages": [ask(0)]}, on("t"))
    assert {w.namespace for w in seen} == {"model"} and len({w.owner for w in seen}) == 3


async def test_no_thread_id() -> None:
    """Without a checkpointer there may be none; any value of the caller's is taken as text."""
    seen: list[Any] = []

    async def node(state: MessagesState) -> None:
        where = identity()
        seen.append(where and where.thread)

    graph = chat_graph(node)
    await graph.ainvoke({"messages": [ask(0)]})
    await graph.ainvoke({"messages": [ask(0)]}, on(7))  # type: ignore[arg-type]
    assert seen == [None, "7"]


# -- turns -------------------------------------------------------------------------------------------------------------


async def test_outside_a_graph_a_turn_is_the_messages(runtime: Runtime) -> None:
    """No session, the same objects, nothing started."""
    turns = Turns(runtime, policy_of())
    messages: list[BaseMessage] = [ask(k) for k in range(9)]
    async with turns.turn(messages) as turn:
        assert turn.session is None and turn.view is not messages
        assert all(a is b for a, b in zip(turn.view, messages, strict=True))
    with turns.turn_sync(messages) as turn:
        assert turn.session is None and turn.saved is None
    assert runtime.counters.started == 0


async def conversation(turns: Turns, count: int, *, saved: list[str] | None = None) -> tuple[list[Turn], list[Any]]:
    """A conversation with what the turns say is to be saved handed on from one to the next."""
    done: list[Turn] = []
    held: list[str] | None = saved
    state: dict[str, Any] = {}

    async def body(messages: list[BaseMessage]) -> list[BaseMessage]:
        nonlocal held
        async with turns.turn(messages, saved=held) as turn:
            turn.reply = [answer(len(done))]
            done.append(turn)
        held = held if turn.saved is None else turn.saved
        return list(turn.reply)

    graph = inside(body, checkpointer=InMemorySaver())
    for k in range(count):
        state = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
        await idle(turns.runtime)
    return done, state["messages"]


async def test_views_gaps_and_what_is_saved(runtime: Runtime) -> None:
    """The view is the messages with the gaps filled; ``saved`` speaks up only when it changes."""
    turns, held = await conversation(Turns(runtime, policy_of()), 8, saved=[])
    rewritten = [turn for turn in turns if turn.gaps]
    assert rewritten and summaries(turns[-1].view)
    for turn in rewritten:
        assert turn.session is turns[0].session
        gap = turn.gaps[0]
        assert gap.start == 0 and turn.view[: len(gap.put)] == list(gap.put)
    assert turns[0].saved is None and any(turn.saved for turn in turns)
    again = [t.saved for t in turns if t.saved is not None]
    assert all(a != b for a, b in zip(again, again[1:], strict=False)) and len(held) == 16


async def test_nothing_is_written_out_where_the_state_keeps_nothing(runtime: Runtime) -> None:
    """With ``saved=None`` a turn never says that something is to be saved."""
    turns, _ = await conversation(Turns(runtime, policy_of()), 8, saved=None)
    assert turns[-1].gaps and all(turn.saved is None for turn in turns)


async def test_a_runtime_takes_over_what_another_saved(runtime: Runtime) -> None:
    """``saved`` of one process restores the view in the next, and broken texts do no harm."""
    turns, held = await conversation(Turns(runtime, policy_of()), 8, saved=[])
    saved = next(t.saved for t in reversed(turns) if t.saved)
    events, seen = Events(), []
    async with Runtime(on_event=events) as other:
        following = Turns(other, policy_of())

        async def body(messages: list[BaseMessage]) -> None:
            async with following.turn(messages, saved=["not json", "{}", *saved]) as turn:
                seen.append(turn.view)

        await inside(body).ainvoke({"messages": [*held, ask(8)]}, on("t"))
    assert summaries(seen[0]) == summaries(turns[-1].view)
    assert len([e for e in events if "restore" in str(e.data)]) == 2


async def test_ours_in_the_view_are_copies(runtime: Runtime) -> None:
    """Editing a message that we put into a view changes no later view."""
    turns = Turns(runtime, policy_of())
    views: list[list[str]] = []

    async def body(messages: list[BaseMessage]) -> list[BaseMessage]:
        async with turns.turn(messages) as turn:
            views.append([str(m.content) for m in turn.view])
            for gap in turn.gaps:
                for message in gap.put:
                    message.content = "edited"
            turn.reply = [answer(len(views) - 1)]
        return list(turn.reply)

    graph = inside(body, checkpointer=InMemorySaver())
    for k in range(8):
        await graph.ainvoke({"messages": [ask(k)]}, on("t"))
        await idle(runtime)
    assert not any("edited" in texts for texts in views)


async def test_pins_end_with_their_task(runtime: Runtime) -> None:
    """A node that failed and then ran through leaves nothing behind; those that never come back are bounded."""
    turns = Turns(runtime, policy_of())
    fail = True

    async def body(messages: list[BaseMessage]) -> list[BaseMessage]:
        async with turns.turn(messages):
            if fail:
                raise ConnectionError("down")
        return [answer(0)]

    graph = inside(body, checkpointer=InMemorySaver())
    with pytest.raises(ConnectionError):
        await graph.ainvoke({"messages": [ask(0)]}, on("t"))
    assert len(turns._pins) == 1
    fail = False
    await graph.ainvoke(None, on("t"))
    assert not turns._pins
    fail = True
    for k in range(MAX_PINS + 5):
        with pytest.raises(ConnectionError):
            await graph.ainvoke({"messages": [ask(0)]}, on(f"t{k}"))
    assert len(turns._pins) == MAX_PINS


async def test_a_resumed_node_gets_its_own_objects(runtime: Runtime) -> None:
    """The pinned view is made of the messages that the resumed node holds, not of those from before."""
    turns = Turns(runtime, policy_of())
    given: list[tuple[list[BaseMessage], list[BaseMessage]]] = []

    async def body(messages: list[BaseMessage]) -> list[BaseMessage]:
        async with turns.turn(messages) as turn:
            given.append((messages, turn.view))
            interrupt("wait")
            turn.reply = [answer(len(given))]
        return list(turn.reply)

    graph = inside(body, checkpointer=InMemorySaver())
    for k in range(7):
        await graph.ainvoke({"messages": [ask(k)]}, on("t"))
        await idle(runtime)
        await graph.ainvoke(Command(resume=1), on("t"))
        await idle(runtime)
    messages, view = given[-1]
    assert summaries(view) and view[-1] is messages[-1]
    assert {id(m) for m in view[1:]} <= {id(m) for m in messages}


async def test_a_sub_agents_session_has_the_root_as_its_parent(runtime: Runtime) -> None:
    """A node in a subgraph draws on a child's budget, of its own tenant's root agent only."""
    turns = Turns(runtime, policy_of())
    sessions: dict[str, Any] = {}

    def node(name: str) -> Any:
        async def run(state: MessagesState) -> None:
            async with turns.turn(state["messages"]) as turn:
                sessions[name] = turn.session

        return run

    inner = StateGraph(MessagesState)
    inner.add_node("child", node("child"))
    inner.add_edge(START, "child")
    outer = StateGraph(MessagesState)
    outer.add_node("root", node("root"))
    outer.add_node("sub", inner.compile())
    outer.add_edge(START, "root")
    outer.add_edge("root", "sub")
    await outer.compile().ainvoke({"messages": [ask(0)]}, on("t"))
    assert sessions["child"].parent is sessions["root"] and sessions["root"].parent is None


async def test_threads_with_slashes_do_not_meet(runtime: Runtime) -> None:
    """Names that would read alike when joined are kept apart."""
    turns, sessions = Turns(runtime, policy_of()), []

    async def body(messages: list[BaseMessage]) -> None:
        async with turns.turn(messages, place="c" if identity().thread == "a/b" else "b/c") as turn:  # type: ignore[union-attr]
            sessions.append(turn.session)

    graph = inside(body)
    await graph.ainvoke({"messages": [ask(0)]}, on("a/b"))
    await graph.ainvoke({"messages": [ask(0)]}, on("a"))
    assert sessions[0] is not sessions[1]


async def test_a_hanging_summariser_delays_no_turn(runtime: Runtime) -> None:
    """Below the hard limit no turn waits, whatever the summariser does."""
    turns, _ = await hanging(runtime)
    assert not any(turn.gaps for turn in turns) and runtime.counters.started >= 1


async def hanging(runtime: Runtime) -> tuple[list[Turn], list[Any]]:
    """A conversation whose summariser never answers: nothing waits for it."""
    done: list[Turn] = []
    turns = Turns(runtime, policy_of(FakeSummarizer("hang")))

    async def body(messages: list[BaseMessage]) -> list[BaseMessage]:
        async with turns.turn(messages) as turn:
            turn.reply = [answer(len(done))]
            done.append(turn)
        return list(turn.reply)

    graph = inside(body, checkpointer=InMemorySaver())
    state: dict[str, Any] = {}
    for k in range(8):
        state = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
    return done, state["messages"]


async def test_messages_that_cannot_be_read_pass_through() -> None:
    """Something that is no message at all: the node gets it, an event tells of it."""
    events, views = Events(), []
    async with Runtime(on_event=events) as runtime:
        turns = Turns(runtime, policy_of())

        async def body(messages: list[BaseMessage]) -> None:
            odd: list[Any] = [{"role": "user", "content": "a dict"}, 7, *messages]
            async with turns.turn(odd) as turn:
                views.append((odd, turn.view))

        for thread in (on("t"), {}):
            await inside(body).ainvoke({"messages": [ask(0)]}, thread)
    assert all(view == odd for odd, view in views) and events.of("message.unreadable")


# -- the private channel -----------------------------------------------------------------------------------------------


def test_parallel_changes_both_count() -> None:
    """Two nodes of one step, or two runs of one node, lose nothing of each other's."""
    held = merge_saved({}, {"a": ["1"]})
    held = merge_saved(held, {"a": {"drop": ["1"], "add": ["2"]}})
    held = merge_saved(held, {"a": {"drop": ["1"], "add": ["3"]}, "b": ["x"]})
    assert held == {"a": ["2", "3"], "b": ["x"]}
    assert merge_saved(held, {"a": []}) == {"b": ["x"]} and merge_saved(None, None) == {}
    assert merge_saved(held, held) == held


def text(end: int, digest: bytes) -> str:
    """As ``Session.saved`` gives them, as far as it matters here."""
    return json.dumps({"end": end, "end_digest": digest.hex()})


def test_what_is_superseded_goes_and_other_branches_stay() -> None:
    """On this history the new one takes the place of the old; what is of another branch stays, within bounds."""
    chain = [b"0", b"1", b"2", b"3"]
    old, new, other = text(1, b"1"), text(3, b"3"), text(2, b"of another branch")
    assert change_of([old, other], [new], chain) == {"drop": [old], "add": [new]}
    assert change_of([new, other], [new], chain) is None
    assert change_of([], [], chain) is None
    assert change_of(["junk"], [], chain) == {"drop": ["junk"], "add": []}
    others = [text(9, bytes([k])) for k in range(MAX_OTHERS + 3)]
    change = change_of(others, [new], chain)
    assert change == {"drop": others[:3], "add": [new]}


def test_the_channel_may_hold_anything() -> None:
    """Whatever stands there that is not ours is taken for nothing."""
    for odd in (None, [], "x", {"p": "x"}, {"p": None}, {"q": ["x"]}, 7):
        assert read_saved(odd, "p") == []
    assert read_saved({"p": ["x", 7]}, "p") == ["x"]


def test_marks_tell_views_apart() -> None:
    """The oracle of these tests sees a lost or foreign message."""
    assert marks([HumanMessage("<1> a <2>")]) == {1, 2}
