"""Segments: the smallest runs of messages that may be rewritten, found incrementally.

A segment is one atomic group: a user message, or an assistant message with all results of its calls. A result
is paired with an *outstanding* call (newest first), since servers repeat ids or leave them empty. Parallel
results are one unit with their call; a result that comes late joins everything since its call into one unit. One
message may hold the results of several calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .codec import Codec, OpenAIMessages, check_messages, results_of

#: An old call that never got its result blocks nothing; more of them than this are forgotten, oldest first.
MAX_OUTSTANDING = 256


@dataclass(slots=True)
class Segment:
    """Messages ``[start, end)`` that are rewritten together or not at all.

    ``kind``: ``"user"``, ``"assistant"``, ``"tools"`` (an assistant message with calls, and their results),
    ``"system"`` (a system message that is not at the head) or ``"orphan"`` (a tool result without its call).
    ``unanswered``: calls in it that have no result yet.
    """

    start: int
    end: int
    kind: str
    unanswered: int = 0


@dataclass(slots=True)
class _Call:
    id: str
    index: int
    segment_start: int


class Segmenter:
    """Splits a growing history into segments; holds only the segments and the outstanding calls."""

    __slots__ = ("answers", "lead", "length", "outstanding", "segments")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.outstanding: list[_Call] = []
        #: for each tool message the assistant message whose call each result answers (``None``: its call is not here)
        self.answers: dict[int, tuple[int | None, ...]] = {}
        self.length = 0
        #: number of system messages at the head
        self.lead = 0

    def append(self, codec: Codec, message: Any) -> None:
        """Take the next message of the history."""
        index, role = self.length, codec.role(message)
        self.length += 1
        if role == "system" and index == self.lead:
            self.lead += 1
        elif role == "tool":
            self._results(index, [codec.result_id(r) for r in results_of(codec, message)])
        elif role == "assistant":
            calls = codec.calls(message)
            kind = "tools" if calls else "assistant"
            self.segments.append(Segment(index, index + 1, kind, len(calls)))
            self.outstanding += [_Call(c.id, index, index) for c in calls]
            del self.outstanding[:-MAX_OUTSTANDING]
        else:
            self.segments.append(Segment(index, index + 1, role))

    def _results(self, index: int, call_ids: Sequence[str]) -> None:
        calls = [self._take(i) for i in call_ids]
        answered = [call for call in calls if call is not None]
        position = self.at(min(c.segment_start for c in answered)) if answered else None
        if position is None:
            self.segments.append(Segment(index, index + 1, "orphan"))
            return
        self.answers[index] = tuple(None if call is None else call.index for call in calls)
        owner = self.segments[position]
        # A late result keeps everything since its call together with it.
        merged = self.segments[position + 1 :]
        owner.unanswered += sum(s.unanswered for s in merged) - len(answered)
        owner.end = index + 1
        del self.segments[position + 1 :]
        for other in self.outstanding:
            if other.segment_start > owner.start:
                other.segment_start = owner.start

    def _take(self, call_id: str) -> _Call | None:
        """The newest assistant message's matching call first; without an id, its first open one."""
        if not self.outstanding:
            return None
        newest = self.outstanding[-1].index
        if not call_id:
            # Servers that leave ids out answer in order.
            return self.outstanding.pop(next(k for k, c in enumerate(self.outstanding) if c.index == newest))
        matches = [k for k, c in enumerate(self.outstanding) if c.id == call_id]
        if not matches:
            # A call without an id can only be answered by position.
            matches = [k for k, c in enumerate(self.outstanding) if not c.id and c.index == newest]
        if not matches:
            return None
        best = max(self.outstanding[k].index for k in matches)
        return self.outstanding.pop(next(k for k in matches if self.outstanding[k].index == best))

    def at(self, index: int) -> int | None:
        """Position in ``segments`` of the one that holds message ``index``."""
        k = bisect_right(self.segments, index, key=lambda s: s.start) - 1
        return k if k >= 0 and index < self.segments[k].end else None

    def boundaries(self) -> list[int]:
        """Every index at which the history may be cut: segment starts, and the end."""
        return [s.start for s in self.segments] + [self.length]


def segment(codec: Codec, messages: Sequence[Any]) -> Segmenter:
    """Segment a whole list at once."""
    segmenter = Segmenter()
    for message in messages:
        segmenter.append(codec, message)
    return segmenter


def segments(messages: Sequence[Any], codec: Codec | None = None) -> list[Segment]:
    """The segments of a history, system messages at its head excluded: what ``target_segments`` indexes.

    Raises:
        MessageError: when a message is malformed, naming its index and field.
    """
    codec = codec or OpenAIMessages()
    check_messages(codec, messages)
    return segment(codec, messages).segments
