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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ..errors import EngineError
from ..foreground import Foreground
from ..usage import Usage
from .binding import Prepared
from .preload import Preloader, Warmth, valid

if TYPE_CHECKING:
    from .client import OpenAIEngine
    from .slots import SlotBinding

Messages = Sequence[Mapping[str, Any]]

#: seconds that a summariser waits for a moment without any turn on the engine
GAP_WAIT_S = 5.0
#: seconds after which a copy that was to answer one token is taken for cold
CHECK_S = 3.0
#: changes of place in a row of which nothing came, after which none is tried any more on this server
STRAYS = 2


@dataclass(slots=True, eq=False)
class Desk:
    """A slot in which summarisers of one session write."""

    slot: int
    writers: int = 0
    #: it holds a copy of the agent's
    copied: bool = False
    #: it is the agent's own, and the agent is in the copy
    whole: bool = False
    #: only one of them brings the agent's prefix
    bringing: anyio.Lock = field(default_factory=anyio.Lock)


class Aligned:
    """Prepares the calls of one session's summarisers; ``prepare`` is what ``engine.stream`` takes as ``lookahead``.

    ``urgent()``: a turn waits for the summary. ``turn()``: one of the session itself is in flight or due. ``view()``:
    what the agent's next call begins with, as far as it is known.
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
        self._wait_s = wait_s

    @asynccontextmanager
    async def prepare(self, messages: Messages, request: Mapping[str, Any]) -> AsyncGenerator[Prepared]:
        """Inside, the call may go out, with these options; it waits ``wait_s`` seconds at most."""
        binding, table = self._binding, self._table
        desk = binding.sit()
        if desk is None:
            yield Prepared({})
            return
        try:
            warmth = Warmth()
            evaluated: int | None = 0
            with anyio.move_on_after(self._wait_s):
                await self._gap()
                async with desk.bringing:
                    await self._bring(desk, request)
                if not desk.whole and not (desk.copied and table.copies_keep):
                    evaluated = await self._evaluate(desk, messages, request, warmth)
            own = {"id_slot": desk.slot, "cache_prompt": True}
            if not binding.at(desk):  # the slots went back meanwhile
                yield Prepared({})
            elif warmth.begun:
                yield Prepared(own, evaluated or None)  # nothing: there was no time for all of it
            else:
                yield Prepared(own, seen=lambda usage: self._judge(desk, usage))
        finally:
            binding.rise(desk)
            self._foreground.poke()  # a preload may wait for its slot

    async def _gap(self) -> None:
        foreground, urgent = self._foreground, self._urgent
        with anyio.move_on_after(GAP_WAIT_S):
            await foreground.wait_until(lambda: not foreground.busy or urgent())
        await foreground.wait_until(lambda: not self._turn() or urgent())

    async def _bring(self, desk: Desk, request: Mapping[str, Any]) -> None:
        """What the agent's slot holds, once for all that write there, while it is at rest: the server would not copy
        it before its turn ends."""
        binding = self._binding
        if desk.copied or desk.whole or not binding.at(desk):
            return
        desk.copied = await self._copy(binding.agent, desk.slot)
        if desk.copied and self._table.copies_keep is not True:
            await self._change_places(desk, request)

    async def _copy(self, source: int | None, target: int) -> bool:
        file = {"filename": f"to-slot-{target}.bin"}  # overwritten by the next copy: no more files than slots
        try:
            await self._engine.post_json(f"/slots/{source}?action=save", file)
            await self._engine.post_json(f"/slots/{target}?action=restore", file)
        except EngineError:
            return False  # without the copy the prompt is evaluated anew: slower, never wrong
        return True

    async def _change_places(self, desk: Desk, request: Mapping[str, Any]) -> None:
        """The agent to the copy, the summariser to the agent's own slot, if that does the agent no harm."""
        table, binding, foreground = self._table, self._binding, self._foreground
        view = list(self._view())
        # The slot ends with the last reply: whatever came after it was not sent.
        replies = [k for k, m in enumerate(view) if m.get("role") == "assistant"]
        if not replies or binding.away or table.strays >= STRAYS:
            return
        prompt = valid(view[: replies[-1] + 1], view)
        options = {k: v for k, v in request.items() if k not in ("tool_choice", "max_tokens")}
        options |= {"id_slot": desk.slot, "cache_prompt": True}

        def stop() -> bool:
            return not binding.at(desk) or self._turn() or (foreground.prefilling and not self._urgent())

        desk.copied = False  # for as long as it is not known what comes of it
        with anyio.move_on_after(CHECK_S) as scope, foreground.warming():
            try:
                reply = await foreground.unless(stop, partial(self._engine.prefill, prompt, **options))
            except EngineError:
                table.strays += 1
                return
        if scope.cancelled_caught:
            table.strays += 1
        elif reply is not None:
            desk.whole = binding.change_places(desk, unless=self._turn)

    async def _evaluate(self, desk: Desk, messages: Messages, request: Mapping[str, Any], warmth: Warmth) -> int | None:
        """Evaluate what the copy has not brought of a summariser's prompt as a preload, which gives way to turns: a
        prompt that the server evaluates at once delays every other one behind it. How many tokens that were."""
        first: Usage | None = None

        async def send(part: Messages) -> Any:
            nonlocal first
            reply = await self._engine.prefill(part, **{**request, "id_slot": desk.slot, "cache_prompt": True})
            first = first or reply.usage
            return reply

        try:
            report = await self._preloader.run(
                send,
                lambda: messages,
                foreground=self._foreground,
                needed=lambda: self._binding.at(desk) and not self._urgent(),
                keeps=True,
                warmth=warmth,
                known_rate=self._engine.rates.prefill,
            )
        except EngineError:
            return None  # the call itself will tell
        if report.aborted or first is None or first.cached_tokens is None:
            return None
        self._judge(desk, first)
        return report.usage.input_tokens - (report.usage.cached_tokens or 0)

    def _judge(self, desk: Desk, usage: Usage) -> None:
        """Did the copy bring most of this prompt, or had the agent's own slot it (a llama-server without ``--swa-full``
        keeps there no more than in a copy)?"""
        if usage.cached_tokens is None:
            return
        there = usage.cached_tokens * 2 > usage.input_tokens
        if desk.whole:
            self._table.strays = 0 if there else self._table.strays + 1
        elif desk.copied:
            self._table.copies_keep = there
