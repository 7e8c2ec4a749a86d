"""History: it follows the caller's list incrementally, and is always what a fresh look would give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from helpers import A, H, Message, S, T, chat
from smoothctx import MessageError, OpenAIMessages
from smoothctx.digest import chain
from smoothctx.history import History

CODEC = OpenAIMessages()

pool = st.sampled_from(
    [S("rules"), H("a"), H("b"), A("c"), A("d", "1"), A("e", "1", "2"), T("1", "f"), T("2", "g"), T("1", "h")]
)
lists = st.lists(pool, max_size=8)


def fingerprint(history: History) -> Any:
    """Everything that is derived from the messages."""
    segments = [(s.start, s.end, s.kind, s.unanswered) for s in history.segmenter.segments]
    outstanding = [(c.id, c.segment_start) for c in history.segmenter.outstanding]
    return (
        history.chain, history.tokens, segments, outstanding, history.segmenter.lead, history.last_user,
        history.last_assistant, history.pinned,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(lists, min_size=1, max_size=6))
def test_property_following_any_lists_equals_a_fresh_look(sequence: list[list[Message]]) -> None:
    """Appends, cuts, edits and swaps in any order: digests, counts, segments and marks are those of a new history."""
    history = History(CODEC)
    for messages in sequence:
        history.sync(copy.deepcopy(messages))
        fresh = History(CODEC)
        fresh.sync(messages)
        assert fingerprint(history) == fingerprint(fresh)
        assert history.chain == chain(CODEC, messages)
        assert history.unchanged(messages)


def test_a_change_says_what_stayed() -> None:
    """Common prefix, what was held before, and whether it is another branch."""
    history = History(CODEC)
    messages = chat(3)
    change = history.sync(messages)
    assert (change.common, change.previous, change.diverged, change.error) == (0, 0, False, None)
    messages.append(H("next"))
    change = history.sync(messages)
    assert (change.common, change.previous, change.diverged) == (7, 7, False)
    messages[4] = A("edited")
    change = history.sync(messages)
    assert (change.common, change.previous, change.diverged) == (4, 8, True)
    change = history.sync(messages[:2])
    assert (change.common, change.previous, change.diverged) == (2, 8, True)


def test_bookkeeping_that_changes_in_place_is_no_new_branch() -> None:
    """Ids, usage and metadata that appear later change neither digests nor what is common."""
    history = History(CODEC)
    messages = chat(3)
    history.sync(messages)
    before = list(history.chain)
    for k, message in enumerate(messages):
        message["id"] = f"m{k}"
        message["usage"] = {"prompt_tokens": 5, "completion_tokens": 5}
    change = history.sync(messages)
    assert not change.diverged
    assert history.chain == before
    assert history.unchanged(messages)


def test_an_edit_in_place_shows_at_the_next_full_sync() -> None:
    """``tail_only`` looks at the end only; a full sync compares everything held."""
    history = History(CODEC)
    messages = chat(3)
    history.sync(messages)
    messages[2]["content"] = "edited in place"
    assert not history.unchanged(messages)
    assert not history.sync(messages, tail_only=True).diverged
    change = history.sync(messages)
    assert (change.common, change.diverged) == (2, True)


def test_the_error_names_the_index_and_what_can_be_read_is_held() -> None:
    """A malformed message ends the readable part; once it is gone the rest is read."""
    history = History(CODEC)
    messages: list[Any] = [*chat(2), {"role": "robot"}, H("behind")]
    for _ in range(2):
        change = history.sync(messages)
        assert isinstance(change.error, MessageError)
        assert str(change.error).startswith("messages[5].role: 'robot' is unknown")
        assert len(history) == 5
    messages[5] = A("good")
    assert history.sync(messages).error is None
    assert len(history) == 7
    messages[3] = {"role": "robot"}
    change = history.sync(messages)
    assert change.error is not None
    assert (change.common, len(history)) == (3, 3)


def test_counts_by_the_callers_counter_or_the_estimate() -> None:
    """Every message once; spans are differences."""
    calls: list[int] = []

    def counter(messages: list[Any]) -> int:
        calls.append(len(messages))
        return 7 * len(messages)

    history = History(CODEC, counter)
    messages = chat(3)
    history.sync(messages)
    history.sync(messages)
    assert calls == [1] * 7
    assert history.span(2, 5) == 21
    assert history.count(messages) == 49
    assert history.count([]) == 0
    plain = History(CODEC)
    plain.sync(messages)
    assert plain.tokens[-1] == sum(map(CODEC.estimate, messages))


def test_the_last_report_is_the_one_that_counts() -> None:
    """Provider usage of the newest reply; it is dropped with its message; a counter of one's own makes it moot."""
    messages = chat(2)
    messages[2]["usage"] = {"prompt_tokens": 10, "completion_tokens": 1}
    messages[4]["usage"] = {"prompt_tokens": 20, "completion_tokens": 2}
    history = History(CODEC)
    history.sync(messages)
    assert history.reported == (5, 22)
    history.sync(messages[:4])
    assert history.reported is None
    counted = History(CODEC, lambda m: len(m))
    counted.sync(messages)
    assert counted.reported is None


@pytest.mark.parametrize("behind", [[], [H("queued")]])
def test_b34_a_streaming_message_ends_the_readable_part(behind: list[Message]) -> None:
    """Neither it nor what is queued behind it is read, until it is complete or the agent has gone on."""
    history = History(CODEC)
    messages = [*chat(2), {**A("half"), "status": "in_progress"}, *behind]
    assert history.sync(messages).error is None
    assert len(history) == 5
    messages.append(A("gone on"))
    history.sync(messages)
    assert len(history) == len(messages)


def test_pinned_texts_are_noticed() -> None:
    """Where a text was pinned is remembered, and forgotten with its message."""
    history = History(CODEC)
    messages = [H("a"), H("<pin>keep this</pin>"), A("b")]
    history.sync(messages)
    assert history.pinned == [1]
    history.sync(messages[:1])
    assert history.pinned == []
