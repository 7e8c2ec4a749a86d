"""The view: the history with the valid replacements applied. Pure functions over history and edits.

An ``Edit`` replaces ``[start, end)`` of the history by other messages. An ``Artifact`` is what one transform
made of ``[start, end)``: the edits inside it, valid under the chain digests at both ends. ``Applied`` is an
artifact in the view, with the few edits that its commit needed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .history import History
from .usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """``messages`` stand for ``[start, end)`` of the history. ``tokens`` is their count."""

    start: int
    end: int
    messages: tuple[Any, ...]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A handle's result: what stands for ``[start, end)``, and the digests it is valid under."""

    start: int
    end: int
    start_digest: bytes
    end_digest: bytes
    edits: tuple[Edit, ...]

    def valid(self, history: History) -> bool:
        """Does the history hold exactly what this was made from?"""
        return (
            self.end < len(history.chain)
            and history.chain[self.start] == self.start_digest
            and history.chain[self.end] == self.end_digest
        )

    @property
    def drops_only(self) -> bool:
        """Removals can be split at any message; anything else is all or nothing.

        A removal may put a note of pinned texts in, which stands for no message.
        """
        return all(not e.messages or e.start == e.end for e in self.edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A replacement plus its bookkeeping. ``saved_tokens`` is what it took from the view it was made for.

    ``created`` is in the runtime clock's seconds; ``warm`` says that the engine reported its view as cached.
    ``alternatives``: artifacts among which the commit chooses, one per candidate of a ``Speculate`` (``None`` for one
    that is not there); the artifact itself is as the first of them. ``warm`` is about the likeliest then.
    """

    key: str
    transform: str
    replacement: Replacement
    usage: Usage = Usage()
    created: float = 0.0
    tokens: int = 0
    durable: bool = False
    warm: bool = False
    alternatives: tuple[Artifact | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Applied:
    """An artifact in the view. ``extra`` are edits behind it that its commit required (thinking of older
    turns, late tool results, the user stub); each is valid as long as the history keeps its end."""

    artifact: Artifact
    edits: tuple[Edit, ...]
    extra: tuple[Edit, ...] = field(default=())


def project(messages: Sequence[Any], edits: Sequence[Edit]) -> list[Any]:
    """The view: the caller's own objects for everything that is not replaced. ``edits`` sorted, disjoint."""
    if not edits:
        return list(messages)
    view: list[Any] = []
    position = 0
    for edit in edits:
        view += messages[position : edit.start]
        view += edit.messages
        position = edit.end
    view += messages[position:]
    return view


@dataclass(frozen=True, slots=True)
class Unit:
    """One indivisible piece of a view: a raw message (``edit`` is None) or an edit's replacement."""

    start: int
    end: int
    messages: tuple[Any, ...]
    edit: Edit | None = None


def units(messages: Sequence[Any], edits: Sequence[Edit], start: int, end: int) -> list[Unit]:
    """The view of ``[start, end)`` piece by piece. No edit may straddle its ends."""
    found: list[Unit] = []
    position = start
    for edit in edits:
        if edit.end < start or edit.start >= end or (edit.end == start and edit.start < start):
            continue
        found += [Unit(i, i + 1, (messages[i],)) for i in range(position, edit.start)]
        found.append(Unit(edit.start, edit.end, edit.messages, edit))
        position = edit.end
    found += [Unit(i, i + 1, (messages[i],)) for i in range(position, end)]
    return found


def align(before: Sequence[Unit], kept: frozenset[int], after: Sequence[Any], count: Any) -> tuple[Edit, ...]:
    """Turn a rewrite of ``before`` (without the units that start at ``kept``) into minimal edits.

    Messages that ``after`` passes on as the same objects stay what they were; each gap between them becomes
    one edit. ``kept`` units stay in place, and a gap around one is split there, its messages standing first.
    """
    position_of = {id(m): k for k, m in enumerate(after)}
    edits: list[Edit] = []
    gap: list[list[Unit]] = [[]]
    taken = 0

    def close(upto: int) -> None:
        nonlocal taken, gap
        out = tuple(after[taken:upto])
        runs = [run for run in gap if run]
        for k, run in enumerate(runs):
            messages = out if k == 0 else ()
            edits.append(Edit(start=run[0].start, end=run[-1].end, messages=messages, tokens=count(messages)))
        if not runs and out:
            raise ValueError("a rewrite may not add messages where it replaced none")
        taken, gap = upto, [[]]

    for unit in before:
        if unit.start in kept and unit.edit is None:
            gap.append([])
            continue
        places = [position_of.get(id(m), -1) for m in unit.messages]
        if places and places[0] >= taken and places == list(range(places[0], places[0] + len(places))):
            close(places[0])
            if unit.edit is not None:
                edits.append(unit.edit)
            taken = places[-1] + 1
        else:
            gap[-1].append(unit)
    close(len(after))
    return tuple(edits)


def clip(edits: Sequence[Edit], start: int, end: int | None = None) -> tuple[Edit, ...]:
    """What of pure removals lies in ``[start, end)``; by default from ``start`` on."""
    notes = [e for e in edits if e.start == e.end and e.start >= start and (end is None or e.end < end)]
    clipped = [(max(e.start, start), e.end if end is None else min(e.end, end), e) for e in edits]
    return (
        *notes,
        *(
            e if (e.start, e.end) == (a, b) else Edit(start=a, end=b, messages=(), tokens=0)
            for a, b, e in clipped
            if a < b
        ),
    )
