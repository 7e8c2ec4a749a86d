"""The runtime and what hangs on it: threads and short-lived loops, ``wrap``, sessions, forks, handles, closing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from helpers import (
    A,
    FakeSummarizer,
    H,
    Message,
    S,
    chat,
    coherent,
    make_policy,
    make_runtime,
    now,
    same_objects,
    settle,
    summaries,
    tool_chat,
    virtual,
)
from smoothctx import (
    ClosedError,
    ConfigurationError,
    HandleNotReady,
    HandleState,
    Isolate,
    KeepRecent,
    MemoryStore,
    Reason,
    Runtime,
    StaleHandle,
    segments,
)

# -- threads and loops -----------------------------------------------------------------------------------------


def test_commit_sync_from_several_threads() -> None:
    """Each thread has its own session on one runtime in a thread: all of them get their own summary."""
    views: dict[int, list[Message]] = {}

    with Runtime.in_thread() as runtime:
        policy = make_policy(FakeSummarizer(delay=0))

        def agent(k: int) -> None:
            session = runtime.session(f"s{k}", policy=policy)
            messages = chat(12, size=55, first=100 * k)
            session.commit_sync(messages)
            handle = session.lookahead
            if handle is not None:
                handle.wait_sync(20)
            views[k] = session.commit_sync(messages)

        threads = [threading.Thread(target=agent, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert runtime.counters.committed == 4
    assert sorted(views) == [0, 1, 2, 3]
    for k, view in views.items():
        assert f"<{200 * k}>" in summaries(view)[0] and f"<{200 * k + 400}>" not in summaries(view)[0]
    assert not [t for t in threading.enumerate() if t.name.startswith("smoothctx")]


def test_commit_sync_waits_at_the_hard_limit() -> None:
    """A synchronous turn over the limit waits for the promoted lookahead and gets its summary."""
    with Runtime.in_thread() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=0.05)))
        view = session.commit_sync(chat(17, size=60))
        assert summaries(view) and session.receipts[0].how == "promoted"
        assert session.receipts[0].waited_s > 0


def test_an_event_loop_per_request() -> None:
    """``asyncio.run`` for each turn against one runtime: the work of one request is committed by the next."""
    messages = chat(12, size=55)
    with Runtime.in_thread() as runtime:
        policy = make_policy(FakeSummarizer(delay=0))

        async def request() -> list[Any]:
            session = runtime.session("s", policy=policy)
            view = await session.commit(messages)
            if session.lookahead is not None:
                await session.lookahead.wait(20)
            return view

        assert same_objects(asyncio.run(request()), messages)
        assert summaries(asyncio.run(request()))
        assert runtime.counters.started == 1


# -- wrap --------------------------------------------------------------------------------------------------------


@virtual
async def test_wrap_makes_a_function_lookahead_aware() -> None:
    """It gets the view and its own arguments, its result comes back; ``session=`` keeps conversations apart."""
    seen: list[tuple[list[Any], int]] = []

    async def agent(messages: list[Any], temperature: int) -> str:
        """The agent."""
        seen.append((messages, temperature))
        return "reply"

    async with make_runtime() as runtime:
        call = runtime.wrap(agent, policy=make_policy(FakeSummarizer()))
        assert call.__name__ == "agent" and call.__doc__ == "The agent."
        messages = chat(12, size=55)
        assert await call(messages, 7, session="a") == "reply"
        await settle(5)
        assert await call(messages, temperature=8, session="a") == "reply"
        assert await call(messages[:3], 9, session="b") == "reply"
        assert same_objects(seen[0][0], messages) and summaries(seen[1][0]) and same_objects(seen[2][0], messages[:3])
        assert [t for _, t in seen] == [7, 8, 9]


@virtual
async def test_wrap_passes_on_what_the_function_raises() -> None:
    """The caller's own exception is the caller's, and the conversation goes on."""

    async def agent(messages: list[Any]) -> str:
        raise ZeroDivisionError

    async with make_runtime() as runtime:
        call = runtime.wrap(agent, policy=make_policy(FakeSummarizer()))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await call(chat(12, size=55))
        await settle(5)
        assert runtime.counters.started == 1
        with pytest.raises(ConfigurationError, match="wrap"):
            runtime.wrap(7, policy=make_policy(FakeSummarizer()))  # type: ignore[arg-type]


# -- sessions ----------------------------------------------------------------------------------------------------


@virtual
async def test_another_policy_for_an_open_id_is_an_error() -> None:
    """The same id gives the same session; another policy is refused until it is closed; tenants are apart."""
    async with make_runtime() as runtime:
        model = FakeSummarizer()
        policy = make_policy(model)
        session = runtime.session("s", policy=policy)
        assert runtime.session("s", policy=policy) is session
        other = make_policy(model, window=4000)
        with pytest.raises(ConfigurationError, match="'s' is open with another policy"):
            runtime.session("s", policy=other)
        assert runtime.session("s", policy=other, tenant="b") is not session
        await session.close()
        await session.close()
        assert runtime.session("s", policy=other) is not session


@virtual
async def test_sessions_end_by_number_and_by_age() -> None:
    """``max_sessions`` closes the least recently opened one, ``session_ttl`` those that were not used for long."""
    async with make_runtime(max_sessions=2, session_ttl=100) as runtime:
        policy = make_policy(FakeSummarizer("hang"))
        a, b = (runtime.session(k, policy=policy) for k in "ab")
        assert runtime.session("a", policy=policy) is a
        c = runtime.session("c", policy=policy)
        assert (a.closed, b.closed, c.closed) == (False, True, False)
        await settle(90)
        handle = c.observe(chat(12, size=55))
        await settle(90)
        d = runtime.session("d", policy=policy)
        assert (a.closed, c.closed, d.closed) == (True, False, False)
        await settle(90)
        runtime.session("e", policy=policy)
        assert c.closed and handle is not None and handle.reason is Reason.EXPIRED


@virtual
async def test_a_session_in_use_is_no_old_one_however_it_is_used() -> None:
    """By handles of its own alone, or observed only; and one in use keeps none of the others open."""
    async with make_runtime(session_ttl=100) as runtime:
        policy = make_policy(FakeSummarizer("hang"), overrun="raw")
        mine = runtime.session("mine", policy=policy)
        watched = runtime.session("watched", policy=policy)
        old = runtime.session("old", policy=policy)
        messages = chat(12, size=20)
        for _ in range(4):
            await settle(60)
            handle = mine.schedule_transform(KeepRecent(keep=("messages", 4)), messages)
            await settle(5)
            handle.commit(messages)
            messages = [*messages, *chat(6, size=40, first=len(messages), system=False)]
            watched.observe(messages)
        runtime.session("new", policy=policy)
        assert (mine.closed, watched.closed, old.closed) == (False, False, True)


@virtual
async def test_a_closed_runtime_opens_nothing() -> None:
    """Before it is entered and after it was closed there are no sessions, and it is entered once."""
    policy = make_policy(FakeSummarizer())
    runtime = make_runtime()
    with pytest.raises(ClosedError):
        runtime.session("s", policy=policy)
    async with runtime:
        with pytest.raises(ClosedError):
            await runtime.__aenter__()
    await runtime.aclose()
    with pytest.raises(ClosedError):
        runtime.session("s", policy=policy)
    with pytest.raises(ClosedError):
        await runtime.__aenter__()


@virtual
async def test_a_fork_starts_with_what_its_origin_holds_and_goes_its_own_way() -> None:
    """The fork's first view has the summary without another call; what happens to it stays with it."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(12, size=55)
        session.observe(messages)
        await settle(5)
        view = await session.commit(messages)
        fork = session.fork("t")
        assert fork is not session and await fork.commit(messages) == view
        assert model.calls == 1 and fork.receipts[0].how == "salvaged"
        await fork.commit([messages[0], H("elsewhere")])
        await fork.close()
        assert same_objects(await session.commit(messages), view)


