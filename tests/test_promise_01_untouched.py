"""Promise 1: the caller's messages are never changed, reordered or lost; an untouched one is the same object."""

from __future__ import annotations

import copy

import pytest

from helpers import (
    A,
    FakeSummarizer,
    H,
    Message,
    S,
    T,
    chat,
    is_subsequence,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    tool_chat,
    virtual,
)
from smoothctx import KeepRecent, Offload, Policy


@pytest.mark.parametrize("source", ["view", "raw"])
@virtual
async def test_promise_01_caller_messages_are_never_changed(source: str) -> None:
    """Through commits, observes, a rewrite and a fallback the caller's list and dicts stay what they were."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, source=source, max_wait=0))
        messages: list[Message] = [S()]
        for k in range(30):
            messages += [H(f"<{k}> q", size=60), A(f"<{100 + k}> a", f"c{k}", size=60), T(f"c{k}", "r", size=60)]
            before, objects = copy.deepcopy(messages), list(messages)
            await session.commit(messages)
            session.observe(messages)
            await settle(2 if k % 3 else 0)
            assert messages == before and same_objects(messages, objects)
        assert {r.how for r in session.receipts} >= {"ready"}


@virtual
async def test_promise_01_kept_messages_are_the_same_objects() -> None:
    """Everything in the view that we did not make is the caller's own object, in the caller's order."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = tool_chat(6, size=60)
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert len(session.receipts) == 1
        made = [m for m in view if not any(m is x for x in messages)]
        assert len(made) == 1
        assert is_subsequence([m for m in view if m is not made[0]], messages)
        assert marks(view) == marks(messages)


@virtual
async def test_promise_01_a_model_that_changes_its_input_changes_nothing() -> None:
    """What the model does to the messages that it is given stays with it."""

    async def vandal(messages: list[Message], *, max_tokens: int | None = None) -> str:
        for m in messages:
            m["content"] = "broken"
        messages.clear()
        return "summary"

    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(vandal))
        messages = tool_chat(6, size=60)
        before = copy.deepcopy(messages)
        await session.commit(messages)
        await settle(5)
        await session.commit(messages)
        assert session.receipts and messages == before


@virtual
async def test_promise_01_changing_the_returned_list_does_not_change_the_next_view() -> None:
    """The view is the caller's to change: the next one is whole again."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(10, size=60)
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        whole = list(view)
        view.clear()
        assert same_objects(await session.commit(messages), whole)


@pytest.mark.parametrize("transform", [Offload(min_tokens=100), KeepRecent(("messages", 4))], ids=["offload", "keep"])
@virtual
async def test_promise_01_local_transforms_leave_messages_alone(transform: Offload | KeepRecent) -> None:
    """Offload and KeepRecent make new messages or none; the caller's are as they were."""
    async with make_runtime() as runtime:
        policy = Policy(transform, context_window=3000, land_at=("fraction", 0.3))
        session = runtime.session("s", policy=policy)
        messages = tool_chat(6, size=150)
        before = copy.deepcopy(messages)
        for _ in range(4):
            view = await session.commit(messages)
            await settle(2)
        assert session.receipts and messages == before
        assert is_subsequence([m for m in view if any(m is x for x in messages)], messages)


@virtual
async def test_promise_01_what_cannot_be_read_is_passed_through() -> None:
    """A malformed message is in the view, as the same object, and so is everything behind it."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(3)
        odd = [{"role": "wizard", "content": "?"}, {"content": "no role"}, 7, None]
        messages += odd  # type: ignore[arg-type]
        messages += [H("after")]
        assert same_objects(await session.commit(messages), messages)
