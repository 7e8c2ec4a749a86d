"""The tally: a runtime's counters, added to from any thread."""

from __future__ import annotations

import threading
from typing import final

from .states import Reason
from .usage import Counters, Usage


@final
class Tally:
    """Adds to :class:`~smoothctx.usage.Counters`. Thread-safe."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        """Add one to the counter of this name."""
        with self._lock:
            setattr(self.counters, name, getattr(self.counters, name) + 1)

    def stale(self, reason: Reason) -> None:
        """Count a discarded lookahead by its reason."""
        with self._lock:
            self.counters.stale[str(reason)] = self.counters.stale.get(str(reason), 0) + 1

    def spent(self, usage: Usage) -> None:
        """What a flight cost."""
        with self._lock:
            self.counters.usage = self.counters.usage + usage

    def wasted(self, usage: Usage) -> None:
        """What was spent on a result that nobody uses."""
        self.waste(usage.total_tokens)

    def waste(self, tokens: int) -> None:
        """So many tokens more are wasted; below 0, so many fewer: their result is used after all."""
        with self._lock:
            self.counters.wasted_tokens += tokens

    def preloaded(self, usage: Usage) -> None:
        """What a preload cost."""
        with self._lock:
            self.counters.preload_usage = self.counters.preload_usage + usage
