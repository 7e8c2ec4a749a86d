"""Serving: the agent's own engine as one session uses it. Preload, slots, and keeping out of the foreground's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .codec import openai_messages
from .engines.binding import Prepared
from .engines.preload import PreloadReport, Warmth, common, for_a_while, size_of
from .engines.wire import without_form
from .flight import Flight
from .handle import LookaheadHandle
from .members import endpoint_of, engine_of, members, uses
from .openings import Openings, own_request
from .request import Steadiness, same
from .states import FINAL, HandleState
from .transforms.base import Transform
from .usage import Usage
from .view import Artifact
from .warming import Gate
from .work import MAX_DEFER_S

if TYPE_CHECKING:
    from .engines.binding import EngineBinding
    from .runtime import Runtime
    from .session import Session

T = TypeVar("T")

#: views of which a session remembers what is warm
MAX_WARM = 8


class Serving:
    """Talks to the engine of one session, if it has one; what the engine raises is an event, never the turn's."""

    def __init__(self, runtime: Runtime, session: Session) -> None:
        self._runtime = runtime
        self._session = session
        self._foreground = runtime.foreground(session.engine)
        self._blind = not _slotted(session.engine)
        self._binding: EngineBinding | None = self._bound()
        self._lock = threading.Lock()
        #: what the session's sub-agents will send first
        self.openings = Openings(session)
        self._gate = Gate(
            session.engine,
            self._foreground,
            endpoints=runtime.endpoints,
            admission=runtime.admission,
            clock=runtime.now,
            say=self._held_back,
        )
        self._latest: list[Any] = []
        self._sent: list[Any] = []  # the view that the agent's last call was made with
        self._rewarming = False
        self._prepared = False  # the binding may hold something for a view that was not committed
        #: of the agent's request
        self.steadiness = Steadiness()
        #: what the engine has warmed for this session, of the view of each artifact by its key
        self._warmth: dict[str, Warmth] = {}

    def _ask(self, what: str, call: Callable[[], T], otherwise: T) -> T:
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
        return self._ask("bind", lambda: bind(self._session.id), None) if bind else None

    @property
    def _behind(self) -> bool:
        """Was it bound before the server was known to have slots? What it sends goes to any of them, an agent's own."""
        return self._blind and getattr(self._binding, "by_content", False) and _slotted(self._session.engine)

    def _catch_up(self) -> None:
        """Take slots as soon as they are known, between two lookaheads: one that is under way ends where it began."""
        with self._lock:
            if self._session.closed or not self._behind or self._session.working():
                return
            self._blind = False
            binding = self._bound()
            if binding is not None:
                self._binding = binding
                for warmth in self._warmth.values():
                    warmth.drop()
                self._warmth.clear()

    def request_options(self) -> dict[str, Any]:
        """Options of the agent's next call."""
        binding = self._binding
        return self._ask("request_options", lambda: dict(binding.request_options()), {}) if binding is not None else {}

    def begin(self, who: object, lease_s: float | None = None) -> None:
        """A turn or a call is due, for ``lease_s`` seconds at most (a turn's lease where it is not given)."""
        if self._behind:
            self._catch_up()
        self._foreground.begin(who, self, lease_s=lease_s)

    def first_token(self, who: object, turn: object) -> None:
        """The first token of a call, and so of its turn, is there."""
        self._foreground.first_token(who)
        self._foreground.first_token(turn)

    def burden(self, transform: Transform, preload_kv: bool | None) -> dict[str, Any]:
        """Which engine a lookahead loads, where that is known, and whose turns it may disturb there."""
        own = self._session.engine
        engine = next((e for e in map(engine_of, members(transform)) if e is not None), None)
        if engine is None:  # a preload alone asks for itself, with each request
            return {"engine": None, "foreground": self._foreground if self.preloads(preload_kv) else None}
        return {"engine": engine, "foreground": self._foreground if engine is own else self._runtime.foreground(engine)}

    def answered(self, who: object, ttft_s: float, usage: Usage | None) -> None:
        """What was seen of a call that is about to end."""
        cached = None if usage is None else usage.cached_tokens
        new = None if usage is None or cached is None else max(0, usage.input_tokens - cached)
        self._foreground.answered(who, ttft_s, new)

    def poke(self) -> None:
        """Background work that waits for the foreground asks again whether it still has to."""
        self._foreground.poke()

    def end(self, who: object) -> None:
        """The turn or call is over."""
        self._foreground.end(who)

    def work_s(self, output_tokens: int, prompt_tokens: int) -> float | None:
        """Seconds to write a result and to preload its view, at the rates that the engine has shown."""
        return self._seconds(output_tokens, prompt_tokens) if self.preloads(None) else None

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

    def preloads(self, preload_kv: bool | None) -> bool:
        """Is a view of this session preloaded? ``None``: as the policy and the engine say."""
        wish = self._session.policy.preload_kv if preload_kv is None else preload_kv
        if self._binding is None or wish is False or self._behind:
            return False
        return True if wish is True else bool(getattr(self._session.engine, "preload_by_default", False))

    def aligned(self, transform: Transform, key: str) -> dict[str, Any]:
        """For a summariser on the agent's own engine: the constant part of its request, and where its cache is.

        ``key`` names its artifact, and so the flight that other sessions may wait for too.
        """
        session = self._session
        if session.engine is None or not uses(transform, session.engine):
            return {}
        options = without_form(session.request)
        if self._binding is not None:
            options.update(self._beside(key))
            if "lookahead" in options:  # where it is written is asked for when it goes out
                options["lookahead"] = partial(self._where_open, key)
        return options

    def prompt(self, transform: Transform) -> Sequence[Mapping[str, Any]]:
        """What stands before the conversation in a request of a summariser on the agent's own engine."""
        session = self._session
        return session.prompt if session.engine is not None and uses(transform, session.engine) else ()

    def _where_open(self, key: str, *call: Any) -> AbstractAsyncContextManager[Prepared]:
        """Prepare a summariser's call where a session works that is open: who began it may have closed since."""
        flight, own = self._runtime.flights.find(self._session.tenant, key), self._session
        others = [] if flight is None else [h.session for h in list(flight.handles) if h.state not in FINAL]
        sessions = [s for s in (own, *others) if not s.closed and s.engine is own.engine]
        prepare = sessions[0].serving._beside(key).get("lookahead") if sessions else None
        return nullcontext(Prepared({})) if prepare is None else prepare(*call)

    def _beside(self, key: str) -> dict[str, Any]:
        """Options of a summariser's call beside the agent's."""
        session, binding = self._session, self._binding
        if binding is None:
            return {}
        none: dict[str, Any] = {}

        def flight() -> Flight | None:
            return self._runtime.flights.find(session.tenant, key)

        def urgent() -> bool:
            return session.urgent() or ((own := flight()) is not None and own.urgent())

        def ask() -> dict[str, Any]:
            self._prepared = True
            return dict(
                binding.transform_options(
                    self._foreground,
                    urgent,
                    turn=partial(self._foreground.serves, self),
                    wait_s=min(MAX_DEFER_S, session.policy.timeout / 4),  # most of the time is for the call itself
                    view=self._own_view,
                    spent=lambda usage: self._runtime.flights.warmed(flight(), usage),
                    wanted=session.working,
                )
            )

        return self._ask("options", ask, none)

    def _own_view(self) -> list[dict[str, Any]]:
        """What the agent was sent last and has answered since, as it would send it next."""
        session = self._session

        return self._ask("view", lambda: self._rendered(session.shown(self._latest)), [])

    def _rendered(self, view: Sequence[Any]) -> list[dict[str, Any]]:
        """The messages of the agent's request for this view."""
        session = self._session
        return [*map(dict, session.prompt), *(sent for m in view for sent in openai_messages(session.codec, m))]

    async def warm_up(self, flight: Flight, artifact: Artifact, preload_kv: bool | None) -> bool:
        """Preload what ``flight`` has made, for the first session that holds a handle of it and still needs it."""
        served: list[Session] = []
        while True:
            waiting = [h.session for h in list(flight.handles) if h.state not in FINAL and not h.session.closed]
            session = next((s for s in waiting if s not in served and s.serving.preloads(preload_kv)), None)
            if session is None:
                return False
            served.append(session)
            if flight.plan.opening:
                return await session.serving.preload_opening(flight)
            warm = await session.serving.preload(flight, artifact)
            if warm or session.serving.waits_for(flight):
                return warm

    def may_warm(self, flight: Flight) -> bool:
        """May a view of what the flight has made still get warm for this session?"""
        return flight.preload is not None and self.steadiness.steady and self.preloads(True)

    def waits_for(self, flight: Flight) -> bool:
        """May this session still commit what the flight has made? (Not where its branch is dead.)"""
        session = self._session
        mine = [h for h in list(flight.handles) if h.session is session and h.state not in FINAL]
        return not session.closed and any(not session.finishes(h) for h in mine)

    async def preload(self, flight: Flight, artifact: Artifact) -> bool:
        """Warm the engine's cache with the view that committing ``artifact`` gives. Is all of it warm?"""
        session = self._session
        if self._binding is None or not self.steadiness.steady or session.closed or not session.wants_preload():
            return False
        shown: list[dict[str, Any]] = []
        warmth, request = Warmth(), session.request

        def view() -> list[dict[str, Any]]:
            shown[:] = self._shown(artifact, self._latest)
            if not warmth.assumed:
                self._assume(warmth, shown)
            return list(shown)

        try:
            artifact = session.likeliest(flight, artifact, self._latest)
            warmth = self._warmth.pop(artifact.key, warmth)
            self._warmth[artifact.key] = warmth  # the newest
            for key in list(self._warmth)[:-MAX_WARM]:
                (self._warmth.pop(key, None) or Warmth()).drop()
            binding, self._prepared = self._binding, True
            with for_a_while(self._foreground, session.policy.timeout) as time_left:
                report = await self._gate.open(
                    lambda may: binding.preload(
                        view,
                        request=request,
                        foreground=self._foreground,
                        needed=lambda: self._sends(request) and self.waits_for(flight) and time_left(),
                        hurried=lambda rate: session.hurried(rate, artifact, warmth.cold(shown)),
                        may=may,
                        warmth=warmth,
                    )
                )
        except Exception as error:  # a cold commit is slower, never wrong
            return self._refused(error)
        finally:  # also when it is cut off
            spent, warmth.spent = warmth.spent, Usage()
            self._runtime.flights.warmed(flight, spent)
            if not self._sends(request):
                self._cool(flight)
        if report.complete and not warmth.done:  # a binding that keeps no account of its own
            warmth.part, warmth.done, warmth.begun = list(shown), size_of(shown), True
        self._share(flight, artifact.key, warmth)
        return self._reported(report, flight, counted=spent.calls > 0)

    def _assume(self, warmth: Warmth, view: Sequence[dict[str, Any]]) -> None:
        """Where the engine finds what it has cached by content, it should have what the view has in common with the
        agent's last call, if that was answered."""
        session = self._session
        since = session.branch.sent
        answered = since and since < len(self._latest) and session.codec.role(self._latest[since]) == "assistant"
        if answered and getattr(self._binding, "by_content", False):
            warmth.assumed = size_of(common(view, self._rendered(self._sent))) if self._sent else 0

    def _share(self, flight: Flight, key: str, warmth: Warmth) -> None:
        """Where the engine finds what it has cached by content, it is warm for whoever would send the same."""
        if not getattr(self._binding, "by_content", False):
            return
        own = self._session
        for session in {h.session for h in list(flight.handles) if h.session is not own and h.state not in FINAL}:
            alike = same(session.request, own.request) and same(session.prompt, own.prompt)
            if session.engine is own.engine and alike:
                session.serving.heard(key, warmth)

    def heard(self, key: str, warmth: Warmth) -> None:
        """Another session has warmed this artifact's view, where this one would find it."""
        self._warmth.setdefault(key, replace(warmth))

    def _shown(self, artifact: Artifact, messages: Sequence[Any]) -> list[dict[str, Any]]:
        """What the agent would send after committing ``artifact``."""
        return self._rendered(self._session.preview(artifact, messages))

    def warm(self, artifact: Artifact, messages: Sequence[Any]) -> bool:
        """Is the view that committing ``artifact`` to these messages gives warm where this session's next call goes?

        It is when the engine has evaluated it for this session, but for what was added since the last turn's call, or
        for as much as a turn usually adds.
        """
        warmth = self._warmth.get(artifact.key)
        if warmth is None or not warmth.done:
            return False
        session = self._session

        def covered() -> bool:
            since = session.branch.sent or len(self._latest)
            new = size_of([sent for m in messages[since:] for sent in openai_messages(session.codec, m)])
            usual = session.growth() * warmth.done // warmth.tokens if warmth.tokens else 0
            if session.branch.refusal(artifact) is not None:
                return False
            return warmth.covers(self._shown(artifact, messages), max(new, usual))

        return self._ask("warm", covered, False)

    async def preload_opening(self, flight: Flight) -> bool:
        """Warm the engine's cache with a sub-agent's opening. Is all of it warm?"""
        own = own_request(flight) is not None
        if (binding := self._binding) is None or not (own or self.steadiness.steady):
            return False
        warmth, request = Warmth(), self._session.request
        try:
            if self._runtime.endpoints.rests(self._session.engine) > 0:  # its messages are waited for: cold, at once
                return False
            report = await self.openings.warm(flight, binding.opening, self._foreground, self._gate, warmth)
        except Exception as error:  # a cold sub-agent is slower, never wrong
            return self._refused(error, opening=True)
        finally:  # also when it is cut off
            self._runtime.flights.warmed(flight, warmth.spent)
            if not own and not self._sends(request):
                self._cool(flight)
        return report is not None and self._reported(report, flight, counted=warmth.spent.calls > 0, opening=True)

    def _refused(self, error: Exception, **more: Any) -> bool:
        """A preload failed. An overloaded engine is left alone as it asked; that it is so is no error."""
        session = self._session
        if self._runtime.endpoints.overloaded(session.engine, error) and getattr(error, "status", None) in (429, 503):
            return self._reported(PreloadReport(complete=False), None, why="overloaded", error=str(error), **more)
        if not session.closed:
            self._runtime.events.error(error, where="preload", session=session.id, tenant=session.tenant)
        return False

    def _held_back(self, why: str) -> None:
        session = self._session
        self._runtime.events.emit(
            "admission.deferred", session=session.id, tenant=session.tenant, work=f"preload:{session.id}", why=why
        )

    def _reported(self, report: PreloadReport, flight: Flight | None, *, counted: bool = False, **more: Any) -> bool:
        if not counted:
            self._runtime.flights.warmed(flight, report.usage)
        self._runtime.events.emit(
            "preload",
            session=self._session.id,
            tenant=self._session.tenant,
            complete=report.complete,
            tokens=report.tokens,
            requests=report.requests,
            **more,
        )
        return bool(report.complete)

    def handed_out(self, flight: Flight) -> None:
        """The caller has a sub-agent's opening."""
        self._ask("offer", lambda: self.openings.handed_out(flight), None)
        self._foreground.poke()

    def begun(self, digests: Sequence[bytes]) -> None:
        """This session's first history has these chain digests: if it begins as its parent has prepared it, its calls
        go where that is warm."""
        parent, binding = self._session.parent, self._binding
        if parent is None or binding is None or parent.engine is not self._session.engine:
            return
        opening = parent.openings.claim(digests)
        if opening is not None:
            self._ask("take_over", lambda: binding.take_over(opening), None)
            self._ask("close", opening.close, None)

    def asked(self, changed: bool | None, handles: Sequence[LookaheadHandle]) -> None:
        """The agent's request was seen with a turn; has it changed? Then what was warmed for the last one is cold,
        for all of the ``handles``. ``None``: what it is now is not known."""
        session, before = self._session, self.steadiness.steady
        self.steadiness.seen(changed)
        if changed is False:
            return
        if before and self.steadiness.known and not self.steadiness.steady:
            self._runtime.events.emit(
                "request.unsteady", session=session.id, tenant=session.tenant, changes=self.steadiness.changes
            )
        self._sent = []
        for key in list(self._warmth):
            (self._warmth.pop(key, None) or Warmth()).drop()
        for flight in [h.flight for h in handles]:
            if flight.plan.opening:
                if own_request(flight) is not None:
                    continue  # it has one of its own
                if flight.artifact is not None:
                    flight.artifact = replace(flight.artifact, warm=False)
            self._cool(flight)
        self.openings.cooled()
        self._foreground.poke()  # a preload with the last one ends

    def _sends(self, request: Mapping[str, Any]) -> bool:
        """Are these still the options of the agent's request, as far as is known, and for long enough?"""
        return self._session.request is request and self.steadiness.steady

    def _cool(self, flight: Flight) -> None:
        """What was warmed of it is of no use to this session; wasted, where nobody else waits for it."""
        if all(h.session is self._session or h.state in FINAL for h in list(flight.handles)):
            self._runtime.flights.cooled(flight)

    def follow(self, messages: Sequence[Any]) -> None:
        """These are the latest messages: what a preload warms."""
        self._latest = list(messages)

    def grew(self, handle: LookaheadHandle, messages: Sequence[Any]) -> None:
        """The history grew while a lookahead lives: preload warms what was added too."""
        self.follow(messages)
        flight = handle.flight
        if handle.state is HandleState.READY and flight.preload is not None and not self._rewarming and flight.artifact:
            artifact = flight.artifact
            self._rewarming = True

            async def again() -> None:
                try:
                    warm = await self.preload(flight, artifact)
                    if flight.artifact is artifact:
                        flight.artifact = replace(artifact, warm=warm)
                finally:
                    self._rewarming = False

            def never() -> None:
                self._rewarming = False

            engine = self._session.engine
            self._runtime.background(
                f"preload:{self._session.id}", again, self._session, never, engine=engine, idle=True
            )

    @property
    def warming(self) -> bool:
        """Is a view being preloaded behind a result that is ready?"""
        return self._rewarming

    def sent(self, view: Sequence[Any]) -> None:
        """This view is what the agent's next call is made with."""
        self.steadiness.turn()
        self._sent = list(view) if self._binding is not None else []

    def committed(self, artifact: Artifact) -> None:
        """If it was preloaded, what the engine holds of it is what the agent sends from now on."""
        binding, warmth = self._binding, self._warmth.pop(artifact.key, None)
        if binding is None:
            return
        moves = warmth is not None and warmth.begun
        if moves and warmth is not None and not artifact.warm:
            moves = self._ask("committed", lambda: self._gains(warmth), True)
        if moves or getattr(binding, "away", False):
            self._prepared = self._session.working()  # then another one may hold something too
            self._ask("committed", lambda: binding.committed(artifact.warm), None)
        elif warmth is not None:
            warmth.drop()  # the agent's calls stay where they are
        self._foreground.poke()

    def _gains(self, warmth: Warmth) -> bool:
        """Is more of the view, as it is now, warm where it was preloaded than where the agent's calls went so far?"""
        binding, session = self._binding, self._session
        if getattr(binding, "aligned", True):
            return True  # one place for all, or one that holds what the other does
        view, kept = session.branch.project(self._latest), size_of(session.prompt)
        for old, new in zip(self._sent, view, strict=False):
            sent = openai_messages(session.codec, new)
            if old is not new and openai_messages(session.codec, old) != sent:
                break
            kept += size_of(sent)
        warmth.fit(self._rendered(view))
        return warmth.held > kept

    def preloaded(self, *keys: str) -> bool:
        """Has the engine warmed the view of one of these artifacts for this session?"""
        return any((w := self._warmth.get(key)) is not None and w.done > 0 and not w.misses for key in keys)

    def discarded(self, *keys: str) -> None:
        """If one of these artifacts was preloaded (or its summary was being written), its slot is free again."""
        self._ask("close", lambda: self.openings.discarded(*keys), None)
        for key in keys:
            if (warmth := self._warmth.pop(key, None)) is not None:
                warmth.drop()
        self.settled()

    def settled(self) -> None:
        """A lookahead has come to its end: with the last one what it was worked in is free again."""
        binding = self._binding
        if binding is not None and self._prepared and not self._session.working():
            self._prepared = False
            self._ask("discarded", binding.discarded, None)
            self._foreground.poke()

    def close(self) -> None:
        """Give the engine's slots back."""
        self._ask("close", self.openings.close, None)
        with self._lock:
            self._blind = False  # no slot is taken any more
        if self._binding is not None:
            self._ask("close", self._binding.close, None)
            self._foreground.poke()  # a preload for this session ends
        self._warmth.clear()
        self._latest, self._sent = [], []


def _slotted(engine: Any) -> bool:
    """Is it a server that is known to have slots to work in?"""
    return bool(getattr(getattr(engine, "capabilities", None), "slotted", False))
