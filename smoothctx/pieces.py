"""Pieces: what the blocks of a history have come to, oldest first. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

from .blocks import Block, Progress, cut
from .branch import Branch
from .codec import Codec
from .cuts import safe_end
from .handle import LookaheadHandle
from .history import History
from .states import WORKING, HandleState
from .view import Applied, Artifact, Edit, Replacement


@dataclass(frozen=True, slots=True)
class Piece:
    """One block ``[start, end)`` of the present history. ``tokens`` are those of its summary, where there is one;
    ``handle`` is the live one, where there is one."""

    start: int
    end: int
    progress: Progress
    tokens: int = 0
    handle: LookaheadHandle | None = None


class Sizes(Sequence[int]):
    """The running count of a history's tokens (``sizes[i]``: messages ``0..i``), with single results that were
    offloaded on entry at the size of what stands for them: nobody ever sent or will read more of them."""

    def __init__(self, branch: Branch) -> None:
        history = branch.history
        self._tokens = history.tokens
        entries = [r for r in (a.artifact.replacement for a in branch.applied) if _is_entry(r, branch.codec)]
        self._ends = [r.end for r in entries]
        saved = (history.span(r.start, r.end) - sum(e.tokens for e in r.edits) for r in entries)
        self._saved = list(accumulate(saved, initial=0))

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._tokens[index] - self._saved[bisect_right(self._ends, index)]


#: start, end and summary tokens of what the view shows of a run
Shown = tuple[int, int, int]


def pieces_of(
    branch: Branch,
    messages: Sequence[Any],
    live: Sequence[LookaheadHandle],
    shown: Sequence[Shown],
    *,
    block_tokens: int,
    given_up: Callable[[int, int], bool],
    at_limit: bool = False,
) -> tuple[list[Piece], int]:
    """The blocks of the history, oldest first, and where the part begins that has not filled one yet.

    What is in the view (``shown``, in order) or has a live handle is as it is; the rest is cut anew.
    ``given_up(start, end)``: a block that has failed too often. With ``at_limit`` a result counts as soon as it is
    there, preloaded or not.
    """
    history, codec = branch.history, branch.codec
    limit, sizes = safe_end(history), Sizes(branch)
    found: list[Piece] = []
    handles: dict[int, LookaheadHandle] = {}
    for handle in live:  # before what is shown: a merged one takes its place
        other = handles.get(handle.run.start)
        handles[handle.run.start] = handle if other is None or handle.run.end > other.run.end else other
    at_head = True
    position = history.segmenter.lead
    while position < limit:
        if (own := handles.get(position)) is not None:
            artifact = result_of(own, at_limit=at_limit)
            if artifact is None:
                found.append(Piece(position, own.run.end, Progress.WORKING, 0, own))
            else:
                found.append(Piece(position, own.run.end, Progress.READY, artifact.tokens, own))
            at_head, position = False, own.run.end
            continue
        k = bisect_right(shown, position, key=lambda s: s[0]) - 1
        if k >= 0 and position < shown[k][1]:
            found.append(Piece(shown[k][0], shown[k][1], Progress.COMMITTED, shown[k][2]))
            position = shown[k][1]
            continue
        if at_head and codec.summary_text(messages[position]) is not None:  # the caller's own list holds it
            found.append(Piece(position, position + 1, Progress.COMMITTED, history.span(position, position + 1)))
            position += 1
            continue
        at_head = False
        ahead = [*(s for s, _, _ in shown), *handles]
        stop = min((s for s in ahead if s > position), default=limit)
        for block in cut(history.segmenter.segments, sizes, block_tokens, start=position, end=min(stop, limit)):
            if not block.filled and stop >= limit:
                return found, block.start
            failed = given_up(block.start, block.end)
            found.append(Piece(block.start, block.end, Progress.FAILED if failed else Progress.WORKING))
        position = stop
    return found, min(position, len(history))


def shown_of(branch: Branch) -> list[Shown]:
    """What the view shows summaries of, in order."""
    found = ((*ends(a), summary_tokens(a.edits, branch.codec)) for a in branch.applied)
    return [shown for shown in found if shown[2]]


def _is_entry(replacement: Replacement, codec: Codec) -> bool:
    if replacement.end - replacement.start != 1:
        return False
    return [codec.role(m) for e in replacement.edits for m in e.messages] == ["tool"]


def block_of(history: History, sizes: Sizes, start: int, end: int) -> Block:
    """These messages as a block."""
    segments = history.segmenter.segments
    first, last = (bisect_left(segments, index, key=lambda s: s.start) for index in (start, end))
    tools = [s for s in segments[first:last] if s.kind in ("tools", "orphan")]
    return Block(start, end, sizes[end] - sizes[start], sum(sizes[min(s.end, end)] - sizes[s.start] for s in tools))


def ends(applied: Applied) -> tuple[int, int]:
    """Start and end of what this stands for."""
    return applied.artifact.replacement.start, applied.artifact.replacement.end


def summary_tokens(edits: Sequence[Edit], codec: Codec) -> int:
    """Tokens of the summaries that these edits show; 0 where they show none."""
    return sum(e.tokens for e in edits if any(codec.summary_text(m) is not None for m in e.messages))


def summaries_of(branch: Branch, messages: Sequence[Any], piece: Piece) -> list[str]:
    """The texts of what stands for this piece, or would."""
    artifact = None if piece.handle is None else piece.handle.flight.artifact
    if artifact is not None:
        edits = list(artifact.replacement.edits)
    else:
        edits = [e for a in branch.applied if ends(a) == (piece.start, piece.end) for e in a.edits]
    shown = [m for e in edits for m in e.messages] if edits else messages[piece.start : piece.end]
    return [text for text in map(branch.codec.summary_text, shown) if text is not None]


def result_of(handle: LookaheadHandle, *, at_limit: bool) -> Artifact | None:
    """What may be committed of it now."""
    usable = handle.state is HandleState.READY or (at_limit and handle.state in WORKING)
    return handle.flight.artifact if usable else None


def neighbours(found: Sequence[Piece]) -> list[Piece]:
    """The oldest run of at least two that stand side by side; empty without one."""
    group: list[Piece] = []
    for piece in found:
        if group and group[-1].end != piece.start:
            if len(group) > 1:
                break
            group = []
        group.append(piece)
    return group if len(group) > 1 else []


def merged_sizes(
    tokens: Sequence[int],
    summaries: Sequence[Sequence[str]],
    allotted: Sequence[int],
    total_tokens: int,
    needed: Callable[[Sequence[str]], int],
) -> list[int]:
    """Tokens that one summary of the first two, three, ... of these neighbours may have: at its age (``allotted``), or
    as what it has to carry needs (``needed``), and always less than they have now."""
    texts: list[str] = []
    sizes: list[int] = []
    for k, own in enumerate(summaries):
        texts += own
        before = sum(tokens[: k + 1])
        wanted = max(min(sum(allotted[: k + 1]), before // 2), needed(texts))
        sizes.append(min(total_tokens * 2 // 3, before * 9 // 10, wanted))
    return sizes[1:]


def figures_of(branch: Branch, found: Sequence[Piece], rest: int) -> dict[str, int]:
    """How far the blocks have come, for an event: how many of each kind, and the tokens of the view and of what is not
    summarised in it. ``rest``: where the part begins that has not filled a block yet."""
    sizes = Sizes(branch)
    count = {p: sum(piece.progress is p for piece in found) for p in Progress}
    return {
        "committed": count[Progress.COMMITTED],
        "ready": count[Progress.READY],
        "unfinished": count[Progress.WORKING],
        "failed": count[Progress.FAILED],
        "unfinished_tokens": sum(sizes[p.end] - sizes[p.start] for p in found if p.progress is Progress.WORKING),
        "filling_tokens": sizes[-1] - sizes[rest],
        "view_tokens": branch.tokens,
    }
