"""Blocks: how a history is cut into parts that are compacted each for itself, and what they may cost. Pure.

A block is a run of whole segments, cut from the first message behind the system ones: it is filled when the next
segment does not fit any more. A filled block never changes, whatever comes later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .segments import Segment

#: a block smaller than this part of the usual size takes the next segment in, however large that is
MIN_FILL = 8
#: what a block may cost, against one that is one block newer; no block falls under `OLDEST` of the newest
AGE, OLDEST = 0.85, 0.25
#: what tool output may cost, against text of the user and the agent
TOOLS = 0.5


@dataclass(frozen=True, slots=True)
class Block:
    """Messages ``[start, end)`` of a history, and their tokens, of which ``tool_tokens`` are in tool calls and their
    results. ``filled``: nothing that is added behind it can change it."""

    start: int
    end: int
    tokens: int
    tool_tokens: int = 0
    filled: bool = True


class Progress(StrEnum):
    """Where the summary of one block is."""

    COMMITTED = "committed"
    READY = "ready"
    WORKING = "working"
    FAILED = "failed"


def cut(segments: Sequence[Segment], tokens: Sequence[int], block_tokens: int, *, start: int, end: int) -> list[Block]:
    """Messages ``[start, end)`` in blocks of at most ``block_tokens``; all but perhaps the last are filled.

    ``tokens[i]`` is the running count of messages ``0..i``. No segment is ever cut: one that is larger than a block
    is a block of its own (with the little that stood before it, if that is less than an eighth of a block). From
    any border of a history the same borders follow.
    """
    found: list[Block] = []
    first: int | None = None
    size = tool = 0

    def close(at: int, *, filled: bool) -> None:
        nonlocal first, size, tool
        if first is not None:
            found.append(Block(first, at, size, tool, filled))
        first, size, tool = None, 0, 0

    last = start
    for k in range(bisect_left(segments, start, key=lambda s: s.start), len(segments)):
        segment = segments[k]
        if segment.end > end:
            break
        cost = tokens[segment.end] - tokens[segment.start]
        if first is not None and size + cost > block_tokens and size * MIN_FILL >= block_tokens:
            close(segment.start, filled=True)
        first = segment.start if first is None else first
        size += cost
        tool += cost if segment.kind in ("tools", "orphan") else 0
        last = segment.end
        if size >= block_tokens:
            close(last, filled=True)
    close(last, filled=False)
    return found


def share(total_tokens: int, blocks: Sequence[Block], *, cap: int) -> list[int]:
    """How many tokens the summary of each block may have, oldest first: never more than ``total_tokens`` in all.

    Older blocks get less than newer ones, tool output less than text, small blocks less than large ones, and nobody
    more than ``cap``; what one does not take goes to the others.
    """
    count = len(blocks)
    weights = [
        max(OLDEST, AGE ** (count - 1 - k)) * max(1.0, b.tokens - (1 - TOOLS) * min(b.tool_tokens, b.tokens))
        for k, b in enumerate(blocks)
    ]
    given = [0] * count
    left, open_ = max(0, total_tokens), set(range(count))
    while open_ and left > 0:
        weight = sum(weights[k] for k in open_)
        full = {k for k in open_ if left * weights[k] / weight >= cap}
        if not full:
            for k in open_:
                given[k] = int(left * weights[k] / weight)
            break
        for k in sorted(full, reverse=True):
            given[k] = min(cap, left)
            left -= given[k]
        open_ -= full
    return given


def leading(blocks: Sequence[tuple[Progress, int]], *, room: int | None, beyond: bool = False) -> list[int]:
    """Which of these blocks (oldest first, each with the tokens of its summary) may be committed now.

    All that are ready before the first one under way; with ``beyond`` also those behind it. A failed one stays as it
    is and holds nobody up. With ``room``, only as many as that has tokens for, without leaving one out.
    """
    chosen: list[int] = []
    for k, (progress, tokens) in enumerate(blocks):
        if progress is Progress.WORKING and not beyond:
            break
        if progress is not Progress.READY:
            continue
        if room is not None:
            if tokens > room:
                break
            room -= tokens
        chosen.append(k)
    return chosen


def merge(tokens: Sequence[int], merged: Sequence[int], *, total_tokens: int) -> int | None:
    """How many of the oldest summaries to merge into one, so that all of them together need clearly less than
    ``total_tokens``; ``None`` when there are no two that can be merged.

    ``tokens`` are those of neighbours, oldest first; ``merged[n - 2]`` is what one summary of the first ``n`` needs.
    """
    if len(tokens) < 2:
        return None
    for count in range(2, len(tokens)):
        if merged[count - 2] + sum(tokens[count:]) <= total_tokens * 3 // 4:
            return count
    return len(tokens)
