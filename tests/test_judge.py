"""The judge by itself: what counts as evidence, how it is asked, and what it accepts as an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers import CODEC, A, H, Message, T
from smoothctx import ConfigurationError, InvalidOutput, KeepRecent, Policy, TrajectoryJudge
from smoothctx.judge import Evidence, mentions, read_verdict, text_of
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage
from transform_fakes import FakeEngine, FakeModel


def action(path: str, text: str | None = None) -> Message:
    """The agent reads a file."""
    arguments = json.dumps({"path": path})
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def evidence(record: str = "a summary", covered: str = "", known: list[str] | None = None) -> Evidence:
    """Nothing read yet."""
    return Evidence(record=record, covered=covered, known=known or [], kept=[], since=[])


def read(e: Evidence, *messages: Message) -> Evidence:
    """The same, with these messages read."""
    for message in messages:
        e.read(message, CODEC)
    return e


def test_an_identifier_of_the_covered_messages_that_the_summary_lost_is_missed() -> None:
    """The agent opens a file that only the summarised messages named."""
    e = read(evidence(covered="we edit src/app/config.py and docs/x.md"), action("src/app/config.py"))
    assert e.identifiers().score == 0.0 and e.identifiers().missed == ("src/app/config.py",)


@pytest.mark.parametrize(
    ("record", "covered", "known"),
    [
        ("see src/app/config.py", "src/app/config.py", []),
        ("see /repo/src/app/config.py:12", "src/app/config.py", []),
        ("nothing", "src/app/config.pyc", []),
        ("nothing", "nothing", []),
        ("nothing", "src/app/config.py", ["the user said src/app/config.py again"]),
    ],
)
def test_what_the_summary_has_or_the_rest_of_the_view_says_is_not_missed(
    record: str, covered: str, known: list[str]
) -> None:
    """Only what stands in the covered messages alone has to come from the summary."""
    e = read(evidence(record, covered, known), action("src/app/config.py"))
    assert e.identifiers().missed == () and e.identifiers().score == 1.0


def test_what_came_up_between_snapshot_and_action_is_known() -> None:
    """A tool result that names the path again: the action follows from that."""
    e = read(evidence(covered="src/app/config.py"), T("c0", "found: src/app/config.py"), action("src/app/config.py"))
    assert not e.needed


def test_only_actions_of_the_agent_are_evidence() -> None:
    """A user who names a lost path says nothing about the summary."""
    e = evidence(covered="src/app/config.py")
    assert not e.read(H("look at src/app/config.py"), CODEC)
    assert e.read(A("src/app/config.py it is"), CODEC)
    assert not e.needed, "the user's words came first"


def test_the_score_is_the_part_of_what_was_needed() -> None:
    """Two of three are there."""
    e = evidence("a/one.py a/two.py", "a/one.py a/two.py a/three.py")
    read(e, action("a/one.py"), action("a/two.py"), action("a/three.py"))
    assert e.identifiers().score == pytest.approx(2 / 3) and e.identifiers().missed == ("a/three.py",)


def test_arguments_are_read_without_their_escapes() -> None:
    """JSON hides backslashes and line breaks."""
    message = action("C:\\work\\app\\main.py")
    assert mentions(text_of(message, CODEC), "C:\\work\\app\\main.py")
    e = read(evidence(covered="C:\\work\\app\\main.py"), message)
    assert e.identifiers().missed == ("C:\\work\\app\\main.py",)


# -- the model -----------------------------------------------------------------------------------------------------


async def test_the_model_sees_summary_kept_messages_and_actions_as_data() -> None:
    """Each between tags of its own, with the tags in it escaped; the answer is a verdict, its cost is told."""
    usage = Usage(input_tokens=70, output_tokens=9, calls=1)
    model = FakeModel(ModelReply(text='{"score": 0.25, "missed": ["the port"]}', usage=usage))
    spent: list[Usage] = []
    e = Evidence(record="port </record> 80", covered="", known=[], kept=[H("kept words")], since=[A("I use port 8080")])
    verdict = await TrajectoryJudge(model).ask(e, CODEC, spent.append)
    assert (verdict.score, verdict.missed) == (0.25, ("the port",)) and spent == [usage]
    text = str(model.requests[0][-1]["content"])
    assert "kept words" in text and "I use port 8080" in text and text.count("</record>") == 1


async def test_what_the_model_is_shown_is_bounded() -> None:
    """However long summary, tail and actions are."""
    model = FakeModel('{"score": 1}')
    long = "word " * 20_000
    e = Evidence(record=long, covered="", known=[], kept=[H(long)], since=[A(long)])
    await TrajectoryJudge(model, max_input_tokens=1000).ask(e, CODEC, lambda usage: None)
    assert sum(map(CODEC.estimate, model.requests[0])) < 1600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.9",
        "I think so",
        "[1]",
        '{"score": "high"}',
        '{"score": true}',
        '{"score": 1.5}',
        '{"score": -0.1}',
        '{"score": NaN}',
        '{"missed": []}',
        '{"score": 0.4, "missed": "the port"}',
        '{"score": 0.4, "missed": [1]}',
        '{"score": 0.4} and so on',
    ],
)
def test_anything_but_a_verdict_is_refused(text: str) -> None:
    """Nothing is guessed from half an answer."""
    with pytest.raises(InvalidOutput, match="judge"):
        read_verdict(text)


@pytest.mark.parametrize(
    "text", ['{"score": 0.5}', '```json\n{"score": 0.5, "missed": []}\n```', '<think>hm</think>{"score": 0.5}']
)
def test_a_verdict_may_come_in_a_fence_or_after_thinking(text: str) -> None:
    """As many models write it."""
    assert read_verdict(text).score == 0.5


# -- configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": True}, "threshold"),
        ({"boundaries": -1}, "boundaries"),
        ({"boundaries": 1.5}, "boundaries"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"max_input_tokens": 10}, "max_input_tokens"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_wrong_options_name_themselves(options: dict[str, Any], match: str) -> None:
    """At construction."""
    with pytest.raises(ConfigurationError, match=match):
        TrajectoryJudge(**options)


def test_a_policy_has_one_judge_at_most() -> None:
    """Two would disagree."""
    sizes: dict[str, Any] = {"trigger": ("messages", 4), "hard_limit": ("messages", 9), "land_at": ("messages", 2)}
    with pytest.raises(ConfigurationError, match="at most one TrajectoryJudge"):
        Policy(KeepRecent(), validators=[TrajectoryJudge(), TrajectoryJudge()], **sizes)
    policy = Policy(KeepRecent(), validators=[TrajectoryJudge()], **sizes)
    assert policy.same_as(Policy(KeepRecent(), validators=[TrajectoryJudge()], **sizes))
    assert not policy.same_as(Policy(KeepRecent(), validators=[TrajectoryJudge(threshold=0.9)], **sizes))


def test_judges_are_the_same_by_identity_and_options() -> None:
    """An engine has an identity; a plain callable is only itself, unless it is named."""
    engine, other = FakeEngine(identity="a m"), FakeEngine(identity="b m")
    assert TrajectoryJudge(engine) == TrajectoryJudge(FakeEngine(identity="a m"))
    assert hash(TrajectoryJudge(engine)) == hash(TrajectoryJudge(engine))
    assert TrajectoryJudge(engine) != TrajectoryJudge(other)
    assert TrajectoryJudge(FakeModel()) != TrajectoryJudge(FakeModel())
    assert TrajectoryJudge(FakeModel(), model_id="m") == TrajectoryJudge(FakeModel(), model_id="m")
    assert TrajectoryJudge() != TrajectoryJudge(engine) and "m" in repr(TrajectoryJudge(engine))
