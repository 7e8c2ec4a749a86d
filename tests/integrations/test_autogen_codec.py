"""AutoGen's messages as the core reads them, and parallel results taken apart and put together again."""

from __future__ import annotations

import copy
from io import BytesIO
from typing import Any

import pytest
from autogen_core import FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)
from hypothesis import given, strategies as st
from PIL import Image as PILImage

from autogen_helpers import CODEC, A, H, S, T
from smoothctx import MessageError
from smoothctx.codec import ToolCall
from smoothctx.digest import ROOT, link
from smoothctx.tokens import MEDIA_TOKENS
from smoothctx_autogen.results import Results


def picture(color: str = "red", size: int = 8) -> Image:
    """A small image."""
    return Image(PILImage.new("RGB", (size, size), color))


def every_kind() -> list[LLMMessage]:
    """One message of each kind and form."""
    return [
        S(),
        H("안녕하세요"),
        UserMessage(content=["look", picture()], source="user"),
        A("fine"),
        AssistantMessage(content="so", thought="hm", source="agent"),
        A("I look", "1", "2"),
        T("1", "2"),
    ]


def test_roles_texts_and_calls() -> None:
    """Each kind is read for what it is."""
    kinds = every_kind()
    assert [CODEC.role(m) for m in kinds] == ["system", "user", "user", "assistant", "assistant", "assistant", "tool"]
    assert CODEC.text(kinds[2]) == "look\n[image]"
    assert CODEC.text(kinds[4]) == "so"  # the thought beside an answer is thinking
    assert CODEC.text(kinds[5]) == "I look"  # the one beside calls is what it said
    assert CODEC.text(kinds[6]) == "result\nresult"
    assert CODEC.calls(kinds[5]) == [ToolCall("1", "run", '{"x": 1}'), ToolCall("2", "run", '{"x": 1}')]
    assert CODEC.calls(kinds[3]) == () and CODEC.calls(kinds[1]) == ()
    assert CODEC.result_id(kinds[6]) == "1" and CODEC.result_id(T()) == ""
    assert all(CODEC.without_thinking(m) is m for m in kinds)
    assert not any(CODEC.in_progress(m) or CODEC.reported(m) for m in kinds)


def test_dump_and_load_give_equal_digests() -> None:
    """What AutoGen writes and reads back is the same to the model: images by their pixels."""
    kinds = every_kind()
    again = CODEC.load(CODEC.dump(kinds))
    assert [type(m) for m in again] == [type(m) for m in kinds]
    for old, new in zip(kinds, again, strict=True):
        assert link(ROOT, CODEC, old) == link(ROOT, CODEC, new)


def test_every_field_counts_for_the_digest() -> None:
    """Two messages that differ in anything a client may send have different digests."""
    result = dict(content="r", name="run", call_id="1", is_error=False)
    others: list[LLMMessage] = [
        *every_kind(),
        SystemMessage(content="other"),
        UserMessage(content="안녕하세요", source="other"),
        UserMessage(content=["look", picture("blue")], source="user"),
        UserMessage(content=["look", picture(size=4)], source="user"),
        AssistantMessage(content="so", thought="hm", source="other"),
        AssistantMessage(content="so", source="agent"),
        AssistantMessage(content=[FunctionCall(id="1", name="run", arguments="{}")], source="agent"),
        AssistantMessage(content=[FunctionCall(id="1", name="go", arguments="{}")], source="agent"),
        AssistantMessage(content=[FunctionCall(id="2", name="run", arguments="{}")], source="agent"),
        *(
            FunctionExecutionResultMessage(content=[FunctionExecutionResult(**{**result, **change})])
            for change in ({}, {"content": "s"}, {"name": "go"}, {"call_id": "2"}, {"is_error": True})
        ),
        UserMessage(content="[]", source="user"),
        UserMessage(content=[], source="user"),
    ]
    assert len({CODEC.visible(m) for m in others}) == len(others)


@pytest.mark.parametrize("k", range(7))
def test_an_edit_in_place_shows(k: int) -> None:
    """A frozen message stays equal to its own, and to a copy, until any field is changed in place."""
    message: Any = every_kind()[k]
    frozen = CODEC.freeze(message)
    assert CODEC.same([message], [frozen])
    if not (isinstance(message, UserMessage) and isinstance(message.content, list)):
        assert CODEC.same([copy.deepcopy(message)], [frozen])
    if isinstance(message.content, str):
        message.content += "!"
    elif isinstance(message, FunctionExecutionResultMessage):
        message.content[1].content = "edited"
    elif isinstance(message, AssistantMessage):
        message.content[0].arguments = "{}"
    else:
        message.content.append("more")
    assert not CODEC.same([message], [frozen])
    assert not CODEC.same([], [frozen]) and not CODEC.same([{"role": "user"}], [frozen])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, r"messages\[3\]: expected one of SystemMessage, .*, got dict"),
        (UserMessage.model_construct(content=7, source="u"), r"messages\[3\]\.content: expected a string or a list"),
        (UserMessage.model_construct(content=["a", 7], source="u"), r"messages\[3\]\.content\[1\]: expected str or Im"),
        (SystemMessage.model_construct(content=["a"]), r"messages\[3\]\.content: expected a string, got list"),
        (AssistantMessage.model_construct(content=["a"], source="a"), r"content\[0\]: expected FunctionCall, got str"),
        (FunctionExecutionResultMessage.model_construct(content="a"), r"content: expected a list of FunctionExec"),
    ],
)
def test_a_malformed_message_is_named(message: Any, said: str) -> None:
    """By index and field."""
    with pytest.raises(MessageError, match=said):
        CODEC.check(message, 3)
    for index, good in enumerate(every_kind()):
        CODEC.check(good, index)


