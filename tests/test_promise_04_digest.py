"""Promise 4: a replacement is used only under a matching digest: across edits, forks, threads, processes, restarts."""

from __future__ import annotations

import copy

import pytest

from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    chat,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import Finish, HandleState, Immediate, Reason, Salvage, StaleHandle


@pytest.mark.parametrize("where", [1, 4, 9])
@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "replaced"])
@virtual
async def test_promise_04_an_edit_of_what_was_summarised_brings_the_raw_back(where: int, in_place: bool) -> None:
    """After an edit inside the summarised run the summary is gone from the view; nothing of the old text stays."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), overrun="raw"))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        assert summaries(await session.commit(messages))
        if in_place:
            messages[where]["content"] = "<777> edited"
        else:
            messages[where] = {**messages[where], "content": "<777> edited"}
        view = await session.commit(messages)
        assert same_objects(view, messages)


@virtual
async def test_promise_04_an_edit_behind_the_summary_keeps_it() -> None:
    """What still matches stays: an edit in the raw tail does not touch the summary before it."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        before = await session.commit(messages)
        messages[-1] = A("<777> another answer")
        after = await session.commit(messages)
        assert len(session.receipts) == 1 and same_objects(before[:-1], after[:-1]) and after[-1] is messages[-1]


@pytest.mark.parametrize("discard", [Salvage(), Finish(), Immediate()], ids=["salvage", "finish", "immediate"])
@virtual
async def test_promise_04_a_result_for_an_edited_history_is_stale(discard: Salvage | Finish | Immediate) -> None:
    """The history is edited while the summary is written: the late result is never applied."""
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, discard=discard, overrun="raw"))
        messages = chat(11, size=60)
        handle = session.observe(messages)
        assert handle is not None
        await settle()
        messages[2]["content"] = "<777> edited"
        await session.commit(messages)
        model.release.set()
        await settle()
        assert handle.state is HandleState.DISCARDED
        assert handle.reason in (Reason.BRANCH_DIVERGED, Reason.DIGEST_MISMATCH)
        view = await session.commit(messages)
        assert marks(view) <= marks(messages) and not session.receipts or 3 in marks(view)
        assert 1 not in marks(view)


@virtual
async def test_promise_04_an_edit_that_nobody_told_us_of_is_noticed() -> None:
    """Messages edited in place while the lookahead waits in the queue: its result would be of the new text under
    the old digest, so it is refused, and other sessions never get it."""
    model = FakeSummarizer("hold")
    store = FlakyStore()
    async with make_runtime(store=store, concurrency=1) as runtime:
        policy = make_policy(model, model_id="m", overrun="raw")
        busy = runtime.session("busy", policy=policy)
        busy.observe(chat(11, size=60, first=500))
        await settle()
        session = runtime.session("s", policy=policy)
        messages = chat(11, size=60)
        handle = session.observe(messages)
        assert handle is not None and handle.state is HandleState.PENDING
        text = messages[2]["content"]
        messages[2]["content"] = "<777> edited"
        model.release.set()
        await settle(1)
        messages[2]["content"] = text  # and back: the digests match again
        assert handle.state is HandleState.DISCARDED and handle.reason is Reason.DIGEST_MISMATCH
        assert 777 not in marks(await session.commit(messages))
        await settle(1)
        other = runtime.session("other", policy=policy)
        other.observe(copy.deepcopy(messages))
        await settle(5)
        assert 777 not in marks(await other.commit(copy.deepcopy(messages)))


@virtual
async def test_promise_04_reloaded_copies_are_the_same_history() -> None:
    """Equal messages with other ids, usage and metadata are no new branch: the summary stays, nothing is redone."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        await session.commit(messages)
        again = [{**copy.deepcopy(m), "id": f"run-{i}", "response_metadata": {"x": i}} for i, m in enumerate(messages)]
        view = await session.commit(again)
        assert len(session.receipts) == 1 and model.calls == 1
        assert summaries(view) and view[-1] is again[-1]


@virtual
async def test_promise_04_the_branch_that_comes_back_gets_its_summary_back() -> None:
    """Time travel and back: salvaged, without another model call."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, overrun="raw", trigger=("fraction", 0.6)))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        there = await session.commit(messages)
        short = messages[:4]
        assert same_objects(await session.commit(short), short)
        back = await session.commit(messages)
        assert same_objects(back, there)
        assert session.receipts[-1].how == "salvaged" and model.calls == 1
        assert runtime.counters.salvaged == 1


