"""An AutoGen agent with tools whose context is summarised ahead of time. Run it: python examples/autogen_chat.py

The model client stands for a real one, such as ``autogen_ext.models.openai.OpenAIChatCompletionClient``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core.models import (
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelInfo,
    RequestUsage,
)

from smoothctx import Runtime
from smoothctx_autogen import LookaheadChatCompletionContext, LookaheadOptions


class StandIn(ChatCompletionClient):
    """Looks two cities up, then answers; asked without tools it summarises, which takes longer."""

    component_type = "model"

    async def create(self, messages: Sequence[LLMMessage], *, tools: Sequence[Any] = (), **_: Any) -> CreateResult:
        content: str | list[FunctionCall]
        if not tools:
            await asyncio.sleep(0.1)
            content = "The user asked for the weather in several cities, and was told of it."
        elif isinstance(messages[-1], FunctionExecutionResultMessage):
            content = "It is sunny in both. " + "More about the weather. " * 10
        else:
            await asyncio.sleep(0.02)
            cities = [("1", "Seoul"), ("2", "Busan")]
            content = [FunctionCall(id=i, name="weather", arguments=json.dumps({"city": c})) for i, c in cities]
        return CreateResult(
            finish_reason="stop" if isinstance(content, str) else "function_calls",
            content=content,
            usage=RequestUsage(prompt_tokens=0, completion_tokens=0),
            cached=False,
        )

    async def create_stream(
        self, messages: Sequence[LLMMessage], **options: Any
    ) -> AsyncGenerator[str | CreateResult, None]:
        yield await self.create(messages, **options)

    async def close(self) -> None:
        pass

    def actual_usage(self) -> RequestUsage:
        return RequestUsage(0, 0)

    def total_usage(self) -> RequestUsage:
        return RequestUsage(0, 0)

    def count_tokens(self, messages: Sequence[LLMMessage], **_: Any) -> int:
        return 0

    def remaining_tokens(self, messages: Sequence[LLMMessage], **_: Any) -> int:
        return 0

    @property
    def capabilities(self) -> Any:
        return self.model_info

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False
        )


async def weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}, 21 degrees, light wind from the west. " * 4


async def main() -> int:
    """Forty questions to one agent; returns how many times its context was rewritten."""
    client = StandIn()
    async with Runtime() as runtime:
        context = LookaheadChatCompletionContext(
            client, options=LookaheadOptions(context_window=8_000, max_tokens=200), runtime=runtime
        )
        agent = AssistantAgent("assistant", client, tools=[weather], model_context=context, reflect_on_tool_use=True)
        for turn in range(40):
            await agent.run(task=f"Question {turn}: how is the weather?")
        for receipt in context.session.receipts:
            print(
                f"{receipt.how}: {receipt.tokens_before} -> {receipt.tokens_after} tokens, waited {receipt.waited_s} s"
            )
        held, sent = await context.inner.get_messages(), await context.get_messages()
        print(f"{len(held)} messages held, {len(sent)} sent")
        return len(context.session.receipts)


if __name__ == "__main__":
    asyncio.run(main())
