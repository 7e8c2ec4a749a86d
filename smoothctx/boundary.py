"""The boundary: what is decided where a turn begins. Commit what is ready, wait at the hard limit, fall back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from .conversation import Conversation
from .cuts import plan
from .follow import Following
from .handle import LookaheadHandle
from .handles import Handles
from .history import Change
from .lane import Lane
from .launch import Launcher
from .serving import Serving
from .shelf import Shelf
from .states import WORKING, HandleState, Reason
from .trigger import Trigger, keep_of

#: a result that came too late for the tail makes way for a longer run again when the view has grown by this factor
RECUT_GROWTH = 1.25


@final
class Boundary:
    """Decides what one session sends. Called under the session's lock only."""

    def __init__(
        self,
        conversation: Conversation,
        handles: Handles,
        shelf: Shelf,
        following: Following,
        trigger: Trigger,
        launcher: Launcher,
        serving: Serving,
        lane: Lane | None,
    ) -> None:
        self._conversation = conversation
        self._handles = handles
        self._shelf = shelf
        self._following = following
        self._trigger = trigger
        self._launcher = launcher
        self._serving = serving
        self._lane = lane
        # tokens of the view when a result was last dropped because the tail had outgrown it; 0: none since a commit
        self._outgrown = 0

    def decide(self, messages: Sequence[Any], waited: float | None) -> list[Any] | LookaheadHandle:
        """One turn boundary. ``waited`` is None the first time: then it may return a handle to wait for."""
        conversation, policy = self._conversation, self._conversation.policy
        change: Change | None = self._following.sync(messages)  # while we waited it may have been edited
        if waited is None:
            self._begin(messages)
        else:
            change = None
        branch = conversation.branch
        if branch.fits(policy):
            self._commit_ready(messages, at_limit=False)
            if waited is None:
                self._trigger.consider(messages, change)
            return self._following.sent(messages)
        self._commit_ready(messages, at_limit=True, how="ready" if waited is None else "promoted", waited=waited or 0.0)
        if branch.fits(policy) or policy.overrun == "raw":
            if branch.fits(policy) or waited is None:
                self._trigger.consider(messages, None)
            return self._following.sent(messages)
        if policy.overrun == "promote" and waited is None:
            handle = self._trigger.consider(messages, None, due=True)
            if handle is not None and handle.state in WORKING and self.patience(handle) > 0:
                handle.promote()
                return handle
        self._fall_back(messages, waited or 0.0)
        return self._following.sent(messages)

    def patience(self, handle: LookaheadHandle) -> float:
        """How long the turn may wait for this handle: at most ``max_wait``, nothing when it cannot make it."""
        max_wait = self._conversation.policy.max_wait
        remaining = handle.flight.remaining_s(self._conversation.forecast.work.value)
        return 0.0 if remaining is not None and remaining > max_wait else max_wait

    def apply(self, handle: LookaheadHandle, messages: Sequence[Any], *, how: str, waited: float) -> None:
        """Make a result part of the view."""
        conversation, branch = self._conversation, self._conversation.branch
        artifact = handle.flight.artifact
        assert artifact is not None
        if any(a.artifact.key == artifact.key for a in branch.applied):  # another handle of it was faster
            receipt = next((r for r in reversed(conversation.receipts) if r.key == artifact.key), None)
            self._handles.committed(handle, receipt, how=how, saved=0)
            return
        before = branch.tokens
        branch.apply(artifact, messages)
        self._outgrown = 0
        self._shelf.commit(artifact)
        handle.move(HandleState.COMMITTED)
        self._serving.committed(artifact)
        self._launcher.name(artifact)
        receipt = conversation.receipt(artifact, how, before, waited, handle.flight.usage)
        self._handles.committed(handle, receipt, how=how, saved=before - branch.tokens)

    def _begin(self, messages: Sequence[Any]) -> None:
        """What is done once per turn, before anything is decided."""
        conversation, branch = self._conversation, self._conversation.branch
        restored, self._shelf.restored = self._shelf.restored, False
        if restored:  # of an earlier process, or of the session it forked from
            self._shelf.salvage(messages, branch.tokens)
            branch.recalibrate()
        conversation.forecast.boundary(conversation.runtime.now(), branch.history.tokens[-1])
        if conversation.policy.max_message_tokens is not None:
            self._offload_entries(messages, conversation.policy.max_message_tokens)

    def _commit_ready(
        self, messages: Sequence[Any], *, at_limit: bool, how: str = "ready", waited: float = 0.0
    ) -> None:
        handles = self._handles.all()
        if self._lane is not None:
            for handle in self._lane.commit(messages, self._handles.drop, at_limit=at_limit):
                self.apply(handle, messages, how=how, waited=waited)
            handles = self._handles.explicit[:]
        for handle in handles:
            artifact = handle.flight.artifact
            usable = handle.state is HandleState.READY or (at_limit and handle.state in WORKING)
            if artifact is None or not usable or handle.flight.plan.opening:
                continue
            refusal = self._conversation.branch.refusal(artifact)
            if refusal is not None:
                self._handles.drop(handle, refusal)
            elif self._lane is not None and not self._lane.affordable(artifact):
                continue
            elif at_limit or handle.explicit or self._pays(handle, messages):
                self.apply(handle, messages, how=how, waited=waited)

    def _pays(self, handle: LookaheadHandle, messages: Sequence[Any]) -> bool:
        """Is a ready result to be committed below the hard limit? If a longer run is worth more, it is dropped."""
        branch, policy, artifact = self._conversation.branch, self._conversation.policy, handle.flight.artifact
        if policy.commit == "hard_limit" or artifact is None:
            return False
        weighed = branch.weigh(artifact, messages)
        size = (weighed.after + policy.reserved_tokens, weighed.messages_after)
        pays = artifact.warm or weighed.saved >= weighed.rebilled  # promise 9: the others wait
        recut = policy.reached(*size) and not artifact.warm and self._recut_helps(handle, pays=pays)
        if recut or policy.over(policy.hard_limit, *size):
            self._outgrown = branch.tokens
            self._handles.drop(handle, Reason.SUPERSEDED)  # the tail outgrew it: the next run covers more
            return False
        return pays

    def _recut_helps(self, handle: LookaheadHandle, *, pays: bool) -> bool:
        """Is a new run worth more than this result, which leaves the view above the trigger? Once in a row at most:
        where the tail outgrows every run, a late result is better than none. One that does not pay never will, though,
        and nothing else is started while it waits: it makes way each time that the view has grown well."""
        branch = self._conversation.branch
        if self._outgrown and (pays or branch.tokens < self._outgrown * RECUT_GROWTH):
            return False
        run = self._trigger.plan(handle.transform, branch.history.tokens[-1])
        return run is not None and run.end > handle.run.end

    def _fall_back(self, messages: Sequence[Any], waited: float) -> None:
        """Drop whole oldest segments until ``land_at``: behind what is already rewritten, else everything old."""
        conversation, branch, policy = self._conversation, self._conversation.branch, self._conversation.policy
        before = branch.tokens
        done = max((a.artifact.replacement.end for a in branch.applied), default=0)
        for behind in (done, 0) if done else (0,):
            run = plan(
                branch.history,
                branch.edits,
                policy,
                keep_of(policy.fallback),
                land=policy.land_at,
                scale=branch.scale,
                drop_pinned=False,
                behind=behind,
            )
            if run is None:
                continue
            artifact = self._launcher.removal(run)
            if branch.refusal(artifact) is not None:
                continue
            weighed = branch.weigh(artifact, messages)
            size = (weighed.after + policy.reserved_tokens, weighed.messages_after)
            if policy.over(policy.hard_limit, *size) and behind:
                continue
            if weighed.saved <= 0:
                continue
            branch.apply(artifact, messages)
            self._shelf.commit(artifact)
            conversation.runtime.tally.count("fallbacks")
            conversation.receipt(artifact, "fallback", before, waited)
            saved = before - branch.tokens
            conversation.emit("fallback.applied", start=run.start, end=run.end, saved=saved, waited_s=waited)
            break
        if not branch.fits(policy):
            conversation.say(
                "view.oversized",
                f"{len(branch.history)}",
                tokens=branch.tokens,
                why="pinned texts and the newest segment alone exceed the hard limit",
            )

    def _offload_entries(self, messages: Sequence[Any], limit: int) -> None:
        """A single result larger than ``max_message_tokens`` is offloaded before the model ever sees it."""
        branch, codec = self._conversation.branch, self._conversation.codec
        for i in range(branch.sent, len(branch.history)):
            if branch.history.span(i, i + 1) <= limit or codec.role(messages[i]) != "tool":
                continue
            if any(e.start <= i < e.end and (e.end - e.start > 1 or not e.messages) for e in branch.edits):
                continue  # it is not in the view
            artifact = self._launcher.entry(messages[i], i)
            if artifact is not None and branch.refusal(artifact) is None:
                branch.apply(artifact, messages)
                self._shelf.commit(artifact)
