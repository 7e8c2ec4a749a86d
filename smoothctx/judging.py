"""Judging: what one session's judge has said of its ready results, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import anyio

from . import urgency
from .blockwise import Blockwise
from .conversation import Conversation
from .endpoints import Caller, calling
from .handle import LookaheadHandle
from .handles import Handles
from .judge import MAX_MISSED_CHARS, Evidence, TrajectoryJudge, Verdict, text_of
from .shelf import Shelf
from .states import FINAL, HandleState, Reason
from .trigger import Trigger
from .usage import Usage
from .view import Artifact

if TYPE_CHECKING:
    from .session import Session

#: runs for which it is remembered what an earlier result missed
MAX_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class Case:
    """One result that waits for its verdict."""

    handle: LookaheadHandle
    key: str
    evidence: Evidence
    #: messages of the history that were read
    read: int
    actions: int = 0
    asked: bool = False
    verdict: Verdict | None = None
    #: it is used without a verdict
    waived: bool = False
    #: boundaries at which it was held back
    held: int = 0
    #: ends the judge's call, while there is one
    stop: Callable[[], None] | None = None

    def close(self) -> None:
        """Nobody needs the verdict any more."""
        stop, self.stop = self.stop, None
        if stop is not None:
            stop()


@final
class Judging:
    """Judges the results of one session. Called under the session's lock, save for what the judge's model answers."""

    def __init__(
        self,
        session: Session,
        judge: TrajectoryJudge,
        conversation: Conversation,
        handles: Handles,
        shelf: Shelf,
        trigger: Trigger,
        blockwise: Blockwise | None,
        lock: threading.RLock,
    ) -> None:
        self._session = session
        self._judge = judge
        self._conversation = conversation
        self._handles = handles
        self._shelf = shelf
        self._trigger = trigger
        self._blockwise = blockwise
        self._lock = lock
        self._cases: dict[LookaheadHandle, Case] = {}
        # what could not be read: it is used unjudged
        self._broken: weakref.WeakSet[LookaheadHandle] = weakref.WeakSet()
        # by the digest at the start of the run: a retry may cover more of the history, from there on
        self._missed: OrderedDict[bytes, str] = OrderedDict()

    def missed(self, start_digest: bytes) -> str | None:
        """What the last result for the run that begins here lacked, if it was refused."""
        return self._missed.get(start_digest)

    def look(self, messages: Sequence[Any], *, chosen: bool = False) -> None:
        """The history grew: a ready result may have to be judged by what is new.

        ``chosen``: this boundary has chosen among its candidates. Before that nobody knows what would be committed.
        """
        for handle in [h for h in self._cases if h.state in FINAL]:
            self.dropped(handle)
        live = None if self._blockwise is not None else self._handles.lookahead  # blocks wait for their trigger
        if live is None or live.state is not HandleState.READY or live.artifact is None:
            return
        if chosen or not (live.flight.artifact or live.artifact).alternatives:
            self._examined(live, live.artifact, messages)

    def accepts(self, handle: LookaheadHandle, messages: Sequence[Any]) -> bool:
        """May it be committed at this boundary? A refused one is dropped."""
        artifact = handle.artifact
        if handle.explicit or artifact is None:
            return True
        case = self._examined(handle, artifact, messages)
        if case is None:
            return handle in self._broken and handle.state not in FINAL
        if case.verdict is not None or case.waived:
            return True
        if case.held >= self._judge.boundaries:
            self._waive(case, "no answer in time" if case.asked else "the agent has done nothing since")
            return True
        case.held += 1
        return False

    def dropped(self, handle: LookaheadHandle) -> None:
        """Nobody uses it."""
        if (case := self._cases.pop(handle, None)) is not None:
            case.close()

    def committed(self, handle: LookaheadHandle) -> None:
        """It is in use now."""
        case = self._cases.get(handle)
        self.dropped(handle)
        self._missed.pop(handle.flight.plan.start_digest, None)
        told = handle.explicit or handle in self._broken
        artifact = handle.artifact
        if case is not None and artifact is not None and case.key != artifact.key:
            case = None  # it is another candidate's
        if not told and (case is None or (case.verdict is None and not case.waived)):
            self._conversation.emit("lookahead.unjudged", handle=handle.id, why="it was needed at once")

    def _examined(self, handle: LookaheadHandle, artifact: Artifact, messages: Sequence[Any]) -> Case | None:
        """Its case; ``None`` when it was refused, or when it could not even be read."""
        if handle in self._broken:
            return None
        try:
            return self._examine(handle, artifact, messages)
        except Exception as error:  # a judge never stands in the way
            self._broken.add(handle)
            self._cases.pop(handle, None)
            self._conversation.error(error, "judge")
            why = f"{type(error).__name__}: {error}"
            self._conversation.emit("lookahead.unjudged", handle=handle.id, why=why)
            return None

    def _examine(self, handle: LookaheadHandle, artifact: Artifact, messages: Sequence[Any]) -> Case | None:
        """Read what is new; ``None`` when that refuses it."""
        case = self._cases.get(handle)
        if case is None or case.key != artifact.key:
            held = 0 if case is None else case.held
            self.dropped(handle)
            case = self._cases[handle] = self._open(handle, artifact, messages)
            case.held = held
        history = self._conversation.branch.history
        for i in range(case.read, len(history)):
            case.actions += case.evidence.read(messages[i], self._conversation.codec)
        case.read = len(history)
        if not case.actions:
            return case
        found = case.evidence.identifiers()
        if found.score < self._judge.threshold:
            self._refuse(case, found)
            return None
        if not self._judge.asks:
            if case.verdict is None:
                self._say(case, found)
            case.verdict = found
        elif not case.asked:
            case.asked = True
            self._ask(case)
        return case

    def _open(self, handle: LookaheadHandle, artifact: Artifact, messages: Sequence[Any]) -> Case:
        branch, codec, plan = self._conversation.branch, self._conversation.codec, handle.flight.plan
        length = len(branch.history)
        end = artifact.replacement.end
        view = branch.preview(artifact, messages[:length])
        before = list(plan.request.before)
        shown = view[len(before) : len(view) - (length - end)]
        snapshot = min(max(handle.snapshot, end), length)
        covered = [text_of(m, codec) for u in plan.units for m in u.messages]
        evidence = Evidence(
            record="\n".join(text_of(m, codec) for m in shown),
            covered="\n".join(covered),
            known=[text_of(m, codec) for m in (*before, *messages[end:snapshot])],
            kept=list(messages[end:snapshot]),
            since=[],
        )
        return Case(handle, artifact.key, evidence, snapshot)

    def _ask(self, case: Case) -> None:
        runtime, codec, engine = self._conversation.runtime, self._conversation.codec, self._judge.engine
        judged = Evidence(
            record=case.evidence.record,
            covered="",
            known=[],
            kept=case.evidence.kept,
            since=list(case.evidence.since),
        )

        async def run() -> None:
            loop = asyncio.get_running_loop()
            verdict: Verdict | None = None
            try:
                with anyio.fail_after(self._judge.timeout_s) as scope:
                    with self._lock:
                        if case.handle.state in FINAL:
                            return

                        def stop() -> None:
                            if not loop.is_closed():
                                loop.call_soon_threadsafe(scope.cancel)

                        case.stop = stop
                    with self._calling(case, engine):
                        verdict = await self._judge.ask(judged, codec, lambda usage: self._spent(case, usage))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                with self._lock:
                    self._waive(case, why)
            with self._lock:
                case.stop = None
                if verdict is not None:
                    self._decided(case, verdict)

        def never() -> None:
            with self._lock:
                self._waive(case, "the judge could not be run")

        runtime.background(f"judge:{self._conversation.id}", run, self._session, never, engine=engine)

    def _calling(self, case: Case, engine: Any) -> AbstractContextManager[Caller]:
        """For whom the judge's model is asked: it keeps out of the turns' way as a summariser does."""
        runtime, session = self._conversation.runtime, self._session
        foreground = None if engine is None else runtime.foreground(engine)
        aside_s = urgency.aside_s(self._judge.timeout_s)
        return calling(runtime.endpoints, session.tenant, session.id, lambda: case.handle.promoted, foreground, aside_s)

    def _decided(self, case: Case, verdict: Verdict) -> None:
        if case.handle.state in FINAL or self._cases.get(case.handle) is not case:
            return
        if verdict.score < self._judge.threshold:
            self._refuse(case, verdict)
        else:
            case.verdict = verdict
            self._say(case, verdict)

    def _refuse(self, case: Case, verdict: Verdict) -> None:
        """Drop it. The next one is told what it missed; if that was the next one already, nothing is tried again
        before there is more to rewrite."""
        handle, plan = case.handle, case.handle.flight.plan
        self._say(case, verdict)
        if plan.request.missed is not None:
            self._missed.pop(plan.start_digest, None)
            if self._blockwise is not None:
                self._blockwise.give_up(handle)
            else:
                self._trigger.not_smaller(handle)
        else:
            named = [f"- {m[:MAX_MISSED_CHARS]}" for m in verdict.missed]
            self._missed[plan.start_digest] = "\n".join(named) or "- what the agent needed for its next actions"
            while len(self._missed) > MAX_REMEMBERED:
                self._missed.popitem(last=False)
        self._shelf.forget(plan.key)
        self._handles.drop(handle, Reason.JUDGED_UNFAITHFUL)

    def _waive(self, case: Case, why: str) -> None:
        if case.handle.state in FINAL or case.verdict is not None or case.waived:
            return
        case.waived = True
        self._conversation.emit("lookahead.unjudged", handle=case.handle.id, why=why)

    def _say(self, case: Case, verdict: Verdict) -> None:
        faithful = verdict.score >= self._judge.threshold
        self._conversation.emit(
            "lookahead.judged", handle=case.handle.id, score=verdict.score, missed=verdict.missed, faithful=faithful
        )

    def _spent(self, case: Case, usage: Usage) -> None:
        """What the judge costs is part of what its result cost, as long as that is not settled."""
        tally, flight = self._conversation.runtime.tally, case.handle.flight
        with self._lock:
            if case.handle.state in FINAL:
                tally.wasted(usage)
            else:
                flight.usage = flight.usage + usage
                if not flight.ended:  # its preload goes on: all of its usage is counted when that is over
                    return
            tally.spent(usage)
        self._conversation.emit("usage", transform="judge", usage=usage)
