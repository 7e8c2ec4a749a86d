"""Nothing of the background, and nothing of a commit, is in any stream, callback or event of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver

from graphs import Calls, ask, idle, on, policy_of
from helpers import FakeSummarizer
from lg_agents import Talker, agent_of, covered, is_summary, scribe, talk, talk_sync, talker
from smoothctx import Runtime
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.middleware_commit import LookaheadStateMiddleware
from smoothctx_langgraph.models import ChatModel
from smoothctx_langgraph.stock import lookahead_stock

pytestmark = pytest.mark.langgraph

MODES = ("messages", "updates", "values", "custom", "tasks", "debug")
Make = Callable[[Runtime, Talker], Any]

FORMS: dict[str, Make] = {
    "view": lambda runtime, model: LookaheadMiddleware(runtime, policy_of(ChatModel(model), layout="standalone")),
    "state": lambda runtime, model: LookaheadStateMiddleware(runtime, policy_of(ChatModel(model), layout="standalone")),
    "stock": lambda runtime, model: lookahead_stock(
        SummarizationMiddleware(model, trigger=("messages", 6), keep=("messages", 2)), runtime
    ),
    "stock-state": lambda runtime, model: lookahead_stock(
        SummarizationMiddleware(model, trigger=("messages", 6), keep=("messages", 2)), runtime, mode="state"
    ),
}


@pytest.fixture(params=list(FORMS))
def make(request: pytest.FixtureRequest) -> Make:
    """Each form of the middleware, its summaries written by a chat model."""
    return FORMS[request.param]


def _messages(value: Any) -> list[BaseMessage]:
    """Every message anywhere in a value."""
    if isinstance(value, BaseMessage):
        return [value]
    if isinstance(value, dict):
        return [m for v in value.values() for m in _messages(v)]
    if isinstance(value, list | tuple):
        return [m for v in value for m in _messages(v)]
    return []


@pytest.mark.parametrize("mode", MODES)
async def test_no_summariser_output_in_any_stream_mode(make: Make, mode: str) -> None:
    """Twelve turns in each mode while summaries are written and committed: not a word of a summariser's call."""
    async with Runtime() as runtime:
        model, summariser, user = talker(), scribe(), Calls()
        agent = agent_of(model, make(runtime, summariser), checkpointer=InMemorySaver())
        tokens: list[str] = []
        removed: list[Any] = []
        for k in range(12):
            config = {**on("t"), "callbacks": [user]}
            async for chunk in agent.astream({"messages": [ask(k)]}, config, stream_mode=mode):
                if mode == "messages":
                    message, metadata = chunk
                    assert metadata["langgraph_node"] == "model", (message, metadata)
                    assert not is_summary(message) and not isinstance(message, RemoveMessage)
                    tokens.append(str(message.content))
                elif mode == "updates":
                    removed += [m for m in _messages(chunk) if isinstance(m, RemoveMessage)]
                    model_says = [m for m in _messages(chunk.get("model", {})) if m.type == "ai"]
                    assert all("SUMMARY" not in str(m.content) for m in model_says)
            await idle(runtime)
        assert summariser.sent and covered(model.sent[-1])
        assert user.starts == len(model.sent)
        assert not any("SUMMARY" in token for token in [*tokens, *user.tokens])
        if mode == "messages":
            assert "".join(tokens).count("answer") == 12


def test_no_summariser_output_in_the_synchronous_token_stream(make: Make) -> None:
    """``stream`` with ``stream_mode="messages"``: the answers' tokens and nothing else."""
    with Runtime.in_thread() as runtime:
        model, summariser, user = talker(), scribe(), Calls()
        agent = agent_of(model, make(runtime, summariser), checkpointer=InMemorySaver())
        talk_sync(agent, runtime, on("t"), range(6))
        for k in range(6, 10):
            config = {**on("t"), "callbacks": [user]}
            for message, metadata in agent.stream({"messages": [ask(k)]}, config, stream_mode="messages"):
                assert metadata["langgraph_node"] == "model" and not is_summary(message)
                assert not isinstance(message, RemoveMessage) and "SUMMARY" not in str(message.content)
            for session in list(runtime._sessions.values()):
                if session.lookahead is not None:
                    session.lookahead.wait_sync(60)
        assert summariser.sent and covered(model.sent[-1]) and user.starts == 4


async def test_no_summariser_in_the_events(make: Make) -> None:
    """``astream_events``: as many model runs as turns, none of them the summariser's."""
    async with Runtime() as runtime:
        model, summariser = talker(), scribe()
        agent = agent_of(model, make(runtime, summariser), checkpointer=InMemorySaver())
        starts = 0
        for k in range(10):
            async for event in agent.astream_events({"messages": [ask(k)]}, on("t"), version="v2"):
                kind, data = event["event"], event.get("data", {})
                starts += kind == "on_chat_model_start"
                if kind in ("on_chat_model_stream", "on_chat_model_end"):
                    assert "SUMMARY" not in str(data.get("chunk", "")) and "SUMMARY" not in str(data.get("output", ""))
            await idle(runtime)
        assert summariser.sent and covered(model.sent[-1])
        assert starts == len(model.sent) == 10


@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
async def test_no_summariser_in_the_v3_events(make: Make) -> None:
    """The protocol's events (v3), where this LangGraph has them, hold the answers and nothing of a summariser's."""
    async with Runtime() as runtime:
        model, summariser = talker(), scribe()
        agent = agent_of(model, make(runtime, summariser), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(8))
        try:
            run = await agent.astream_events({"messages": [ask(8)]}, on("t"), version="v3")
        except (TypeError, NotImplementedError, ValueError):  # older: there is no v3 that could show anything
            assert summariser.sent
            return
        seen = []
        async for event in run:
            if event["method"] == "messages":
                seen.append(json.dumps(event["params"], default=str))
        assert seen and not any("SUMMARY" in s for s in seen)
        assert summariser.sent and covered(model.sent[-1])


async def test_a_summariser_that_streams_without_isolation_is_not_heard() -> None:
    """A plain async model that calls a chat model as a user would write it: isolated by the runtime all the same."""
    inner = talker()

    class Unisolated(FakeSummarizer):
        async def __call__(self, messages: Any, *, max_tokens: int | None = None) -> Any:
            async for _ in inner.astream([ask(400)]):
                pass
            return await super().__call__(messages, max_tokens=max_tokens)

    async with Runtime() as runtime:
        model, user = talker(), Calls()
        agent = agent_of(
            model, LookaheadMiddleware(runtime, policy_of(Unisolated(delay=0))), checkpointer=InMemorySaver()
        )
        for k in range(8):
            async for message, _ in agent.astream(
                {"messages": [ask(k)]}, {**on("t"), "callbacks": [user]}, stream_mode="messages"
            ):
                assert "<801>" not in str(message.content)
            await idle(runtime)
        assert inner.sent and covered(model.sent[-1]) and user.starts == 8
