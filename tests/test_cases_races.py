"""Races with new messages: what is appended, cleared or edited while a lookahead runs.

Rows of this class that are not here:

| id | why |
| --- | --- |
| B29 | provider-side response chains are the framework's; what is ours of it is in ``test_b28_b29_a_clear...`` |
| B45 | the core has no path of its own for new sessions: one ``commit`` is the only writer |
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from driving import check, fast, feed, small_policy
from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    Message,
    S,
    T,
    chat,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    valid_request,
    virtual,
)
from smoothctx import (
    HandleError,
    HandleState,
    KeepRecent,
    LookaheadHandle,
    Policy,
    Reason,
    Runtime,
    Session,
    StaleHandle,
    Summarize,
)


@asynccontextmanager
async def held_session(
    messages: list[Message], events: Events | None = None, **options: Any
) -> AsyncIterator[tuple[Runtime, Session, FakeSummarizer, LookaheadHandle]]:
    """A session with one lookahead that runs and is held in its model."""
    model = FakeSummarizer("hold")
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, **options))
        handle = session.observe(messages)
        assert handle is not None
        await model.started.wait()
        yield runtime, session, model, handle


def long_chat() -> list[Message]:
    """Over the trigger of :func:`make_policy` (1,200 of 2,000 tokens), under its hard limit of 1,700."""
    return chat(12, size=55)


@virtual
async def test_b28a_b31_what_is_appended_meanwhile_is_kept_behind_the_summary() -> None:
    """A message that arrives between snapshot and commit is in the tail, as the same object."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        covered = marks(messages[handle.run.start : handle.run.end])
        newest = H("<500> sent while compacting")
        messages.append(newest)
        assert same_objects(await session.commit(messages), messages)
        model.release.set()
        await handle.wait()
        view = await session.commit(messages)
        assert handle.state is HandleState.COMMITTED
        assert view[-1] is newest
        assert same_objects(view[2:], messages[handle.run.end :])
        assert marks([view[1]]) == covered


@virtual
async def test_b32_several_tool_cycles_after_the_snapshot_are_replayed_behind_the_summary() -> None:
    """A request and its tool cycles that came while it ran are all there, in order."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        later = [H("<500> next")]
        for k in range(3):
            later += [A(f"<{510 + k}>", f"c{k}"), T(f"c{k}", f"<{520 + k}>")]
        for message in later:
            messages.append(message)
            session.observe(messages)
            await settle()
        model.release.set()
        await handle.wait()
        view = await session.commit(messages)
        assert handle.state is HandleState.COMMITTED
        assert same_objects(view[-len(later) :], later)
        assert valid_request(view)


@virtual
async def test_b28b_b29_a_clear_while_it_runs_wins() -> None:
    """The history was cleared: nothing of the old one comes back, and the next lookahead starts from the new one."""
    messages = long_chat()
    async with held_session(messages) as (runtime, session, model, handle):
        cleared: list[Message] = [S(), H("<900> a new start")]
        view = await session.commit(cleared)
        assert same_objects(view, cleared)
        assert handle.state is HandleState.DISCARDED
        assert handle.reason is Reason.BRANCH_DIVERGED
        model.release.set()
        await settle(5)
        model.mode = "answer"
        fresh = [S(), *chat(12, size=55, first=450, system=False)]
        started = session.observe(fresh)
        assert started is not None
        await started.wait()
        view = await session.commit(fresh)
        assert summaries(view)
        assert min(marks(view)) >= 900
        assert min(marks(model.inputs[-1])) >= 900
        assert runtime.counters.stale[Reason.BRANCH_DIVERGED] == 1


@virtual
async def test_b28b_clear_to_nothing() -> None:
    """A history cleared to an empty list gives an empty view, also when a result was ready."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        model.release.set()
        await handle.wait()
        assert await session.commit([]) == []
        assert handle.reason is Reason.BRANCH_DIVERGED
        assert same_objects(await session.commit(messages[:2]), messages[:2])


@pytest.mark.parametrize("status", ["in_progress", "streaming", "incomplete"])
@virtual
async def test_b34_a_half_written_reply_is_neither_input_nor_boundary(status: str) -> None:
    """A reply that still streams is not read; what was before it is, and it goes out as it is."""
    messages = long_chat()
    partial = {**A("<777> half a rep"), "status": status}
    messages.append(partial)
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=0))
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        view = await session.commit(messages)
        assert view[-1] is partial
        assert all(777 not in marks(i) for i in model.inputs)
        assert not any(777 in marks([m]) for m in view[:-1])
        partial["content"] = "<777> half a reply and the rest"
        partial["status"] = "completed"
        messages.append(H("<778> next"))
        after = await session.commit(messages)
        assert same_objects(after[:-2], view[:-1])
        assert same_objects(after[-2:], messages[-2:])


