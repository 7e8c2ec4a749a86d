"""Promise 13: background calls run outside the foreground run's context, and sessions do not hear of each other."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from helpers import (
    Events,
    FakeSummarizer,
    Message,
    chat,
    make_policy,
    make_runtime,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, Runtime, Usage

RUN: ContextVar[str] = ContextVar("RUN", default="nobody")


class Witness(FakeSummarizer):
    """A summariser that notes which run it is part of, and says that it is one of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.runs: list[str] = []

    async def __call__(self, messages: list[Message], *, max_tokens: int | None = None) -> Any:
        self.runs.append(RUN.get())
        RUN.set("the background")
        return await super().__call__(messages, max_tokens=max_tokens)


@pytest.mark.parametrize("way", ["observe", "commit", "at the limit", "schedule"])
@virtual
async def test_promise_13_a_call_does_not_see_the_turns_context(way: str) -> None:
    """Set by the turn after the runtime was opened: not visible in the model call; nor is the model's in the turn."""
    model = Witness()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(17 if way == "at the limit" else 12, size=55)
        token = RUN.set("the foreground")
        try:
            if way == "observe":
                session.observe(messages)
            elif way == "schedule":
                session.schedule_transform("summarize", messages)
            else:
                await session.commit(messages)
            await settle(5)
            assert summaries(await session.commit(messages))
            assert model.runs == ["nobody"]
            assert RUN.get() == "the foreground"
        finally:
            RUN.reset(token)


@virtual
async def test_promise_13_calls_do_not_see_each_others_context() -> None:
    """What one background call sets is not there in the next one, on the same worker or another."""
    model = Witness()
    async with make_runtime(concurrency=1) as runtime:
        for k in range(3):
            runtime.session(f"s{k}", policy=make_policy(model)).observe(chat(12, size=55, first=100 * k))
        await settle(20)
        assert model.runs == ["nobody"] * 3


def test_promise_13_a_call_on_a_thread_of_its_own_does_not_see_the_callers_context() -> None:
    """The same through ``Runtime.in_thread``: the caller's context stays with the caller."""
    with Runtime.in_thread() as runtime:
        model = Witness(delay=0)
        token = RUN.set("the foreground")
        try:
            handle = runtime.session("s", policy=make_policy(model)).observe(chat(12, size=55))
            assert handle is not None
            assert handle.wait_sync(10) is HandleState.READY
        finally:
            RUN.reset(token)
    assert model.runs == ["nobody"]


@virtual
async def test_promise_13_a_failing_call_reaches_no_handler_of_the_application() -> None:
    """It is an event and a state: the loop's exception handler and the turn hear nothing."""
    heard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("fail")))
        messages = chat(12, size=55)
        assert await session.commit(messages) == messages
        await settle(10)
    assert events.of("lookahead.failed")
    assert heard == []


@virtual
async def test_promise_13_events_and_receipts_name_their_own_session_only() -> None:
    """Two sessions of one runtime: each event carries the session of its handle, each receipt the own cost."""
    events = Events()
    models = {name: FakeSummarizer() for name in "ab"}
    models["a"].usage = Usage(input_tokens=100, output_tokens=20, calls=1)
    models["b"].usage = Usage(input_tokens=7, output_tokens=3, calls=1)
    async with make_runtime(on_event=events) as runtime:
        owner, sessions = {}, {}
        histories = {name: chat(12, size=55, first=100 * k) for k, name in enumerate("ab")}
        for name, messages in histories.items():
            sessions[name] = runtime.session(name, policy=make_policy(models[name]), tenant=f"tenant-{name}")
            handle = sessions[name].observe(messages)
            assert handle is not None
            owner[handle.id] = name
        await settle(5)
        for name, messages in histories.items():
            await sessions[name].commit(messages)
            assert [r.usage.total_tokens for r in sessions[name].receipts] == [120 if name == "a" else 10]
        told = [e for e in events if "handle" in e.data]
        assert len(told) >= 8
        assert all(e.session == owner[e.data["handle"]] for e in told)
        assert all(e.tenant == f"tenant-{e.session}" for e in events)
        assert [(e.session, e.data["usage"].total_tokens) for e in events.of("usage")] == [("a", 120), ("b", 10)]
