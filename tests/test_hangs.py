"""A summariser that hangs: its own turns wait for it once, nobody else's wait at all, and it ends by its time limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers import A, Events, FakeSummarizer, H, Message, S, chat, make_policy, make_runtime, now, settle, virtual
from smoothctx import HandleState, Reason, Runtime
from smoothctx.engines.binding import Binding
from smoothctx.errors import ConfigurationError
from smoothctx.testing import FakeEngine


@virtual
async def test_a_turn_waits_only_once_for_the_same_summary() -> None:
    """At the hard limit the first turn waits its patience; the later ones fall back at once, until it is another."""
    events = Events()
    model = FakeSummarizer("hang")
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=5, timeout=100))
        messages: list[Message] = [S()]
        waits: list[float] = []
        for k in range(60):
            messages += [H(f"<{2 * k}>", size=55), A(f"<{2 * k + 1}>", size=55)]
            before = now()
            await session.commit(messages)
            waits.append(now() - before)
            session.observe(messages)
            await settle(1)
        fallbacks = len(events.of("fallback.applied"))
        assert fallbacks > 2 and model.calls == 1, "the limit was reached again and again, with one flight"
        assert [w for w in waits if w] == [pytest.approx(5.0)]
        assert len(events.of("lookahead.promoted")) == 1
        await settle(100)
        assert events.of("lookahead.failed")[0].data["reason"] == "timeout"


def test_a_synchronous_turn_waits_only_once_too() -> None:
    """The same for `commit_sync`: promoted and waited for once, however often the limit is reached."""
    events = Events()
    with Runtime.in_thread(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("hang"), max_wait=0.01))
        messages: list[Message] = [S()]
        for k in range(60):
            messages += [H(f"<{2 * k}>", size=55), A(f"<{2 * k + 1}>", size=55)]
            session.commit_sync(messages)
            session.observe(messages)
        assert len(events.of("fallback.applied")) > 2
        assert len(events.of("lookahead.promoted")) == 1


@virtual
async def test_a_turn_that_did_not_wait_leaves_the_wait_to_a_later_one() -> None:
    """`commit_now` falls back at once; that is no wait in vain."""
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=5))
        messages = chat(18, size=55)
        session.observe(messages)
        await model.started.wait()
        messages += chat(2, size=55, first=18, system=False)
        session.commit_now(messages)
        assert [r.how for r in session.receipts] == ["fallback"]
        lookahead = session.lookahead
        assert lookahead is not None and not lookahead.waited_out
        messages += chat(18, size=55, first=20, system=False)
        before = now()
        await session.commit(messages)
        assert now() - before == pytest.approx(5.0) and lookahead.waited_out
        model.release.set()


@virtual
async def test_promise_10_hung_summarisers_do_not_starve_other_sessions() -> None:
    """Both slots hang for their whole time limit: after a minute the healthy session has its summary."""
    hung, healthy = FakeSummarizer("hang"), FakeSummarizer(delay=1)
    async with make_runtime() as runtime:
        for k in range(2):
            runtime.session(f"hung{k}", policy=make_policy(hung)).observe(chat(12, size=55, first=100 * k))
        await settle(1)
        assert hung.running == 2
        session = runtime.session("healthy", policy=make_policy(healthy))
        messages = chat(12, size=55)
        handle = session.observe(messages)
        assert handle is not None
        await settle(57)
        assert handle.state is HandleState.PENDING
        await settle(5)
        assert handle.state is HandleState.READY and hung.running == 2, "the hung ones go on until their own limit"
        await session.commit(messages)
        assert [(r.how, r.waited_s) for r in session.receipts] == [("ready", 0.0)]


@virtual
async def test_promise_10_where_the_usual_duration_is_known_the_slot_is_free_earlier() -> None:
    """A session whose summaries take three seconds loses its slot after four times as long."""
    model, other = FakeSummarizer(delay=3), FakeSummarizer(delay=1)
    async with make_runtime(concurrency=1) as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(12, size=55)
        session.observe(messages)
        await settle(5)
        await session.commit(messages)
        assert session.receipts and session.usual_s == pytest.approx(3.0)
        model.mode = "hang"
        messages += chat(12, size=55, first=12, system=False)
        session.observe(messages)
        await settle(1)
        assert model.running == 1
        handle = runtime.session("other", policy=make_policy(other)).observe(chat(12, size=55))
        assert handle is not None
        await settle(10)
        assert handle.state is HandleState.PENDING
        await settle(4)
        assert handle.state is HandleState.READY and model.running == 1


@virtual
async def test_the_time_limit_of_a_summary_is_an_option() -> None:
    """`Policy(timeout=)`: the work ends then, as a failure with its reason."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("hang"), timeout=20))
        handle = session.observe(chat(12, size=55))
        assert handle is not None
        before = now()
        assert await handle.wait() is HandleState.FAILED
        assert handle.reason is Reason.TIMEOUT and now() - before == pytest.approx(20, abs=0.1)
    for wrong in (0, -1, True, None, float("inf")):
        with pytest.raises(ConfigurationError, match="timeout="):
            make_policy(FakeSummarizer(), timeout=wrong)


