"""An engine beside which the benchmarks write down how its calls ended."""

from __future__ import annotations

from typing import Any

from ..errors import SmoothctxError


class Recorder:
    """Asks ``engine``, every time with ``options``.

    ``ends`` are the finish reasons of its answers, ``failed`` the errors of its calls: a transform goes on without the
    blocks that failed, and says nothing of them.
    """

    def __init__(self, engine: Any, **options: Any) -> None:
        self._engine = engine
        self._options = options
        self.identity: str = engine.identity
        self.context_window: int | None = getattr(engine, "context_window", None)
        self.ends: list[str | None] = []
        self.failed: list[str] = []

    async def complete(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any) -> Any:
        """Ask the engine."""
        try:
            reply = await self._engine.complete(messages, max_tokens=max_tokens, **{**self._options, **options})
        except SmoothctxError as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            raise
        self.ends.append(reply.finish_reason)
        return reply
