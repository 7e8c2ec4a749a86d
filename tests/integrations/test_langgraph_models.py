"""Chat models as smoothctx models: what is sent and read back, and how one is named."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableLambda
from pydantic import SecretStr

from langchain_fakes import ASK, SECRET, Fake, Limited, Other, Streaming, Thinking, fake
from smoothctx import ConfigurationError, Summarize, TransformError, Usage
from smoothctx.transforms.model import Model
from smoothctx_langgraph.codec import LangChainMessages
from smoothctx_langgraph.models import ChatModel, usage_of

pytestmark = pytest.mark.langgraph


# -- asking ----------------------------------------------------------------------------------------------------


async def test_a_reply_with_its_usage() -> None:
    """Text, reported usage with cached tokens, and the bound passed on."""
    chat = fake()
    reply = await ChatModel(chat).complete(ASK, max_tokens=50)
    assert reply.text == SECRET
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.calls) == (120, 7, 100, 1)
    assert not usage.estimated
    assert not reply.tool_calls
    ((messages, kwargs),) = chat.asked
    assert messages == [HumanMessage("Sum it up.")]
    assert kwargs == {"max_tokens": 50}


async def test_it_is_a_model_of_the_core() -> None:
    """``Summarize`` takes it; identity and window are read from it."""
    model = Model(ChatModel(fake()))
    assert model.is_engine
    assert model.window == 9000
    assert (await model.ask(ASK, max_tokens=5)).text == SECRET
    assert Summarize(ChatModel(fake())).fingerprint == Summarize(ChatModel(fake())).fingerprint
    assert Model(ChatModel(fake(), context_window=77)).window == 77


async def test_usage_is_estimated_where_none_is_reported() -> None:
    """cases B104, B171: no report is an estimate that says so, never zero."""
    reply = await ChatModel(Other()).complete(ASK, max_tokens=5)
    assert reply.usage.estimated
    assert reply.usage.input_tokens > 4
    assert reply.usage.output_tokens == 2
    assert reply.usage.cached_tokens is None


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1, "120"])
def test_usage_that_is_no_number_of_tokens_is_no_report(odd: Any) -> None:
    """Nothing is known where the prompt's is none; another number that is none is left out."""
    answer = AIMessage("It.")
    answer.usage_metadata = {"input_tokens": odd, "output_tokens": 7, "total_tokens": 7}
    assert usage_of(answer) is None
    details: Any = {"cache_read": odd}
    answer.usage_metadata = {
        "input_tokens": 120,
        "output_tokens": odd,
        "total_tokens": 7,
        "input_token_details": details,
    }
    assert usage_of(answer) == Usage(input_tokens=120, calls=1)


async def test_the_bound_has_the_models_own_name() -> None:
    """``num_predict`` where the model has that; nothing where it has no bound; a thinking budget on top."""
    limited = fake(Limited)
    await ChatModel(limited).complete(ASK, max_tokens=5)
    assert limited.asked[0][1] == {"num_predict": 5}
    chat = fake(Thinking, thinking={"type": "enabled", "budget_tokens": 2000})
    await ChatModel(chat).complete(ASK, max_tokens=50)
    assert chat.asked[0][1] == {"max_tokens": 2050}
    mixed = ChatModel(fake(Limited).with_fallbacks([fake()]))
    assert (await mixed.complete(ASK, max_tokens=5)).text == SECRET
    chat = fake()
    await ChatModel(chat).complete(ASK)
    assert chat.asked[0][1] == {}


async def test_openai_dicts_become_langchain_messages() -> None:
    """Roles, media, calls, unreadable calls, results and names; later system messages as user messages (B12)."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"x": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "run", "arguments": '{"x": '}},
    ]
    chat = fake()
    await ChatModel(chat).complete(
        [
            {"role": "system", "content": "rules"},
            {"role": "developer", "content": "more rules"},
            {"role": "user", "content": [{"type": "text", "text": "look"}, image], "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "tool", "content": "r1", "tool_call_id": "c1"},
            {"role": "tool", "content": "r2", "tool_call_id": "c2"},
            {"role": "system", "content": "late rules"},
        ]
    )
    ((messages, _),) = chat.asked
    assert messages[:3] == [
        SystemMessage("rules"),
        SystemMessage("more rules"),
        HumanMessage([{"type": "text", "text": "look"}, image], name="ann"),
    ]
    ai = messages[3]
    assert isinstance(ai, AIMessage)
    assert [(c["id"], c["args"]) for c in ai.tool_calls] == [("c1", {"x": 1})]
    assert [(c["id"], c["args"]) for c in ai.invalid_tool_calls] == [("c2", '{"x": ')]
    assert ai.additional_kwargs == {"reasoning_content": "hm"}
    assert messages[4:6] == [ToolMessage("r1", tool_call_id="c1"), ToolMessage("r2", tool_call_id="c2")]
    assert messages[6] == HumanMessage("[system message]\nlate rules")


async def test_a_conversation_survives_both_conversions() -> None:
    """LangChain to OpenAI to LangChain: the model sees the same."""
    codec = LangChainMessages()
    calls = [{"name": "run", "args": {"x": [1, 2]}, "id": "c1", "type": "tool_call"}]
    history = [
        SystemMessage("s"),
        HumanMessage("q"),
        AIMessage("", tool_calls=calls),
        ToolMessage("r", tool_call_id="c1"),
    ]
    chat = fake()
    await ChatModel(chat).complete([codec.to_openai(m) for m in history])
    assert [codec.visible(m) for m in chat.asked[0][0]] == [codec.visible(m) for m in history]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"stop_reason": "max_tokens"}, "length"),
        ({"finish_reason": "MAX_TOKENS"}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete"}, "length"),
        ({"done_reason": "stop"}, "stop"),
        ({"finish_reason": "SAFETY"}, "content_filter"),
        ({"stop_reason": "refusal"}, "content_filter"),
        ({}, None),
    ],
)
async def test_why_an_answer_ended(metadata: dict[str, Any], reason: str | None) -> None:
    """cases B68: an answer that was cut off is known as such, whatever the provider calls it."""
    chat = fake(answer=AIMessage("text", response_metadata=metadata))
    assert (await ChatModel(chat).complete(ASK)).finish_reason == reason


async def test_calls_and_thinking_are_no_text() -> None:
    """cases B63, B66, B200: a call is flagged, thinking is left out, and nothing else stands in for text."""
    call = {"name": "run", "args": {}, "id": "c1", "type": "tool_call"}
    for answer in (
        AIMessage("", tool_calls=[call]),
        AIMessage([{"type": "tool_use", "id": "c", "name": "n", "input": {}}]),
    ):
        reply = await ChatModel(fake(answer=answer)).complete(ASK)
        assert reply.tool_calls
        assert reply.text == ""
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    assert (await ChatModel(fake(answer=AIMessage(thinking))).complete(ASK)).text == ""
    mixed = AIMessage([*thinking, {"type": "text", "text": "one "}, {"type": "text", "text": "two"}])
    assert (await ChatModel(fake(answer=mixed)).complete(ASK)).text == "one two"


async def test_the_agents_tools_are_declared_where_it_takes_any() -> None:
    """Of an engine's options only the tools are used; a model without tools is asked all the same."""
    tools = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
    chat = fake()
    await ChatModel(chat).complete(ASK, tools=tools, tool_choice="none", cache_salt="x")
    assert chat.asked[0][1] == {"tools": tools}
    assert (await ChatModel(Other()).complete(ASK, tools=tools)).text == "plain"


