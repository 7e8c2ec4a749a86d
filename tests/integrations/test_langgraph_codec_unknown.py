"""Content parts of kinds that nobody told the codec about: read by what they say, and no reason to stop working."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState

from graphs import Chat, ask, chat_graph, converse, idle, marks, model_node, on, policy_of, summaries, true_to
from helpers import Events, FakeSummarizer, fill
from langchain_samples import BIG, CALL, CODEC
from smoothctx import Runtime
from smoothctx.tokens import MEDIA_TOKENS, MESSAGE_TOKENS, count_text
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph

#: what providers use beside the kinds that the codec knows, and how each reads
PARTS: dict[str, tuple[dict[Any, Any], str]] = {
    "bedrock cache point": ({"cachePoint": {"type": "default"}}, "[cachePoint]"),
    "bedrock text": ({"text": "some text"}, "some text"),
    "bedrock image": ({"image": {"format": "png", "source": {"bytes": b"\x00raw"}}}, "[image]"),
    "bedrock guard": ({"guardContent": {"text": {"text": "some text", "qualifiers": ["query"]}}}, "some text"),
    "bedrock citations": (
        {"type": "citations_content", "citations_content": {"content": [{"text": "some"}, {"text": "text"}]}},
        "some\ntext",
    ),
    "bedrock document": ({"document": {"format": "pdf", "name": "d", "source": {"bytes": b"x"}}}, "[document]"),
    "bedrock data": ({"json": {"a": [1, 2]}}, "[json]"),
    "google inline": ({"inline_data": {"mime_type": "image/png", "data": b"x"}}, "[inline_data]"),
    "image without a type": ({"image_url": {"url": "https://example.org/a.png"}}, "[image_url]"),
    "audio link": ({"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}}, "[audio_url]"),
    "a provider's next idea": ({"type": "hologram", "content": ["some text"], "depth": 3}, "some text"),
    "no name": ({}, "[part]"),
    "a type that is no text": ({"type": ["x"], "text": "some text"}, "some text"),
    "keys that are no text": ({1: "one", "two": 2}, "[1]"),
}
every_part = pytest.mark.parametrize(("part", "reads"), PARTS.values(), ids=PARTS.keys())


def in_each_role(part: Any) -> list[BaseMessage]:
    """A question, a reply and a tool's result that hold the part behind a text."""
    content = ["before", part]
    return [HumanMessage(content), AIMessage(content, tool_calls=[CALL]), ToolMessage(content, tool_call_id="c1")]


@every_part
def test_an_unknown_part_is_read(part: dict[Any, Any], reads: str) -> None:
    """It is accepted in every role, shown by its text or its name, and sent to our own summariser as that."""
    for message in in_each_role(part):
        CODEC.check(message, 0)
        assert CODEC.text(message) == f"before\n{reads}"
        sent = CODEC.to_openai(message)["content"]
        assert sent == f"before\n{reads}" or sent == [
            {"type": "text", "text": "before"},
            {"type": "text", "text": reads},
        ]
        assert CODEC.estimate(message) > MESSAGE_TOKENS + count_text(reads)
        assert CODEC.without_thinking(message) is message


@every_part
def test_an_unknown_part_is_digested_and_kept(part: dict[Any, Any], reads: str) -> None:
    """Its bytes decide the digest, a copy of them reads the same, and a store gives it back as it was."""
    for message in in_each_role(part):
        again = message.model_copy(update={"content": copy.deepcopy(message.content)})
        assert CODEC.visible(again) == CODEC.visible(message)
        assert CODEC.same([again], [CODEC.freeze(message)])
        other: Any = message.model_copy(update={"content": [message.content[0], {**part, "more": 1}]})
        assert CODEC.visible(other) != CODEC.visible(message)
        assert not CODEC.same([other], [CODEC.freeze(message)])
        (loaded,) = CODEC.load(CODEC.dump([message]))
        assert loaded.content == message.content and CODEC.visible(loaded) == CODEC.visible(message)


def test_an_object_among_the_parts_is_no_error() -> None:
    """What no checkpoint could hold may still be in a message: it is read, counted, digested and written down."""
    for message in in_each_role({"type": "live", "handle": print}):
        CODEC.check(message, 0)
        assert CODEC.text(message) == "before\n[live]" and CODEC.visible(message) == CODEC.visible(message.model_copy())
        assert len(CODEC.load(CODEC.dump([message]))) == 1


