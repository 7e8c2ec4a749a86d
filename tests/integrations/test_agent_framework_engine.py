"""The agent's own engine under the Agent Framework: background work keeps out of its calls' way; preloads."""

from __future__ import annotations

from typing import Any

import pytest
from agent_framework import Agent, ChatMiddleware

from agent_framework_fakes import FakeClient, agent_of, ask, lookup, text
from driving import small_policy
from helpers import Events, FakeSummarizer, fill, make_runtime, settle, virtual
from smoothctx import ConfigurationError
from smoothctx.testing import FakeEngine
from smoothctx_autogen.agent_framework import LookaheadMiddleware
from smoothctx_autogen.agent_framework_request import request_of

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAMS
@virtual
async def test_a_call_is_in_the_foreground_of_the_agents_engine(stream: bool) -> None:
    """While it lasts, and one user per session; the view that a commit gives is preloaded there."""
    engine, seen = FakeEngine(), []
    request = {"tools": [{"type": "function", "function": {"name": "look_up"}}]}
    async with make_runtime() as runtime:
        foreground = runtime.foreground(engine)

        def answers(_: Any) -> list[Any]:
            seen.append((foreground.prefilling, foreground.seen().in_flight))
            return [text(fill("<900> reply", 60))]

        policy = small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6))
        lookahead = LookaheadMiddleware(runtime, policy, engine=engine, request=request)
        agent = agent_of(FakeClient(reply=answers, delay=0.3), lookahead)
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
            assert not foreground.busy
            await settle(2)
        assert seen == [(True, 1)] * 8
        (found,) = lookahead.sessions(session)
        assert found.receipts and all(r.warm for r in found.receipts)
        assert engine.calls and all(call.options["tools"] == request["tools"] for call in engine.calls)


@virtual
async def test_promise_15_instructions_and_tools_are_preloaded_as_they_are_sent() -> None:
    """Nothing is told of them; each request that goes out ahead begins with them."""
    engine = FakeEngine(block_tokens=16)
    async with make_runtime() as runtime:
        policy = small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6))
        client = FakeClient(reply=lambda _: [text(fill("<900> reply", 60))])
        agent = agent_of(client, LookaheadMiddleware(runtime, policy, engine=engine), tools=[lookup])
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(2)
        assert client.options[-1]["instructions"] == "You are an agent." and runtime.counters.committed
        assert engine.calls
        for call in engine.calls:
            assert call.messages[0] == {"role": "system", "content": "You are an agent."}
            assert [t["function"]["name"] for t in call.options["tools"]] == ["lookup"]
            assert "key" in call.options["tools"][0]["function"]["parameters"]["properties"]


class Odd:
    """No tool that anybody could write down."""


class Puts(ChatMiddleware):
    """Gives the client such a tool."""

    async def process(self, context: Any, call_next: Any) -> None:
        """With it."""
        context.options = {**(context.options or {}), "tools": [Odd()]}
        await call_next()


@virtual
async def test_a_tool_that_only_its_client_can_write_is_said_once() -> None:
    """The calls go on."""
    engine, events = FakeEngine(block_tokens=16), Events()
    async with make_runtime(on_event=events) as runtime:
        policy = small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6))
        lookahead = LookaheadMiddleware(runtime, policy, engine=engine)
        agent = Agent(client=FakeClient(), name="bob", middleware=[Puts(), lookahead])
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(2)
        (event,) = events.of("request.unread")
        assert "Odd" in event.data["why"] and runtime.counters.committed and not events.of("error")
        assert not engine.calls, "nothing is preloaded with a request that is not known"


def test_what_was_given_is_not_read() -> None:
    """So that a tool which only its client can write may be named in words."""
    assert request_of({"instructions": {"type": "text"}, "tools": [Odd()]}, {"messages": [], "tools": []}) == {}
    assert "messages" in request_of({"instructions": "One.", "tools": [Odd()]}, {"tools": []})


def test_promise_15_instructions_may_be_several() -> None:
    """One message each, as the framework's clients send them; what only a client can write is refused."""
    assert request_of(None) == request_of({"instructions": " ", "tools": []}) == {}
    several = request_of({"instructions": ["One.", "", "Two."]})
    assert several == {"messages": [{"role": "system", "content": text} for text in ("One.", "Two.")]}
    for odd in ([{"type": "text"}], {"type": "text"}):
        with pytest.raises(TypeError, match="client"):
            request_of({"instructions": odd})


@virtual
async def test_a_wrong_prompt_is_refused_where_it_is_given() -> None:
    """Not in the agent's turns."""
    async with make_runtime() as runtime:
        policy = small_policy(FakeSummarizer())
        with pytest.raises(ConfigurationError, match="'role': 'system'"):
            LookaheadMiddleware(runtime, policy, request={"messages": ["You are."]})