@virtual
async def test_b34_a_stale_mark_further_up_does_not_blind_the_session() -> None:
    """A reply that was cut off and left marked blocks nothing once the agent has gone on."""
    messages = [
        *chat(2, size=55),
        {**A("<99> cut off"), "status": "incomplete"},
        *chat(12, size=55, first=50, system=False),
    ]
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        view = await session.commit(messages)
        assert summaries(view)
        assert 99 in marks(model.inputs[0])


@virtual
async def test_b37_only_the_turn_boundary_changes_what_is_sent() -> None:
    """A result that becomes ready between two turns changes nothing by itself: commit is the one writer."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        before = await session.commit(messages)
        frozen = copy.deepcopy(before)
        model.release.set()
        await handle.wait()
        await settle(60)
        assert handle.state is HandleState.READY
        assert before == frozen
        assert same_objects(before, messages)
        messages.append(H("next"))
        assert summaries(await session.commit(messages))
        assert before == frozen


@virtual
async def test_b41_appends_never_wait_for_the_summary() -> None:
    """Commits while the model works return in the same instant of virtual time, whatever is appended."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        loop = asyncio.get_running_loop()
        for k in range(5):
            messages.append(H(f"<{600 + k}> appended"))
            before = loop.time()
            view = await session.commit(messages)
            session.observe(messages)
            assert loop.time() == before
            assert view[-1] is messages[-1]
            await anyio.sleep(0.3)
        assert handle.state is HandleState.RUNNING
        model.release.set()
        await handle.wait()
        view = await session.commit(messages)
        assert [m["content"] for m in view[-5:]] == [f"<{600 + k}> appended" for k in range(5)]


@virtual
async def test_b42_two_triggers_in_one_tick_give_one_summary() -> None:
    """Two observes, two commits and an explicit schedule in the same tick: one model call, one summary in the view."""
    messages = long_chat()
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        first, second = session.observe(messages), session.observe(messages)
        assert first is second
        async with anyio.create_task_group() as group:
            group.start_soon(session.commit, messages)
            group.start_soon(session.commit, messages)
        explicit = session.schedule_transform("summarize", messages)
        await settle(10)
        assert model.calls == 1
        view = await session.commit(messages)
        assert len(summaries(view)) == 1
        assert explicit.done()
        assert len(summaries(await session.commit(messages))) == 1
        assert len(session.receipts) == 1


@virtual
async def test_b42_a_handle_committed_twice_is_committed_once() -> None:
    """Commit through the handle, again, and through the session: the same view, one receipt."""
    messages = long_chat()
    async with held_session(messages) as (runtime, session, model, handle):
        model.release.set()
        await handle.wait()
        first = handle.commit(messages)
        assert same_objects(handle.commit(messages), first)
        assert same_objects(await session.commit(messages), first)
        assert len(session.receipts) == 1
        assert runtime.counters.committed == 1


@virtual
async def test_b50_appends_never_make_a_result_stale() -> None:
    """A message per turn while it runs: one summary started, one applied, none wasted."""
    messages = long_chat()
    async with held_session(messages) as (runtime, session, model, handle):
        for k in range(8):
            messages += [H(f"<{600 + k}> q"), A(f"<{700 + k}> a")]
            session.observe(messages)
            await session.commit(messages)
            await anyio.sleep(1)
        model.release.set()
        await handle.wait()
        await session.commit(messages)
        counters = runtime.counters
        assert handle.state is HandleState.COMMITTED
        assert (model.calls, counters.committed, counters.stale_total, counters.wasted_tokens) == (1, 1, 0, 0)


@pytest.mark.parametrize("size", [800, 1500, 4000])
@virtual
async def test_b51_a_tail_that_outgrew_the_result_is_recut_not_applied(size: int) -> None:
    """A huge message after the snapshot: no view goes out that triggers again at once or does not fit."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        model.release.set()
        await handle.wait()
        model.mode = "answer"
        messages += [A("<600>", "big"), T("big", "<601>", size=size), A("<602> I have read it"), H("<603> go on")]
        view = await session.commit(messages)
        total = sum(session.codec.estimate(m) for m in view)
        assert handle.state is not HandleState.READY
        assert total <= 1700
        if handle.state is HandleState.DISCARDED:
            assert handle.reason is Reason.SUPERSEDED
        await settle(10)
        view = await session.commit([*messages, A("<604> ok"), H("<605> more")])
        assert sum(session.codec.estimate(m) for m in view) < 1200
        assert valid_request(view)


@virtual
async def test_b51_b50_a_tail_that_outgrows_every_run_does_not_waste_every_summary() -> None:
    """Where no run brings the view under the trigger, results are applied: not one after another wasted."""
    model = fast()
    messages = [
        m
        for k in range(12)
        for m in (
            H(f"<{9 * k}>", size=150),
            A(f"<{9 * k + 1}>", f"c{k}", size=150),
            T(f"c{k}", f"<{9 * k + 2}>", size=150),
        )
    ]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=small_policy(model))
        turns = await feed(session, messages, every=False)
        counters = runtime.counters
        assert counters.committed >= 4
        assert counters.stale_total <= counters.committed + 1
        assert len(turns[-1].view) <= 7


@virtual
async def test_b56_reloading_equal_copies_between_snapshot_and_commit_changes_nothing() -> None:
    """Every message is another object with another id and usage: the result applies, and is paid for once."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        copies = [{**copy.deepcopy(m), "id": f"new-{k}", "usage": None} for k, m in enumerate(messages)]
        model.release.set()
        await handle.wait()
        view = await session.commit(copies)
        assert handle.state is HandleState.COMMITTED
        assert same_objects(view[2:], copies[handle.run.end :])
        for k in range(5):
            again = [{**copy.deepcopy(m), "id": f"again-{k}"} for m in copies]
            assert len(summaries(await session.commit(again))) == 1
        assert model.calls == 1