def test_binary_data_is_digested_by_its_hash_and_counted_once() -> None:
    """Bytes and base64 in an unknown part cost one media part, and the digest's input stays short for bytes."""
    raw = HumanMessage([{"image": {"format": "png", "source": {"bytes": b"\x00" * 1_000_000}}}])
    text = HumanMessage([{"type": "hologram", "data": BIG}])
    assert len(CODEC.visible(raw)) < 300
    assert CODEC.visible(raw) != CODEC.visible(
        HumanMessage([{"image": {"format": "png", "source": {"bytes": b"\x00"}}}])
    )
    for message in (raw, text):
        assert MEDIA_TOKENS <= CODEC.estimate(message) < MEDIA_TOKENS + 100


def test_the_text_of_an_unknown_part_is_counted_in_full() -> None:
    """A long text is no binary data, whatever it looks like; a picture by its link is a picture."""
    assert CODEC.estimate(HumanMessage([{"text": "x" * 40_000}])) >= 10_000
    assert CODEC.estimate(HumanMessage([{"image_url": {"url": "https://example.org/a.png"}}])) >= MEDIA_TOKENS


def test_unknown_media_stay_beside_a_stub() -> None:
    """A stub takes the place of the text; an image that only its provider's integration can read stays."""
    image = {"image": {"format": "png", "source": {"bytes": b"\x00raw"}}}
    stub = CODEC.with_text(ToolMessage([{"text": "a long result"}, image], tool_call_id="c1"), "short")
    assert stub.content == [image, {"type": "text", "text": "short"}]


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(["type", "text", "content", "source", "id", "data", "mime_type", "image_url", "input", "json"])
_KINDS = st.sampled_from(["text", "image", "file", "tool_use", "tool_result", "thinking", "document", "hologram"])


@given(st.dictionaries(_NAMES, _JSON, max_size=4), st.none() | _KINDS | _JSON)
def test_no_dict_is_unreadable(part: dict[str, Any], kind: Any) -> None:
    """Whatever dict stands among the parts: it is checked, read, counted, digested, sent on and stored."""
    part = part if kind is None else {"type": kind, **part}
    for message in in_each_role(part):
        CODEC.check(message, 0)
        CODEC.calls(message)
        assert isinstance(CODEC.text(message), str) and CODEC.estimate(message) >= MESSAGE_TOKENS
        assert CODEC.visible(message) == CODEC.visible(message.model_copy())
        CODEC.to_openai(CODEC.without_thinking(message))
        CODEC.with_text(message, "short")
        CODEC.load(CODEC.dump([message]))


@every_part
async def test_a_thread_with_an_unknown_part_goes_on(part: dict[Any, Any], reads: str) -> None:
    """One such part early in a thread: summaries are made and committed as without it, and nothing is unreadable."""
    seen: list[list[BaseMessage]] = []
    events = Events()
    async with Runtime(on_event=events) as runtime:

        @lookahead_node(runtime, policy_of())
        async def model(state: MessagesState) -> dict[str, Any]:
            seen.append(list(state["messages"]))
            return {"messages": [AIMessage(fill(f"<{max(marks(seen[-1])) + 1}> answer", 60))]}

        graph = chat_graph(model, checkpointer=InMemorySaver())
        first = HumanMessage([{"type": "text", "text": fill("<0> question", 60)}, part])
        await graph.ainvoke({"messages": [first]}, on("t"))
        await idle(runtime)
        state = await converse(graph, runtime, on("t"), range(1, 10))
        assert summaries(seen[-1]) and true_to(seen[-1], state["messages"][:-1])
        assert not events.of("message.unreadable") and not events.of("error")


async def test_the_hard_limit_holds_with_an_unknown_part() -> None:
    """With a summariser that never answers, the fallback keeps a thread with such a part under the hard limit."""
    chat, events, summariser = Chat(), Events(), FakeSummarizer("hold")
    async with Runtime(on_event=events) as runtime:
        policy = policy_of(summariser, hard_limit=("messages", 12), land_at=("messages", 6), max_wait=0.0)
        graph = chat_graph(model_node(chat, lookahead_node(runtime, policy)), checkpointer=InMemorySaver())
        for k in range(20):
            content: list[Any] = [{"type": "text", "text": fill(f"<{2 * k}> question", 60)}]
            content += [{"cachePoint": {"type": "default"}}] if k == 2 else []
            await graph.ainvoke({"messages": [HumanMessage(content)]}, on("t"))
        assert max(map(len, chat.seen)) <= 12 and events.of("fallback.applied")
        assert max(marks([ask(19)])) in marks(chat.last)
        summariser.release.set()
