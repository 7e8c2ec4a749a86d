"""The LangChain codec: every message class and content kind read, counted, made and sent on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from langchain_samples import (
    BIG,
    BROKEN,
    CALL,
    CALL_PARTS,
    CODEC,
    MEDIA_PARTS,
    MESSAGES,
    SERVER_PARTS,
    TEXT_PARTS,
    THINKING_PARTS,
    every_message,
)
from smoothctx import MessageError, Policy, Runtime, Summarize, segments
from smoothctx.tokens import MEDIA_TOKENS, MESSAGE_TOKENS, count_text
from smoothctx.transforms.offload import is_stub, offload_message
from smoothctx_langgraph.codec import mark_of

pytestmark = pytest.mark.langgraph


def test_roles_of_every_class() -> None:
    """Each LangChain class is read as one of the four roles; a ChatMessage by its own role."""
    roles = {name: CODEC.role(m) for name, m in MESSAGES.items()}
    assert roles == {
        **dict.fromkeys(["human", "human parts", "chat user"], "user"),
        **dict.fromkeys(
            ["ai", "ai calls", "ai parts", "ai reasoning", "ai legacy", "chunk", "chat assistant"], "assistant"
        ),
        **dict.fromkeys(["tool", "tool error", "function"], "tool"),
        "system": "system",
    }


def test_a_derived_class_is_read_as_what_it_derives_from() -> None:
    """A user's own message class works."""

    class Note(HumanMessage):
        pass

    CODEC.check(Note("hi"), 0)
    assert CODEC.role(Note("hi")) == "user"
    assert CODEC.visible(Note("hi")) == CODEC.visible(HumanMessage("hi"))


@every_message
def test_every_message_is_accepted(message: BaseMessage) -> None:
    """No class or content kind that LangChain produces is refused."""
    CODEC.check(message, 0)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (RemoveMessage(id="x"), "messages[3]: a RemoveMessage"),
        ({"role": "user", "content": "hi"}, "OpenAIMessages()"),
        ("hi", "messages[3]: expected a LangChain message, got str"),
        (ChatMessage("hi", role="critic"), "messages[3].role: 'critic'"),
        (
            HumanMessage("x").model_copy(update={"content": ["a", 5]}),
            "messages[3].content[1]: expected a text or a dict",
        ),
        (AIMessage("x").model_copy(update={"tool_calls": "nope"}), "messages[3].tool_calls: expected a list"),
        (AIMessage("x").model_copy(update={"tool_calls": ["nope"]}), "messages[3].tool_calls[0]: expected a dict"),
        (HumanMessage("x").model_copy(update={"content": 5}), "messages[3].content: expected a string"),
    ],
)
def test_bad_messages_are_named(message: Any, named: str) -> None:
    """The error names the index and the field."""
    with pytest.raises(MessageError) as caught:
        CODEC.check(message, 3)
    assert named in str(caught.value)


def test_a_bad_message_is_counted_all_the_same() -> None:
    """cases B107: the estimate never fails, whatever the message is."""
    assert CODEC.estimate(HumanMessage("x").model_copy(update={"content": [5 * 10**40]})) > MESSAGE_TOKENS + 5
    assert CODEC.estimate("not a message") > MESSAGE_TOKENS


# -- calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", CALL_PARTS.values(), ids=CALL_PARTS.keys())
def test_a_call_among_the_parts_is_read(part: dict[str, Any]) -> None:
    """A call that stands only in the content is a call; its arguments may have come in pieces."""
    (call,) = CODEC.calls(AIMessage([part]))
    assert (call.id, call.name, json.loads(call.arguments)) == ("c1", "run", CALL["args"])


@pytest.mark.parametrize("part", CALL_PARTS.values(), ids=CALL_PARTS.keys())
def test_the_mirror_of_a_call_counts_once(part: dict[str, Any]) -> None:
    """cases B105: a call in ``tool_calls`` and among the parts is one call, counted once, as compact JSON."""
    both = AIMessage(["text", part], tool_calls=[CALL])
    assert len(CODEC.calls(both)) == 1
    assert CODEC.estimate(both) == CODEC.estimate(AIMessage("text", tool_calls=[CALL]))
    arguments = json.dumps(CALL["args"], separators=(",", ":"))
    assert CODEC.estimate(both) == 2 * MESSAGE_TOKENS + count_text("text") + count_text("run") + count_text(arguments)


