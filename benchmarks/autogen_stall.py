"""What a turn takes when the context is rewritten: in line, and ahead of time. Real agents, fake models.

A summariser of 2.0 s against a model of 0.3 s, 30 turns of one agent. In line, the summary is written where each
framework lets a program do so, right before the model call; the turn waits for it. With the clock ``virtual`` sleeps
cost nothing and only waiting counts; with ``real`` so does what the code itself takes.

    python benchmarks/autogen_stall.py [--turns 30] [--clock real|virtual] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smoothctx import Runtime
from smoothctx.testing import run_virtual

#: about 100 tokens
TEXT = "The agent read src/app/router.py and found that the session id is missing at line {n}. " * 4
#: tokens at which a rewrite is due, and what it leaves raw
TRIGGER, KEEP = 2_100, 2


@dataclass(frozen=True, slots=True)
class Settings:
    """How long things take, in seconds, and how many turns there are."""

    turns: int = 30
    model_s: float = 0.3
    summarizer_s: float = 2.0


@dataclass(slots=True)
class Turns:
    """Seconds of each turn, by whether the context was rewritten in it."""

    ordinary: list[float] = field(default_factory=list)
    transform: list[float] = field(default_factory=list)

    def add(self, seconds: float, *, rewrote: bool) -> None:
        """One more turn."""
        (self.transform if rewrote else self.ordinary).append(seconds)


#: runs the turns of one framework: in line, or with lookahead
Form = Callable[[Settings, bool], Awaitable[Turns]]


def now() -> float:
    """The running loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


# -- AutoGen ---------------------------------------------------------------------------------------------------------


async def autogen(settings: Settings, lookahead: bool) -> Turns:
    """An ``AssistantAgent``; in line its model context writes the summary in ``get_messages``."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.model_context import ChatCompletionContext, UnboundedChatCompletionContext
    from autogen_core.models import (
        ChatCompletionClient,
        CreateResult,
        LLMMessage,
        ModelInfo,
        RequestUsage,
        UserMessage,
    )

    from smoothctx_autogen import AutoGenMessages, LookaheadChatCompletionContext, LookaheadOptions

    class Model(ChatCompletionClient):
        """Answers after its time."""

        component_type = "model"

        def __init__(self, seconds: float, text: str) -> None:
            self.seconds, self.text, self.calls = seconds, text, 0

        async def create(self, messages: Sequence[LLMMessage], **_: Any) -> CreateResult:
            self.calls += 1
            await asyncio.sleep(self.seconds)
            return CreateResult(finish_reason="stop", content=self.text, usage=RequestUsage(0, 0), cached=False)

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
            return 1_000_000

        @property
        def capabilities(self) -> Any:
            return self.model_info

        @property
        def model_info(self) -> ModelInfo:
            return ModelInfo(
                vision=False, function_calling=False, json_output=False, family="unknown", structured_output=False
            )

    class InLine(UnboundedChatCompletionContext):
        """Summarises when it has grown too long, while the agent waits."""

        async def get_messages(self) -> list[LLMMessage]:
            if sum(map(AutoGenMessages().estimate, self._messages)) >= TRIGGER:
                await summarizer.create(self._messages[:-KEEP])
                self._messages[:-KEEP] = [UserMessage(content=summarizer.text, source="summary")]
            return list(self._messages)

    summarizer = Model(settings.summarizer_s, "The summary.")
    async with Runtime(clock=asyncio.get_running_loop().time) as runtime:
        ahead = LookaheadChatCompletionContext(
            summarizer,
            options=LookaheadOptions(
                trigger=("tokens", TRIGGER),
                hard_limit=("tokens", 3 * TRIGGER),
                land_at=("tokens", TRIGGER // 3),
                keep=("messages", KEEP),
                max_tokens=100,
                facts=False,
            ),
            runtime=runtime,
        )
        context: ChatCompletionContext = ahead if lookahead else InLine()
        agent = AssistantAgent("agent", Model(settings.model_s, TEXT.format(n=0)), model_context=context)
        turns = Turns()
        for turn in range(settings.turns):
            calls, receipts, started = summarizer.calls, len(ahead.session.receipts), now()
            await agent.run(task=TEXT.format(n=turn))
            rewrote = len(ahead.session.receipts) > receipts if lookahead else summarizer.calls > calls
            turns.add(now() - started, rewrote=rewrote)
        return turns


#: by name: the module whose presence says that it can run here, and how
FORMS: dict[str, tuple[str, Form]] = {
    "AutoGen": ("autogen_agentchat", autogen),
}


# -- the same for each -----------------------------------------------------------------------------------------------


def installed() -> dict[str, Form]:
    """The forms whose frameworks are here."""
    return {name: form for name, (module, form) in FORMS.items() if importlib.util.find_spec(module) is not None}


def figures(turns: Turns) -> dict[str, float | None]:
    """p50 and maximum in milliseconds; ``ratio``: the slowest transform turn by the usual ordinary one."""
    usual = statistics.median(turns.ordinary)
    found: dict[str, float | None] = {"turns": len(turns.ordinary) + len(turns.transform)}
    for name, seconds in (("ordinary", turns.ordinary), ("transform", turns.transform)):
        found[f"{name}_turns"] = len(seconds)
        found[f"{name}_p50_ms"] = 1000 * statistics.median(seconds) if seconds else None
        found[f"{name}_max_ms"] = 1000 * max(seconds) if seconds else None
    found["ratio"] = max(turns.transform) / usual if turns.transform else None
    return found


def measure(form: Form, settings: Settings, *, virtual: bool) -> dict[str, Mapping[str, float | None]]:
    """Both ways, one after the other."""
    run: Callable[[Any], Turns] = run_virtual if virtual else (lambda main: asyncio.run(main()))
    return {
        "in_line": figures(run(lambda: form(settings, False))),
        "lookahead": figures(run(lambda: form(settings, True))),
    }


def table(found: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    """For people."""
    columns = ("ordinary_p50_ms", "ordinary_max_ms", "transform_turns", "transform_p50_ms", "transform_max_ms")
    lines = [f"{'':24}{'ordinary turns, ms':>20}{'transform turns, ms':>30}", " " * 24]
    lines[1] += f"{'p50':>10}{'max':>10}{'number':>10}{'p50':>10}{'max':>10}{'ratio':>8}"
    for name, ways in found.items():
        for way, row in ways.items():
            cells = "".join(f"{row[c]:>10.0f}" if row[c] is not None else f"{'-':>10}" for c in columns)
            ratio = f"{row['ratio']:>8.2f}" if row["ratio"] is not None else f"{'-':>8}"
            lines.append(f"{name + ', ' + way.replace('_', ' '):24}{cells}{ratio}")
    return "\n".join(lines)


def main() -> None:
    """Measure what is installed, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="turns of each run (default 30)")
    parser.add_argument("--model-s", type=float, default=0.3, help="seconds of the agent's model (default 0.3)")
    parser.add_argument("--summarizer-s", type=float, default=2.0, help="seconds of the summariser (default 2.0)")
    parser.add_argument("--clock", choices=("real", "virtual"), default="real", help="what passes in a sleep")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    settings = Settings(options.turns, options.model_s, options.summarizer_s)
    forms = installed()
    if not forms:
        parser.error(f"none of these is installed: {', '.join(FORMS)}")
    found = {name: measure(form, settings, virtual=options.clock == "virtual") for name, form in forms.items()}
    print(table(found))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"clock": options.clock, "settings": vars(options), "frameworks": found}, file, indent=2)


if __name__ == "__main__":
    main()
