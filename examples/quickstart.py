"""The two calls of a turn, with a stand-in for the agent's model. Run it: python examples/quickstart.py"""

from __future__ import annotations

import asyncio
from typing import Any

from smoothctx import Policy, Runtime, Summarize


async def summarise(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
    """Stands for a model call that takes its time."""
    await asyncio.sleep(0.05)
    return f"Summary of {len(messages)} messages."


async def call_model(context: list[dict[str, Any]]) -> dict[str, Any]:
    """Stands for the agent's own model call."""
    await asyncio.sleep(0.01)
    return {"role": "assistant", "content": f"I have read {len(context)} messages."}


async def main() -> int:
    """Sixty turns; returns how many times the context was rewritten."""
    async with Runtime() as runtime:
        policy = Policy(Summarize(summarise, max_tokens=100), context_window=4_000)
        session = runtime.session("quickstart", policy=policy)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a careful assistant."}]
        for turn in range(60):
            messages.append({"role": "user", "content": f"Question {turn}: " + "some detail, " * 20})
            context = await session.commit(messages)
            messages.append(await call_model(context))
            session.observe(messages)
        for receipt in session.receipts:
            print(
                f"{receipt.how}: {receipt.tokens_before} -> {receipt.tokens_after} tokens, waited {receipt.waited_s} s"
            )
        return len(session.receipts)


if __name__ == "__main__":
    asyncio.run(main())