def test_calls_of_every_origin() -> None:
    """Parsed calls, unreadable ones, provider-shaped ones and the old ``function_call``; repeated ids stay."""
    both = AIMessage("", tool_calls=[CALL], invalid_tool_calls=[BROKEN])
    assert [(c.id, c.arguments) for c in CODEC.calls(both)] == [("c1", '{"x":1,"y":[1,2]}'), ("c2", '{"x": ')]
    extra = AIMessage([{**CALL_PARTS["anthropic"], "id": "c9"}], tool_calls=[CALL])
    assert [c.id for c in CODEC.calls(extra)] == ["c1", "c9"]
    same = AIMessage([CALL_PARTS["anthropic"], CALL_PARTS["anthropic"]])
    assert [c.id for c in CODEC.calls(same)] == ["c1", "c1"]
    nameless = AIMessage([{**CALL_PARTS["anthropic"], "id": ""}], tool_calls=[{**CALL, "id": None}])
    assert [c.id for c in CODEC.calls(nameless)] == [""]
    legacy = CODEC.calls(MESSAGES["ai legacy"])
    assert [(c.id, c.name, c.arguments) for c in legacy] == [("", "run", "{}")]
    raw = {"id": "c1", "function": {"name": "run", "arguments": '{"x": 1}'}}
    unparsed = AIMessage("").model_copy(update={"additional_kwargs": {"tool_calls": [raw]}})
    assert [(c.id, c.arguments) for c in CODEC.calls(unparsed)] == [("c1", '{"x":1}')]
    assert CODEC.calls(HumanMessage("hi")) == ()


def test_calls_and_results_are_one_segment() -> None:
    """An unreadable call pins its result as any other does; computer calls pair by their call id."""
    history = [
        HumanMessage("q"),
        AIMessage("", tool_calls=[CALL], invalid_tool_calls=[BROKEN]),
        ToolMessage("r1", tool_call_id="c1"),
        ToolMessage("r2", tool_call_id="c2"),
        AIMessage([{"type": "computer_call", "id": "cu_1", "call_id": "k1", "action": {"type": "screenshot"}}]),
        ToolMessage([MEDIA_PARTS["responses image"]], tool_call_id="k1"),
        AIMessage("", additional_kwargs={"function_call": {"name": "run", "arguments": "{}"}}),
        FunctionMessage("r3", name="run"),
    ]
    found = [(s.start, s.end, s.kind, s.unanswered) for s in segments(history, CODEC)]
    assert found == [(0, 1, "user", 0), (1, 4, "tools", 0), (4, 6, "tools", 0), (6, 8, "tools", 0)]


# -- text and tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", TEXT_PARTS.values(), ids=TEXT_PARTS.keys())
def test_text_is_read_from_every_kind(part: Any) -> None:
    """Text in whatever kind of part is readable, and counted as text."""
    message = HumanMessage([part])
    assert "some text" in CODEC.text(message) or CODEC.text(message) == "a plain string"
    assert MESSAGE_TOKENS < CODEC.estimate(message) < MESSAGE_TOKENS + 60


@pytest.mark.parametrize("part", MEDIA_PARTS.values(), ids=MEDIA_PARTS.keys())
def test_media_are_marks_at_a_fixed_cost(part: dict[str, Any]) -> None:
    """cases B100, B109: 400 kB of base64 is one media part, and never part of the text."""
    message = HumanMessage([{"type": "text", "text": "look"}, part])
    assert CODEC.text(message).splitlines()[0] == "look"
    assert CODEC.text(message).splitlines()[1] in ("[image]", "[audio]", "[video]", "[file]", "[document]")
    assert CODEC.estimate(message) == MESSAGE_TOKENS + 1 + MEDIA_TOKENS


@pytest.mark.parametrize("part", THINKING_PARTS.values(), ids=THINKING_PARTS.keys())
def test_thinking_is_counted_and_not_read(part: dict[str, Any]) -> None:
    """cases B101: thinking costs tokens; it is no text."""
    message = AIMessage([part, {"type": "text", "text": "answer"}])
    assert CODEC.text(message) == "answer"
    assert CODEC.estimate(message) >= CODEC.estimate(AIMessage("answer")) + 3


