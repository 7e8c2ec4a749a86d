"""Blocks: where a history is cut, what each part may cost, and which parts may be committed. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from helpers import A, H, Message, S, T
from smoothctx import OpenAIMessages
from smoothctx.blocks import MIN_FILL, Block, Progress, cut, leading, merge, share
from smoothctx.history import History

CODEC = OpenAIMessages()


def history(messages: list[Message]) -> History:
    """A synced history."""
    made = History(CODEC)
    made.sync(messages)
    return made


def blocks(made: History, size: int, *, start: int | None = None, end: int | None = None) -> list[Block]:
    """Its blocks, from the first message behind the system ones."""
    lead = made.segmenter.lead
    return cut(
        made.segmenter.segments,
        made.tokens,
        size,
        start=lead if start is None else start,
        end=len(made) if end is None else end,
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Turns of text and of parallel tool calls, small and large, every call answered at once."""
    messages: list[Message] = [S()] if draw(st.booleans()) else []
    for k in range(draw(st.integers(0, 24))):
        size = draw(st.sampled_from([0, 8, 40, 90, 300]))
        calls = draw(st.integers(0, 3))
        messages.append(H(f"<{k}> question", size=size) if draw(st.booleans()) else A("thought", size=size))
        if calls:
            ids = [f"c{k}-{j}" for j in range(calls)]
            messages.append(A(None, *ids))
            messages += [T(i, "result", size=size) for i in ids]
    return messages


@given(conversations(), st.sampled_from([20, 100, 250]))
def test_blocks_cover_whole_segments_in_order(messages: list[Message], size: int) -> None:
    """The blocks follow each other without a gap, begin behind the system messages, and never cut a segment."""
    made = history(messages)
    found = blocks(made, size)
    assert [b.start for b in found] == [made.segmenter.lead, *(b.end for b in found[:-1])][: len(found)]
    assert not messages or not found or found[-1].end == len(messages)
    borders = set(made.segmenter.boundaries())
    assert {b.end for b in found} <= borders and {b.start for b in found} <= borders
    assert all(b.filled for b in found[:-1])
    for b in found:
        assert b.tokens == made.span(b.start, b.end) and 0 <= b.tool_tokens <= b.tokens
        whole = [s for s in made.segmenter.segments if b.start <= s.start < b.end]
        before_last = made.span(b.start, whole[-1].start)
        assert b.tokens <= size or before_last * MIN_FILL < size, "larger only for one large segment"


@given(conversations(), conversations(), st.sampled_from([20, 100, 250]))
def test_appending_moves_no_border(messages: list[Message], more: list[Message], size: int) -> None:
    """What was filled is the same block for ever, whatever comes later."""
    longer = [*messages, *(m for m in more if m["role"] != "system")]
    before = [b for b in blocks(history(messages), size) if b.filled]
    after = blocks(history(longer), size)
    assert after[: len(before)] == before


@given(conversations(), st.sampled_from([20, 100, 250]), st.integers(0, 30))
def test_from_any_border_the_same_borders_follow(messages: list[Message], size: int, k: int) -> None:
    """Cutting may go on where it stood: it needs nothing of what lies before."""
    made = history(messages)
    found = blocks(made, size)
    k = min(k, len(found))
    start = found[k].start if k < len(found) else len(made)
    assert blocks(made, size, start=start) == found[k:]


@given(conversations(), st.sampled_from([20, 100, 250]), st.integers(0, 60))
def test_an_earlier_end_gives_the_same_filled_blocks(messages: list[Message], size: int, end: int) -> None:
    """A block is filled or not by what it has, not by where the reading ends."""
    made = history(messages)
    short = [b for b in blocks(made, size, end=min(end, len(made))) if b.filled]
    assert blocks(made, size)[: len(short)] == short


def test_a_huge_segment_is_a_block_of_its_own() -> None:
    """What stands before it is closed, unless it is too little for a summary; what follows starts anew."""
    text = [H("a", size=60), A("b", size=60)]
    huge = [A(None, "1"), T("1", "r", size=1000)]
    made = history([S(), *text, *huge, *text])
    assert [(b.start, b.end, b.filled) for b in blocks(made, 200)] == [(1, 3, True), (3, 5, True), (5, 7, False)]
    little = history([S(), H("go"), *huge])
    assert [(b.start, b.end, b.filled) for b in blocks(little, 200)] == [(1, 4, True)]
    assert blocks(little, 200)[0].tool_tokens == little.span(2, 4)


