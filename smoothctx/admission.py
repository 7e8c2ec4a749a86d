"""Admission: may a lookahead run now, without costing the foreground anything?

:func:`admit` decides; it is pure. :class:`LoadAdmission` feeds it: the engine's own load, asked for at most twice a
second, and what we see of the foreground ourselves. It is asked in the pool, never on a turn's path.

An engine that nobody uses now is never spared, and a promoted work is never put off. Otherwise a work waits

- while the server says that it is rate-limited (``rate_limited``); if that lasts too long, it is skipped;
- while the engine is *overloaded* by its own word: requests wait there that are not ours (``waiting``), or its KV cache
  is nearly full (``kv_cache``). After ``max_defer_s`` it is dropped as ``admission_denied``: the session starts another
  one at its next turn, which covers more;
- while the engine is *saturated*, as far as we see: first tokens come clearly later than on a calm engine (``slower``),
  all its slots are taken (``full``), or several users have kept it busy without a gap for the last seconds
  (``saturated``). None of that proves that one more request hurts, so after ``max_defer_s`` it runs all the same; and
  before that, when it is nearly due and first tokens are known to come as fast as ever.

One agent alone never saturates an engine: what its lookahead costs its own turns it gains at the commit. On hosted
APIs only ``rate_limited`` counts; how many calls go there at once is :mod:`smoothctx.endpoints`' business.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import anyio

from .endpoints import Endpoints
from .events import EventSink
from .foreground import Foreground, Seen
from .work import DEFER_S, MAX_DEFER_S, MIN_DEFER_S, Work

#: seconds that a load counts as known, and that asking for it may take
LOAD_TTL_S, LOAD_WAIT_S = 0.5, 0.3
#: the used part of a KV cache from which it is nearly full
KV_FULL = 0.9
#: the share of the last seconds from which on the foreground leaves no gap, the seconds that must be known for it, and
#: the users that take part on average
NO_GAP, NO_GAP_S, SEVERAL = 0.95, 2.0, 1.5
#: users beside whom one work of ours is not noticed: at most a twentieth of what runs
MANY = 20
#: seconds until admission looks for a gap again
GAP_S = 0.5
#: a work is expected to take so many times what it usually does when it is nearly due; one that has less than this
#: share of it is too late
SLACK, TOO_LATE = 1.25, 0.25

Why = Literal["", "rate_limited", "waiting", "kv_cache", "slower", "full", "saturated", "too_late"]


@final
class AdmitAll:
    """Admits everything: ``Runtime(admission=AdmitAll())`` switches admission off."""

    async def decide(self, work: Work) -> str:
        """``"run"``."""
        return "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a work asks. ``None``: unknown.

    ``own``: the engine is a server of one's own, no hosted API. ``running``, ``waiting``, ``kv_used``: what it says of
    its load, our requests included. ``ours``: requests of ours there. ``capacity``: requests that it serves at once.
    ``rests_s``: seconds for which it has asked us to stay away. ``deferred_s``: seconds for which the work was put off
    already. ``due_in_s``, ``work_s``: seconds until its commit is expected, and that it usually takes.
    """

    seen: Seen = Seen()
    own: bool = True
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    ours: int = 0
    capacity: int | None = None
    rests_s: float = 0.0
    deferred_s: float = 0.0
    max_defer_s: float = MAX_DEFER_S
    due_in_s: float | None = None
    work_s: float | None = None
    promoted: bool = False

    @property
    def others(self) -> int:
        """Requests of others that are known to run or wait there."""
        return max(self.seen.in_flight, (self.running or 0) + (self.waiting or 0) - self.ours)


@dataclass(frozen=True, slots=True)
class Decision:
    """``defer_s`` is for ``"defer"``; ``why`` is empty for ``"run"``."""

    answer: Literal["run", "defer", "skip"]
    why: Why = ""
    defer_s: float = 0.0


RUN = Decision("run")


def admit(now: Situation) -> Decision:
    """Run it, put it off, or drop it."""
    if now.promoted:
        return RUN
    if now.rests_s > 0:
        if now.rests_s > now.max_defer_s - now.deferred_s:
            return Decision("skip", "rate_limited")
        return Decision("defer", "rate_limited", max(MIN_DEFER_S, now.rests_s))
    if not now.own or now.others <= 0:
        return RUN
    if why := _overloaded(now):
        if not now.deferred_s and _too_late(now):
            return Decision("skip", "too_late")  # it will be promoted, or a fallback takes its place
        return Decision("defer", why, DEFER_S)
    if (why := _saturated(now)) and now.deferred_s < now.max_defer_s and not (_due(now) and now.seen.slower is False):
        return Decision("defer", why, GAP_S)
    return RUN


def _overloaded(now: Situation) -> Why:
    if now.waiting is not None and now.waiting > now.ours:
        return "waiting"
    if now.kv_used is not None and now.kv_used > KV_FULL:
        return "kv_cache"
    return ""


def _saturated(now: Situation) -> Why:
    if now.seen.in_flight and now.seen.slower:
        return "slower"
    if now.capacity is not None and now.others >= now.capacity:
        return "full"
    return _without_gap(now)


def _without_gap(now: Situation) -> Why:
    busy = now.seen.busy
    if not now.seen.in_flight or busy.span_s < NO_GAP_S or busy.share < NO_GAP or busy.mean < SEVERAL:
        return ""
    roomy = now.waiting == 0 and busy.mean >= MANY * (now.ours + 1)
    return "" if roomy else "saturated"