@virtual
async def test_promise_11_code_that_goes_on_when_it_is_cancelled_is_cancelled_once_and_left_behind() -> None:
    """A loop of retries that catches everything: it is not woken again and again, and the session prepares the next."""
    calls: list[float] = []
    away = asyncio.Event()

    async def model(messages: Any, *, max_tokens: int | None = None) -> str:
        while not away.is_set():
            calls.append(now())
            try:
                await asyncio.sleep(3600)
            except BaseException:
                try:
                    await asyncio.sleep(1)
                except BaseException:
                    pass
        return "A summary."

    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, timeout=10, overrun="raw"))
        messages = chat(12, size=55)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait(30) is HandleState.FAILED
        assert handle.reason is Reason.TIMEOUT and now() < 20 and len(calls) <= 3
        away.set()
        messages += [H("and now?"), A("yes")]
        again = session.observe(messages)
        assert again is not None and again is not handle
        assert await again.wait(30) is HandleState.READY


@virtual
async def test_promise_11_a_preload_that_goes_on_when_it_is_cancelled_is_left_behind() -> None:
    """Its result is there: the commit is cold, and the flight ends."""

    class Deaf(Binding):
        async def preload(self, view: Any, **_: Any) -> Any:
            while len(heard) < 3:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    heard.append(now())

    class Own(FakeEngine):
        def bind(self, session_id: str) -> Any:
            return Deaf(self, session_id)

    heard: list[float] = []
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=1), timeout=30), engine=Own())
        handle = session.observe(chat(12, size=55))
        assert handle is not None and await handle.wait(100) is HandleState.READY
        assert handle.artifact is not None and not handle.artifact.warm and len(heard) == 2 and now() < 50


@virtual
async def test_a_model_that_cancels_itself_is_a_failure() -> None:
    """Its client lost its connection: such a model rests as one that fails does, and is not asked with every turn."""
    model = FakeSummarizer("cancel")
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, overrun="raw"))
        messages = chat(12, size=55)
        for _ in range(12):
            await session.commit(messages)
            messages += [H("q"), A("a", size=5)]
            session.observe(messages)
            await settle(1)
        assert model.calls < 8 and events.of("lookahead.resting")
        assert {e.data["reason"] for e in events.of("lookahead.failed")} == {"failed"}


@virtual
async def test_a_preload_that_cancels_itself_costs_no_result() -> None:
    """The summary was paid for: it is committed, cold."""

    class Own(FakeEngine):
        async def prefill(self, messages: Any, **options: Any) -> Any:
            raise asyncio.CancelledError

    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model), engine=Own())
        messages = chat(12, size=55)
        session.observe(messages)
        await settle(20)
        await session.commit([*messages, H("next")])
        assert model.calls == 1 and [(r.how, r.warm) for r in session.receipts] == [("ready", False)]
        assert runtime.counters.wasted_tokens == 0
