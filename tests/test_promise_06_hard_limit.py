"""Promise 6: at the hard limit the wait is bounded and the view that comes back fits, or is the raw one by choice."""

from __future__ import annotations

import asyncio

import pytest

from helpers import (
    CODEC,
    A,
    Events,
    FakeSummarizer,
    H,
    S,
    T,
    chat,
    make_policy,
    make_runtime,
    marks,
    now,
    problems,
    same_objects,
    settle,
    summaries,
    tool_chat,
    virtual,
)
from smoothctx import HandleState, KeepRecent

LIMIT = 1700  # 0.85 of 2000


@pytest.mark.parametrize("mode", ["hang", "fail", "garbage", "empty", "long", "stubborn"])
@virtual
async def test_promise_06_the_fallback_always_fits(mode: str) -> None:
    """Whatever the model does, the view fits after at most ``max_wait``, and is a valid request."""
    model = FakeSummarizer(mode)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=7))
        began = now()
        view = await session.commit(tool_chat(9, size=60))
        assert now() - began <= 7.001
        assert sum(map(CODEC.estimate, view)) <= LIMIT
        assert not problems(view)
        assert session.receipts[-1].how == "fallback"
        assert runtime.counters.fallbacks == 1


@virtual
async def test_promise_06_promoted_in_time() -> None:
    """A result that comes within ``max_wait`` is used, and the receipt says how long the turn waited."""
    model = FakeSummarizer(delay=4)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=30))
        messages = chat(17, size=60)
        began = now()
        view = await session.commit(messages)
        receipt = session.receipts[-1]
        assert receipt.how == "promoted" and summaries(view) and marks(view) == marks(messages)
        assert now() - began == pytest.approx(4) and receipt.waited_s == pytest.approx(4)


@virtual
async def test_promise_06_promotion_jumps_the_queue() -> None:
    """The lookahead that a turn waits for runs before the ones that only look ahead."""
    model = FakeSummarizer(delay=10)
    async with make_runtime(concurrency=1) as runtime:
        policy = make_policy(model)
        for k in range(5):
            runtime.session(f"other{k}", policy=policy).observe(chat(11, size=60, first=1000 * k))
        session = runtime.session("s", policy=policy)
        began = now()
        await session.commit(chat(17, size=60))
        assert session.receipts[-1].how == "promoted"
        assert now() - began <= 20.001


@virtual
async def test_promise_06_no_wait_for_what_cannot_make_it() -> None:
    """When the usual duration says that it will not be done within ``max_wait``, the turn does not wait at all."""
    model = FakeSummarizer(delay=100)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=5))
        messages = chat(11, size=60)
        session.observe(messages)
        await settle(101)
        await session.commit(messages)
        assert session.receipts
        messages += chat(14, size=60, first=11, system=False)
        began = now()
        view = await session.commit(messages)
        assert now() == began and sum(map(CODEC.estimate, view)) <= LIMIT


@pytest.mark.parametrize("overrun", ["fallback", "raw"])
@virtual
async def test_promise_06_other_overruns_do_not_wait(overrun: str) -> None:
    """``"fallback"`` drops at once, ``"raw"`` sends what is there."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, overrun=overrun))
        messages = chat(17, size=60)
        began = now()
        view = await session.commit(messages)
        assert now() == began
        assert same_objects(view, messages) == (overrun == "raw")
        assert len(session.receipts) == (overrun == "fallback")


@virtual
async def test_promise_06_raw_still_commits_what_is_ready() -> None:
    """With ``overrun="raw"`` a ready result is used as ever."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, overrun="raw"))
        messages = chat(17, size=60)
        await session.commit(messages)
        await settle(5)
        assert summaries(await session.commit(messages))


@virtual
async def test_promise_06_the_fallback_goes_below_keep_if_it_must() -> None:
    """``keep`` of the fallback yields to the limit; whole segments go, oldest first."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        policy = make_policy(model, max_wait=0, fallback=KeepRecent(("messages", 100)))
        session = runtime.session("s", policy=policy)
        messages = chat(20, size=60)
        view = await session.commit(messages)
        assert sum(map(CODEC.estimate, view)) <= LIMIT
        assert same_objects(view[2:], messages[-len(view) + 2 :])


@virtual
async def test_promise_06_what_cannot_be_made_to_fit_goes_out_whole() -> None:
    """One message over the window: the view is the history, and a typed event says why."""
    async with make_runtime(on_event=(events := Events())) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("hang"), max_wait=1))
        messages = [S(), H("x", size=5000)]
        view = await session.commit(messages)
        assert same_objects(view, messages)
        assert events.of("view.oversized")


@virtual
async def test_promise_06_reserved_tokens_count() -> None:
    """Fits means: count plus ``reserved_tokens``."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session(
            "s", policy=make_policy(model, reserved_tokens=800, max_wait=0, land_at=("tokens", 1000))
        )
        view = await session.commit(chat(9, size=60))
        assert session.receipts[-1].how == "fallback"
        assert sum(map(CODEC.estimate, view)) + 800 <= LIMIT


@virtual
async def test_promise_06_a_fallback_stays_until_something_better_comes() -> None:
    """It does not flap: later turns see the same shortened view grow, then the summary supersedes it."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=1))
        messages = chat(17, size=60)
        one = await session.commit(messages)
        messages += [A("<900> more"), H("<901> and more")]
        two = await session.commit(messages)
        assert same_objects(two[: len(one)], one) and len(two) == len(one) + 2


@virtual
async def test_promise_06_a_result_that_is_still_preloading_is_used() -> None:
    """At the limit a finished summary is used even if its preload goes on: a cold commit is slower, never wrong."""

    class Binding:
        async def preload(self, view: object, **_: object) -> None:
            await asyncio.sleep(1e6)

        def request_options(self) -> dict[str, object]:
            return {}

        def transform_options(self, foreground: object, urgent: object) -> dict[str, object]:
            return {}

        def committed(self, warm: bool) -> None: ...

        def discarded(self) -> None: ...

        def close(self) -> None: ...

    class Engine:
        preload_by_default = True

        def bind(self, session_id: str) -> Binding:
            return Binding()

    model = FakeSummarizer(delay=2)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model), engine=Engine())
        messages = chat(17, size=60)
        began = now()
        view = await session.commit(messages)
        assert now() - began == pytest.approx(2) and summaries(view)
        assert session.receipts[-1].warm is False


@virtual
async def test_promise_06_after_every_failure_the_next_turn_works() -> None:
    """A cancelled wait, a failed model and a fallback in a row: the session goes on and counts them right."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=3))
        messages = chat(17, size=60)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await session.commit(messages)
        await session.commit(messages)
        assert session.receipts[-1].how == "fallback"
        live = session.lookahead
        assert live is None or live.state is HandleState.RUNNING
        messages += [A("x"), *[T("none", "y")][:0], H("z")]
        assert not problems(await session.commit(messages))
