"""Probing: each engine of a runtime is asked what it can do, once, in the background."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from .engines.http import without_user
from .events import EventSink

if TYPE_CHECKING:
    from .session import Session


@final
class Probing:
    """Asks the engines that have a ``probe`` and were not asked yet. Thread-safe."""

    def __init__(self, events: EventSink, background: Callable[..., None]) -> None:
        self._events = events
        self._background = background
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    def begin(self, session: Session) -> None:
        """Probe the engine of a new session, unless it was. What goes wrong is an event."""
        engine = session.engine
        if not callable(getattr(engine, "probe", None)) or getattr(engine, "capabilities", engine) is not None:
            return
        try:
            with self._lock:
                if engine in self._asked:
                    return
                self._asked.add(engine)
        except TypeError:  # it cannot be remembered: it would be asked with every session
            return

        async def ask() -> None:
            try:
                await engine.probe()
            except Exception as error:
                self._events.error(error, where="engine.probe", session=session.id, tenant=session.tenant)

        self._background(f"probe:{session.id}", ask, session, lambda: self._forget(engine))

    def _forget(self, engine: Any) -> None:
        """It could not be asked: the next session tries again."""
        with self._lock:
            self._asked.discard(engine)


def engine_name(engine: Any) -> str:
    """URL and model of an engine, without what is secret in them; empty for none."""
    try:
        return without_user(str(getattr(engine, "identity", "") or ""))
    except Exception:  # it is only told
        return ""
