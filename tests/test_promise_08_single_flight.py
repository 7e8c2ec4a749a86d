"""Promise 8: one model call per artifact key, one current generation per session, late results are stale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from helpers import (
    FakeSummarizer,
    H,
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
from smoothctx import Finish, HandleState, MemoryStore, Reason


@virtual
async def test_promise_08_a_fork_shares_the_call_that_is_under_way() -> None:
    """A session and its fork ask for the same artifact: the model runs once, both commit the same summary."""
    model = FakeSummarizer(delay=5)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        one = session.observe(messages)
        fork = session.fork("t")
        two = fork.observe(messages)
        assert one is not None and two is not None and one is not two
        assert await one.wait() is await two.wait() is HandleState.READY
        assert model.calls == 1
        views = [await s.commit(messages) for s in (session, fork)]
        assert views[0] == views[1] and summaries(views[0])
        assert model.calls == 1
        assert runtime.counters.started == runtime.counters.committed == 2
        coherent(session, runtime)


@virtual
async def test_promise_08_a_fork_shares_the_call_of_an_anonymous_model_too() -> None:
    """Without ``model_id`` a callable is private to its object, and a fork has the same object: still one call."""
    model = FakeSummarizer(delay=5)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        one = session.observe(messages)
        fork = session.fork("t")
        two = fork.observe(messages)
        assert one is not None and two is not None and one is not two
        assert await one.wait() is await two.wait() is HandleState.READY
        assert model.calls == 1
        views = [await s.commit(messages) for s in (session, fork)]
        assert views[0] == views[1] and summaries(views[0])
        assert model.calls == 1
        assert runtime.counters.started == runtime.counters.committed == 2
        coherent(session, runtime)


@virtual
async def test_promise_08_equal_policies_with_a_named_model_share_within_a_tenant() -> None:
    """Two sessions that never met, with transforms of equal fingerprint and equal prefixes: one call."""
    model = FakeSummarizer(delay=5)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        handles = [
            runtime.session(f"s{k}", policy=make_policy(model, model_id="m")).observe(chat(12, size=55))
            for k in range(5)
        ]
        await settle(6)
        assert all(h is not None and h.state is HandleState.READY for h in handles)
        assert model.calls == 1
        late = runtime.session("late", policy=make_policy(model, model_id="m"))
        await late.commit(messages)
        await settle(6)
        assert summaries(await late.commit(messages))
        assert model.calls == 1


@virtual
async def test_promise_08_another_tenant_does_not_share() -> None:
    """Equal transform and equal messages of another tenant: a call of its own, under way and from the store."""
    model = FakeSummarizer(delay=5)
    messages = chat(12, size=55)
    async with make_runtime(store=MemoryStore(clock=lambda: 0.0)) as runtime:
        policy = make_policy(model, model_id="m")
        for tenant in ("a", "b"):
            runtime.session("s", policy=policy, tenant=tenant).observe(messages)
        await settle(6)
        assert model.calls == 2
        runtime.session("s", policy=policy, tenant="c").observe(messages)
        await settle(6)
        assert model.calls == 3
        runtime.session("other", policy=policy, tenant="c").observe(messages)
        await settle(6)
        assert model.calls == 3


@virtual
async def test_promise_08_an_anonymous_model_is_not_shared_between_policies() -> None:
    """A callable without ``model_id`` is private to its transform: equal prefixes, two calls."""
    model = FakeSummarizer(delay=5)
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        for k in range(2):
            runtime.session(f"s{k}", policy=make_policy(model)).observe(messages)
        await settle(6)
        assert model.calls == 2


@virtual
async def test_promise_08_one_sharer_that_leaves_does_not_cancel_the_other() -> None:
    """The call ends only when nobody needs it: after one handle is discarded the other still gets its result."""
    model = FakeSummarizer("hold")
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        one, two = session.observe(messages), session.fork("t").observe(messages)
        assert one is not None and two is not None
        await settle(1)
        one.discard()
        await settle(1)
        assert one.state is HandleState.DISCARDED and two.state is HandleState.RUNNING
        assert model.cancelled == 0
        model.release.set()
        assert await two.wait() is HandleState.READY
        assert model.calls == 1
        two.discard()
        coherent(session, runtime)


@virtual
async def test_promise_08_the_last_one_to_leave_cancels_the_call() -> None:
    """Nobody needs it any more: the model call is cancelled, and asking again makes a new one."""
    model = FakeSummarizer("hold")
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        one, two = session.observe(messages), session.fork("t").observe(messages)
        assert one is not None and two is not None
        await settle(1)
        one.discard()
        two.discard()
        again = session.observe(messages)
        await settle(1)
        assert model.cancelled == 1 and model.calls == 2
        assert again is not None and again.state is HandleState.RUNNING
        model.release.set()
        assert await again.wait() is HandleState.READY


@pytest.mark.parametrize("where", ["running", "waiting"])
@virtual
async def test_promise_08_who_joins_as_the_last_one_leaves_gets_a_call_of_its_own(where: str) -> None:
    """Another session closes between the moment when its flight was found and that when it is joined: the flight is
    cancelled, or has ended already; the one that comes is not cancelled with it."""
    model, messages = FakeSummarizer(delay=5), chat(12, size=55)
    async with make_runtime(concurrency=1) as runtime:
        policy = make_policy(model, model_id="m")
        first, second = runtime.session("s", policy=policy), runtime.session("t", policy=policy)
        if where == "waiting":
            runtime.session("busy", policy=policy).observe(chat(12, size=55, first=500))
            await settle(1)
        one = first.observe(messages)
        await settle(1)
        preloading = second.serving.preloading
        follow = preloading.follow

        def followed(latest: Sequence[Any]) -> None:  # between the two, as another thread may be
            first.close_now(Reason.SESSION_CLOSED)
            follow(latest)

        preloading.follow = followed  # type: ignore[method-assign]
        two = second.schedule_transform("summarize", messages)
        assert await two.wait() is HandleState.READY
        assert one is not None and one.reason is Reason.SESSION_CLOSED
        assert summaries(two.commit(messages))
        assert runtime.counters.stale == {"session_closed": 1}


@virtual
async def test_promise_08_the_late_result_of_a_dead_branch_is_not_applied() -> None:
    """The history was edited while the call ran, which finishes all the same: the new branch never sees its text."""
    model = FakeSummarizer(delay=20)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, discard=Finish()))
        old = chat(12, size=55)
        late = session.observe(old)
        assert late is not None
        await settle(5)
        new = [old[0], H("<700> edited", size=55), *old[2:]]
        assert same_objects(await session.commit(new), new)
        current = session.lookahead
        assert current is not None and current is not late
        await settle(16)
        assert late.state is HandleState.DISCARDED and late.reason is Reason.BRANCH_DIVERGED
        assert same_objects(await session.commit(new), new)
        await settle(20)
        view = await session.commit(new)
        assert summaries(view) and marks(view) == marks(new)
        assert model.calls == 2 and len(session.receipts) == 1
        coherent(session, runtime)
