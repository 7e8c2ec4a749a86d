"""One model endpoint serves many agents: calls in flight are bounded, waiting ones too, and nobody starves."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from helpers import Events, FakeSummarizer, H, chat, coherent, make_policy, make_runtime, settle, virtual
from smoothctx import ConfigurationError, HandleState, ParallelSummarize, Policy, Reason, Runtime
from smoothctx.endpoints import Endpoint, EndpointFull, Endpoints, calling, endpoint
from smoothctx.testing import FakeEngine
from virtual import run_virtual


def calm() -> bool:
    """No turn waits for it."""
    return False


class Calls:
    """Calls through one endpoint, each a second long; writes down who was served, and when."""

    def __init__(self, limit: int, max_waiting: int = 1000) -> None:
        self.lane = Endpoint(limit, max_waiting)
        self.served: list[tuple[float, str, str]] = []
        self.most = 0

    async def call(self, tenant: str, session: str = "s", urgent: Any = calm) -> None:
        """One call."""
        async with self.lane.place(tenant, session, urgent):
            self.most = max(self.most, self.lane.in_flight)
            self.served.append((asyncio.get_running_loop().time(), tenant, session))
            await asyncio.sleep(1.0)


@virtual
async def test_a_flood_of_one_tenant_delays_nobody_else_by_more_than_one_call() -> None:
    """A hundred calls wait; another tenant's next call is served when the first place is free."""
    calls = Calls(limit=2)
    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(calls.call("flood"))
        await asyncio.sleep(0.5)
        for _ in range(3):
            group.create_task(calls.call("quiet"))
    quiet = [t for t, tenant, _ in calls.served if tenant == "quiet"]
    assert quiet == [1.0, 1.0, 2.0] or quiet == [1.0, 2.0, 2.0] or quiet == [1.0, 2.0, 3.0]
    assert calls.most == 2 and len(calls.served) == 103
    assert calls.lane.in_flight == calls.lane.waiting == 0


@virtual
async def test_sessions_of_one_tenant_take_turns() -> None:
    """Each session gets its share, whatever the others have queued."""
    calls = Calls(limit=1)
    async with asyncio.TaskGroup() as group:
        for session, count in (("a", 30), ("b", 6), ("c", 3)):
            for _ in range(count):
                group.create_task(calls.call("t", session))
    assert Counter(s for _, _, s in calls.served[:10]) == Counter(a=4, b=3, c=3)


@virtual
async def test_what_a_turn_waits_for_goes_first() -> None:
    """A promoted call passes everybody who waits, also when it was promoted while it waited."""
    calls, promoted = Calls(limit=1), False
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(calls.call("flood"))
        group.create_task(calls.call("late", urgent=lambda: promoted))
        for _ in range(5):
            group.create_task(calls.call("flood"))
        await asyncio.sleep(0.5)
        promoted = True
    assert calls.served[1][1] == "late"


@virtual
async def test_the_queue_is_bounded() -> None:
    """What does not fit is refused at once, and the refusal takes no place."""
    calls = Calls(limit=1, max_waiting=2)
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(calls.call("t"))
        await asyncio.sleep(0)
        with pytest.raises(EndpointFull, match="2 calls wait"):
            await calls.call("t")
        await asyncio.sleep(1.5)
        group.create_task(calls.call("t"))
    assert len(calls.served) == 4 and calls.most == 1


@virtual
async def test_promise_10_who_fills_the_queue_makes_room_in_it() -> None:
    """Another tenant's call gets in, an urgent one too, and so does another session's of the same tenant; what the
    flood has sent last is refused instead, as is its next one."""
    calls = Calls(limit=1, max_waiting=4)
    refused: list[tuple[str, str, int]] = []

    async def one(tenant: str, session: str = "s", number: int = 0, urgent: bool = False) -> None:
        try:
            await calls.call(tenant, session, lambda: urgent)
        except EndpointFull:
            refused.append((tenant, session, number))

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(one("flood", "s", number))
        await asyncio.sleep(0)
        assert refused == [("flood", "s", 5)] and calls.lane.waiting == 4
        for tenant, session, urgent in (("quiet", "s", False), ("flood", "other", False), ("third", "s", True)):
            group.create_task(one(tenant, session, 0, urgent))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert refused[1:] == [("flood", "s", 4), ("flood", "s", 3), ("flood", "s", 2)] and calls.lane.waiting == 4
    order = [(tenant, session) for _, tenant, session in calls.served]
    assert order[:2] == [("flood", "s"), ("third", "s")] and len(order) == 5
    assert calls.lane.in_flight == calls.lane.waiting == 0


