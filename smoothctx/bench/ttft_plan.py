"""What ``bench ttft`` measures: settings, cells and their order, and the texts that each session reads."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..demo.agent import ASK
from ..demo.chunks import Chunk, Count, chunks
from ..errors import ConfigurationError, SmoothctxError

STRATEGIES = ("summarise", "keep-recent", "offload", "isolate")
#: the part with the engine saturated by foreground work: not a strategy, planned like one
SATURATED = "saturated"
MODES = ("inline", "lookahead")
SATURATED_MODES = ("off", "lookahead")
#: sessions of each strategy at each concurrency: at least 20 turns with a rewrite for every one of them
DEFAULT_PLAN: Mapping[str, Mapping[int, int]] = {
    "summarise": {1: 5, 2: 5},
    "keep-recent": {1: 4},
    "offload": {1: 4},
    "isolate": {1: 3},
}
#: turns with a long tool output: the 9th, the 18th, the 27th
LONG_EVERY = 9
#: share of the time between two turns that the whole work of ``concurrency`` sessions is to take
LOADS: Mapping[int, float] = {1: 0.7, 2: 0.85}
HIGH_LOAD = 1.2
#: share of the prefill rate at which idle time warms a view, by growing prefixes (vLLM: 0.26 to 0.44 were measured) and
#: by one request that gives way
GROWING, ABORT = 0.4, 0.9
#: turns that come while a view is warmed, and are to be warmed with it
_MEANWHILE = 2
#: turns that a sub-agent is handed
_HANDED = 2
#: tokens of text without which a turn is nothing but the question around it, and of a turn with such a question
_LEAST_TEXT, _LEAST_TURN = 8, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every cell of one file has in common. Sizes in tokens, times in seconds.

    ``tool_s``: mean time between two turns; ``None``: by calibration, see ``tool_time``. ``tool_spread``: how far one
    may be from it, as a share (see ``pauses``). ``isolate_every``: turns between two hand-overs to a sub-agent.
    ``saturated_turn_tokens`` and ``saturated_rounds``: the size of a turn, and the conversations that follow each other
    in one cell, where the engine is saturated.
    """

    turns: int = 28
    turn_tokens: int = 625
    reply_tokens: int = 24
    summary_tokens: int = 256
    window: int = 6144
    long: int = 2
    tool_s: float | None = None
    tool_spread: float = 0.25
    isolate_every: int = 4
    saturated_turn_tokens: int = 96
    saturated_rounds: int = 4
    preload: str | None = None

    def check(self) -> None:
        """Raises ``ConfigurationError`` for what cannot be measured."""
        for name in ("turns", "turn_tokens", "reply_tokens", "summary_tokens", "long", "isolate_every"):
            least = {"turn_tokens": _LEAST_TURN, "summary_tokens": 1, "long": 1}.get(name, 2)
            if getattr(self, name) < least:
                raise ConfigurationError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {least}")
        if self.tool_s is not None and not 0 <= self.tool_s < 3600:
            raise ConfigurationError(f"--tool {self.tool_s}: expected seconds from 0 to 3600")
        longest = self.long * self.turn_tokens + 2 * self.reply_tokens + self.summary_tokens
        if self.window * 0.45 < longest:
            raise ConfigurationError(
                f"--window {self.window}: too small for turns of {self.turn_tokens} tokens, {self.long} times as many "
                f"in the long ones; expected at least {int(longest / 0.45)}"
            )

    def long_turn(self, number: int) -> bool:
        """Does this turn (from 1) bring a long tool output?"""
        return number % LONG_EVERY == 0


def window(strategy: str, settings: Settings) -> int:
    """The policy's window. Stubs stay in the view for good: with the usual one there would soon be no room beside."""
    return settings.window * 7 // 6 if strategy == "offload" else settings.window


@dataclass(frozen=True, slots=True)
class Cell:
    """``concurrency`` sessions at once, in one mode."""

    strategy: str
    mode: str
    concurrency: int
    batch: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.strategy}/{self.mode}/{self.concurrency}/{self.batch}"


def read_plan(text: str) -> dict[str, dict[int, int]]:
    """``"summarise:1:5,offload:1:3"``: sessions of each strategy at each concurrency.

    Raises:
        ConfigurationError: for anything else.
    """
    plan: dict[str, dict[int, int]] = {}
    for part in text.split(","):
        strategy, _, numbers = part.strip().partition(":")
        given = numbers.split(":")
        if strategy not in (*STRATEGIES, SATURATED) or len(given) != 2 or not all(n.isdecimal() for n in given):
            raise ConfigurationError(
                f"--plan: {part.strip()!r}: expected STRATEGY:CONCURRENCY:SESSIONS, the strategy one of "
                f"{', '.join((*STRATEGIES, SATURATED))}"
            )
        concurrency, sessions = map(int, given)
        if not (1 <= concurrency <= 64 and 1 <= sessions <= 10_000):
            raise ConfigurationError(f"--plan: {part.strip()!r}: expected 1 to 64 at once, and at least 1 session")
        plan.setdefault(strategy, {})[concurrency] = sessions
    return plan


