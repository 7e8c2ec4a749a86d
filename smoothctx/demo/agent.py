"""The demo's agent: reads a folder chunk by chunk and writes a short note on each, on a real engine.

The same turns run in two modes. In line: the context is rewritten when it reaches the hard limit, and the turn
waits. Lookahead: the rewrite is prepared and preloaded while the agent works, and the turn finds it ready. Time to
first token (TTFT) counts from the start of the turn, whatever the turn had to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from ..codec import OpenAIMessages
from ..engines import EmbeddedEngine
from ..policy import Policy
from ..runtime import Runtime
from ..session import Session
from ..transforms import Summarize
from ..usage import Counters
from .chunks import Chunk
from .inline import InLine

MODES = ("inline", "lookahead")
SYSTEM = "You read source files part by part and write a short note on each part."
SUMMARISE = "Summarise the conversation above: what was read, what was noted, what is open. Write only the summary."
ASK = "Part of {file}:\n\n{text}\n\nWrite a short note on this part."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run uses; the same in both modes. Sizes in tokens, times in seconds."""

    turns: int = 28
    chunk_tokens: int = 300
    note_tokens: int = 24
    summary_tokens: int = 128
    context_window: int = 4096
    tool_s: float = 1.0

    def policy(self, mode: str, model: Any) -> Policy:
        """The default policy, with the demo's window. In line it starts at the hard limit, so the turn waits."""
        transform = Summarize(model, max_tokens=self.summary_tokens, prompt=SUMMARISE, facts=False, fixed_tokens=True)
        if mode == "inline":
            return Policy(
                transform,
                context_window=self.context_window,
                trigger=("fraction", 0.85),
                hard_limit=("fraction", 0.85),
                max_wait=600.0,
                preload_kv=False,
            )
        return Policy(transform, context_window=self.context_window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn as it was measured. ``cached_tokens`` and ``prompt_tokens`` are the server's own figures."""

    number: int
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int | None
    transform: bool
    how: str
    waited_ms: float
    total_ms: float
    note: str
    happened: tuple[str, ...]


@dataclass(slots=True)
class Run:
    """All turns of one mode."""

    mode: str
    turns: list[Turn] = field(default_factory=list)
    session_s: float = 0.0
    counters: Counters = field(default_factory=Counters)


async def run(
    mode: str, engine: EmbeddedEngine, chunks: Sequence[Chunk], settings: Settings, on_turn: Callable[[Turn], None]
) -> Run:
    """One whole session in one mode."""
    done = Run(mode)
    happened: list[str] = []

    def note(event: Any) -> None:
        if event.name in _SHOWN:
            happened.append(_SHOWN[event.name])

    codec = OpenAIMessages()
    fixed = {"temperature": 0.0, "ignore_eos": True}
    await engine.clear()
    async with Runtime(on_event=note) as runtime:
        if mode == "inline":
            own = {**fixed, "id_slot": 0, "cache_prompt": True}
            session = runtime.session("reader", policy=settings.policy(mode, InLine(engine, own)))
        else:
            own = fixed
            session = runtime.session("reader", policy=settings.policy(mode, engine), engine=engine, request=fixed)
        messages: list[dict[str, Any]] = [codec.system(SYSTEM)]
        started = time.perf_counter()
        for k, chunk in enumerate(chunks):
            await anyio.sleep(settings.tool_s)  # the tool that fetches the next part
            messages.append(codec.user(ASK.format(file=chunk.file, text=chunk.text)))
            reply, turn = await _turn(
                k + 1, engine, session, messages, {**own, **session.request_options()}, settings, happened
            )
            happened.clear()  # what happens from now on is shown with the next turn
            messages.append(reply)
            session.observe(messages)
            done.turns.append(turn)
            on_turn(turn)
        done.session_s = time.perf_counter() - started
        await session.close()
        done.counters = runtime.counters
    return done


async def _turn(
    number: int,
    engine: EmbeddedEngine,
    session: Session,
    messages: list[dict[str, Any]],
    options: Mapping[str, Any],
    settings: Settings,
    happened: Sequence[str],
) -> tuple[dict[str, Any], Turn]:
    codec = OpenAIMessages()
    receipts = len(session.receipts)
    start = time.perf_counter()
    ttft: float | None = None
    view = await session.commit(messages)
    # A commit may have moved the session to the slot where its new view is warm.
    options = {**options, **session.request_options()}
    async with session.foreground() as call:
        async with engine.stream(
            [codec.to_openai(m) for m in view], max_tokens=settings.note_tokens, **options
        ) as stream:
            async for _ in stream:
                if ttft is None:
                    ttft = time.perf_counter() - start
                    call.first_token()
    end = time.perf_counter()
    completion = stream.completion
    assert completion is not None
    new = list(session.receipts)[receipts:]
    usage = {"prompt_tokens": completion.usage.input_tokens, "completion_tokens": completion.usage.output_tokens}
    reply = {"role": "assistant", "content": completion.text, "usage": usage}
    turn = Turn(
        number=number,
        ttft_ms=(ttft if ttft is not None else end - start) * 1000,
        prompt_tokens=completion.usage.input_tokens,
        cached_tokens=completion.usage.cached_tokens,
        transform=bool(new),
        how=new[-1].how if new else "",
        waited_ms=sum(r.waited_s for r in new) * 1000,
        total_ms=(end - start) * 1000,
        note=" ".join(completion.text.split()),
        happened=tuple(dict.fromkeys(happened)),
    )
    return reply, turn


_SHOWN = {
    "lookahead.started": "started",
    "lookahead.ready": "ready",
    "lookahead.committed": "committed",
    "lookahead.promoted": "waited for",
    "lookahead.discarded": "discarded",
    "lookahead.failed": "failed",
    "fallback.applied": "fallback",
    "preload": "preloaded",
}
