"""Infinite loops, cost, prefix cache and observability.

Rows of these classes that are not here:

| id | why |
| --- | --- |
| B175, B176, B181-B186, B189, B190, B192 | preload and aligned requests: the engines' tests |
| B187 | a lint for volatile prefixes belongs to the command line; what a changing prefix does is in ``test_b193_...`` |
| B119, B121 | streams and callbacks are the framework's |
"""

from __future__ import annotations

import json
from typing import Any

import anyio
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
    coherent,
    make_policy,
    make_runtime,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, OpenAIMessages, Reason, Usage

CODEC = OpenAIMessages()


@virtual
async def test_b53_b152_compacting_again_without_anything_new_starts_nothing() -> None:
    """The same history, commit after commit: one summary, one model call, the same objects every time."""
    messages = chat(12, size=55)
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        session.observe(messages)
        await settle(5)
        first = await session.commit(messages)
        for _ in range(20):
            assert same_objects(await session.commit(messages), first)
            session.observe(messages)
            await settle(5)
        assert model.calls == 1
        assert len(session.receipts) == 1


@virtual
async def test_b78_nothing_eligible_with_the_trigger_true_starts_nothing() -> None:
    """One huge message, or only what must stay: no lookahead, no call, one event that says why."""
    for messages in ([H("<0>", size=1500)], [S(), H("<0>", size=1500), A("<1>", "1")], [S("s" * 6000), H("<0>")]):
        events, model = Events(), fast()
        async with make_runtime(on_event=events) as runtime:
            session = runtime.session("s", policy=make_policy(model))
            for _ in range(10):
                assert same_objects(await session.commit(messages), messages)
                assert session.observe(messages) is None
                await settle(1)
        assert model.calls == 0
        assert len(events.of("nothing_to_rewrite")) == 1


@virtual
async def test_b78_promise_07_a_result_that_does_not_shrink_is_not_asked_for_again() -> None:
    """A model that only repeats: it is asked once for this prefix, and again only when there is clearly more."""
    messages = chat(12, size=55)
    model = FakeSummarizer(delay=0.1, text="word " * 620)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_tokens=1024, overrun="fallback"))
        for k in range(30):
            await session.commit(messages)
            session.observe(messages)
            await settle(30)
            messages += [A(f"<{900 + k}>"), H(f"<{950 + k}>")]
        assert runtime.counters.stale == {Reason.NOT_SMALLER: 1}
        assert runtime.counters.started <= 3
        coherent(session, runtime)


@virtual
async def test_b81_an_open_breaker_refuses_nobody() -> None:
    """The transform fails until it rests: small prompts go out raw, and after its rest it is tried again."""
    model = FakeSummarizer("fail", delay=0.1)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        for _ in range(20):
            view = await session.commit(messages)
            assert same_objects(view, messages)
            session.observe(messages)
            await settle(5)
        failed = model.calls
        assert failed < 60
        model.mode = "answer"
        await settle(3600)
        session.observe(messages)
        await settle(5)
        assert summaries(await session.commit(messages))


@virtual
async def test_b84_a_decision_is_made_once_and_gives_the_same_bytes() -> None:
    """Three turns on one session: one rewrite, and byte for byte the same prefix in every request."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        session.observe(messages)
        await settle(5)
        first = json.dumps(await session.commit(messages))
        for k in range(3):
            messages += [A(f"<{900 + k}> a"), H(f"<{950 + k}> q")]
            now = json.dumps(await session.commit(messages))
            assert now.startswith(first[:-1])
            session.observe(messages)
            await settle(5)
        assert len(session.receipts) == 1


@virtual
async def test_b84_the_fallback_and_offloaded_entries_are_as_sticky() -> None:
    """What was dropped or offloaded once stays so, with the same bytes, until something better supersedes it."""
    messages = [*chat(20, size=55), A("<800>", "big"), T("big", "<801>", size=900)]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("fail"), max_message_tokens=300))
        first = json.dumps(await session.commit(messages))
        receipts = len(session.receipts)
        for k in range(3):
            messages += [A(f"<{900 + k}> a"), H(f"<{950 + k}> q")]
            now = json.dumps(await session.commit(messages))
            assert now.startswith(first[:-1])
            await settle(5)
        assert len(session.receipts) == receipts


@virtual
async def test_b177_many_tiny_tool_pairs_are_not_worth_a_commit() -> None:
    """Thirty tiny pairs in a large window: nothing is started, nothing is rewritten."""
    messages: list[Message] = [S(), H("<0> task")]
    for k in range(30):
        messages += [A(None, f"c{k}"), T(f"c{k}", "ok")]
    model = fast()
    turns = await drive(messages, make_policy(model, window=8000), every=False)
    assert model.calls == 0
    assert all(same_objects(t.view, t.held) for t in turns)


@virtual
async def test_b179_b194_prepared_early_applied_late_but_never_too_late() -> None:
    """With ``commit="hard_limit"`` a result that is ready waits while the raw view fits, and goes in when it must."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast(), commit="hard_limit"))
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        k = 0
        while sum(map(CODEC.estimate, messages)) + 120 < 1700:
            assert same_objects(await session.commit(messages), messages)
            messages += [A(f"<{900 + k}>", size=40), H(f"<{950 + k}>", size=40)]
            k += 1
        messages += [A("<990>", size=100), H("<991>", size=100)]
        view = await session.commit(messages)
        assert summaries(view)
        assert handle.state is HandleState.COMMITTED
        assert session.receipts[0].waited_s == 0


