"""AutoGen's model clients as the model of a transform: requests, usage, identity, loops, cancellation."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from typing import Any

import pytest
from autogen_core import FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResultMessage,
    SystemMessage,
    UserMessage,
)
from PIL import Image as PILImage

from autogen_helpers import CODEC, A, Client, H, Summarizer, T, chat, options, summaries
from helpers import Events, make_runtime, settle, virtual
from smoothctx import ConfigurationError, EngineUnreachable, Policy, Runtime, Summarize, Usage
from smoothctx.transforms.inputs import units
from smoothctx.transforms.model import Model
from smoothctx_autogen import (
    LookaheadChatCompletionContext,
    client_model,
    close_default_runtime,
    default_runtime,
)
from smoothctx_autogen.model import client_identity, from_openai

PROMPT = [{"role": "user", "content": "Summarise."}]


@virtual
async def test_usage_and_finish_reason_are_the_clients() -> None:
    """As it reported them; without a report they are estimated and marked so; a cached answer cost nothing."""
    client = Client(["text", "text", "text", [FunctionCall(id="1", name="f", arguments="{}")]], usage=(100, 20))
    model = Model(client_model(client))
    reply = await model.ask(PROMPT, max_tokens=50)
    assert (reply.text, reply.finish_reason, reply.tool_calls) == ("text", "stop", False)
    assert reply.usage == Usage(input_tokens=100, output_tokens=20, calls=1)
    client.usage, client.finish = (0, 0), "length"
    reply = await model.ask(PROMPT, max_tokens=50)
    assert reply.usage.estimated and reply.usage.input_tokens > 0 and reply.finish_reason == "length"
    client.cached = True
    assert (await model.ask(PROMPT, max_tokens=50)).usage == Usage(calls=1)
    reply = await model.ask(PROMPT, max_tokens=50)
    assert reply.tool_calls and reply.text == "" and reply.finish_reason == "tool_calls"


@virtual
@pytest.mark.parametrize("odd", [math.nan, math.inf, -1, "100"])
async def test_usage_that_is_no_number_of_tokens_is_no_report(odd: Any) -> None:
    """It is estimated where nothing of it can be read, and never in a sum."""
    client = Client(["text", "text"], usage=(odd, odd))
    model = Model(client_model(client))
    assert (await model.ask(PROMPT, max_tokens=50)).usage.estimated
    client.usage = (odd, 20)
    assert (await model.ask(PROMPT, max_tokens=50)).usage == Usage(output_tokens=20, calls=1)


async def test_background_usage_is_an_event_and_a_counter() -> None:
    """B171: what the summariser cost is reported, beside the agent's own."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        client = Summarizer()
        client.usage = (100, 20)
        context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
        for message in chat(3):
            await context.add_message(message)
        await settle(1)
        assert events.of("usage")[0].data["usage"] == Usage(input_tokens=100, output_tokens=20, calls=1)
        assert runtime.counters.usage.total_tokens == 120


def test_requests_are_autogens_messages() -> None:
    """Valid OpenAI-style units become valid AutoGen messages: names, ids, thoughts and images are kept."""
    image = Image(PILImage.new("RGB", (4, 4), "red"))
    held = [SystemMessage(content="s"), UserMessage(content=["look", image], source="u"), A("why", "1", "2")]
    parts = [T("1", text="one"), T("2", text="two")]
    sent = [m for u in units([*held, *parts, A("fine"), H()], CODEC) for m in u.messages]
    made = from_openai(sent)
    assert [type(m) for m in made] == [
        SystemMessage,
        UserMessage,
        AssistantMessage,
        FunctionExecutionResultMessage,
        AssistantMessage,
        UserMessage,
    ]
    shown: Any = made[1]
    assert shown.content[0] == "look" and shown.content[1].image.tobytes() == image.image.tobytes()
    called, results = made[2], made[3]
    assert isinstance(called, AssistantMessage) and called.thought == "why" and called.content == held[2].content
    assert isinstance(results, FunctionExecutionResultMessage)
    assert [(r.call_id, r.name, r.content) for r in results.content] == [("1", "run", "one"), ("2", "run", "two")]
    blind: Any = from_openai(sent, vision=False)[1]
    assert blind.content == "look\n[image]"
    broken: Any = from_openai([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, 7]}])[0]
    assert broken.content == ["[image]", "7"]


