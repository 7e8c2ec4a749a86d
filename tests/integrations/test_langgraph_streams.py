"""What the user sees of a run: tokens, updates, events, callbacks. Nothing of ours is among it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from graphs import (
    HANG_S,
    Calls,
    Chat,
    ChatSummarizer,
    SavedState,
    ask,
    chat_graph,
    idle,
    idle_sync,
    marks,
    model_node,
    on,
    policy_of,
    summaries,
)
from helpers import fill
from lg_agents import agent_of, talker
from smoothctx import Runtime
from smoothctx.codec import SUMMARY_TAG
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.middleware_state import ViewState, model_input
from smoothctx_langgraph.models import ChatModel
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.premodel import premodel_node

pytestmark = pytest.mark.langgraph

TURNS = range(8)


def raw_summarizer() -> Any:
    """A plain function that streams from a chat model."""
    return ChatSummarizer()


def adapted_summarizer() -> Any:
    """A chat model through the adapter."""
    return ChatModel(Chat(size=4), identity="adapted")


class Leaves(ChatSummarizer):
    """A summariser that is under way while the next turn streams."""

    async def __call__(self, messages: Any, *, max_tokens: int | None = None) -> Any:
        answer = await super().__call__(messages, max_tokens=max_tokens)
        await asyncio.sleep(0)
        async for _ in self.chat.astream("SUMMARISE AGAIN"):
            await asyncio.sleep(0)
        return answer


MODELS: list[Callable[[], Any]] = [raw_summarizer, adapted_summarizer, Leaves]
MODES = ["view", "state"]


def whole_list(messages: list[Any], reply: Any) -> Any:
    """A node that returns everything that it was given."""
    return {"messages": [*messages, reply]}


def only_reply(messages: list[Any], reply: Any) -> Any:
    """A node that returns its reply."""
    return {"messages": [reply]}


class Agent:
    """A graph with one streaming model node."""

    def __init__(self, runtime: Runtime, model: Any, mode: str, returns: Callable[..., Any] = only_reply) -> None:
        self.chat = Chat()

        @lookahead_node(runtime, policy_of(model, model_id=None), mode=mode)
        async def model_(state: MessagesState) -> Any:
            return returns(state["messages"], await self.chat.ainvoke(state["messages"]))

        self.graph = chat_graph(model_, checkpointer=InMemorySaver())

    def rewrote(self) -> bool:
        """Was the model shown fewer messages than before, in some turn?"""
        sizes = [len(messages) for messages in self.chat.seen]
        return any(b <= a for a, b in zip(sizes, sizes[1:], strict=False))


def foreign(parts: list[Any]) -> list[Any]:
    """Messages in a stream that are not the agent's own tokens."""
    return [m for m in parts if m.type not in ("AIMessageChunk", "ai") or "SUMMARISE" in str(m.content)]


@pytest.mark.parametrize("returns", [only_reply, whole_list])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", MODELS)
async def test_the_token_stream_has_the_agents_tokens_only(
    make: Callable[[], Any], mode: str, returns: Callable[..., Any]
) -> None:
    """``stream_mode="messages"``: every part is a token of this turn's reply; no summary, no ``RemoveMessage``."""
    async with Runtime() as runtime:
        agent = Agent(runtime, make(), mode, returns)
        for k in TURNS:
            parts = [p async for p in agent.graph.astream({"messages": [ask(k)]}, on("t"), stream_mode="messages")]
            tokens = "".join(message.content for message, _ in parts)
            assert not foreign([message for message, _ in parts])
            assert tokens.strip() == fill(f"<{2 * k + 1}> answer" if marks(agent.chat.last) else "", 60).strip()
            assert {meta["langgraph_node"] for _, meta in parts} == {"model"}
            await idle(runtime)
        assert agent.rewrote()


@pytest.mark.parametrize("mode", MODES)
async def test_every_stream_mode_at_once(mode: str) -> None:
    """values, updates, messages, custom, debug, checkpoints and tasks: nothing that a summariser said, in any."""
    modes = ["values", "updates", "messages", "custom", "debug", "checkpoints", "tasks"]
    async with Runtime() as runtime:
        agent = Agent(runtime, Leaves(), mode)
        for k in TURNS:
            seen: set[str] = set()
            async for kind, part in agent.graph.astream({"messages": [ask(k)]}, on("t"), stream_mode=modes):
                seen.add(kind)
                assert "SUMMARISE" not in str(part)
                if kind == "messages":
                    assert not foreign([part[0]])
                if mode == "view" and kind in ("values", "updates"):
                    assert "conversation_summary" not in str(part)
                if kind == "updates":
                    assert len([m for m in part["model"]["messages"] if m.type == "ai"]) == 1
            assert seen == set(modes) - {"custom"}
            await idle(runtime)
        assert agent.rewrote()


@pytest.mark.parametrize("mode", MODES)
async def test_events_v2_and_callbacks_hear_one_model(mode: str) -> None:
    """``astream_events`` v2 and the user's callbacks: one model run per turn, the agent's."""
    async with Runtime() as runtime:
        agent = Agent(runtime, Leaves(), mode)
        for k in TURNS:
            calls = Calls()
            config = {**on("t"), "callbacks": [calls]}
            events = [e async for e in agent.graph.astream_events({"messages": [ask(k)]}, config, version="v2")]
            assert len([e for e in events if e["event"] == "on_chat_model_start"]) == 1 == calls.starts
            assert "SUMMARISE" not in str(events)
            tokens = [e["data"]["chunk"] for e in events if e["event"] == "on_chat_model_stream"]
            assert not foreign(tokens) and "".join(calls.tokens).strip() == "".join(t.content for t in tokens).strip()
            await idle(runtime)
        assert agent.rewrote()


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
@pytest.mark.parametrize("mode", MODES)
async def test_events_v3(mode: str) -> None:
    """``astream_events`` v3, where this LangGraph has it: no part of it tells of a summary being made."""
    async with Runtime() as runtime:
        agent = Agent(runtime, Leaves(), mode)
        for k in TURNS:
            try:
                stream = await agent.graph.astream_events({"messages": [ask(k)]}, on("t"), version="v3")
            except (TypeError, NotImplementedError, ValueError):
                return  # older than v3
            parts = [part async for part in stream]
            assert parts and "SUMMARISE" not in str(parts)
            messages = [p for p in parts if p.get("method") == "messages"]
            starts = [p for p in messages if "message-start" in str(p)]
            assert len(starts) == 1, starts
            assert not any(isinstance(m, RemoveMessage) for m in found(messages))
            await idle(runtime)
        assert agent.rewrote()