@pytest.mark.parametrize("part", SERVER_PARTS.values(), ids=SERVER_PARTS.keys())
def test_a_providers_own_tools_are_counted(part: dict[str, Any]) -> None:
    """cases B101: what a provider ran by itself counts, and asks for no result."""
    message = AIMessage([part, {"type": "text", "text": "answer"}])
    assert CODEC.calls(message) == []
    assert CODEC.estimate(message) >= CODEC.estimate(AIMessage("answer")) + 4


def test_binary_data_in_a_providers_part_is_not_counted_as_text() -> None:
    """cases B100: base64 in a part that nobody knows the inside of costs one media part."""
    part = {"type": "computer_tool_result", "content": {"screenshot": BIG}}
    assert CODEC.estimate(AIMessage([part])) < 2 * MEDIA_TOKENS


def test_call_arguments_names_and_reasoning_are_counted() -> None:
    """cases B101: 200 words of arguments are 200 words; CJK text is one token per character."""
    words = "lorem ipsum " * 100
    call = {**CALL, "args": {"text": words}}
    assert CODEC.estimate(AIMessage("", tool_calls=[call])) > count_text(words)
    broken = {**BROKEN, "args": words}
    assert CODEC.estimate(AIMessage("", invalid_tool_calls=[broken])) > count_text(words)
    kwargs = {"reasoning_content": words}
    assert CODEC.estimate(AIMessage("", additional_kwargs=kwargs)) > count_text(words)
    assert CODEC.estimate(HumanMessage("\uac00" * 50)) == MESSAGE_TOKENS + 50
    assert CODEC.estimate(HumanMessage("hi", name="somebody")) == CODEC.estimate(HumanMessage("hi")) + 2


def test_an_artifact_is_not_for_the_model() -> None:
    """A tool's artifact is neither read, digested, counted nor stored."""
    plain = ToolMessage("result", tool_call_id="c1")
    heavy = ToolMessage("result", tool_call_id="c1", artifact={"rows": ["x" * 10_000]})
    assert CODEC.visible(heavy) == CODEC.visible(plain)
    assert CODEC.estimate(heavy) == CODEC.estimate(plain)
    assert CODEC.dump([heavy]) == CODEC.dump([plain])
    assert CODEC.same([heavy], [CODEC.freeze(plain)])


def test_reported_usage() -> None:
    """cases B104: usage is what the provider attached, and nothing where it attached none."""
    usage = {"input_tokens": 900, "output_tokens": 100, "total_tokens": 1000}
    assert CODEC.reported(AIMessage("a", usage_metadata=usage)) == 1000
    assert CODEC.reported(AIMessage("a", usage_metadata={**usage, "input_tokens": 0})) is None
    assert CODEC.reported(AIMessage("a")) is None
    assert CODEC.reported(HumanMessage("a")) is None


# -- what we make -------------------------------------------------------------------------------------------------


def test_a_summary_is_recognised_marked_or_not() -> None:
    """Fenced, escaped, marked; recognised after a checkpointer's round trip, without the mark, and as a part."""
    made = CODEC.summary("text </conversation_summary> more")
    assert isinstance(made, HumanMessage)
    assert mark_of(made) == "summary"
    text = CODEC.summary_text(made)
    assert text == "text &lt;/conversation_summary> more"
    serde = JsonPlusSerializer()
    reloaded = serde.loads_typed(serde.dumps_typed(made))
    assert (CODEC.summary_text(reloaded), mark_of(reloaded)) == (text, "summary")
    (stored,) = CODEC.load(CODEC.dump([made]))
    assert (CODEC.summary_text(stored), mark_of(stored)) == (text, "summary")
    assert CODEC.summary_text(HumanMessage(made.content)) == text
    assert CODEC.summary_text(HumanMessage([{"type": "text", "text": made.content}])) == text
    assert CODEC.summary_text(AIMessage(made.content)) is None
    assert CODEC.summary_text(HumanMessage("text", additional_kwargs=made.additional_kwargs)) is None
    assert CODEC.visible(HumanMessage(made.content)) == CODEC.visible(made)


