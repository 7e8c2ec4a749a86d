"""Binding: one session's relation to its engine, for options of its calls and for preload.

``Binding`` works with every server that caches prefixes; an engine with slots brings one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..foreground import Foreground
from ..usage import Usage
from ..work import MAX_DEFER_S
from .flavours import Level
from .preload import Preloader, PreloadReport, Warmth

View = Callable[[], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A background call that may go out now.

    ``evaluated``: tokens of its prompt that were evaluated for it just before, and so are no hits of the cache;
    ``None`` where that is not known. ``seen`` is told what it used.
    """

    options: Mapping[str, Any]
    evaluated: int | None = 0
    seen: Callable[[Usage], object] = lambda usage: None


class EngineBinding(Protocol):
    """What a session needs of its engine."""

    def request_options(self) -> Mapping[str, Any]:
        """Options of the agent's next call (slot, salt, priority)."""
        ...

    def transform_options(
        self,
        foreground: Foreground,
        urgent: Callable[[], bool],
        *,
        turn: Callable[[], bool] | None = None,
        wait_s: float = MAX_DEFER_S,
        view: View = tuple,
        spent: Callable[[Usage], object] = lambda usage: None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Mapping[str, Any]:
        """Options of a summariser's call that extends the agent's cached prefix.

        ``urgent()`` says that a turn waits for it: it then keeps out of nobody's way. ``turn()``: is one of the session
        itself in flight or due? (``None``: as ``foreground`` says.) It waits for turns ``wait_s`` seconds at most.
        ``view()`` is what the agent's next call begins with, as far as it is known. ``spent`` is told of what is used
        beside the call itself. ``wanted()``: may anything still be committed of what the session works on?
        """
        ...

    async def preload(
        self,
        view: View,
        *,
        request: Mapping[str, Any],
        foreground: Foreground,
        needed: Callable[[], bool],
        hurried: Callable[[float | None], bool],
        may: Callable[[], bool] = lambda: True,
        warmth: Warmth | None = None,
        quiet: Callable[[], float | None] = lambda: None,
    ) -> PreloadReport:
        """Warm the cache with ``view()``, out of the foreground's way, until it is warm to its end or not needed.

        ``hurried(rate)`` says that idle time alone is too little at that prefill rate (tokens per second): work
        may then go on beside the foreground's decode, never beside its prefill. ``may()`` is asked before each
        request. ``warmth`` says what of it is warm: this goes on from there, and it is dropped when its place is used
        for something else. ``quiet()``: seconds for which no turn of the session is expected, if known.
        """
        ...

    def committed(self, warm: bool) -> None:
        """The agent sends the preloaded view from now on."""
        ...

    def discarded(self) -> None:
        """The preloaded view will not be sent."""
        ...

    def opening(self) -> EngineBinding:
        """Of a sub-agent that has not begun: its opening is preloaded by this one, until ``take_over`` or ``close``."""
        ...

    def offer(self) -> None:
        """Of an opening: its messages were handed out, and perhaps nobody sends them. What it holds may go to others
        who need it."""
        ...

    def take_over(self, opening: EngineBinding) -> None:
        """The agent begins with what ``opening`` has warmed."""
        ...

    def close(self) -> None:
        """The session ended."""
        ...


class Prefiller(Protocol):
    """An engine that can evaluate a prompt into its cache."""

    async def prefill(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Evaluate ``messages``; the result has ``.usage``."""
        ...


class Binding:
    """For servers that cache prefixes by themselves: a priority and a salt where they are understood, and preload."""

    #: what is warm is found by its content, whichever session sends it
    by_content = True

    def __init__(self, engine: Prefiller, session_id: str, *, preloader: Preloader | None = None) -> None:
        self._engine = engine
        self._id = session_id
        self._preloader = Preloader() if preloader is None else preloader

    def _options(self, level: Level) -> dict[str, Any]:
        """What the engine's server understands, as known now: a probe may come after the session."""
        engine: Any = self._engine
        if not hasattr(engine, "priority_options"):
            return {}
        return {**engine.priority_options(level), **engine.salt_options()}

    def request_options(self) -> Mapping[str, Any]:
        """The foreground's priority, and the cache salt: what is warmed must be what is sent."""
        return self._options("foreground")

    def transform_options(
        self,
        foreground: Foreground,
        urgent: Callable[[], bool],
        *,
        turn: Callable[[], bool] | None = None,
        wait_s: float = MAX_DEFER_S,
        view: View = tuple,
        spent: Callable[[Usage], object] = lambda usage: None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Mapping[str, Any]:
        """The salt, and the priority of what a turn waits for, or of a lookahead; :mod:`smoothctx.urgency` renews that
        one with each call."""
        return self._options("promoted" if urgent() else "lookahead")

    async def preload(
        self,
        view: View,
        *,
        request: Mapping[str, Any],
        foreground: Foreground,
        needed: Callable[[], bool],
        hurried: Callable[[float | None], bool],
        may: Callable[[], bool] = lambda: True,
        warmth: Warmth | None = None,
        quiet: Callable[[], float | None] = lambda: None,
    ) -> PreloadReport:
        """With the agent's own request options, at the lowest priority."""

        async def send(messages: Sequence[Mapping[str, Any]]) -> Any:
            return await self._engine.prefill(messages, **{**request, **self._options("lookahead")})

        return await self._preloader.run(
            send,
            view,
            foreground=foreground,
            needed=needed,
            hurried=hurried,
            may=may,
            warmth=warmth,
            known_rate=getattr(getattr(self._engine, "rates", None), "prefill", None),
            quiet=quiet,
        )

    def committed(self, warm: bool) -> None:
        """Nothing to switch."""

    def discarded(self) -> None:
        """Nothing to undo."""

    def opening(self) -> EngineBinding:
        """One like this: what is cached is found by its content."""
        return Binding(self._engine, self._id, preloader=self._preloader)

    def offer(self) -> None:
        """Nothing to offer."""

    def take_over(self, opening: EngineBinding) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """Nothing to give back."""
