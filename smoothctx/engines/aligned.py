"""Aligned: what goes before a summariser's call, so that it extends what the agent's slot holds.

It waits for a gap between turns, and for the end of the session's own one. Then the agent's slot is copied to the one
in which the summary is written (save and restore, measured at 26 to 34 ms for 2,500 to 3,400 tokens).

Of layers with a sliding window (Gemma, gpt-oss) a copy holds what lies within it: it can be extended at its end, as
the agent does, but not from where a summary begins. So the two change places: the agent goes on in the copy, and the
summary is written in the slot that holds everything. Before that the copy answers one token, so that it is known to be
warm for the agent. Where it was not (a template that shows replies otherwise than the model wrote them), copies are
for summaries alone, and what one has not brought is evaluated as a preload, which gives way to turns.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ..errors import EngineError, EngineOverloaded
from ..foreground import Foreground
from ..usage import Usage
from .binding import Prepared
from .preload import Preloader, Warmth, common, size_of, valid

if TYPE_CHECKING:
    from .client import OpenAIEngine
    from .slots import SlotBinding

Messages = Sequence[Mapping[str, Any]]

#: seconds that a summariser waits for a moment without any turn on the engine
GAP_WAIT_S = 5.0
#: seconds that a summariser waits for a slot: where each is an agent's own, none comes
SEAT_WAIT_S = 5.0
#: seconds that saving and restoring a slot may take
COPY_S = 5.0
#: seconds after which a copy that was to answer one token is taken for cold
CHECK_S = 3.0
#: copies that hung, and changes of place of which nothing came, in a row: then none is tried any more on this server
STRAYS = 2


@dataclass(slots=True, eq=False)
class Desk:
    """A slot in which summarisers of one session write, one after the other. It is theirs until the last one leaves,
    whatever becomes of the session."""

    slot: int
    writers: int = 0
    #: calls that are prepared or under way there (a second one only where it could not wait)
    calls: int = 0
    #: it holds a copy of the agent's
    copied: bool = False
    #: it is the agent's own, and the agent is in the copy
    whole: bool = False
    #: the copy was not warm for the agent
    cold: bool = False
    #: a call was written there since: what the agent's slot held beyond its prompt is gone
    used: bool = False


class Aligned:
    """Prepares the calls of one session's summarisers; ``prepare`` is what ``engine.stream`` takes as ``lookahead``.

    ``urgent()``: a turn waits for the summary. ``turn()``: one of the session itself is in flight or due. ``view()``:
    what the agent's next call begins with, as far as it is known. ``spent`` is told what was used beside the call.
    ``wanted()``: something may come of the session's lookaheads.
    """

    def __init__(
        self,
        binding: SlotBinding,
        engine: OpenAIEngine,
        preloader: Preloader,
        *,
        foreground: Foreground,
        urgent: Callable[[], bool],
        turn: Callable[[], bool],
        view: Callable[[], Messages],
        spent: Callable[[Usage], object],
        wanted: Callable[[], bool],
        wait_s: float,
    ) -> None:
        self._binding = binding
        self._engine = engine
        self._table = binding.table
        self._preloader = preloader
        self._foreground = foreground
        self._urgent = urgent
        self._turn = turn
        self._view = view
        self._spent = spent
        self._wanted = wanted
        self._wait_s = wait_s

    @asynccontextmanager
    async def prepare(self, messages: Messages, request: Mapping[str, Any]) -> AsyncGenerator[Prepared]:
        """Inside, the call may go out, with these options; it waits ``wait_s`` seconds at most.

        Raises:
            EngineOverloaded: the server has asked to be left alone.
        """
        binding, foreground = self._binding, self._foreground
        warmth, evaluated, prepared, share = Warmth(), 0, False, 0.0
        seat: list[Desk] = []
        more: int | None = 0
        try:
            with anyio.move_on_after(self._wait_s):
                with anyio.move_on_after(SEAT_WAIT_S):
                    await self._seat(seat)
                if seat:
                    desk, share = seat[0], self._shared(messages)
                    if extends := share > 0.5:
                        await self._gap()
                    await foreground.wait_until(lambda: not desk.calls)
                    desk.calls, prepared = desk.calls + 1, True
                    if extends:
                        evaluated = await self._bring(desk, request)
                    if not desk.whole and not (desk.copied and self._table.copies_keep):
                        more = await self._evaluate(desk, messages, request, warmth, share)
            if not seat:
                yield Prepared(await self._own_slot())
                return
            desk = seat[0]
            if not prepared:
                desk.calls += 1
                prepared = True
            first, desk.used = not desk.used, True
            own = {"id_slot": desk.slot, "cache_prompt": True}
            if warmth.begun:
                yield Prepared(own, more + evaluated if more else None)  # nothing: there was no time for all of it
            else:
                yield Prepared(own, evaluated, seen=lambda usage: self._judge(desk, usage, share if first else 0.0))
        finally:
            for desk in seat:
                desk.calls -= prepared
                binding.rise(desk, keep=self._wanted())
            foreground.poke()  # a preload may wait for its slot, another summariser for its place

    async def _seat(self, seat: list[Desk]) -> None:
        """A place to write, once there is one; a turn that waits has no time for that."""

        def free() -> bool:
            if not seat and (desk := self._binding.sit()) is not None:
                seat.append(desk)
            return bool(seat) or self._urgent() or self._binding.agent is None

        await self._foreground.wait_until(free)

    async def _own_slot(self) -> Mapping[str, Any]:
        """No slot is free: the session's own is taken rather than that of another agent, which a server that chooses
        by itself might take."""
        with anyio.move_on_after(self._wait_s):
            await self._foreground.wait_until(lambda: not self._turn() or self._urgent())
        agent = self._binding.agent
        return {} if agent is None else {"id_slot": agent, "cache_prompt": True}

    def _shared(self, messages: Messages) -> float:
        """The part of this prompt with which the agent's begins too (all of it, where that is not known)."""
        view = self._view()
        return size_of(common(messages, view)) / max(1, size_of(messages)) if view else 1.0

    async def _gap(self) -> None:
        foreground, urgent = self._foreground, self._urgent
        with anyio.move_on_after(GAP_WAIT_S):
            await foreground.wait_until(lambda: not foreground.busy or urgent())
        await foreground.wait_until(lambda: not self._turn() or urgent())

    async def _bring(self, desk: Desk, request: Mapping[str, Any]) -> int:
        """What the agent's slot holds, once for all that write there, while it is at rest: the server would not copy
        it before its turn ends. How many tokens that took."""
        binding = self._binding
        if desk.copied or desk.whole or desk.calls > 1 or self._turn() or not binding.at(desk):
            return 0
        desk.copied = await self._copy(binding.agent, desk.slot)
        if desk.copied and self._table.copies_keep is not True:
            return await self._change_places(desk, request)
        return 0

    async def _copy(self, source: int | None, target: int) -> bool:
        table = self._table
        if table.hung >= STRAYS:
            return False
        file = {"filename": f"to-slot-{target}.bin"}  # overwritten by the next copy: no more files than slots
        with anyio.move_on_after(COPY_S) as scope:
            try:
                await self._engine.post_json(f"/slots/{source}?action=save", file)
                await self._engine.post_json(f"/slots/{target}?action=restore", file)
            except EngineError as error:
                _left_alone(error)
                return False  # without the copy the prompt is evaluated anew: slower, never wrong
        table.hung = table.hung + 1 if scope.cancelled_caught else 0
        return not scope.cancelled_caught

    async def _change_places(self, desk: Desk, request: Mapping[str, Any]) -> int:
        """The agent to the copy, the summariser to the agent's own slot, if that does the agent no harm."""
        table, binding, foreground = self._table, self._binding, self._foreground
        view = list(self._view())
        # The slot ends with the last reply: whatever came after it was not sent.
        replies = [k for k, m in enumerate(view) if m.get("role") == "assistant"]
        if not replies or binding.away or table.strays >= STRAYS:
            return 0
        prompt = valid(view[: replies[-1] + 1], view)
        options = {k: v for k, v in request.items() if k not in ("tool_choice", "max_tokens")}
        options |= {"id_slot": desk.slot, "cache_prompt": True}

        def over() -> bool:
            return not binding.at(desk) or self._turn()

        def in_the_way() -> bool:
            return foreground.prefilling and not self._urgent()

        desk.copied = False  # for as long as it is not known what comes of it
        reply = None
        while reply is None:
            await foreground.wait_until(lambda: over() or not in_the_way())
            if over():
                return 0
            with anyio.move_on_after(CHECK_S) as scope, foreground.warming():
                try:
                    reply = await foreground.unless(
                        lambda: over() or in_the_way(), partial(self._engine.prefill, prompt, **options)
                    )
                except EngineError as error:
                    _left_alone(error)
                    table.strays += 1
                    return 0
            if scope.cancelled_caught:
                table.strays += 1
                return 0
        usage: Usage = reply.usage
        self._spent(usage)
        desk.cold = not _mostly_cached(usage)
        table.strays += desk.cold
        desk.whole = desk.calls == 1 and binding.change_places(desk, unless=self._turn)
        return usage.input_tokens - (usage.cached_tokens or 0) if desk.cold else 0

    async def _evaluate(
        self, desk: Desk, messages: Messages, request: Mapping[str, Any], warmth: Warmth, share: float
    ) -> int | None:
        """Evaluate what the copy has not brought of a summariser's prompt as a preload, which gives way to turns: a
        prompt that the server evaluates at once delays every other one behind it. Where idle time alone is too little
        for that, it soon goes on beside the foreground's decode. How many tokens that were."""
        first: Usage | None = None
        started = anyio.current_time()

        async def send(part: Messages) -> Any:
            nonlocal first
            reply = await self._engine.prefill(part, **{**request, "id_slot": desk.slot, "cache_prompt": True})
            first = first or reply.usage
            self._spent(reply.usage)
            return reply

        try:
            report = await self._preloader.run(
                send,
                lambda: messages,
                foreground=self._foreground,
                needed=lambda: not self._urgent(),
                hurried=lambda rate: anyio.current_time() - started >= GAP_WAIT_S,
                keeps=True,
                warmth=warmth,
                known_rate=self._engine.rates.prefill,
            )
        except EngineError as error:
            _left_alone(error)
            return None  # the call itself will tell
        if report.aborted or first is None or first.cached_tokens is None:
            return None
        self._judge(desk, first, 0.0 if desk.used else share)
        return report.usage.input_tokens - (report.usage.cached_tokens or 0)

    def _judge(self, desk: Desk, usage: Usage, share: float) -> None:
        """Did the copy bring what this prompt shares with the agent's, or had the agent's own slot it (a llama-server
        without ``--swa-full`` keeps there no more than in a copy)? A prompt that shares little says nothing of that."""
        if usage.cached_tokens is None or share <= 0.5:
            return
        there = usage.cached_tokens > 0.5 * share * usage.input_tokens
        if desk.whole and not there:
            self._table.strays += 1
        elif desk.whole and not desk.cold:
            self._table.strays = 0
        elif desk.copied:
            self._table.copies_keep = there


def _left_alone(error: EngineError) -> None:
    """Does the server ask for that? Then nothing more is sent now, the summary neither."""
    if isinstance(error, EngineOverloaded) and error.status in (429, 503):
        raise error


def _mostly_cached(usage: Usage) -> bool:
    """Where the server does not tell, it is taken for cached."""
    return usage.cached_tokens is None or usage.cached_tokens * 2 > usage.input_tokens
