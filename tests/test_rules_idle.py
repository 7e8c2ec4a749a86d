"""Idle time is used (B146, B199), and commits stay rare."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st

from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    Message,
    S,
    chat,
    coherent,
    fill,
    make_policy,
    make_runtime,
    marks,
    problems,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import ConfigurationError, HandleState, KeepRecent, Policy, Reason, Runtime, Speed
from smoothctx.pace import CROWDED_TURNS
from smoothctx.testing import FakeEngine
from virtual import run_virtual

#: over land_at (800 tokens of 2000), under the trigger (1200)
MIDDLE = 8


def idle_policy(model: Any, idle: float | None = 30.0, **options: Any) -> Policy:
    """Starts at 1200 tokens, or at rest from 800 on."""
    return make_policy(model, idle=idle, **options)


# -- the idle trigger ------------------------------------------------------------------------------------------------


@virtual
async def test_b146_no_turn_for_a_while_starts_a_lookahead() -> None:
    """Over ``land_at`` and under the trigger: nothing at first, then once the session rests. Without, never."""
    for idle, started in ((30.0, 1), (None, 0)):
        model = FakeSummarizer(delay=1.0)
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=idle_policy(model, idle))
            messages = chat(MIDDLE, size=60)
            await session.commit(messages[:-1])
            session.observe(messages)
            await settle(29.0)
            assert model.calls == 0
            await settle(1000.0)
            assert model.calls == started


@virtual
async def test_a_turn_ends_the_rest() -> None:
    """The time counts from the last observe; a turn that is under way is no rest, however long it takes."""
    model = FakeSummarizer(delay=1.0)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=idle_policy(model))
        messages = chat(MIDDLE, size=60)
        await session.commit(messages[:-1])
        session.observe(messages)
        await settle(20.0)
        messages.append(H("<900> more"))
        await session.commit(messages)
        await settle(500.0)  # a long model call
        assert model.calls == 0
        messages.append(A("<901> done"))
        session.observe(messages)
        await settle(29.0)
        assert model.calls == 0
        await settle(2.0)
        assert model.calls == 1


@virtual
async def test_a_turn_that_begins_again_ends_the_rest() -> None:
    """Its call is tried again, with no commit before it: nothing is started beside that call."""
    model = FakeSummarizer(delay=1.0)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=idle_policy(model))
        messages = chat(MIDDLE, size=60)
        session.observe(messages)
        await settle(20.0)
        session.turn_begins()
        await settle(500.0)
        assert model.calls == 0
        session.observe(messages)
        await settle(29.0)
        assert model.calls == 0
        await settle(2.0)
        assert model.calls == 1


@virtual
async def test_a_small_view_rests_undisturbed() -> None:
    """Nothing is over ``land_at``: nothing is started, now or later."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=idle_policy(model))
        session.observe(chat(3, size=60))
        await settle(10_000.0)
        assert model.calls == 0


@virtual
async def test_b199_what_is_ready_at_rest_is_decided_then() -> None:
    """The commit does not wait for the next prompt: receipt and event are there, the caller's list is as it was, and
    the next boundary sends that view with the new message behind the summary."""
    model, events = FakeSummarizer(delay=5.0), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=idle_policy(model))
        messages = chat(12, size=60)  # over the trigger
        await session.commit(messages[:-1])
        handle = session.observe(messages)
        held = list(messages)
        await settle(20.0)
        assert handle is not None and handle.state is HandleState.READY and not session.receipts
        await settle(20.0)
        assert handle.state is HandleState.COMMITTED and len(session.receipts) == 1
        assert session.receipts[0].time == pytest.approx(30.0) and events.of("view.committed")
        assert same_objects(messages, held)
        await settle(390.0)
        messages.append(H("<900> the next prompt"))
        view = await session.commit(messages)
        assert len(session.receipts) == 1 and summaries(view[1:2]) and view[-1] is messages[-1]
        assert marks(view) == marks(messages) and not problems(view)


