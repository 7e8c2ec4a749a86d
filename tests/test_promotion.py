"""Promotion: what a turn waits for is done sooner, and the wait is bounded by what is predicted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from helpers import A, FakeSummarizer, H, S, chat, make_policy, make_runtime, now, settle, virtual
from smoothctx import HandleState, Isolate, KeepRecent, Policy, Speed, Summarize
from smoothctx.engines import Capabilities, OpenAIEngine
from smoothctx.testing import FakeEngine


def slow_engine(**options: Any) -> FakeEngine:
    """Evaluates a hundred tokens a second."""
    return FakeEngine("A summary.", speed=Speed(100.0, 20.0), **options)


def policy_on(engine: FakeEngine, **options: Any) -> Policy:
    """Summaries by this engine, cold."""
    options.setdefault("preload_kv", False)
    return Policy(Summarize(engine, keep=("messages", 4), max_tokens=64, facts=False), context_window=4000, **options)


async def time_of(*, promoted: bool, priority: bool) -> tuple[float, FakeEngine]:
    """A summary that stands in the engine's queue behind ten requests of others: when is it there?"""
    engine = slow_engine(priority=priority)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy_on(engine), engine=engine)
        async with asyncio.TaskGroup() as group:
            for k in range(10):
                flood = [S(), H(f"{k} of another program", size=400)]
                group.create_task(engine.complete(flood, max_tokens=1, priority=10))
            await settle(1)
            handle = session.observe(chat(20, size=80))
            assert handle is not None
            await settle(1)
            assert len(engine.calls) == 11 and engine.calls[10].prefill_s is None, "it waits there"
            if promoted:
                handle.promote()
            assert await handle.wait(300) is HandleState.READY
            return now(), engine


@virtual
async def test_a_promoted_summary_is_done_sooner_than_the_same_one_unpromoted() -> None:
    """The request that waits in the engine's queue is sent again, once, at the promoted priority."""
    began = now()
    unpromoted, _ = await time_of(promoted=False, priority=True)
    begun = now()
    promoted, engine = await time_of(promoted=True, priority=True)
    assert promoted - begun < (unpromoted - began) / 1.5
    first, again = engine.calls[10:]
    assert (first.outcome, first.options["priority"]) == ("cancelled", 20)
    assert (again.outcome, again.options["priority"], first.messages == again.messages) == ("done", 1, True)