@virtual
async def test_branches_say_what_is_held() -> None:
    """Held, current and in the view are three things: after the commit, after time travel, after closing."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(12, size=55)
        assert session.branches() == []
        session.observe(messages)
        await settle(5)
        (ready,) = session.branches()
        assert ready.current and not ready.in_view and ready.transform == "summarize"
        assert (ready.start, ready.end) == (1, 21) and ready.tokens > 0
        await session.commit(messages)
        assert [(b.current, b.in_view) for b in session.branches()] == [(True, True)]
        await session.commit([messages[0], H("elsewhere")])
        assert [(b.current, b.in_view) for b in session.branches()] == [(False, False)]
        await session.close()
        assert session.branches() == []


# -- explicit work -------------------------------------------------------------------------------------------------


@virtual
async def test_schedule_transform_rewrites_the_segments_that_were_named() -> None:
    """Two segments in the middle become a summary; what stands around them stays, object for object."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), window=40_000, min_savings=0.0))
        messages = tool_chat(6, size=60)
        cut = segments(messages)[3:6]
        handle = session.schedule_transform("summarize", messages, target_segments=[3, 4, 5])
        assert handle.explicit and await handle.wait() is HandleState.READY
        view = await session.commit(messages)
        assert handle.state is HandleState.COMMITTED and handle.receipt is session.receipts[0]
        assert len(summaries(view)) == 1
        assert same_objects(view[: cut[0].start], messages[: cut[0].start])
        rest = len(messages) - cut[-1].end
        assert same_objects(view[-rest:], messages[-rest:])


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("nonsense", {}, "kind='nonsense'"),
        ("summarize", {"target_segments": []}, "contiguous"),
        ("summarize", {"target_segments": [0, 2]}, "contiguous"),
        ("summarize", {"target_segments": [2, 1]}, "contiguous"),
        ("summarize", {"target_segments": [-1, 0]}, "segments, numbered from 0"),
        ("summarize", {"target_segments": [90]}, "segments, numbered from 0"),
        ("summarize", {"target_segments": ["0"]}, "contiguous"),
        ("summarize", {"target_segments": [True]}, "contiguous"),
        ("summarize", {"target_segments": [23]}, "newest segment"),
        ("keep_recent", {"colour": 1}, "colour"),
        (KeepRecent(("messages", 2)), {"keep": 1}, "keep"),
    ],
)
@virtual
async def test_schedule_transform_refuses_in_the_callers_words(kind: Any, options: dict[str, Any], says: str) -> None:
    """Unknown kinds, wrong options and runs that may not be rewritten raise at once and start nothing."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        with pytest.raises(ConfigurationError, match=says):
            session.schedule_transform(kind, chat(12, size=55), **options)
        assert runtime.counters.started == 0
        await session.close()
        with pytest.raises(ClosedError):
            session.schedule_transform("summarize", chat(12, size=55))


@virtual
async def test_isolate_returns_the_opening_and_leaves_the_parent_alone() -> None:
    """Its handle's commit gives the child's messages; the parent's view and receipts do not change by it."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), window=40_000))
        messages = chat(4, size=55)
        before = await session.commit(messages)
        handle = session.schedule_transform(Isolate(instruction="Do it.", select=lambda m: m[-2:]), messages)
        with pytest.raises(HandleNotReady):
            handle.commit(messages)
        await handle.wait()
        opening = handle.commit(messages)
        assert opening[-1] == H("Do it.") and same_objects(opening[:-1], messages[-2:])
        assert handle.state is HandleState.COMMITTED and handle.commit(messages) == opening
        assert same_objects(await session.commit(messages), before) and not session.receipts
        coherent(session, runtime)


