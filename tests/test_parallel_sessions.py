"""Blocks in a session: prepared as they fill, committed together, each with a life of its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from block_fakes import Blocks, begin, block_policy, covered, lost, play, summary_tokens, turn
from helpers import (
    CODEC,
    A,
    Events,
    FlakyStore,
    H,
    Message,
    T,
    coherent,
    make_runtime,
    marks,
    problems,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import BreakEven, HandleState, KeepRecent, ParallelSummarize, Policy, Reason, Session, StaleHandle
from smoothctx.economics import Speed
from smoothctx.errors import ConfigurationError
from smoothctx.testing import FakeEngine, run_virtual
from smoothctx.transforms import pin

REST = functools.partial(settle, 5)
NOW = functools.partial(settle, 0)


def states(session: Session) -> list[HandleState]:
    """The states of the live blocks, oldest first."""
    return [h.state for h in session.lookaheads]


def turns(first: int, last: int, **options: Any) -> list[list[Message]]:
    """Turns ``first`` to ``last``, without it."""
    return [turn(k, **options) for k in range(first, last)]


# -- as they fill ----------------------------------------------------------------------------------------------------


@virtual
async def test_blocks_are_prepared_as_they_fill_and_committed_together_at_the_trigger() -> None:
    """Nothing is sent otherwise before the trigger; then all finished leading blocks come at one boundary."""
    model, events = Blocks(), Events()
    async with make_runtime(concurrency=4, on_event=events) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        view = await play(session, messages, turns(0, 11), REST)
        assert same_objects(view, messages[:-1]) and not session.receipts
        assert states(session) == [HandleState.READY] * 6, "prepared long before it is due"
        assert [len(seen) for seen in model.targets] == [2] * 6
        view = await play(session, messages, turns(11, 12), REST)
        assert [sorted(c) for c in covered(view)] == [[0, 1], [1, 2], [3, 4], [4, 5], [6, 7], [7, 8]]
        assert [r.how for r in session.receipts] == ["ready"] * 6
        assert len({r.time for r in session.receipts}) == 1, "one boundary"
        assert session.receipts[0].tokens_before > 2400 > 1000 > session.receipts[-1].tokens_after
        assert all(r.waited_s == 0 for r in session.receipts)
        assert not lost(messages[:-1], view)
        assert not model.faults and not events.of("error")
        assert not events.of("commit.crowded"), "six blocks at one boundary are one commit"
        coherent(session, runtime, live=len(states(session)))


@virtual
async def test_a_result_that_was_offloaded_counts_as_what_stands_for_it() -> None:
    """Blocks are cut by what the view has: huge results that were offloaded on entry fill no block, and the same
    history with results of the size of their stubs is cut at the same turns."""

    async def cut_at(size: int) -> tuple[list[set[int]], int]:
        model = Blocks()
        async with make_runtime(concurrency=4) as runtime:
            policy = block_policy(model, max_message_tokens=100, trigger=("tokens", 3000))
            session, messages = runtime.session("s", policy=policy), begin()
            for k in range(12):
                new = turn(k, size=30, tools=True)
                new[2] = T(f"c{k}", f"<{k}> result", size=size)
                await play(session, messages, [new[:1]], REST)
                messages += new[1:3]
                assert not problems(await session.commit(messages))  # the model reads the result
                messages += new[3:]
                session.observe(messages)
                await settle(5)
            assert not model.faults
            return model.targets, CODEC.estimate((await session.commit(messages))[4 * 11 + 3])

    huge, stub = await cut_at(2000)
    assert 30 < stub <= 100
    small, _ = await cut_at(stub - 8)
    assert huge and [sorted(t) for t in huge] == [sorted(t) for t in small]
    assert all(len(t) >= 2 for t in huge)


@virtual
async def test_promise_09_between_commits_the_view_only_grows() -> None:
    """Over 80 turns each view begins with the one before, except where blocks were committed; that is rare."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        before: list[Any] = []
        rewrote: list[int] = []
        for k in range(80):
            had = len(session.receipts)
            view = await play(session, messages, turns(k, k + 1), REST)
            if len(session.receipts) > had:
                rewrote.append(k)
            else:
                assert same_objects(view[: len(before)], before)
            before = view
            assert not lost(messages[:-1], view)
        assert len(rewrote) > 3 and all(b - a >= 4 for a, b in zip(rewrote, rewrote[1:], strict=False))
        assert session.branch.tokens < 2600


