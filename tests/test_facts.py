"""Facts: found without a model, bounded, and carried word for word through any text."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest
from hypothesis import example, given, settings, strategies as st

from smoothctx.tokens import count_text
from smoothctx.transforms.facts import (
    MAX_TOKENS,
    MAX_TOOL_PIN,
    QUOTA,
    Facts,
    extract,
    message_pins,
    parse,
    pin,
    render,
    strip,
)
from transform_fakes import CODEC, assistant, tool, user

KINDS = [f.name for f in fields(Facts)]
nasty = st.sampled_from(
    ["</durable_facts>", "<durable_facts>\n", "<pin>", "</pin>", "&lt;pin>", "&amp;lt;/pin>", "</conversation_summary>",
     "&lt;conversation_summary",
     "< /Conversation_Summary>", "&amp;lt; / PIN>", "<\n/ pin", "\r\n", "\n\t", "path: ", "\n", "\t", ": ", "漢字"]
)  # fmt: skip
texts = st.lists(st.one_of(nasty, st.text(max_size=20)), min_size=1, max_size=6).map("".join)
any_facts = st.builds(Facts, **{kind: st.lists(texts, max_size=3).map(tuple) for kind in KINDS})


@given(any_facts, texts)
@example(Facts(pins=("a\r\nb", "</pin>", "</durable_facts>")), "<durable_facts>\npath: /fake\n</durable_facts>")
@settings(max_examples=100, deadline=None)
def test_facts_round_trip_word_for_word_through_a_summary(facts: Facts, text: str) -> None:
    """Whatever stands in facts or text, the codec's escaping included: what was written is what is read."""
    message = CODEC.summary(f"{text}\n\n{render(facts)}" if facts else strip(text))
    read = CODEC.summary_text(message)
    assert read is not None
    assert parse(read) == facts
    assert CODEC.summary_text(CODEC.summary(read)) == read


def test_pins_are_rendered_verbatim() -> None:
    """A text without our own delimiters stands in the summary exactly as the user wrote it."""
    text = "Line one\r\n  line two: <b>&amp;</b>"
    assert f"<pin>{text}</pin>" in render(Facts(pins=(text,)))


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("paths", "see src/app.py:42, and /etc/hosts.", ["src/app.py", "/etc/hosts"]),
        ("paths", "`./run.sh` or ~/notes/todo.md or config.yaml", ["./run.sh", "~/notes/todo.md", "config.yaml"]),
        ("paths", r"C:\Users\me\a.txt and \\host\share\b", [r"C:\Users\me\a.txt", r"\\host\share\b"]),
        ("paths", "and/or 1/2 I/O </div> 2024/05/01 n/a", []),
        ("paths", "한국/문서/보고서.md 를 보라", ["한국/문서/보고서.md"]),
        ("urls", "(https://a.test/x?y=1&z=2), s3://bucket/key.bin", ["https://a.test/x?y=1&z=2", "s3://bucket/key.bin"]),
        ("ids", "commit 3fa9c2e1 of 550e8400-e29b-41d4-a716-446655440000",
         ["3fa9c2e1", "550e8400-e29b-41d4-a716-446655440000"]),
        ("ids", "fixes #123 and acme/app#7, PROJ-42, ERR_404_X", ["#123", "acme/app#7", "PROJ-42", "ERR_404_X"]),
        ("ids", "id 56455208233, run_8f2c, gpt-4o-mini, facade decade", ["56455208233", "run_8f2c", "gpt-4o-mini"]),
        ("numbers", "the server listens on port 8443 for tls traffic", ["on port 8443 for tls"]),
        ("numbers", "latency fell by 12.5% last week", ["fell by 12.5% last week"]),
        ("numbers", "7", []),
        ("decisions", "Right. For A-1 we decided on rust, not go. And then?", ["For A-1 we decided on rust, not go."]),
        ("decisions", "Decision: keep v1\nnothing else", ["Decision: keep v1"]),
        ("decisions", "It is not decided yet. What was agreed? To be decided. It isn't approved.", []),
        ("decisions", "큐는 amber로 하기로 했다. 다음은?", ["큐는 amber로 하기로 했다."]),
        ("decisions", "we agreed " + "on and " * 40, []),
    ],
)  # fmt: skip
def test_what_is_found(kind: str, text: str, expected: list[str]) -> None:
    """Paths, URLs, ids and numbers in context, copied exactly."""
    assert list(getattr(extract([user(text)], CODEC), kind)) == expected


def test_call_arguments_and_tool_names_b91() -> None:
    """B91: names as they are called; arguments are read as JSON, so that escapes do not spoil paths."""
    messages = [assistant(None, "c", name="fs.write", arguments='{"path":"/srv/a.py","text":"x\\nsee /srv/b.py"}')]
    facts = extract(messages, CODEC)
    assert facts.tools == ("fs.write",)
    assert facts.paths == ("/srv/a.py", "/srv/b.py")
    deep = assistant(None, "c", arguments="[" * 100_000)
    assert extract([deep], CODEC).tools == ("run",)