@virtual
async def test_b194_promise_09_an_edit_that_re_bills_more_than_it_saves_waits() -> None:
    """A small saving in front of a long cached tail waits for the hard limit, where it is necessary."""
    messages = [H("<0>", size=400), A("<1>", size=10), *chat(10, size=55, first=5, system=False)]
    async with make_runtime() as runtime:
        session = runtime.session(
            "s",
            policy=make_policy(
                fast(),
                keep=20,
                trigger=("tokens", 1300),
                hard_limit=("tokens", 1900),
                land_at=("tokens", 1250),
                min_savings=0.1,
            ),
        )
        await session.commit(messages)
        session.observe(messages)
        await settle(5)
        assert same_objects(await session.commit(messages), messages)
        messages += [A("<90>", size=200), H("<91>", size=200)]
        view = await session.commit(messages)
        assert len(view) < len(messages)


@virtual
async def test_b193_a_prefix_that_changes_every_turn_wastes_little() -> None:
    """A system prompt with the time in it: nothing stale is ever sent, and work for dead prefixes is cancelled."""
    model = FakeSummarizer(delay=30)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        for k in range(20):
            messages = [S(f"It is {k} o'clock."), *chat(12, size=55, system=False)]
            view = await session.commit(messages)
            assert view[0] is messages[0]
            session.observe(messages)
            await anyio.sleep(5)
        assert not session.receipts
        assert runtime.counters.stale[Reason.BRANCH_DIVERGED] >= 18
        assert model.running <= 1


@virtual
async def test_b171_b173_usage_of_every_background_call_is_reported_and_by_its_own_model() -> None:
    """Usage events and counters add up; the agent's model is never asked."""
    model = fast()
    model.usage = Usage(input_tokens=100, output_tokens=20, calls=1)
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model))
        session.observe(messages)
        await settle(5)
        await session.commit(messages)
        assert runtime.counters.usage == Usage(input_tokens=100, output_tokens=20, calls=1)
        (event,) = events.of("usage")
        assert event.data["usage"].total_tokens == 120
        assert session.receipts[0].usage.total_tokens == 120


@virtual
async def test_b171_usage_of_refused_and_wasted_work_is_reported_too() -> None:
    """A result that was refused or dropped has been paid for all the same."""
    messages = chat(12, size=55)
    model = FakeSummarizer("answer", delay=0.1, text="word " * 360)
    model.usage = Usage(input_tokens=100, output_tokens=20, calls=1)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, min_savings=0.6))
        session.observe(messages)
        await settle(5)
        assert runtime.counters.usage.total_tokens >= 120
        assert runtime.counters.wasted_tokens >= 120


@pytest.mark.parametrize("mode", ["fail", "empty", "garbage"])
@virtual
async def test_b172_a_failure_is_reported_as_one(mode: str) -> None:
    """State, reason, event and counters say that it failed; nothing says that it succeeded."""
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(mode)))
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.FAILED
        assert handle.reason in (Reason.FAILED, Reason.INVALID_OUTPUT)
        assert isinstance(handle.error, Exception)
        assert handle.receipt is None
        assert [e.data["handle"] for e in events.of("lookahead.failed")] == [handle.id]
        assert not events.of("lookahead.ready")
        assert runtime.counters.failed == 1
        coherent(session, runtime)


@virtual
async def test_b06_a_receipt_counts_the_messages_that_are_really_absent() -> None:
    """Pairs moved the cut and the question stayed inside: the receipt says how many messages the view lacks."""
    for overrun in ("promote", "fallback"):
        messages: list[Any] = [S(), H("<0> q", size=80)]
        for k in range(9):
            messages += [A(f"<{k}>", f"c{k}", size=80), T(f"c{k}", f"<{k}>", size=80)]
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=make_policy(fast(), overrun=overrun, window=1600, keep=2))
            view = await session.commit(messages)
            absent = [m for m in messages if not any(m is v for v in view)]
            (receipt,) = session.receipts
            assert receipt.messages_replaced == len(absent)
            assert receipt.tokens_before - receipt.tokens_after == receipt.saved_tokens > 0


@virtual
async def test_b156_at_most_what_was_asked_for_is_dropped() -> None:
    """101 messages of which 70 are to stay: at most 31 go, by the fallback and by a summary."""
    for overrun in ("fallback", "promote"):
        messages = [m for k in range(51) for m in (H(f"<{2 * k}>"), A(f"<{2 * k + 1}>"))][:101]
        policy = small_policy(
            fast(),
            keep=("messages", 70),
            trigger=("messages", 90),
            hard_limit=("messages", 100),
            land_at=("messages", 80),
            overrun=overrun,
        )
        async with make_runtime() as runtime:
            view = await runtime.session("s", policy=policy).commit(messages)
            kept = [m for m in view if any(m is x for x in messages)]
            assert len(messages) - len(kept) <= 31
            assert len(view) < len(messages)