def _due(now: Situation) -> bool:
    return now.due_in_s is not None and now.work_s is not None and now.due_in_s <= SLACK * now.work_s


def _too_late(now: Situation) -> bool:
    return now.due_in_s is not None and now.work_s is not None and now.due_in_s < TOO_LATE * now.work_s


@dataclass(slots=True)
class _Asked:
    """An engine's load as it was last told, and who asks for it now."""

    load: Any = None
    at: float = -math.inf
    answer: anyio.Event | None = None


@dataclass(slots=True)
class _Told:
    """A work that was put off: since when, and the reasons that were said."""

    since: float
    why: set[str] = field(default_factory=set)


@final
class LoadAdmission:
    """The default: by the engine's load and by our own view of the foreground. On the runtime's loop only."""

    def __init__(
        self,
        clock: Callable[[], float],
        events: EventSink,
        endpoints: Endpoints,
        *,
        max_defer_s: float = MAX_DEFER_S,
    ) -> None:
        self._clock = clock
        self._events = events
        self._endpoints = endpoints
        self._max_defer_s = max_defer_s
        self._asked: weakref.WeakKeyDictionary[Any, _Asked] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakKeyDictionary[Work, _Told] = weakref.WeakKeyDictionary()

    async def decide(self, work: Work) -> object:
        """``"run"``, ``"skip"`` or ``("defer", seconds)``. A work that loads no engine runs."""
        if work.engine is None or work.promoted:
            return "run"
        load = await self._load(work.engine)
        situation = self._situation(work, load)
        decision = admit(situation)
        if decision.answer == "run":
            return "run"
        told = self._told.setdefault(work, _Told(self._clock()))
        if decision.why not in told.why:
            told.why.add(decision.why)
            self._say(work, decision, situation)
        return "skip" if decision.answer == "skip" else ("defer", decision.defer_s)

    async def pressed(self, engine: Any, foreground: Foreground) -> Why:
        """Why nothing more is to be preloaded there now: it is overloaded by its own word, or several users leave it no
        gap; ``""`` where neither is so."""
        now = self._here(engine, foreground, await self._load(engine))
        return _overloaded(now) or _without_gap(now) if now.own and now.others > 0 else ""

    def _situation(self, work: Work, load: Any) -> Situation:
        now, told = self._clock(), self._told.get(work)
        return replace(
            self._here(work.engine, work.foreground, load),
            deferred_s=0.0 if told is None else now - told.since,
            max_defer_s=self._max_defer_s,
            due_in_s=None if work.due is None else work.due - now,
            work_s=work.usual_s,
            promoted=work.promoted,
        )

    def _here(self, engine: Any, foreground: Foreground | None, load: Any) -> Situation:
        known = getattr(engine, "capabilities", None)
        seen = foreground.seen() if foreground is not None else Seen()
        slots = getattr(known, "slots", 0)
        return Situation(
            seen=seen,
            own=known is not None and known.flavour != "hosted",
            running=getattr(load, "running", None),
            waiting=getattr(load, "waiting", None),
            kv_used=None if slots else getattr(load, "kv_used", None),  # of slots the idle ones stay filled
            ours=max(seen.working, self._endpoints.in_flight(engine)),
            capacity=slots if isinstance(slots, int) and slots > 0 else None,
            rests_s=self._endpoints.rests(engine),
        )

    async def _load(self, engine: Any) -> Any:
        """What the engine says of itself, at most ``LOAD_TTL_S`` old; ``None`` where it does not, or not in time."""
        known = getattr(engine, "capabilities", None)
        ask: Any = getattr(engine, "load", None)
        if ask is None or not (getattr(known, "metrics", False) or getattr(known, "slots", 0)):
            return None
        try:
            asked = self._asked.setdefault(engine, _Asked())
        except TypeError:  # it cannot be held weakly
            return None
        if asked.answer is not None:  # one request at a time
            await asked.answer.wait()
        elif self._clock() - asked.at >= LOAD_TTL_S:
            asked.answer, asked.load = anyio.Event(), None
            try:
                with anyio.move_on_after(LOAD_WAIT_S):
                    asked.load = await ask(timeout_s=LOAD_WAIT_S)
            except Exception:  # a load that cannot be read is unknown
                asked.load = None
            finally:
                asked.at = self._clock()
                asked.answer.set()
                asked.answer = None
        return asked.load

    def _say(self, work: Work, decision: Decision, now: Situation) -> None:
        seen = now.seen
        figures: dict[str, Any] = {
            "in_flight": seen.in_flight,
            "ours": now.ours,
            "busy": round(seen.busy.share, 3),
            "users": round(seen.busy.mean, 2),
            "running": now.running,
            "waiting": now.waiting,
            "kv_used": now.kv_used,
            "rests_s": now.rests_s or None,
            "due_in_s": now.due_in_s,
            "ttft_s": seen.latency.now_s if seen.latency is not None else None,
            "calm_ttft_s": seen.latency.calm_s if seen.latency is not None else None,
        }
        self._events.emit(
            "admission.skipped" if decision.answer == "skip" else "admission.deferred",
            session=work.session,
            tenant=work.tenant,
            work=work.name,
            why=decision.why,
            **{name: value for name, value in figures.items() if value is not None},
        )
