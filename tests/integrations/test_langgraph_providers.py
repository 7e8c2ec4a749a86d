"""Chat models of real providers as smoothctx models: how they are named and bounded. Nothing is sent anywhere."""

from __future__ import annotations

import pytest
from langchain.chat_models import init_chat_model
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_google_genai import ChatGoogleGenerativeAI
from pydantic import SecretStr

from smoothctx import ConfigurationError
from smoothctx_langgraph.codec import LangChainMessages
from smoothctx_langgraph.codec_openai import from_openai
from smoothctx_langgraph.models import ChatModel


async def test_real_integrations_take_the_bound() -> None:
    """The names of the bound in Anthropic's and Google's integrations, as they send it."""
    anthropic = ChatAnthropic(model_name="claude-sonnet-4-5", api_key=SecretStr("hidden"))
    google = ChatGoogleGenerativeAI(model="gemini-2.5-flash", google_api_key="hidden")
    assert ChatModel(anthropic)._limit == "max_tokens"
    assert ChatModel(google)._limit == "max_output_tokens"
    payload = anthropic._get_request_payload([HumanMessage("hi")], max_tokens=77)
    assert payload["max_tokens"] == 77
    for model in (anthropic, google):
        named = ChatModel(model).identity
        assert "hidden" not in named
        assert ("claude-sonnet-4-5" in named) or ("gemini-2.5-flash" in named)


async def test_a_configurable_model_runs_with_its_defaults() -> None:
    """What ``init_chat_model`` gives when the model may be configured; without a default it is refused at once."""
    model = init_chat_model("anthropic:claude-sonnet-4-5", configurable_fields=("temperature",), api_key="hidden")
    named = ChatModel(model).identity
    assert "claude-sonnet-4-5" in named
    assert "hidden" not in named
    with pytest.raises(ConfigurationError, match="no usable default"):
        ChatModel(init_chat_model(configurable_fields=("model", "model_provider")))


def test_a_thinking_budget_is_part_of_anthropics_bound() -> None:
    """What the summary may cost comes on top of what the model may think."""
    thinking = {"type": "enabled", "budget_tokens": 2000}
    model = ChatAnthropic(model_name="claude-sonnet-4-5", api_key=SecretStr("hidden"), thinking=thinking)
    assert ChatModel(model)._thinking == 2000
    plain = ChatAnthropic(model_name="claude-sonnet-4-5", api_key=SecretStr("hidden"))
    assert ChatModel(model).identity != ChatModel(plain).identity


def test_a_rewritten_view_is_rendered_by_a_provider() -> None:
    """cases B12: the summary is in the request, as its first user message; a later system message does no harm."""
    codec = LangChainMessages()
    call = {"name": "run", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
    view = [SystemMessage("rules"), codec.summary("the gist"), AIMessage("", tool_calls=[call])]
    view += [codec.with_text(ToolMessage("r", tool_call_id="c1"), "short"), HumanMessage("go on")]
    model = ChatAnthropic(model_name="claude-sonnet-4-5", api_key=SecretStr("hidden"))
    for messages in (view, from_openai([*map(codec.to_openai, view), {"role": "system", "content": "late"}])):
        payload = model._get_request_payload(messages)
        assert payload["system"] == "rules"
        assert payload["messages"][0]["role"] == "user"
        assert "the gist" in str(payload["messages"][0]["content"])
        assert payload["messages"][1]["content"][0]["type"] == "tool_use"
        result = payload["messages"][2]["content"][0]
        assert (result["type"], result["tool_use_id"], result["content"]) == ("tool_result", "c1", "short")
        assert "smoothctx" not in str(payload)
