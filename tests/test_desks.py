"""Where summarisers write on slots: one after the other, in nobody else's place, and nothing of it is lost or leaks."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

import slotted
from helpers import A, H, S, chat, make_runtime, settle, virtual
from slotted import SlidingEngine, SlottedEngine, ask, beside, sliding
from smoothctx import AdmitAll, EngineOverloaded, EngineRefused, Finish, HandleState, Policy, Summarize
from smoothctx.economics import Speed
from smoothctx.engines.aligned import CHECK_S, COPY_S, GAP_WAIT_S, SEAT_WAIT_S, STRAYS
from smoothctx.engines.preload import Preloader
from smoothctx.engines.slots import SlotBinding
from smoothctx.foreground import Foreground
from smoothctx.testing import FakeEngine
from smoothctx.urgency import ASIDE_S

TOKENS = 200


summarizing = partial(slotted.summarizing, max_tokens=TOKENS)


def summaries(engine: SlidingEngine) -> list[Any]:
    """The calls that asked for a summary."""
    return [c for c in engine.calls if c.max_tokens == TOKENS]


HISTORY = [S("rule " * 300), *chat(26, size=100)]


async def begun(runtime: Any, engine: SlidingEngine, name: str = "s", **options: Any) -> Any:
    """A session whose agent has answered ``HISTORY[:-1]``."""
    session = runtime.session(name, policy=summarizing(engine, **options), engine=engine)
    await ask(session, engine, [*HISTORY[:-1]])
    return session


@virtual
async def test_two_summaries_of_a_session_never_meet_in_a_slot() -> None:
    """The copy for the first one failed: the second one does not copy over it, nor move the agent into it, while it is
    at work there."""
    engine = sliding(*["word " * 40] * 4)
    copy, failed = engine.post_json, []

    async def once(path: str, body: Any) -> Any:
        if not failed:
            failed.append(path)
            raise EngineRefused("no", status=400)
        return await copy(path, body)

    engine.post_json = once  # type: ignore[method-assign]
    binding, view, options = await beside(engine)
    async with asyncio.TaskGroup() as group:
        for cut in (16, 8):
            group.create_task(engine.complete([*view[:cut], H("Summarise.")], max_tokens=TOKENS, **options))
    for slot in range(4):
        there = sorted((c.arrived_s, c.ended_s) for c in engine.calls if c.options["id_slot"] == slot)
        assert all(one[1] <= other[0] for one, other in pairwise(there)), (slot, there)
    turn = await engine.complete([*view, H("next")], max_tokens=1, **binding.request_options())
    assert turn.usage.cached_tokens is not None and turn.usage.input_tokens - turn.usage.cached_tokens < 30
    binding.close()
    assert engine.free() == 4


@virtual
async def test_promise_05_a_slot_in_which_a_summary_is_written_is_nobody_elses() -> None:
    """The session that began it closes; it goes on for a fork. A new session gets another slot."""
    engine = sliding(*["word " * 50] * 4)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine, context_window=100_000)
        session.turn_over()
        handle = session.schedule_transform("summarize", HISTORY)
        fork = session.fork("fork")
        shared = fork.schedule_transform("summarize", HISTORY)
        assert shared.flight is handle.flight
        await settle(0.3)
        (summary,) = summaries(engine)
        assert summary.outcome == "running"
        await session.close()
        new = runtime.session("new", policy=summarizing(engine), engine=engine)
        assert new.request_options()["id_slot"] not in (summary.options["id_slot"], fork.request_options()["id_slot"])
        assert await shared.wait() is HandleState.READY and summary.outcome == "done"
        await fork.close()
        assert engine.free() == 3
    assert engine.free() == 4


@virtual
async def test_promise_06_a_turn_that_waits_hurries_the_work_that_another_session_began() -> None:
    """Its fork is at the hard limit; the session that started the work has a long turn of its own, for which the
    summary would wait."""
    engine = sliding()
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine)
        fork = session.fork("fork")
        async with session.foreground() as call:
            handle = session.schedule_transform("summarize", HISTORY)
            call.first_token()
            await settle(1)
            assert not summaries(engine), "it waits for its own session's call"
            shared = fork.observe(HISTORY)
            assert shared is not None and shared.flight is handle.flight
            assert handle.state is HandleState.RUNNING
            await ask(fork, engine, [*HISTORY, H("next " * 3000)])
        assert fork.receipts[0].how == "promoted" and fork.receipts[0].waited_s < 3


@virtual
async def test_promise_05_without_a_spare_slot_a_summary_takes_its_own_agents() -> None:
    """Two sessions on two slots. Without a slot named the server would choose one: the other agent's."""
    engine = sliding(slots=2)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine)
        other = await begun(runtime, engine, "other", context_window=100_000)
        handle = session.observe(HISTORY)
        assert handle is not None
        await settle(SEAT_WAIT_S - 1)
        assert not summaries(engine), "it waits for a slot for a while"
        await settle(5)
        assert handle.flight.artifact is not None
        assert [c.options["id_slot"] for c in summaries(engine)] == [0]
        call = await ask(other, engine, [*HISTORY, H("next")])
        assert call.options["id_slot"] == 1 and call.input_tokens - call.cached_tokens < 120