@pytest.mark.parametrize(
    ("module", "family", "argument", "sent"),
    [
        ("autogen_ext.models.openai._openai_client", "gpt-4o", "auto", {"max_tokens": 50}),
        ("autogen_ext.models.openai._openai_client", "o3", "auto", {"max_completion_tokens": 50}),
        ("autogen_ext.models.openai._openai_client", "gpt-5", "auto", {"max_completion_tokens": 50}),
        ("autogen_ext.models.anthropic._anthropic_client", "claude-4-opus", "auto", {"max_tokens": 50}),
        ("autogen_ext.models.ollama._ollama_client", "unknown", "auto", {}),
        ("autogen_ext.models.openai._openai_client", "gpt-4o", None, {}),
        ("mine", "unknown", "num_predict", {"num_predict": 50}),
    ],
)
def test_the_cap_goes_by_the_name_that_the_client_knows(module: str, family: str, argument: Any, sent: Any) -> None:
    """A client that refuses unknown arguments is never given one."""
    kind = type("Some", (Client,), {"__module__": module})
    client = kind(["text"])
    client.family = family
    asyncio.run(Model(client_model(client, max_tokens_arg=argument)).ask(PROMPT, max_tokens=50))
    assert client.arguments == [sent]


def test_identity_is_the_public_configuration() -> None:
    """Class, model and options name a client; keys, headers and what URLs carry of secrets do not."""
    plain = client_identity(Summarizer())
    assert plain is not None and plain.startswith("autogen_helpers.Summarizer small ") and "hunter2" not in plain
    same = Summarizer(api_key="other", default_headers={"x": "y"}, base_url="https://models.example/v1?sig=other")
    assert client_identity(same) == plain
    for other in ({"model": "large"}, {"base_url": "https://elsewhere.example/v1"}, {"max_tokens": 7}, {"text": "x"}):
        assert client_identity(Summarizer(**other)) != plain
    assert client_identity(Client()) is None
    assert Summarize(client_model(Summarizer())).fingerprint == Summarize(client_model(same)).fingerprint
    assert Summarize(client_model(Client())).fingerprint is None
    assert Summarize(client_model(Client(), model_id="mine")).fingerprint is not None


@pytest.mark.parametrize(
    ("client", "given", "said"),
    [
        (7, {}, "client=7"),
        (Client(), {"max_tokens_arg": ""}, "max_tokens_arg=''"),
        (Client(), {"max_tokens_arg": 7}, "7"),
    ],
)
def test_wrong_options_are_errors(client: Any, given: Any, said: str) -> None:
    """At construction."""
    with pytest.raises(ConfigurationError, match=said):
        client_model(client, **given)


@virtual
async def test_cancelling_reaches_the_client() -> None:
    """Its task is cancelled, and the token that it was given."""
    client = Summarizer("hang")
    async with make_runtime() as runtime:
        context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
        for message in chat(3):
            await context.add_message(message)
        await client.started.wait()
        (token,) = client.tokens
        assert token is not None and not token.is_cancelled()
        await context.clear()
        await settle(1)
        assert token.is_cancelled() and client.cancelled == 1


@virtual
async def test_the_same_client_for_agent_and_summaries_gets_no_tools() -> None:
    """One client object may serve both: the background request carries no tools and nothing of the agent's."""
    client = Client(lambda _: "The summary.")
    async with make_runtime() as runtime:
        policy = Policy(Summarize(client_model(client), max_tokens=100), context_window=600, min_savings=0.0)
        context = LookaheadChatCompletionContext(policy=policy, runtime=runtime)
        for message in chat(4):
            await context.add_message(message)
        await settle(1)
        assert client.requests and client.tools[0] == []


@virtual
async def test_background_calls_see_nothing_of_the_run() -> None:
    """Promise 13: context variables of the agent's run (its spans, its ids) are not those of the summariser's call."""
    run: contextvars.ContextVar[str] = contextvars.ContextVar("run", default="none")
    seen: list[str] = []

    def script(_: Any) -> str:
        seen.append(run.get())
        return "The summary."

    async with make_runtime() as runtime:
        run.set("the agent's")
        context = LookaheadChatCompletionContext(Client(script), options=options(), runtime=runtime)
        for message in chat(3):
            await context.add_message(message)
        await settle(1)
        assert summaries(await context.get_messages())
    assert seen == ["none"]


# -- loops ---------------------------------------------------------------------------------------------------------


def test_calls_go_back_to_the_agents_loop() -> None:
    """The runtime has a thread of its own; the client, which belongs to the agent's loop, is used there alone."""
    client = Summarizer()
    with Runtime.in_thread() as runtime:

        async def main() -> None:
            context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
            for message in chat(3):
                await context.add_message(message)
            handle = context.session.lookahead
            assert handle is not None
            await handle.wait(60)
            assert summaries(await context.get_messages())
            assert client.loops == [asyncio.get_running_loop()]

        asyncio.run(main())


