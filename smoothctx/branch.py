"""A branch: the history the caller holds now, and the replacements in its view. Owns both; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .codec import USER_STUB, Codec, results_of
from .history import Change, History
from .policy import Policy
from .states import Reason
from .view import Applied, Artifact, Edit, Replacement, clip, project


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a commit would do: the view's tokens after it, what it saves, and the tokens of the messages behind
    it that were cached and have to be prefilled again."""

    after: int
    messages_after: int
    saved: int
    rebilled: int

    def fits(self, policy: Policy) -> bool:
        """Would the view fit under the hard limit?"""
        return not policy.over(policy.hard_limit, self.after + policy.reserved_tokens, self.messages_after)


class Branch:
    """History plus the applied replacements, sorted and disjoint."""

    __slots__ = (
        "_delta_messages",
        "_delta_tokens",
        "_offset",
        "_ratio",
        "applied",
        "codec",
        "edits",
        "history",
        "sent",
    )

    def __init__(self, codec: Codec, token_counter: Callable[[list[Any]], int] | None) -> None:
        self.codec = codec
        self.history = History(codec, token_counter)
        self.applied: list[Applied] = []
        self.edits: tuple[Edit, ...] = ()
        self._delta_tokens = 0
        self._delta_messages = 0
        # Estimate -> provider's count, from the last reported usage: an addition, or a ratio where we err high.
        self._offset = 0
        self._ratio = 1.0
        #: messages of the history that the last sent view covered
        self.sent = 0

    @property
    def tokens(self) -> int:
        """Tokens of the view, without ``reserved_tokens``."""
        return self.scaled(self.history.tokens[-1] + self._delta_tokens)

    @property
    def messages(self) -> int:
        """Messages in the view."""
        return len(self.history) + self._delta_messages

    @property
    def scale(self) -> float:
        """Provider's tokens per token of ours."""
        own = self.history.tokens[-1] + self._delta_tokens
        return self.tokens / own if own else 1.0

    def scaled(self, own: int) -> int:
        """Our count of a view, corrected by the provider's last reported usage."""
        return int(own * self._ratio) + self._offset

    def sync(self, messages: Sequence[Any], *, tail_only: bool = False) -> tuple[Change, list[Applied]]:
        """Follow the caller's list; returns what changed and the replacements that cannot stay."""
        before = self.history.answered
        change = self.history.sync(messages, tail_only=tail_only)
        lost: list[Applied] = []
        if change.diverged:
            self.sent = min(self.sent, change.common)
            lost = self._drop_stale(messages, change.common)
        if self.history.answered != before:
            self._calibrate(self.history.answered)
        if self.applied and len(self.history) > change.common:
            self._set(self._late(self.applied, messages, range(change.common, len(self.history))))
        return change, lost

    def project(self, messages: Sequence[Any]) -> list[Any]:
        """The view of the caller's list; what we could not read at its end is passed through."""
        return project(messages, self.edits)

    @property
    def readable(self) -> tuple[Edit, ...]:
        """The edits that a transform reads. Removals are left out: nothing stands for what they dropped, so whatever
        supersedes one has to read the raw messages."""
        return _readable(self.applied)

    def overlaid(self, artifacts: Sequence[Artifact], messages: Sequence[Any]) -> tuple[Edit, ...]:
        """:attr:`readable`, as it would be with these artifacts applied."""
        return _readable(self._with(artifacts, messages))

    def fits(self, policy: Policy) -> bool:
        """Does the view fit under the hard limit?"""
        return not policy.over(policy.hard_limit, self.tokens + policy.reserved_tokens, self.messages)

    def refusal(self, artifact: Artifact) -> Reason | None:
        """Why this artifact cannot be applied to this branch; ``None`` when it can."""
        r = artifact.replacement
        if not r.valid(self.history):
            return Reason.DIGEST_MISMATCH
        if self._swallows(r):
            return Reason.BRANCH_DIVERGED
        for a in self.applied:
            o = a.artifact.replacement
            if o.end <= r.start or o.start >= r.end or (r.start <= o.start and o.end <= r.end):
                continue
            if not all(not e.messages or _is_stub(e) for e in a.edits):
                return Reason.SUPERSEDED
        return None

    def weigh(self, artifacts: Artifact | Sequence[Artifact], messages: Sequence[Any]) -> Weighed:
        """What applying it (or them, in order) would do, without doing it."""
        artifacts = _several(artifacts)
        before, before_messages = self._delta_tokens, self._delta_messages
        applied = self._with(artifacts, messages)
        delta = sum(e.tokens - self.history.span(e.start, e.end) for a in applied for e in (*a.edits, *a.extra))
        size = sum(len(e.messages) - (e.end - e.start) for a in applied for e in (*a.edits, *a.extra))
        ranges = [(a.replacement.start, a.replacement.end) for a in artifacts]
        sent = max(self.sent, *(end for _, end in ranges))
        first = min(start for start, _ in ranges)
        # As the new view shows it: what was offloaded on entry costs a stub, not its raw size.
        stay = [
            e
            for a in applied
            for e in (*a.edits, *a.extra)
            if first <= e.start and e.end <= sent and not any(s <= e.start and e.end <= t for s, t in ranges)
        ]
        behind = self.history.span(first, sent) - sum(self.history.span(*r) for r in ranges)
        behind += sum(e.tokens - self.history.span(e.start, e.end) for e in stay)
        return Weighed(
            after=self.scaled(self.history.tokens[-1] + delta),
            messages_after=len(self.history) + size,
            saved=self.tokens - self.scaled(self.history.tokens[-1] + delta)
            if (before, before_messages) != (delta, size)
            else 0,
            rebilled=int(behind * self._ratio),
        )

    def preview(self, artifacts: Artifact | Sequence[Artifact], messages: Sequence[Any]) -> list[Any]:
        """The view that applying it (or them) would give (what preload warms)."""
        return project(messages, _sorted(self._with(_several(artifacts), messages)))

    def apply(self, artifact: Artifact, messages: Sequence[Any]) -> list[Artifact]:
        """Put it into the view. Returns the artifacts that it superseded. Call :meth:`refusal` first."""
        kept = self._with([artifact], messages)
        held = {a.artifact.key for a in kept}
        gone = [a.artifact for a in self.applied if a.artifact.key not in held]
        self._set(kept)
        return gone

    def clear(self) -> None:
        """Forget every replacement (rewrite mode: the view became the base)."""
        self._set([])

    def _with(self, artifacts: Sequence[Artifact], messages: Sequence[Any]) -> list[Applied]:
        applied = self.applied
        for artifact in artifacts:
            applied = self._with_one(applied, artifact, messages)
        return applied

    def _with_one(self, applied: Sequence[Applied], artifact: Artifact, messages: Sequence[Any]) -> list[Applied]:
        r = artifact.replacement
        kept: list[Applied] = []
        extra: list[Edit] = []
        for a in applied:
            o = a.artifact.replacement
            if o.end <= r.start or o.start >= r.end:
                kept.append(replace(a, extra=tuple(e for e in a.extra if e.end <= r.start or e.start >= r.end)))
            elif rest := _outside(a, r):  # a removal that reaches further: its rest stays
                outside = tuple(e for e in a.extra if e.start >= r.end or e.end <= r.start)
                kept.append(replace(a, edits=rest, extra=outside))
            else:
                extra += [e for e in a.extra if e.start >= r.end and e.end > e.start]
        kept.append(Applied(artifact, r.edits, tuple(extra)))
        kept.sort(key=lambda a: (a.artifact.replacement.start, a.artifact.replacement.end))
        return self._complete(kept, artifact, messages)

    def _complete(self, applied: list[Applied], artifact: Artifact, messages: Sequence[Any]) -> list[Applied]:
        """Add what a rewritten prefix requires of the messages behind it."""
        r = artifact.replacement
        taken = {i for a in applied for e in (*a.edits, *a.extra) for i in range(e.start, e.end)}
        extra: list[Edit] = []
        # Signed thinking is bound to the prefix it was made under: whole turns before the current one lose it.
        for i in range(r.start, max(r.start, self.history.last_user)):
            if i not in taken:
                clean = self.codec.without_thinking(messages[i])
                if clean is not messages[i]:
                    extra.append(Edit(start=i, end=i + 1, messages=(clean,), tokens=self.history.count([clean])))
        done = [replace(a, extra=(*a.extra, *extra)) if a.artifact.key == artifact.key else a for a in applied]
        # A result may have come after the run was chosen, while its call was still open.
        later = [i for i in self.history.segmenter.answers if i >= r.start]
        return self._open_with_user(self._late(done, messages, later), messages)

    def _open_with_user(self, applied: list[Applied], messages: Sequence[Any]) -> list[Applied]:
        """A view that we rewrote from its head on has a user message behind the system ones. Edits further down leave
        the head, which was sent before, as it is."""
        plain = [replace(a, extra=tuple(e for e in a.extra if not _is_stub(e))) for a in applied]
        lead = self.history.segmenter.lead
        if not any(a.artifact.replacement.start <= lead for a in plain):
            return plain
        head = project(messages[: len(self.history)], _sorted(plain))[lead : lead + 1]
        if head and self.codec.role(head[0]) == "user":
            return plain
        note = self.codec.user(USER_STUB)
        stub = Edit(start=lead, end=lead, messages=(note,), tokens=self.history.count([note]))
        return [replace(plain[0], extra=(stub, *plain[0].extra)), *plain[1:]]

    def _swallows(self, r: Replacement) -> bool:
        """Would the last user message or the newest segment be gone? Both stay when a run is chosen; but the history
        may since have been cut back to where the run ends (regenerate, time travel), and they are others now."""
        history = self.history
        if any(e.start <= history.last_user < e.end for e in r.edits):
            return True
        segments = history.segmenter.segments
        if not segments or r.end < segments[-1].end:
            return False
        if r.end - r.start == 1 and [self.codec.role(m) for e in r.edits for m in e.messages] == ["tool"]:
            return False  # an entry that was offloaded: its stub stands for it
        return any(e.end > segments[-1].start for e in r.edits)

    def _drop_stale(self, messages: Sequence[Any], n: int) -> list[Applied]:
        lost: list[Applied] = []
        kept: list[Applied] = []
        for a in self.applied:
            r = a.artifact.replacement
            (kept if r.valid(self.history) and not self._swallows(r) else lost).append(a)
        if lost or any(e.end > n for a in kept for e in a.extra):
            kept = [replace(a, extra=tuple(e for e in a.extra if e.end <= n)) for a in kept]
            self._set(self._open_with_user(kept, messages))
        return lost

    def _late(self, applied: list[Applied], messages: Sequence[Any], indexes: Iterable[int]) -> list[Applied]:
        """A result whose call was rewritten away would be an orphan: the model reads it as a note instead."""
        for i in indexes:
            calls = self.history.segmenter.answers.get(i, ())
            owners = [None if c is None else _without_call(applied, c, self.codec) for c in calls]
            owner = next((a for a in owners if a is not None), None)
            if owner is None:
                continue
            found = next(((a, e) for a in applied for e in (*a.edits, *a.extra) if e.start <= i < e.end), None)
            if found is None:
                edit = self._note(i, messages[i], calls, owners)
                applied = [replace(a, extra=(*a.extra, edit)) if a is owner else a for a in applied]
            elif len(found[1].messages) == 1 and self.codec.role(found[1].messages[0]) == "tool":
                holder, old = found  # it was offloaded: what stands for it becomes the note
                new = self._note(i, old.messages[0], calls, owners)
                edits = (tuple(new if e is old else e for e in es) for es in (holder.edits, holder.extra))
                applied = [Applied(a.artifact, *edits) if a is holder else a for a in applied]
        return applied

    def _note(self, i: int, message: Any, calls: Sequence[int | None], owners: Sequence[Applied | None]) -> Edit:
        codec = self.codec
        parts = results_of(codec, message)
        late = [p for p, call, a in zip(parts, calls, owners, strict=False) if call is None or a is not None]
        kept = [p for p, call, a in zip(parts, calls, owners, strict=False) if call is not None and a is None]
        text = "\n".join(f"[late result of tool call {codec.result_id(p)}]\n{codec.text(p)}" for p in late)
        shown = (*kept, codec.user(text))
        return Edit(start=i, end=i + 1, messages=shown, tokens=self.history.count(shown))

    def frozen(self) -> list[Any]:
        """The view of the readable part, frozen: what a caller that keeps the view will hold."""
        freeze = self.codec.freeze
        edits = [replace(e, messages=tuple(map(freeze, e.messages))) for e in self.edits]
        return project(self.history.frozen, edits)

    def inherit(self, other: Branch, base: int) -> None:
        """Take over what another branch learned of the provider's counts (rewrite mode: its view is our base).
        The reports on the first ``base`` messages are of larger views that are gone."""
        self._offset, self._ratio, self.sent = other._offset, other._ratio, base
        self.history.reports_from = self.history.asked = base

    def recalibrate(self) -> None:
        """Replacements of an earlier process came into the view: the last report was of the view with them, or of
        the one without; by its size. A reply to a view of ours has told more than that."""
        if self.history.reported is None or self.history.answered is not None:
            return
        covered, used = self.history.reported
        raw = self.history.tokens[covered]
        if abs(used - self._own(covered)) < abs(used - raw):
            self._calibrate(self.history.reported)

    def presume(self) -> None:
        """No view was answered yet: the last report is taken for this agent's, where it is of more than we count
        (tools) and something came behind it. Another agent's is mostly the last message when this one is called."""
        if self.history.reported is None or self.history.answered is not None or self.edits:
            return
        covered, used = self.history.reported
        if covered < len(self.history):
            self._offset = max(0, used - self.history.tokens[covered])

    def _own(self, covered: int) -> int:
        """Our count of the view of the first ``covered`` messages."""
        changed = sum(e.tokens - self.history.span(e.start, e.end) for e in self.edits if e.end <= covered)
        return self.history.tokens[covered] + changed

    def _calibrate(self, report: tuple[int, int] | None) -> None:
        if report is None:
            return  # what was learned before holds: it is about the tools and the tokenizer
        covered, used = report
        own = self._own(covered)
        # More than we count is mostly what we cannot see (tool schemas); less is our erring high.
        self._offset = max(0, used - own)
        self._ratio = min(1.0, used / own) if own else 1.0

    def _set(self, applied: list[Applied]) -> None:
        self.applied = applied
        self.edits = _sorted(applied)
        self._delta_tokens = sum(e.tokens - self.history.span(e.start, e.end) for e in self.edits)
        self._delta_messages = sum(len(e.messages) - (e.end - e.start) for e in self.edits)


