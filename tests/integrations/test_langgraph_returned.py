"""What a node says of the messages in its view: replies, removals and edits reach the state, ours never do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.channels import BinaryOperatorAggregate, LastValue
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph, add_messages

from graphs import Chat, ask, chat_graph, idle, marks, on, policy_of, summaries
from smoothctx import Runtime
from smoothctx_langgraph.codec import LangChainMessages, mark_of
from smoothctx_langgraph.identity import Identity
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.node_channel import takes
from smoothctx_langgraph.rewrite import Gap, by_id, fill, gaps, ours, own, raw, touches

pytestmark = pytest.mark.langgraph

CODEC = LangChainMessages()
MODES = pytest.mark.parametrize("mode", ["view", "state"])


def thinks(text: str, **fields: Any) -> AIMessage:
    """A reply with reasoning."""
    return AIMessage(text, additional_kwargs={"reasoning_content": "let me think"}, **fields)


# -- in a graph --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [True, False])
@MODES
async def test_a_reply_that_says_what_an_earlier_one_said_is_kept(mode: str, odd: bool) -> None:
    """Earlier replies stand in the view without their reasoning: a new one with the same text is none of them."""
    replies: list[str] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(), mode=mode)
        async def model(state: MessagesState) -> dict[str, Any]:
            name = f"r{len(replies)}"
            replies.append(name)
            said = thinks("Done.", id=name) if bool(len(replies) % 2) == odd else AIMessage("Done.", id=name)
            return {"messages": [said]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in range(14):
            state = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            assert state["messages"][-1].id == replies[-1]
            await idle(runtime)
        assert runtime.counters.committed and (len(state["messages"]) == 28) == (mode == "view")


@MODES
async def test_a_node_that_trims_by_id_goes_on_and_its_state_gets_shorter(mode: str) -> None:
    """``RemoveMessage(id=m.id)`` for what it was shown: the removal of a summary is that of all that it stands for."""
    shown: list[list[BaseMessage]] = []
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(), mode=mode)
        async def model(state: MessagesState) -> dict[str, Any]:
            shown.append(list(state["messages"]))
            old = state["messages"][:-3] if len(shown) in (9, 16) else []
            return {"messages": [AIMessage("answer"), *(RemoveMessage(id=str(m.id)) for m in old)]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in range(20):
            state = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            if len(shown) in (9, 16):
                assert summaries(shown[-1][:1]), "it removes a summary"
                assert [m.id for m in state["messages"][:-1]] == [m.id for m in shown[-1][-3:]]
            await idle(runtime)
        assert all(m.id for view in shown for m in view), "as LangGraph has it"


async def test_a_summary_keeps_its_id_from_turn_to_turn() -> None:
    """It follows from the first message that it stands for, however many these become."""
    chat = Chat()
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in range(12):
            await graph.ainvoke({"messages": [ask(k, id=f"q{k}")]}, on("t"))
            await idle(runtime)
    views = [view for view in chat.seen if summaries(view)]
    assert len({str(view[0].content) for view in views}) > 1 and {view[0].id for view in views} == {"smoothctx:q0"}


async def test_a_subgraph_with_a_memory_of_its_own_brings_no_summary_into_the_state() -> None:
    """It keeps what it was given, the summaries of earlier turns too, and returns all of it."""
    inner = Chat()
    async with Runtime() as runtime:
        sub = chat_graph(_plain(inner), checkpointer=True)
        builder = StateGraph(MessagesState)
        builder.add_node("sub", lookahead_node(runtime, policy_of())(sub))
        builder.add_edge(START, "sub")
        graph = builder.compile(checkpointer=InMemorySaver())
        for k in range(14):
            state = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            await idle(runtime)
        held = state["messages"]
        assert any(summaries(view) for view in inner.seen)
        assert not summaries(held) and not any(map(mark_of, held))
        assert [m.type for m in held] == ["human", "ai"] * 14 and marks(held) == set(range(28))


def _plain(chat: Chat) -> Any:
    async def model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    return model


@MODES
async def test_an_edit_of_a_summary_replaces_no_message_that_it_stands_for(mode: str) -> None:
    """A node that annotates what it was shown: in view mode the state keeps its messages, in state mode the edit."""
    chat = Chat()
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(), mode=mode)
        async def model(state: MessagesState) -> dict[str, Any]:
            told = [m.model_copy(update={"content": f"{m.content} (seen)"}) for m in state["messages"] if mark_of(m)]
            return {"messages": [*told, await chat.ainvoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in range(10):
            state = await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            await idle(runtime)
        held = state["messages"]
        assert marks(held) == set(range(20)) and any(summaries(view) for view in chat.seen)
        assert (len(held) == 20 and not any(map(mark_of, held))) == (mode == "view")
        assert (str(held[0].content).endswith("(seen)")) == (mode == "state")


# -- the pure functions ------------------------------------------------------------------------------------------------


def made(n: int) -> list[BaseMessage]:
    """Messages with ids; the model's with reasoning."""
    return [HumanMessage(f"<{k}>", id=f"m{k}") if k % 2 == 0 else thinks(f"<{k}>", id=f"m{k}") for k in range(n)]


