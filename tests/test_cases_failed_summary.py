"""Empty or failed summaries, as the agent sees them: the history is whole, the turn goes on, the status is true.

Rows of this class that are not here (the transform itself has them in ``test_transform_summarize``):
B66, B67, B68, B74, B75. B174 (a remote compaction service) is an engine's matter: what the core does of it, the
fallback, is in ``test_b174_...``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from driving import drive, fast, small_policy
from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    Message,
    S,
    T,
    chat,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    valid_request,
    virtual,
)
from smoothctx import EngineOverloaded, HandleState, OpenAIMessages, Policy, Reason, Summarize
from smoothctx.transforms.model import ModelReply

CODEC = OpenAIMessages()


class RateLimited(FakeSummarizer):
    """Answers 429 so many times, then with a summary."""

    def __init__(self, times: int) -> None:
        super().__init__(delay=0.1)
        self.times = times

    async def __call__(self, messages: list[Message], *, max_tokens: int | None = None) -> Any:
        if self.times > 0:
            self.times -= 1
            self.inputs.append([])
            raise EngineOverloaded("HTTP 429: error text that must never become a summary", status=429)
        return await super().__call__(messages, max_tokens=max_tokens)


@pytest.mark.parametrize("times", [1, 4, 1000])
@virtual
async def test_b60_a_rate_limited_model_leaves_the_history_intact(times: int) -> None:
    """429 a few times or for ever: no commit of an error, the turns go on raw, retries are bounded."""
    messages = chat(12, size=55)
    frozen = copy.deepcopy(messages)
    model = RateLimited(times)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        for _ in range(10):
            view = await session.commit(messages)
            session.observe(messages)
            assert "429" not in str(view)
            assert summaries(view) or same_objects(view, messages)
            await settle(120)
        assert messages == frozen
        if times <= 4:
            assert summaries(await session.commit(messages))
        else:
            assert not session.receipts
            assert runtime.counters.failed >= 1
            assert model.calls <= 60


@virtual
async def test_b60_at_the_hard_limit_a_failing_model_gives_the_fallback() -> None:
    """The request fits, is valid, and holds nothing of the error."""
    messages = chat(30, size=55)
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("fail")))
        view = await session.commit(messages)
        assert valid_request(view)
        assert sum(map(CODEC.estimate, view)) <= 1700
        assert not summaries(view)
        assert [r.how for r in session.receipts] == ["fallback"]
        assert events.of("lookahead.failed")


@virtual
async def test_b61_no_user_message_in_the_covered_part_is_no_problem() -> None:
    """One question and twenty tool cycles: a summary is written of the cycles, and the question stays."""
    messages = [H("<0> the question", size=50)]
    for k in range(20):
        messages += [A(f"<{10 * k + 1}>", f"c{k}", size=50), T(f"c{k}", f"<{10 * k + 2}>", size=50)]
    model = fast()
    turns = await drive(messages, make_policy(model), every=False)
    last = turns[-1].view
    assert summaries(last)
    assert any(m is messages[0] for m in last)
    assert valid_request(last)
    assert all(valid_request(i) for i in model.inputs)
    assert marks(model.inputs[0]) - {0}


@virtual
async def test_b62_a_last_message_over_the_budget_never_gives_an_empty_request() -> None:
    """The newest result is larger than the summariser's window: nothing empty is ever asked, what goes out is valid."""
    messages = [*chat(8, size=55), H("<900> q"), A("<901>", "big"), T("big", "<902>", size=6000)]
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        view = await session.commit(messages)
        assert valid_request(view)
        assert view[-1] is messages[-1]
        messages += [A("<903> read"), H("<904> next"), A("<905> ok"), H("<906> more")]
        await settle(60)
        view = await session.commit(messages)
        await settle(60)
        messages += [A("<907>"), H("<908>")]
        view = await session.commit(messages)
        assert sum(map(CODEC.estimate, view)) <= 1700
        assert all(i and any(marks([m]) for m in i) for i in model.inputs)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", Reason.INVALID_OUTPUT),
        ("   \n", Reason.INVALID_OUTPUT),
        ("<think>only thinking, no text</think>", Reason.INVALID_OUTPUT),
        ("<tool_call>{}</tool_call>", Reason.INVALID_OUTPUT),
        (ModelReply(text="", tool_calls=True), Reason.INVALID_OUTPUT),
        (ModelReply(text="half a sent", finish_reason="length"), Reason.INVALID_OUTPUT),
        (ModelReply(text="no", finish_reason="content_filter"), Reason.INVALID_OUTPUT),
        (None, Reason.FAILED),
        ({"text": "no"}, Reason.FAILED),
        (b"bytes", Reason.FAILED),
        ("word " * 4000, Reason.INVALID_OUTPUT),
        ("word " * 360, Reason.NOT_SMALLER),
    ],
)
@virtual
async def test_b63_b67_b68_b72_useless_answers_change_nothing(answer: Any, reason: Reason) -> None:
    """No text, thinking only, markup, a cut text, another type, far too long: never a summary, always a typed end."""

    async def model(messages: list[Message], *, max_tokens: int | None = None) -> Any:
        return answer

    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, min_savings=0.6))
        handle = session.observe(messages)
        assert handle is not None
        state = await handle.wait()
        assert state in (HandleState.FAILED, HandleState.DISCARDED)
        assert handle.reason is reason
        assert same_objects(await session.commit(messages), messages)
        assert not session.receipts


