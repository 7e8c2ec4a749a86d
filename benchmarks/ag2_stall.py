"""The same as autogen_stall.py, for AG2: its 1.x or its classic line, whichever is installed (they share a name).

In line, AG2 1.x summarises with the framework's own SummarizeCompact, at the end of a turn. AG2 classic has none; there
the agent's reply function writes the summary before it asks its model, since the message hook cannot await.

    python benchmarks/ag2_stall.py [--turns 30] [--clock real|virtual] [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.autogen_stall import FORMS, KEEP, TEXT, TRIGGER, Settings, Turns, main, now
from smoothctx import Policy, Runtime, Summarize
from smoothctx.testing import announce_thread

SUMMARY = "The summary."


def policy(model: Any) -> Policy:
    """The one policy of both lines."""
    return Policy(
        Summarize(model, keep=("messages", KEEP), max_tokens=100, facts=False),
        trigger=("tokens", TRIGGER),
        hard_limit=("tokens", 3 * TRIGGER),
        land_at=("tokens", TRIGGER // 3),
    )


@contextlib.asynccontextmanager
async def announced_threads() -> AsyncIterator[None]:
    """AG2 1.x resolves arguments in worker threads, which a virtual clock has to be told of."""
    import anyio.to_thread

    threads: Any = anyio.to_thread
    run_sync = threads.run_sync

    async def announced(*args: Any, **options: Any) -> Any:
        with announce_thread():
            return await run_sync(*args, **options)

    threads.run_sync = announced
    try:
        yield
    finally:
        threads.run_sync = run_sync


async def ag2(settings: Settings, lookahead: bool) -> Turns:
    """An ``Agent`` of AG2 1.x on one stream."""
    from ag2.compact import CompactTrigger, SummarizeCompact
    from ag2.events import ModelMessage, ModelResponse
    from ag2.knowledge import MemoryKnowledgeStore

    from ag2 import Agent, KnowledgeConfig, MemoryStream, Middleware
    from smoothctx_autogen.ag2 import ConfigModel, LookaheadMiddleware

    class Model:
        """A model config and its client: answers after its time."""

        provider = "fake"

        def __init__(self, seconds: float, text: str) -> None:
            self.model, self.seconds, self.text, self.calls = text, seconds, text, 0

        def copy(self) -> Model:
            return self

        def create(self) -> Model:
            return self

        async def __call__(self, messages: Sequence[Any], context: Any, **_: Any) -> Any:
            self.calls += 1
            await asyncio.sleep(self.seconds)
            return ModelResponse(ModelMessage(self.text))

    summarizer, turns = Model(settings.summarizer_s, SUMMARY), Turns()
    async with announced_threads(), Runtime(clock=asyncio.get_running_loop().time) as runtime:
        options: dict[str, Any]
        if lookahead:
            ahead = Middleware(LookaheadMiddleware, runtime=runtime, policy=policy(ConfigModel(summarizer)))
            options = {"middleware": [ahead]}
        else:
            trigger = CompactTrigger(max_tokens=TRIGGER)
            compact = SummarizeCompact(KEEP, summarizer)
            store = MemoryKnowledgeStore()
            options = {"knowledge": KnowledgeConfig(store=store, compact=compact, compact_trigger=trigger)}
        agent = Agent("agent", config=Model(settings.model_s, TEXT.format(n=0)), **options)
        stream = MemoryStream()
        for turn in range(settings.turns):
            calls, committed, started = summarizer.calls, runtime.counters.committed, now()
            await agent.ask(TEXT.format(n=turn), stream=stream)
            rewrote = runtime.counters.committed > committed if lookahead else summarizer.calls > calls
            turns.add(now() - started, rewrote=rewrote)
    return turns


async def ag2_classic(settings: Settings, lookahead: bool) -> Turns:
    """A ``ConversableAgent`` of AG2 classic in an async chat."""
    from autogen import Agent, ConversableAgent

    from smoothctx_autogen.ag2_classic import ClassicMessages, attach

    class InLine:
        """Summarises when what is sent has grown too long, while the agent waits."""

        def __init__(self) -> None:
            self.covered, self.calls = 0, 0

        async def view(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            summary = [{"role": "user", "content": SUMMARY}] if self.covered else []
            view = [*summary, *messages[self.covered :]]
            if sum(map(ClassicMessages().estimate, view)) >= TRIGGER:
                await summarise(view[:-KEEP])
                self.covered, self.calls = len(messages) - KEEP, self.calls + 1
                view = [{"role": "user", "content": SUMMARY}, *messages[-KEEP:]]
            return view

    async def summarise(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
        await asyncio.sleep(settings.summarizer_s)
        return SUMMARY

    async def reply(recipient: Any, messages: Any = None, sender: Any = None, config: Any = None) -> tuple[bool, str]:
        if not lookahead:
            await in_line.view(messages)
        await asyncio.sleep(settings.model_s)
        return True, TEXT.format(n=0)

    in_line, turns = InLine(), Turns()
    agent, person = (ConversableAgent(name, llm_config=False, human_input_mode="NEVER") for name in ("agent", "user"))
    agent.register_reply([Agent, None], reply, position=0)
    async with Runtime(clock=asyncio.get_running_loop().time) as runtime:
        if lookahead:
            attach(agent, runtime, policy(summarise))
        for turn in range(settings.turns):
            calls, committed, started = in_line.calls, runtime.counters.committed, now()
            await person.a_send(TEXT.format(n=turn), agent, request_reply=True, silent=True)
            rewrote = runtime.counters.committed > committed if lookahead else in_line.calls > calls
            turns.add(now() - started, rewrote=rewrote)
    return turns


FORMS.clear()
FORMS.update({"AG2": ("ag2", ag2), "AG2 classic": ("autogen", ag2_classic)})

if __name__ == "__main__":
    main()
