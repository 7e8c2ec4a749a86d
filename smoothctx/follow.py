"""Following: the branch is kept in step with the caller's list, through edits, forks, time travel and rewrite mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from .archive import Archive
from .branch import Branch
from .conversation import Conversation
from .handle import LookaheadHandle
from .handles import Handles
from .history import Change
from .policy import Immediate, Salvage
from .shelf import Shelf
from .states import WORKING, Reason
from .turns import turns_behind
from .view import Applied, Replacement


@final
class Following:
    """Follows the caller's messages for one session. Called under the session's lock only."""

    def __init__(self, conversation: Conversation, handles: Handles, shelf: Shelf, archive: Archive) -> None:
        self._conversation = conversation
        self._handles = handles
        self._shelf = shelf
        self._archive = archive
        # the last rewritten view, frozen as it was sent: to recognise it as the caller's new list
        self._base: list[Any] | None = None

    def sync(self, messages: Sequence[Any], *, tail_only: bool = False) -> Change:
        """Take the caller's list as the history. What does not fit any more goes, what fits again comes back."""
        conversation = self._conversation
        before, base = conversation.branch, self._base
        if base is not None and not before.history.continues(messages, tail_only=tail_only):
            self._rebase(messages)
        branch = conversation.branch  # after a rebase it is another one
        change, lost = branch.sync(messages, tail_only=tail_only)
        if branch is not before:  # what was rewritten is no run of these messages any more; what came behind it stays
            for handle in self._handles.all():
                if not _still_there(handle, branch):
                    self._handles.drop(handle, Reason.SUPERSEDED)
        known = change.common if branch is before or base is None else len(base)
        conversation.pace.replied(turns_behind(branch.history, known))
        if change.error is not None:
            conversation.say("message.unreadable", str(change.error), error=str(change.error))
        else:
            conversation.over("message.unreadable")
        if change.diverged:
            self._diverged(messages, lost)
        elif len(branch.history) > change.previous:
            # A branch that comes back grows into it, or past the question that an earlier commit would have swallowed.
            asked = branch.history.last_user >= change.previous
            anew = asked or conversation.policy.lag is not None  # or far enough behind it by now
            self._shelf.salvage(messages, branch.tokens, beyond=-1 if anew else change.previous - 1)
        return change

    def sent(self, messages: Sequence[Any]) -> list[Any]:
        """The view of these messages, which is sent now."""
        branch = self._conversation.branch
        view = branch.project(messages)
        branch.sent = branch.history.asked = len(branch.history)
        self._conversation.outcomes.sent()
        self._base = branch.frozen() if branch.edits else None
        self._archive.sent(messages, bool(branch.edits))
        self._handles.sent(view)
        return view

    def recognises(self, messages: Sequence[Any]) -> tuple[bool, int]:
        """Do these messages go on from the history, or from the view that was sent last; how many are shared?"""
        history, base = self._conversation.branch.history, self._base
        if history.unchanged(messages):
            return True, len(history)
        if base is not None and self._begins_with(messages, base):
            return True, len(base)
        shared = history.shared(messages)
        return shared == len(history), shared

    def close(self) -> None:
        """Let go of the messages."""
        self._base = None

    def _begins_with(self, messages: Sequence[Any], base: Sequence[Any]) -> bool:
        return len(messages) >= len(base) and self._conversation.codec.same(messages[: len(base)], base)

    def _diverged(self, messages: Sequence[Any], lost: Sequence[Applied]) -> None:
        """Another branch: drop what does not match any more, apply what an earlier commit left for this one."""
        conversation, branch = self._conversation, self._conversation.branch
        discard = conversation.policy.discard
        before = branch.tokens
        for handle in self._handles.all():
            if _still_there(handle, branch):
                continue
            if isinstance(discard, Immediate | Salvage) or handle.state not in WORKING:
                self._handles.drop(handle, Reason.BRANCH_DIVERGED)
            else:
                self._handles.finish(handle)
        for applied in lost:
            artifact = applied.artifact
            fits = artifact.replacement.valid(branch.history)
            reason = Reason.BRANCH_DIVERGED if fits else Reason.DIGEST_MISMATCH
            conversation.emit("view.dropped", key=artifact.key, reason=str(reason))
            if isinstance(discard, Immediate):
                self._shelf.forget(artifact.key)
        if isinstance(discard, Immediate):
            self._shelf.clear_dead()
        self._shelf.salvage(messages, before)

    def _rebase(self, messages: Sequence[Any]) -> None:
        """Rewrite mode: the caller's list begins with the view we returned. That view is the history now."""
        conversation, base = self._conversation, self._base
        if base is None or not self._begins_with(messages, base):
            return
        self._archive.keep()
        self._base = None
        old, conversation.branch = conversation.branch, Branch(conversation.codec, conversation.counter)
        conversation.branch.inherit(old, len(base))
        conversation.emit("view.rebased", messages=len(base))


def _still_there(handle: LookaheadHandle, branch: Branch) -> bool:
    """Does this branch hold exactly what the handle's result is made from?"""
    r = handle.flight.plan
    made = Replacement(start=r.start, end=r.end, start_digest=r.start_digest, end_digest=r.end_digest, edits=())
    return made.valid(branch.history)
