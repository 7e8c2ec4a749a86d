"""How the chat dicts of AG2 classic are read, and the model made from an ``llm_config``."""

from __future__ import annotations

import importlib
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from autogen import LLMConfig, OpenAIWrapper
from chats import Client
from hypothesis import given, strategies as st

from smoothctx import ConfigurationError, MessageError, Usage, segments
from smoothctx.codec import openai_messages
from smoothctx.digest import chain
from smoothctx_autogen.ag2_classic import ClassicMessages, WrapperModel

CODEC = ClassicMessages()


def group(*results: tuple[str, str], **fields: Any) -> dict[str, Any]:
    """A grouped tool message."""
    parts = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results]
    joined = "\n\n".join(text for _, text in results)
    return {"role": "tool", "tool_responses": parts, "content": joined, "name": "user", **fields}


def test_a_group_answers_all_its_calls() -> None:
    """One message, several results: one segment with their call, and one dict each for a request."""
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "ab"],
    }
    found = segments([{"role": "user", "content": "q"}, call, group(("a", "1"), ("b", "2"))], CODEC)
    assert [(s.start, s.end, s.kind, s.unanswered) for s in found] == [(0, 1, "user", 0), (1, 3, "tools", 0)]
    assert [(m["tool_call_id"], m["content"]) for m in openai_messages(CODEC, group(("a", "1"), ("b", "2")))] == [
        ("a", "1"),
        ("b", "2"),
    ]


def test_one_result_of_a_group_is_shortened() -> None:
    """In both places that hold it; its sister stays, and so does the original."""
    message = group(("a", "long" * 100), ("b", "small"), context={"k": 1})
    first, second = CODEC.results(message)
    short = CODEC.joined(message, [CODEC.with_text(first, "stub"), second])
    assert [(p["tool_call_id"], p["content"]) for p in short["tool_responses"]] == [("a", "stub"), ("b", "small")]
    assert short["content"] == "stub\n\nsmall" and short["context"] == {"k": 1}
    assert "long" not in json.dumps(short) and message["tool_responses"][0]["content"] == "long" * 100
    assert CODEC.estimate(short) < CODEC.estimate(message)


def test_what_a_person_said_goes_with_the_last_result() -> None:
    """Beside it as long as that stays; inside it once it is shortened, and then not a second time."""
    said = {**group(("a", "one"), ("b", "two")), "role": "user", "content": [{"type": "text", "text": "stop"}]}
    first, second = CODEC.results(said)
    kept = CODEC.joined(said, [CODEC.with_text(first, "stub"), second])
    assert kept["content"] == said["content"] and kept["tool_responses"][1] is said["tool_responses"][1]
    gone = CODEC.joined(said, [first, CODEC.with_text(second, "stub")])
    assert gone["content"] == "" and "stop" not in json.dumps(gone) and "stop" in second["content"]
    single = {**said, "tool_responses": said["tool_responses"][:1]}
    short = CODEC.with_text(single, "stub")
    assert CODEC.text(short) == "stub" and short["tool_responses"][0]["tool_call_id"] == "a"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.text("xy ", max_size=5)), min_size=2, max_size=5),
    st.sampled_from(["tool", "user"]),
    st.sampled_from(["", "stop"]),
    st.data(),
)
def test_groups_are_taken_apart_and_joined(
    pairs: list[tuple[str, str]], role: str, said: str, data: st.DataObject
) -> None:
    """Whichever are shortened: what is joined holds exactly these results."""
    message = {**group(*pairs), "role": role, "content": said}
    parts = list(CODEC.results(message))
    assert CODEC.visible(CODEC.joined(message, parts)) == CODEC.visible(message)
    shorter = data.draw(st.sets(st.sampled_from(range(len(parts)))))
    parts = [CODEC.with_text(p, "stub") if k in shorter else p for k, p in enumerate(parts)]
    made = CODEC.joined(message, parts)
    assert [CODEC.visible(p) for p in CODEC.results(made)] == [CODEC.visible(p) for p in parts]
    assert CODEC.text(made) == "\n".join(map(CODEC.text, parts))
    assert CODEC.estimate(made) == sum(map(CODEC.estimate, parts))


def test_a_group_counts_once() -> None:
    """The joined copy of the results is sent nowhere, so it costs nothing."""
    message = group(("a", "word " * 400), ("b", "word " * 400))
    assert 1000 <= CODEC.estimate(message) < 1100


def test_what_is_bookkeeping_is_not_in_the_digest() -> None:
    """``context``, and the joined text of a group; not the results, their ids, or what a person said."""
    base = group(("a", "1"), ("b", "2"))
    assert CODEC.visible(base) == CODEC.visible({**base, "content": "x", "context": {"k": 1}})
    assert CODEC.visible(base) != CODEC.visible(group(("a", "1"), ("b", "3")))
    assert CODEC.visible(base) != CODEC.visible(group(("a", "1"), ("c", "2")))
    said = {**base, "role": "user", "content": "stop"}
    assert CODEC.visible(said) != CODEC.visible({**said, "content": "go"})
    assert "stop" in CODEC.text(said) and "stop" not in CODEC.text(base)
    plain = {"role": "user", "content": "hi", "name": "user"}
    assert CODEC.visible(plain) == CODEC.visible({**plain, "context": {"k": 1}})


