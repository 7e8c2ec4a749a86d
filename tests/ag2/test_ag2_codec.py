"""How the events of AG2 1.x are read, and the model made from a config."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from ag2.compact import CompactionSummary
from ag2.events import (
    BinaryInput,
    BinaryType,
    DataInput,
    FileIdInput,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextInput,
    ToolCallEvent,
    ToolCallsEvent,
    ToolResult,
    ToolResultEvent,
    ToolResultsEvent,
    UrlInput,
    Usage,
    UsageEvent,
)
from ag2.testing import TestConfig
from hypothesis import given, strategies as st
from streams import Model, call, exported, imported

from smoothctx import ConfigurationError, MessageError, segments
from smoothctx.codec import openai_messages
from smoothctx.digest import chain
from smoothctx.tokens import MEDIA_TOKENS
from smoothctx_autogen.ag2 import ConfigModel, EventMessage, EventMessages
from smoothctx_autogen.ag2_events import read, weave

CODEC = EventMessages()


def results(*pairs: tuple[str, str]) -> ToolResultsEvent:
    """Wrapped results."""
    return ToolResultsEvent(
        [ToolResultEvent(parent_id=i, name="look_up", result=ToolResult(text)) for i, text in pairs]
    )


def turn(*ids: str) -> list[Any]:
    """A question, a round of calls with the framework's record of it, an answer, and what it cost."""
    calls = ToolCallsEvent([call(i) for i in ids])
    wrapped = results(*((i, f"value of {i}") for i in ids))
    spent = UsageEvent(Usage(prompt_tokens=5, completion_tokens=1))
    made = ModelResponse(tool_calls=calls)
    return [
        ModelRequest([TextInput("question")]),
        spent,
        made,
        calls,
        *calls.calls,
        *wrapped.results,
        wrapped,
        spent,
        ModelResponse(ModelMessage("answer")),
    ]


def test_every_event_is_in_one_message() -> None:
    """In their order; the records of a round of calls belong to the response that asked for it."""
    events = turn("a", "b") + turn("c")
    messages = read(events)
    assert [CODEC.role(m) for m in messages] == ["user", "assistant", "tool", "assistant"] * 2
    assert weave(messages, messages) == events
    assert [(s.start, s.end, s.kind, s.unanswered) for s in segments(messages, CODEC)][:3] == [
        (0, 1, "user", 0),
        (1, 3, "tools", 0),
        (3, 4, "assistant", 0),
    ]
    assert [type(e).__name__ for e in messages[1].before] == ["UsageEvent"]
    assert {type(e).__name__ for e in messages[1].after} == {"ToolCallsEvent", "ToolCallEvent", "ToolResultEvent"}


@given(st.lists(st.sampled_from(range(9)), max_size=9))
def test_any_run_of_events_is_read_and_woven_back(order: list[int]) -> None:
    """Whatever is missing or out of order: nothing raises, nothing is lost, the order stays."""
    events = [turn("a", "b")[k] for k in order]
    messages = read(events)
    for k, message in enumerate(messages):
        CODEC.check(message, k)
    woven = weave(messages, messages)
    assert woven == events if messages else not woven


def test_a_wrapper_answers_all_its_calls() -> None:
    """One message, several results: one dict each for a request."""
    message = EventMessage(results(("a", "1"), ("b", "2")))
    assert [(m["tool_call_id"], m["content"]) for m in openai_messages(CODEC, message)] == [("a", "1"), ("b", "2")]
    first, second = CODEC.results(message)
    short = CODEC.joined(message, [CODEC.with_text(first, "stub"), second])
    assert [(r.parent_id, r.result.parts[0].content) for r in short.event.results] == [("a", "stub"), ("b", "2")]
    assert [r.result.parts[0].content for r in message.event.results] == ["1", "2"]
    loose = [*turn("a")[2:6]]
    held = read([*loose, results(("a", "1"))])
    woven = weave([held[0], CODEC.with_text(held[1], "stub")], held)
    assert not any(isinstance(e, ToolResultEvent) for e in woven), "no copy of what was shortened"


def test_only_copies_of_what_was_shortened_are_left_out() -> None:
    """The loose record of a result that stayed is sent as ever, and what came with the message stays with it."""
    held = read(turn("a", "b"))
    place = next(k for k, m in enumerate(held) if CODEC.role(m) == "tool")
    parts = list(CODEC.results(held[place]))
    short = CODEC.joined(held[place], [parts[0], CODEC.with_text(parts[1], "stub")])
    assert short.after == held[place].after
    woven = weave([*held[:place], short, *held[place + 1 :]], held)
    assert [e.parent_id for e in woven if isinstance(e, ToolResultEvent)] == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text("xy ", max_size=5)), min_size=2, max_size=5), st.data())