@virtual
async def test_a_summary_waits_for_a_slot_that_is_given_back() -> None:
    """The other session closes."""
    engine = sliding(slots=2)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine)
        other = await begun(runtime, engine, "other", context_window=100_000)
        handle = session.observe(HISTORY)
        assert handle is not None
        await settle(SEAT_WAIT_S - 1)
        await other.close()
        assert await handle.wait() is HandleState.READY and session.request_options()["id_slot"] == 1
        assert summaries(engine)[0].cached_tokens > 0.9 * summaries(engine)[0].input_tokens


@virtual
async def test_a_standalone_summary_is_in_no_agents_way() -> None:
    """It extends no agent's prompt, but it needs a place all the same."""
    engine = sliding()
    async with make_runtime() as runtime:
        session = await begun(runtime, engine, layout="standalone")
        other = await begun(runtime, engine, "other", context_window=100_000)
        handle = session.observe(HISTORY)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert {c.options["id_slot"] for c in summaries(engine)} == {2} and not engine.copies
        call = await ask(other, engine, [*HISTORY, H("next")])
        assert call.input_tokens - call.cached_tokens < 120
        call = await ask(session, engine, [*HISTORY, H("next")])
        assert session.receipts and call.cached_tokens > 0.9 * call.input_tokens
        assert engine.free() == 2


@virtual
async def test_a_session_takes_a_slot_as_soon_as_one_is_free() -> None:
    """It was opened while all were taken."""
    engine = sliding(slots=2)
    async with make_runtime() as runtime:
        first, second, late = [await begun(runtime, engine, k, context_window=100_000) for k in ("a", "b", "c")]
        assert late.request_options() == {}
        await first.close()
        assert late.request_options()["id_slot"] == 0 and second.request_options()["id_slot"] == 1
        new = runtime.session("new", policy=summarizing(engine), engine=engine)
        assert new.request_options() == {}
        await late.close()
        assert late.request_options() == {}, "a closed one takes none"
        assert engine.free() == 1


@virtual
async def test_work_that_goes_on_for_a_fork_leaves_no_slot_with_its_session() -> None:
    """The first one discards its handle, then the call is made again."""
    engine = sliding(*["word " * 50] * 4)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine, context_window=100_000)
        session.turn_over()
        handle = session.schedule_transform("summarize", HISTORY)
        fork = session.fork("fork")
        shared = fork.schedule_transform("summarize", HISTORY)
        assert shared.flight is handle.flight
        engine.faults.fail(1, error=EngineOverloaded("busy", status=503))
        await settle(0.2)
        handle.discard("not_needed")
        assert await shared.wait() is HandleState.READY and len(summaries(engine)) >= 1
        await fork.close()
        assert engine.free() == 3 and not session.working()


