"""In line, the better way: a summariser whose request extends what the agent itself has sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class InLine:
    """An engine as an in-line summariser: with the agent's own request options, so that it reads the agent's cache.

    On a server with slots the options name the agent's own slot.
    """

    def __init__(self, engine: Any, options: Mapping[str, Any]) -> None:
        self._engine = engine
        self._options = dict(options)
        self.identity: str = engine.identity
        self.context_window: int | None = engine.context_window

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> Any:
        """Ask the engine."""
        return await self._engine.complete(messages, max_tokens=max_tokens, **{**options, **self._options})