@pytest.mark.parametrize("tools", [False, True])
@virtual
async def test_at_the_hard_limit_at_most_one_block_is_unfinished(tools: bool) -> None:
    """The trace of 60 turns with a model that takes as long as a block takes to fill (``blocks.at_limit``): whenever
    the limit comes, one block's work is left at most, and nobody waits for more than that."""
    model, events = Blocks(delay=2.5), Events()
    async with make_runtime(concurrency=4, on_event=events) as runtime:
        policy = block_policy(model, commit="hard_limit")
        session, messages = runtime.session("s", policy=policy), begin()
        for k in range(60):
            await play(session, messages, [turn(k, tools=tools)], functools.partial(settle, 2))
        trace = [e.data for e in events.of("blocks.at_limit")]
        assert len(trace) >= 3 and len({r.time for r in session.receipts}) <= len(trace)
        for told in trace:
            assert told["view_tokens"] > 3400, "the limit"
            assert told["unfinished"] <= 1 and told["unfinished_tokens"] <= 400 and told["filling_tokens"] <= 800
            assert told["ready"] >= 4 and told["failed"] == 0
        assert any(told["unfinished"] for told in trace), "the model is not faster than the blocks fill"
        assert session.receipts and all(r.waited_s == 0 and r.how == "ready" for r in session.receipts)


@virtual
async def test_observe_returns_the_oldest_live_block() -> None:
    """And so does ``session.lookahead``; without a filled block there is none."""
    model = Blocks(held=[0])
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        assert session.observe([*messages, *turn(0)]) is None
        await play(session, messages, turns(0, 5), REST)
        first = session.observe(messages)
        assert first is not None and first is session.lookahead and first.run.start == 1
        assert [h.state for h in session.lookaheads] == [HandleState.RUNNING, HandleState.READY]
        assert first is session.lookaheads[0]
        model.let_go()
        await settle()
        assert session.lookahead is first and first.state is HandleState.READY


@virtual
async def test_not_more_than_workers_at_once() -> None:
    """A long history that comes at once is compacted three blocks at a time, oldest first."""
    model = Blocks()
    async with make_runtime(concurrency=16) as runtime:
        session = runtime.session("s", policy=block_policy(model, workers=3, window=40_000))
        messages = [*begin(), *(m for k in range(30) for m in turn(k))]
        for _ in range(12):
            session.observe(messages)
            await settle(2)
        assert model.most_running == 3 and model.calls == len(session.lookaheads) > 15
        assert [min(seen) for seen in model.targets] == sorted(min(seen) for seen in model.targets)


@virtual
async def test_a_block_smaller_than_the_window_allows_is_made_when_nothing_fills() -> None:
    """Where a block is larger than what the trigger allows, the trigger makes one of what there is."""
    model = Blocks()
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, block=50_000, window=2000)), begin()
        view = await play(session, messages, turns(0, 9), REST)
        assert len(covered(view)) == 1 and session.branch.tokens < 1200
        assert [r.how for r in session.receipts] == ["ready"]


# -- stragglers and failures -----------------------------------------------------------------------------------------


@virtual
async def test_a_straggler_stays_raw_and_comes_with_a_later_boundary() -> None:
    """What leads is committed; the straggler and what is behind it follow when they are worth an edit."""
    model = Blocks(held=[9])
    async with make_runtime(concurrency=8) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        view = await play(session, messages, turns(0, 14), REST)
        assert max(set().union(*covered(view))) == 8 and HandleState.RUNNING in states(session)
        assert not lost(messages[:-1], view)
        model.let_go()
        view = await play(session, messages, turns(14, 24), REST)
        assert [sorted(c) for c in covered(view)][6:8] == [[9, 10], [10, 11]]
        assert len({r.time for r in session.receipts}) == 2
        assert not lost(messages[:-1], view)


@virtual
async def test_a_failed_block_stays_raw_and_blocks_nothing() -> None:
    """It is tried a bounded number of times; the blocks behind it are committed all the same."""
    model, events = Blocks(failing=[3]), Events()
    async with make_runtime(concurrency=4, on_event=events) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        view = await play(session, messages, turns(0, 13), REST)
        seen = set().union(*covered(view))
        assert not {3, 4} <= seen and {0, 1, 2, 5, 6} <= seen
        assert any(m is messages[7] for m in view), "the failed block is there as it was"
        assert sum(3 in t for t in model.targets) == 2 == len(events.of("lookahead.failed"))
        await play(session, messages, turns(13, 40), REST)
        assert sum(3 in t for t in model.targets) == 2, "not in a loop"
        assert not lost(messages[:-1], await session.commit([*messages, H("end")]))
        coherent(session, runtime, live=len(states(session)))


