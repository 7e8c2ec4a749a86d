"""What is said once: an event for the application, and a warning for whoever reads the log."""

from __future__ import annotations

import logging
import threading
from typing import Any

from smoothctx.events import EventSink

_log = logging.getLogger("smoothctx.langgraph")


class Notices:
    """What one form has said. Its turns go on whatever becomes of the words."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._said: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def once(self, name: str, about: str, why: str, **data: Any) -> None:
        """Say it, unless the same was said about the same thing: an event, and a warning of ``smoothctx.langgraph``."""
        with self._lock:
            if (name, about) in self._said:
                return
            self._said.add((name, about))
        self._events.emit(name, why=why, **data)
        try:
            _log.warning("%s", why)
        except Exception:  # a broken log handler is the application's business
            pass
