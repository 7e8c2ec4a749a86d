"""Openings: what sub-agents will send first, warmed ahead, until each of them begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from .codec import openai_messages
from .digest import chain
from .engines.preload import for_a_while
from .flight import Flight
from .request import read_request
from .states import FINAL, HandleState

if TYPE_CHECKING:
    from .engines.binding import EngineBinding
    from .engines.preload import PreloadReport, Warmth
    from .foreground import Foreground
    from .session import Session
    from .warming import Gate

#: openings held per session; the oldest makes way
MAX_OPENINGS = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Opening:
    """One opening, by the digest of its messages, and where it is warm."""

    flight: Flight
    length: int
    digest: bytes
    binding: EngineBinding


@final
class Openings:
    """Holds the openings that one session has warmed for its sub-agents. Thread-safe; never waits under its lock."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: list[_Opening] = []
        self._closed = False
        self._lock = threading.Lock()

    async def warm(
        self,
        flight: Flight,
        bind: Callable[[], EngineBinding],
        foreground: Foreground,
        gate: Gate,
        warmth: Warmth,
    ) -> PreloadReport | None:
        """Preload the opening that ``flight`` has made, while anybody waits for it; ``None`` if nobody does. It ends
        when ``gate`` does not let a request through: cold messages that are waited for are better than none. ``warmth``
        tells, also of a preload that is cut off, what was used.

        Raises:
            Exception: whatever the engine raised, as it is.
        """
        session, messages = self._session, flight.opening or ()
        wish = own_request(flight)
        options, lead = (session.request, ()) if wish is None else read_request(wish)
        prompt = [*lead, *(sent for m in messages for sent in openai_messages(session.codec, m))]
        if not messages or not _wanted(flight):
            return None
        held = _Opening(flight, len(messages), chain(session.codec, messages)[-1], bind())
        with self._lock:
            closed = self._closed
            surplus = [] if closed else [self._held.pop(0)] if len(self._held) >= MAX_OPENINGS else []
            if not closed:
                self._held.append(held)
        for old in (*surplus, *([held] if closed else ())):
            old.binding.close()
        if closed:
            return None
        warmed, closed_for = False, list[str]()
        try:
            with for_a_while(foreground, session.policy.timeout) as time_left:
                report = await gate.open(
                    lambda may: held.binding.preload(
                        lambda: prompt,
                        request=options,
                        foreground=foreground,
                        needed=lambda: not closed_for and held in self._held and _wanted(flight) and time_left(),
                        hurried=lambda rate: any(h.promoted for h in flight.handles),
                        may=may,
                        warmth=warmth,
                        quiet=session.quiet,
                    ),
                    closed_for.append,
                )
            warmed = report.complete or report.requests + report.aborted > 0
            return report
        finally:
            if not warmed or not _of_use(flight):
                self._drop(lambda o: o is held)

    def handed_out(self, flight: Flight) -> None:
        """The caller has the messages: the sub-agent that sends them may begin at any time, or never."""
        with self._lock:
            for opening in self._held:
                if opening.flight is flight:
                    opening.binding.offer()

    def claim(self, digests: Sequence[bytes]) -> EngineBinding | None:
        """Where the opening is warm that a history with these chain digests begins with, if one is; it is given once.

        The longest of several.
        """
        with self._lock:
            fitting = [o for o in self._held if o.length < len(digests) and digests[o.length] == o.digest]
            if not fitting:
                return None
            chosen = max(fitting, key=lambda o: (o.length, _handed(o.flight)))
            self._held.remove(chosen)
            return chosen.binding

    def discarded(self, *keys: str) -> None:
        """A handle of one of these artifacts was dropped: an opening that nobody waits for any more goes."""
        self._drop(lambda o: o.flight.plan.key in keys and not _of_use(o.flight))

    def cooled(self) -> None:
        """The agent's request is another one: what was warmed with it, for want of one of its own, goes."""
        self._drop(lambda o: own_request(o.flight) is None)

    def close(self) -> None:
        """All go, and none comes after."""
        with self._lock:
            self._closed = True
        self._drop(lambda o: True)

    def _drop(self, which: Callable[[_Opening], bool]) -> None:
        with self._lock:
            gone = [o for o in self._held if which(o)]
            self._held = [o for o in self._held if o not in gone]
        for opening in gone:
            opening.binding.close()


def own_request(flight: Flight) -> Mapping[str, Any] | None:
    """The constant part of the requests of the sub-agent whose opening this makes; ``None``: as its parent's."""
    own: Mapping[str, Any] | None = getattr(flight.plan.transform, "request", None)
    return own


def _wanted(flight: Flight) -> bool:
    """Does anybody wait for it?"""
    return any(h.state not in FINAL for h in list(flight.handles))


def _handed(flight: Flight) -> bool:
    return any(h.state is HandleState.COMMITTED for h in list(flight.handles))


def _of_use(flight: Flight) -> bool:
    """May a sub-agent still begin with it?"""
    return _wanted(flight) or _handed(flight)