@virtual
async def test_a_failed_block_is_tried_again_much_later() -> None:
    """A server that was away is back: ten minutes later the block is compacted too."""
    model = Blocks(failing=[3])
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, window=40_000)), begin()
        await play(session, messages, turns(0, 13), REST)
        model.failing.clear()
        await settle(700)
        await play(session, messages, turns(13, 14), REST)
        assert [h.run.start for h in session.lookaheads] == list(range(1, 25, 3))


@virtual
async def test_a_retry_stays_within_its_block() -> None:
    """An empty answer is asked for again, for that block alone."""
    model = Blocks()
    asked: list[set[int]] = []

    def text(seen: set[int]) -> str:
        asked.append(seen)
        return "word " * 4000 if 4 in seen and asked.count(seen) == 1 else "Record."

    model.text = text
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, window=40_000)), begin()
        await play(session, messages, turns(0, 8), REST)
        assert all(s is HandleState.READY for s in states(session))
        assert sum(asked.count(seen) == 2 for seen in asked) == 4, "two blocks with the mark, twice each"


@virtual
async def test_what_does_not_shrink_its_block_is_not_used() -> None:
    """``min_savings`` is held against the block itself; it is not tried again."""
    model = Blocks()
    model.text = lambda seen: "x" * 1400 if 3 in seen else "Record."
    async with make_runtime(concurrency=4) as runtime:
        policy = block_policy(model, max_tokens=400, min_savings=0.3)
        session, messages = runtime.session("s", policy=policy), begin()
        view = await play(session, messages, turns(0, 20), REST)
        assert runtime.counters.stale["not_smaller"] == 1 == sum(3 in t for t in model.targets)
        assert any(m is messages[7] for m in view) and len(covered(view)) > 4
        assert not lost(messages[:-1], view)


# -- the hard limit --------------------------------------------------------------------------------------------------


@virtual
async def test_at_the_hard_limit_whatever_is_ready_is_committed() -> None:
    """Also behind a straggler: the turn neither waits for it nor falls back."""
    model = Blocks(held=[0])
    async with make_runtime(concurrency=8) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        view = await play(session, messages, turns(0, 17), REST)
        assert covered(view) and not any(0 in c for c in covered(view))
        assert {r.how for r in session.receipts} == {"ready"} and all(r.waited_s == 0 for r in session.receipts)
        assert not lost(messages[:-1], view)


@virtual
async def test_promise_06_at_the_hard_limit_one_block_is_waited_for() -> None:
    """All blocks are stuck and one comes to its end: the wait ends with it."""
    model = Blocks(held=range(100))
    async with make_runtime(concurrency=8) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, keep=2, max_wait=30)), begin()
        await play(session, messages, turns(0, 16), REST)
        assert all(s is HandleState.RUNNING for s in states(session)) and len(states(session)) == 4
        started = runtime.now()

        async def later() -> None:
            await settle(3)
            model.let_go()

        async def commit() -> None:
            messages.append(H("<99> now", size=200))
            view = await session.commit(messages)
            assert not problems(view) and covered(view)

        from anyio import create_task_group

        async with create_task_group() as group:
            group.start_soon(later)
            group.start_soon(commit)
        assert 3 <= runtime.now() - started < 4
        assert session.receipts[0].how == "promoted" and 3 <= session.receipts[0].waited_s < 4


@virtual
async def test_promise_06_a_stuck_model_ends_in_the_fallback() -> None:
    """The wait is bounded, and the view that comes back fits; the blocks supersede the fallback later."""
    model = Blocks(held=range(1000))
    async with make_runtime(concurrency=8) as runtime:
        policy = block_policy(model, max_wait=2.0)
        session, messages = runtime.session("s", policy=policy), begin()
        started = runtime.now()
        view = await play(session, messages, turns(0, 18), NOW)
        assert runtime.now() - started < 3
        assert [r.how for r in session.receipts] == ["fallback"] and not covered(view)
        assert session.branch.fits(policy)
        model.let_go()
        model.held.clear()
        view = await play(session, messages, turns(18, 40), REST)
        assert len(covered(view)) > 4 and not problems(view)
        assert not lost(messages[:-1], view), "what the fallback dropped is in the summaries again"


