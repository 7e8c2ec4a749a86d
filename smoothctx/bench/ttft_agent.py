"""One agent of ``bench ttft``: it works through its texts turn by turn, and every turn is measured."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from ..demo.chunks import Chunk
from ..demo.inline import InLine
from ..errors import HandleNotReady, SmoothctxError, StaleHandle
from ..handle import LookaheadHandle
from ..runtime import Runtime
from ..session import Session
from ..transforms import Isolate
from .ttft_engine import Calibration
from .ttft_plan import Cell, Settings, pauses, texts
from .ttft_strategies import Conversation, isolate, policy, sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn as it was measured. Times as the names say; ``at_s`` is its start in seconds since the cell's.

    ``kind``: ``"turn"``, ``"handover"`` (a sub-agent's first call), ``"parent"`` (a turn of an agent that hands over)
    or ``"opening"`` (the first call on a long history). ``new_tokens`` is what the turn adds, ``history_tokens`` what
    the caller holds before it is rewritten (estimated), both without the answer. ``how`` is that of the receipt.
    ``beside``: a background call ran before its first token. ``prompt_tokens`` and ``cached_tokens`` are the server's.
    """

    number: int
    kind: str
    at_s: float
    ttft_ms: float
    waited_ms: float
    total_ms: float
    gaps_ms: list[float]
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    new_tokens: int
    history_tokens: int
    transform: bool
    how: str
    warm: bool | None
    tokens_before: int | None
    tokens_after: int | None
    beside: bool = False


@dataclass(slots=True)
class Line:
    """What one session did."""

    name: str
    number: int
    wall_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pools:
    """The texts that all sessions read: of a turn's size, and of one where the engine is saturated."""

    turns: Sequence[Chunk]
    small: Sequence[Chunk] = ()


@dataclass(frozen=True, slots=True)
class Bench:
    """What every cell is measured with. ``on_turn`` is told of each turn: cell, session, turn."""

    engine: Any
    settings: Settings
    calibration: Calibration
    clock: Callable[[], float]
    on_turn: Callable[[Cell, str, Turn], None] = lambda cell, name, turn: None


