"""Beside: what a summariser's call on the agent's own engine begins with, and where it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from .engines.binding import Prepared
from .engines.wire import without_form
from .flight import Flight
from .members import uses
from .states import FINAL
from .transforms.base import Transform
from .work import MAX_DEFER_S

if TYPE_CHECKING:
    from .runtime import Runtime
    from .serving import Serving
    from .session import Session


class Beside:
    """The summarisers of one session that extend the agent's own prefix, so that the engine has it cached."""

    def __init__(self, runtime: Runtime, session: Session, serving: Serving) -> None:
        self._runtime = runtime
        self._session = session
        self._serving = serving

    def prompt(self, transform: Transform) -> Sequence[Mapping[str, Any]]:
        """What stands before the conversation in a request of a summariser on the agent's own engine."""
        return self._session.prompt if self._extends(transform) else ()

    def options(self, transform: Transform, key: str) -> dict[str, Any]:
        """For a summariser on the agent's own engine: the constant part of its request, and where its cache is.

        ``key`` names its artifact, and so the flight that other sessions may wait for too.
        """
        if not self._extends(transform):
            return {}
        options = {**without_form(self._session.request), **self._placed(key)}
        if "lookahead" in options:  # where it is written is asked for when it goes out
            options["lookahead"] = partial(self._where_open, key)
        return options

    def _extends(self, transform: Transform) -> bool:
        engine = self._session.engine
        return engine is not None and uses(transform, engine)

    def _where_open(self, key: str, *call: Any) -> AbstractAsyncContextManager[Prepared]:
        """Prepare a summariser's call where a session works that is open: who began it may have closed since."""
        flight, own = self._runtime.flights.find(self._session.tenant, key), self._session
        others = [] if flight is None else [h.session for h in list(flight.handles) if h.state not in FINAL]
        sessions = [s for s in (own, *others) if not s.closed and s.engine is own.engine]
        prepare = sessions[0].serving.beside._placed(key).get("lookahead") if sessions else None
        return nullcontext(Prepared({})) if prepare is None else prepare(*call)

    def _placed(self, key: str) -> dict[str, Any]:
        """Options of a summariser's call beside the agent's."""
        session, serving = self._session, self._serving

        def flight() -> Flight | None:
            return self._runtime.flights.find(session.tenant, key)

        def urgent() -> bool:
            return session.urgent() or ((own := flight()) is not None and own.urgent())

        return serving.transform_options(
            urgent,
            wait_s=min(MAX_DEFER_S, session.policy.timeout / 4),  # most of the time is for the call itself
            spent=lambda usage: self._runtime.flights.warmed(flight(), usage),
        )
