"""An AG2 1.x agent whose summaries are written beside the chat. Run it: python examples/ag2/chat.py"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ag2.events import BaseEvent, ModelMessage, ModelResponse

from ag2 import Agent, Middleware
from smoothctx import Policy, Runtime, Summarize
from smoothctx_autogen.ag2 import ConfigModel, LookaheadMiddleware, sessions


class StandIn:
    """Stands for a config such as ``OpenAIConfig("gpt-...")``: answers after ``seconds``."""

    provider = "stand-in"
    model = "stand-in-1"

    def __init__(self, text: str, seconds: float) -> None:
        self.text, self.seconds = text, seconds

    def copy(self) -> StandIn:
        """The config again."""
        return self

    def create(self) -> StandIn:
        """The client of this config: here the same object."""
        return self

    async def __call__(self, messages: Sequence[BaseEvent], context: Any, **options: Any) -> ModelResponse:
        await asyncio.sleep(self.seconds)
        return ModelResponse(ModelMessage(f"{self.text} ({len(messages)} events read)"))


async def main() -> int:
    """Forty turns; returns how many times the context was rewritten."""
    async with Runtime() as runtime:
        summariser = ConfigModel(StandIn("They talked about many details.", 0.05))
        policy = Policy(Summarize(summariser, max_tokens=100), context_window=4_000)
        lookahead = Middleware(LookaheadMiddleware, runtime=runtime, policy=policy)
        agent = Agent("assistant", "You are careful.", config=StandIn("Noted.", 0.01), middleware=[lookahead])
        reply = await agent.ask("Hello.")
        for turn in range(40):
            reply = await reply.ask(f"Question {turn}: " + "some detail, " * 20)
        print(await reply.content())
        (session,) = sessions(runtime, reply.context.stream)
        for receipt in session.receipts:
            print(
                f"{receipt.how}: {receipt.tokens_before} -> {receipt.tokens_after} tokens, waited {receipt.waited_s} s"
            )
        return len(session.receipts)


if __name__ == "__main__":
    asyncio.run(main())