def found(part: Any) -> list[BaseMessage]:
    """Every message inside a nested part of a stream."""
    if isinstance(part, BaseMessage):
        return [part]
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return [message for item in inner for message in found(item)]


def test_synchronous_streams() -> None:
    """``stream`` of a synchronous node: tokens of the agent only."""
    with Runtime.in_thread() as runtime:
        chat = Chat()

        @lookahead_node(runtime, policy_of(ChatSummarizer(), model_id=None), mode="state")
        def model(state: MessagesState) -> Any:
            return {"messages": [chat.invoke(state["messages"])]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        for k in TURNS:
            calls = Calls()
            config = {**on("t"), "callbacks": [calls]}
            parts = list(graph.stream({"messages": [ask(k)]}, config, stream_mode="messages"))
            assert parts and not foreign([m for m, _ in parts]) and calls.starts == 1
            idle_sync(runtime)
        assert len(summaries(chat.last)) == 1


async def test_a_summary_that_outlives_its_run_is_heard_of_nowhere() -> None:
    """A lookahead that is still under way when its run has ended, and goes on in the next one."""
    summariser = ChatSummarizer()
    summariser.mode = "hold"
    async with Runtime() as runtime:
        agent = Agent(runtime, summariser, "view")
        for k in range(5):
            await agent.graph.ainvoke({"messages": [ask(k)]}, on("t"))
        await asyncio.wait_for(summariser.started.wait(), HANG_S)
        calls = Calls()
        parts: list[Any] = []
        config = {**on("t"), "callbacks": [calls]}
        async for part in agent.graph.astream({"messages": [ask(5)]}, config, stream_mode="messages"):
            summariser.release.set()
            parts.append(part[0])
            await idle(runtime)
        assert calls.starts == 1 and not foreign(parts)


async def parts_of(stream: AsyncIterator[Any]) -> list[Any]:
    """Everything that a stream gives."""
    return [part async for part in stream]


async def test_subgraph_streams() -> None:
    """With ``subgraphs=True`` too: only the agent's own tokens."""
    chat = Chat()
    async with Runtime() as runtime:

        @lookahead_node(runtime, policy_of(Leaves(), model_id=None), mode="state")
        async def model(state: MessagesState) -> Any:
            return {"messages": [await chat.ainvoke(state["messages"])]}

        builder = StateGraph(MessagesState)
        builder.add_node("sub", chat_graph(model))
        builder.add_edge(START, "sub")
        graph = builder.compile(checkpointer=InMemorySaver())
        for k in TURNS:
            parts = await parts_of(
                graph.astream({"messages": [ask(k)]}, on("t"), stream_mode="messages", subgraphs=True)
            )
            assert parts and not foreign([message for _, (message, _meta) in parts])
            await idle(runtime)
        assert summaries(chat.last)


async def shown_by(graph: Any, runtime: Runtime, thread: str, **options: Any) -> set[str]:
    """The stream modes in which a summary, or what we keep of it, was seen."""
    found: set[str] = set()
    modes = ["values", "updates", "messages", "custom", "tasks", "checkpoints", "debug"]
    for k in TURNS:
        async for mode, part in graph.astream({"messages": [ask(k)]}, on(thread), stream_mode=modes, **options):
            if SUMMARY_TAG in repr(part):
                found.add(mode)
        await idle(runtime)
    return found


@pytest.mark.parametrize("form", ["node", "middleware", "pre-model node"])
async def test_what_is_committed_shows_where_the_state_does(form: str) -> None:
    """The private channel is state: in ``values`` and ``updates``, unless asked for the messages only; the tokens and
    the result of a run have nothing of it."""
    async with Runtime() as runtime:
        decorate = lookahead_node(runtime, policy_of())
        if form == "middleware":
            graph = agent_of(talker(), LookaheadMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        elif form == "node":
            graph = chat_graph(model_node(Chat(), decorate), state=SavedState, checkpointer=InMemorySaver())
        else:
            builder = StateGraph(Viewed, input_schema=MessagesState, output_schema=MessagesState)
            builder.add_node("prepare", premodel_node(runtime, policy_of()))
            builder.add_node("model", lambda state: {"messages": [talker().invoke(model_input(state))]})
            builder.add_edge(START, "prepare")
            builder.add_edge("prepare", "model")
            graph = builder.compile(checkpointer=InMemorySaver())
        assert await shown_by(graph, runtime, "all") == {"values", "updates", "tasks", "checkpoints", "debug"}
        shown = await shown_by(graph, runtime, "messages", output_keys=["messages"])
        assert shown == {"tasks", "checkpoints", "debug"}
        state = await graph.ainvoke({"messages": [ask(9)]}, on("all"))
        assert state.keys() == {"messages"} and SUMMARY_TAG not in repr(state)


class Viewed(MessagesState, ViewState):
    """The channels of a pre-model node."""