@virtual
async def test_b57_two_workers_at_one_barrier_see_one_rewrite() -> None:
    """Two tool workers commit at once: the same view, one receipt, and nothing of the history is changed."""
    messages = long_chat()
    frozen = copy.deepcopy(messages)
    async with held_session(messages) as (_, session, model, handle):
        model.release.set()
        await handle.wait()
        views: list[list[Any]] = []

        async def worker() -> None:
            views.append(await session.commit(messages))
            session.observe(messages)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(worker)
        assert all(same_objects(v, views[0]) for v in views)
        assert len(session.receipts) == 1
        assert messages == frozen


@virtual
async def test_b58_messages_sent_while_a_turn_waits_queue_in_order() -> None:
    """Two turns at the hard limit wait for the same promoted summary; both go out with their own messages in order."""
    messages = chat(18, size=55)
    async with held_session(messages) as (runtime, session, model, handle):
        views: dict[int, list[Any]] = {}
        sends = [[*messages, H("<900> one")], [*messages, H("<900> one"), H("<901> two")]]

        async def turn(k: int) -> None:
            await anyio.sleep(k)
            views[k] = await session.commit(sends[k])

        async with anyio.create_task_group() as group:
            group.start_soon(turn, 0)
            group.start_soon(turn, 1)
            await anyio.sleep(5)
            model.release.set()
        assert handle.state is HandleState.COMMITTED
        for k, view in views.items():
            assert len(summaries(view)) == 1
            assert same_objects(view[-(k + 1) :], sends[k][-(k + 1) :])
        assert (runtime.counters.started, runtime.counters.committed) == (1, 1)


@virtual
async def test_an_edit_of_the_covered_part_while_it_runs_discards_the_result() -> None:
    """An edit in place, a removal and a swap in the covered part each make it stale; the raw messages go out."""
    for edit in ("in place", "removed", "swapped", "inserted"):
        messages = long_chat()
        async with held_session(messages) as (_, session, model, handle):
            if edit == "in place":
                messages[3]["content"] = "<3> edited"
            elif edit == "removed":
                del messages[3]
            elif edit == "swapped":
                messages[3], messages[5] = messages[5], messages[3]
            else:
                messages.insert(3, H("<333> inserted"))
            model.release.set()
            await settle(1)
            model.mode = "answer"
            view = await session.commit(messages)
            assert handle.state is HandleState.DISCARDED, edit
            assert not summaries(view) or 3 not in marks([view[1]])
            check(messages, view)
            with pytest.raises(HandleError):
                handle.commit(messages)


@virtual
async def test_an_edit_of_the_tail_while_it_runs_keeps_the_result() -> None:
    """The prefix that was summarised did not change: regenerating the last reply wastes nothing."""
    messages = long_chat()
    async with held_session(messages) as (_, session, model, handle):
        messages[-1] = A("<99> regenerated", size=55)
        await session.commit(messages)
        model.release.set()
        await handle.wait()
        view = await session.commit(messages)
        assert handle.state is HandleState.COMMITTED
        assert view[-1] is messages[-1]


@virtual
async def test_a_tuple_and_a_new_list_each_turn_are_the_same_history() -> None:
    """The caller may hand over another container every turn."""
    model = fast()
    messages = long_chat()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        session.observe(tuple(messages))
        await settle(5)
        first = await session.commit(tuple(messages))
        second = await session.commit(list(messages))
        assert summaries(first)
        assert same_objects(first, second)


def test_keep_recent_is_the_default_fallback() -> None:
    """A race never leaves the caller without a local way out."""
    assert isinstance(Policy(Summarize(FakeSummarizer()), context_window=1000).fallback, KeepRecent)


@virtual
async def test_a_handle_that_its_own_commit_drops_is_stale_and_counted_once() -> None:
    """In rewrite mode the base was replaced by the view: a second handle is dropped, not dropped and committed."""
    messages = long_chat()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        first = session.schedule_transform("summarize", messages, target_segments=range(0, 16))
        second = session.schedule_transform("summarize", messages, target_segments=range(0, 18))
        await settle(10)
        view = first.commit(messages)
        with pytest.raises(StaleHandle):
            second.commit([*view, H("<900>")])
        assert second.state is HandleState.DISCARDED
        counters = runtime.counters
        assert counters.started == counters.committed + counters.stale_total == 2