@virtual
async def test_promise_06_a_wait_is_predicted_by_what_the_policys_own_transform_took() -> None:
    """Openings and rewrites without a model end at once; a turn at the limit waits for the summary all the same."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=6), max_wait=30.0))
        messages = chat(5, size=80)
        await session.commit(messages)
        for k in range(4):
            for other in (Isolate(instruction=f"task {k}"), KeepRecent(keep=("messages", 4))):
                handle = session.schedule_transform(other, messages)
                assert await handle.wait(30) is HandleState.READY
                handle.discard()
        messages = chat(14, size=80)
        began = now()
        await session.commit(messages)
        assert session.receipts[-1].how == "promoted" and now() - began == pytest.approx(6, abs=0.5)


@virtual
async def test_what_was_committed_before_its_preload_ended_teaches_how_long_it_takes() -> None:
    """Else only the fast ones would count, and the next lookahead would start too late again."""
    engine = FakeEngine(speed=Speed(10.0, 20.0))
    async with make_runtime() as runtime:
        policy = make_policy(FakeSummarizer(delay=6), max_wait=30.0)
        session = runtime.session("s", policy=policy, engine=engine)
        await session.commit(chat(14, size=80))
        (receipt,) = session.receipts
        assert receipt.how == "promoted" and not receipt.warm
        assert session.usual_s == pytest.approx(6, abs=0.5)


@virtual
async def test_a_trigger_at_the_hard_limit_prepares_nothing() -> None:
    """It asks for rewrites in line: each one is waited for, however long they are known to take."""
    engine = FakeEngine(speed=Speed(1_000.0, 20.0))
    limit = ("fraction", 0.85)
    async with make_runtime() as runtime:
        policy = make_policy(FakeSummarizer(delay=6), max_wait=30.0, trigger=limit, hard_limit=limit)
        session = runtime.session("s", policy=policy, engine=engine)
        messages = [S()]
        for k in range(60):
            messages = [*messages, H(f"<{k}> question", size=60)]
            await session.commit(messages)
            messages = [*messages, A(f"<{k}> answer", size=60)]
            session.observe(messages)
            await asyncio.sleep(1)
        assert len(session.receipts) > 2
        assert {r.how for r in session.receipts} == {"promoted"}


@virtual
async def test_no_request_is_sent_again_where_that_cannot_help() -> None:
    """Without priorities on the server the one that waits there goes on."""
    _, engine = await time_of(promoted=True, priority=False)
    assert len(engine.calls) == 11 and engine.calls[10].outcome == "done"
    assert "priority" not in engine.calls[10].options


@virtual
async def test_what_has_begun_is_not_sent_again() -> None:
    """A request whose answer comes already is left alone, and one that was sent as promoted is not sent twice."""
    engine = FakeEngine("word " * 50, speed=Speed(10_000.0, 10.0), priority=True)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy_on(engine), engine=engine)
        handle = session.observe(chat(20, size=80))
        assert handle is not None
        await settle(2)
        assert engine.calls[0].output_tokens > 0
        handle.promote()
        assert await handle.wait(60) is HandleState.READY and len(engine.calls) == 1
        other = runtime.session("other", policy=policy_on(engine), engine=engine)
        await other.commit(chat(30, size=80, first=50))
        priorities = [c.options["priority"] for c in engine.calls]
        assert priorities[0] == 20 and set(priorities[1:]) == {1}
        assert all(c.outcome == "done" for c in engine.calls)


class Reasoning(httpx.AsyncByteStream):
    """Ten seconds of reasoning, then the summary."""

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        for k in range(11):
            delta = {"reasoning_content": "hm"} if k < 10 else {"content": "A summary."}
            yield f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()
            await asyncio.sleep(1)
        yield b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


@virtual
async def test_what_reasons_already_is_not_sent_again() -> None:
    """A token of reasoning is one: what the model has thought so far is not thrown away."""
    priorities: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        priorities.append(json.loads(request.content)["priority"])
        return httpx.Response(200, stream=Reasoning())

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    engine = OpenAIEngine("http://x", "m", client=client, clock=now)
    engine.capabilities = Capabilities(flavour="vllm", priority="lower", priority_sure=True, prefix_caching=True)
    policy = Policy(
        Summarize(engine, keep=("messages", 4), max_tokens=64, facts=False), context_window=4000, preload_kv=False
    )
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy, engine=engine)
        handle = session.observe(chat(20, size=80))
        assert handle is not None
        await settle(3)
        assert priorities == [20]
        handle.promote()
        assert await handle.wait(60) is HandleState.READY and priorities == [20]


@virtual
async def test_preloads_of_other_sessions_give_way() -> None:
    """Until the promoted summary is there no chunk of a preload goes out; then it goes on."""
    engine = slow_engine()
    async with make_runtime(concurrency=2) as runtime:
        other = runtime.session("other", policy=policy_on(engine, preload_kv=True), engine=engine)
        preloading = other.observe(chat(20, size=80, first=100))
        assert preloading is not None
        while not any(call.max_tokens == 1 for call in engine.calls):
            await settle(0.5)
        session = runtime.session("s", policy=policy_on(engine, max_wait=300.0), engine=engine)
        began = now()
        await session.commit(chat(30, size=80))
        ended = now()
        assert session.receipts[-1].how == "promoted"
        session.observe(chat(30, size=80))
        assert await preloading.wait(300) is HandleState.READY
        chunks = [call.arrived_s for call in engine.calls if call.max_tokens == 1]
        assert not [at for at in chunks if began < at < ended] and [at for at in chunks if at >= ended]


@virtual
async def test_a_promoted_work_needs_no_slot_of_a_lookahead() -> None:
    """It runs beside as many lookaheads as there may be."""
    model = FakeSummarizer(delay=10)
    async with make_runtime(concurrency=1) as runtime:
        policy = make_policy(model)
        for k in range(5):
            runtime.session(f"other{k}", policy=policy).observe(chat(11, size=60, first=1000 * k))
        await settle(1)
        session = runtime.session("s", policy=policy)
        await session.commit(chat(17, size=60))
        assert session.receipts[-1].how == "promoted" and session.receipts[-1].waited_s == pytest.approx(10)
        assert model.most_running == 2


@virtual
async def test_promise_06_the_wait_is_predicted() -> None:
    """Summaries took 4 s: one that hangs is waited for 16 s, not the whole ``max_wait``; then a fallback fits."""
    model = FakeSummarizer(delay=4)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=300.0))
        messages = chat(11, size=60)
        session.observe(messages)
        await settle(5)
        await session.commit(messages)
        assert session.receipts[-1].how == "ready"
        model.mode = "hang"
        messages += chat(14, size=60, first=11, system=False)
        began = now()
        await session.commit(messages)
        assert session.receipts[-1].how == "fallback" and now() - began == pytest.approx(16)


@virtual
async def test_promise_06_what_nearly_made_it_is_waited_for() -> None:
    """Twice as long as usual is within the margin."""
    model = FakeSummarizer(delay=4)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(11, size=60)
        session.observe(messages)
        await settle(5)
        await session.commit(messages)
        model.delay = 8
        messages += chat(14, size=60, first=11, system=False)
        began = now()
        await session.commit(messages)
        assert session.receipts[-1].how == "promoted" and now() - began == pytest.approx(8)
