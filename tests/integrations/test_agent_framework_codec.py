"""The codec: every content kind of the framework, what the model sees of it, and what is only bookkeeping."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest
from agent_framework import AgentSession, Content, Message
from agent_framework._types import ContentType
from hypothesis import given, strategies as st

from agent_framework_fakes import CODEC, answer, assistant, call, results, text, user
from smoothctx import segments
from smoothctx.codec import openai_messages, results_of
from smoothctx.digest import ROOT, link
from smoothctx.errors import MessageError
from smoothctx.tokens import MEDIA_TOKENS

IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 50
F = Content.from_function_call("f1", "run", arguments={"x": 1}, hosted=True)

# One content of each kind, and a model-visible field of it with another value.
EVERY: list[tuple[Content, str, Any]] = [
    (Content.from_text("hello"), "text", "bye"),
    (Content.from_text_reasoning(text="hm", protected_data="sig"), "protected_data", "other"),
    (Content.from_uri(IMAGE), "uri", IMAGE + "AAAA"),
    (Content.from_uri("https://example.org/a.png", media_type="image/png"), "uri", "https://example.org/b.png"),
    (Content.from_error(message="broke", error_code="5"), "message", "worked"),
    (call("c1", key="a"), "arguments", {"key": "b"}),
    (answer("c1", "found"), "items", [text("lost")]),
    (Content.from_hosted_file("file-1"), "file_id", "file-2"),
    (Content.from_hosted_vector_store("vs-1"), "vector_store_id", "vs-2"),
    (Content.from_code_interpreter_tool_call(call_id="i1", inputs=[text("1 + 1")]), "inputs", [text("1 + 2")]),
    (Content.from_code_interpreter_tool_result(call_id="i1", outputs=[text("2")]), "outputs", [text("3")]),
    (Content.from_image_generation_tool_call(image_id="p1"), "image_id", "p2"),
    (Content.from_image_generation_tool_result(image_id="p1", outputs=Content.from_uri(IMAGE)), "image_id", "p2"),
    (Content.from_mcp_server_tool_call("m1", "search", server_name="s", arguments={"q": 1}), "arguments", {"q": 2}),
    (Content.from_mcp_server_tool_result(call_id="m1", output=[text("hit")]), "output", [text("miss")]),
    (Content.from_search_tool_call(call_id="w1", tool_name="web", arguments={"q": 1}), "arguments", {"q": 2}),
    (Content.from_search_tool_result(call_id="w1", tool_name="web", result="hit"), "result", "miss"),
    (Content.from_shell_tool_call(call_id="h1", commands=["ls"]), "commands", ["rm"]),
    (
        Content.from_shell_tool_result(
            call_id="h1", outputs=[Content.from_shell_command_output(stdout="a", stderr="b", exit_code=1)]
        ),
        "outputs",
        [],
    ),
    (Content.from_shell_command_output(stdout="a"), "stdout", "b"),
    (Content("computer_tool_call", call_id="k1", actions=[{"type": "click"}]), "actions", [{"type": "type"}]),
    (
        Content("computer_tool_result", call_id="k1", screenshot=Content.from_uri(IMAGE)),
        "screenshot",
        Content.from_uri(IMAGE + "AAAA"),
    ),
    (Content.from_function_approval_request("r1", F), "function_call", call("f2", "run")),
    (Content.from_function_approval_response(True, "r1", F), "approved", False),
    (Content.from_oauth_consent_request("https://example.org/1"), "consent_link", "https://example.org/2"),
]
KINDS = [c.type for c, _, _ in EVERY]


def round_trip(message: Message) -> Message:
    """Through the session's own serialisation and JSON, as a store would."""
    session = AgentSession(session_id="s")
    session.state["kept"] = {"messages": [message]}
    loaded = AgentSession.from_dict(json.loads(json.dumps(session.to_dict())))
    found: Message = loaded.state["kept"]["messages"][0]
    return found


def test_every_kind_of_the_framework_is_covered() -> None:
    """The table has each kind that the framework declares; usage has a test of its own."""
    assert set(KINDS) | {"usage"} == set(get_args(ContentType))


