"""Microsoft Agent Framework: a chat with a tool, in which summaries are ready before they are due.

Run it: python examples/agent_framework_chat.py. The chat client is a stand-in; any client of the framework goes there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    Message,
    tool,
)

from smoothctx import Policy, Runtime, Summarize
from smoothctx_autogen.agent_framework import ChatClientModel, LookaheadMiddleware


class _StandIn(BaseChatClient[Any]):
    """Looks something up for every question, then answers; counts what it is sent."""

    model = "stand-in"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent: list[int] = []

    def _inner_get_response(self, *, messages: Sequence[Message], stream: bool, options: Any, **kwargs: Any) -> Any:
        self.sent.append(len(messages))
        if messages[-1].role == "user" and options.get("tools"):
            call_id = f"call-{len(self.sent)}"
            content = Content.from_function_call(call_id, "look_up", arguments={"topic": messages[-1].text[:20]})
        else:
            content = Content.from_text(f"Having read {len(messages)} messages, I would say yes.")

        async def respond() -> ChatResponse[Any]:
            await asyncio.sleep(0.01)
            return ChatResponse(messages=[Message("assistant", [content])], finish_reason="stop")

        async def updates() -> AsyncIterator[ChatResponseUpdate]:
            await asyncio.sleep(0.01)
            yield ChatResponseUpdate(role="assistant", contents=[content])

        return self._build_response_stream(updates()) if stream else respond()


class StandIn(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], _StandIn):
    """The same with the framework's tool loop and middleware around it."""


@tool(approval_mode="never_require")
async def look_up(topic: str) -> str:
    """Look a topic up."""
    return f"Everything about {topic}: " + "a detail, " * 30


async def main() -> None:
    """Twenty questions, a restart, and one more."""
    client = StandIn()
    policy = Policy(
        Summarize(ChatClientModel(client), keep=("messages", 6), max_tokens=100),  # the same client may summarise
        trigger=("messages", 16),
        hard_limit=("messages", 60),
        land_at=("messages", 10),
    )
    async with Runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, policy)
        agent = Agent(client=client, instructions="Be brief.", tools=[look_up], middleware=[middleware])
        session = agent.create_session()
        for turn in range(20):
            if turn % 2:
                await agent.run(f"Question {turn}?", session=session)
            else:
                async for _ in agent.run(f"Question {turn}?", session=session, stream=True):
                    pass
        stored = len(session.state["in_memory"]["messages"])
        print(f"{stored} messages stored, {client.sent[-1]} sent")
        for line in middleware.sessions(session):
            for receipt in line.receipts:
                print(f"{receipt.how}: {receipt.messages_replaced} messages replaced, waited {receipt.waited_s} s")
        saved = json.dumps(session.to_dict())

    async with Runtime() as runtime:  # another process: the summary comes with the session
        client = StandIn()
        agent = Agent(client=client, tools=[look_up], middleware=[LookaheadMiddleware(runtime, policy)])
        session = AgentSession.from_dict(json.loads(saved))
        answer = await agent.run("One more?", session=session)
        print(f"after the restart: {client.sent[0]} messages sent, {runtime.counters.usage.calls} summaries paid for")
        print(answer.text)


asyncio.run(main())