@virtual
async def test_nothing_is_preloaded_for_a_branch_that_is_dead() -> None:
    """It only finishes for the store; what it would warm nobody sends, and its slot would stay taken."""
    engine = sliding(*["word " * 50] * 4)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine, discard=Finish())
        handle = session.observe(HISTORY)
        assert handle is not None
        await settle(0.3)
        other = [S("rule " * 300), *chat(3, size=90)]
        await ask(session, engine, other)
        before = len(engine.calls)
        session.observe([*other, A("ok")])
        await settle(30)
        assert handle.state is HandleState.DISCARDED and handle.flight.artifact is not None
        assert not [c for c in engine.calls[before:] if c.max_tokens == 1]
        assert engine.free() == 3


@virtual
async def test_promise_15_all_that_was_asked_of_the_engine_is_counted() -> None:
    """What is asked of a copy, and what is evaluated before a summary, are background work too."""
    engine = sliding()
    async with make_runtime() as runtime:
        session = await begun(runtime, engine)
        own = len(engine.calls)
        handle = session.observe(HISTORY)
        assert handle is not None and await handle.wait() is HandleState.READY
        asked = engine.calls[own:]
        counters = runtime.counters
        spent = counters.usage + counters.preload_usage
        assert spent.calls == len(asked) == 3
        assert spent.input_tokens == sum(c.input_tokens for c in asked)
        assert counters.wasted_tokens == 0
        handle.discard("not_needed")
        warmed = counters.preload_usage
        assert warmed.cached_tokens is not None
        evaluated = warmed.input_tokens - warmed.cached_tokens
        assert runtime.counters.wasted_tokens == counters.usage.total_tokens + evaluated > counters.usage.total_tokens


@virtual
async def test_a_cold_copy_is_noticed_however_fast_the_engine_is() -> None:
    """Replies come back otherwise than they were written: what is asked of the copy costs all of its prompt. Twice."""
    engine = sliding(*["thought " * 50, "A summary."] * 9, prefill=1e5)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=summarizing(engine, preload_kv=False), engine=engine)
        messages = [*HISTORY]
        for round_ in range(STRAYS + 1):
            view = await session.commit(messages[:-1])
            async with session.foreground() as call:
                await engine.complete(view, max_tokens=40, **session.request_options())
                call.first_token()
            own = len(engine.calls)
            handle = session.observe(messages)
            assert handle is not None and await handle.wait() is HandleState.READY
            assert engine.table.strays == min(round_ + 1, STRAYS)
            asked = [c for c in engine.calls[own:] if c.max_tokens == 1]
            assert asked[0].ended_s - asked[0].arrived_s < CHECK_S
            messages = [*messages, H("more"), A("yes"), *chat(24, size=100)]


@virtual
async def test_turns_of_others_delay_what_is_asked_of_a_copy_and_do_not_end_it() -> None:
    """Another session's prompt is evaluated for longer than a summariser waits for a gap, and then again, for a moment,
    while the copy is asked: the summary is cached all the same."""
    engine = sliding(prefill=400.0)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine)
        other = runtime.session("other", policy=summarizing(engine), engine=engine)
        own = len(engine.calls)
        async with other.foreground() as call:
            handle = session.observe(HISTORY)
            assert handle is not None
            await settle(GAP_WAIT_S + ASIDE_S + 1)
            assert len(engine.calls) == own
            call.first_token()
            await settle(0.1)
            assert len(engine.calls) == own + 1 and engine.calls[-1].outcome == "running"
            async with other.foreground() as second:
                await settle(2)
                assert engine.calls[-1].outcome == "cancelled" and len(engine.calls) == own + 1
                second.first_token()
            assert await handle.wait() is HandleState.READY
        assert summaries(engine)[0].cached_tokens > 0.9 * summaries(engine)[0].input_tokens
        assert engine.table.strays == 0 and session.request_options()["id_slot"] == 1