def test_what_people_mention_outlives_a_listing() -> None:
    """A big tool result does not push out what the user and the calls named."""
    listing = "\n".join(f"/srv/data/file_{k}.csv" for k in range(500))
    facts = extract([user("work on /srv/main.py"), assistant(None, "c"), tool("c", listing)], CODEC)
    assert "/srv/main.py" in facts.paths
    assert facts.paths[-1] == "/srv/main.py" and len(facts.paths) == 13


def test_promise_10_facts_are_bounded_the_newest_stay() -> None:
    """Forty-eight lines and 600 tokens beside pins, tasks and tools; ten rounds of merging do not grow it."""
    facts = Facts()
    for k in range(10):
        messages = [
            user(f"We chose {k}. /srv/{k}/{j}.py https://x.test/{k}/{j} ID_{k}_{j} takes {j}{k} ms there")
            for j in range(30)
        ]
        facts = extract(messages, CODEC, earlier=facts, pins=["always"], live_tasks=["t"])
        assert sum(len(getattr(facts, kind)) for kind in QUOTA) <= 48
        assert sum(count_text(v) for kind in QUOTA for v in getattr(facts, kind)) <= MAX_TOKENS
        assert facts.paths[-1] == f"/srv/{k}/29.py"
        assert facts.pins == ("always",) and facts.tasks == ("t",)


def test_what_is_short_of_room_goes_first_and_the_rest_shares() -> None:
    """Numbers and URLs go before anything else; paths, ids and decisions give way in turns."""
    messages = [
        user(f"/srv/part_{k}.py is TICKET-{k} and takes {k}5 ms there https://x.test/{k}. We chose number {k}.")
        for k in range(8)
    ]
    facts = extract(messages, CODEC, max_tokens=100)
    assert not facts.numbers and not facts.urls
    assert min(len(facts.paths), len(facts.ids), len(facts.decisions)) >= 2
    assert facts.paths[-1] == "/srv/part_7.py" and facts.ids[-1] == "TICKET-7" and "number 7" in facts.decisions[-1]


def test_a_decision_in_a_tool_result_is_nobodys() -> None:
    """Only users and the agent decide."""
    assert extract([assistant(None, "c"), tool("c", "It was decided to obey.")], CODEC).decisions == ()


def test_same_messages_same_facts() -> None:
    """Stable order: two runs render the same bytes."""
    messages = [user("b.py a.py b.py #1 #2"), assistant("uses a.py"), tool("x", "c.py #3")]
    assert render(extract(messages, CODEC)) == render(extract(messages, CODEC))
    assert extract(messages, CODEC).paths == ("c.py", "b.py", "a.py")


def test_earlier_facts_merge_and_live_tasks_replace_b160() -> None:
    """B160: tasks that are live now are listed; without word of them the earlier ones stay."""
    earlier = Facts(tasks=("old task",), paths=("/a.py",), tools=("grep",))
    assert extract([user("x")], CODEC, earlier=earlier).tasks == ("old task",)
    facts = extract([user("see /b.py")], CODEC, earlier=earlier, live_tasks=["new\ntask"])
    assert facts.tasks == ("new\ntask",) and facts.paths == ("/a.py", "/b.py") and facts.tools == ("grep",)
    assert parse(render(facts)) == facts


def test_pin_marks_a_text() -> None:
    """pin() wraps; wrong texts are named; long pins inside a tool result are not the user's."""
    assert pin("x") == "<pin>x</pin>"
    with pytest.raises(ValueError, match="expected a text that is not empty"):
        pin(" ")
    with pytest.raises(ValueError, match="must not contain <pin> or </pin>"):
        pin("a</pin>b")
    long = "y" * (MAX_TOOL_PIN + 1)
    messages = [user(f"a {pin('one')} b {pin('two')} <pin>open"), tool("c", pin(long) + pin("short")), user(pin("one"))]
    assert message_pins(messages, CODEC) == ["two", "short", "one"]


def test_escaping_is_linear() -> None:
    """Blanks behind a bracket do not make it slow."""
    text = "<" + " " * 200_000 + "&lt;" + "\n" * 200_000
    started = time.thread_time()
    CODEC.summary(render(Facts(pins=(text,))))
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize(
    "text", ["a/" * 200_000, "<pin>" * 100_000, "1 " * 300_000, "https://" * 50_000, "A1_" * 200_000, "x" * 10**6]
)
def test_extraction_is_linear_and_looks_at_a_bounded_part(text: str) -> None:
    """No input makes it slow."""
    started = time.thread_time()
    extract([user(text)], CODEC)
    assert time.thread_time() - started < 1.0


@given(st.lists(st.text(max_size=200), max_size=5))
@settings(deadline=None)
def test_property_extract_never_fails_and_round_trips(parts: list[str]) -> None:
    """Any text: facts come out that survive their own rendering."""
    facts = extract([user(p) for p in parts], CODEC)
    assert parse(render(facts)) == facts
    assert not facts.numbers or all(n in "\n".join(parts) for n in facts.numbers)


def test_no_section_no_facts() -> None:
    """Texts without a section, or with half of one, read as no facts."""
    for text in ("", "plain", "<durable_facts>\npath: x", "path: x\n</durable_facts>"):
        assert parse(text) == Facts()
    assert render(Facts()) == ""
