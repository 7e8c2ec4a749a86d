"""Cancellation, shutdown and latency: every lookahead ends in a typed state, and no turn waits for one.

Rows of these classes that are not here:

| id | why |
| --- | --- |
| B39, B142, B143 | stream ends and deliveries are the framework's; that our calls take no time is here |
| B146 | an idle trigger: work starts at the trigger, which is before any idle time; with ``idle``: test_rules_idle.py |
| B199 | without ``idle`` a view changes at a boundary only; with it: test_rules_idle.py; the order: ``test_b199_...`` |
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import anyio
import pytest

from driving import fast
from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    chat,
    make_policy,
    make_runtime,
    now,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, OpenAIMessages, Policy, Reason, Summarize, Transform, TransformRequest
from smoothctx.transforms.base import Locality, Rewrite


@virtual
async def test_b38_a_lookahead_that_nobody_holds_is_not_collected() -> None:
    """No reference is kept by the caller; after a collection it still ends and is committed."""
    messages = chat(12, size=55)
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        session.observe(messages)
        await model.started.wait()
        gc.collect()
        model.release.set()
        await settle(1)
        assert summaries(await session.commit(messages))


@virtual
async def test_b43_b150_a_summariser_that_hangs_ends_and_a_new_start_works() -> None:
    """It hangs for ever: the work ends by its own timeout as FAILED, its task is cancelled, and the next one runs."""
    messages = chat(12, size=55)
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.FAILED
        assert handle.reason is Reason.TIMEOUT
        assert model.running == 0
        assert same_objects(await session.commit(messages), messages)
        model.mode = "answer"
        await settle(600)
        messages += [A("<900>"), H("<901>")]
        again = session.observe(messages)
        assert again is not None
        assert await again.wait() is HandleState.READY
        assert summaries(await session.commit(messages))


@pytest.mark.parametrize("drain", [True, False])
@virtual
async def test_b49_a_one_shot_script_may_wait_for_the_work_or_leave_it(drain: bool) -> None:
    """``aclose(drain=True)`` lets it finish into the store; ``aclose()`` cancels it. Nothing runs afterwards."""
    store = FlakyStore()
    model = FakeSummarizer(delay=20)
    messages = chat(12, size=55)
    runtime = make_runtime(store=store)
    async with runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        handle = session.observe(messages)
        assert handle is not None
        await model.started.wait()
        await runtime.aclose(drain=drain)
        assert handle.state in (HandleState.DISCARDED, HandleState.READY)
        assert model.running == 0
        assert any(k.startswith("artifact/") for _, k in store.puts) is drain
        assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_b54_an_idle_session_ends_in_a_typed_state_and_the_result_is_there_on_the_next_wake() -> None:
    """Ready while nobody was there for hours: it is applied at the next turn."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=60)))
        handle = session.observe(messages)
        assert handle is not None
        await anyio.sleep(5 * 3600)
        assert handle.done()
        assert not session.receipts
        messages.append(H("<900> I am back"))
        view = await session.commit(messages)
        assert summaries(view)
        assert handle.state is HandleState.COMMITTED


@virtual
async def test_b54_closed_sessions_leave_no_work_running() -> None:
    """Close, eviction and shutdown each give their own reason."""
    messages = chat(12, size=55)
    for how, reason in (
        ("close", Reason.SESSION_CLOSED),
        ("evict", Reason.EVICTED),
        ("ttl", Reason.EXPIRED),
        ("aclose", Reason.SHUTDOWN),
    ):
        model = FakeSummarizer("hold")
        async with make_runtime(max_sessions=1, session_ttl=100) as runtime:
            policy = make_policy(model)
            session = runtime.session("s", policy=policy)
            handle = session.observe(messages)
            assert handle is not None
            await model.started.wait()
            if how == "close":
                await session.close()
            elif how == "evict":
                runtime.session("t", policy=policy)
            elif how == "ttl":
                await anyio.sleep(101)
                runtime.session("t", policy=policy)
            else:
                await runtime.aclose()
            await settle()
            assert (handle.state, handle.reason) == (HandleState.DISCARDED, reason)
            assert model.running == 0
            assert session.observe(messages) is None
            assert same_objects(await session.commit(messages), messages)


@virtual
async def test_b147_a_cancelled_lookahead_commits_nothing() -> None:
    """Cancelled after the first of two parts: no part of it is ever in a view."""
    messages = chat(40, size=55)
    model = FakeSummarizer(delay=10)
    async with make_runtime() as runtime:
        session = runtime.session(
            "s",
            policy=Policy(
                Summarize(model, keep=("messages", 4), facts=False, max_tokens=200), context_window=2000, overrun="raw"
            ),
        )
        handle = session.observe(messages)
        assert handle is not None
        await settle(15)
        assert model.calls == 2
        handle.discard()
        await settle(100)
        assert (handle.state, handle.reason) == (HandleState.DISCARDED, Reason.CANCELLED)
        assert model.running == 0
        assert not session.receipts
        assert not session.branches()


