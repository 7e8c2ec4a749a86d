"""Promise 2: the view is the replaced prefix and every later message, in order; a commit is all or nothing."""

from __future__ import annotations

import asyncio

import pytest

from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    Message,
    T,
    chat,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    tool_chat,
    virtual,
)
from smoothctx import Chain, HandleState, Offload, Policy, Rewrite, Summarize
from smoothctx.transforms.base import Locality, TransformRequest


@pytest.mark.parametrize("late", range(6))
@virtual
async def test_promise_02_what_was_appended_meanwhile_is_kept(late: int) -> None:
    """Messages that came while the summary was written stand behind it, the same objects in the same order."""
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, window=4000))
        messages = chat(22, size=60)
        await session.commit(messages)
        await settle()
        handle = session.lookahead
        assert handle is not None
        end = handle.run.end
        for k in range(late):
            messages += [H(f"<{900 + k}> late"), A("call", f"c{k}"), T(f"c{k}")]
        model.release.set()
        await settle()
        view = await session.commit(messages)
        assert handle.state is HandleState.COMMITTED
        assert same_objects(view[2:], [m for i, m in enumerate(messages) if i >= end or i in handle.run.kept][:])
        assert view[0] is messages[0] and len(summaries(view)) == 1
        assert marks(view) == marks(messages)


class Half:
    """Rewrites the first half well; the rest of what it returns is broken."""

    name = "half"
    locality = Locality.PREFIX
    fingerprint: str | None = None
    keep = ("messages", 4)

    async def apply(self, request: TransformRequest) -> Rewrite:
        return Rewrite(messages=[request.codec.summary("fine"), {"role": "tool", "content": "orphan"}, {"oops": 1}])


@virtual
async def test_promise_02_half_a_result_is_no_result() -> None:
    """A result of which a part is broken is refused whole."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=Policy(Half(), context_window=2000))
        messages = chat(12, size=60)
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.FAILED
        assert same_objects(await session.commit(messages), messages)
        assert not session.receipts


@virtual
async def test_promise_02_a_chain_is_one_commit() -> None:
    """Offload and summarise in one boundary: one receipt, one view."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        chain = Chain(Offload(min_tokens=100), Summarize(model, keep=("messages", 4), facts=False))
        session = runtime.session("s", policy=Policy(chain, context_window=3000, land_at=("fraction", 0.3)))
        messages = tool_chat(6, size=110)
        await session.commit(messages)
        await settle(5)
        await session.commit(messages)
        assert [r.transform for r in session.receipts] == ["chain"]
        assert runtime.counters.committed == 1


@virtual
async def test_promise_02_commit_cancelled_at_the_limit_is_all_or_nothing() -> None:
    """A turn that is cancelled while it waits leaves the view as it was; the next turn commits the result."""
    model, events = FakeSummarizer("hold"), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(17, size=60)
        task = asyncio.get_running_loop().create_task(session.commit(messages))
        await settle(1)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not session.receipts and not session.branch.edits
        model.release.set()
        await settle()
        view = await session.commit(messages)
        assert len(session.receipts) == 1 and marks(view) == marks(messages)


@virtual
async def test_promise_02_two_boundaries_at_once_commit_once() -> None:
    """Two commits that wait for the same lookahead give the same view; it is committed once."""
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages: list[Message] = chat(17, size=60)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(session.commit(messages)) for _ in range(2)]
        await settle(1)
        model.release.set()
        one, two = [await t for t in tasks]
        assert same_objects(one, two)
        assert runtime.counters.committed == 1 and len(session.receipts) == 1
