"""Cuts: which run may be rewritten now. Pure functions over a history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from driving import fast
from helpers import A, H, Message, S, T
from smoothctx import OpenAIMessages, Policy, Summarize
from smoothctx.cuts import Run, fresh, kept_inside, plan, safe_end, source_tokens
from smoothctx.history import History
from smoothctx.view import Edit

CODEC = OpenAIMessages()


def history(messages: list[Message]) -> History:
    """A synced history."""
    made = History(CODEC)
    made.sync(messages)
    return made


def policy(**options: Any) -> Policy:
    """Sizes in messages."""
    return Policy(
        Summarize(fast()),
        **{"trigger": ("messages", 4), "hard_limit": ("messages", 100), "land_at": ("messages", 50), **options},
    )


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        ([], 0),
        ([S()], 1),
        ([H()], 0),
        ([S(), H(), A(), H()], 3),
        ([H(), A(), H(), A("a", "1")], 3),
        ([H(), A(), H(), A("a", "1"), T("1")], 3),
        ([H(), A(), H(), A("a", "1", "2"), T("1")], 3),
        ([H(), A("a", "1"), T("1"), A("b"), H()], 4),
        ([H(), A("a", "1"), H(), H(), H()], 1),
        ([H(), A("a", "1"), H(), A("b"), H()], 4),
        ([H(), A("a", "1"), T("1"), H()], 1),
        ([H(), A("a", "1"), H(), A("b"), T("1"), H()], 1),
    ],
)
def test_the_latest_safe_end(messages: list[Message], end: int) -> None:
    """The newest segment, unread results, and everything from an open call of the newest assistant message on stay."""
    assert safe_end(history(messages)) == end


def test_what_stays_inside_a_run() -> None:
    """The latest user message, orphan results and system messages within."""
    messages = [S(), H("old"), T("x", "orphan"), A(), S("later"), H("latest"), A("a", "1"), T("1"), A()]
    assert kept_inside(history(messages), 1, 8) == frozenset({2, 4, 5})
    assert kept_inside(history(messages), 1, 4) == frozenset({2})


def test_the_cut_leaves_keep_and_moves_on_only_as_far_as_it_must() -> None:
    """``keep`` decides while it lands; ``land_at`` wins where it does not."""
    messages = [m for _ in range(10) for m in (H(), A())]
    made = history(messages)
    roomy = plan(made, (), policy(), ("messages", 6), land=("messages", 50))
    assert roomy == Run(0, 14, frozenset())
    tight = plan(made, (), policy(), ("messages", 6), land=("messages", 4))
    assert tight is not None
    assert tight.end == 17
    nothing = plan(history([S(), H()]), (), policy(), ("messages", 0), land=("messages", 0))
    assert nothing is None


def test_a_cut_never_falls_into_an_earlier_edit() -> None:
    """Boundaries inside what is rewritten already are no boundaries."""
    messages = [m for _ in range(10) for m in (H(), A())]
    made = history(messages)
    edit = Edit(start=0, end=12, messages=(CODEC.summary("s"),), tokens=40)
    run = plan(made, (edit,), policy(), ("messages", 12), land=("messages", 50))
    assert run is not None
    assert run.end == 12 or run.end > 12
    assert fresh((edit,), Run(0, 12, frozenset())) == 0
    assert fresh((edit,), Run(0, 14, frozenset())) == 2
    assert source_tokens(made, (edit,), Run(0, 14, frozenset())) == 40 + made.span(12, 14)


def test_pinned_segments_stay_where_dropping_is_asked_for() -> None:
    """The fallback never drops what the user pinned."""
    messages = [H("<pin>rule</pin>"), A(), H(), A(), H(), A(), H()]
    run = plan(history(messages), (), policy(), ("messages", 2), land=("messages", 50), drop_pinned=False)
    assert run is not None
    assert 0 in run.kept


pool = st.sampled_from([H("u"), A("a"), A("c", "1"), A("d", "1", "2"), T("1"), T("2"), S("later"), T("nobody")])


@settings(max_examples=200, deadline=None)
@given(st.lists(pool, max_size=14), st.integers(0, 6), st.integers(0, 8))
def test_property_every_plan_is_safe(messages: list[Message], keep: int, land: int) -> None:
    """Starts behind the system messages, ends at a boundary, splits no segment, keeps the question."""
    made = history(messages)
    run = plan(made, (), policy(), ("messages", keep), land=("messages", land))
    if run is None:
        return
    assert made.segmenter.lead == run.start < run.end <= safe_end(made)
    assert run.end in made.segmenter.boundaries()
    for segment in made.segmenter.segments:
        assert segment.end <= run.end or segment.start >= run.end
        if segment.kind in ("orphan", "system") and segment.end <= run.end:
            assert set(range(segment.start, segment.end)) <= run.kept
    assert not run.start <= made.last_user < run.end or made.last_user in run.kept
