"""The boundary: what is decided where a turn begins. Commit what is ready, wait at the hard limit, fall back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from . import verdict
from .blockwise import Blockwise
from .choice import choose, losers
from .conversation import Conversation
from .cuts import plan, shown_tokens
from .economics import Expected
from .errors import HandleNotReady, StaleHandle
from .follow import Following
from .handle import LookaheadHandle
from .handles import Handles
from .history import Change
from .judging import Judging
from .launch import Launcher
from .rules import BreakEven
from .serving import Serving
from .shelf import Shelf
from .states import FINAL, WORKING, HandleState, Reason
from .trigger import Trigger, expected_tokens, keep_of
from .view import Artifact

#: a turn waits for at most this many times what a result usually takes, and this many seconds at least
WAIT_MARGIN, LEAST_WAIT_S = 4.0, 1.0


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
        blockwise: Blockwise | None,
        judging: Judging | None,
    ) -> None:
        self._conversation = conversation
        self._handles = handles
        self._shelf = shelf
        self._following = following
        self._trigger = trigger
        self._launcher = launcher
        self._serving = serving
        self._preloading = serving.preloading
        self._blockwise = blockwise
        self._judging = judging
        self._outgrown = False  # the last result was dropped because the tail had outgrown it
        # What the turns added, as they showed it, up to the message where the last one began.
        self._known = self._grown = 0

    def decide(self, messages: Sequence[Any], waited: float | None) -> list[Any] | LookaheadHandle:
        """One turn boundary. ``waited`` is None the first time: then it may return a handle to wait for."""
        conversation, policy = self._conversation, self._conversation.policy
        change: Change | None = self._following.sync(messages)  # while we waited it may have been edited
        if waited is None:
            self._begin(messages, change)
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
        if policy.lag is not None:  # no turn ever waits for the summary
            self._trigger.consider(messages, None)
        elif policy.overrun == "promote" and waited is None:
            handle = self._trigger.consider(messages, None, due=True)
            if handle is not None and handle.state in WORKING and self.patience(handle) > 0:
                return handle
        self._fall_back(messages, waited or 0.0)
        return self._following.sent(messages)

    def commit(self, handle: LookaheadHandle, messages: Sequence[Any]) -> list[Any]:
        """What ``handle.commit`` does.

        Raises:
            HandleNotReady: without a result.
            StaleHandle: when the result does not fit these messages.
        """
        conversation = self._conversation
        self._following.sync(messages)
        branch, artifact = conversation.branch, self._choose(handle, messages)
        if handle.flight.opening is not None:
            made, chain = handle.flight.plan, branch.history.chain
            if made.end >= len(chain) or chain[made.end] != made.end_digest:
                self._handles.drop(handle, Reason.DIGEST_MISMATCH)
                raise StaleHandle(
                    f"lookahead {handle.id} does not fit these messages: the history up to message {made.end} "
                    "is not the one that the opening was made from"
                )
            if handle.state not in FINAL:
                self._handles.committed(handle, None, how="ready", saved=0)
                self._serving.handed_out(handle.flight)
            return list(handle.flight.opening)
        if artifact is None:
            raise HandleNotReady(f"lookahead {handle.id} has no result")
        if handle.state is HandleState.COMMITTED:
            if not any(a.artifact.key == artifact.key for a in branch.applied):
                raise StaleHandle(f"lookahead {handle.id} was committed and is not part of this branch any more")
            return branch.project(messages)
        if handle.state is not HandleState.READY:  # the messages are of another branch, or its base was replaced
            raise StaleHandle(f"lookahead {handle.id} was dropped with its branch ({handle.reason})")
        refusal = branch.refusal(artifact)
        if refusal is not None:
            self._handles.drop(handle, refusal)
            raise StaleHandle(
                f"lookahead {handle.id} does not fit these messages ({refusal}): the history up to message "
                f"{artifact.replacement.end} is not the one it was made from, or ends there"
            )
        if self._blockwise is not None and not self._blockwise.affordable([artifact], messages):
            raise StaleHandle(
                f"lookahead {handle.id} would take the summaries of the view over "
                f"total_tokens={self._blockwise.transform.total_tokens}"
            )
        self.apply(handle, messages, how="ready", waited=0.0)
        return self._following.sent(messages)

    def patience(self, handle: LookaheadHandle) -> float:
        """How long the turn may wait for this handle: at most ``max_wait``, and no longer than results are predicted to
        take, with a margin. Nothing when it cannot make it, also for its model's server being away, or when an earlier
        turn has waited for it in vain."""
        if any(h.waited_out and h.session is handle.session for h in (handle, *handle.flight.handles)):
            return 0.0
        max_wait = self._conversation.policy.max_wait
        flight, usual = handle.flight, self._conversation.forecast.write.value
        away = self._serving.away_s(flight)
        if usual is None:
            tokens = flight.plan.source_tokens
            usual = self._serving.write_s(flight.plan.transform, expected_tokens(flight.plan.transform, tokens), tokens)
        remaining = flight.remaining_s(usual)
        if usual is None or remaining is None:
            return max_wait if away < max_wait else 0.0
        if (away + usual if away else remaining) > max_wait:
            return min(max_wait, LEAST_WAIT_S) if flight.usable else 0.0
        if away:
            return min(max_wait, away + max(LEAST_WAIT_S, WAIT_MARGIN * usual))
        spent = usual - remaining  # of the usual time: one that is overdue gets as much again as the margin allows
        return min(max_wait, max(LEAST_WAIT_S, WAIT_MARGIN * usual - spent))

    def apply(
        self,
        handle: LookaheadHandle,
        messages: Sequence[Any],
        *,
        how: str,
        waited: float,
        expected: Expected | None = None,
    ) -> None:
        """Make a result part of the view. ``expected``: of all that goes in with it, where that is more than this."""
        conversation, branch = self._conversation, self._conversation.branch
        artifact, whole = handle.artifact, handle.flight.artifact
        assert artifact is not None and whole is not None
        if any(a.artifact.key == artifact.key for a in branch.applied):  # another handle of it was faster
            receipt = next((r for r in reversed(conversation.receipts) if r.key == artifact.key), None)
            self._handles.committed(handle, receipt, how=how, saved=0)
            return
        before, expected = branch.tokens, expected or verdict.of_commit(conversation, [artifact], messages)
        branch.apply(artifact, messages)
        self._outgrown = False
        self._trigger.committed()
        self._keep_pace(handle)
        self._shelf.commit(artifact)
        handle.move(HandleState.COMMITTED)
        self._serving.committed(artifact)
        other = artifact.key != whole.key  # a candidate, or with a note of pins
        if other:
            self._launcher.save(artifact)  # another process commits what was chosen here
            cost = handle.flight.cost
            if cost.made and not (handle.flight.accounted or cost.used):
                conversation.runtime.tally.wasted(losers(whole, artifact, handle.flight.usage))
        self._launcher.name(artifact)
        receipt = conversation.receipt(artifact, how, before, waited, handle.flight.usage, expected)
        if self._judging is not None:
            self._judging.committed(handle)
        self._handles.committed(handle, receipt, how=how, saved=before - branch.tokens)
        if other and not artifact.warm:  # another one was preloaded
            self._serving.discarded(*handle.flight.keys)

    def _choose(self, handle: LookaheadHandle, messages: Sequence[Any], *, warm: bool | None = None) -> Artifact | None:
        """The handle's result, with what was pinned since; of several candidates the one that fits what has happened
        since. ``warm``: is its view, now; ``None`` to find out."""
        flight = handle.flight
        whole = flight.artifact
        if handle.state in FINAL or whole is None or flight.plan.opening:
            return handle.artifact
        artifact = whole
        if whole.alternatives:
            artifact = choose(self._conversation, whole, handle, messages)
        known = () if flight.from_store else flight.plan.request.pins
        artifact = self._launcher.local.with_pins(artifact, messages, known) or artifact
        warm = self._preloading.warm(artifact, messages) if warm is None else warm
        if artifact.warm != warm:
            artifact = replace(artifact, warm=warm)
        handle.chosen = None if artifact is whole else artifact
        return artifact

    def _keep_pace(self, handle: LookaheadHandle) -> None:
        """Commits stay rare: one that had to come soon after another is an event."""
        conversation = self._conversation
        if handle.explicit:
            return
        if conversation.pace.crowded:
            conversation.emit("commit.crowded", handle=handle.id, turns=conversation.pace.since_commit)
        conversation.pace.committed()

    def rest(self, messages: Sequence[Any]) -> None:
        """No turn came for a while: what can be decided is, and what can be prepared begins.

        ``messages`` are those of the last observe; the next boundary sends what is decided here.
        """
        branch = self._conversation.branch
        if branch.history.unchanged(messages) and branch.fits(self._conversation.policy):
            self._commit_ready(messages, at_limit=False)
            self._trigger.consider(messages, None, resting=True)

    def _begin(self, messages: Sequence[Any], change: Change | None) -> None:
        """What is done once per turn, before anything is decided."""
        conversation, branch = self._conversation, self._conversation.branch
        conversation.pace.begin()
        restored, self._shelf.restored = self._shelf.restored, False
        if restored:  # of an earlier process, or of the session it forked from
            self._shelf.salvage(messages, branch.tokens, late=True)
            branch.recalibrate()
        branch.presume()
        if conversation.policy.max_message_tokens is not None:
            self._offload_entries(messages, conversation.policy.max_message_tokens)
        known, self._known = min(self._known, len(branch.history)), len(branch.history)
        self._grown += shown_tokens(branch.history, branch.edits, known)
        conversation.forecast.boundary(conversation.runtime.now(), self._grown)
        if self._shelf.arrived:
            self._take_prepared(messages, change)

    def _take_prepared(self, messages: Sequence[Any], change: Change | None) -> None:
        """What an earlier process had ready is this one's lookahead: of those that fit, what reaches furthest."""
        shelf, branch, transform = self._shelf, self._conversation.branch, self._conversation.policy.transform
        if self._blockwise is not None:  # it finds its blocks on the shelf
            shelf.arrived.clear()
            self._trigger.consider(messages, change)
            return
        if self._handles.lookahead is not None:
            return
        done = max((a.artifact.replacement.end for a in branch.applied), default=0)
        for key in sorted(shelf.arrived, key=lambda k: -shelf.prepared[k].end):
            run, artifact = shelf.prepared[key], shelf.artifacts.get(key)
            if artifact is None or run.end <= done or branch.refusal(artifact) is not None:
                continue
            if self._launcher.key(transform, run) != key:  # another transform's, or of another history
                continue
            if any(e.start < b < e.end for e in branch.edits for b in (run.start, run.end)):
                continue
            shelf.arrived.clear()
            self._handles.live = self._trigger.launch(messages, transform, run, explicit=False, preload_kv=None)
            self._outgrown = True  # a longer one would be next turn's: this one goes in if it pays
            return

    def _commit_ready(
        self, messages: Sequence[Any], *, at_limit: bool, how: str = "ready", waited: float = 0.0
    ) -> None:
        handles, lags = self._handles.all(), self._conversation.policy.lag is not None
        if self._blockwise is not None:
            accepts = None if self._judging is None or at_limit else self._judging.accepts
            chosen = self._blockwise.commit(messages, self._handles.drop, at_limit=at_limit, accepts=accepts)
            last = chosen[-1].flight.artifact if chosen else None  # the view that was preloaded is that of all of them
            warm = last is not None and self._preloading.warm(last, messages)
            for handle in chosen:
                self._choose(handle, messages, warm=warm)
            if at_limit or self._blocks_pay(chosen, messages):
                artifacts = [a for a in (h.artifact for h in chosen) if a is not None]
                expected = verdict.of_commit(self._conversation, artifacts, messages)
                for handle in chosen:
                    self._choose(handle, messages, warm=warm)
                    self.apply(handle, messages, how=how, waited=waited, expected=expected)
            handles = self._handles.explicit[:]
        for handle in handles:
            artifact = self._choose(handle, messages)
            if self._judging is not None and handle is self._handles.lookahead and not at_limit:
                self._judging.look(messages, chosen=True)
            early = at_limit or lags  # a preload that still goes on is not waited for
            usable = handle.state is HandleState.READY or (early and handle.state in WORKING)
            if artifact is None or not usable or handle.flight.plan.opening:
                continue
            refusal = self._conversation.branch.refusal(artifact)
            if refusal is not None:
                self._handles.drop(handle, refusal)
            elif self._blockwise is not None and not self._blockwise.affordable([artifact], messages):
                continue
            elif at_limit or handle.explicit or (self._pays(handle, messages) and self._faithful(handle, messages)):
                self.apply(handle, messages, how=how, waited=waited)

    def _faithful(self, handle: LookaheadHandle, messages: Sequence[Any]) -> bool:
        """Does the policy's judge, if it has one, let this be committed?"""
        return self._judging is None or self._judging.accepts(handle, messages)

    def _pays(self, handle: LookaheadHandle, messages: Sequence[Any]) -> bool:
        """Is a ready result to be committed below the hard limit? If a longer run is worth more, it is dropped."""
        branch, policy, artifact = self._conversation.branch, self._conversation.policy, handle.artifact
        if policy.commit == "hard_limit" or artifact is None:
            return False
        if policy.lag is not None:
            return self._in_step(handle, messages, policy.lag)
        if self._conversation.pace.crowded:
            return False
        weighed = branch.weigh(artifact, messages)
        size = (weighed.after + policy.reserved_tokens, weighed.messages_after)
        pays = artifact.warm or weighed.saved >= weighed.rebilled  # promise 9: the others wait
        if self._recut_helps(handle, pays=pays, high=policy.reached(*size)) or not weighed.fits(policy):
            if not pays:
                self._trigger.in_vain()
            self._outgrown = True
            self._handles.drop(handle, Reason.SUPERSEDED)  # the tail outgrew it: the next run covers more
            return False
        return self._breaks_even([handle], messages) and pays

    def _in_step(self, handle: LookaheadHandle, messages: Sequence[Any], k: int) -> bool:
        """``KStepOff``: at most once in ``k`` turns, and warm if that takes no more than ``k`` turns more."""
        pace, artifact = self._conversation.pace, handle.artifact
        cold = pace.cold(handle.id)  # also while the last commit is too near
        if artifact is None or pace.committed_within(k):
            return False
        branch, policy = self._conversation.branch, self._conversation.policy
        weighed = branch.weigh(artifact, messages)
        if not weighed.fits(policy):
            return False  # it would bring back more than a fallback has dropped
        if handle.state is HandleState.READY and (artifact.warm or not self._preloading.may_warm(handle.flight)):
            return True
        return cold >= k

    def _blocks_pay(self, chosen: Sequence[LookaheadHandle], messages: Sequence[Any]) -> bool:
        """Are finished blocks to be committed below the hard limit?"""
        pace, k = self._conversation.pace, self._conversation.policy.lag
        if pace.crowded if k is None else pace.committed_within(k):
            return False
        return self._breaks_even(chosen, messages)

    def _breaks_even(self, handles: Sequence[LookaheadHandle], messages: Sequence[Any]) -> bool:
        """``BreakEven``: does it pay? What never can, and is not needed at the limit either, is dropped."""
        conversation, rule = self._conversation, self._conversation.policy.commit
        if not isinstance(rule, BreakEven):
            return True
        artifacts = [a for a in (h.artifact for h in handles) if a is not None]
        expected = verdict.of_commit(conversation, artifacts, messages)
        if expected is None or expected.pays:
            return True
        may_warm = any(
            self._preloading.may_warm(h.flight) and not a.warm for h, a in zip(handles, artifacts, strict=True)
        )
        if not rule.may_improve(expected) and not may_warm and not verdict.needed(conversation, rule):
            for handle in handles:
                self._trigger.unprofitable(handle)
                self._handles.drop(handle, Reason.UNPROFITABLE)
        return False

    def _recut_helps(self, handle: LookaheadHandle, *, pays: bool, high: bool) -> bool:
        """Is a new run worth more than this result? One that leaves the view above the trigger (``high``) makes way,
        once in a row at most: where the tail outgrows every run, a late result is better than none. One that does not
        pay never will, though, and nothing else is started meanwhile: as soon as a longer run pays it makes way."""
        artifact = handle.artifact
        if artifact is None or artifact.warm or (pays and (self._outgrown or not high)):
            return False
        run = self._trigger.plan(handle.transform, self._conversation.branch.history.tokens[-1])
        if run is None or run.end <= handle.run.end:
            return False
        return (high and not self._outgrown) or self._trigger.pays(run, artifact.tokens)

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
            artifact = self._launcher.local.removal(run, messages)
            if branch.refusal(artifact) is not None:
                continue
            weighed = branch.weigh(artifact, messages)
            if not weighed.fits(policy) and behind:
                continue
            if weighed.saved <= 0:
                continue
            branch.apply(artifact, messages)
            self._shelf.commit(artifact)
            conversation.runtime.tally.count("fallbacks")
            conversation.receipt(artifact, "fallback", before, waited)
            saved = before - branch.tokens
            conversation.emit("fallback.applied", start=run.start, end=run.end, saved=saved, waited_s=waited)
            self._trigger.give_up_place()
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
            artifact = self._launcher.local.entry(messages[i], i)
            if artifact is not None and branch.refusal(artifact) is None:
                branch.apply(artifact, messages)
                self._shelf.commit(artifact)