def cells(plan: Mapping[str, Mapping[int, int]]) -> list[Cell]:
    """Every cell in the order of measuring: a batch of everything before the next, the modes turn and turn about.

    The machine's drift meets both modes alike, and what an interrupted run leaves is a whole in small.
    """
    found: list[Cell] = []
    batches = {(s, c): -(-n // c) for s, levels in plan.items() for c, n in levels.items()}
    for batch in range(max(batches.values(), default=0)):
        for (strategy, concurrency), count in batches.items():
            if batch < count:
                modes = SATURATED_MODES if strategy == SATURATED else MODES
                order = modes if batch % 2 == 0 else modes[::-1]
                found += [Cell(strategy, mode, concurrency, batch) for mode in order]
    return found


def tool_time(
    settings: Settings, strategy: str, concurrency: int, prefill: float, decode: float, *, warming: float = GROWING
) -> float:
    """Seconds between two turns, so that ``concurrency`` sessions with all their rewrites load the engine as planned.

    ``prefill`` and ``decode`` are its rates in tokens per second, of one request alone. A view is warmed in idle time,
    at ``warming`` of the prefill rate, and with it the turns that come meanwhile. A sub-agent's opening has one tool
    time.
    """
    if settings.tool_s is not None:
        return settings.tool_s
    turn_tokens = settings.turn_tokens + settings.reply_tokens
    turn = settings.turn_tokens / prefill + settings.reply_tokens / decode
    summary = settings.summary_tokens / decode if strategy == "summarise" else 0.0  # the others ask no model
    warmed = 0.4 * window(strategy, settings) + _MEANWHILE * turn_tokens
    rewrite = summary + warmed / (warming * prefill)
    gained = 0.2 if strategy == "offload" else 0.45  # stubs stay: the next rewrite is due sooner
    every = gained * settings.window / turn_tokens
    period = concurrency * (turn + rewrite / every) / LOADS.get(concurrency, HIGH_LOAD)
    least = 0.5
    if strategy == "isolate":  # the last two turns, one of them a long one; the other sessions' turns come between
        opening = (_HANDED + settings.long - 1) * turn_tokens / (warming * prefill)
        least = (opening + (concurrency - 1) * turn) / (1 - settings.tool_spread)
    return round(max(least, period - turn), 1)


def pauses(settings: Settings, tool_s: float, number: int) -> Iterator[float]:
    """Seconds of tool time before each turn of the session of this number: the same in both modes.

    Tools never take equally long. With equal pauses the turns of sessions that met once, for instance because both
    waited for a batch of the engine, would begin at the same moment ever after, in one mode and not in the other. Two
    pauses after each other have the given mean.
    """
    draw = random.Random(number)
    while True:
        shift = draw.uniform(-settings.tool_spread, settings.tool_spread)
        yield tool_s * (1 + shift)
        yield tool_s * (1 - shift)


async def pool(folder: Path, settings: Settings, count: Count, *, tokens: int | None = None) -> list[Chunk]:
    """The chunks that all sessions read, each from another place on. The frame around a chunk counts as part of it.

    Raises:
        ConfigurationError: a turn has room for nothing but the frame, as this engine counts.
        SmoothctxError: there is not enough readable text.
    """
    size = settings.turn_tokens if tokens is None else tokens
    frame = await count(ASK.format(file="engines/example.py", text="")) + 8
    if size - frame < _LEAST_TEXT:
        raise ConfigurationError(
            f"--turn-tokens {size}: the question of a turn has {frame} of them; expected at least {frame + _LEAST_TEXT}"
        )
    needed = settings.turns + settings.turns // LONG_EVERY * (settings.long - 1)
    found = await chunks(folder, turns=4 * needed, tokens=size - frame, count=count)
    if len(found) < needed:
        raise SmoothctxError(f"--path {folder}: not enough readable text there for {needed} parts of {size} tokens")
    return found


def texts(found: Sequence[Chunk], settings: Settings, number: int) -> Iterator[Chunk]:
    """The text of one turn after the other for the session of this number; what comes later is not seen before."""
    at = number * (settings.turns + 7) % len(found)
    turn = 0
    while True:
        turn += 1
        parts = [found[(at + k) % len(found)] for k in range(settings.long if settings.long_turn(turn) else 1)]
        at += len(parts)
        yield Chunk(parts[0].file, parts[0].part, "".join(p.text for p in parts), sum(p.tokens for p in parts))


def session_name(cell: Cell, line: int) -> str:
    """A name that no session had before, on this server either: its system prompt begins with it."""
    return f"{secrets.token_hex(4)} {cell.key}/{line}"