@virtual
async def test_promise_05_below_the_limit_no_turn_waits() -> None:
    """A model that never answers costs nothing but its place."""
    model = Blocks(held=range(1000))
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        started = runtime.now()
        view = await play(session, messages, turns(0, 15), NOW)
        assert runtime.now() == started and same_objects(view, messages[:-1])


# -- branches, restarts, forks ---------------------------------------------------------------------------------------


@virtual
async def test_promise_04_an_edit_drops_only_the_blocks_behind_it() -> None:
    """Committed and ready blocks before the edit stay; those behind are dropped and made anew."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        await play(session, messages, turns(0, 14), REST)
        calls = model.calls
        edited = [*messages[:11], H("<77> another question", size=100), *messages[12:]]
        view = await session.commit(edited)
        assert [sorted(c) for c in covered(view)][:3] == [[0, 1], [1, 2], [3, 4]]
        assert all(s in {HandleState.PENDING, HandleState.RUNNING} for s in states(session))
        assert not lost(edited, view)
        await REST()
        session.observe(edited)
        await REST()
        assert 77 in model.targets[calls] and min(min(t) for t in model.targets[calls:]) >= 4
        view = await session.commit(messages)
        assert len(covered(view)) == 6, "back on the old branch, its blocks are there"


@virtual
async def test_a_ready_block_outlives_an_edit_behind_it() -> None:
    """Uncommitted blocks are salvaged one by one too."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        await play(session, messages, turns(0, 8), REST)
        ready = session.lookaheads
        edited = [*messages[:8], H("<77> another question", size=100)]
        session.observe(edited)
        assert session.lookaheads == ready[:2]
        assert [h.reason for h in ready[2:]] == [Reason.BRANCH_DIVERGED] * (len(ready) - 2)
        coherent(session, runtime, live=2)


@virtual
async def test_a_restart_reuses_every_block() -> None:
    """Committed ones are in the view of the first turn, ready ones are not asked for again."""
    store, model = FlakyStore(), Blocks()
    policy = block_policy(model, model_id="m")
    async with make_runtime(concurrency=4, store=store) as runtime:
        session, messages = runtime.session("s", policy=policy), begin()
        view = await play(session, messages, turns(0, 14), REST)
        ready = len(states(session))
        assert ready >= 2
        await REST()
    calls = model.calls
    async with make_runtime(concurrency=4, store=store) as runtime:
        session = runtime.session("s", policy=policy)
        again = await session.commit(messages)
        assert covered(again) == covered(view) and len(covered(view)) == 6
        await REST()
        assert states(session) == [HandleState.READY] * ready and model.calls == calls
    async with make_runtime(concurrency=4) as runtime:  # a third one is told by the framework's saved state
        saved = session.saved()
        other = runtime.session("s", policy=policy)
        other.restore(saved)
        assert covered(await other.commit(messages)) == covered(view)


@virtual
async def test_a_fork_shares_the_blocks() -> None:
    """Both branches use what was made of their common part, and go their own ways."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        await play(session, messages, turns(0, 10), REST)
        calls, fork = model.calls, session.fork("f")
        other = list(messages)
        view = await play(fork, other, turns(10, 13), REST)
        assert len(covered(view)) >= 5 and model.calls <= calls + 2
        mine = await play(session, messages, turns(50, 53), REST)
        assert covered(mine)[:5] == covered(view)[:5] and not lost(messages[:-1], mine)


@virtual
async def test_rewrite_mode_keeps_its_summaries() -> None:
    """A caller that goes on with the returned view: old summaries stay as they are, new blocks are cut behind."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session = runtime.session("s", policy=block_policy(model))
        held: list[Any] = begin()
        said: set[int] = set()
        for k in range(40):
            new = turn(k)
            held = await session.commit([*held, new[0]])
            held.append(new[1])
            said |= marks(new)
            session.observe(held)
            await REST()
            assert marks(held) == said and not problems(held)
        assert len(covered(held)) > 4 and session.branch.tokens < 2600
        assert all("conversation_summary" not in t for t in summaries(held)), "no summary inside a summary"


@virtual
async def test_closing_drops_every_block() -> None:
    """Typed, and nothing is left running."""
    model = Blocks(held=range(100))
    async with make_runtime(concurrency=8) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        await play(session, messages, turns(0, 8), REST)
        handles = session.lookaheads
        await session.close()
        assert len(handles) == 4 and {h.reason for h in handles} == {Reason.SESSION_CLOSED}
        await settle()
        assert not model.running
        coherent(session, runtime)


# -- the total -------------------------------------------------------------------------------------------------------