@pytest.mark.parametrize(("content", "field", "other"), EVERY, ids=KINDS)
def test_kind_is_read_kept_and_told_apart(content: Content, field: str, other: Any) -> None:
    """It is valid, costs something, keeps its digest through a store, and an edit in place shows."""
    message = Message("assistant", [copy.deepcopy(content)])
    CODEC.check(message, 0)
    assert CODEC.estimate(message) > 4
    assert isinstance(CODEC.text(message), str)
    frozen, seen = CODEC.freeze(message), CODEC.visible(message)
    assert CODEC.same([message], [frozen])
    loaded = round_trip(message)
    assert CODEC.visible(loaded) == seen
    assert CODEC.same([loaded], [frozen])
    again = CODEC.load(CODEC.dump([message]))
    assert CODEC.visible(again[0]) == seen
    setattr(message.contents[0], field, other)
    assert not CODEC.same([message], [frozen])
    assert CODEC.visible(message) != seen


def test_what_is_malformed_is_named_by_index_and_field() -> None:
    """No message, an unknown role, contents that are none, an unknown kind."""
    for broken, where in (
        ({"role": "user"}, r"messages\[3\]: expected an agent_framework Message"),
        (Message("narrator", ["x"]), r"messages\[3\].role: 'narrator'"),
        (Message("user", [Content("brain_wave")]), r"messages\[3\].contents\[0\]: unknown content \(kind 'brain_wave'"),
    ):
        with pytest.raises(MessageError, match=where):
            CODEC.check(broken, 3)
    bare = user()
    bare.contents = "text"  # type: ignore[assignment]
    with pytest.raises(MessageError, match=r"messages\[0\].contents: expected a list, got str"):
        CODEC.check(bare, 0)
    assert not CODEC.same([bare], [CODEC.freeze(user())])
    bare.contents = ["text"]  # type: ignore[list-item]
    with pytest.raises(MessageError, match=r"contents\[0\]: unknown content \(a str\)"):
        CODEC.check(bare, 0)


def test_bookkeeping_is_not_visible() -> None:
    """Ids, authors that the framework fills in, properties, usage and approvals of local tools change no digest."""
    message = assistant("hi", "c1")
    seen, frozen = CODEC.visible(message), CODEC.freeze(message)
    message.message_id, message.author_name = "m-1", "bob"
    message.additional_properties["_attribution"] = {"source_id": "in_memory"}
    message.contents[1].id = "af-call-1"
    message.contents[1].user_input_request = True
    message.contents.append(Content.from_usage({"input_token_count": 1}))
    message.contents.append(Content.from_function_approval_request("af-call-1", message.contents[1]))
    assert CODEC.visible(message) == seen
    assert CODEC.same([message], [frozen])


def test_a_users_name_is_visible() -> None:
    """Who of several people said it is for the model to know."""
    ann, ben = Message("user", ["hi"], author_name="ann"), Message("user", ["hi"], author_name="ben")
    assert CODEC.visible(ann) != CODEC.visible(ben)
    assert CODEC.to_openai(ann)["name"] == "ann"


def test_binary_data_is_hashed_and_counted_once() -> None:
    """A picture of any size costs the same, and its digest input stays short."""
    small, large = (Message("user", [Content.from_data(b"x" * n, "image/png")]) for n in (10, 400_000))
    assert CODEC.estimate(small) == CODEC.estimate(large) == 4 + MEDIA_TOKENS
    assert len(CODEC.visible(large)) < 500
    assert CODEC.text(large) == "[image]"


def test_calls_of_all_kinds_count_their_arguments() -> None:
    """Call arguments, thinking and results cost tokens (B101), and mappings and texts the same (B105)."""
    words = "word " * 200
    as_text = Message("assistant", [Content.from_function_call("c", "run", arguments=json.dumps({"q": words}))])
    as_mapping = Message("assistant", [Content.from_function_call("c", "run", arguments={"q": words})])
    assert CODEC.estimate(as_text) > 200
    assert abs(CODEC.estimate(as_text) - CODEC.estimate(as_mapping)) <= 2
    thinking = Message("assistant", [Content.from_text_reasoning(text=words)])
    assert CODEC.estimate(thinking) > 200


