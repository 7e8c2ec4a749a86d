"""A ReAct agent (``create_agent``) whose context is rewritten ahead. Run it: python examples/langgraph_react.py

The chat models are stand-ins that call tools reliably and take no time to load; put your own in their place. The same
conversation runs with LangChain's ``SummarizationMiddleware`` in line and with a lookahead, and the turns are timed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from smoothctx import Policy, Runtime, Summarize
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.models import ChatModel

TURNS = 14


class Assistant(BaseChatModel):
    """Looks something up for each question, then answers."""

    model_name: str = "assistant"
    most: int = 0

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.most = max(self.most, len(messages))
        if messages[-1].type == "tool":
            answer = AIMessage("That depends on the weather; see the forecast above. " * 4)
        else:
            call = {"name": "forecast", "args": {"city": "Utrecht"}, "id": f"call-{len(messages)}"}
            answer = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(0.02)
        return self._generate(messages)


class Summariser(BaseChatModel):
    """Takes its time for a summary."""

    model_name: str = "summariser"

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name}

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        text = "The user asked about the weather in Utrecht and got forecasts."
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(0.1)
        return self._generate(messages)


@tool
def forecast(city: str) -> str:
    """The forecast for a city."""
    return f"{city}: " + "sunny spells and a light wind from the west, " * 8


async def conversation(middleware: Sequence[Any]) -> tuple[list[float], int]:
    """Seconds of each turn, and the most messages that the model was sent."""
    model = Assistant()
    agent: Any = create_agent(model, [forecast], middleware=middleware, checkpointer=InMemorySaver())
    seconds = []
    for turn in range(TURNS):
        question = {"messages": [{"role": "user", "content": f"Question {turn}: shall I cycle tomorrow?"}]}
        start = time.perf_counter()
        await agent.ainvoke(question, {"configurable": {"thread_id": "trip"}})
        seconds.append(time.perf_counter() - start)
    return seconds, model.most


async def main() -> list[float]:
    """Both, one after the other; returns what each turn with a lookahead took."""
    in_line = SummarizationMiddleware(Summariser(), trigger=("messages", 20), keep=("messages", 6))
    before, sent_before = await conversation([in_line])

    async with Runtime() as runtime:
        policy = Policy(
            Summarize(ChatModel(Summariser()), keep=("messages", 6)),
            trigger=("messages", 20),
            hard_limit=("messages", 60),
            land_at=("messages", 8),
        )
        after, sent_after = await conversation([LookaheadMiddleware(runtime, policy)])
        counters = runtime.counters

    for name, seconds, sent in (("in line", before, sent_before), ("lookahead", after, sent_after)):
        print(f"{name:>10}: slowest turn {max(seconds):.2f} s, at most {sent} messages sent")
    print(f"{counters.started} lookaheads started, {counters.committed} committed")
    return after


if __name__ == "__main__":
    asyncio.run(main())