@pytest.mark.parametrize("where", ["save", "check", "evaluate"])
@virtual
async def test_an_overloaded_server_is_left_alone(where: str) -> None:
    """It said for how long: nothing more is sent for the summary until then, and the next one copies again."""
    engine = sliding()
    copy, prefill, refusals = engine.post_json, engine.prefill, []

    def refuse() -> None:
        refusals.append(asyncio.get_running_loop().time())
        raise EngineOverloaded("busy", status=503, retry_after_s=30.0)

    async def post_json(path: str, body: Any) -> Any:
        if where == "save" and not refusals:
            refuse()
        return await copy(path, body)

    async def warm(messages: Any, **options: Any) -> Any:
        if where != "save" and options.get("id_slot") == 1 and not refusals:
            refuse()
        return await prefill(messages, **options)

    engine.post_json, engine.prefill = post_json, warm  # type: ignore[method-assign]
    if where == "evaluate":
        engine.table.strays = STRAYS
    async with make_runtime() as runtime:
        session = await begun(runtime, engine)
        sent = len(engine.calls)
        handle = session.observe(HISTORY)
        assert handle is not None
        await settle(25)
        assert len(refusals) == 1 and len(engine.calls) == sent and handle.flight.artifact is None
        assert await handle.wait() is HandleState.READY
        assert all(c.arrived_s >= refusals[0] + 30 for c in engine.calls[sent:])
        if where != "evaluate":
            assert engine.table.strays == 0 and session.request_options()["id_slot"] == 1


@virtual
async def test_a_copy_that_hangs_is_given_up_and_not_tried_for_ever() -> None:
    """The disk is stuck: each summary waits a few seconds for its copy, two of them do; then none is tried."""
    engine = sliding()
    tried: list[str] = []

    async def hang(path: str, body: Any) -> Any:
        tried.append(path)
        await asyncio.Event().wait()

    engine.post_json = hang  # type: ignore[method-assign]
    async with make_runtime() as runtime:
        session = await begun(runtime, engine)
        messages = [*HISTORY]
        for round_ in range(STRAYS + 1):
            started = asyncio.get_running_loop().time()
            handle = session.observe(messages)
            assert handle is not None
            await handle.wait_result(30)
            took = asyncio.get_running_loop().time() - started
            assert (took > COPY_S) == (round_ < STRAYS) and took < COPY_S + 5
            messages = [*messages, H("more"), A("yes"), *chat(24, size=100)]
            await ask(session, engine, messages[:-1])
        assert len(tried) == STRAYS


@virtual
async def test_promise_05_a_summary_goes_out_between_the_first_tokens_of_turns() -> None:
    """On a batching server its prompt, and each token of it, would slow the prefill of the turn that begins with it."""
    engine = sliding(prefill=1000.0)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = runtime.session("s", policy=summarizing(engine), engine=engine)
        other = runtime.session("other", policy=summarizing(engine), engine=None)
        assert other.lookahead is None
        view = await session.commit(HISTORY[:-1])
        handle = session.schedule_transform("summarize", HISTORY[:-1])
        async with session.foreground() as call:
            await settle(2)
            assert not engine.calls and handle.state is HandleState.RUNNING
            call.first_token()
            await engine.complete(view, max_tokens=1, **session.request_options())
        session.observe(HISTORY)
        assert await handle.wait() is HandleState.READY


@virtual
async def test_promise_15_what_a_cold_copy_cost_is_no_hit_of_the_summary() -> None:
    """The summary is cached since it was asked for one token just before: that is not claimed."""
    engine = sliding("thought " * 30, prefill=1e5)
    foreground = Foreground(asyncio.get_running_loop().time)
    binding = engine.bind("s")
    view = [*chat(20, size=50), H("q"), A("a")]
    await engine.complete(view[:-1], max_tokens=40, **binding.request_options())
    options = binding.transform_options(foreground, lambda: False, turn=lambda: False, view=lambda: view)
    async with options["lookahead"]([*view[:16], H("Summarise.")], {}) as ready:
        assert binding.away and ready.options["id_slot"] == 0
        assert ready.evaluated == engine.calls[-1].input_tokens > 1000