def test_the_other_messages_that_we_make() -> None:
    """Notes are user messages with a mark; system messages are plain; others' messages have no mark."""
    assert (CODEC.role(CODEC.user("x")), mark_of(CODEC.user("x"))) == ("user", "note")
    assert CODEC.system("x") == SystemMessage("x")
    for stranger in (HumanMessage("x"), HumanMessage("x", additional_kwargs={"smoothctx": 5}), {"role": "user"}, None):
        assert mark_of(stranger) is None


def test_with_text_keeps_every_other_field() -> None:
    """cases B166: ids, call id, name, status, artifact and the rest are kept; the original is not touched."""
    message = ToolMessage(
        [{"type": "text", "text": "long"}],
        tool_call_id="c1",
        id="t",
        name="run",
        status="error",
        artifact={"a": 1},
        additional_kwargs={"k": 1},
    )
    before = message.model_dump()
    stub = CODEC.with_text(message, "short")
    assert message.model_dump() == before
    changed = {"content": "short", "additional_kwargs": {"k": 1, "smoothctx": {"kind": "stub"}}}
    assert stub.model_dump() == {**before, **changed}
    assert type(stub) is ToolMessage
    assert mark_of(stub) == "stub"


def test_with_text_keeps_media() -> None:
    """cases B111: list content is offloaded by its text; an image beside it is not lost, a text document is text."""
    image, document = MEDIA_PARTS["v1 image link"], TEXT_PARTS["text document"]
    message = ToolMessage([{"type": "text", "text": "long"}, image, document], tool_call_id="c1")
    assert CODEC.with_text(message, "short").content == [image, {"type": "text", "text": "short"}]
    pages = "lorem ipsum " * 2000
    made = offload_message(
        ToolMessage([{"type": "text", "text": pages}, image], tool_call_id="c1"),
        CODEC,
        max_tokens=100,
        preview_tokens=8,
    )
    assert made is not None
    stub, _, content = made
    assert is_stub(CODEC.text(stub))
    assert content.decode().startswith(pages)
    assert stub.content[0] == image
    assert offload_message(stub, CODEC, max_tokens=1, preview_tokens=8) is None


@pytest.mark.parametrize("part", THINKING_PARTS.values(), ids=THINKING_PARTS.keys())
def test_thinking_is_dropped_whole(part: dict[str, Any]) -> None:
    """cases B115: a thinking part goes whole; the call beside it stays, and so does the original."""
    message = AIMessage([part, {"type": "text", "text": "a"}, CALL_PARTS["anthropic"]], tool_calls=[CALL], id="a")
    before = message.model_dump()
    clean = CODEC.without_thinking(message)
    assert message.model_dump() == before
    assert clean.content == [{"type": "text", "text": "a"}, CALL_PARTS["anthropic"]]
    assert (clean.tool_calls, clean.id) == (message.tool_calls, "a")
    assert CODEC.without_thinking(clean) is clean
    assert CODEC.without_thinking(AIMessage([part])).content == ""


def test_thinking_beside_the_content_and_ids_tied_to_it() -> None:
    """Reasoning fields go; so do the item ids by which the Responses API demands the reasoning back."""
    message = AIMessage("a", additional_kwargs={"reasoning_content": "hm", "refusal": None})
    assert CODEC.without_thinking(message).additional_kwargs == {"refusal": None}
    item = {"type": "text", "text": "a", "id": "msg_1"}
    v1 = {"type": "tool_call", "id": "c1", "name": "run", "args": {}, "extras": {"item_id": "fc_1", "k": 1}}
    parts = [THINKING_PARTS["responses"], item, CALL_PARTS["responses"], v1, "text"]
    clean = CODEC.without_thinking(AIMessage(parts))
    assert [p.get("id") if isinstance(p, dict) else p for p in clean.content] == [None, None, "c1", "text"]
    assert clean.content[1]["call_id"] == "c1"
    assert clean.content[2]["extras"] == {"k": 1}
    for other in (HumanMessage([THINKING_PARTS["v1"]]), AIMessage("a"), ToolMessage("a", tool_call_id="1")):
        assert CODEC.without_thinking(other) is other


