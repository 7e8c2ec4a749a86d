"""Segments: pairing by outstanding call, atomic groups, late results, orphans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from smoothctx.codec import OpenAIMessages
from smoothctx.errors import MessageError
from smoothctx.segments import segment, segments

CODEC = OpenAIMessages()


def S(text: str = "s") -> dict[str, Any]:
    return {"role": "system", "content": text}


def H(text: str = "h") -> dict[str, Any]:
    return {"role": "user", "content": text}


def A(*ids: str, text: str = "a") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if ids:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids
        ]
    return message


def T(call_id: str, text: str = "t") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def spans(messages: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return [(s.start, s.end, s.kind) for s in segments(messages)]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([S(), H(), A()], [(1, 2, "user"), (2, 3, "assistant")], id="system excluded"),
        pytest.param([H(), A("1"), T("1"), A()], [(0, 1, "user"), (1, 3, "tools"), (3, 4, "assistant")], id="B03"),
        pytest.param(
            [H(), A("1", "2"), T("1"), T("2"), A()], [(0, 1, "user"), (1, 4, "tools"), (4, 5, "assistant")], id="B04"
        ),
        pytest.param([A("1", "2"), T("2"), T("1")], [(0, 3, "tools")], id="B27 any order"),
        pytest.param(
            [H(), A("a"), H(), A("b"), T("a"), T("b"), H()], [(0, 1, "user"), (1, 6, "tools"), (6, 7, "user")], id="B01"
        ),
        pytest.param(
            [A("c"), T("c"), A("c"), T("c"), A("c"), T("c")],
            [(0, 2, "tools"), (2, 4, "tools"), (4, 6, "tools")],
            id="B23 constant ids",
        ),
        pytest.param([A("c"), H(), H(), T("c")], [(0, 4, "tools")], id="B14 late confirmation joins"),
        pytest.param([H(), T("x"), A()], [(0, 1, "user"), (1, 2, "orphan"), (2, 3, "assistant")], id="orphan"),
        pytest.param([A("", ""), T(""), T("")], [(0, 3, "tools")], id="empty ids pair by position"),
        pytest.param(
            [H(), S("mid"), A()], [(0, 1, "user"), (1, 2, "system"), (2, 3, "assistant")], id="system in the middle"
        ),
    ],
)
def test_segments(messages: list[dict[str, Any]], expected: list[tuple[int, int, str]]) -> None:
    """Each shape of history is split into its atomic groups."""
    assert spans(messages) == expected


def test_unanswered_calls_are_counted() -> None:
    """A segment knows how many of its calls have no result yet, also after a late one joins."""
    assert [s.unanswered for s in segments([H(), A("1", "2"), T("1")])] == [0, 1]
    assert [s.unanswered for s in segments([A("1"), H(), A("2"), T("1")])] == [1]


def test_malformed_messages_are_named() -> None:
    """The error names the index and the field."""
    with pytest.raises(MessageError, match=r"messages: expected a list of messages, got str"):
        segments("hello")
    with pytest.raises(MessageError, match=r"messages\[1\]\.role: missing"):
        segments([H(), {"content": "x"}])
    with pytest.raises(MessageError, match=r"messages\[0\]\.content\[1\]: unknown content part \(type 'hologram'\)"):
        segments([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "hologram"}]}])


MESSAGE = st.one_of(
    st.builds(H, st.text(max_size=5)),
    st.lists(st.sampled_from(["1", "2", "", "x"]), max_size=3).map(lambda ids: A(*ids)),
    st.builds(T, st.sampled_from(["1", "2", "", "x", "never"])),
    st.builds(S),
)


@given(st.lists(MESSAGE, max_size=30))
def test_segments_partition_the_history_and_never_split_a_pair(messages: list[dict[str, Any]]) -> None:
    """Segments cover everything behind the leading system messages exactly once, and incremental equals whole."""
    whole = segment(CODEC, messages)
    covered = [i for s in whole.segments for i in range(s.start, s.end)]
    assert covered == list(range(whole.lead, len(messages)))
    for cut in range(len(messages) + 1):
        partial = segment(CODEC, messages[:cut])
        for message in messages[cut:]:
            partial.append(CODEC, message)
        assert partial.segments == whole.segments
    for s in whole.segments:
        calls = sum(len(CODEC.calls(m)) for m in messages[s.start : s.end])
        results = sum(CODEC.role(m) == "tool" for m in messages[s.start : s.end])
        # A late result joins what lies between it and its call, orphans included.
        assert s.kind == "orphan" or results + s.unanswered >= calls
