"""Probing: each engine of a runtime is asked in the background what it can do: once, or until its server answers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from .engines.http import without_user
from .events import EventSink

if TYPE_CHECKING:
    from .session import Session

#: seconds until an engine that did not answer is asked again: at first, and at most, twice as many each time
FIRST_S, MOST_S = 1.0, 60.0


@dataclass(slots=True)
class _Asked:
    """``pause_s``: seconds to let pass before it is asked again, if it does not answer. ``again_at``: when that may
    be, ``None`` while it is asked, and where nothing is left to ask. ``said``: the last error that was told."""

    pause_s: float = FIRST_S
    again_at: float | None = None
    said: str = ""


@final
class Probing:
    """Asks the engines that have a ``probe`` and whose server has not answered yet. Thread-safe."""

    def __init__(self, events: EventSink, background: Callable[..., None], now: Callable[[], float]) -> None:
        self._events = events
        self._background = background
        self._now = now
        self._asked: weakref.WeakKeyDictionary[Any, _Asked] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def begin(self, session: Session) -> None:
        """A session was opened, or a turn of it begins: probe its engine unless it was. What goes wrong is an event.

        A model server may be up minutes after the first session: while it does not answer it is asked again, ever more
        rarely.
        """
        engine = session.engine
        if not callable(getattr(engine, "probe", None)):
            return
        known = getattr(engine, "capabilities", engine)
        if known is not None and not _silent(known):
            return
        try:
            with self._lock:
                asked = self._asked.get(engine)
                if asked is None:
                    if known is not None:  # somebody else's probe: it is theirs to ask again
                        return
                    asked = self._asked[engine] = _Asked()
                elif asked.again_at is None or self._now() < asked.again_at:
                    return
                asked.again_at = None
        except TypeError:  # it cannot be remembered: it would be asked with every turn
            return

        async def ask() -> None:
            try:
                found = await (engine.probe() if known is None else engine.probe(again=True))
            except Exception as error:
                self._rest(asked)
                if asked.said != (told := f"{type(error).__name__}: {error}"):  # once, not with each attempt
                    asked.said = told
                    self._events.error(error, where="engine.probe", session=session.id, tenant=session.tenant)
            else:
                if _silent(found):
                    self._rest(asked)

        self._background(f"probe:{session.id}", ask, session, lambda: self._rest(asked))

    def _rest(self, asked: _Asked) -> None:
        """Nobody answered, or it could not be asked: not again before a while."""
        with self._lock:
            asked.again_at = self._now() + asked.pause_s
            asked.pause_s = min(MOST_S, 2 * asked.pause_s)


def _silent(capabilities: Any) -> bool:
    """Did nothing of the server's answer in time?"""
    return bool(getattr(capabilities, "unanswered", ())) and getattr(capabilities, "flavour", "") == "unknown"


def engine_name(engine: Any) -> str:
    """URL and model of an engine, without what is secret in them; empty for none."""
    try:
        return without_user(str(getattr(engine, "identity", "") or ""))
    except Exception:  # it is only told
        return ""