def shown(messages: list[BaseMessage], view: list[BaseMessage]) -> tuple[list[BaseMessage], tuple[Gap, ...]]:
    """The view as a node is given it, and its gaps."""
    where = own(messages, gaps(messages, view))
    return fill(messages, where), where


@st.composite
def views(draw: st.DrawFn) -> tuple[list[BaseMessage], list[BaseMessage]]:
    """Messages and a view of them: summaries of runs, copies without reasoning, notes added, messages left out."""
    messages = made(draw(st.integers(1, 12)))
    view: list[BaseMessage] = []
    i = 0
    while i < len(messages):
        size = draw(st.integers(1, 4))
        how = draw(st.sampled_from(["same", "bare", "summary", "two", "note", "nothing", "unmarked"]))
        run = messages[i : i + size]
        view += {
            "same": run,
            "bare": [CODEC.without_thinking(m) for m in run],
            "summary": [CODEC.summary(f"of {i}")],
            "two": [CODEC.summary(f"of {i}"), CODEC.summary(f"more of {i}")],
            "note": [CODEC.user(f"note {i}"), *run],
            "nothing": [],
            "unmarked": [SystemMessage(f"rules {i}")],
        }[how]
        i += size
    return messages, view


@given(views(), st.data())
def test_whatever_a_node_returns_or_removes_of_its_view_no_message_of_ours_is_written(
    case: tuple[list[BaseMessage], list[BaseMessage]], data: st.DataObject
) -> None:
    """Copies, edits and removals: the state holds its own messages, without those that were removed."""
    messages, where = case[0], own(case[0], gaps(*case))
    view = fill(messages, where)
    assert all(m.id for m in view) and len({m.id for m in view}) == len(view)
    assert [str(m.content) for m in view] == [str(m.content) for m in case[1]]
    returned: list[Any] = [AIMessage("<0>", id="reply")]
    for message in view:
        how = data.draw(st.sampled_from(["not", "itself", "copy", "edit", "rebuilt", "remove"]))
        if how == "remove":
            returned.append(RemoveMessage(id=str(message.id)))
        elif how == "edit" and mark_of(message):
            returned.append(message.model_copy(update={"content": "edited"}))
        elif how == "rebuilt" and mark_of(message):
            returned.append({"role": "user", "content": message.content, "id": message.id})
        elif how != "not":
            returned.append(message if how == "itself" else message.model_copy(deep=True))
    held: Any = add_messages(list(messages), raw(returned, messages, view, where))  # type: ignore[arg-type]
    assert held[-1] is returned[0]
    kept = {m.id: m for m in messages}
    assert all(kept[m.id] == m for m in held[:-1])
    removed = {m.id for m in returned if isinstance(m, RemoveMessage)}
    for gap in where:
        gone = bool(gap.put) and all(m.id in removed for m in gap.put)
        assert all((m not in held) == gone for m in messages[gap.start : gap.end])
    replaced = {m.id for gap in where for m in messages[gap.start : gap.end]}
    assert all((m in held) == (m.id not in removed) for m in messages if m.id not in replaced)


@given(views())
def test_what_is_written_in_state_mode_has_the_ids_that_the_node_saw(
    case: tuple[list[BaseMessage], list[BaseMessage]],
) -> None:
    """Where the view can be written: under its own ids, unless there are more messages than places for them."""
    messages = case[0]
    view, where = shown(*case)
    writes = by_id(messages, where)
    if writes is None:
        return
    held: Any = add_messages(list(messages), writes)  # type: ignore[arg-type]
    assert [m.content for m in held] == [m.content for m in view]
    if not any(str(m.id).startswith("smoothctx:") for m in view):
        assert [m.id for m in held] == [m.id for m in view]
    written = [w for w in writes if not isinstance(w, RemoveMessage)]
    put = [m for gap in where for m in gap.put]
    assert all(a is b for a, b in zip(ours(put, where, writes), written, strict=True))
    assert not touches(put, messages, where)


