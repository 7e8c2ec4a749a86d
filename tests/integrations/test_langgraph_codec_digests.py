"""The LangChain codec: what is digested, how edits are noticed, and what comes back from a store."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from langchain_core.load import dumpd
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_to_dict,
)
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, MessagesState, StateGraph

from langchain_samples import (
    ALL_PARTS,
    BIG,
    BROKEN,
    CALL,
    CALL_PARTS,
    CODEC,
    MESSAGES,
    every_message,
)
from smoothctx import MessageError
from smoothctx.digest import chain

pytestmark = pytest.mark.langgraph


# -- digests ------------------------------------------------------------------------------------------------------


@every_message
def test_bookkeeping_is_not_digested(message: BaseMessage) -> None:
    """Ids, usage, response metadata, our own marks and a checkpointer's round trip leave the digest alone."""
    seen = CODEC.visible(message)
    assert CODEC.visible(message.model_copy(update={"id": "other"})) == seen
    assert CODEC.visible(message.model_copy(update={"response_metadata": {"model_name": "x"}})) == seen
    marked = {**message.additional_kwargs, "smoothctx": {"kind": "note"}, "lc_source": "x"}
    assert CODEC.visible(message.model_copy(update={"additional_kwargs": marked})) == seen
    if isinstance(message, ToolMessage):
        message = message.model_copy(update={"artifact": None})
    serde = JsonPlusSerializer()
    assert CODEC.visible(serde.loads_typed(serde.dumps_typed(message))) == seen
    (loaded,) = CODEC.load(CODEC.dump([message]))
    assert CODEC.visible(loaded) == seen
    assert CODEC.estimate(loaded) == CODEC.estimate(message)


def test_generated_ids_stream_indexes_and_cache_marks_are_not_digested() -> None:
    """What differs between the streamed and the stored form of one answer is not what the model sees."""
    text = {"type": "text", "text": "a"}
    plain = AIMessage([text, {"type": "image", "base64": "QUJD"}])
    noisy = [{**text, "index": 0, "id": "msg_1", "cache_control": {"type": "ephemeral"}}]
    noisy.append({"type": "image", "base64": "QUJD", "id": "lc_123", "index": 1})
    assert CODEC.visible(AIMessage(noisy)) == CODEC.visible(plain)
    by_id = [AIMessage([{"type": "image", "source_type": "id", "id": i}]) for i in ("file-1", "file-2")]
    assert CODEC.visible(by_id[0]) != CODEC.visible(by_id[1])
    assert CODEC.visible(AIMessage([])) == CODEC.visible(AIMessage(""))


def test_a_chunk_is_the_message_that_it_became() -> None:
    """An answer summed up from chunks has the digest of the message that a reducer makes of it."""
    chunk = AIMessageChunk("ans", id="1") + AIMessageChunk("wer", id="1", chunk_position="last")
    assert CODEC.visible(chunk) == CODEC.visible(AIMessage("answer"))
    assert not CODEC.in_progress(chunk)
    assert CODEC.in_progress(AIMessageChunk("ans", response_metadata={"status": "in_progress"}))
    assert not CODEC.in_progress(AIMessage("a", response_metadata={"status": "incomplete"}))  # cut off, but complete


async def test_what_a_graph_stores_of_a_streamed_answer() -> None:
    """A node that returns the sum of its chunks leaves a whole message in the state."""

    async def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessageChunk("ans") + AIMessageChunk("wer")]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    result = await builder.compile().ainvoke({"messages": [HumanMessage("hi")]})
    assert not CODEC.in_progress(result["messages"][-1])
    assert CODEC.visible(result["messages"][-1]) == CODEC.visible(AIMessage("answer"))


def _variants() -> list[BaseMessage]:
    """Messages of which the model sees something different in each."""
    found: list[BaseMessage] = [
        HumanMessage("a"),
        AIMessage("a"),
        SystemMessage("a"),
        ToolMessage("a", tool_call_id="1"),
    ]
    found += [ToolMessage("a", tool_call_id="2"), ToolMessage("a", tool_call_id="1", status="error")]
    found += [HumanMessage("b"), HumanMessage("a", name="ann"), HumanMessage(["a"]), AIMessage("a", tool_calls=[CALL])]
    found += [AIMessage("a", tool_calls=[{**CALL, "id": "c2"}]), AIMessage("a", tool_calls=[{**CALL, "name": "go"}])]
    found += [AIMessage("a", tool_calls=[{**CALL, "args": {"x": 2}}]), AIMessage("a", invalid_tool_calls=[BROKEN])]
    found += [AIMessage("a", additional_kwargs={"reasoning_content": "b"}), AIMessage([*CALL_PARTS.values()][:1])]
    return found + [HumanMessage([part]) for part in ALL_PARTS]


