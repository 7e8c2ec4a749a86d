"""Asking: the doctor's prompts, and its calls. What a server wants otherwise, or later, does not end an examination."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engines import Capabilities, OpenAIEngine
from ..engines.wire import refused_option
from ..errors import EngineRefused
from ..patience import patiently

#: parts of the prompt that stay in front of the replaced middle, and that are replaced
HEAD, MIDDLE = 0.4, 0.3
#: tokens of an answer, and where a reasoning model is refused as few: it is an error there if no answer came
ANSWER, REASONED = 1, 512
_WORDS = (
    "router cache pool worker lock retry queue shard index token batch prefix session replica schema parser branch "
    "commit buffer socket thread kernel packet cursor ledger mirror signal vector window anchor beacon canvas"
).split()


@dataclass(frozen=True, slots=True)
class Call:
    """One timed call. ``tries``: how often it was sent; only the last one is timed."""

    ttft_s: float
    tokens: int
    cached: int | None
    tries: int = 1


class Asking:
    """Prompts that no cache holds, and calls with them: as short and as certain as the server lets them be."""

    def __init__(self, engine: OpenAIEngine, known: Capabilities, say: Callable[[str], object]) -> None:
        self._engine = engine
        self._known = known
        self._say = say
        self._per_token = 4.0  # characters
        self._count = 0
        self._run = secrets.token_hex(4)  # no prompt of an earlier run is cached
        self._reports = False
        self._answer = ANSWER
        self._sampling: dict[str, Any] = {"temperature": 0}

    def _text(self, tokens: int) -> str:
        """A text of about so many tokens that no other starts like."""
        self._count += 1
        size = round(tokens * self._per_token)
        parts = [f"Report {self._run}-{self._count}."]
        have, k = len(parts[0]), self._count
        while have < size:
            k = (k * 1103515245 + 12345) % 2**31
            parts.append(_WORDS[k // 65536 % len(_WORDS)])
            have += len(parts[-1]) + 1
        return " ".join(parts)

    def _replaced(self, text: str) -> str:
        """The text with another middle: what a rewrite does."""
        start, end = round(len(text) * HEAD), round(len(text) * (HEAD + MIDDLE))
        return text[:start] + f" [summary {self._run}] " + text[end:]

    def _slot(self, number: int) -> dict[str, Any]:
        """The last slots of a llama.cpp server: 0 is the last one."""
        count = self._known.slots
        return {"id_slot": count - 1 - number, "cache_prompt": True} if count > number else {}

    async def _ask(self, text: str, *, slot: int = 0) -> Call:
        messages = [{"role": "user", "content": text}]
        options = {**self._slot(slot), **self._engine.priority_options("foreground")}

        async def call() -> Any:
            return await self._engine.complete(messages, max_tokens=self._answer, **self._sampling, **options)

        while True:
            try:
                done, tries = await patiently(call, self._say)
                break
            except EngineRefused as refused:
                if not self._adapted(refused):
                    raise
        told = done.usage.cached_tokens is not None and done.usage.input_tokens > 0
        self._reports = self._reports or told
        ttft = done.ttft_s if done.ttft_s is not None else done.total_s
        return Call(ttft, done.usage.input_tokens, done.usage.cached_tokens, tries)

    def _adapted(self, refused: EngineRefused) -> bool:
        """Is there another way to ask, which the server may take?"""
        if (name := refused_option(refused, self._sampling)) is not None:
            del self._sampling[name]
            self._say(f"the server refuses {name}: it is left out")
        elif self._answer < REASONED and refused_option(refused, ("max_tokens", "max_completion_tokens")):
            self._answer = REASONED
            self._say(f"the server refuses answers of {ANSWER} token: of up to {REASONED} from now on")
        else:
            return False
        return True