@virtual
async def test_one_that_gets_ready_at_rest_is_decided_at_once() -> None:
    """Started at rest, committed at rest; a preload has warmed the view that is sent."""
    engine, model = FakeEngine(*["reply"] * 50, speed=Speed(2000.0, 100.0)), FakeSummarizer(delay=5.0)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=idle_policy(model), engine=engine)
        messages = chat(MIDDLE, size=60)
        view = await session.commit(messages[:-1])
        await engine.complete(view)
        session.observe(messages)
        await settle(60.0)
        assert len(session.receipts) == 1 and session.receipts[0].warm
        messages.append(H("<900> next"))
        view = await session.commit(messages)
        done = await engine.complete(view, max_tokens=4)
        assert done.usage.cached_tokens is not None
        assert done.usage.input_tokens - done.usage.cached_tokens <= engine.count(messages[-1:]) + 2 * 16


@virtual
async def test_an_edit_after_a_decision_at_rest() -> None:
    """The user comes back and regenerates from an early point: what was decided goes, nothing stale is sent."""
    model = FakeSummarizer(delay=1.0)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=idle_policy(model))
        messages = chat(12, size=60)
        await session.commit(messages[:-1])
        session.observe(messages)
        await settle(60.0)
        assert session.receipts
        other = [*messages[:6], H("<900> another question")]
        view = await session.commit(other)
        assert same_objects(view, other)
        assert marks(await session.commit([*messages, H("<901> back")])) == marks(messages) | {901}


@virtual
async def test_rewrite_mode_goes_on_from_a_decision_at_rest() -> None:
    """A caller that keeps the view: its list at the next boundary is the raw one, and the view replaces it then."""
    model = FakeSummarizer(delay=1.0)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=idle_policy(model))
        messages = chat(12, size=60)
        for k in range(6):
            messages = [*await session.commit(messages), A(f"<{900 + 2 * k}> ok", size=150)]
            session.observe(messages)
            await settle(60.0)
            messages = [*messages, H(f"<{901 + 2 * k}> go on", size=150)]
        view = await session.commit(messages)
        assert {m for m in marks(view) if m >= 900} == set(range(900, 912)) and len(session.receipts) >= 2
        assert len(summaries(view)) == 1 and not problems(view)


@virtual
async def test_the_commit_rule_holds_at_rest() -> None:
    """``"hard_limit"`` keeps the raw context as long as it fits, at rest too."""
    model = FakeSummarizer(delay=1.0)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=idle_policy(model, commit="hard_limit"))
        messages = chat(12, size=60)
        session.observe(messages)
        await settle(600.0)
        assert session.lookahead is not None and session.lookahead.state is HandleState.READY
        messages.append(H("<900> next"))
        assert same_objects(await session.commit(messages), messages)
        assert not session.receipts


@virtual
async def test_an_edit_in_place_at_rest_decides_nothing() -> None:
    """What was edited is not what was digested: it waits for the boundary, which reads it anew."""
    model, events = FakeSummarizer(delay=1.0), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=idle_policy(model))
        messages = chat(MIDDLE, size=60)
        session.observe(messages)
        messages[3]["content"] = fill("<777> edited", 60)
        await settle(600.0)
        assert model.calls == 0 and not events.of("error")
        view = await session.commit([*messages, H("<900>")])
        assert 777 in marks(view)


def test_a_closed_session_is_not_kept_by_its_timer() -> None:
    """Neither is a runtime: closing cancels the timers, and a forgotten session is collected."""

    async def main() -> None:
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=idle_policy(FakeSummarizer(), 1000.0))
            session.observe(chat(MIDDLE, size=60))
            await settle()
            assert len(runtime._timers) == 1
            await session.close()
            gone = weakref.ref(session)
            del session
            gc.collect()
            assert gone() is None
        assert not runtime._timers

    run_virtual(main)


def test_observe_from_other_threads() -> None:
    """The timer is set on the runtime's own loop, wherever the turn comes from."""
    decided: list[str] = []
    ready = threading.Event()

    def on_event(event: Any) -> None:
        decided.append(event.name)
        if event.name == "view.committed":
            ready.set()

    async def model(messages: list[Message], *, max_tokens: int | None = None) -> str:
        return "short"

    with Runtime.in_thread(on_event=on_event) as runtime:
        session = runtime.session("s", policy=idle_policy(model, 0.05))
        session.observe(chat(MIDDLE, size=60))
        assert ready.wait(30), decided
        view = session.commit_sync([*chat(MIDDLE, size=60), H("next")])
        assert summaries(view)