def test_whatever_the_model_sees_differently_has_another_digest() -> None:
    """Content, role, name, calls, call ids, status and each kind of part tell messages apart."""
    variants = _variants()
    assert len({CODEC.visible(m) for m in variants}) == len(variants)


# -- noticing edits -----------------------------------------------------------------------------------------------


@every_message
def test_unedited_messages_are_the_same(message: BaseMessage) -> None:
    """Frozen and compared: the same for the object itself, and for an equal copy under another id."""
    frozen = [CODEC.freeze(message)]
    assert CODEC.same([message], frozen)
    assert CODEC.same((message,), frozen)
    assert CODEC.same([message.model_copy(update={"id": "other"})], frozen)
    assert not CODEC.same([message, message], frozen)
    assert not CODEC.same([{"role": "user"}], frozen)


def test_edits_in_place_are_noticed() -> None:
    """Every nested edit shows; the frozen form holds the same leaves and no containers of the message's."""
    message = AIMessage(
        [{"type": "text", "text": "a"}, {"type": "image", "base64": BIG}], tool_calls=[copy.deepcopy(CALL)]
    )
    frozen = CODEC.freeze(message)
    assert frozen[1][1]["base64"] is message.content[1]["base64"]  # type: ignore[index]

    def edits(m: AIMessage) -> list[Any]:
        return [
            lambda: m.content[0].update(text="b"),  # type: ignore[union-attr]
            lambda: m.content.append("more"),  # type: ignore[union-attr]
            lambda: m.tool_calls[0]["args"].update(x=2),
            lambda: m.tool_calls[0]["args"]["y"].append(3),
            lambda: m.tool_calls.clear(),
            lambda: m.invalid_tool_calls.append({**BROKEN}),  # type: ignore[typeddict-item]
            lambda: m.additional_kwargs.update(reasoning_content="b"),
            lambda: setattr(m, "name", "other"),
            lambda: setattr(m, "content", "text"),
        ]

    for k in range(len(edits(message))):
        edited = copy.deepcopy(message)
        assert CODEC.same([edited], [frozen])
        edits(edited)[k]()
        assert not CODEC.same([edited], [frozen]), k


def test_bookkeeping_set_in_place_is_no_edit() -> None:
    """A reducer writes ids into the caller's objects; usage and marks come later too."""
    message = AIMessage("a")
    frozen = [CODEC.freeze(message)]
    message.id = "set by the reducer"
    message.response_metadata["logprobs"] = [1]
    message.additional_kwargs["parsed"] = {"x": 1}
    message.usage_metadata = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    assert CODEC.same([message], frozen)


# -- storing ------------------------------------------------------------------------------------------------------


def test_dump_reads_back_equal() -> None:
    """Every class and kind: the same digests, calls, text and counts; bytes and odd keys survive."""
    messages = list(MESSAGES.values())
    loaded = CODEC.load(CODEC.dump(messages))
    assert chain(CODEC, loaded) == chain(CODEC, messages)
    assert [CODEC.text(m) for m in loaded] == [CODEC.text(m) for m in messages]
    assert [list(CODEC.calls(m)) for m in loaded] == [list(CODEC.calls(m)) for m in messages]
    assert CODEC.dump(loaded) == CODEC.dump(messages)
    odd = AIMessage("", tool_calls=[{**CALL, "args": {"smoothctx:packed": "QUJD", "b": b"\xff"}}])
    (back,) = CODEC.load(CODEC.dump([odd]))
    assert back.tool_calls == odd.tool_calls
    keyed = AIMessage("", additional_kwargs={"audio": {1: "one"}})
    assert CODEC.load(CODEC.dump([keyed]))[0].additional_kwargs == keyed.additional_kwargs


def test_dump_keeps_what_decides_how_content_is_read() -> None:
    """Provider and output version are kept; usage and the rest of the response are not."""
    metadata = {"model_provider": "anthropic", "output_version": "v1", "logprobs": [0.5] * 10}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    (back,) = CODEC.load(CODEC.dump([AIMessage("a", response_metadata=metadata, usage_metadata=usage, id="1")]))
    assert back.response_metadata == {"model_provider": "anthropic", "output_version": "v1"}
    assert (back.usage_metadata, back.id) == (None, "1")


