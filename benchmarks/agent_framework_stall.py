"""Microsoft Agent Framework: how long each turn takes with the framework's own summaries, and with lookahead.

    python benchmarks/agent_framework_stall.py [--turns 30] [--clock real|virtual] [--json FILE]

Both modes run the same turns one after the other: the chat client answers after --model seconds, the summariser after
--summariser seconds. In line it is the framework's own SummarizationStrategy. With --clock virtual time jumps: the same
figures without the waiting, and without the cost of the code itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from agent_framework import (
    Agent,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    CompactionProvider,
    Content,
    FunctionInvocationLayer,
    InMemoryHistoryProvider,
    Message,
    SummarizationStrategy,
)

from smoothctx import Policy, Runtime, Summarize
from smoothctx.testing import run_virtual
from smoothctx_autogen.agent_framework import ChatClientModel, LookaheadMiddleware

#: messages in the context at which either mode summarises, and what it keeps
TRIGGER, KEEP = 16, 4


class _Slow(BaseChatClient[Any]):
    """Answers after a while."""

    model = "stand-in"

    def __init__(self, *, seconds: float, text: str, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds
        self.text = text
        self.calls = 0

    def _inner_get_response(self, *, messages: Sequence[Message], stream: bool, options: Any, **kwargs: Any) -> Any:
        async def respond() -> ChatResponse[Any]:
            self.calls += 1
            await asyncio.sleep(self.seconds)
            return ChatResponse(messages=[Message("assistant", [Content.from_text(self.text)])], finish_reason="stop")

        return respond()


class Client(FunctionInvocationLayer[Any], ChatMiddlewareLayer[Any], _Slow):
    """The same with the framework's own layers around it."""


async def talk(agent: Agent[Any], turns: int, pause: float, rewrites: Callable[[], int]) -> dict[str, Any]:
    """Times every turn, in milliseconds, and says which of them had a rewrite."""
    loop = asyncio.get_running_loop()
    session = agent.create_session()
    took: list[float] = []
    rewrote: list[int] = []
    for turn in range(turns):
        before, start = rewrites(), loop.time()
        await agent.run(f"Question {turn}: " + "some detail, " * 20, session=session)
        took.append(1000 * (loop.time() - start))
        if rewrites() > before:
            rewrote.append(turn)
        await asyncio.sleep(pause)
    ordinary = [t for k, t in enumerate(took) if k not in rewrote]
    changed = [took[k] for k in rewrote]
    return {
        "turns_ms": took,
        "rewrites": rewrote,
        "ordinary_median_ms": statistics.median(ordinary) if ordinary else None,
        "rewrite_median_ms": statistics.median(changed) if changed else None,
        "rewrite_max_ms": max(changed, default=None),
        "max_ms": max(took),
    }


async def in_line(turns: int, model: float, summariser: float, pause: float) -> dict[str, Any]:
    """The framework's own way: the run that makes the history too long summarises it before it ends."""
    slow = Client(seconds=summariser, text="They talked about many details.")
    history = InMemoryHistoryProvider(skip_excluded=True)
    strategy = SummarizationStrategy(client=slow, target_count=KEEP, threshold=TRIGGER - KEEP)
    agent = Agent(
        client=Client(seconds=model, text="An answer. " * 10),
        context_providers=[CompactionProvider(after_strategy=strategy), history],
    )
    return await talk(agent, turns, pause, lambda: slow.calls)


async def lookahead(turns: int, model: float, summariser: float, pause: float) -> dict[str, Any]:
    """The same with the middleware."""
    slow = Client(seconds=summariser, text="They talked about many details.")
    policy = Policy(
        Summarize(ChatClientModel(slow), keep=("messages", KEEP), facts=False),
        trigger=("messages", TRIGGER),
        hard_limit=("messages", 4 * TRIGGER),
        land_at=("messages", TRIGGER // 2),
    )
    async with Runtime(clock=asyncio.get_running_loop().time) as runtime:
        middleware = LookaheadMiddleware(runtime, policy)
        agent = Agent(client=Client(seconds=model, text="An answer. " * 10), middleware=[middleware])
        return await talk(agent, turns, pause, lambda: runtime.counters.committed)


def run(make: Callable[[], Coroutine[Any, Any, dict[str, Any]]], clock: str) -> dict[str, Any]:
    """On an event loop of its own: an ordinary one, or one whose clock jumps."""
    return run_virtual(make) if clock == "virtual" else asyncio.run(make())


def main() -> None:
    """Run both, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="turns in each mode (default 30)")
    parser.add_argument("--model", type=float, default=0.3, help="seconds of the agent's model (default 0.3)")
    parser.add_argument("--summariser", type=float, default=2.0, help="seconds of the summariser (default 2.0)")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between turns (default 0.2)")
    parser.add_argument("--clock", choices=("real", "virtual"), default="real", help="wait for real, or jump")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    times = (options.turns, options.model, options.summariser, options.pause)
    found = {
        "turns": options.turns,
        "model_ms": 1000 * options.model,
        "summariser_ms": 1000 * options.summariser,
        "clock": options.clock,
        "in_line": run(lambda: in_line(*times), options.clock),
        "lookahead": run(lambda: lookahead(*times), options.clock),
    }
    print(f"{options.turns} turns, model {options.model} s, summariser {options.summariser} s, {found['clock']} clock")
    print(f"{'':10}{'rewrites':>10}{'other turns':>14}{'with rewrite':>14}{'longest':>12}")
    for mode in ("in_line", "lookahead"):
        row = found[mode]
        cells = [row["ordinary_median_ms"], row["rewrite_median_ms"], row["rewrite_max_ms"]]
        shown = ["-" if c is None else f"{c:,.0f} ms" for c in cells]
        print(f"{mode:10}{len(row['rewrites']):>10}{shown[0]:>14}{shown[1]:>14}{shown[2]:>12}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
