"""Turns: the agent's model calls, counted by the replies that they left in the history. Pure.

A reply is an assistant message with the results of its calls. (Where a late result has joined several into one
segment, that counts as one.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cuts import Run, kept_inside, safe_end
from .history import History
from .segments import Segment
from .view import Edit

#: replies whose mean length is taken for that of the next one
LATEST = 8


def turns_behind(history: History, index: int) -> int:
    """Turns whose reply stands at ``index`` or later."""
    return sum(1 for _ in _replies(history, index))


def start_of_last(history: History, k: int) -> int | None:
    """Where the reply of the ``k``-th last turn begins; ``None`` when there are fewer."""
    for count, reply in enumerate(_replies(history, 0), 1):
        if count == k:
            return reply.start
    return None


def reply_tokens(history: History) -> float:
    """Mean tokens of the latest replies, without the results of their calls; 0 before the first."""
    sizes = [
        history.span(reply.start, reply.start + 1)
        for reply, _ in zip(_replies(history, 0), range(LATEST), strict=False)
    ]
    return sum(sizes) / len(sizes) if sizes else 0.0


def lagging(history: History, edits: Sequence[Edit], k: int, done: int) -> Run | None:
    """Everything but the last ``k`` turns, once ``k`` turns more than ``done`` messages lie before them.

    ``edits`` are those of the present view. What a fallback dropped already is taken in, also where it reaches into
    the last turns.
    """
    end = start_of_last(history, k)
    if end is None:
        return None
    for edit in edits:
        if edit.start < end < edit.end:
            end = edit.end
    if end > safe_end(history) or turns_behind(history, done) - turns_behind(history, end) < k:
        return None
    start = history.segmenter.lead
    return Run(start, end, kept_inside(history, start, end)) if end > start else None


def _replies(history: History, index: int) -> Iterator[Segment]:
    """The replies that begin at ``index`` or later, newest first."""
    for segment in reversed(history.segmenter.segments):
        if segment.start < index:
            return
        if segment.kind in ("assistant", "tools"):
            yield segment
