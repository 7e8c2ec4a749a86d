"""A turnstile: one at a time, in the order of a rank, then of arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turnstile:
    """Like ``asyncio.Lock``, but whoever has the lowest rank of those that wait is next. It interrupts nobody."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, rank: int) -> AsyncGenerator[None]:
        """Wait for one's turn; it ends with the context."""
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (rank, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # it was given the turn at the same moment
                raise
        self._taken = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        self._taken = False
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._taken = True
                turn.set_result(None)
                return