def test_results_are_taken_apart_and_joined(pairs: list[tuple[str, str]], data: st.DataObject) -> None:
    """Whichever are shortened: what is joined holds exactly these parts."""
    message = EventMessage(results(*pairs))
    parts = list(CODEC.results(message))
    assert CODEC.visible(CODEC.joined(message, parts)) == CODEC.visible(message)
    shorter = data.draw(st.sets(st.sampled_from(range(len(parts)))))
    parts = [CODEC.with_text(p, "stub") if k in shorter else p for k, p in enumerate(parts)]
    made = CODEC.joined(message, parts)
    assert [CODEC.visible(p) for p in CODEC.results(made)] == [CODEC.visible(p) for p in parts]
    assert CODEC.estimate(made) == sum(map(CODEC.estimate, parts))


@dataclass
class Row:
    """Data that a caller may send."""

    name: str
    values: tuple[int, ...]


PARTS: list[Any] = [
    TextInput("text"),
    TextInput("text", metadata={"k": 1}),
    DataInput({"k": [1, 2, {"x": None}]}),
    DataInput(Row("a", (1, 2))),
    BinaryInput(b"\x00\xff" * 50, media_type="image/png", kind=BinaryType.IMAGE, vendor_metadata={"detail": "low"}),
    UrlInput("https://example.com/a.png", kind=BinaryType.IMAGE),
    FileIdInput("file-1", filename="a.txt"),
]


def some_events() -> list[Any]:
    """One of every kind that a model reads."""
    data = ToolResultEvent(parent_id="b", name="look_up", result=ToolResult({"rows": [1, 2]}))
    return [
        CompactionSummary(summary="before", event_count=7),
        ModelRequest(PARTS),
        ModelResponse(ModelMessage("answer"), tool_calls=ToolCallsEvent([call("a"), call("b")])),
        ToolResultsEvent([*results(("a", "1")).results, data]),
        ModelResponse(ModelMessage("done"), usage=Usage(prompt_tokens=1, completion_tokens=1), response_id="x"),
    ]


def test_digests_survive_saving_and_loading() -> None:
    """Timestamps, usage and response ids change or go; the digests stay."""
    first = read(some_events())
    again = read(imported(exported(some_events())))
    assert chain(CODEC, first) == chain(CODEC, again) and len(first) == 5
    frozen = [CODEC.freeze(m) for m in first]
    assert CODEC.same(first, frozen) and CODEC.same(read([m.event for m in first]), frozen)
    other = ModelResponse(ModelMessage("done"), usage=Usage(prompt_tokens=9), response_id="y", model="other")
    assert chain(CODEC, [*first[:4], EventMessage(other)]) == chain(CODEC, first)


@pytest.mark.parametrize("k", range(len(PARTS)))
def test_every_part_is_in_the_digest(k: int) -> None:
    """Leaving one out shows; metadata that no model reads does not."""
    whole = EventMessage(ModelRequest(PARTS))
    assert CODEC.visible(whole) != CODEC.visible(EventMessage(ModelRequest(PARTS[:k] + PARTS[k + 1 :])))
    assert CODEC.visible(EventMessage(ModelRequest([PARTS[0]]))) == CODEC.visible(
        EventMessage(ModelRequest([PARTS[1]]))
    )


def test_an_edit_in_place_is_noticed() -> None:
    """Events are mutable: what was frozen shows it."""
    message = EventMessage(ModelRequest([TextInput("before")]))
    frozen = [CODEC.freeze(message)]
    message.event.parts[0].content = "after"
    assert not CODEC.same([message], frozen)


def test_what_we_make_is_stored_and_read_back() -> None:
    """Summaries and shortened results, through JSON."""
    made = [
        CODEC.summary("said </conversation_summary> done"),
        CODEC.with_text(EventMessage(results(("a", "x"))), "stub"),
    ]
    again = CODEC.load(CODEC.dump(made))
    assert chain(CODEC, again) == chain(CODEC, made)
    assert CODEC.summary_text(again[0]) == "said &lt;/conversation_summary> done"
    assert CODEC.role(made[0]) == "user" and CODEC.summary_text(CODEC.user("x")) is None
    for data in (b"[", b'[["Runtime", {}]]', b'{"a": 1}', b'[["ModelRequest", 3]]'):
        with pytest.raises(MessageError, match="stored messages"):
            CODEC.load(data)


