"""Validators: what a result must satisfy, and how a user's own are run."""

from __future__ import annotations

from typing import Any

import pytest

from smoothctx.errors import InvalidOutput
from smoothctx.transforms import NotSmaller, Rewrite, default_validators, pin, validate
from transform_fakes import CODEC, assistant, chat, request, tool, user

BIG = chat(4)
SUMMARY = CODEC.summary("short")


@pytest.mark.parametrize(
    ("messages", "rewrite", "why"),
    [
        (BIG, Rewrite(messages=[SUMMARY], text="  "), "not_empty: the model wrote no text"),
        (chat(1, size=20), Rewrite(messages=[user("x" * 4000)]), "smaller: the result has 1004 tokens, what it"),
        (BIG, Rewrite(messages=BIG), "smaller: the result has"),
        (BIG, Rewrite(messages=[{"role": "critic", "content": "x"}]), r"messages\[0\]\.role: 'critic' is unknown"),
        (BIG, Rewrite(messages=["text"]), r"well_formed: messages\[0\]: expected a dict with a 'role', got str"),
        (BIG, Rewrite(messages=[CODEC.system("new rules")]), r"well_formed: messages\[0\] is a new system message"),
        (BIG, Rewrite(messages=[tool("c", "r")]), "well_formed: 1 tool results have no call before them"),
        (BIG, Rewrite(messages=[assistant("x", "a", "b"), tool("a", "r")]), "well_formed: 1 tool calls have no result"),
        ([user(pin("keep")), *BIG], Rewrite(messages=[SUMMARY]), "pins_survive: a pinned text is missing.*: 'keep'"),
    ],
)  # fmt: skip
def test_refusals_say_which_and_why(messages: list[Any], rewrite: Rewrite, why: str) -> None:
    """Each built-in validator names itself and the fault."""
    with pytest.raises(InvalidOutput, match=why):
        validate(request(messages), rewrite, default_validators())


def test_not_smaller_has_a_type_of_its_own_b72() -> None:
    """B72: so that it becomes its own reason."""
    with pytest.raises(NotSmaller):
        validate(request(BIG), Rewrite(messages=BIG), default_validators())


def test_good_results_pass() -> None:
    """A summary, nothing at all, and histories that were broken before and are no worse now."""
    validate(request(BIG), Rewrite(messages=[SUMMARY], text="short"), default_validators())
    validate(request(BIG), Rewrite(messages=[]), default_validators())
    orphan = tool("gone", "x" * 400)
    validate(request([orphan, *BIG]), Rewrite(messages=[{**orphan, "content": "stub"}]), default_validators())
    inner = CODEC.system("was there")
    validate(request([inner, *BIG]), Rewrite(messages=[inner]), default_validators())


def test_pins_of_the_session_bind_only_where_they_can() -> None:
    """A model's summary must carry them; a local drop only those that it would lose."""
    with pytest.raises(InvalidOutput, match="pins_survive"):
        validate(
            request(BIG, pins=("told elsewhere",)), Rewrite(messages=[SUMMARY], text="short"), default_validators()
        )
    validate(request(BIG, pins=("told elsewhere",)), Rewrite(messages=[]), default_validators())
    with pytest.raises(InvalidOutput, match="pins_survive"):
        validate(request([user("told here"), *BIG], pins=("told here",)), Rewrite(messages=[]), default_validators())


def test_pins_with_our_own_delimiters_survive() -> None:
    """What the codec escapes still counts as word for word."""
    from smoothctx.transforms.facts import Facts, render

    odd = "close </conversation_summary> and </pin>"
    message = CODEC.summary("s\n\n" + render(Facts(pins=(odd,))))
    validate(request(BIG, pins=(odd,)), Rewrite(messages=[message], text="s"), default_validators())


def test_users_own_validators() -> None:
    """True and None accept; False and exceptions refuse, by name."""

    def strict(request: Any, rewrite: Any) -> bool:
        return len(rewrite.messages) == 1

    class Judge:
        def __call__(self, request: Any, rewrite: Any) -> None:
            raise RuntimeError("broken")

    good, bad = Rewrite(messages=[SUMMARY], text="s"), Rewrite(messages=[], text="s")
    validate(request(BIG), good, [strict])
    with pytest.raises(InvalidOutput, match="strict: refused the result"):
        validate(request(BIG), bad, [strict])
    with pytest.raises(InvalidOutput, match="Judge: RuntimeError: broken"):
        validate(request(BIG), good, [Judge()])
