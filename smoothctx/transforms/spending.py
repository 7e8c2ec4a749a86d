"""Spending: what applying a transform could cost, before its model is asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..blocks import cut
from ..segments import segment
from ..tokens import MESSAGE_TOKENS, count_text
from .base import Transform, TransformRequest
from .chain import Chain
from .keep_recent import KeepRecent
from .model import estimate, options_tokens
from .offload import Offload
from .parallel import ParallelSummarize
from .prompts import PART, STANDALONE_SYSTEM, instruction, missing
from .prompts_blocks import instruction as block_instruction, merging
from .summarize import DEFAULT_WINDOW, MIN_INPUT, Summarize

#: a text that was cut off or of no use is asked for once more
TRIES = 2
#: tokens around what is read: tags, roles, a note
AROUND = 64


def most_tokens(transform: Transform, request: TransformRequest) -> int | None:
    """Tokens of input and output that applying ``transform`` to this request could cost, by estimate, with every text
    asked for a second time. 0: it asks no model; ``None``: nothing is known of it.

    Not in it: calls that failed at the server.
    """
    if isinstance(transform, KeepRecent | Offload):
        return 0
    if isinstance(transform, Chain):
        parts = [most_tokens(member, request) for member in transform.transforms]
        known = [p for p in parts if p is not None]
        return sum(known) if len(known) == len(parts) else None
    if isinstance(transform, Summarize):
        return _summarize(transform, request)
    if isinstance(transform, ParallelSummarize):
        return _blocks(transform, request)
    return None


def _summarize(own: Summarize, request: TransformRequest) -> int:
    aligned = own.layout == "aligned"
    before = _tokens(request, request.before) if aligned else 0
    shown = _tokens(request, _shown(request))
    if request.earlier_summary is not None:  # where it does not stand among them, it is read as well
        shown += count_text(request.earlier_summary) + AROUND
    told = instruction(own.prompt, where="in the transcript", max_tokens=own.max_tokens, strict=True)
    frame = AROUND + count_text(told + missing(request.missed))
    frame += _options(own, request) if aligned else count_text(STANDALONE_SYSTEM)
    room = max(MIN_INPUT, _window(own, request) - own.max_tokens - frame)
    return TRIES * _read(before, shown, room, frame, own.max_tokens)


def _blocks(own: ParallelSummarize, request: TransformRequest) -> int:
    shown = _shown(request)
    tokens = list(accumulate(map(request.codec.estimate, shown), initial=0))
    borders = [(0, len(shown))]
    if request.max_tokens is None:
        found = segment(request.codec, shown).segments
        borders = [(b.start, b.end) for b in cut(found, tokens, own.block_tokens, start=0, end=len(shown))]
    before, total = _tokens(request, request.before), 0
    for start, end in borders:
        told = (
            block_instruction(
                own.prompt,
                detail=own.detail,
                source_tokens=tokens[end] - tokens[start],
                max_tokens=own.max_tokens,
                strict=True,
            ),
            merging(max_tokens=own.max_tokens, strict=True),
        )
        frame = AROUND + max(map(count_text, told)) + count_text(missing(request.missed)) + _options(own, request)
        room = max(MIN_INPUT, _window(own, request) - own.max_tokens - frame)
        target = tokens[end] - tokens[start]
        ahead = min(before + tokens[start], max(0, room - target))  # what does not fit before it is left out
        total += TRIES * _read(ahead, target, room, frame, own.max_tokens)
    return total


def _read(before: int, shown: int, room: int, frame: int, output: int) -> int:
    """One text of ``shown`` tokens with ``before`` tokens ahead of it; in parts, where both do not fit."""
    if before + shown <= room:
        return before + shown + frame + output
    lead = before if before <= room // 2 else 0
    carried = min(output, (room - lead) // 2)
    free = max(MIN_INPUT // 2, room - lead - carried - count_text(PART) - AROUND)
    parts = 2 * shown // free + 1  # two that follow each other never fit in one
    return shown + parts * (lead + carried + count_text(PART) + frame + output)


def _shown(request: TransformRequest) -> Sequence[Any]:
    return request.messages if request.shown is None else request.shown


def _tokens(request: TransformRequest, messages: Sequence[Any]) -> int:
    return sum(map(request.codec.estimate, messages)) + MESSAGE_TOKENS


def _options(own: Summarize | ParallelSummarize, request: TransformRequest) -> int:
    return options_tokens(request.options) + estimate(request.prompt) if own.engine is not None else 0


def _window(own: Summarize | ParallelSummarize, request: TransformRequest) -> int:
    window = getattr(own.engine, "context_window", None)
    return own.window or window or request.context_tokens or DEFAULT_WINDOW
