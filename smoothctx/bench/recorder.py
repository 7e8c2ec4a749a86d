"""An engine beside which the benchmarks write down how its calls ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..engines.wire import refused_option
from ..errors import EngineRefused, SmoothctxError
from ..patience import patiently

#: options without which the same is asked, if with more chance in it
SPARE = ("temperature", "ignore_eos")


class Recorder:
    """Asks ``engine``, every time with ``options``; one of ``SPARE`` that it refuses by name is left out from then on.

    ``ends`` are the finish reasons of its answers, ``failed`` the errors of its calls: a transform goes on without the
    blocks that failed, and says nothing of them. With ``say``, which is told of each pause, a server that is overloaded
    or limits requests is asked again (see :func:`patiently`), until one call has asked in vain: not where the time of a
    call counts.
    """

    def __init__(self, engine: Any, *, say: Callable[[str], object] | None = None, **options: Any) -> None:
        self._engine = engine
        self._say = say
        self._options = options
        self.identity: str = engine.identity
        self.context_window: int | None = getattr(engine, "context_window", None)
        self.ends: list[str | None] = []
        self.failed: list[str] = []
        self._refused: set[str] = set()

    async def complete(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any) -> Any:
        """Ask the engine."""
        given = {**self._options, **options}
        while True:
            sent = {name: value for name, value in given.items() if name not in self._refused}
            call = partial(self._engine.complete, messages, max_tokens=max_tokens, **sent)
            try:
                reply = await call() if self._say is None else (await patiently(call, self._say))[0]
            except SmoothctxError as error:
                spare = [name for name in SPARE if name in sent]
                named = refused_option(error, spare) if isinstance(error, EngineRefused) else None
                if named is None:
                    self._say = None
                    self.failed.append(f"{type(error).__name__}: {error}")
                    raise
                self._refused.add(named)
            else:
                self.ends.append(reply.finish_reason)
                return reply