@virtual
async def test_the_oldest_summaries_are_merged_before_newer_ones_come() -> None:
    """Within ``total_tokens`` at every turn, nothing lost, and the newest summaries are the finest."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        policy = block_policy(model, total_tokens=600)
        session, messages = runtime.session("s", policy=policy), begin()
        for k in range(60):
            view = await play(session, messages, turns(k, k + 1), REST)
            assert summary_tokens(view) <= 600
            assert not lost(messages[:-1], view)
        seen = covered(view)
        assert len(seen) > 2 and len(seen[0]) > 10 > len(seen[-1])
        assert not any(r.how == "fallback" for r in session.receipts)
        merges = [sent for sent in model.inputs if "consecutive parts" in str(sent[-1]["content"])]
        assert merges and not model.faults
        assert all(len(sent) <= 3 for sent in merges), "from the summaries, not from the raw history"


@virtual
async def test_without_a_total_the_summaries_are_bounded_by_where_a_commit_lands() -> None:
    """The view never becomes one of nothing but summaries: no fallback is ever needed."""
    model = Blocks()
    model.text = lambda seen: "w" * 160
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), begin()
        for k in range(120):
            view = await play(session, messages, turns(k, k + 1), REST)
            assert summary_tokens(view) < 1600
        assert not any(r.how == "fallback" for r in session.receipts)
        assert not lost(messages[:-1], view)


@virtual
async def test_what_merged_summaries_cost_is_in_a_receipt_or_wasted() -> None:
    """Also that of blocks which a merge overtook before they were committed."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        policy = block_policy(model, window=12_000, total_tokens=400, trigger=("tokens", 4000), min_savings=0.1)
        session, messages = runtime.session("s", policy=policy), begin()
        await play(session, messages, turns(0, 40), REST)
        counters = runtime.counters
        assert counters.stale.get("superseded", 0) > 3 and session.receipts
        live = sum(h.flight.usage.total_tokens for h in session.lookaheads)
        told = sum(r.usage.total_tokens for r in session.receipts)
        assert counters.usage.total_tokens == told + counters.wasted_tokens + live


@virtual
async def test_a_merge_that_fails_keeps_the_total_all_the_same() -> None:
    """The newer blocks stay raw; at the hard limit the fallback makes room. No endless attempts."""
    model = Blocks()
    model.text = lambda seen: "w" * 2000 if len(seen) > 4 else "w" * 100
    async with make_runtime(concurrency=4) as runtime:
        policy = block_policy(model, total_tokens=500)
        session, messages = runtime.session("s", policy=policy), begin()
        for k in range(40):
            view = await play(session, messages, turns(k, k + 1), REST)
            assert summary_tokens(view) <= 500 and sum(map(CODEC.estimate, view)) <= 3400
        assert model.calls < 150


conversation = st.lists(
    st.tuples(st.sampled_from([0, 30, 100, 250, 900]), st.booleans(), st.booleans()), min_size=10, max_size=40
)