async def test_errors_and_cancellation_pass_through() -> None:
    """The model's own error reaches the transform; a cancelled call is cancelled."""

    class Failing(Fake):
        def _generate(self, *_: Any, **__: Any) -> ChatResult:
            raise ConnectionError("down")

    with pytest.raises(ConnectionError, match="down"):
        await ChatModel(fake(Failing)).complete(ASK)
    started = asyncio.Event()

    class Hanging(Fake):
        async def _agenerate(self, *_: Any, **__: Any) -> ChatResult:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

    async with asyncio.TaskGroup() as group:
        task = group.create_task(ChatModel(fake(Hanging)).complete(ASK))
        await started.wait()
        task.cancel()
    assert task.cancelled()
    odd = ChatModel(fake())
    odd.model = RunnableLambda(lambda _: "a text")
    with pytest.raises(TransformError, match="AIMessage"):
        await odd.complete(ASK)


# -- naming ----------------------------------------------------------------------------------------------------


def test_identity_names_class_model_place_and_parameters() -> None:
    """The same model has the same name in every process; another temperature, name or place another one."""
    first = ChatModel(fake()).identity
    assert "Fake:fake-1@llm.example.org:8000/v1#" in first
    for secret in ("hidden", "pw", "user:"):
        assert secret not in first
    assert ChatModel(fake(timeout=5, api_key=SecretStr("other"))).identity == first
    others = [fake(temperature=1.0), fake(model="fake-2"), fake(base_url=None), fake(Streaming), fake().bind(seed=1)]
    assert len({first, *(ChatModel(o).identity for o in others)}) == 6
    assert ChatModel(fake(), identity="mine").identity == "mine"


def test_a_model_without_a_name_is_private() -> None:
    """What does not tell its name cannot be taken for another."""
    assert ChatModel(Other()).identity != ChatModel(Other()).identity
    assert ChatModel(Other(), identity="other").identity == "other"


async def test_what_may_be_around_a_chat_model() -> None:
    """Bindings, retries, fallbacks and a configurable model; the bound reaches the innermost one."""
    for wrap in (
        lambda m: m.bind(stop=["x"]),
        lambda m: m.with_retry(stop_after_attempt=2),
        lambda m: m.with_config(tags=["mine"]),
        lambda m: m.with_fallbacks([fake()]),
        lambda m: m.with_retry().with_fallbacks([fake().bind(stop=["y"])]),
    ):
        chat = fake()
        model = ChatModel(wrap(chat))
        assert "fake-1" in model.identity
        assert model.context_window == 9000
        assert (await model.complete(ASK, max_tokens=9)).text == SECRET
        assert chat.asked[0][1]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ChatModel("openai:gpt"), "model='openai:gpt'"),
        (lambda: ChatModel(RunnableLambda(lambda x: x)), "expected a LangChain chat model"),
        (lambda: ChatModel(fake() | RunnableLambda(lambda x: x)), "expected a LangChain chat model"),
        (lambda: ChatModel(fake(), identity=" "), "identity=' '"),
        (lambda: ChatModel(fake(), context_window=0), "context_window=0"),
        (lambda: ChatModel(fake(), context_window=True), "context_window=True"),
    ],
)
def test_wrong_options(make: Callable[[], Any], named: str) -> None:
    """Raised at construction, naming option, value and what is allowed."""
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert named in str(caught.value)


async def test_a_list_model_is_named_by_what_it_says() -> None:
    """LangChain's own fake has no name: two of them are two models."""
    one, two = (ChatModel(FakeListChatModel(responses=[r])) for r in "ab")
    assert one.identity != two.identity
    assert (await one.complete(ASK, max_tokens=4)).text == "a"