def _without_call(applied: Sequence[Applied], index: int, codec: Codec) -> Applied | None:
    """Which of these rewrote the assistant message ``index`` so that its calls are not there any more?"""
    for a in applied:
        for e in (*a.edits, *a.extra):
            if e.start <= index < e.end and (e.end - e.start > 1 or not any(map(codec.calls, e.messages))):
                return a
    return None


def _several(artifacts: Artifact | Sequence[Artifact]) -> Sequence[Artifact]:
    return [artifacts] if isinstance(artifacts, Artifact) else artifacts


def _outside(applied: Applied, r: Replacement) -> tuple[Edit, ...]:
    """What of a removal lies before and behind ``r``."""
    o = applied.artifact.replacement
    if o.start >= r.start and o.end <= r.end:
        return ()
    return (*clip(applied.edits, 0, r.start), *clip(applied.edits, r.end))


def _readable(applied: Sequence[Applied]) -> tuple[Edit, ...]:
    return _sorted(
        [
            replace(a, edits=(), extra=tuple(e for e in a.extra if not _is_stub(e)))
            if a.artifact.replacement.drops_only
            else a
            for a in applied
        ]
    )


def _is_stub(edit: Edit) -> bool:
    return edit.start == edit.end


def _sorted(applied: Sequence[Applied]) -> tuple[Edit, ...]:
    return tuple(sorted((e for a in applied for e in (*a.edits, *a.extra)), key=lambda e: (e.start, e.end)))
