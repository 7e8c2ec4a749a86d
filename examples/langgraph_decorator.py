"""A LangGraph chat, before and after one decorator. Run it: python examples/langgraph_decorator.py

The models are stand-ins that take their time: a turn with the chat model 20 ms, a summary 100 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from smoothctx import Policy, Runtime, Summarize
from smoothctx_langgraph import LookaheadState, lookahead_node

TURNS = 24
THREAD: Any = {"configurable": {"thread_id": "one"}}


class State(MessagesState, LookaheadState):
    """The messages, and a private channel in which the checkpoint remembers what was committed."""


async def summarise(messages: list[Any], *, max_tokens: int | None = None) -> str:
    """Stands for a call of a summarising model."""
    await asyncio.sleep(0.1)
    return f"Summary of {len(messages)} messages."


async def call_model(messages: Sequence[BaseMessage]) -> AIMessage:
    """Stands for a call of the chat model."""
    await asyncio.sleep(0.02)
    return AIMessage(f"I have read {len(messages)} messages.")


async def plain(state: State) -> dict[str, Any]:
    """The node as it is: the model is sent everything, each turn more."""
    return {"messages": [await call_model(state["messages"])]}


async def in_line(state: State) -> dict[str, Any]:
    """The usual remedy: once the list is long, turns wait for summaries."""
    messages: list[Any] = state["messages"]
    if len(messages) > 16:
        messages = [HumanMessage(await summarise(messages[:-6])), *messages[-6:]]
    return {"messages": [await call_model(messages)]}


async def talk(title: str, node: Any) -> None:
    """A conversation; prints how long its slowest turn took and what the model was sent at the end."""
    builder = StateGraph(State, input_schema=MessagesState, output_schema=MessagesState)
    builder.add_node("model", node)
    builder.add_edge(START, "model")
    graph = builder.compile(checkpointer=InMemorySaver())
    slowest = 0.0
    state: dict[str, Any] = {}
    for turn in range(TURNS):
        started = time.perf_counter()
        question = HumanMessage(f"Question {turn}: " + "some detail, " * 20)
        state = await graph.ainvoke({"messages": [question]}, THREAD)
        slowest = max(slowest, time.perf_counter() - started)
    said = state["messages"][-1].content
    print(f"{title:<10} slowest turn {slowest * 1000:4.0f} ms; {len(state['messages'])} messages in the state. {said}")


async def main() -> None:
    """The three side by side."""
    policy = Policy(
        Summarize(summarise, model_id="stand-in", max_tokens=100, keep=("messages", 6)), context_window=1_500
    )
    async with Runtime() as runtime:
        await talk("plain", plain)
        await talk("in line", in_line)
        await talk("lookahead", lookahead_node(runtime, policy)(plain))


if __name__ == "__main__":
    asyncio.run(main())