@virtual
async def test_an_equal_isolate_scheduled_again_gives_its_opening_again() -> None:
    """An opening is nobody's replacement: it is not taken for one when the same work is asked for twice."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), window=40_000))
        messages = chat(4, size=55)
        for _ in range(2):
            handle = session.schedule_transform(Isolate(instruction="Do it.", select=lambda m: m[-2:]), messages)
            await handle.wait()
            assert handle.commit(messages)[-1] == H("Do it.")
        child = Isolate(instruction="Do it.", select=lambda m: m[-2:])
        for _ in range(2):
            handle = session.schedule_transform(child, messages)
            await handle.wait()
            assert handle.commit(messages)[-1] == H("Do it.")
        assert not session.receipts and not session.branches()
        coherent(session, runtime)


# -- handles -------------------------------------------------------------------------------------------------------


@virtual
async def test_waiting_for_a_handle_never_cancels_its_work() -> None:
    """Time out, or cancel the wait: the model call goes on and its result can be used."""
    model = FakeSummarizer(delay=10)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(12, size=55)
        handle = session.observe(messages)
        assert handle is not None
        with pytest.raises(TimeoutError):
            await handle.wait(1)
        assert now() == pytest.approx(1) and not handle.done()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(handle.wait())
            await settle(1)
            waiting.cancel()
        assert waiting.cancelled()
        assert model.cancelled == 0 and handle.state is HandleState.RUNNING
        assert await handle.wait() is HandleState.READY and now() == pytest.approx(10)
        assert summaries(handle.commit(messages)) and model.calls == 1
        assert await handle.wait(0) is HandleState.COMMITTED


@virtual
async def test_a_handle_commits_as_the_session_would_or_says_why_not() -> None:
    """``HandleNotReady`` before its time and after a failure, ``StaleHandle`` for another history, else the view."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(12, size=55)
        handle = session.observe(messages)
        assert handle is not None
        with pytest.raises(HandleNotReady, match="only a ready one"):
            handle.commit(messages)
        await handle.wait()
        view = handle.commit([*messages, A("<900>"), H("<901>")])
        assert summaries(view) and len(session.receipts) == 1 and handle.receipt is session.receipts[0]
        assert same_objects(await session.commit([*messages, *view[-2:]]), view)
        with pytest.raises(StaleHandle):
            handle.commit([S(), H("another history")])
        model.mode = "fail"
        failing = runtime.session("f", policy=session.policy).observe(chat(12, size=55, first=500))
        assert failing is not None and await failing.wait() is HandleState.FAILED
        with pytest.raises(HandleNotReady, match="failed"):
            failing.commit(messages)


