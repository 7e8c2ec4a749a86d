"""A deep agent whose summaries are made ahead, in the place of its own. Run it: python examples/deepagents_lookahead.py

The chat models are stand-ins that call tools reliably; put your own in their place.
"""

from __future__ import annotations

import asyncio
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver

from smoothctx import Policy, Runtime, Summarize
from smoothctx_langgraph.middleware import LookaheadMiddleware


class Researcher(BaseChatModel):
    """Writes a note into a file for each question, then answers."""

    sent: int = 0

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.sent = len(messages)
        if messages[-1].type == "tool":
            answer = AIMessage("Noted. " + "What follows from it is in the file. " * 10)
        else:
            path = f"/notes/{str(messages[-1].content).split(':')[0].lower().replace(' ', '-')}.md"
            call = {"name": "write_file", "args": {"file_path": path, "content": "a finding"}, "id": f"call-{path}"}
            answer = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


async def summarise(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
    """Stands for a model call that takes its time."""
    await asyncio.sleep(0.05)
    return "Several questions were researched; each finding is in a file under /notes."


async def main() -> int:
    """Twelve questions; returns how many messages the last call was sent."""
    model = Researcher()
    async with Runtime() as runtime:
        policy = Policy(
            Summarize(summarise, keep=("messages", 6)),
            trigger=("messages", 24),
            hard_limit=("messages", 60),
            land_at=("messages", 8),
        )
        # Under this name it takes the place of the deep agent's own summaries, which are made in line.
        ahead = LookaheadMiddleware(runtime, policy, name="SummarizationMiddleware")
        agent: Any = create_deep_agent(model=model, middleware=[ahead], checkpointer=InMemorySaver())
        state: dict[str, Any] = {}
        for turn in range(12):
            question = {"messages": [{"role": "user", "content": f"Question {turn}: " + "please look into it, " * 10}]}
            state = await agent.ainvoke(question, {"configurable": {"thread_id": "research"}})
            await asyncio.sleep(0.1)  # the user reads the answer, and so does the lookahead go on
        print(f"{len(state['messages'])} messages held, {model.sent} sent last, {len(state['files'])} files written")
        print(f"{runtime.counters.committed} summaries committed; no turn waited for one")
    return model.sent


if __name__ == "__main__":
    asyncio.run(main())
