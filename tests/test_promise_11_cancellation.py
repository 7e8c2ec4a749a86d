"""Promise 11: a cancelled turn is cancelled and starts nothing; after ``aclose`` nothing runs."""

from __future__ import annotations

import asyncio

import pytest

from helpers import (
    FakeSummarizer,
    FlakyStore,
    H,
    chat,
    coherent,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, Reason


def ours() -> list[str]:
    """Names of the tasks that belong to a runtime."""
    names = [t.get_name() for t in asyncio.all_tasks()]
    return [n for n in names if n.startswith(("smoothctx", "lookahead", "store."))]


@virtual
async def test_promise_11_cancelling_a_turn_that_waits_at_the_limit() -> None:
    """The turn raises ``CancelledError``; no further model call is made, and the next turn gets the result."""
    model = FakeSummarizer("hold")
    messages = chat(17, size=60)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(session.commit(messages))
            await settle(1)
            assert not turn.done() and model.calls == 1
            turn.cancel()
        assert turn.cancelled()
        await settle(5)
        assert model.calls == 1 and model.cancelled == 0
        assert not session.receipts
        model.release.set()
        view = await session.commit(messages)
        assert summaries(view) and marks(view) == marks(messages)
        assert model.calls == 1
        coherent(session, runtime)


@virtual
async def test_promise_11_many_cancelled_turns_share_one_call() -> None:
    """A caller that retries its turn with a short timeout never starts a second model call."""
    model = FakeSummarizer(delay=10)
    messages = chat(17, size=60)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        for _ in range(9):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await session.commit(messages)
        assert model.calls == 1
        assert summaries(await session.commit(messages))
        assert model.calls == 1 and len(session.receipts) == 1
        coherent(session, runtime)


@virtual
async def test_promise_11_a_turn_cancelled_while_the_store_is_asked() -> None:
    """The first turn of a process is cancelled inside its short look at the store: cancelled, and the next works."""
    store = FlakyStore(mode="hang")
    messages = chat(12, size=55)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), model_id="m"))
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(session.commit(messages))
            await asyncio.sleep(0.001)
            assert not turn.done()
            turn.cancel()
        assert turn.cancelled()
        assert runtime.counters.started == 0
        assert same_objects(await session.commit(messages), messages)


@virtual
async def test_promise_11_a_discarded_handle_cancels_its_call() -> None:
    """``discard`` reaches the model call itself, and the session can start again."""
    model = FakeSummarizer("hold")
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        handle = session.observe(messages)
        assert handle is not None
        await settle()
        handle.discard()
        await settle()
        assert model.running == 0 and model.cancelled == 1
        assert handle.state is HandleState.DISCARDED and handle.reason is Reason.CANCELLED
        handle.discard()
        assert runtime.counters.stale == {Reason.CANCELLED: 1}
        assert session.observe(messages) is not None


@pytest.mark.parametrize("mode", ["hang", "hold", "answer"])
@virtual
async def test_promise_11_after_aclose_no_task_and_no_call_is_left(mode: str) -> None:
    """Running and queued lookaheads end with a typed reason; no task of ours stays and no call is made later."""
    model = FakeSummarizer(mode, delay=50)
    runtime = make_runtime(concurrency=2)
    async with runtime:
        policy = make_policy(model)
        handles = [runtime.session(f"s{k}", policy=policy).observe(chat(12, size=55, first=100 * k)) for k in range(6)]
        await settle(1)
        assert model.running == 2 and ours()
    assert ours() == []
    assert model.running == 0
    assert all(h is not None and h.state is HandleState.DISCARDED and h.reason is Reason.SHUTDOWN for h in handles)
    calls = model.calls
    await settle(1000)
    assert model.calls == calls == 2
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_promise_11_aclose_while_a_turn_waits_at_the_limit() -> None:
    """Another task closes the runtime: the waiting turn ends at once with a usable view, and nothing runs on."""
    model = FakeSummarizer("hang")
    messages = chat(17, size=60)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=1000))
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(session.commit(messages))
            await settle(1)
            began = asyncio.get_running_loop().time()
            await runtime.aclose()
        assert asyncio.get_running_loop().time() - began < 10
        assert turn.result()[-1] is messages[-1]
        assert ours() == [] and model.running == 0
        assert session.observe([*messages, H("more")]) is None
