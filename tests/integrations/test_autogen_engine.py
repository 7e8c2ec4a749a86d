"""The agent's own engine under AutoGen: background work keeps out of its turns' way; preloads if asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core.models import LLMMessage

from autogen_helpers import CODEC, Client, Reply, Summarizer, chat, options, summaries
from helpers import fill, make_runtime, settle, virtual
from smoothctx import Runtime
from smoothctx.codec import openai_messages
from smoothctx.testing import FakeEngine
from smoothctx_autogen import LookaheadChatCompletionContext


def context_of(runtime: Runtime, engine: FakeEngine, **given: Any) -> LookaheadChatCompletionContext:
    """A context of an agent on this engine."""
    request = {"tools": [{"type": "function", "function": {"name": "run"}}]}
    return LookaheadChatCompletionContext(
        Summarizer(delay=0.1), options=options(**given), runtime=runtime, engine=engine, request=request
    )


async def run(x: int) -> str:
    """A tool."""
    return f"result {x}"


@virtual
async def test_a_turn_is_in_the_engines_foreground_while_its_model_is_asked() -> None:
    """From each inference to its reply, in tool loops too; one user per context, and at no other time."""
    engine, seen = FakeEngine(), []
    async with make_runtime() as runtime:
        foreground = runtime.foreground(engine)

        def answers(messages: Sequence[LLMMessage]) -> Reply:
            seen.append((foreground.prefilling, foreground.seen().in_flight))
            calls = [FunctionCall(id=str(len(seen)), name="run", arguments='{"x": 1}')]
            return calls if len(seen) % 2 else fill("An answer.", 40)

        agent = AssistantAgent(
            "agent",
            Client(answers, delay=0.3),
            model_context=context_of(runtime, engine),
            tools=[run],
            max_tool_iterations=2,
        )
        for k in range(6):
            await agent.run(task=fill(f"<{k}> question", 40))
            assert not foreground.busy
            await settle(1)
        assert seen == [(True, 1)] * 12 and runtime.counters.committed
        assert not engine.calls, "nothing is preloaded unless asked"


@virtual
async def test_promise_10_a_call_that_failed_counts_for_the_turns_lease_at_most() -> None:
    """The context does not hear of it; the next inference is a turn as ever."""
    engine = FakeEngine()
    async with make_runtime() as runtime:
        foreground = runtime.foreground(engine)
        client = Client([ConnectionError("gone"), "An answer."])
        agent = AssistantAgent("agent", client, model_context=context_of(runtime, engine))
        with pytest.raises(ConnectionError, match="gone"):
            await agent.run(task="A question.")
        assert foreground.busy
        await anyio.sleep(121)
        assert not foreground.busy
        await agent.run(task="Once more.")
        assert not foreground.busy


@pytest.mark.parametrize("preload_kv", [True, "auto"])
@virtual
async def test_the_next_view_is_preloaded_where_that_is_asked_for(preload_kv: Any) -> None:
    """With the request's constant part: what the commit then gives is warm."""
    engine = FakeEngine()
    async with make_runtime() as runtime:
        context = context_of(runtime, engine, preload_kv=preload_kv)
        for message in chat(6):
            await context.add_message(message)
        await settle(5)
        view = await context.get_messages()
        assert summaries(view) and context.session.receipts[0].warm
        sent = [sent for m in view for sent in openai_messages(CODEC, m)]
        assert engine.calls and all(call.options["tools"] for call in engine.calls)
        usage = (await engine.complete(sent, max_tokens=1, **context.session.request)).usage
        assert usage.cached_tokens and usage.cached_tokens > 0.9 * usage.input_tokens