RESULTS = st.lists(st.tuples(st.text("abc", max_size=3), st.text(max_size=20)), min_size=1, max_size=4)


@given(RESULTS, st.sampled_from(["tool", "user"]), st.text(max_size=10))
def test_digests_survive_json_and_a_freeze_shows_edits(results: Any, role: str, said: str) -> None:
    """What is saved and loaded has the same digest; a nested edit in place is seen."""
    message = group(*results, role=role)
    message["content"] = said
    again = json.loads(json.dumps(message))
    assert chain(CODEC, [message]) == chain(CODEC, [again])
    assert CODEC.load(CODEC.dump([message])) == [message]
    frozen = [CODEC.freeze(message)]
    assert CODEC.same([message], frozen)
    message["tool_responses"][0]["content"] += "!"
    assert not CODEC.same([message], frozen) and chain(CODEC, [message]) != chain(CODEC, [again])


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (
            {"role": "tool", "content": "", "tool_responses": {"a": 1}},
            r"messages\[3\]\.tool_responses: expected a list",
        ),
        (
            {
                "role": "tool",
                "content": "",
                "tool_responses": [{"role": "tool", "content": "1"}, {"role": "tool", "content": 2}],
            },
            r"messages\[3\]\.tool_responses\[1\]\.content",
        ),
        ({"role": "tool", "content": "", "tool_responses": ["x"]}, r"messages\[3\]\.tool_responses\[0\]"),
        ({"content": "x"}, r"messages\[3\]\.role"),
    ],
)
def test_malformed_messages_are_named(message: Any, where: str) -> None:
    """By index and field."""
    with pytest.raises(MessageError, match=where):
        CODEC.check(message, 3)


# -- the model -------------------------------------------------------------------------------------------------

CONFIG = {"config_list": [{"model": "fake", "model_client_cls": "Client"}]}


def wrapper(requests: list[Any], answer: Any = lambda m: "The summary.") -> OpenAIWrapper:
    """The framework's client wrapper with a fake client in it."""
    made = OpenAIWrapper(**CONFIG)
    made.register_model_client(Client, answer=answer, requests=requests)
    return made


async def test_a_wrapper_is_a_model() -> None:
    """It asks the framework's own client, in a thread, and reports the usage."""
    requests: list[Any] = []
    model = WrapperModel(wrapper(requests), model_id="fake-1")
    reply = await model.complete([{"role": "user", "content": "q"}], max_tokens=50)
    assert (reply.text, reply.finish_reason, reply.tool_calls) == ("The summary.", "stop", False)
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.calls) == (100, 20, 1)
    assert requests == [[{"role": "user", "content": "q"}]] and model.identity == "fake-1"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -1, "100"])
async def test_usage_that_is_no_number_of_tokens_is_no_report(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary is used all the same; what it cost is not known."""
    create = Client.create

    def answer(self: Client, params: dict[str, Any]) -> Any:
        response = create(self, params)
        response.usage = SimpleNamespace(prompt_tokens=odd, completion_tokens=20)
        return response

    monkeypatch.setattr(Client, "create", answer)
    reply = await WrapperModel(wrapper([]), model_id="fake-1").complete([{"role": "user", "content": "q"}])
    assert reply.text == "The summary." and reply.usage == Usage(calls=1, estimated=True)


async def test_a_reply_that_asks_for_tools_is_marked() -> None:
    """So that it is not taken for a summary."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    model = WrapperModel(wrapper([], lambda m: {"content": None, "tool_calls": [call]}), model_id="fake-1")
    reply = await model.complete([{"role": "user", "content": "q"}])
    assert reply.text == "" and reply.tool_calls


async def test_errors_of_the_client_pass_through() -> None:
    """The runtime turns them into a failed lookahead."""

    def fail(messages: Any) -> str:
        raise RuntimeError("429")

    with pytest.raises(RuntimeError, match="429"):
        await WrapperModel(wrapper([], fail), model_id="fake-1").complete([{"role": "user", "content": "q"}])


def test_a_config_names_its_models() -> None:
    """Model and server are the identity; API keys are not in it."""
    entry = {"model": "fake", "model_client_cls": "Client", "base_url": "http://127.0.0.1:1/v1", "api_key": "secret"}
    for config in ({"config_list": [entry]}, LLMConfig(entry)):
        identity = WrapperModel(config).identity
        assert "fake" in identity and "127.0.0.1:1" in identity and "secret" not in identity


@pytest.mark.parametrize("config", [None, {}, "gpt", {"config_list": [{"model_client_cls": "Client"}]}])
def test_wrong_configs_are_named(config: Any) -> None:
    """As configuration mistakes; a wrapper needs ``model_id``."""
    with pytest.raises(ConfigurationError, match="^config="):
        WrapperModel(config)
    with pytest.raises(ConfigurationError, match="model_id="):
        WrapperModel(wrapper([]))


def test_the_other_ag2_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the module of AG2 1.x here names the extra, and what is installed instead."""
    monkeypatch.delitem(sys.modules, "smoothctx_autogen.ag2", raising=False)
    with pytest.raises(ImportError, match=r"smoothctx\[ag2\]") as caught:
        importlib.import_module("smoothctx_autogen.ag2")
    assert "smoothctx_autogen.ag2_classic" in str(caught.value)
