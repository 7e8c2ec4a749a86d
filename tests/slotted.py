"""A fake engine with slots, for the tests of what is done with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from helpers import A, H, chat
from smoothctx import Policy, Summarize
from smoothctx.economics import Speed
from smoothctx.engines.binding import Prepared
from smoothctx.engines.preload import Preloader
from smoothctx.engines.slot_table import SlotTable
from smoothctx.engines.slots import SlotBinding
from smoothctx.errors import EngineRefused
from smoothctx.foreground import Foreground
from smoothctx.session import Session
from smoothctx.testing import FakeEngine
from smoothctx.testing.cache import Slot, SlotCache
from smoothctx.testing.engine import EngineCall


class SlottedEngine(FakeEngine):
    """Bound as a llama.cpp server is."""

    def __init__(self, *answers: Any, slots: int, **options: Any) -> None:
        super().__init__(*answers, slots=slots, block_tokens=1, **options)
        self.table = SlotTable(slots)

    async def post_json(self, path: str, body: Any) -> Any:
        """It copies no slots."""
        raise EngineRefused("no", status=501)

    @asynccontextmanager
    async def stream(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> AsyncGenerator[Any]:
        """As the client does, it lets a binding prepare a summariser's call."""
        prepare = options.pop("lookahead", None)
        async with nullcontext(Prepared({})) if prepare is None else prepare(messages, options) as own:
            async with super().stream(messages, max_tokens=max_tokens, **options, **own.options) as stream:
                yield stream
            if stream.completion is not None:
                own.seen(stream.completion.usage)

    def bind(self, session_id: str) -> Any:
        """With slots of its own."""
        preloader = Preloader(clock=lambda: asyncio.get_running_loop().time(), strategy="timed")
        return SlotBinding(self, self.table, session_id, preloader=preloader)  # type: ignore[arg-type]

    def free(self) -> int:
        """Slots that nobody has; they stay free."""
        taken = []
        while (slot := self.table.take()) is not None:
            taken.append(slot)
        for slot in taken:
            self.table.give(slot)
        return len(taken)


class SlidingSlot(Slot):
    """Some layers attend to the last ``WINDOW`` tokens only. A copy holds of them what lies within that window, so a
    prompt that leaves it before its end is evaluated anew; evaluated in its place, everything stays."""

    WINDOW = 40
    start = 0
    full = True  # ``--swa-full``

    def keep(self, tokens: Any) -> None:
        """Without ``--swa-full`` the slot itself holds no more than a copy."""
        super().keep(tokens)
        if not self.full:
            self.start = max(0, len(self.tokens) - self.WINDOW)

    def open(self, tokens: Any) -> int:
        """Nothing is of use where the window of the last common token is not there."""
        if self.start and max(0, self.common(tokens) - self.WINDOW) < self.start:
            self.tokens, self.start = [], 0
        return super().open(tokens)


class SlidingEngine(SlottedEngine):
    """A llama.cpp server with a sliding-window model, ``--swa-full``; it copies slots."""

    def __init__(self, *answers: Any, slots: int = 4, **options: Any) -> None:
        super().__init__(*answers, slots=slots, **options)
        assert isinstance(self._cache, SlotCache)
        self.lanes = self._cache.slots = [SlidingSlot(1) for _ in range(slots)]
        self.copies: list[str] = []
        self._files: dict[str, tuple[list[Any], int]] = {}

    async def post_json(self, path: str, body: Any) -> Any:
        """Save or restore a slot."""
        self.copies.append(path)
        await asyncio.sleep(0.01)
        number, action = path.removeprefix("/slots/").split("?action=")
        lane = self.lanes[int(number)]
        assert isinstance(lane, SlidingSlot)
        if action == "save":
            start = max(lane.start, len(lane.tokens) - lane.WINDOW)
            self._files[body["filename"]] = (list(lane.tokens), start)
        else:
            tokens, lane.start = self._files[body["filename"]]
            lane.tokens = list(tokens)
        return {}


def sliding(*answers: str, prefill: float = 5000.0, slots: int = 4) -> SlidingEngine:
    """An engine that writes summaries."""
    return SlidingEngine(*(answers or ["A summary."] * 50), speed=Speed(prefill, 100.0), slots=slots)


def summarizing(engine: Any, *, max_tokens: int = 60, layout: str = "aligned", **options: Any) -> Policy:
    """Its summaries are written by the agent's own engine."""
    options.setdefault("context_window", 8000)
    transform = Summarize(engine, keep=("messages", 4), facts=False, max_tokens=max_tokens, layout=layout)
    return Policy(transform, **options)


async def beside(engine: SlottedEngine) -> tuple[SlotBinding, list[Any], Mapping[str, Any]]:
    """A binding whose agent has answered on an engine that is idle now, its view, and options of a summary's call."""
    foreground = Foreground(asyncio.get_running_loop().time)
    binding = engine.bind("s")
    view = [*chat(20, size=50), H("q"), A("a")]
    await engine.prefill(view[:-1], **binding.request_options())
    options = binding.transform_options(foreground, lambda: False, turn=lambda: False, view=lambda: view)
    return binding, view, options


async def ask(session: Session, engine: FakeEngine, messages: list[Any]) -> EngineCall:
    """One turn of an agent, up to its reply; returns its call."""
    view = await session.commit(messages)
    async with session.foreground() as call:
        await engine.complete(view, max_tokens=1, **session.request, **session.request_options())
        call.first_token()
    return engine.calls[-1]