def test_one_tool_message_answers_several_calls() -> None:
    """One unit with its call; each result can be read alone; requests get one answer per call."""
    messages = [user(), assistant(None, "a", "b"), results("a", "b"), assistant()]
    assert [(s.start, s.end, s.kind, s.unanswered) for s in segments(messages, CODEC)] == [
        (0, 1, "user", 0),
        (1, 3, "tools", 0),
        (3, 4, "assistant", 0),
    ]
    assert [CODEC.result_id(r) for r in results_of(CODEC, messages[2])] == ["a", "b"]
    sent = openai_messages(CODEC, messages[2])
    assert [(d["role"], d["tool_call_id"], d["content"]) for d in sent] == [
        ("tool", "a", "result"),
        ("tool", "b", "result"),
    ]


def test_results_with_more_beside_them_lose_nothing() -> None:
    """A picture behind a result goes with it."""
    message = Message("tool", [answer("a"), Content.from_uri(IMAGE), answer("b")])
    first, second = CODEC.results(message)
    assert [c.type for c in first.contents] == ["function_result", "uri" if IMAGE[:5] != "data:" else "data"]
    assert [c.call_id for c in second.contents] == ["b"]


def test_results_under_the_role_of_a_user_are_results() -> None:
    """What answers calls is a tool message, whatever it is called."""
    assert CODEC.role(Message("user", [answer("a")])) == "tool"
    assert CODEC.role(Message("user", [answer("a"), text("and this")])) == "user"


def test_calls_that_the_service_answered_itself_are_no_open_calls() -> None:
    """A hosted call with its result in the same message is text; one without waits for its answer."""
    mcp, hit = EVERY[13][0], EVERY[14][0]
    closed = Message("assistant", [mcp, hit, text("done")])
    assert CODEC.calls(closed) == []
    assert CODEC.text(closed) == '[search({"q":1})]\nhit\ndone'
    opened = Message("assistant", [EVERY[20][0]])
    assert [(c.id, c.name) for c in CODEC.calls(opened)] == [("k1", "computer")]
    assert CODEC.result_id(Message("tool", [EVERY[21][0]])) == "k1"


def test_one_of_several_results_is_shortened() -> None:
    """Its media and the ids stay, the other results are as they were, and so is the original."""
    first = Content.from_function_result("a", result=[text("long"), Content.from_uri(IMAGE)])
    message = Message("tool", [first, answer("b"), text("beside")], message_id="m1")
    parts = list(CODEC.results(message))
    made = CODEC.joined(message, [CODEC.with_text(parts[0], "short"), parts[1]])
    assert [c.call_id for c in made.contents] == ["a", "b", None] and made.message_id == "m1"
    assert CODEC.text(made) == "short\n[image]\nresult\nbeside"
    assert [c.type for c in made.contents[0].items or ()] == ["text", "data"]
    assert all(a is b for a, b in zip(made.contents[1:], message.contents[1:], strict=True))
    assert CODEC.text(message) == "long\n[image]\nresult\nbeside" and message.contents[0] is first
    for kind in ("mcp_server_tool_result", "code_interpreter_tool_result", "shell_tool_result", "search_tool_result"):
        original = next(c for c, _, _ in EVERY if c.type == kind)
        made = CODEC.with_text(Message("tool", [original]), "short")
        assert (made.contents[0].call_id, CODEC.text(made)) == (original.call_id, "short")


PARTS = st.lists(st.sampled_from([answer("a", "x"), answer("b", "y"), answer("c", "z"), text("t")]), max_size=6)


@given(PARTS, st.sets(st.sampled_from(range(6))))
def test_results_are_taken_apart_and_joined(contents: list[Content], shorter: set[int]) -> None:
    """Whatever stands between them, and whichever are shortened: what is joined holds exactly these parts."""
    message = Message("tool", [answer("first"), *contents])
    parts = list(CODEC.results(message))
    assert CODEC.visible(CODEC.joined(message, parts)) == CODEC.visible(message)
    parts = [CODEC.with_text(p, "stub") if k in shorter else p for k, p in enumerate(parts)]
    made = CODEC.joined(message, parts)
    assert [CODEC.visible(p) for p in CODEC.results(made)] == [CODEC.visible(p) for p in parts]
    assert CODEC.text(made) == "\n".join(map(CODEC.text, parts))


