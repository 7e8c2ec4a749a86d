"""Slots: a llama.cpp server's KV caches, handed to sessions. One holds what the agent sends; a spare one works ahead.

The summariser extends the agent's own cache: its slot is copied to the spare one (save and restore, measured at
34 ms for 2,500 tokens), so it neither waits for the agent's slot nor evicts it. Then the new view is preloaded
into the spare slot, and the commit makes the agent's next call go there. A sub-agent's opening is warmed in a slot of
its own, which its session takes over when it begins.

The server stops a request when its connection closes (it notices within about a second, between two batches) and
keeps what it has evaluated. So by default a preload is one request, aborted when a turn begins and sent again after it.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import EngineError
from ..foreground import Foreground
from .preload import Preloader, PreloadReport

if TYPE_CHECKING:
    from .binding import EngineBinding
    from .client import OpenAIEngine


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A slot that whoever needs one may have."""

    slot: int


class SlotTable:
    """Which slots of a server are whose. A session that gets none is served wherever the server likes. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._offers: list[Offer] = []
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """A free slot, else the one that was offered first; ``None`` when all are taken."""
        with self._lock:
            if self._free:
                return self._free.pop(0)
            return self._offers.pop(0).slot if self._offers else None

    def give(self, slot: int | None) -> None:
        """Hand a slot back."""
        with self._lock:
            if slot is not None and slot not in self._free:
                self._free.append(slot)
                self._free.sort()

    def offer(self, slot: int) -> Offer:
        """Whoever needs a slot when none is free may have this one, until it is reclaimed."""
        offer = Offer(slot)
        with self._lock:
            self._offers.append(offer)
        return offer

    def reclaim(self, offer: Offer) -> int | None:
        """Take back a slot that was offered; ``None`` when another has it."""
        with self._lock:
            if offer not in self._offers:
                return None
            self._offers.remove(offer)
            return offer.slot


class SlotBinding:
    """One session's slots: the agent's, and a spare one while a lookahead is under way or likely."""

    def __init__(
        self, engine: OpenAIEngine, table: SlotTable, session_id: str, *, preloader: Preloader, begun: bool = True
    ) -> None:
        self._engine = engine
        self._table = table
        self._id = session_id
        self._agent = table.take() if begun else None
        self._offer: Offer | None = None  # of a warm slot that waits for its agent
        self._spare: int | None = None
        self._preloaded = False  # the spare slot holds (part of) the view of the present lookahead
        self._preloader = preloader

    @property
    def rate(self) -> float | None:
        """The measured prefill rate, tokens per second."""
        return self._preloader.rate

    def request_options(self) -> Mapping[str, Any]:
        """The agent's slot."""
        return {} if self._agent is None else {"id_slot": self._agent, "cache_prompt": True}

    def transform_options(self, foreground: Foreground, urgent: Callable[[], bool]) -> Mapping[str, Any]:
        """Run the summariser in the spare slot, on a copy of the agent's cache (``engine.stream`` understands it)."""
        return {"lookahead": lambda: self._aligned(foreground, urgent)}

    @asynccontextmanager
    async def _aligned(self, foreground: Foreground, urgent: Callable[[], bool]) -> AsyncGenerator[Mapping[str, Any]]:
        spare = self._take_spare()
        if spare is None or self._agent is None:
            yield {}
            return
        await foreground.wait_until(lambda: not foreground.busy or urgent())
        self._preloaded = False
        file = {"filename": f"to-slot-{spare}.bin"}  # overwritten by the next copy: no more files than slots
        try:
            await self._engine.post_json(f"/slots/{self._agent}?action=save", file)
            await self._engine.post_json(f"/slots/{spare}?action=restore", file)
        except EngineError:
            pass  # without the copy the prompt is evaluated anew: slower, never wrong
        yield {"id_slot": spare, "cache_prompt": True}

    async def preload(
        self,
        view: Callable[[], Sequence[Mapping[str, Any]]],
        *,
        request: Mapping[str, Any],
        foreground: Foreground,
        needed: Callable[[], bool],
        hurried: Callable[[float | None], bool],
    ) -> PreloadReport:
        """Evaluate the view in the spare slot, in idle time; beside the foreground's decode when time is short."""
        spare = self._take_spare()
        if spare is None:
            return PreloadReport(complete=False)

        async def send(messages: Sequence[Mapping[str, Any]]) -> Any:
            self._preloaded = True
            return await self._engine.prefill(messages, **{**request, "id_slot": spare, "cache_prompt": True})

        return await self._preloader.run(
            send,
            view,
            foreground=foreground,
            needed=needed,
            hurried=lambda rate: hurried(rate or self._engine.rates.prefill),
            keeps=True,
        )

    def committed(self, warm: bool) -> None:
        """The agent moves to the slot that was preloaded; its old one becomes the spare."""
        if self._preloaded and self._spare is not None:
            self._agent, self._spare = self._spare, self._agent
        self._preloaded = False
        self._give_spare()

    def discarded(self) -> None:
        """What the spare slot holds is of no use."""
        self._preloaded = False
        self._give_spare()

    def opening(self) -> SlotBinding:
        """Of a sub-agent that has not begun: it has no slot but the one in which its opening is warmed."""
        return SlotBinding(self._engine, self._table, self._id, preloader=self._preloader, begun=False)

    def offer(self) -> None:
        """Nobody may ever send what is warm here: until it is taken over, others may have the slot."""
        if self._spare is not None:
            self._offer, self._spare = self._table.offer(self._spare), None

    def take_over(self, opening: EngineBinding) -> None:
        """The agent goes to the slot in which its opening was warmed, and gives its own back."""
        warm = opening.handed(self._table) if isinstance(opening, SlotBinding) else None
        if warm is not None:
            self._table.give(self._agent)
            self._agent = warm

    def handed(self, table: SlotTable) -> int | None:
        """Hand the slot of an opening over to its agent on the same server; ``None`` where it has none any more."""
        if table is not self._table:
            return None
        slot, self._spare = self._spare, None
        offer, self._offer = self._offer, None
        return slot if offer is None else table.reclaim(offer)

    def close(self) -> None:
        """The slots go back."""
        self._table.give(self._agent)
        self._agent = None
        if self._offer is not None:
            self._table.give(self._table.reclaim(self._offer))
        self._offer = None
        self._give_spare()

    def _take_spare(self) -> int | None:
        if self._spare is None:
            self._spare = self._table.take()
        return self._spare

    def _give_spare(self) -> None:
        self._table.give(self._spare)
        self._spare = None
