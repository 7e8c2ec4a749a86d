"""Patience of the commands: a server that is overloaded, or limits requests, is asked again when it wishes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from .errors import EngineOverloaded

T = TypeVar("T")

#: how often an overloaded server is asked, the first pause between where it names none, and the longest, in seconds
TRIES, PAUSE_S, MAX_PAUSE_S = 6, 1.0, 60.0
#: seconds that a server may ask us to stay away; for longer nobody sits and waits
MAX_ASKED_S = 3600.0


async def patiently(call: Callable[[], Awaitable[T]], say: Callable[[str], object]) -> tuple[T, int]:
    """``await call()``, and how often it was made: again, and never sooner than the server asks, where it is overloaded
    or limits us.

    Raises:
        EngineError: whatever else comes; the overload itself after ``TRIES`` of them, or at once where the server asks
            us to stay away for more than ``MAX_ASKED_S`` seconds.
    """
    for made in range(1, TRIES):
        try:
            return await call(), made
        except EngineOverloaded as busy:
            asked = busy.retry_after_s
            if asked is not None and asked > MAX_ASKED_S:
                raise EngineOverloaded(
                    f"{busy}; the server asks to be left alone for {asked:g} s: start again then",
                    status=busy.status,
                    retry_after_s=asked,
                ) from busy
            pause = asked or min(MAX_PAUSE_S, PAUSE_S * 2 ** (made - 1))
            say(f"the server is overloaded or limits requests ({busy.status}): again in {pause:g} s")
        await anyio.sleep(pause)
    return await call(), TRIES