@virtual
async def test_promise_04_forks_share_what_their_prefix_shares() -> None:
    """A fork gets the summary of the common prefix; after they part, neither sees the other's text."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        await session.commit(messages)
        fork = session.fork("f")
        theirs = copy.deepcopy(messages)
        messages += [H("<901> ours"), A("<902>")]
        theirs += [H("<903> theirs"), A("<904>")]
        mine, other = await session.commit(messages), await fork.commit(theirs)
        assert summaries(mine) == summaries(other) != []
        assert 903 not in marks(mine) and 901 not in marks(other)
        assert model.calls == 1


@virtual
async def test_promise_04_another_process_continues_from_the_store() -> None:
    """A new runtime on the same store applies the committed summary at its first commit; a changed history not."""
    store, model = FlakyStore(), FakeSummarizer()
    messages = chat(10, size=60)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        await session.commit(messages)
        await settle(5)
        there = await session.commit(messages)
        await settle(1)
    loaded = copy.deepcopy(messages)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        view = await session.commit(loaded)
        assert view == there and session.receipts[-1].how == "salvaged"
    loaded[3]["content"] = "<777> changed"
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m", overrun="raw"))
        assert not summaries(await session.commit(loaded))
    assert model.calls == 1 or 777 in marks(model.inputs[-1])


@virtual
async def test_promise_04_a_handle_refuses_another_history() -> None:
    """``handle.commit`` of a history that it was not made from raises ``StaleHandle``."""
    model, events = FakeSummarizer(), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(11, size=60)
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        other = copy.deepcopy(messages)
        other[2]["content"] = "<777>"
        with pytest.raises(StaleHandle):
            handle.commit(other)
        assert handle.state is HandleState.DISCARDED
        assert not events.of("error")


@virtual
async def test_promise_04_rewrite_mode_never_reads_another_branch_back() -> None:
    """Rewrite mode with ``source="raw"``: after the list was cleared, the archived raw messages of the old
    conversation are not given to a summariser again."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, source="raw"))
        messages = chat(10, size=60)
        for first in (10, 20):
            messages = await session.commit(messages)
            await settle(5)
            messages = await session.commit(messages)
            messages = [*messages, *chat(8, size=60, first=first, system=False)]
        assert len(session.receipts) >= 2
        assert 1 in marks(model.inputs[-1]), "the raw messages were read back"
        messages = chat(11, size=60, first=100)
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert summaries(view) and marks(view) == marks(messages)


@virtual
async def test_promise_04_a_summary_that_supersedes_a_fallback_covers_what_it_dropped() -> None:
    """What the fallback removed was in no summary yet: the next one reads the raw messages."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=1))
        messages = chat(16, size=60)
        dropped = marks(messages) - marks(await session.commit(messages))
        assert dropped and session.receipts[-1].how == "fallback"
        handle = session.lookahead
        if handle is not None:
            handle.discard()
        model.mode = "answer"
        messages += chat(5, size=60, first=16, system=False)
        for _ in range(2):
            view = await session.commit(messages)
            await settle(5)
        assert session.receipts[-1].how == "ready"
        assert marks(view) == marks(messages)


@pytest.mark.parametrize("observed", [True, False], ids=["observed", "committed"])
@virtual
async def test_promise_04_rewrite_mode_is_recognised_at_either_boundary(observed: bool) -> None:
    """A caller that keeps the returned view is followed from its first observe or commit on: the raw messages behind
    the summary are archived, and the next summary with ``source="raw"`` reads them again."""
    model = FakeSummarizer()
    async with make_runtime(on_event=(events := Events())) as runtime:
        session = runtime.session("s", policy=make_policy(model, source="raw"))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        messages = await session.commit(messages)
        messages += chat(8, size=60, first=20, system=False)
        if observed:
            session.observe(messages)
        await session.commit(messages)
        await settle(5)
        await session.commit(messages)
        assert len(events.of("view.rebased")) == 1 and not events.of("view.dropped")
        assert len(session.receipts) == 2
        assert not summaries(model.inputs[-1]) and 1 in marks(model.inputs[-1])


@virtual
async def test_promise_04_rewrite_mode_an_edited_view_is_not_the_one_that_was_sent() -> None:
    """The caller edits the summary in the view that it keeps: what is archived behind the old text is not read back."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, source="raw"))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        messages = await session.commit(messages)
        messages[1]["content"] = "<777> my own summary"
        messages += chat(8, size=60, first=20, system=False)
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert summaries(view) and 777 in marks(view) and 1 not in marks(view)