@given(
    conversation,
    st.integers(200, 900),
    st.lists(st.integers(1, 250), min_size=1, max_size=9),
    st.lists(st.sampled_from(["ok", "ok", "ok", "fail", "empty", "hold"]), min_size=1, max_size=9),
)
@settings(max_examples=60)
def test_property_the_total_holds_whatever_happens(
    given_turns: list[tuple[int, bool, bool]], total: int, lengths: list[int], fates: list[str]
) -> None:
    """Random histories, answers and failures: the summaries of the view stay within the total, the view fits or is
    as small as it can be, it is valid, and every request to the model is."""

    async def run() -> None:
        model = Blocks(delay=0.5)
        plain = model.__call__
        count = 0

        async def fickle(messages: list[Message], *, max_tokens: int | None = None) -> str:
            nonlocal count
            count += 1
            fate = fates[count % len(fates)]
            model.text = lambda seen: "w " * lengths[count % len(lengths)]
            answer = await plain(messages, max_tokens=max_tokens)
            if fate == "fail":
                raise RuntimeError("the model failed")
            if fate == "hold":
                await settle(50)
            return "" if fate == "empty" else answer

        async with make_runtime(concurrency=4) as runtime:
            policy = block_policy(fickle, total_tokens=total, max_wait=2.0, max_tokens=200)
            session, messages = runtime.session("s", policy=policy), begin()
            for k, (size, tools, quick) in enumerate(given_turns):
                view = await play(session, messages, [turn(k, size=size, tools=tools)], NOW if quick else REST)
                assert summary_tokens(view) <= total
                assert sum(map(CODEC.estimate, view)) <= 3400 or len(view) <= 8
            assert not model.faults
            coherent(session, runtime, live=len(states(session)))

    run_virtual(run)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("turn"), st.sampled_from([20, 100, 100, 300])),
            st.tuples(st.just("turn"), st.sampled_from([20, 100, 100, 300])),
            st.tuples(st.sampled_from(["edit", "cut", "save", "back", "hold", "go"]), st.integers(0, 99)),
        ),
        min_size=15,
        max_size=60,
    ),
    st.sampled_from([None, 300, 800]),
    st.booleans(),
)
@settings(max_examples=60)
def test_property_branches_never_mix(ops: list[tuple[str, int]], total: int | None, rewrite: bool) -> None:
    """Edits, cuts and time travel with blocks in every state: each view is of its own history, whole, valid, and
    within the total; the counters add up."""

    async def run() -> None:
        model, held = Blocks(delay=0.5), begin()
        saved: list[list[Any]] = [held]
        async with make_runtime(concurrency=4) as runtime:
            policy = block_policy(model, total_tokens=total, max_wait=2.0)
            session = runtime.session("s", policy=policy)
            for k, (op, n) in enumerate(ops):
                if op == "turn":
                    new = turn(k, size=n, tools=k % 3 == 0)
                    whole = marks([*held, new[0]])
                    view = await session.commit([*held, new[0]])
                    assert not problems(view)
                    assert marks(view) <= whole, "nothing of another branch"
                    assert rewrite or marks(view) == whole or any(r.how == "fallback" for r in session.receipts)
                    assert total is None or summary_tokens(view) <= total
                    held = [*(view if rewrite else [*held, new[0]]), *new[1:]]
                    session.observe(held)
                    await settle(n % 3)
                elif op == "edit" and len(held) > 1:
                    at = 1 + n % (len(held) - 1)
                    if held[at]["role"] == "user" and CODEC.summary_text(held[at]) is None:
                        held = [*held[:at], H(f"<{1000 + k}> edited", size=60), *held[at + 1 :]]
                elif op == "cut":
                    ends = [i for i, m in enumerate(held) if m["role"] == "user"]
                    held = held[: ends[n % len(ends)]] if ends else held
                elif op == "save":
                    saved.append(held)
                elif op == "back":
                    held = saved[n % len(saved)]
                elif op == "hold":
                    model.held.add(n)
                else:
                    model.let_go()
            assert not model.faults
            coherent(session, runtime, live=len(states(session)))

    run_virtual(run)


# -- pairs and pins --------------------------------------------------------------------------------------------------


@virtual
async def test_promise_03_tool_pairs_stay_whole() -> None:
    """Blocks end between a call's results and what follows; parallel calls are one unit."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, keep=3)), begin()
        for k in range(30):
            messages.append(H(f"<{k}> go", size=30))
            assert not problems(await session.commit(messages))
            messages.append(A(None, f"a{k}", f"b{k}"))
            session.observe(messages)
            for name in "ab":
                messages.append(T(f"{name}{k}", f"<{k}> result", size=120))
                session.observe(messages)
                await REST()
            view = await session.commit(messages)
            assert not problems(view) and not lost(messages, view)
            messages.append(A(f"<{k}> done"))
            session.observe(messages)
            await REST()
        assert len(covered(view)) > 5 and not model.faults


@virtual
async def test_the_latest_user_message_stays_word_for_word() -> None:
    """An agent that works on one request for long: its block leaves the request where it is."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model)), [*begin(), H("<0> the request")]
        for k in range(1, 40):
            await session.commit(messages)
            messages += [A(None, f"c{k}"), T(f"c{k}", f"<{k}> result", size=100)]
            session.observe(messages)
            await REST()
        view = await session.commit(messages)
        assert sum(m is messages[1] for m in view) == 1 and len(covered(view)) > 3
        assert not problems(view) and not lost(messages, view)


