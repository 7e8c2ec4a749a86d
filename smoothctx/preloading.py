"""Preloading: what the agent's engine has warm for one session, and warming it before the turn that sends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .codec import openai_messages
from .engines.preload import PreloadReport, Warmth, common, for_a_while, size_of
from .flight import Flight
from .handle import LookaheadHandle
from .openings import own_request
from .request import Steadiness, same
from .states import FINAL, HandleState
from .usage import Usage
from .view import Artifact
from .warming import Gate

if TYPE_CHECKING:
    from .runtime import Runtime
    from .serving import Serving
    from .session import Session

#: views of which a session remembers what is warm
MAX_WARM = 8


class Preloading:
    """Warms the views that one session may commit and its sub-agents' openings, and knows what is warm of them."""

    def __init__(self, runtime: Runtime, session: Session, serving: Serving) -> None:
        self._runtime = runtime
        self._session = session
        self._serving = serving
        self._foreground = serving.foreground
        self._gate = Gate(
            session.engine,
            serving.foreground,
            endpoints=runtime.endpoints,
            admission=runtime.admission,
            clock=runtime.now,
            say=self._held_back,
        )
        #: of the agent's request
        self.steadiness = Steadiness()
        self._latest: list[Any] = []
        self._sent: list[Any] = []  # the view that the agent's last call was made with
        self._rewarming = False
        #: of the view of each artifact, by its key
        self._warmth: dict[str, Warmth] = {}

    def wished(self, preload_kv: bool | None) -> bool:
        """Is a view of this session preloaded? ``None``: as the policy and the engine say."""
        wish = self._session.policy.preload_kv if preload_kv is None else preload_kv
        if self._serving.binding is None or wish is False or self._serving.behind:
            return False
        return True if wish is True else bool(getattr(self._session.engine, "preload_by_default", False))

    async def warm_up(self, flight: Flight, artifact: Artifact, preload_kv: bool | None) -> bool:
        """Preload what ``flight`` has made, for the first session that holds a handle of it and still needs it."""
        served: list[Session] = []
        while True:
            waiting = [h.session for h in list(flight.handles) if h.state not in FINAL and not h.session.closed]
            session = next((s for s in waiting if s not in served and s.serving.preloading.wished(preload_kv)), None)
            if session is None:
                return False
            served.append(session)
            there = session.serving.preloading
            if flight.plan.opening:
                return await there.preload_opening(flight)
            warm = await there.preload(flight, artifact)
            if warm or there.waits_for(flight):
                return warm

    def may_warm(self, flight: Flight) -> bool:
        """May a view of what the flight has made still get warm for this session?"""
        return flight.preload is not None and self.steadiness.steady and self.wished(True)

    def waits_for(self, flight: Flight) -> bool:
        """May this session still commit what the flight has made? (Not where its branch is dead.)"""
        session = self._session
        mine = [h for h in list(flight.handles) if h.session is session and h.state not in FINAL]
        return not session.closed and any(not session.finishes(h) for h in mine)

    async def preload(self, flight: Flight, artifact: Artifact) -> bool:
        """Warm the engine's cache with the view that committing ``artifact`` gives. Is all of it warm?"""
        session = self._session
        if self._serving.binding is None or not self.steadiness.steady or session.closed or not session.wants_preload():
            return False
        shown: list[dict[str, Any]] = []
        warmth, request = Warmth(), session.request

        def view() -> list[dict[str, Any]]:
            shown[:] = self._rendered(session.preview(artifact, lambda: self._latest))
            if not warmth.assumed:
                self._assume(warmth, shown)
            return list(shown)

        try:
            artifact = session.likeliest(flight, artifact, self._latest)
            warmth = self._warmth.pop(artifact.key, warmth)
            self._warmth[artifact.key] = warmth  # the newest
            self.discarded(*list(self._warmth)[:-MAX_WARM])
            binding, self._serving.prepared = self._serving.binding, True
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
                        quiet=session.quiet,
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
        if answered and getattr(self._serving.binding, "by_content", False):
            warmth.assumed = size_of(common(view, self._rendered(self._sent))) if self._sent else 0

    def _share(self, flight: Flight, key: str, warmth: Warmth) -> None:
        """Where the engine finds what it has cached by content, it is warm for whoever would send the same."""
        if not getattr(self._serving.binding, "by_content", False):
            return
        own = self._session
        for session in {h.session for h in list(flight.handles) if h.session is not own and h.state not in FINAL}:
            alike = same(session.request, own.request) and same(session.prompt, own.prompt)
            if session.engine is own.engine and alike:
                session.serving.preloading.heard(key, warmth)

    def heard(self, key: str, warmth: Warmth) -> None:
        """Another session has warmed this artifact's view, where this one would find it."""
        self._warmth.setdefault(key, replace(warmth))

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
            shown = self._rendered(session.preview(artifact, lambda: messages))
            return warmth.covers(shown, max(new, usual))

        return self._serving.ask("warm", covered, False)

    async def preload_opening(self, flight: Flight) -> bool:
        """Warm the engine's cache with a sub-agent's opening. Is all of it warm?"""
        own = own_request(flight) is not None
        if (binding := self._serving.binding) is None or not (own or self.steadiness.steady):
            return False
        warmth, request = Warmth(), self._session.request
        try:
            if self._runtime.endpoints.rests(self._session.engine) > 0:  # its messages are waited for: cold, at once
                return False
            report = await self._serving.openings.warm(flight, binding.opening, self._foreground, self._gate, warmth)
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
        self.cooled()
        for flight in [h.flight for h in handles]:
            if flight.plan.opening:
                if own_request(flight) is not None:
                    continue  # it has one of its own
                if flight.artifact is not None:
                    flight.artifact = replace(flight.artifact, warm=False)
            self._cool(flight)
        self._serving.openings.cooled()
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
        self._sent = list(view) if self._serving.binding is not None else []

    def gains(self, warmth: Warmth) -> bool:
        """Is more of the view, as it is now, warm where it was preloaded than where the agent's calls went so far?"""
        binding, session = self._serving.binding, self._session
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

    def own_view(self) -> list[dict[str, Any]]:
        """What the agent was sent last and has answered since, as it would send it next."""
        return self._serving.ask("view", lambda: self._rendered(self._session.shown(lambda: self._latest)), [])

    def _rendered(self, view: Sequence[Any]) -> list[dict[str, Any]]:
        """The messages of the agent's request for this view."""
        session = self._session
        return [*map(dict, session.prompt), *(sent for m in view for sent in openai_messages(session.codec, m))]

    def taken(self, key: str) -> Warmth | None:
        """What is warm of this artifact's view, which is committed."""
        return self._warmth.pop(key, None)

    def discarded(self, *keys: str) -> None:
        """These artifacts will not be committed."""
        for key in keys:
            if (warmth := self._warmth.pop(key, None)) is not None:
                warmth.drop()

    def cooled(self) -> None:
        """Nothing of it is warm any more."""
        self.discarded(*list(self._warmth))

    def close(self) -> None:
        """Forget everything."""
        self._warmth.clear()
        self._latest, self._sent = [], []
