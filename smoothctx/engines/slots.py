"""Slots: a llama.cpp server's KV caches, handed to sessions. One holds what the agent sends; a spare one works ahead.

The summariser extends the agent's own cache: its slot is copied to the spare one, so it neither waits for the agent's
slot nor evicts it (see ``aligned``). Then the new view is preloaded there, and the commit makes the agent's next call
go there. While that view waits for its commit, another summariser of the session gets a slot beside it. A sub-agent's
opening is warmed in a slot of its own, which its session takes over when it begins.

The server stops a request when its connection closes (it notices within about a second, between two batches) and
keeps what it has evaluated. So by default a preload begins with one long request, of what is evaluated before the next
turn is expected. One that is aborted goes on after the turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError
from ..foreground import Foreground
from ..usage import Usage
from ..work import MAX_DEFER_S
from .aligned import Aligned, Desk
from .binding import View
from .preload import Preloader, PreloadReport, Warmth
from .slot_table import Offer, SlotTable

if TYPE_CHECKING:
    from .binding import EngineBinding
    from .client import OpenAIEngine


class SlotBinding:
    """One session's slots: the agent's, and a spare one while a lookahead is under way or likely. Thread-safe.

    Once closed it takes none any more.
    """

    def __init__(
        self, engine: OpenAIEngine, table: SlotTable, session_id: str, *, preloader: Preloader, begun: bool = True
    ) -> None:
        self._engine = engine
        self.table = table
        self._id = session_id
        self._counted = begun  # among the sessions that are open
        table.opened(int(begun))
        self._agent = table.take() if begun else None
        self._offer: Offer | None = None  # of a warm slot that waits for its agent
        self._spare: int | None = None
        #: the spare slot holds what the agent's own begins with: a summariser that continues it has written there
        self.aligned = False
        #: the agent works in a copy of its slot, of which nothing but its end is certain to be of use
        self.away = False
        self._left: int | None = None  # the slot that it left, while that holds everything
        self._held: Warmth | None = None  # of what was sent to the spare slot, in part at least
        self._desk: Desk | None = None
        self._closed = False
        self._preloader = preloader
        self._lock = threading.RLock()

    @property
    def rate(self) -> float | None:
        """The measured prefill rate, tokens per second."""
        return self._preloader.rate

    def request_options(self) -> Mapping[str, Any]:
        """The agent's slot; a session that found none when it was opened takes one as soon as one is free."""
        with self._lock:
            if self._agent is None and self._counted:
                self._agent = self.table.take()
            agent = self._agent
        return {} if agent is None else {"id_slot": agent, "cache_prompt": True}

    def transform_options(
        self,
        foreground: Foreground,
        urgent: Callable[[], bool],
        *,
        turn: Callable[[], bool] | None = None,
        wait_s: float = MAX_DEFER_S,
        view: View = tuple,
        spent: Callable[[Usage], object] = lambda usage: None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Mapping[str, Any]:
        """Run the summariser on what the agent's slot holds (``engine.stream`` understands it); see ``Aligned``."""
        aligned = Aligned(
            self,
            self._engine,
            self._preloader,
            foreground=foreground,
            urgent=urgent,
            turn=turn if turn is not None else lambda: foreground.busy,
            view=view,
            spent=spent,
            wanted=wanted,
            wait_s=wait_s,
        )
        return {"lookahead": aligned.prepare}

    @property
    def agent(self) -> int | None:
        """The slot of the agent."""
        return self._agent

    def at(self, desk: Desk) -> bool:
        """Is that still where the session's summarisers write?"""
        return self._agent is not None and self._desk is desk

    def change_places(self, desk: Desk, *, unless: Callable[[], bool]) -> bool:
        """The agent goes on in the desk's slot, a copy of its own, which is where summarisers write from now on.

        ``unless`` a turn of the session is in flight: that one is where it was.
        """
        with self._lock:
            if not self.at(desk) or self._agent is None or unless():
                return False
            self._left = self._agent
            self._agent, desk.slot = desk.slot, self._agent
            self.away = True
            return True

    def sit(self) -> Desk | None:
        """A place to write: the spare slot, but for one that holds a view; then one beside it."""
        with self._lock:
            if self._agent is None:
                return None
            if self._desk is None:
                slot = None if self._holds else self._take_spare()
                if slot is not None:
                    self._empty()
                elif self._holds:
                    slot = self.table.take()
                    if slot is None:  # better warm the view again than put an agent's own slot at risk
                        slot, self._left = self._spare, None
                        self._empty()
                        self._drop()
                if slot is None:
                    return None
                self._desk = Desk(slot, whole=slot == self._left, used=slot == self._left)
            self._desk.writers += 1
            return self._desk

    def rise(self, desk: Desk, *, keep: bool) -> None:
        """The last one leaves the slot for the view that comes of it; to ``keep`` it means that one may."""
        with self._lock:
            desk.writers -= 1
            if desk.writers:
                return
            mine, self._desk = self._desk is desk, None if self._desk is desk else self._desk
            if mine and keep and self._spare is None:
                self._spare, self.aligned = desk.slot, True
            else:
                self._give(desk.slot)

    async def preload(
        self,
        view: Callable[[], Sequence[Mapping[str, Any]]],
        *,
        request: Mapping[str, Any],
        foreground: Foreground,
        needed: Callable[[], bool],
        hurried: Callable[[float | None], bool],
        may: Callable[[], bool] = lambda: True,
        warmth: Warmth | None = None,
        quiet: Callable[[], float | None] = lambda: None,
    ) -> PreloadReport:
        """Evaluate the view in the spare slot, in idle time; beside the foreground's decode when time is short.

        What another view has there is lost; its own preload ends then.
        """
        own = Warmth() if warmth is None else warmth
        if not needed() or (self._take_spare() is None and self._desk is None):
            return PreloadReport(complete=False)
        sent = False

        def wanted() -> bool:
            return not self._closed and (not sent or self._held is own) and needed()

        async def send(messages: Sequence[Mapping[str, Any]]) -> Any:
            nonlocal sent
            with self._lock:
                spare = self._take_spare()
                if spare is None:
                    raise ClosedError(f"the slots of session {self._id!r} went back")
                if self._held is not own:
                    self._drop()
                    self._held = own
                sent = True
            return await self._engine.prefill(messages, **{**request, "id_slot": spare, "cache_prompt": True})

        return await self._preloader.run(
            send,
            view,
            foreground=foreground,
            needed=wanted,
            hurried=lambda rate: hurried(rate or self._engine.rates.prefill),
            keeps=True,
            may=lambda: may() and self._take_spare() is not None,
            warmth=own,
            known_rate=self._engine.rates.prefill,
            quiet=quiet,
        )

    @property
    def _holds(self) -> bool:
        """Does the spare slot hold (part of) a view that may still be committed?"""
        return self._spare is not None and self._held is not None and self._held.begun

    def committed(self, warm: bool) -> None:
        """The agent moves to the slot that was preloaded; its old one becomes the spare.

        From a copy it goes back to its own slot in any case: with a sliding window the copy is of no use for a view
        that was rewritten.
        """
        with self._lock:
            back = self._spare is not None and self._spare == self._left
            if (self._holds or back) and self._agent is not None:
                self._agent, self._spare = self._spare, self._agent
            elif self._holds:
                self._agent, self._spare = self._spare, None
            self._held, self._left, self.away = None, None, False
            self._give_spare()

    def discarded(self) -> None:
        """What the spare slot holds is of no use."""
        with self._lock:
            self._give_spare()
            self._desk = None  # its slot goes back when the last one leaves it

    def opening(self) -> SlotBinding:
        """Of a sub-agent that has not begun: it has no slot but the one in which its opening is warmed."""
        return SlotBinding(self._engine, self.table, self._id, preloader=self._preloader, begun=False)

    def offer(self) -> None:
        """Nobody may ever send what is warm here: until it is taken over, others may have the slot."""
        with self._lock:
            if self._spare is not None:
                before, self._offer = self._offer, self.table.offer(self._spare)
                self._empty()
                if before is not None:
                    self.table.give(self.table.reclaim(before))

    def take_over(self, opening: EngineBinding) -> None:
        """The agent goes to the slot in which its opening was warmed, and gives its own back."""
        warm = opening.handed(self.table) if isinstance(opening, SlotBinding) else None
        with self._lock:
            if warm is not None and self._closed:
                self.table.give(warm)
            elif warm is not None:
                self.table.give(self._agent)
                self._agent = warm

    def handed(self, table: SlotTable) -> int | None:
        """Hand the slot of an opening over to its agent on the same server; ``None`` where it has none any more."""
        if table is not self.table:
            return None
        with self._lock:
            slot, offer = self._spare, self._offer
            self._offer = None
            self._empty()
        offered = None if offer is None else table.reclaim(offer)
        if offered is None:
            return slot
        table.give(slot)  # taken after the offer, for somebody else who waits for the same
        return offered

    def close(self) -> None:
        """The slots go back, and none is taken any more."""
        with self._lock:
            self._closed = True
            self.table.opened(-int(self._counted))
            self._counted = False
            self.table.give(self._agent)
            self._agent = None
            if self._offer is not None:
                self.table.give(self.table.reclaim(self._offer))
            self._offer = None
            self.discarded()

    def _take_spare(self) -> int | None:
        with self._lock:
            if self._spare is None and not self._closed:
                self._spare = self.table.take()
            return self._spare

    def _give(self, slot: int | None) -> None:
        """Others may have it."""
        if slot == self._left:
            self._left = None
        self.table.give(slot)

    def _give_spare(self) -> None:
        self._drop()
        self._give(self._spare)
        self._empty()

    def _empty(self) -> None:
        """There is no spare slot any more."""
        self._spare, self.aligned = None, False

    def _drop(self) -> None:
        """What the spare slot holds is lost."""
        if self._held is not None:
            self._held.drop()
        self._held = None