@virtual
async def test_pins_survive_blocks_and_merges() -> None:
    """Marked in a message or named to the session, they are in every view of 60 turns, whatever the model writes."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, total_tokens=900)), begin()
        session.pin("never touch prod")
        await play(session, messages, [[H(f"remember {pin('code 4711')}", size=100), A("yes", size=100)]], REST)
        for k in range(60):
            view = await play(session, messages, turns(k, k + 1), REST)
            text = "\n".join(CODEC.text(m) for m in view)
            assert "code 4711" in text
            assert "never touch prod" in text or not covered(view)
        assert len(covered(view)) > 1 and not any(r.how == "fallback" for r in session.receipts)


@virtual
@pytest.mark.parametrize("total", [None, 900])
@pytest.mark.parametrize("count", [1, 3, 6])
async def test_pins_that_stand_nowhere_are_carried_once(count: int, total: int | None) -> None:
    """However many there are: no block is refused for their sake, and each stands once in the view."""
    model = Blocks()
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, total_tokens=total)), begin()
        for k in range(count):
            session.pin(f"Rule {k}: " + "keep this in every case, " * 6)
        committed = False
        for k in range(40):
            text = "\n".join(CODEC.text(m) for m in await play(session, messages, turns(k, k + 1), REST))
            committed = committed or bool(session.receipts)
            assert [text.count(f"Rule {k}: ") for k in range(count)] == [int(committed)] * count
        assert len(session.receipts) > 3 and {r.how for r in session.receipts} == {"ready"}
        assert not runtime.counters.stale.get("not_smaller") and not runtime.counters.failed


@virtual
async def test_an_explicit_run_carries_a_pin_once() -> None:
    """In one of its blocks; of a pinned text that stands in the history, in the block that has it."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=block_policy(Blocks(), window=40_000, block=300, min_savings=0.1))
        session.pin("never touch prod")
        session.pin("<3> question")
        messages = [*begin(), *(m for k in range(20) for m in turn(k)), H("now")]
        handle = session.schedule_transform("parallel_summarize", messages, target_segments=range(0, 12))
        assert await handle.wait() is HandleState.READY
        texts = summaries(handle.commit(messages))
        assert ["never touch prod" in t for t in texts] == [True, False, False, False, False, False]
        assert ["<3> question" in t for t in texts] == [False, False, False, True, False, False]


# -- receipts and outcomes -------------------------------------------------------------------------------------------


@virtual
async def test_blocks_of_one_boundary_are_one_outcome() -> None:
    """A receipt for each; the calls before and after, and what was expected, are those of all together."""
    agent = FakeEngine(*["word " * 20] * 100, preload=False)
    async with make_runtime(concurrency=4) as runtime:
        rule = BreakEven(Speed(1000.0, 50.0, 0.0), turns=10_000)
        session = runtime.session("s", policy=block_policy(Blocks(), commit=rule), engine=agent)
        messages = begin()
        for k in range(48):
            messages.append(H(f"<{k}> question", size=100))
            view = await session.commit(messages)
            async with session.foreground() as call, agent.stream(view, max_tokens=20) as stream:
                async for _ in stream:
                    call.first_token()
            messages.append(A(f"<{k}> answer", size=100))
            session.observe(messages)
            await REST()
        outcomes = session.outcomes()
        assert [r for o in outcomes for r in o.receipts] == list(session.receipts)
        assert len(outcomes[0].receipts) > 3 and len(outcomes) > 1
        for outcome in outcomes:
            assert outcome.receipt is outcome.receipts[-1] and outcome.before and outcome.after
            assert len({r.expected for r in outcome.receipts}) == 1
            assert outcome.receipt.expected is not None
        together = outcomes[0].receipts
        assert [r.tokens_before for r in together[1:]] == [r.tokens_after for r in together[:-1]]


@virtual
async def test_what_comes_back_counts_its_savings_once() -> None:
    """To another branch and back: each receipt goes on from where the last one left the view."""
    async with make_runtime(concurrency=4) as runtime:
        session, messages = runtime.session("s", policy=block_policy(Blocks())), begin()
        await play(session, messages, turns(0, 14), REST)
        seen = len(session.receipts)
        await session.commit([H("another chat")])
        await session.commit([*messages, H("back")])
        back = list(session.receipts)[seen:]
        assert len(back) > 2 and {r.how for r in back} == {"salvaged"}
        assert [r.tokens_before for r in back[1:]] == [r.tokens_after for r in back[:-1]]


# -- explicit use ----------------------------------------------------------------------------------------------------


@virtual
async def test_an_explicit_run_is_cut_into_blocks() -> None:
    """One handle for a run of several blocks; its commit shows one summary for each."""
    model = Blocks()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=block_policy(model, window=40_000, block=300, min_savings=0.1))
        messages = [*begin(), *(m for k in range(20) for m in turn(k)), H("now")]
        handle = session.schedule_transform("parallel_summarize", messages, target_segments=range(0, 12))
        assert await handle.wait() is HandleState.READY
        view = handle.commit(messages)
        assert [sorted(c) for c in covered(view)] == [[0], [1], [2], [3], [4], [5]]
        assert same_objects(view[7:], messages[13:]) and model.most_running == 4
        assert handle.receipt is not None and handle.receipt.usage.calls == 6