@pytest.mark.parametrize("wrong", [-1, True, "5", float("nan"), float("inf")])
def test_wrong_seconds_are_refused(wrong: Any) -> None:
    """By name and value."""
    with pytest.raises(ConfigurationError, match="idle="):
        idle_policy(FakeSummarizer(), wrong)


# -- hysteresis ------------------------------------------------------------------------------------------------------


@settings(max_examples=20, phases=(Phase.generate,))
@given(
    growth=st.lists(st.tuples(st.integers(5, 500), st.floats(0.0, 20.0)), min_size=20, max_size=40),
    delay=st.floats(0.0, 30.0),
    idle=st.sampled_from([None, 5.0]),
)
def test_commits_stay_rare(growth: list[tuple[int, float]], delay: float, idle: float | None) -> None:
    """Whatever grows how fast: two commits in a row within three turns happen at the hard limit only, and then it is
    said. Nothing waits below the limit, everything fits."""

    async def main() -> None:
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            policy = idle_policy(FakeSummarizer(delay=delay), idle, max_wait=10.0)
            session = runtime.session("s", policy=policy)
            messages: list[Message] = [S()]
            commits: list[tuple[int | None, bool]] = []
            apply = session._boundary.apply

            def noted(*args: Any, **kwargs: Any) -> None:
                commits.append((session._conversation.pace.since_commit, session.branch.fits(policy)))
                apply(*args, **kwargs)

            session._boundary.apply = noted  # type: ignore[method-assign]
            for turn, (size, rest) in enumerate(growth):
                messages.append(H(f"<{2 * turn}>", size=size))
                view = await session.commit(messages)
                assert sum(map(session.codec.estimate, view)) <= 1700
                messages.append(A(f"<{2 * turn + 1}>", size=size // 2))
                session.observe(messages)
                await settle(rest)
            crowded = [fits for since, fits in commits if since is not None and 0 < since < CROWDED_TURNS]
            assert not any(crowded), commits
            assert len(events.of("commit.crowded")) == len(crowded)
            coherent(session, runtime, live=int(session.lookahead is not None))

    run_virtual(main)


@virtual
async def test_a_commit_that_must_come_soon_is_said() -> None:
    """Two huge turns right after a commit: at the limit it comes all the same, with an event."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=0.5)))
        messages = chat(11, size=60)
        await session.commit(messages)
        session.observe(messages)
        await settle(1)
        messages += [H("<800> a", size=60)]
        await session.commit(messages)
        assert len(session.receipts) == 1 and not events.of("commit.crowded")
        messages += [A("<801> b", size=700), H("<802> c", size=700)]
        session.observe(messages[:-1])
        await settle(1)
        await session.commit(messages)
        assert len(session.receipts) >= 2
        said = events.of("commit.crowded")
        assert [e.data["turns"] for e in said] == [1]


@virtual
async def test_a_fallback_does_not_hold_the_summary_back() -> None:
    """A fallback is no commit of a result: what was late takes its place at the next turn."""
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=1.0))
        messages = chat(16, size=60)
        session.observe(messages)
        await settle(1)
        messages.append(H("<900>"))
        await session.commit(messages)
        assert session.receipts[-1].how == "fallback"
        model.release.set()
        await settle(1)
        messages += [A("<901>"), H("<902>")]
        view = await session.commit(messages)
        assert session.receipts[-1].how == "ready" and summaries(view)


@virtual
async def test_explicit_commits_are_the_callers_business() -> None:
    """``schedule_transform`` goes in whenever its caller says, and holds nothing else back."""
    async with make_runtime() as runtime:
        policy = Policy(
            KeepRecent(),
            trigger=("messages", 90),
            hard_limit=("messages", 99),
            land_at=("messages", 50),
            min_savings=0.0,
        )
        session, messages = runtime.session("s", policy=policy), chat(20)
        for k in range(3):
            handle = session.schedule_transform("keep_recent", messages, target_segments=range(4 * k, 4 * k + 4))
            assert await handle.wait(30) is HandleState.READY
            handle.commit(messages)
            assert handle.reason is not Reason.SUPERSEDED
            messages += [A(f"{k}"), H(f"{k}")]
        assert len(session.receipts) == 3
    assert asyncio.all_tasks() == {asyncio.current_task()}