@virtual
async def test_a_full_queue_refuses_no_call_that_a_turn_waits_for_while_another_can_go() -> None:
    """Not the newcomer, though its tenant has the most; where all are urgent, the tenant with the most loses one."""
    calls = Calls(limit=1, max_waiting=3)
    refused: list[str] = []

    async def one(name: str, tenant: str, urgent: bool) -> None:
        try:
            await calls.call(tenant, name, lambda: urgent)
        except EndpointFull:
            refused.append(name)

    async with asyncio.TaskGroup() as group:
        for name, tenant, urgent in (
            ("runs", "a", False),
            ("u1", "a", True),
            ("u2", "a", True),
            ("b1", "b", False),
            ("u3", "a", True),
            ("u4", "a", True),
            ("b2", "b", True),
            ("b3", "b", False),
        ):
            group.create_task(one(name, tenant, urgent))
            await asyncio.sleep(0)
    assert refused[0] == "b1", "the only one for which no turn waits"
    assert refused[1] == "u4", "of the tenant that has the most, who came last"
    assert refused[2] in ("u2", "u3") and refused[3] == "b3" and len(refused) == 4


@given(
    st.integers(1, 3),
    st.sampled_from([2, 1000]),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.floats(0, 6), st.none() | st.floats(0, 4))),
)
def test_cancelled_calls_leave_no_trace(
    limit: int, max_waiting: int, plan: list[tuple[str, str, float, float | None]]
) -> None:
    """Whenever calls come and whenever they are cancelled (waiting, running, or just let in): the bounds hold, all
    others are served, and nothing is left behind."""

    async def main() -> None:
        calls = Calls(limit, max_waiting)

        async def one(tenant: str, session: str, start: float, patience: float | None) -> bool:
            await asyncio.sleep(start)
            try:
                async with asyncio.timeout(patience):
                    await calls.call(tenant, session)
            except TimeoutError:
                return False
            except EndpointFull:
                return max_waiting < len(plan)
            finally:
                assert calls.lane.waiting <= max_waiting
            return True

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*p)) for p in plan]
        assert all(t.result() for t, p in zip(tasks, plan, strict=True) if p[3] is None)
        assert calls.most <= limit
        assert calls.lane.in_flight == calls.lane.waiting == 0
        assert not calls.lane._waiting and not calls.lane._running

    run_virtual(main)


@virtual
async def test_endpoints_are_told_apart_by_identity_and_forgotten() -> None:
    """Two clients of one server and model share a lane; another model has its own; none is kept when unused."""
    lanes, order = Endpoints(concurrency=1, max_waiting=10), []

    async def call(model: Any, name: str) -> None:
        with calling(lanes, "t", "s", calm):
            async with endpoint(model, getattr(model, "identity", None)):
                order.append((asyncio.get_running_loop().time(), name))
                await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        for name, model in (
            ("a1", FakeEngine(identity="x#m")),
            ("a2", FakeEngine(identity="x#m")),
            ("b", FakeEngine(identity="x#n")),
            ("anonymous", FakeSummarizer()),
            ("another", FakeSummarizer()),
        ):
            group.create_task(call(model, name))
    assert order == [(0, "a1"), (0, "b"), (0, "anonymous"), (0, "another"), (1, "a2")]
    assert len(lanes) == 0
    async with endpoint(FakeEngine(), "x#m"):  # outside any runtime nobody counts
        assert len(lanes) == 0