@virtual
async def test_a_prompt_that_shares_little_with_the_agents_says_nothing_of_copies() -> None:
    """Blocks and merges do not begin as the agent's prompt: that nothing of them is cached is no fault of the server's,
    and the summaries of others are cached as before."""
    engine = sliding()
    foreground = Foreground(asyncio.get_running_loop().time)
    binding, other = engine.bind("s"), engine.bind("other")
    view = [*chat(20, size=50), H("q"), A("a")]
    for one in (binding, other):
        await engine.prefill(view[:-1], **one.request_options())
    options = binding.transform_options(foreground, lambda: False, turn=lambda: False, view=lambda: view)
    for k in range(3):
        block = [view[0], H(f"Summarise this, {k}: " + "of a block " * 300)]
        await engine.complete(block, max_tokens=TOKENS, **options)
        assert engine.table.strays == 0 and engine.table.copies_keep is None and not engine.copies
    options = other.transform_options(foreground, lambda: False, turn=lambda: False, view=lambda: view)
    for cut in (8, 20):  # the second one finds what the first one left of the agent's slot: that says nothing either
        await engine.complete([*view[:cut], H("Summarise.")], max_tokens=TOKENS, **options)
        assert engine.table.strays == 0
    early, late = summaries(engine)[-2:]
    assert early.cached_tokens > 0.9 * early.input_tokens and late.cached_tokens < 0.5 * late.input_tokens


@virtual
async def test_promise_05_work_that_waits_for_a_closed_session_goes_on_in_the_forks_place() -> None:
    """It has not been sent yet when the session that began it closes: no other agent's slot is taken for it."""
    engine = sliding(slots=4)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = await begun(runtime, engine, context_window=100_000)
        other = await begun(runtime, engine, "other", context_window=100_000)
        fork = session.fork("fork")
        await ask(fork, engine, HISTORY[:-1])
        fork.turn_over()
        async with session.foreground() as call:  # for whose end the summary waits
            call.first_token()
            handle = session.schedule_transform("summarize", HISTORY)
            shared = fork.schedule_transform("summarize", HISTORY)
            assert shared.flight is handle.flight
            other.turn_over()
            await session.close()
        assert await shared.wait() is HandleState.READY
        (summary,) = summaries(engine)
        assert "id_slot" in summary.options and summary.options["id_slot"] != other.request_options()["id_slot"]
        call_ = await ask(other, engine, [*HISTORY, H("next")])
        assert call_.input_tokens - call_.cached_tokens < 120


@virtual
async def test_promise_15_a_preload_that_is_cut_off_is_wasted_too() -> None:
    """Its result is discarded while the view is evaluated; nobody hears of its end."""
    engine = SlottedEngine(*["A summary."] * 9, speed=Speed(200.0, 100.0), slots=4)
    own = Preloader(clock=asyncio.get_running_loop().time, strategy="growing")
    engine.bind = lambda session_id: SlotBinding(engine, engine.table, session_id, preloader=own)  # type: ignore[method-assign, assignment, arg-type]
    async with make_runtime() as runtime:
        session = await begun(runtime, engine)  # type: ignore[arg-type]
        handle = session.observe(HISTORY)
        assert handle is not None
        await handle.wait_result(300)
        await settle(1)
        handle.discard("not_needed")
        await settle(1)
        warmed = runtime.counters.preload_usage
        assert warmed.calls >= 1
        wasted = runtime.counters.wasted_tokens - runtime.counters.usage.total_tokens
        assert wasted == warmed.input_tokens - (warmed.cached_tokens or 0) > 0


@virtual
async def test_promise_07_waiting_for_first_tokens_does_not_use_up_a_short_timeout() -> None:
    """Calls overlap all the time and tell no first token. A part of the timeout is for that, and once for all calls."""
    engine = FakeEngine(*["A summary."] * 9, speed=Speed(1e6, 2.0))
    async with make_runtime(admission=AdmitAll()) as runtime:
        policy = Policy(
            Summarize(engine, keep=("messages", 4), facts=False, max_tokens=60), context_window=8000, timeout=4.0
        )
        session = runtime.session("s", policy=policy, engine=engine)
        other = runtime.session("other", policy=policy, engine=engine)
        await session.commit(HISTORY[:-1])
        async with other.foreground():
            handle = session.observe(HISTORY)
            assert handle is not None and await handle.wait() is HandleState.READY
