"""Serving: the agent's own engine as one session uses it. Its calls, its slots, and what works for it beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .beside import Beside
from .flight import Flight
from .members import endpoint_of, engine_of, members, uses
from .openings import Openings
from .preloading import Preloading
from .transforms.base import Transform
from .usage import Usage
from .view import Artifact

if TYPE_CHECKING:
    from .engines.binding import EngineBinding
    from .runtime import Runtime
    from .session import Session

T = TypeVar("T")


class Serving:
    """Talks to the engine of one session, if it has one; what the engine raises is an event, never the turn's."""

    def __init__(self, runtime: Runtime, session: Session) -> None:
        self._runtime = runtime
        self._session = session
        self.foreground = runtime.foreground(session.engine)
        self._blind = not _slotted(session.engine)
        self.binding: EngineBinding | None = self._bound()
        self._lock = threading.Lock()
        #: what the session's sub-agents will send first
        self.openings = Openings(session)
        #: its summarisers
        self.beside = Beside(runtime, session, self)
        #: its views, and the openings, before they are sent
        self.preloading = Preloading(runtime, session, self)
        #: the binding may hold something for a view that was not committed
        self.prepared = False

    def ask(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """Ask the engine's binding; what it raises is an event, never the turn's."""
        try:
            return call()
        except Exception as error:
            self._runtime.events.error(
                error, where=f"engine.{what}", session=self._session.id, tenant=self._session.tenant
            )
            return otherwise

    def _bound(self) -> EngineBinding | None:
        bind = getattr(self._session.engine, "bind", None)
        return self.ask("bind", lambda: bind(self._session.id), None) if bind else None

    @property
    def behind(self) -> bool:
        """Was it bound before the server was known to have slots? What it sends goes to any of them, an agent's own."""
        return self._blind and getattr(self.binding, "by_content", False) and _slotted(self._session.engine)

    def _catch_up(self) -> None:
        """Take slots as soon as they are known, between two lookaheads: one that is under way ends where it began."""
        with self._lock:
            if self._session.closed or not self.behind or self._session.working():
                return
            self._blind = False
            binding = self._bound()
            if binding is not None:
                self.binding = binding
                self.preloading.cooled()

    def request_options(self) -> dict[str, Any]:
        """Options of the agent's next call."""
        binding = self.binding
        return self.ask("request_options", lambda: dict(binding.request_options()), {}) if binding is not None else {}

    def begin(self, who: object, lease_s: float | None = None) -> None:
        """A turn or a call is due, for ``lease_s`` seconds at most (a turn's lease where it is not given)."""
        if self.behind:
            self._catch_up()
        self.foreground.begin(who, self, lease_s=lease_s)

    def first_token(self, who: object, turn: object) -> None:
        """The first token of a call, and so of its turn, is there."""
        self.foreground.first_token(who)
        self.foreground.first_token(turn)

    def burden(self, transform: Transform, preload_kv: bool | None) -> dict[str, Any]:
        """Which engine a lookahead loads, where that is known, and whose turns it may disturb there."""
        own = self._session.engine
        engine = next((e for e in map(engine_of, members(transform)) if e is not None), None)
        if engine is None:  # a preload alone asks for itself, with each request
            return {"engine": None, "foreground": self.foreground if self.preloading.wished(preload_kv) else None}
        return {"engine": engine, "foreground": self.foreground if engine is own else self._runtime.foreground(engine)}

    def answered(self, who: object, ttft_s: float, usage: Usage | None) -> None:
        """What was seen of a call that is about to end."""
        cached = None if usage is None else usage.cached_tokens
        new = None if usage is None or cached is None else max(0, usage.input_tokens - cached)
        self.foreground.answered(who, ttft_s, new)

    def poke(self) -> None:
        """Background work that waits for the foreground asks again whether it still has to."""
        self.foreground.poke()

    def end(self, who: object) -> None:
        """The turn or call is over."""
        self.foreground.end(who)

    def work_s(self, output_tokens: int, prompt_tokens: int) -> float | None:
        """Seconds to write a result and to preload its view, at the rates that the engine has shown."""
        return self._seconds(output_tokens, prompt_tokens) if self.preloading.wished(None) else None

    def write_s(self, transform: Transform, output_tokens: int, prompt_tokens: int) -> float | None:
        """Seconds for a result that the agent's own engine writes, at the rates that it has shown."""
        return self._seconds(output_tokens, prompt_tokens) if uses(transform, self._session.engine) else None

    def away_s(self, flight: Flight) -> float:
        """Seconds for which a lookahead is known to get no further: its model's server has asked us to stay away, or it
        waits to be tried again. Nothing while a model is at work for it."""
        if flight.answering:
            return 0.0
        endpoints = self._runtime.endpoints
        rests = [endpoints.rests(*endpoint_of(member)) for member in members(flight.plan.transform)]
        return max(flight.paused_s, *rests)

    def _seconds(self, output_tokens: int, prompt_tokens: int) -> float | None:
        rates = getattr(self._session.engine, "rates", None)
        if rates is None or not rates.prefill or not rates.decode:
            return None
        return float(output_tokens / rates.decode + prompt_tokens / rates.prefill)

    def transform_options(
        self, urgent: Callable[[], bool], *, wait_s: float, spent: Callable[[Usage], object]
    ) -> dict[str, Any]:
        """Options of a summariser's call beside the agent's, see ``EngineBinding.transform_options``."""
        binding = self.binding
        if binding is None:
            return {}

        def ask() -> dict[str, Any]:
            self.prepared = True
            return dict(
                binding.transform_options(
                    self.foreground,
                    urgent,
                    turn=partial(self.foreground.serves, self),
                    wait_s=wait_s,
                    view=self.preloading.own_view,
                    spent=spent,
                    wanted=self._session.working,
                )
            )

        return self.ask("options", ask, {})

    def handed_out(self, flight: Flight) -> None:
        """The caller has a sub-agent's opening."""
        self.ask("offer", lambda: self.openings.handed_out(flight), None)
        self.foreground.poke()

    def begun(self, digests: Sequence[bytes]) -> None:
        """This session's first history has these chain digests: if it begins as its parent has prepared it, its calls
        go where that is warm."""
        parent, binding = self._session.parent, self.binding
        if parent is None or binding is None or parent.engine is not self._session.engine:
            return
        opening = parent.openings.claim(digests)
        if opening is not None:
            self.ask("take_over", lambda: binding.take_over(opening), None)
            self.ask("close", opening.close, None)

    def committed(self, artifact: Artifact) -> None:
        """If it was preloaded, what the engine holds of it is what the agent sends from now on."""
        binding, warmth = self.binding, self.preloading.taken(artifact.key)
        if binding is None:
            return
        moves = warmth is not None and warmth.begun
        if moves and warmth is not None and not artifact.warm:
            moves = self.ask("committed", lambda: self.preloading.gains(warmth), True)
        if moves or getattr(binding, "away", False):
            self.prepared = self._session.working()  # then another one may hold something too
            self.ask("committed", lambda: binding.committed(artifact.warm), None)
        elif warmth is not None:
            warmth.drop()  # the agent's calls stay where they are
        self.foreground.poke()

    def discarded(self, *keys: str) -> None:
        """If one of these artifacts was preloaded (or its summary was being written), its slot is free again."""
        self.ask("close", lambda: self.openings.discarded(*keys), None)
        self.preloading.discarded(*keys)
        self.settled()

    def settled(self) -> None:
        """A lookahead has come to its end: with the last one what it was worked in is free again."""
        binding = self.binding
        if binding is not None and self.prepared and not self._session.working():
            self.prepared = False
            self.ask("discarded", binding.discarded, None)
            self.foreground.poke()

    def close(self) -> None:
        """Give the engine's slots back."""
        self.ask("close", self.openings.close, None)
        with self._lock:
            self._blind = False  # no slot is taken any more
        if self.binding is not None:
            self.ask("close", self.binding.close, None)
            self.foreground.poke()  # a preload for this session ends
        self.preloading.close()


def _slotted(engine: Any) -> bool:
    """Is it a server that is known to have slots to work in?"""
    return bool(getattr(getattr(engine, "capabilities", None), "slotted", False))
