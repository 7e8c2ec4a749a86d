"""Promise 9: between commits the view only grows at its end, and an edit has to be worth what it re-bills."""

from __future__ import annotations

import json

import pytest

from driving import small_policy
from helpers import (
    CODEC,
    A,
    FakeSummarizer,
    H,
    Message,
    chat,
    coherent,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import HandleState, Offload, Policy, Reason


@pytest.mark.parametrize("mode", ["answer", "fail", "hang"])
@virtual
async def test_promise_09_between_commits_the_view_only_grows_at_its_end(mode: str) -> None:
    """Over a long session: a view without a new receipt is the last one plus the new messages, object by object."""
    model = FakeSummarizer(mode, delay=3)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=5))
        messages: list[Message] = chat(1, size=60)
        last = await session.commit(messages)
        grown = 0
        for k in range(1, 60):
            added = chat(1, size=60, first=k, system=False)
            messages += added
            session.observe(messages)
            await settle(1)
            receipts = len(session.receipts)
            view = await session.commit(messages)
            if len(session.receipts) == receipts:
                assert same_objects(view, [*last, *added])
                grown += 1
            last = view
        assert grown > 30
        assert session.receipts


@virtual
async def test_promise_09_copies_of_the_history_give_the_same_bytes() -> None:
    """A caller that reloads its history every turn gets byte for byte the same prefix."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(12, size=55)
        session.observe(messages)
        await settle(5)
        sent = json.dumps(await session.commit(messages))
        assert len(session.receipts) == 1
        for k in range(5):
            messages = [*json.loads(json.dumps(messages)), A(f"<{900 + k}>"), H(f"<{950 + k}>")]
            view = json.dumps(await session.commit(messages))
            assert view.startswith(sent[:-1])
            sent = view
        assert len(session.receipts) == 1


@virtual
async def test_promise_09_a_ready_result_changes_nothing_before_the_boundary() -> None:
    """Observing, waiting and reading handles leave the view alone; only a boundary changes it, once."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(12, size=55)
        before = await session.commit(messages)
        handle = session.lookahead
        assert handle is not None
        await handle.wait()
        session.observe(messages)
        assert same_objects(session.branch.project(messages), before) and not session.receipts
        after = await session.commit(messages)
        assert summaries(after) and len(session.receipts) == 1


def _costly(model: FakeSummarizer) -> tuple[list[Message], Policy]:
    """A history with little to save in front of a long tail that was sent before, and the policy for it."""
    messages = [H("<0>", size=400), A("<1>", size=10), *chat(10, size=55, first=5, system=False)]
    policy = make_policy(
        model,
        keep=20,
        trigger=("tokens", 1300),
        hard_limit=("tokens", 1900),
        land_at=("tokens", 1250),
        min_savings=0.1,
    )
    return messages, policy


@virtual
async def test_promise_09_an_edit_that_re_bills_more_than_it_saves_waits_until_the_limit() -> None:
    """The result stays ready and unused turn after turn; at the hard limit it goes in without a wait."""
    model = FakeSummarizer()
    messages, policy = _costly(model)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy)
        await session.commit(messages)
        handle = session.lookahead
        assert handle is not None
        assert await handle.wait() is HandleState.READY
        for _ in range(5):
            assert same_objects(await session.commit(messages), messages)
            await settle(10)
        assert handle.state is HandleState.READY and not session.receipts
        messages += [A("<90>", size=200), H("<91>", size=200)]
        view = await session.commit(messages)
        assert summaries(view) and marks(view) == marks(messages)
        assert handle.receipt is session.receipts[0]
        assert session.receipts[0].waited_s == 0 and model.calls == 1


@virtual
async def test_promise_09_the_same_edit_is_made_where_nothing_was_sent_yet() -> None:
    """Nothing cached is re-billed by a first request: the very same result is committed at once."""
    model = FakeSummarizer()
    messages, policy = _costly(model)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy)
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        assert summaries(await session.commit(messages))
        assert handle.state is HandleState.COMMITTED


@virtual
async def test_promise_09_a_result_that_the_tail_outgrew_is_not_applied() -> None:
    """Ready, but the view would stay above the trigger: it is dropped, and a run that covers more replaces it."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, trigger=("tokens", 600), land_at=("tokens", 400)))
        messages = chat(6, size=55)
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        messages += chat(8, size=55, first=6, system=False)
        assert same_objects(await session.commit(messages), messages)
        assert handle.state is HandleState.DISCARDED and handle.reason is Reason.SUPERSEDED
        assert not session.receipts
        await settle(5)
        view = await session.commit(messages)
        assert summaries(view) and marks(view) == marks(messages)
        assert sum(map(CODEC.estimate, view)) < 600
        assert runtime.counters.stale == {Reason.SUPERSEDED: 1}
        coherent(session, runtime)


@virtual
async def test_promise_09_the_retrieve_tool_is_known_from_the_first_turn() -> None:
    """Its schema is a constant of the transform and does not depend on what was offloaded: tools never change."""
    before = json.dumps(Offload().tool_schema)
    assert json.loads(before)["function"]["name"] == "retrieve"
    assert json.dumps(Offload.tool_schema) == before


@pytest.mark.parametrize("keep", [2, 4, 10])
@pytest.mark.parametrize("delay", [0.5, 2.5])
@virtual
async def test_promise_09_a_result_that_never_pays_makes_way(keep: int, delay: float) -> None:
    """A short run behind a long kept tail saves less than it re-bills; it does not keep longer ones from being made."""
    model = FakeSummarizer(delay=delay, text="s" * 160)
    async with make_runtime() as runtime:
        policy = small_policy(
            model, keep=("messages", keep), trigger=("messages", keep + 2), land_at=("messages", keep + 1)
        )
        session = runtime.session("s", policy=policy)
        messages: list[Message] = []
        for k in range(60):
            messages.append(H(f"<{k}>", size=64))
            view = await session.commit(messages)
            session.observe(messages)
            assert len(view) < 3 * keep + 10
            await settle(1)
        assert len(session.receipts) >= 2 and all(r.tokens_after < r.tokens_before for r in session.receipts)
        assert model.calls <= 4 * len(session.receipts) + 2, "results are not made to be thrown away"
        coherent(session, runtime, live=len(session._handles.all()))
