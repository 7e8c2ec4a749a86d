"""Cuts: which run of the history a transform may rewrite now, and what inside it must stay. Pure.

The run starts behind the leading system messages and ends at a safe boundary. Safe means: no segment is split,
nothing from a still unanswered call of the newest assistant message on, no tool result that the model has not
read yet, and the newest segment stays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .codec import Codec
from .history import History
from .policy import Policy
from .segments import Segment
from .transforms.base import Size, TransformRequest
from .view import Edit, Unit, project, units


@dataclass(frozen=True, slots=True)
class Run:
    """Messages ``[start, end)`` to rewrite; ``kept`` are indexes inside that stay word for word."""

    start: int
    end: int
    kept: frozenset[int]


def safe_end(history: History) -> int:
    """The latest index before which segments may be rewritten."""
    segments = history.segmenter.segments
    if not segments:
        return len(history)
    end = segments[-1].start  # the newest segment stays
    newest = history.segmenter.at(history.last_assistant) if history.last_assistant >= 0 else None
    if newest is not None:
        owner = segments[newest]
        # Its calls are running or wait for a person, or the model has not read their results yet.
        if owner.unanswered or owner.kind == "tools":
            end = min(end, owner.start)
    return end


def kept_inside(history: History, start: int, end: int) -> frozenset[int]:
    """What stays in a rewritten run: the latest user message, orphan results, system messages within."""
    kept = {history.last_user} if start <= history.last_user < end else set()
    for segment in _segments_between(history, start, end):
        if segment.kind in ("orphan", "system"):
            kept.update(range(segment.start, segment.end))
    return frozenset(kept)


def plan(
    history: History,
    edits: Sequence[Edit],
    policy: Policy,
    keep: Size,
    *,
    land: Size,
    expected: int = 0,
    scale: float = 1.0,
    drop_pinned: bool = True,
    behind: int = 0,
) -> Run | None:
    """The run to rewrite now: the latest safe cut that leaves ``keep``, moved on as far as ``land`` requires.

    ``edits`` are those of the present view; ``expected`` is the size in tokens of what will stand for the run;
    ``scale`` turns our token counts into the provider's. With ``drop_pinned=False`` segments that hold pinned
    texts stay whole; the run starts at ``behind`` or later. ``None`` when nothing can be rewritten.
    """
    start = max(history.segmenter.lead, behind)
    limit = safe_end(history)
    wide = [e for e in edits if e.end - e.start > 1]
    boundaries = [b for b in history.segmenter.boundaries() if start < b <= limit]
    boundaries = [b for b in boundaries if not any(e.start < b < e.end for e in wide)]
    if not boundaries:
        return None
    tails = _Tails(history, edits)
    kept_cost = _KeptCost(history, edits, start)
    view, behind_start = tails.behind(0), tails.behind(start)
    head_tokens, head_messages = view[0] - behind_start[0], view[1] - behind_start[1]
    leaving = [k for k, b in enumerate(boundaries) if tails.leaves(b, keep, policy)]
    chosen = leaving[-1] if leaving else 0
    while chosen + 1 < len(boundaries):
        tail_tokens, tail_messages = tails.behind(boundaries[chosen])
        kept_tokens, kept_messages = kept_cost.before(boundaries[chosen])
        after = int((head_tokens + kept_tokens + expected + tail_tokens) * scale) + policy.reserved_tokens
        if not policy.over(land, after, head_messages + kept_messages + 1 + tail_messages):
            break
        chosen += 1
    end = boundaries[chosen]
    kept = kept_inside(history, start, end)
    if not drop_pinned:
        kept |= _pinned_inside(history, start, end)
    return Run(start, end, kept)


def source_tokens(history: History, edits: Sequence[Edit], run: Run) -> int:
    """Tokens that the view spends on the run now, without what is kept of it."""
    covered = {i for e in edits for i in range(e.start, e.end)}
    total = history.span(run.start, run.end) - sum(history.span(i, i + 1) for i in run.kept - covered)
    for edit in edits:
        if run.start <= edit.start and edit.end <= run.end:
            total += edit.tokens - history.span(edit.start, edit.end)
    return total


def shown_tokens(history: History, edits: Sequence[Edit], index: int) -> int:
    """Tokens of the view behind message ``index`` of the history."""
    return _Tails(history, edits).behind(index)[0]


def fresh(edits: Sequence[Edit], run: Run) -> int:
    """Messages of the run that no edit has rewritten yet and that need not stay."""
    done = sum(e.end - e.start for e in edits if run.start <= e.start and e.end <= run.end)
    return run.end - run.start - done - len(run.kept)


def _segments_between(history: History, start: int, end: int) -> list[Segment]:
    return [s for s in history.segmenter.segments if s.start >= start and s.end <= end]


def _pinned_inside(history: History, start: int, end: int) -> frozenset[int]:
    kept: set[int] = set()
    for index in history.pinned:
        position = history.segmenter.at(index)
        if start <= index < end and position is not None:
            segment = history.segmenter.segments[position]
            kept.update(range(segment.start, segment.end))
    return frozenset(kept)


class _Tails:
    """Tokens and messages of the view behind an index, in logarithmic time."""

    def __init__(self, history: History, edits: Sequence[Edit]) -> None:
        self._history = history
        ordered = sorted(edits, key=lambda e: e.start)
        self._starts = [e.start for e in ordered]
        # What the edits from the k-th on change, summed from the end.
        self._tokens, self._messages = [0], [0]
        for e in reversed(ordered):
            self._tokens.append(self._tokens[-1] + e.tokens - history.span(e.start, e.end))
            self._messages.append(self._messages[-1] + len(e.messages) - (e.end - e.start))

    def behind(self, index: int) -> tuple[int, int]:
        later = len(self._starts) - bisect_left(self._starts, index)
        n = len(self._history)
        return self._history.span(index, n) + self._tokens[later], n - index + self._messages[later]

    def leaves(self, index: int, keep: Size, policy: Policy) -> bool:
        tokens, messages = self.behind(index)
        limit = policy.limit_tokens(keep)
        return messages >= keep[1] if limit is None else tokens >= limit


class _KeptCost:
    """Tokens and messages that stay inside a run that starts at ``start``, by its end."""

    def __init__(self, history: History, edits: Sequence[Edit], start: int) -> None:
        self._history, self._start = history, start
        odd = [s for s in history.segmenter.segments if s.start >= start and s.kind in ("orphan", "system")]
        self._ends = [s.end for s in odd]
        single = {e.start: e.tokens for e in edits if e.end - e.start == 1}  # such as an offloaded entry
        costs = (sum(single.get(i, history.span(i, i + 1)) for i in range(s.start, s.end)) for s in odd)
        self._tokens = list(accumulate(costs, initial=0))
        self._messages = list(accumulate((s.end - s.start for s in odd), initial=0))

    def before(self, end: int) -> tuple[int, int]:
        k = bisect_right(self._ends, end)
        tokens, messages = self._tokens[k], self._messages[k]
        user = self._history.last_user
        if self._start <= user < end:
            tokens, messages = tokens + self._history.span(user, user + 1), messages + 1
        return tokens, messages


def request_for(
    messages: Sequence[Any], run: Run, codec: Codec, *, edits: Sequence[Edit], before: Sequence[Edit], **more: Any
) -> tuple[list[Unit], TransformRequest]:
    """What a transform is asked about a run, and the pieces that the run is made of.

    ``edits`` are those with which the run is read, ``before`` those of the messages before it; ``more`` are the other
    fields of the request.
    """
    pieces = units(messages, edits, run.start, run.end)
    whole = [m for u in pieces for m in u.messages]
    shown = [m for u in pieces if not (u.edit is None and u.start in run.kept) for m in u.messages]
    request = TransformRequest(
        messages=shown,
        shown=whole if len(whole) != len(shown) else None,
        before=project(messages[: run.start], [e for e in before if e.end <= run.start and e.start < run.start]),
        codec=codec,
        earlier_summary=next((t for t in map(codec.summary_text, shown) if t is not None), None),
        **more,
    )
    return pieces, request