# -- sending on ---------------------------------------------------------------------------------------------------


@every_message
def test_to_openai_is_valid(message: BaseMessage) -> None:
    """Plain JSON in OpenAI's shapes, arguments as JSON objects, no ids, metadata or thinking."""
    sent = json.loads(json.dumps(CODEC.to_openai(message)))
    assert sent["role"] == CODEC.role(message)
    assert sent.keys() <= {"role", "content", "name", "tool_calls", "tool_call_id"}
    if isinstance(sent["content"], list):
        assert sent["role"] == "user"
        assert {p["type"] for p in sent["content"]} <= {"text", "image_url", "input_audio", "file"}
    else:
        assert isinstance(sent["content"], str) or (sent["content"] is None and sent["tool_calls"])
    for call in sent.get("tool_calls", ()):
        assert call["type"] == "function"
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("name", MEDIA_PARTS.keys())
def test_media_are_sent_in_openais_shape(name: str) -> None:
    """Images, audio and files keep their data; what OpenAI has no shape for becomes a mark."""
    (part,) = CODEC.to_openai(HumanMessage([MEDIA_PARTS[name]]))["content"]
    if name in ("v0 image by id", "v1 video", "google bytes", "generated image"):
        assert part["type"] == "text" and part["text"].startswith("[")
    elif "image" in name or name == "google media":
        assert part["image_url"]["url"].startswith(("data:image/png;base64,QUJD", "https://example.org/a.png"))
    elif "audio" in name:
        assert part["input_audio"] == {"data": BIG, "format": "wav"}
    else:
        assert part["file"]["file_data"].startswith("data:application/pdf;base64,QUJD")


def test_to_openai_of_calls_and_results() -> None:
    """Unreadable arguments are wrapped; a result is text with its call id; names OpenAI refuses are left out."""
    sent = CODEC.to_openai(MESSAGES["ai calls"])
    assert sent["content"] is None
    assert [c["id"] for c in sent["tool_calls"]] == ["c1", "c2"]
    assert json.loads(sent["tool_calls"][1]["function"]["arguments"]) == {"invalid_arguments": '{"x": '}
    assert CODEC.to_openai(MESSAGES["tool error"]) == {"role": "tool", "content": "failed", "tool_call_id": "c1"}
    assert "name" not in CODEC.to_openai(HumanMessage("hi", name="a b"))
    assert CODEC.to_openai(HumanMessage("hi", name="ann"))["name"] == "ann"
    assert CODEC.to_openai(ChatMessage("hi", role="developer"))["role"] == "system"


# -- with the core ------------------------------------------------------------------------------------------------


async def test_a_session_on_langchain_messages() -> None:
    """Summarised once, tail kept as the same objects, the summary a leading HumanMessage (cases B12, B92)."""
    asked: list[list[dict[str, Any]]] = []

    async def model(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
        asked.append(messages)
        return "the gist"

    history: list[BaseMessage] = [SystemMessage("rules")]
    for k in range(8):
        call = {"name": "run", "args": {"k": k}, "id": f"c{k}", "type": "tool_call"}
        history += [HumanMessage(f"question {k} " * 20), AIMessage("", tool_calls=[call], id=f"a{k}")]
        history += [ToolMessage(f"result {k} " * 20, tool_call_id=f"c{k}"), AIMessage(f"answer {k} " * 20)]
    transform = Summarize(model, keep=("messages", 4), layout="standalone")
    policy = Policy(transform, trigger=("tokens", 500), hard_limit=("tokens", 5000), land_at=("tokens", 400))
    async with Runtime() as runtime:
        session = runtime.session("s", policy=policy, codec=CODEC)
        handle = session.observe(history)
        assert handle is not None
        await handle.wait(30)
        view = await session.commit(history)
        assert view[0] is history[0]
        assert CODEC.summary_text(view[1]) is not None
        assert "the gist" in str(CODEC.summary_text(view[1]))
        kept = view[2:]
        assert all(any(m is h for h in history) for m in kept)
        assert view[-1] is history[-1]
        assert [s.kind for s in segments(view, CODEC)][-1] == "assistant"
        assert session.receipts[-1].tokens_after < session.receipts[-1].tokens_before
    assert len(asked) == 1
