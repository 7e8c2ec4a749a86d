"""Warming: may a preload send its next request? Not while the engine has asked us to stay away, while it is overloaded
by its own word, or while several users leave it no gap."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, final

import anyio

from .admission import LOAD_TTL_S
from .endpoints import Endpoints
from .foreground import Foreground
from .work import DEFER_S, MIN_DEFER_S

T = TypeVar("T")
May = Callable[[], bool]


@final
class Gate:
    """Asks for the preloads of one session, when they are about to send something; on the runtime's loop only.

    Args:
        admission: its ``async pressed(engine, foreground)`` says why an engine is to be spared, ``""`` where it is not;
            one without that lets everything through.
        say: told of each reason, once a preload.
    """

    def __init__(
        self,
        engine: Any,
        foreground: Foreground,
        *,
        endpoints: Endpoints,
        admission: Any,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._foreground = foreground
        self._endpoints = endpoints
        tells = getattr(engine, "load", None) is not None
        self._pressed: Any = getattr(admission, "pressed", None) if tells else None
        self._clock = clock
        self._say = say

    async def open(self, run: Callable[[May], Awaitable[T]], say: Callable[[str], None] | None = None) -> T:
        """``await run(may)``: ``may()`` says if the next request may go out now; if not, ``foreground`` is poked when
        it is to be asked again. ``say``: told of each reason, once; the gate's own where it is not given.

        Raises:
            Exception: whatever ``run`` raises, as it is.
        """
        say = self._say if say is None else say
        asked, known_until, told = anyio.Event(), -math.inf, set[str]()

        def may() -> bool:
            if self._endpoints.rests(self._engine) <= 0 and (self._pressed is None or self._clock() < known_until):
                return True
            asked.set()
            return False

        async def watch() -> None:
            nonlocal asked, known_until
            while True:
                await asked.wait()
                why, wait_s = "rate_limited", max(MIN_DEFER_S, self._endpoints.rests(self._engine))
                if self._endpoints.rests(self._engine) <= 0:
                    why, wait_s = "" if self._pressed is None else await self._ask(), DEFER_S
                if why:
                    if why not in told:
                        told.add(why)
                        say(why)
                        self._foreground.poke()  # it may be reason enough to give up
                    await anyio.sleep(wait_s)
                else:
                    known_until = self._clock() + LOAD_TTL_S
                asked = anyio.Event()
                self._foreground.poke()

        result: T | None = None
        failed: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            try:
                result = await run(may)
            except Exception as error:  # bare, not in a group
                failed = error
            group.cancel_scope.cancel()
        if failed is not None:
            raise failed
        return result  # type: ignore[return-value]

    async def _ask(self) -> str:
        try:
            return str(await self._pressed(self._engine, self._foreground))
        except Exception:  # a load that cannot be read is unknown
            return ""
