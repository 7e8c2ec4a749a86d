"""The locality checker: it passes what is local and finds out what only says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from smoothctx import (
    Chain,
    ConfigurationError,
    Isolate,
    KeepRecent,
    Locality,
    Offload,
    OpenAIMessages,
    Policy,
    Rewrite,
    Runtime,
    Summarize,
    Transform,
    TransformError,
    TransformRequest,
)
from smoothctx.testing import FakeModel, check_locality, marks, run_virtual

CODEC = OpenAIMessages()


@dataclass
class Made:
    """A transform whose summary says whatever ``say`` finds in the request."""

    say: Callable[[TransformRequest], str]
    locality: Locality = Locality.PREFIX
    source: str = "view"
    requests: list[TransformRequest] = field(default_factory=list)
    name: str = "made"
    fingerprint: str | None = "made"

    async def apply(self, request: TransformRequest) -> Rewrite:
        self.requests.append(request)
        return Rewrite(messages=[request.codec.summary(self.say(request))])


def texts(messages: Any) -> str:
    """All text of some messages."""
    return "|".join(map(CODEC.text, messages))


def check(transform: Any, **options: Any) -> Any:
    """Run the checker on virtual time."""
    return run_virtual(lambda: check_locality(transform, **options))


def history(turns: int = 5) -> list[Any]:
    """Turns with a tool call each, and a system message."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for k in range(turns):
        call = {"id": f"c{k}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        messages += [
            {"role": "user", "content": f"question <{4 * k}>"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{k}", "content": f"result <{4 * k + 2}>"},
            {"role": "assistant", "content": f"answer <{4 * k + 3}>"},
        ]
    return messages


@pytest.mark.parametrize(
    "transform",
    [
        Summarize(FakeModel("one"), facts=False, model_id="m"),
        Summarize(FakeModel("one"), facts=True, model_id="m", layout="standalone", source="raw"),
        KeepRecent(keep=("messages", 4)),
        Offload(min_tokens=200),
        Chain(Offload(min_tokens=200), Summarize(FakeModel("one"), facts=False, model_id="m")),
        Isolate(system="You are a helper.", instruction="Go on."),
    ],
    ids=lambda t: t.name,
)
def test_our_own_transforms_are_as_local_as_they_say(transform: Transform) -> None:
    """No random suffix, and for what is segment-local no random prefix, changes what they do."""
    report = check(transform)
    assert report.transform == transform.name and report.locality is transform.locality
    assert report.runs == 50 and report.changed >= 10 and report.failed == 0


def test_a_prefix_transform_that_reads_the_live_list_is_found() -> None:
    """It peeks at the caller's list, through a reference of its own: the smallest suffix is named."""
    held = history()
    peeks = Made(lambda request: f"{len(held)} messages in all")
    with pytest.raises(AssertionError, match=r"made declares prefix locality") as caught:
        check(peeks, messages=held)
    said = str(caught.value)
    assert "with 1 message behind it" in said and said.count("  added ") == 1
    assert "without:" in said and "with:" in said and "messages in all" in said


def test_a_prefix_transform_that_mentions_the_future_rarely_is_found() -> None:
    """Only what the assistant says later shows: the suffix is cut down to that one message."""
    held = history()

    def last_answer(request: TransformRequest) -> str:
        return next(m["content"] or "" for m in reversed(held) if m["role"] == "assistant")

    with pytest.raises(AssertionError) as caught:
        check(Made(last_answer), messages=held)
    assert "  added assistant: " in str(caught.value) and "  added user: " not in str(caught.value)


def test_a_segment_transform_that_reads_what_was_before_is_found() -> None:
    """It looks at the messages before its run: fine for a prefix transform, a lie for a segment-local one."""

    def opening(request: TransformRequest) -> str:
        return texts(request.before)

    assert check(Made(opening)).changed > 0
    with pytest.raises(AssertionError, match="made declares segment locality") as caught:
        check(Made(opening, locality=Locality.SEGMENT))
    assert "with 1 message before it" in str(caught.value)


def test_a_segment_transform_that_counts_messages_before_is_found() -> None:
    """Not their text, only their number, and only from three on."""
    with pytest.raises(AssertionError, match="segment locality"):
        check(Made(lambda request: str(len(request.before) // 3), locality=Locality.SEGMENT))


def test_a_transform_with_a_memory_is_found() -> None:
    """Two results for one request are no matter of locality, and are told from it."""
    drawn = random.Random(3)
    with pytest.raises(AssertionError, match="two applications to the same request differ"):
        check(Made(lambda request: str(drawn.random())))


def test_a_transform_that_edits_its_input_is_found() -> None:
    """The messages are the caller's own."""

    def edits(request: TransformRequest) -> str:
        request.messages[0]["content"] = "edited"
        return "x"

    with pytest.raises(AssertionError, match="changed the messages"):
        check(Made(edits), messages=history())


def test_a_transform_that_always_fails_proves_nothing() -> None:
    """Nothing was compared: that is not a pass."""

    def fails(request: TransformRequest) -> str:
        raise TransformError("never works")

    with pytest.raises(AssertionError, match="every one of 50 runs failed") as caught:
        check(Made(fails), messages=history())
    assert isinstance(caught.value.__cause__, TransformError)


def test_failing_for_the_sake_of_the_future_is_found() -> None:
    """An error is a result like another."""
    held = history()

    def fails(request: TransformRequest) -> str:
        if len(held) > 21:
            raise TransformError("too much")
        return "fine"

    with pytest.raises(AssertionError, match="it raised TransformError"):
        check(Made(fails), messages=held)


def test_a_future_transform_is_not_run() -> None:
    """It may depend on anything; the report says that nothing was compared."""
    made = Made(lambda request: "x", locality=Locality.FUTURE)
    report = check(made)
    assert (report.runs, made.requests) == (0, [])


def test_requests_are_as_the_core_builds_them() -> None:
    """Only finished history of the run and before it, with the latest user message kept out and still shown."""
    held = history()
    made = Made(lambda request: texts(request.messages))
    check(made, messages=held, runs=200)
    assert any(r.earlier_summary for r in made.requests)
    assert any(len(r.before) > 1 for r in made.requests)
    kept = [r for r in made.requests if r.shown is not None]
    assert kept and all(len(r.shown or ()) == len(r.messages) + 1 for r in kept)
    for request in made.requests:
        assert request.messages and request.before[0] is held[0] and request.store is not None
        own = [m for m in (*request.before, *request.messages) if CODEC.summary_text(m) is None]
        assert all(any(m is h for h in held) for m in own), "the run's messages are the caller's objects"
    raw = Made(lambda request: "x", source="raw")
    check(raw, messages=held, runs=200)
    assert not any(r.earlier_summary for r in raw.requests)


def test_a_request_of_the_core_is_among_them() -> None:
    """What a session gives a transform for a run, the checker gives it for the same run."""
    held, made = history(), Made(lambda request: "x")

    async def main() -> None:
        policy = Policy(made, trigger=("messages", 10), hard_limit=("messages", 99), land_at=("messages", 5))
        async with Runtime(clock=asyncio.get_running_loop().time) as runtime:
            handle = runtime.session("s", policy=policy).observe(held)
            assert handle is not None
            await handle.wait()

    def given(request: TransformRequest) -> tuple[Any, ...]:
        shown = None if request.shown is None else texts(request.shown)
        return texts(request.messages), texts(request.before), shown, request.earlier_summary, request.options

    run_virtual(main)
    (of_core,) = made.requests
    made.requests.clear()
    check(made, messages=held, runs=200)
    assert given(of_core) in map(given, made.requests)


def test_the_list_is_given_back_as_it_was() -> None:
    """Also when the check fails."""
    held = history()
    before = list(held)
    check(Made(lambda request: "x"), messages=held)
    assert all(a is b for a, b in zip(held, before, strict=True))
    with pytest.raises(AssertionError):
        check(Made(lambda request: str(len(held))), messages=held)
    assert all(a is b for a, b in zip(held, before, strict=True))


def test_one_seed_checks_one_thing() -> None:
    """The same requests with the same seed, others with another."""

    def seen(seed: int) -> list[str]:
        made = Made(lambda request: "x")
        check(made, seed=seed)
        return [texts(r.messages) for r in made.requests]

    assert seen(1) == seen(1) != seen(2)


def test_a_model_that_reads_marks_is_local() -> None:
    """A summariser over a fake model that writes down what it was given: covered is the run, no more."""
    model = FakeModel()
    report = check(Summarize(model, facts=False, model_id="m"), messages=history())
    assert report.changed == report.runs and model.seen <= marks(history())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runs": 0}, "runs=0"),
        ({"messages": [{"role": "user", "content": "x"}]}, "1 segments"),
        ({"messages": [{"role": "user", "content": "x"}] * 2}, "2 segments"),
        ({"codec": type("Other", (), {"name": "other"})()}, "codec 'other'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    """Named, with what is expected."""
    with pytest.raises(ConfigurationError, match=said):
        check(KeepRecent(), **options)
    with pytest.raises(ConfigurationError, match="transform="):
        check(object())
