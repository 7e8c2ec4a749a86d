"""A chat client of the framework as the summariser."""

from __future__ import annotations

from typing import Any

import pytest
from agent_framework import Content, Message

from agent_framework_fakes import CODEC, FakeClient, Plain, assistant, call, results, text, user
from helpers import make_runtime, settle, virtual
from smoothctx import ConfigurationError, Policy, Summarize, TransformError
from smoothctx.codec import openai_messages
from smoothctx.usage import Usage
from smoothctx_autogen.agent_framework import ChatClientModel, background
from smoothctx_autogen.agent_framework_model import in_background

IMAGE = "data:image/png;base64,iVBORw0KGgo="


class Storing(FakeClient):
    """A client whose service stores by default."""

    STORES_BY_DEFAULT = True


class Nameless(Plain):
    """A client that names no model."""

    model = None  # type: ignore[assignment]


def test_identity_names_service_and_model_without_secrets() -> None:
    """Class, address and model; other options are another identity; user, password and query are left out."""
    identity = ChatClientModel(FakeClient()).identity
    assert identity.endswith("FakeClient@https://models.example:8443/v1:fake-1")
    assert "secret" not in identity
    other = ChatClientModel(FakeClient(), options={"temperature": 0, "user": "secret"}).identity
    assert other != identity and "secret" not in other
    assert ChatClientModel(FakeClient(), model="fake-2").identity.endswith(":fake-2")
    assert ChatClientModel(FakeClient()).identity == identity


def test_wrong_arguments_are_named() -> None:
    """No client, no model's name, options that are none."""
    for arguments, where in (
        ({"client": object()}, "client="),
        ({"client": FakeClient}, "client="),
        ({"client": Nameless()}, "names no model"),
        ({"client": FakeClient(), "options": 3}, "options=3"),
    ):
        with pytest.raises(ConfigurationError, match=where):
            ChatClientModel(**arguments)
    assert ChatClientModel(Nameless(), model="m").identity.endswith(":m")


@virtual
async def test_reply_has_text_usage_and_the_reason_it_ended() -> None:
    """What the client reports is what the transform gets; the cap is passed on, with the own options."""
    client = FakeClient(usage=True, reply=lambda messages: [text("a summary")])
    client.finish_reason = "length"
    reply = await ChatClientModel(client, options={"temperature": 0}).complete(
        [{"role": "user", "content": "hello"}], max_tokens=7
    )
    assert (reply.text, reply.finish_reason, reply.tool_calls) == ("a summary", "length", False)
    assert reply.usage == Usage(input_tokens=106, output_tokens=7, calls=1)
    assert client.options[0]["max_tokens"] == 7 and client.options[0]["temperature"] == 0
    assert "store" not in client.options[0]
    silent = await ChatClientModel(FakeClient()).complete([{"role": "user", "content": "hello"}])
    assert silent.usage == Usage(calls=1, estimated=True)


@virtual
async def test_nothing_is_stored_at_the_service() -> None:
    """A summary request is no part of anybody's conversation."""
    client = Storing()
    await ChatClientModel(client).complete([{"role": "user", "content": "hello"}])
    await ChatClientModel(client, options={"store": True}).complete([{"role": "user", "content": "hello"}])
    assert [o["store"] for o in client.options] == [False, True]


@virtual
async def test_a_call_instead_of_a_text_is_said() -> None:
    """A model that asks for tools did not summarise; and what is no response is an error."""
    client = FakeClient(reply=lambda messages: [call("c1", key="x")])
    reply = await ChatClientModel(client).complete([{"role": "user", "content": "hello"}])
    assert reply.tool_calls and reply.text == ""

    class Odd(Plain):
        def _inner_get_response(self, **kwargs: Any) -> Any:
            async def odd() -> Any:
                return "text"

            return odd()

    with pytest.raises(TransformError, match="expected a ChatResponse, got str"):
        await ChatClientModel(Odd()).complete([{"role": "user", "content": "hello"}])


@virtual
async def test_requests_arrive_as_the_messages_they_stand_for() -> None:
    """Out through the codec and in through the model: roles, text, calls, results, pictures and names are the same."""
    client = FakeClient()
    history = [
        Message("system", ["Be brief."]),
        Message("user", [text("see"), Content.from_uri(IMAGE)], author_name="ann"),
        assistant("calling", "a", "b"),
        results("a", "b"),
        assistant(),
        user("thanks"),
    ]
    await ChatClientModel(client).complete([d for m in history for d in openai_messages(CODEC, m)])
    (request,) = client.requests
    assert [m.role for m in request] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [CODEC.to_openai(m) for m in request] == [d for m in history for d in openai_messages(CODEC, m)]


@virtual
async def test_background_is_marked_for_the_call_only() -> None:
    """Inside the call it shows, outside it does not."""
    seen: list[bool] = []

    def reply(messages: Any) -> list[Content]:
        seen.append(in_background())
        return [text("x")]

    await ChatClientModel(FakeClient(reply=reply)).complete([{"role": "user", "content": "hello"}])
    with background():
        seen.append(in_background())
    assert [*seen, in_background()] == [True, True, False]


@virtual
async def test_summaries_come_from_the_client() -> None:
    """In a plain session: the summary is its text, the usage is counted, the artifact is durable."""
    client = FakeClient(usage=True, reply=lambda messages: [text("It was about many things.")])
    policy = Policy(
        Summarize(ChatClientModel(client), keep=("messages", 2), facts=False),
        trigger=("messages", 6),
        hard_limit=("messages", 50),
        land_at=("messages", 3),
        min_savings=0.0,
    )
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy, codec=CODEC)
        history = [m for k in range(5) for m in (user(f"<{k}> q", size=50), assistant(f"<{k}> a", size=50))]
        session.observe(history)
        await settle(1)
        view = await session.commit([*history, user("more")])
        assert "It was about many things." in CODEC.text(view[0])
        assert runtime.counters.usage.calls == 1 and not runtime.counters.usage.estimated
        assert len(session.saved()) == 1