class Agent:
    """One agent in one cell: works through its texts and measures its turns."""

    def __init__(
        self,
        bench: Bench,
        cell: Cell,
        runtime: Runtime,
        line: Line,
        place: int,
        started: float,
        tool_s: float,
    ) -> None:
        self.engine, self.settings, self.clock = bench.engine, bench.settings, bench.clock
        self.bench, self.cell, self.runtime, self.line = bench, cell, runtime, line
        self.place, self.started, self.tool_s = place, started, tool_s
        self.fixed = dict(bench.calibration.options)

    def own(self, slot: int) -> dict[str, Any]:
        """Options of calls without smoothctx's engine binding: a slot of one's own where the server has slots."""
        known = getattr(self.engine, "capabilities", None)
        if known is None or not known.slotted or not 0 <= slot < known.slots:
            return self.fixed
        return {**self.fixed, "id_slot": slot, "cache_prompt": True}

    def _last_slot(self) -> int:
        """For a sub-agent in line: from the end, where no session's own and spare slots are."""
        known = getattr(self.engine, "capabilities", None)
        return (0 if known is None else int(known.slots)) - 1 - self.place

    def session(self, name: str, *, parent: Session | None = None) -> tuple[Session, dict[str, Any]]:
        """A session in this cell's mode, and the constant options of its calls."""
        ahead = self.cell.mode == "lookahead"
        slot = self.place if parent is None else self._last_slot()
        own = self.fixed if ahead else self.own(slot)
        model = self.engine if ahead else InLine(self.engine, own)
        made = policy(self.cell.strategy, self.cell.mode, self.settings, model)
        # The parent of a sub-agent is kept small in the same way in both modes: it is not what is measured.
        joined = ahead or self.cell.strategy == "isolate"
        engine = self.engine if joined and (ahead or parent is None) else None
        options = self.fixed if engine is not None else own
        return self.runtime.session(name, policy=made, parent=parent, engine=engine, request=options), options

    async def work(self, pools: Pools) -> None:
        """The whole session, staggered behind those before it."""
        period = self.tool_s + self.settings.turn_tokens / self.bench.calibration.prefill
        await anyio.sleep(period * self.place / self.cell.concurrency)
        begun = self.clock()
        session, options = self.session(self.line.name)
        talk = Conversation(self.line.name, tools=self.cell.strategy == "offload")
        reading = texts(pools.turns, self.settings, self.line.number)
        pause = pauses(self.settings, self.tool_s, self.line.number)
        ahead, parent = self.cell.mode == "lookahead", self.cell.strategy == "isolate"
        prepared: tuple[list[Any], Any] | None = None
        for number in range(1, self.settings.turns + 1):
            await anyio.sleep(next(pause))  # the tool that fetches the next part
            chunk = next(reading)
            talk.ask(chunk)
            reply, turn = await self.turn(
                number, session, talk.messages, options, kind="parent" if parent else "turn", new_tokens=chunk.tokens
            )
            talk.answer(reply)
            if ahead or parent:  # in line nothing begins before the turn that needs it
                session.observe(talk.messages)
            self.measured(turn)
            if parent and prepared is not None:
                await self.hand_over(number, session, talk.messages, *prepared)
                prepared = None
            elif parent and (number + 1) % self.settings.isolate_every == 0 and number < self.settings.turns:
                part = talk.messages[-4:]  # the last two turns
                prepared = (part, self.prepare(number, session, part, talk.messages))
        self.line.wall_s = self.clock() - begun
        await session.close()

    def measured(self, turn: Turn) -> None:
        """A turn is over."""
        self.line.turns.append(turn)
        self.bench.on_turn(self.cell, self.line.name, turn)

    async def turn(
        self,
        number: int,
        session: Session | None,
        messages: list[Any],
        options: Mapping[str, Any],
        *,
        kind: str,
        new_tokens: int,
        start: float | None = None,
        shown_to: Session | None = None,
    ) -> tuple[dict[str, Any], Turn]:
        """One turn on the engine; without a session it is a plain call. ``start``: when it began, if not now.

        ``shown_to``: the session that sees the call, if not its own: whose background work gives way to it.
        """
        receipts = [] if session is None else list(session.receipts)
        start = self.clock() if start is None else start
        view = messages if session is None else await session.commit(messages)
        committed = self.clock()
        if session is not None:  # a commit may have moved it to the slot where its new view is warm
            options = {**options, **session.request_options()}
        arrivals: list[float] = []
        async with _call_of(session if shown_to is None else shown_to) as foreground:

            def on_token() -> None:  # also of reasoning, which is no text
                arrivals.append(self.clock())
                if foreground is not None and len(arrivals) == 1:
                    foreground.first_token()

            async with self.engine.turn(sent(view), max_tokens=self.settings.reply_tokens, **options) as stream:
                stream.on_token = on_token
                completion = await stream.drain()
            end = self.clock()
            if foreground is not None:
                foreground.report(completion.usage)
        new = [] if session is None else list(session.receipts)[len(receipts) :]
        usage = {"prompt_tokens": completion.usage.input_tokens, "completion_tokens": completion.usage.output_tokens}
        turn = Turn(
            number=number,
            kind=kind,
            at_s=round(start - self.started, 4),
            ttft_ms=round(((arrivals[0] if arrivals else end) - start) * 1000, 2),
            waited_ms=round((committed - start) * 1000, 2),
            total_ms=round((end - start) * 1000, 2),
            gaps_ms=[round((b - a) * 1000, 1) for a, b in zip(arrivals, arrivals[1:], strict=False)],
            prompt_tokens=completion.usage.input_tokens,
            cached_tokens=completion.usage.cached_tokens,
            output_tokens=completion.usage.output_tokens,
            new_tokens=new_tokens,
            history_tokens=sum(len(str(m.get("content") or "")) for m in messages) // 4,
            transform=bool(new) or kind == "handover",
            how=new[-1].how if new else "",
            warm=new[-1].warm if new else None,
            tokens_before=new[-1].tokens_before if new else None,
            tokens_after=new[-1].tokens_after if new else None,
        )
        return {"role": "assistant", "content": completion.text, "usage": usage}, turn

    # -- a sub-agent -------------------------------------------------------------------------------------------------

    def _isolate(self, number: int, part: Sequence[Any]) -> Isolate:
        return isolate(f"{self.line.name}/{number}", part)

    def prepare(
        self, number: int, session: Session, part: Sequence[Any], messages: list[Any]
    ) -> LookaheadHandle | None:
        """This will be handed over a turn later: with lookahead it is made and warmed from now on."""
        if self.cell.mode != "lookahead":
            return None
        return session.schedule_transform(self._isolate(number, part), messages, preload_kv=True)

    async def hand_over(
        self, number: int, session: Session, messages: list[Any], part: Sequence[Any], handle: LookaheadHandle | None
    ) -> None:
        """A sub-agent's first call, on what was there a turn ago; its time to first token is what is measured."""
        start = self.clock()
        there = handle is not None and handle.artifact is not None  # nothing has to be waited for
        opening = await _opening(handle, messages) if handle is not None else None
        how = "inline" if handle is None else "ready" if there and opening is not None else "late"
        if opening is None:
            opening = await _opening(
                session.schedule_transform(self._isolate(number - 1, part), messages, preload_kv=False), messages
            )
        if opening is None:
            raise SmoothctxError(f"{self.cell.key}: the opening of a sub-agent could not be made")
        child, options = self.session(f"{self.line.name}/sub-{number}", parent=session)
        new = len(str(opening[-1].get("content"))) // 4
        seer = child if handle is not None else session  # in line the child knows of no engine, its parent does
        _, turn = await self.turn(
            number, child, opening, options, kind="handover", new_tokens=new, start=start, shown_to=seer
        )
        self.measured(replace(turn, how=how))
        await child.close()


async def _opening(handle: LookaheadHandle, messages: list[Any]) -> list[Any] | None:
    """What the handle has made of these messages; ``None`` when it is of no use."""
    try:
        await handle.wait_result(60.0)
        return handle.commit(messages)
    except (StaleHandle, HandleNotReady, TimeoutError):
        return None


@asynccontextmanager
async def _call_of(session: Session | None) -> AsyncGenerator[Any]:
    async with nullcontext(None) if session is None else session.foreground() as call:
        yield call