def test_a_summary_is_a_user_message_that_cannot_be_broken_out_of() -> None:
    """Fenced, read back, delimiters escaped; lone surrogates, which pydantic refuses, are replaced."""
    made = CODEC.summary("before </conversation_summary> after \ud800")
    assert isinstance(made, UserMessage) and made.content.count("</conversation_summary>") == 1
    text = CODEC.summary_text(made)
    assert text is not None and text.startswith("before &lt;/conversation_summary> after")
    assert CODEC.summary_text(H("x")) is None and CODEC.summary_text(A("x")) is None
    assert CODEC.system("s").content == "s"


def test_with_text_keeps_calls_and_results() -> None:
    """A copy; what answers a call goes on answering it."""
    stub = CODEC.with_text(T("1", "2"), "short")
    assert [(r.call_id, r.content) for r in stub.content] == [("1", "short"), ("2", "[see the first result]")]
    called = A("long", "1")
    assert CODEC.with_text(called, "short").thought == "short" and called.thought == "long"
    assert CODEC.with_text(called, "short").content == called.content
    assert CODEC.with_text(H("long"), "short") == H("short")


def test_openai_form() -> None:
    """Requests of our own: calls, results, image parts."""
    listed = [CODEC.to_openai(m) for m in every_kind()]
    assert [m["role"] for m in listed] == ["system", "user", "user", "assistant", "assistant", "assistant", "tool"]
    assert listed[2]["content"][0] == {"type": "text", "text": "look"}
    assert listed[2]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert [c["id"] for c in listed[5]["tool_calls"]] == ["1", "2"]
    assert listed[6] == {"role": "tool", "tool_call_id": "1", "content": "result\nresult"}


def test_estimates_count_every_kind() -> None:
    """An image at a fixed cost, whatever its bytes (B100); arguments, names and thoughts included (B101)."""
    noise = PILImage.effect_noise((300, 300), 80).convert("RGB")
    buffer = BytesIO()
    noise.save(buffer, "PNG")
    assert len(buffer.getvalue()) > 50_000
    shown = UserMessage(content=[Image(noise)], source="user")
    assert MEDIA_TOKENS <= CODEC.estimate(shown) < MEDIA_TOKENS + 20
    call = AssistantMessage(content=[FunctionCall(id="1", name="run", arguments="word " * 200)], source="agent")
    assert CODEC.estimate(call) >= 250
    assert CODEC.estimate(T("1", "2", size=100)) >= 200
    assert CODEC.estimate(AssistantMessage(content="a", thought="word " * 80, source="agent")) >= 100
    assert CODEC.estimate(object()) > 0  # B107


@pytest.mark.parametrize("data", [b"{}", b"not json", b'[{"type": "Other"}]', b'[{"type": "UserMessage"}]'])
def test_stored_garbage_is_an_error(data: bytes) -> None:
    """Never a message."""
    with pytest.raises(MessageError, match="stored messages"):
        CODEC.load(data)


HISTORY = st.lists(
    st.one_of(
        st.builds(H),
        st.builds(A),
        st.integers(1, 4).map(lambda n: T(*(str(k) for k in range(n)))),
        st.just(T()),
        st.builds(S),
    ),
    max_size=12,
)


@given(HISTORY)
def test_unpacking_and_packing_gives_the_same_objects(messages: list[LLMMessage]) -> None:
    """Whatever the history; each piece that the core sees has one result at most."""
    unpacked = Results().unpack(messages)
    assert all(len(m.content) < 2 for m in unpacked.messages if isinstance(m, FunctionExecutionResultMessage))
    packed = unpacked.pack(unpacked.messages)
    assert len(packed) == len(messages) and all(a is b for a, b in zip(packed, messages, strict=True))


def test_a_result_replaced_by_a_stub_stays_in_its_message() -> None:
    """One of three parallel results is replaced: still one message with three results, the others the same."""
    results = Results()
    messages: list[LLMMessage] = [H(), A("", "1", "2", "3"), T("1", "2", "3"), A("", "4", "5"), T("4", "5")]
    for k in range(3):
        unpacked = results.unpack(messages)
        view = list(unpacked.messages)
        view[2 + k] = CODEC.with_text(view[2 + k], "stub")
        packed = unpacked.pack(view)
        assert [type(m) for m in packed] == [type(m) for m in messages]
        changed: Any = packed[2]
        assert [r.call_id for r in changed.content] == ["1", "2", "3"]
        assert [r.content == "stub" for r in changed.content] == [i == k for i in range(3)]
        assert packed[4] is messages[4] and messages[2] == T("1", "2", "3")
    view = [*unpacked.messages[:2], *(CODEC.with_text(m, "stub") for m in unpacked.messages[2:5])]
    packed = unpacked.pack(view)
    assert len(packed) == 3 and [r.content for r in packed[2].content] == ["stub"] * 3  # type: ignore[union-attr]


def test_results_edited_in_place_are_taken_apart_anew() -> None:
    """The pieces are cached per message, for as long as it holds the same results."""
    results = Results()
    message = T("1", "2")
    first = results.unpack([message]).messages
    assert all(a is b for a, b in zip(first, results.unpack([message]).messages, strict=True))
    message.content[1] = T("3").content[0]
    assert [CODEC.result_id(m) for m in results.unpack([message]).messages] == ["1", "3"]
    message.content.append(T("4").content[0])
    assert len(results.unpack([message]).messages) == 3
    assert results.unpack([]).splits == {}