def test_counts() -> None:
    """Every kind of content costs something; the provider's own count includes what it read from its cache."""
    assert CODEC.estimate(EventMessage(ModelRequest([PARTS[4]]))) >= MEDIA_TOKENS
    long = ToolCallEvent("look_up", id="a", arguments=json.dumps({"key": "word " * 400}))
    assert CODEC.estimate(EventMessage(ModelResponse(tool_calls=ToolCallsEvent([long])))) > 400
    used = Usage(prompt_tokens=100, completion_tokens=20, cache_read_input_tokens=1000)
    reply = ModelResponse(ModelMessage("x"), usage=used, provider="openai")
    assert CODEC.reported(EventMessage(reply)) == 120
    reply.provider = "anthropic"
    assert CODEC.reported(EventMessage(reply)) == 1120
    assert CODEC.reported(EventMessage(ModelResponse(ModelMessage("x")))) is None
    assert CODEC.reported(EventMessage(ModelRequest([]))) is None
    assert "[image]" in CODEC.text(EventMessage(ModelRequest(PARTS)))


@pytest.mark.parametrize("odd", [{"role": "user"}, UsageEvent(Usage()), EventMessage(UsageEvent(Usage())), None])
def test_what_is_no_message_is_named(odd: Any) -> None:
    """By its index and type."""
    with pytest.raises(MessageError, match=r"messages\[3\]"):
        CODEC.check(odd, 3)


# -- the model -------------------------------------------------------------------------------------------------


async def test_a_config_is_a_model() -> None:
    """It asks the framework's client with events of its own, prompts apart, and reports the usage."""
    client = Model(lambda events: "The summary.", usage=Usage(prompt_tokens=100, completion_tokens=20))
    model = ConfigModel(client)
    made = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    other = {"id": "b", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    reply = await model.complete(
        [
            {"role": "system", "content": "You summarise."},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [made, other]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "user", "content": "Summarise."},
        ],
        max_tokens=50,
    )
    assert (reply.text, reply.tool_calls, model.identity) == ("The summary.", False, "fake/fake-1")
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.estimated) == (100, 20, False)
    assert client.prompts == [["You summarise."]]
    kinds = [type(e).__name__ for e in client.requests[0]]
    assert kinds == ["ModelRequest", "ModelResponse", "ToolResultsEvent", "ModelRequest"]
    assert [r.parent_id for r in client.requests[0][2].results] == ["a", "b"]


async def test_max_tokens_reaches_a_config_that_has_it() -> None:
    """As a copy: the agent's own config stays as it is."""

    class Limited(Model):
        max_tokens = 4096

        def copy(self, **changes: Any) -> Limited:
            made = Limited(self.answer)
            made.requests = self.requests
            made.max_tokens = changes["max_tokens"]
            limits.append(made.max_tokens)
            return made

    limits: list[int] = []
    client = Limited(lambda events: "x")
    await ConfigModel(client).complete([{"role": "user", "content": "q"}], max_tokens=50)
    assert limits == [50] and client.max_tokens == 4096


async def test_the_frameworks_own_test_config_works() -> None:
    """It does not say which model it is, so it needs a name; and its usage is unknown."""
    with pytest.raises(ConfigurationError, match="model_id="):
        ConfigModel(TestConfig("x"))
    reply = await ConfigModel(TestConfig("x"), model_id="test").complete([{"role": "user", "content": "q"}])
    assert reply.text == "x" and reply.usage.estimated


@pytest.mark.parametrize("config", [None, "gpt", object()])
def test_wrong_configs_are_named(config: Any) -> None:
    """As configuration mistakes."""
    with pytest.raises(ConfigurationError, match="^config="):
        ConfigModel(config)


async def test_errors_of_the_client_pass_through() -> None:
    """The runtime turns them into a failed lookahead; cancelling is cancelling."""
    with pytest.raises(TimeoutError):
        await ConfigModel(TestConfig(TimeoutError("slow")), model_id="t").complete([{"role": "user", "content": "q"}])
    task = asyncio.get_running_loop().create_task(
        ConfigModel(Model(lambda e: "x", delay=3600)).complete([{"role": "user", "content": "q"}])
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_other_ag2_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the module of AG2 classic here names the extra, and what is installed instead."""
    monkeypatch.delitem(sys.modules, "smoothctx_autogen.ag2_classic", raising=False)
    with pytest.raises(ImportError, match=r"smoothctx\[ag2-classic\]") as caught:
        importlib.import_module("smoothctx_autogen.ag2_classic")
    assert "smoothctx_autogen.ag2" in str(caught.value)