def test_load_reads_what_langchain_wrote() -> None:
    """``messages_to_dict``, ``dumpd`` and chat dicts; old entries without newer fields."""
    messages = [HumanMessage("q"), AIMessage("", tool_calls=[CALL]), ToolMessage("r", tool_call_id="c1")]
    for rows in (messages_to_dict(messages), [dumpd(m) for m in messages]):
        assert chain(CODEC, CODEC.load(json.dumps(rows).encode())) == chain(CODEC, messages)
    old = [
        {"role": "user", "content": "q"},
        {"type": "ai", "data": {"content": "", "tool_calls": [{k: CALL[k] for k in ("name", "args", "id")}]}},
        {"type": "tool", "data": {"content": "r", "tool_call_id": "c1", "example": False}},
    ]
    assert chain(CODEC, CODEC.load(json.dumps(old).encode())) == chain(CODEC, messages)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff not json",
        b"{}",
        b"[5]",
        b'[{"type": "alien", "data": {"content": ""}}]',
        b'[{"type": "tool", "data": {"content": ""}}]',
        b'[{"type": "remove", "data": {"id": "x", "content": ""}}]',
        b'[{"type": "human", "data": {"content": [5]}}]',
    ],
)
def test_load_refuses_garbage(data: bytes) -> None:
    """A damaged record is a MessageError, whatever is wrong with it."""
    with pytest.raises(MessageError):
        CODEC.load(data)


# -- properties ---------------------------------------------------------------------------------------------------


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
contents = texts | st.lists(st.sampled_from([p for p in ALL_PARTS if BIG not in repr(p)]) | texts, max_size=4)
tool_calls = st.lists(
    st.builds(
        lambda n, a, i: {"name": n, "args": a, "id": i}, texts, st.dictionaries(texts, values, max_size=3), texts
    ),
    max_size=3,
)
invalid_calls = st.lists(
    st.builds(lambda n, a, i: {"name": n, "args": a, "id": i, "error": None}, texts, texts, texts), max_size=2
)
# LangChain refuses arguments that are JSON and no object
raw_arguments = st.one_of(st.dictionaries(texts, values, max_size=3).map(json.dumps), texts.map("{{{}".format))
raw_functions = st.builds(lambda n, a: {"name": n, "arguments": a}, texts, raw_arguments)
raw_calls = st.lists(st.builds(lambda f, i: {"id": i, "function": f}, raw_functions, texts), max_size=2)


@st.composite
def messages_of_any_kind(draw: st.DrawFn) -> BaseMessage:
    """Any message that a graph's state may hold."""
    content, name = draw(contents), draw(st.none() | texts)
    kind = draw(st.sampled_from(["system", "human", "ai", "raw", "tool"]))
    if kind == "ai":
        return AIMessage(content, name=name, tool_calls=draw(tool_calls), invalid_tool_calls=draw(invalid_calls))
    if kind == "raw":
        kwargs = {"tool_calls": draw(raw_calls), "reasoning_content": draw(texts)}
        made = AIMessage(content, additional_kwargs=kwargs)
        return made.model_copy(update={"tool_calls": [], "invalid_tool_calls": []}) if draw(st.booleans()) else made
    if kind == "tool":
        return ToolMessage(
            content, name=name, tool_call_id=draw(texts), status=draw(st.sampled_from(["success", "error"]))
        )
    return (SystemMessage if kind == "system" else HumanMessage)(content, name=name)


@given(messages_of_any_kind(), texts)
def test_digests_survive_storage_and_new_ids(message: BaseMessage, new_id: str) -> None:
    """Through dump and load, a checkpointer and a new id: the same bytes, the same count, the same calls."""
    CODEC.check(message, 0)
    seen = CODEC.visible(message)
    copied = message.model_copy(update={"id": new_id})
    (loaded,) = CODEC.load(CODEC.dump([message]))
    serde = JsonPlusSerializer()
    for other in (copied, loaded, serde.loads_typed(serde.dumps_typed(message))):
        assert CODEC.visible(other) == seen
        assert CODEC.estimate(other) == CODEC.estimate(message)
        assert len(CODEC.calls(other)) == len(CODEC.calls(message))
    assert CODEC.same([copied], [CODEC.freeze(message)])


@given(messages_of_any_kind(), messages_of_any_kind())
def test_other_content_or_calls_have_another_digest(one: BaseMessage, other: BaseMessage) -> None:
    """Equal digests only where role, text, calls and call id are equal."""

    def read(m: BaseMessage) -> Any:
        calls = [(c.id, c.name) for c in CODEC.calls(m)]
        return CODEC.role(m), m.content or "", calls, CODEC.result_id(m), m.name or ""

    if read(one) != read(other):
        assert CODEC.visible(one) != CODEC.visible(other)


@given(messages_of_any_kind(), st.sampled_from(ALL_PARTS))
def test_every_kind_adds_to_the_estimate(message: BaseMessage, part: Any) -> None:
    """Whatever is put into a message makes it cost more."""
    content = message.content if isinstance(message.content, list) else [message.content]
    more = message.model_copy(update={"content": [*content, part]})
    assert CODEC.estimate(more) > CODEC.estimate(message)