@virtual
async def test_b149_promise_11_a_cancelled_turn_is_cancelled_and_the_work_goes_on() -> None:
    """A turn that waits at the hard limit is cancelled by its caller: the lookahead is not."""
    messages = chat(20, size=55)
    model = FakeSummarizer(delay=10)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        with anyio.move_on_after(3) as scope:
            await session.commit(messages)
        assert scope.cancelled_caught
        assert session.lookahead is not None
        calls = model.calls
        assert await session.lookahead.wait() is HandleState.READY
        assert model.calls >= calls
        view = await session.commit(messages)
        assert summaries(view)


@virtual
async def test_b149_background_work_never_cancels_the_foreground() -> None:
    """A model that raises ``CancelledError`` by itself ends its lookahead, not the agent."""
    messages = chat(20, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("cancel"), max_wait=5.0))
        view = await session.commit(messages)
        assert len(view) < len(messages)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@pytest.mark.parametrize("mode", ["hang", "hold", "fail", "garbage"])
@virtual
async def test_b39_b48_b142_b143_promise_05_no_turn_below_the_limit_takes_any_time(mode: str) -> None:
    """Whatever the summariser does, commit and observe return in the same instant."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(mode)))
        for k in range(4):
            start = now()
            assert await session.commit(messages)
            session.observe(messages)
            assert now() == start
            await anyio.sleep(1)
            messages += [A(f"<{900 + k}>"), H(f"<{950 + k}>")]


@virtual
async def test_b145_every_message_is_counted_once() -> None:
    """Fifty turns: one call of the counter per new message, and a few per commit for what it made."""
    counted: dict[int, int] = {}
    codec = OpenAIMessages()
    keep: list[Any] = []

    def counter(messages: list[Message]) -> int:
        for m in messages:
            keep.append(m)
            counted[id(m)] = counted.get(id(m), 0) + 1
        return sum(map(codec.estimate, messages))

    messages: list[Message] = []
    async with make_runtime() as runtime:
        session = runtime.session(
            "s",
            policy=make_policy(
                fast(),
                token_counter=counter,
                trigger=("tokens", 10**6),
                hard_limit=("tokens", 10**7),
                land_at=("tokens", 10**5),
            ),
        )
        for k in range(50):
            messages.append(H(f"<{2 * k}>", size=10))
            await session.commit(messages)
            messages.append(A(f"<{2 * k + 1}>", size=10))
            session.observe(messages)
    assert [counted[id(m)] for m in messages] == [1] * len(messages)


@virtual
async def test_b146_work_starts_at_the_trigger_and_is_done_in_the_idle_time() -> None:
    """The reply that reaches the trigger starts the work: by the next question it is ready, and nobody waited."""
    messages = chat(9, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=30)))
        waited = 0.0
        for k in range(9, 30):
            messages.append(H(f"<{2 * k}>", size=55))
            start = now()
            await session.commit(messages)
            waited += now() - start
            messages.append(A(f"<{2 * k + 1}>", size=55))
            session.observe(messages)
            await anyio.sleep(60)
        assert waited == 0
        assert len(session.receipts) >= 2
        assert all(r.how == "ready" and r.waited_s == 0 for r in session.receipts)


@virtual
async def test_b199_the_newest_user_message_stands_behind_the_summary() -> None:
    """A summary that was ready long before the prompt is applied at its turn, in canonical order."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        session.observe(messages)
        await anyio.sleep(400)
        messages.append(H("<900> prompt"))
        view = await session.commit(messages)
        assert summaries([view[1]])
        assert view[-1] is messages[-1]
        assert same_objects(view[2:], messages[-(len(view) - 2) :])


@virtual
async def test_a_transform_of_ones_own_that_swallows_cancellation_cannot_block_closing() -> None:
    """``aclose`` ends although the transform refuses to stop at once."""

    class Slow:
        name = "slow"
        locality = Locality.PREFIX
        fingerprint = "slow"
        keep = ("messages", 2)

        async def apply(self, request: TransformRequest) -> Rewrite:
            try:
                await anyio.sleep(10_000)
            except asyncio.CancelledError:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(1)
            return Rewrite(messages=[])

    assert isinstance(Slow(), Transform)
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=Policy(Slow(), context_window=2000))
        handle = session.observe(chat(12, size=55))
        assert handle is not None
        await settle(1)
        start = now()
        await runtime.aclose()
        assert now() - start < 30
        assert (handle.state, handle.reason) == (HandleState.DISCARDED, Reason.SHUTDOWN)
