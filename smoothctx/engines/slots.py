"""Slots: a llama.cpp server's KV caches, handed to sessions. One holds what the agent sends; a spare one works ahead.

The summariser extends the agent's own cache: its slot is copied to the spare one (save and restore, measured at
34 ms for 2,500 tokens), so it neither waits for the agent's slot nor evicts it. Then the new view is preloaded
into the spare slot, and the commit makes the agent's next call go there. While that view waits for its commit, another
summariser of the session gets a slot beside it. A sub-agent's opening is warmed in a slot of its own, which its session
takes over when it begins.

Of layers with a sliding window a copy holds what lies within it. So with such models a prompt that leaves the agent's
long before its end is evaluated anew. That is noticed, and done as a preload: llama.cpp evaluates prompts one after the
other, and a turn behind a long one would wait for all of it.

The server stops a request when its connection closes (it notices within about a second, between two batches) and
keeps what it has evaluated. So by default a preload is one request, aborted when a turn begins and sent again after it.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ..errors import ClosedError, EngineError
from ..foreground import Foreground
from ..usage import Usage
from ..work import MAX_DEFER_S
from .binding import Prepared
from .preload import Preloader, PreloadReport, Warmth
from .slot_table import Offer, SlotTable

if TYPE_CHECKING:
    from .binding import EngineBinding
    from .client import OpenAIEngine


#: seconds that a summariser waits for a moment without any turn on the engine
GAP_WAIT_S = 5.0


@dataclass(slots=True, eq=False)
class _Desk:
    """A slot in which summarisers of one session write."""

    slot: int
    writers: int = 0
    copied: bool = False


class SlotBinding:
    """One session's slots: the agent's, and a spare one while a lookahead is under way or likely. Thread-safe.

    Once closed it takes none any more.
    """

    def __init__(
        self, engine: OpenAIEngine, table: SlotTable, session_id: str, *, preloader: Preloader, begun: bool = True
    ) -> None:
        self._engine = engine
        self._table = table
        self._id = session_id
        self._counted = begun  # among the sessions that are open
        table.opened(int(begun))
        self._agent = table.take() if begun else None
        self._offer: Offer | None = None  # of a warm slot that waits for its agent
        self._spare: int | None = None
        #: the spare slot holds what the agent's own begins with: a summariser that continues it has written there
        self.aligned = False
        self._held: Warmth | None = None  # of what was sent to the spare slot, in part at least
        self._desk: _Desk | None = None
        self._closed = False
        self._preloader = preloader
        self._lock = threading.RLock()

    @property
    def rate(self) -> float | None:
        """The measured prefill rate, tokens per second."""
        return self._preloader.rate

    def request_options(self) -> Mapping[str, Any]:
        """The agent's slot."""
        agent = self._agent
        return {} if agent is None else {"id_slot": agent, "cache_prompt": True}

    def transform_options(
        self,
        foreground: Foreground,
        urgent: Callable[[], bool],
        *,
        turn: Callable[[], bool] | None = None,
        wait_s: float = MAX_DEFER_S,
    ) -> Mapping[str, Any]:
        """Run the summariser beside the agent's slot, on a copy of its cache (``engine.stream`` understands it).

        It waits a little for a moment without any turn, and for the end of the session's own ``turn``, whose slot is
        to be copied; ``wait_s`` seconds at most.
        """
        own = turn if turn is not None else lambda: foreground.busy
        return {"lookahead": partial(self._aligned, foreground, urgent, own, wait_s)}

    @asynccontextmanager
    async def _aligned(
        self,
        foreground: Foreground,
        urgent: Callable[[], bool],
        turn: Callable[[], bool],
        wait_s: float,
        messages: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
    ) -> AsyncGenerator[Prepared]:
        desk = self._sit()
        if desk is None:
            yield Prepared({})
            return
        try:
            own: dict[str, Any] = {"id_slot": desk.slot, "cache_prompt": True}
            copied, warmth = False, Warmth()
            evaluated: int | None = 0
            with anyio.move_on_after(wait_s):
                with anyio.move_on_after(GAP_WAIT_S):
                    await foreground.wait_until(lambda: not foreground.busy or urgent())
                await foreground.wait_until(lambda: not turn() or urgent())
                copied = await self._copy(desk)
                if not (copied and self._table.copies_keep):
                    evaluated = await self._evaluate(
                        messages,
                        {**request, **own},
                        foreground=foreground,
                        needed=lambda: self._at(desk) and not urgent(),
                        copied=copied,
                        warmth=warmth,
                    )
            if not self._at(desk):  # the slots went back meanwhile
                yield Prepared({})
            elif warmth.begun:
                yield Prepared(own, evaluated or None)  # nothing: there was no time for all of it
            else:
                yield Prepared(own, seen=lambda usage: self._judge(usage, copied))
        finally:
            self._rise(desk)
            foreground.poke()  # a preload may wait for its slot

    def _at(self, desk: _Desk) -> bool:
        """Is that still where the session's summarisers write?"""
        return self._agent is not None and self._desk is desk

    async def _copy(self, desk: _Desk) -> bool:
        """Copy the agent's slot there, while it is at rest (else the server would not before its turn ends): once, for
        all that write there. Is it there?"""
        if desk.copied or not self._at(desk):
            return desk.copied
        file = {"filename": f"to-slot-{desk.slot}.bin"}  # overwritten by the next copy: no more files than slots
        try:
            await self._engine.post_json(f"/slots/{self._agent}?action=save", file)
            await self._engine.post_json(f"/slots/{desk.slot}?action=restore", file)
        except EngineError:
            return False  # without the copy the prompt is evaluated anew: slower, never wrong
        desk.copied = True
        return True

    async def _evaluate(
        self,
        messages: Sequence[Mapping[str, Any]],
        request: Mapping[str, Any],
        *,
        foreground: Foreground,
        needed: Callable[[], bool],
        copied: bool,
        warmth: Warmth,
    ) -> int | None:
        """Evaluate what the copy has not brought of a summariser's prompt as a preload, which gives way to turns: a
        prompt that the server evaluates at once delays every other one behind it. How many tokens that were."""

        first: Usage | None = None

        async def send(part: Sequence[Mapping[str, Any]]) -> Any:
            nonlocal first
            reply = await self._engine.prefill(part, **request)
            first = first or reply.usage
            return reply

        try:
            report = await self._preloader.run(
                send,
                lambda: messages,
                foreground=foreground,
                needed=needed,
                keeps=True,
                warmth=warmth,
                known_rate=self._engine.rates.prefill,
            )
        except EngineError:
            return None  # the call itself will tell
        if report.aborted or first is None or first.cached_tokens is None:
            return None
        self._judge(first, copied)
        return report.usage.input_tokens - (report.usage.cached_tokens or 0)

    def _judge(self, usage: Usage, copied: bool) -> None:
        """Did the copy bring most of this prompt?"""
        if copied and usage.cached_tokens is not None:
            self._table.copies_keep = usage.cached_tokens * 2 > usage.input_tokens

    def _sit(self) -> _Desk | None:
        """A place to write: the spare slot, but for one that holds a view; then one beside it."""
        with self._lock:
            if self._agent is None:
                return None
            if self._desk is None:
                slot = None if self._holds else self._take_spare()
                if slot is not None:
                    self._empty()
                elif self._holds:
                    slot = self._table.take()
                    if slot is None:  # better warm the view again than put an agent's own slot at risk
                        slot = self._spare
                        self._empty()
                        self._drop()
                if slot is None:
                    return None
                self._desk = _Desk(slot)
            self._desk.writers += 1
            return self._desk

    def _rise(self, desk: _Desk) -> None:
        """The last one leaves the slot for the view that comes of it."""
        with self._lock:
            desk.writers -= 1
            if self._desk is desk and not desk.writers:
                self._desk = None
                if self._spare is None:
                    self._spare, self.aligned = desk.slot, True
                else:
                    self._table.give(desk.slot)

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
        )

    @property
    def _holds(self) -> bool:
        """Does the spare slot hold (part of) a view that may still be committed?"""
        return self._spare is not None and self._held is not None and self._held.begun

    def committed(self, warm: bool) -> None:
        """The agent moves to the slot that was preloaded; its old one becomes the spare."""
        with self._lock:
            if self._holds and self._agent is not None:
                self._agent, self._spare = self._spare, self._agent
            elif self._holds:
                self._agent, self._spare = self._spare, None
            self._held = None
            self._give_spare()

    def discarded(self) -> None:
        """What the spare slot holds is of no use."""
        with self._lock:
            self._give_spare()
            if self._desk is not None:
                self._table.give(self._desk.slot)
                self._desk = None

    def opening(self) -> SlotBinding:
        """Of a sub-agent that has not begun: it has no slot but the one in which its opening is warmed."""
        return SlotBinding(self._engine, self._table, self._id, preloader=self._preloader, begun=False)

    def offer(self) -> None:
        """Nobody may ever send what is warm here: until it is taken over, others may have the slot."""
        with self._lock:
            if self._spare is not None:
                self._offer = self._table.offer(self._spare)
                self._empty()

    def take_over(self, opening: EngineBinding) -> None:
        """The agent goes to the slot in which its opening was warmed, and gives its own back."""
        warm = opening.handed(self._table) if isinstance(opening, SlotBinding) else None
        with self._lock:
            if warm is not None and self._closed:
                self._table.give(warm)
            elif warm is not None:
                self._table.give(self._agent)
                self._agent = warm

    def handed(self, table: SlotTable) -> int | None:
        """Hand the slot of an opening over to its agent on the same server; ``None`` where it has none any more."""
        if table is not self._table:
            return None
        with self._lock:
            slot, offer = self._spare, self._offer
            self._offer = None
            self._empty()
        return slot if offer is None else table.reclaim(offer)

    def close(self) -> None:
        """The slots go back, and none is taken any more."""
        with self._lock:
            self._closed = True
            self._table.opened(-int(self._counted))
            self._counted = False
            self._table.give(self._agent)
            self._agent = None
            if self._offer is not None:
                self._table.give(self._table.reclaim(self._offer))
            self._offer = None
            self.discarded()

    def _take_spare(self) -> int | None:
        with self._lock:
            if self._spare is None and not self._closed:
                self._spare = self._table.take()
            return self._spare

    def _give_spare(self) -> None:
        self._drop()
        self._table.give(self._spare)
        self._empty()

    def _empty(self) -> None:
        """There is no spare slot any more."""
        self._spare, self.aligned = None, False

    def _drop(self) -> None:
        """What the spare slot holds is lost."""
        if self._held is not None:
            self._held.drop()
        self._held = None