def test_a_look_at_the_session_where_no_loop_runs_leaves_the_calls_on_the_agents_loop() -> None:
    """Receipts are read between two requests, or in another thread; a call that begins afterwards still goes back."""
    client = Summarizer()
    with Runtime.in_thread() as runtime:

        async def main() -> None:
            context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)
            looked, loop = threading.Event(), runtime._loop
            assert context.session.lookahead is None and loop is not None
            loop.call_soon_threadsafe(looked.wait, 60)  # nothing begins before the look
            for message in chat(3):
                await context.add_message(message)
            handle = await asyncio.to_thread(lambda: context.session.lookahead)
            looked.set()
            assert handle is not None
            await handle.wait(60)
            assert client.loops == [asyncio.get_running_loop()]

        asyncio.run(main())


def test_a_wait_at_the_hard_limit_does_not_block_the_agents_loop() -> None:
    """The promoted call runs on the loop whose turn waits for it."""
    client = Summarizer()
    with Runtime.in_thread() as runtime:

        async def main() -> None:
            given = options(trigger=8, hard=9)
            context = LookaheadChatCompletionContext(client, options=given, runtime=runtime)
            messages = chat(5)
            for message in messages:
                await context.inner.add_message(message)  # all at once: nothing was prepared
            view = await context.get_messages()
            assert len(view) <= 9 and summaries(view) and client.loops == [asyncio.get_running_loop()]

        asyncio.run(main())


def test_a_client_of_its_own_works_between_the_agents_loops() -> None:
    """Each turn in an ``asyncio.run`` of its own: a summary that was under way at the end of one is in the next."""
    client = Summarizer("hold")
    with Runtime.in_thread() as runtime:
        context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime, own_client=True)

        async def first() -> Any:
            for message in chat(3):
                await context.add_message(message)
            return context.session.lookahead

        handle = asyncio.run(first())
        loop = runtime._loop
        assert loop is not None
        loop.call_soon_threadsafe(client.release.set)
        handle.wait_sync(60)
        assert summaries(asyncio.run(context.get_messages()))
        assert client.loops == [loop]


def test_a_shared_client_whose_loop_has_ended_is_a_failed_lookahead() -> None:
    """The turn of the next loop goes on with the raw messages; what goes wrong is said; a later one works."""
    client = Summarizer("hang")
    events = Events()
    with Runtime.in_thread(on_event=events) as runtime:
        context = LookaheadChatCompletionContext(client, options=options(), runtime=runtime)

        async def first() -> Any:
            for message in chat(3):
                await context.add_message(message)
            await client.started.wait()
            return context.session.lookahead

        handle = asyncio.run(first())  # it ends, and cancels what runs on it
        client.mode = "answer"

        async def second() -> None:
            assert len(await context.get_messages()) == 6
            await handle.wait(60)  # the retry finds the loop that the agent is on now
            assert summaries(await context.get_messages())
            assert client.loops[-1] is asyncio.get_running_loop()

        asyncio.run(second())
        assert client.cancelled == 1


def test_no_loop_to_go_back_to() -> None:
    """Closed, or not running: an error that may be tried again, and no coroutine is left behind."""
    model = client_model(Client(["text"]))
    loop = asyncio.new_event_loop()
    model.home = loop
    with pytest.raises(EngineUnreachable, match="event loop of the agent"):
        asyncio.run(model(PROMPT))
    loop.close()
    with pytest.raises(EngineUnreachable):
        asyncio.run(model(PROMPT))


def test_default_runtime_starts_once_and_ends() -> None:
    """Contexts without a runtime share it; after its end no thread of it is left, and the next use starts another."""
    client = Summarizer()

    async def main() -> None:
        for first in (0, 50):
            context = LookaheadChatCompletionContext(client, options=options())
            for message in chat(3, first=first):
                await context.add_message(message)
            handle = context.session.lookahead
            assert handle is not None
            await handle.wait(60)
            assert summaries(await context.get_messages())

    try:
        asyncio.run(main())
        runtime = default_runtime()
        assert runtime.counters.committed == 2 and default_runtime() is runtime
        threads = [t for t in threading.enumerate() if t.name == "smoothctx"]
        assert len(threads) == 1 and threads[0].daemon
    finally:
        close_default_runtime()
    assert not threads[0].is_alive() and "closed" in repr(runtime)
    assert default_runtime() is not runtime
    close_default_runtime()