@pytest.mark.parametrize("turns", [40, 120])
@virtual
async def test_b73_a_history_of_many_windows_is_summarised_in_parts(turns: int) -> None:
    """Twice the window, and six times: the first turn fits, is valid, and lost no part of its input."""
    messages = chat(turns, size=55)
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session(
            "s", policy=Policy(Summarize(model, keep=("messages", 4), facts=False, max_tokens=200), context_window=2000)
        )
        view = await session.commit(messages)
        assert valid_request(view)
        assert sum(map(CODEC.estimate, view)) <= 1700
        assert summaries(view)
        covered = 1 + 2 * turns - (len(view) - 2)
        read = set().union(*(marks(i) for i in model.inputs))
        assert read >= marks(messages[1:covered]) - marks(view[2:])
        assert max(sum(map(CODEC.estimate, i)) for i in model.inputs) <= 2000


@virtual
async def test_b174_a_transform_that_never_works_is_replaced_by_the_local_fallback() -> None:
    """Every kind of trouble at the hard limit ends with a request that fits, after at most ``max_wait``."""
    for mode in ("fail", "hang", "garbage", "empty", "long", "cancel"):
        messages = chat(30, size=55)
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=make_policy(FakeSummarizer(mode), max_wait=7.0))
            start = runtime.now()
            view = await session.commit(messages)
            assert runtime.now() - start <= 7.0, mode
            assert sum(map(CODEC.estimate, view)) <= 1700, mode
            assert valid_request(view), mode
            messages += [A("<900> a"), H("<901> q")]
            assert same_objects((await session.commit(messages))[: len(view)], view), mode


@virtual
async def test_a_placeholder_or_an_empty_system_is_never_committed() -> None:
    """System only, empty, one message: nothing is started, the view is the history."""
    model = fast()
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        for k, messages in enumerate([[], [S()], [S(), S("two")], [H("x" * 9000)], [S(), H("x" * 9000)]]):
            session = runtime.session(f"s{k}", policy=make_policy(model))
            assert same_objects(await session.commit(messages), messages)
            assert session.observe(messages) is None
            await settle(1)
    assert model.calls == 0
    assert not events.of("error")


@virtual
async def test_a_failed_summary_is_not_in_the_way_of_the_next() -> None:
    """After a failure the same session succeeds as soon as the model does."""
    model = FakeSummarizer("fail", delay=0.1)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.FAILED
        model.mode = "answer"
        await settle(300)
        messages += [A("<900>"), H("<901>")]
        session.observe(messages)
        await settle(10)
        assert summaries(await session.commit(messages))


@virtual
async def test_small_windows_and_messages_of_every_size_never_break_a_request() -> None:
    """A sweep of sizes around every limit."""
    for size in (1, 10, 100, 400, 900, 1600, 1700, 2500):
        messages = [m for k in range(8) for m in (H(f"<{2 * k}>", size=size), A(f"<{2 * k + 1}>", size=size))]
        for turn in await drive(
            messages,
            small_policy(fast(), trigger=("tokens", 1200), hard_limit=("tokens", 1700), land_at=("tokens", 800)),
            every=False,
        ):
            total = sum(map(CODEC.estimate, turn.view))
            assert total <= 1700 or len(turn.view) <= 3, (size, total, len(turn.view))