@virtual
async def test_an_engine_may_say_how_many_calls_it_takes() -> None:
    """``max_in_flight`` goes before the runtime's number."""
    lanes, most = Endpoints(concurrency=1, max_waiting=10), 0
    engine = FakeEngine(identity="x#m")
    engine.max_in_flight = 3  # type: ignore[attr-defined]
    running = 0

    async def call() -> None:
        nonlocal most, running
        with calling(lanes, "t", "s", calm):
            async with endpoint(engine, engine.identity):
                running += 1
                most = max(most, running)
                await asyncio.sleep(1)
                running -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(9):
            group.create_task(call())
    assert most == 3


@virtual
async def test_many_agents_share_one_memory_model() -> None:
    """Twelve sessions of three tenants, all due at once: never more calls than allowed, and all are served."""
    model = FakeSummarizer(delay=5.0)
    async with make_runtime(concurrency=12, endpoint_concurrency=3) as runtime:
        handles = []
        for k in range(12):
            session = runtime.session(f"s{k}", policy=make_policy(model), tenant=f"t{k % 3}")
            handles.append(session.observe(chat(12, size=60)))
        await settle(1)
        assert model.running == 3
        await settle(25)
        assert model.most_running == 3 and model.calls == 12
        assert all(h is not None and h.state is HandleState.READY for h in handles)
        assert len(runtime.endpoints) == 0


@virtual
async def test_a_full_endpoint_is_a_typed_discard() -> None:
    """``queue_full``, not a failure: no retry, and the breaker does not count it."""
    model, events = FakeSummarizer(delay=50.0), Events()
    async with make_runtime(concurrency=8, endpoint_concurrency=1, max_pending=8, on_event=events) as runtime:
        runtime.endpoints._max_waiting = 2
        sessions = [runtime.session(f"s{k}", policy=make_policy(model)) for k in range(6)]
        handles = [s.observe([*chat(12, size=60), H(f"{k}")]) for k, s in enumerate(sessions)]
        await settle(1)
        states = Counter((h.state, h.reason) for h in handles if h is not None)
        assert states[HandleState.DISCARDED, Reason.QUEUE_FULL] == 3
        assert runtime.counters.failed == 0 and runtime.counters.stale == {"queue_full": 3}
        await settle(200)
        assert model.calls == 3 and model.most_running == 1
        live = sum(s.lookahead is not None for s in sessions)
        coherent(sessions[0], runtime, live=live)


@virtual
async def test_a_discarded_lookahead_gives_its_place_back() -> None:
    """Waiting or running: the next in line gets it at once."""
    model = FakeSummarizer("hang")
    async with make_runtime(concurrency=4, endpoint_concurrency=1) as runtime:
        sessions = [runtime.session(f"s{k}", policy=make_policy(model)) for k in range(3)]
        handles = [s.observe(chat(12, size=60)) for s in sessions]
        await settle(1)
        first, second, third = (h for h in handles if h is not None)
        assert model.calls == 1
        second.discard()
        await settle(1)
        first.discard()
        await settle(1)
        assert model.calls == 2 and third.state is HandleState.RUNNING
    assert len(runtime.endpoints) == 0


@virtual
async def test_blocks_go_through_the_same_lane() -> None:
    """The calls of one transform that asks several times at once count one by one."""
    model = FakeSummarizer(delay=1.0)
    async with make_runtime(concurrency=8, endpoint_concurrency=2) as runtime:
        policy = Policy(ParallelSummarize(model, block_tokens=200, workers=6, facts=False), context_window=4000)
        session = runtime.session("s", policy=policy)
        session.schedule_transform(
            ParallelSummarize(model, block_tokens=200, workers=6, facts=False), chat(20, size=60)
        )
        await settle(60)
        assert model.most_running == 2 and model.calls >= 6


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "8"])
def test_wrong_numbers_are_refused(wrong: Any) -> None:
    """By name and value."""
    with pytest.raises(ConfigurationError, match="endpoint_concurrency="):
        Runtime(endpoint_concurrency=wrong)