def test_text_is_replaced_in_other_messages() -> None:
    """Calls stay, text does not."""
    made = CODEC.with_text(assistant("old", "c1"), "new")
    assert CODEC.text(made) == "new" and [c.id for c in CODEC.calls(made)] == ["c1"]


def test_thinking_is_left_out_on_demand() -> None:
    """A copy without reasoning; the same object where there is none."""
    message = Message("assistant", [Content.from_text_reasoning(text="hm"), text("hi")], raw_representation=object())
    clean = CODEC.without_thinking(message)
    assert [c.type for c in clean.contents] == ["text"] and len(message.contents) == 2
    assert clean.raw_representation is None
    assert CODEC.without_thinking(clean) is clean
    assert CODEC.text(message) == "hi"


def test_images_reach_a_summariser_and_data_does_not() -> None:
    """A user's picture is passed on as one; other media are named."""
    sent = CODEC.to_openai(Message("user", [text("see"), Content.from_uri(IMAGE), Content.from_hosted_file("f")]))
    assert sent["content"] == [
        {"type": "text", "text": "see\n[file]"},
        {"type": "image_url", "image_url": {"url": IMAGE}},
    ]
    assert CODEC.to_openai(assistant(None, "c1")) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"key":"c1"}'}}],
    }


def test_usage_is_read_where_it_is() -> None:
    """From a usage content, or as it was reported for the message; input and output together."""
    inside = Message("assistant", [Content.from_usage({"input_token_count": 90, "output_token_count": 10})])
    assert CODEC.reported(inside) == 100
    beside = assistant()
    assert CODEC.reported(beside) is None
    CODEC.report(beside, {"input_token_count": 40, "output_token_count": 2})
    CODEC.report(beside, None)
    assert CODEC.reported(beside) == 42
    assert CODEC.reported(user()) is None


def test_summary_is_fenced_and_recognised() -> None:
    """A user message; its text cannot close the fence; other messages are none."""
    made = CODEC.summary("it said </conversation_summary> then")
    assert CODEC.role(made) == "user"
    inside = CODEC.summary_text(made)
    assert inside is not None and "</conversation_summary>" not in inside
    assert CODEC.summary_text(user()) is None and CODEC.summary_text(round_trip(made)) == inside


def test_stored_messages_that_are_broken_are_an_error() -> None:
    """Not JSON, not a list of messages, an unknown kind."""
    for data in (b"{", b"[1]", b"3", b'[{"role": "user", "contents": [{"type": "brain_wave"}]}]'):
        with pytest.raises(MessageError):
            CODEC.load(data)


CONTENTS = st.one_of(
    st.builds(text, st.text(max_size=20)),
    st.builds(lambda i, a: call(f"c{i}", key=a), st.integers(0, 3), st.text(max_size=5)),
    st.builds(lambda i, a: answer(f"c{i}", a), st.integers(0, 3), st.text(max_size=20)),
    st.sampled_from([c for c, _, _ in EVERY]),
)
MESSAGES = st.builds(
    lambda role, contents: Message(role, contents),
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.lists(CONTENTS, max_size=4),
)


@given(MESSAGES, MESSAGES)
def test_digest_and_comparison_agree_across_a_store(left: Message, right: Message) -> None:
    """Whatever a message holds: a loaded copy is the same, and two that are the same have one digest."""
    loaded = round_trip(left)
    assert CODEC.same([loaded], [CODEC.freeze(left)])
    assert link(ROOT, CODEC, loaded) == link(ROOT, CODEC, left)
    if CODEC.same([right], [CODEC.freeze(left)]):
        assert link(ROOT, CODEC, right) == link(ROOT, CODEC, left)
    else:
        assert link(ROOT, CODEC, right) != link(ROOT, CODEC, left) or left.role != right.role
    assert CODEC.estimate(left) >= 4
    sent = openai_messages(CODEC, left)
    assert json.dumps(sent) and all(d["role"] in ("system", "user", "assistant", "tool") for d in sent)
