"""Two AG2 classic agents in a sync chat, with lookahead on one. Run it: python examples/ag2_classic/chat.py"""

from __future__ import annotations

import time
from typing import Any

from autogen import Agent, ConversableAgent

from smoothctx import Policy, Runtime, Summarize
from smoothctx_autogen.ag2_classic import attach


async def summarise(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
    """Stands for a model; with a real one: ``WrapperModel(llm_config)``."""
    return f"They talked about many details ({len(messages)} messages)."


def call_model(agent: Any, messages: Any = None, sender: Any = None, config: Any = None) -> tuple[bool, str]:
    """Stands for the agent's own model call."""
    time.sleep(0.01)
    return True, f"Noted. {len(messages)} messages read."


def main() -> int:
    """Sixty turns; returns how many times the context was rewritten."""
    agent = ConversableAgent("assistant", llm_config=False, human_input_mode="NEVER")
    agent.register_reply([Agent, None], call_model, position=0)
    person = ConversableAgent("person", llm_config=False, human_input_mode="NEVER")
    with Runtime.in_thread() as runtime:  # a loop of its own: a sync chat has none
        attached = attach(agent, runtime, Policy(Summarize(summarise, max_tokens=100), context_window=4_000))
        for turn in range(60):
            person.send(f"Question {turn}: " + "some detail, " * 20, agent, request_reply=True, silent=True)
        print(person.last_message(agent)["content"])
        (session,) = attached.sessions()
        for receipt in session.receipts:
            print(
                f"{receipt.how}: {receipt.tokens_before} -> {receipt.tokens_after} tokens, waited {receipt.waited_s} s"
            )
        return len(session.receipts)


if __name__ == "__main__":
    main()
