"""Rest: notices that no turn came for a while, so that the time is used. One timer per session."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import Runtime

Act = Callable[[Sequence[Any]], None]

#: seconds: what is left of less is no reason for another timer (a loop may call a little early)
TICK_S = 0.001


class Rest:
    """Calls ``act`` with the messages that were observed last, once ``seconds`` have passed without a turn.

    Changed under the session's lock only; ``act`` is called on the runtime's loop, without it.
    """

    def __init__(self, runtime: Runtime, seconds: float, act: Act) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._act = weakref.WeakMethod(act)  # a timer keeps no session alive
        self._messages: list[Any] | None = None
        self._since = 0.0
        self._armed = False

    def begin(self, messages: Sequence[Any]) -> None:
        """The turn's messages are all there."""
        self._messages = list(messages)
        self._since = self._runtime.now()
        self._arm(self._seconds)

    def end(self) -> None:
        """A turn begins, or the session ends."""
        self._messages = None

    @property
    def resting(self) -> bool:
        """Has the session rested long enough?"""
        return self._messages is not None and self._left() <= 0

    def look(self) -> None:
        """Act now, if the session rests."""
        messages, act = self._messages, self._act()
        if messages is not None and act is not None and self._left() <= 0:
            act(messages)

    def _left(self) -> float:
        return self._since + self._seconds - self._runtime.now() - TICK_S

    def _arm(self, seconds: float) -> None:
        if not self._armed:
            own = weakref.WeakMethod(self._due)
            self._armed = self._runtime.later(seconds, lambda: due() if (due := own()) is not None else None)

    def _due(self) -> None:
        self._armed = False
        left = self._left()
        if self._messages is None:
            return
        if left > 0:  # there was a turn meanwhile
            self._arm(left + TICK_S)
        else:
            self.look()