def test_a_late_result_never_splits_its_call() -> None:
    """A border that comes to lie inside a call and its late result is no border any more."""
    early = [H("q", size=90), A(None, "1"), H("more", size=90), A("go on", size=90), H("and", size=90)]
    late = history([*early, T("1", "late"), A("end", size=90), H("x")])
    assert all(b.start in (0, 1, 6, 7) for b in blocks(late, 100))


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_nothing_to_cut(size: int) -> None:
    """No messages, or none behind the system ones, are no blocks."""
    assert blocks(history([]), size) == []
    assert blocks(history([S()]), size) == []


# -- shares ---------------------------------------------------------------------------------------------------------

sizes = st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 9000)), max_size=40)


@given(sizes, st.integers(0, 20_000), st.integers(1, 4000))
def test_shares_are_never_above_the_total_or_the_cap(parts: list[tuple[int, int]], total: int, cap: int) -> None:
    """The sum is capped, each one is capped, and nobody gets less than nothing."""
    given_ = share(total, [Block(k, k + 1, t, min(tool, t)) for k, (t, tool) in enumerate(parts)], cap=cap)
    assert len(given_) == len(parts)
    assert sum(given_) <= total and all(0 <= g <= cap for g in given_)
    if parts and total >= cap * len(parts):
        assert given_ == [cap] * len(parts), "what is there for all is not held back"
    if parts and total < cap * len(parts):
        assert sum(given_) > total - len(parts) - 1, "nothing but the rounding is left over"


def test_older_blocks_and_tool_output_get_less() -> None:
    """Shares by age and kind, and by size."""
    same = [Block(k, k + 1, 4000) for k in range(6)]
    given_ = share(2000, same, cap=1000)
    assert given_ == sorted(given_) and given_[0] < given_[-1]
    plain, tools = share(1000, [Block(0, 1, 4000, 0), Block(1, 2, 4000, 4000)], cap=1000)
    assert tools < plain
    small, large = share(1000, [Block(0, 1, 400), Block(1, 2, 4000)], cap=1000)
    assert small < large
    many = share(4000, [Block(k, k + 1, 4000) for k in range(40)], cap=1000)
    assert min(many) * 5 > max(many), "no block falls to nothing"


# -- what may be committed ------------------------------------------------------------------------------------------

C, R, W, F = Progress.COMMITTED, Progress.READY, Progress.WORKING, Progress.FAILED


@pytest.mark.parametrize(
    ("states", "room", "beyond", "chosen"),
    [
        ([], None, False, []),
        ([R, R, R], None, False, [0, 1, 2]),
        ([C, C, R], None, False, [2]),
        ([R, W, R], None, False, [0]),
        ([R, W, R], None, True, [0, 2]),
        ([W, R], None, False, []),
        ([F, R, F, R, W, R], None, False, [1, 3]),
        ([R, R, R], 20, False, [0, 1]),
        ([R, R, R], 9, False, []),
        ([R, W, R], 10, True, [0]),
    ],
)
def test_the_ready_ones_that_lead(states: list[Progress], room: int | None, beyond: bool, chosen: list[int]) -> None:
    """A straggler holds back what is behind it, a failed one does not, and the room is never exceeded."""
    assert leading([(s, 10) for s in states], room=room, beyond=beyond) == chosen


@given(
    st.lists(st.tuples(st.sampled_from([C, R, W, F]), st.integers(1, 500)), max_size=20),
    st.integers(0, 3000),
    st.booleans(),
)
def test_the_room_is_never_exceeded(states: list[tuple[Progress, int]], room: int, beyond: bool) -> None:
    """Only ready ones, in order, within the room, and none is left out before one that is taken."""
    chosen = leading(states, room=room, beyond=beyond)
    assert chosen == sorted(chosen) and all(states[k][0] is R for k in chosen)
    assert sum(states[k][1] for k in chosen) <= room
    if chosen:
        ready = [k for k, (s, _) in enumerate(states) if s is R]
        assert ready[: len(chosen)] == chosen


@given(st.lists(st.integers(1, 800), max_size=20), st.integers(100, 4000), st.integers(10, 400))
def test_merging_takes_the_oldest(tokens: list[int], total: int, each: int) -> None:
    """At least two, the oldest, and no more than it takes to get clearly below the total."""
    merged = [min(each * n, sum(tokens[:n]) // 2) for n in range(2, len(tokens) + 1)]
    count = merge(tokens, merged, total_tokens=total)
    if len(tokens) < 2:
        assert count is None
        return
    assert count is not None and 2 <= count <= len(tokens)

    def after(n: int) -> int:
        return sum(tokens[n:]) + merged[n - 2]

    assert count == len(tokens) or after(count) <= total * 3 // 4
    assert all(after(n) > total * 3 // 4 for n in range(2, count))