@virtual
async def test_an_explicit_run_leaves_a_failed_block_raw() -> None:
    """Partial: the failed block's messages are the caller's own, between the summaries."""
    model = Blocks(failing=[2])
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=block_policy(model, window=40_000, block=300, min_savings=0.1))
        messages = [*begin(), *(m for k in range(20) for m in turn(k)), H("now")]
        handle = session.schedule_transform("parallel_summarize", messages, target_segments=range(0, 12))
        assert await handle.wait() is HandleState.READY
        view = handle.commit(messages)
        assert [sorted(c) for c in covered(view)] == [[0], [1], [3], [4], [5]]
        assert view[3] is messages[5] and view[4] is messages[6] and not lost(messages, view)


@virtual
async def test_an_explicit_run_keeps_the_total_too() -> None:
    """What would take the summaries of the view over it cannot be committed."""
    model = Blocks()
    model.text = lambda seen: "w" * 400
    async with make_runtime(concurrency=4) as runtime:
        session, messages = (
            runtime.session("s", policy=block_policy(model, total_tokens=400, min_savings=0.05)),
            begin(),
        )
        await play(session, messages, turns(0, 14), REST)
        segments = range(22, 24)
        handle = session.schedule_transform("parallel_summarize", messages, target_segments=segments)
        await handle.wait()
        before = summary_tokens(await session.commit(messages))
        assert before > 250
        with pytest.raises(StaleHandle, match="total_tokens=400"):
            handle.commit(messages)
        assert summary_tokens(await session.commit(messages)) == before


@virtual
async def test_by_name_with_options_of_its_own() -> None:
    """``schedule_transform`` makes one by its name."""
    model = Blocks()
    async with make_runtime() as runtime:
        policy = Policy(KeepRecent(), context_window=40_000, min_savings=0.05)
        session = runtime.session("s", policy=policy)
        messages = [*begin(), *(m for k in range(20) for m in turn(k)), H("now")]
        handle = session.schedule_transform(
            "parallel_summarize", messages, target_segments=[0, 1, 2, 3], model=model, block_tokens=250, facts=False
        )
        assert await handle.wait() is HandleState.READY
        assert len(covered(handle.commit(messages))) == 2
        with pytest.raises(ConfigurationError, match="detail='huge'"):
            session.schedule_transform("parallel_summarize", messages, model=model, detail="huge")


# -- the engine ------------------------------------------------------------------------------------------------------


def test_the_view_of_a_commit_is_warm() -> None:
    """On the agent's own engine the boundary's view is preloaded as a whole: the next turn evaluates what is new."""

    async def run() -> None:
        engine = FakeEngine("A short record.", speed=Speed(5000.0, 200.0), strict=True)
        transform = ParallelSummarize(
            engine, block_tokens=800, facts=False, max_tokens=100, keep=("messages", 4), window=100_000
        )
        policy = Policy(transform, context_window=8000, token_counter=engine.count)
        async with make_runtime(concurrency=4) as runtime:
            session, messages = runtime.session("s", policy=policy, engine=engine), begin()
            new: list[tuple[bool, int]] = []
            for k in range(60):
                had = len(session.receipts)
                messages.append(H(f"<{k}> question", size=120))
                view = await session.commit(messages)
                async with session.foreground() as foreground:
                    reply = await engine.complete(view, max_tokens=64)
                    foreground.first_token()
                usage = reply.usage
                new.append((len(session.receipts) > had, usage.input_tokens - (usage.cached_tokens or 0)))
                messages.append(A(f"<{k}> answer", size=120))
                session.observe(messages)
                await settle(20)
            at_commit = [n for rewrote, n in new if rewrote]
            assert len(at_commit) >= 2 and all(not problems(c.messages) for c in engine.calls)
            assert max(at_commit) < 700, "the question, and the ends of cache blocks"
            assert any(r.warm for r in session.receipts)
            targets = [c for c in engine.calls if "TARGET_BLOCK" in str(c.messages[-1]["content"])]
            shared = [c.cached_tokens / c.input_tokens for c in targets if c.input_tokens > 3000]
            assert shared and sum(shared) / len(shared) > 0.5, "a block's prompt goes on where the agent's ended"

    run_virtual(run)