def test_the_removal_of_a_message_behind_a_summary_removes_no_other() -> None:
    """By an id that a node knows from elsewhere, also that of the first one."""
    messages = made(8)
    view, where = shown(messages, [CODEC.summary("a"), *messages[6:]])
    for k in (0, 3):
        removal = RemoveMessage(id=f"m{k}")
        assert raw([removal], messages, view, where) == [removal] and touches([removal], messages, where)


def test_several_summaries_side_by_side_are_removed_together() -> None:
    """One of them alone cannot be told from the others: nothing is removed rather than too much."""
    messages = made(8)
    view, where = shown(messages, [CODEC.summary("a"), CODEC.summary("b"), *messages[6:]])
    one, two = (RemoveMessage(id=str(m.id)) for m in view[:2])
    assert raw([one], messages, view, where) == []
    assert [m.id for m in raw([one, two], messages, view, where)] == [f"m{k}" for k in range(6)]  # type: ignore[attr-defined]


def test_a_message_that_was_added_has_an_id_and_its_removal_removes_nothing() -> None:
    """A note that stands for nothing."""
    messages = made(4)
    view, where = shown(messages, [*messages[:2], CODEC.user("note"), *messages[2:]])
    removal = RemoveMessage(id=str(view[2].id))
    assert view[2].id not in {m.id for m in messages} and raw([removal], messages, view, where) == []
    assert touches([removal], messages, where), "nor does state mode write it"


def test_a_message_of_ours_from_an_earlier_view_becomes_what_the_state_holds() -> None:
    """Marked ones, and copies without reasoning that a summary has covered since."""
    messages = made(6)
    stale = [CODEC.with_text(messages[0], "stub"), CODEC.without_thinking(messages[3])]
    unknown = CODEC.summary("old").model_copy(update={"id": "smoothctx:gone"})
    inner = CODEC.with_text(ToolMessage("long", tool_call_id="c", id="t"), "stub")
    view, where = shown(messages, [CODEC.summary("all"), *messages[4:]])
    view_mode = raw([*stale, unknown], messages, view, where, CODEC.without_thinking)
    assert [id(m) for m in view_mode] == [id(messages[0]), id(messages[3])]
    assert raw([stale[0], unknown], messages, messages, ()) == [messages[0]]
    assert raw([inner], messages, view, where) == raw([inner], messages, messages, ()) == [inner], "an inner agent's"
    held = [CODEC.summary("in the state").model_copy(update={"id": "s"}), *messages[4:]]
    edit = held[0].model_copy(update={"content": "edited"})
    assert raw([edit], held, held, ()) == [edit], "what state mode has written is a message as any other"


def test_the_nodes_own_word_on_a_message_behind_a_summary_counts() -> None:
    """An edit or a removal under an id that the view does not show, and an edit under one that it shows."""
    messages = made(6)
    view, where = shown(messages, [CODEC.summary("all"), *messages[4:]])
    for word in (HumanMessage("mine", id="m0"), HumanMessage("mine", id="m2"), RemoveMessage(id="m2")):
        assert raw([word], messages, view, where, CODEC.without_thinking) == [word]
        assert touches([word], messages, where)


def test_messages_without_ids_stay_without_and_no_reply_is_taken_for_one_of_them() -> None:
    """A state that knows no ids: what a model says again is new, copies of ours are ours."""
    messages: list[BaseMessage] = [m.model_copy(update={"id": None}) for m in made(6)]
    view, where = shown(messages, [CODEC.summary("s"), CODEC.without_thinking(messages[3]), *messages[4:]])
    assert all(m.id is None for m in view)
    again = AIMessage("<3>")
    assert raw([again], messages, view, where) == [again]
    copies = [m.model_copy(deep=True) for m in view]
    assert raw([*copies, again], messages, view, where) == [*messages, again]
    assert raw([copies[0], again], messages, view, where) == [*messages[:4], again]


def test_a_channel_that_is_replaced_does_not_take_writes() -> None:
    """Not even where they happen to be the whole view: another write of the step would replace that."""
    summary = CODEC.summary("s").model_copy(update={"id": "m0"})
    plain: Any = LastValue(list)
    merged: Any = BinaryOperatorAggregate(list, add_messages)  # type: ignore[arg-type]
    refused = []
    for channel in (plain, merged):
        channel.key = "messages"
        channel.update([made(1)])
        read = partial(lambda channels, key: None, {"messages": channel})
        config = {"configurable": {"__pregel_read": read}}
        where = Identity(thread=None, namespace="", owner="", node="n", task="t", config=config)
        refused.append(takes(where, "messages", [summary], [summary]) is not None)
    assert refused == [True, False]