@virtual
async def test_a_ready_handle_of_an_edited_history_is_stale() -> None:
    """The covered part was edited after the result came: nothing is applied and nothing is charged twice."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(12, size=55)
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        edited = [messages[0], H("<700> edited", size=55), *messages[2:]]
        with pytest.raises(StaleHandle):
            handle.commit(edited)
        assert handle.state is HandleState.DISCARDED and not session.receipts
        coherent(session, runtime, live=int(session.lookahead is not None))


# -- closing -------------------------------------------------------------------------------------------------------


@virtual
async def test_aclose_with_drain_lets_lookaheads_finish_into_the_store() -> None:
    """What runs and what waits is finished and stored; the next process does not pay for it again."""

    class Kept(MemoryStore):
        async def aclose(self) -> None:
            """Outlives the runtime, as a server would."""

    store, model = Kept(clock=lambda: 0.0), FakeSummarizer(delay=10)
    policy = make_policy(model, model_id="m")
    histories = [chat(12, size=55, first=100 * k) for k in range(3)]
    runtime = make_runtime(store=store, concurrency=1)
    async with runtime:
        for k, messages in enumerate(histories):
            runtime.session(f"s{k}", policy=policy).observe(messages)
        await settle(1)
        await runtime.aclose(drain=True)
        assert now() == pytest.approx(30) and model.calls == 3 and model.cancelled == 0
    async with make_runtime(store=store) as later:
        for k, messages in enumerate(histories):
            session = later.session(f"s{k}", policy=policy)
            session.observe(messages)
            await settle(1)
            assert summaries(await session.commit(messages))
        assert model.calls == 3
