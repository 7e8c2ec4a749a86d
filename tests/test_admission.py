"""Admission: when a lookahead may run beside the foreground. The decision itself, what feeds it, and whole sessions."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from helpers import Events, FakeSummarizer, H, chat, make_policy, make_runtime, now, settle, virtual
from smoothctx import AdmitAll, EngineUnreachable, HandleState, Policy, Reason, Runtime, Session, Speed, Summarize
from smoothctx.admission import KV_FULL, MANY, RUN, Decision, LoadAdmission, Situation, admit
from smoothctx.demand import Busy, Demand, Latency
from smoothctx.endpoints import Endpoints
from smoothctx.engines import Load
from smoothctx.engines.flavours import Capabilities
from smoothctx.events import EventSink
from smoothctx.foreground import Foreground, Seen
from smoothctx.testing import FakeEngine
from smoothctx.work import MAX_DEFER_S, Work

BUSY = Busy(share=1.0, mean=3.0, span_s=10.0)
SATURATED = Situation(seen=Seen(in_flight=3, busy=BUSY))

# -- the decision ------------------------------------------------------------------------------------------------

counts = st.none() | st.integers(0, 40)
seconds = st.floats(0, 500)
situations = st.builds(
    Situation,
    seen=st.builds(
        Seen,
        in_flight=st.integers(0, 40),
        working=st.integers(0, 4),
        busy=st.builds(Busy, share=st.floats(0, 1), mean=st.floats(0, 40), span_s=st.floats(0, 10)),
        latency=st.none() | st.builds(Latency, now_s=seconds, calm_s=seconds),
    ),
    own=st.booleans(),
    running=counts,
    waiting=counts,
    kv_used=st.none() | st.floats(0, 1),
    ours=st.integers(0, 8),
    capacity=st.none() | st.integers(1, 16),
    rests_s=st.just(0.0) | seconds,
    deferred_s=st.just(0.0) | st.floats(0, 100),
    due_in_s=st.none() | st.floats(-100, 500),
    work_s=st.none() | seconds,
    promoted=st.booleans(),
)


@given(situations)
def test_what_always_holds(situation: Situation) -> None:
    """Promoted works and idle engines are never put off; each other decision says why; time never turns a run back."""
    decision = admit(situation)
    assert (decision.answer == "run") == (decision.why == "")
    assert (decision.answer == "defer") == (decision.defer_s > 0) and decision.defer_s < math.inf
    assert admit(replace(situation, promoted=True)) is RUN
    calm = replace(situation, rests_s=0.0)
    idle = replace(calm, seen=replace(situation.seen, in_flight=0), running=situation.ours, waiting=0)
    assert admit(idle) is RUN
    assert admit(replace(calm, own=False)) is RUN, "what is known of a hosted API is what it answers"
    if decision is RUN:
        assert admit(replace(situation, deferred_s=situation.deferred_s + 1)).answer == "run"
    if admit(calm).why in ("full", "saturated", "slower"):
        assert admit(replace(calm, deferred_s=MAX_DEFER_S)) is RUN, "our own view alone never denies a work for good"


@pytest.mark.parametrize(
    ("situation", "decision"),
    [
        (SATURATED, Decision("defer", "saturated", 0.5)),
        (replace(SATURATED, seen=Seen(in_flight=1, busy=Busy(share=1.0, mean=1.0, span_s=10.0))), RUN),
        (replace(SATURATED, seen=Seen(in_flight=3, busy=Busy(share=0.9, mean=3.0, span_s=10.0))), RUN),
        (replace(SATURATED, seen=Seen(in_flight=3, busy=Busy(share=1.0, mean=3.0, span_s=1.0))), RUN),
        (replace(SATURATED, waiting=1), Decision("defer", "waiting", 1.0)),
        (replace(SATURATED, waiting=2, ours=2), Decision("defer", "saturated", 0.5)),
        (replace(SATURATED, waiting=1, deferred_s=MAX_DEFER_S), Decision("defer", "waiting", 1.0)),
        (replace(SATURATED, waiting=1, due_in_s=2.0, work_s=20.0), Decision("skip", "too_late")),
        (replace(SATURATED, waiting=1, due_in_s=2.0, work_s=20.0, deferred_s=1.0), Decision("defer", "waiting", 1.0)),
        (replace(SATURATED, kv_used=KV_FULL + 0.01), Decision("defer", "kv_cache", 1.0)),
        (Situation(kv_used=1.0, running=1, ours=1), RUN),
        (Situation(running=2, capacity=2), Decision("defer", "full", 0.5)),
        (Situation(running=2, capacity=3), RUN),
        (Situation(running=2, ours=2, capacity=2), RUN),
        (
            Situation(seen=Seen(in_flight=1, latency=Latency(now_s=1.0, calm_s=0.5))),
            Decision("defer", "slower", 0.5),
        ),
        (Situation(seen=Seen(in_flight=1, latency=Latency(now_s=0.7, calm_s=0.5))), RUN),
        (Situation(seen=Seen(in_flight=1, latency=Latency(now_s=0.09, calm_s=0.01))), RUN),
        (Situation(rests_s=20.0), Decision("defer", "rate_limited", 20.0)),
        (Situation(rests_s=MAX_DEFER_S + 1), Decision("skip", "rate_limited")),
        (Situation(rests_s=20.0, deferred_s=50.0), Decision("skip", "rate_limited")),
        (Situation(rests_s=500.0, promoted=True), RUN),
    ],
)
def test_each_reason(situation: Situation, decision: Decision) -> None:
    """Each input by itself."""
    assert admit(situation) == decision


def test_due_ends_a_deferral_where_turns_are_as_fast_as_ever() -> None:
    """Where that is unknown, or they are slower, it goes on: it is bounded all the same."""
    due = replace(SATURATED, due_in_s=12.0, work_s=10.0)
    assert admit(due).why == "saturated"
    fast = replace(due, seen=replace(due.seen, latency=Latency(now_s=0.5, calm_s=0.5)))
    assert admit(fast) is RUN and admit(replace(fast, due_in_s=13.0)).why == "saturated"
    assert admit(replace(due, seen=replace(due.seen, latency=Latency(now_s=5.0, calm_s=0.5)))).why == "slower"


def test_one_among_many_is_not_noticed() -> None:
    """On a large server with room one more request is at most a twentieth of what runs."""
    busy = Busy(share=1.0, mean=float(MANY), span_s=10.0)
    many = Situation(seen=Seen(in_flight=MANY, busy=busy), running=MANY, waiting=0)
    assert admit(many) is RUN
    assert admit(replace(many, ours=1)).why == "saturated"
    assert admit(replace(many, waiting=None)).why == "saturated", "without its word nothing is known of room"


# -- what we see ourselves -----------------------------------------------------------------------------------------


def test_demand_of_the_last_seconds() -> None:
    """The share of time with anybody in flight, and how many on average; what is older is forgotten."""
    demand = Demand()
    assert demand.busy(5.0) == Busy()
    demand.changed(100.0, 1)
    demand.changed(102.0, 3)
    demand.changed(104.0, 0)
    assert demand.busy(105.0) == Busy(share=0.8, mean=8 / 5, span_s=5.0)
    assert demand.busy(110.0) == Busy(share=0.4, mean=0.8, span_s=10.0)
    assert demand.busy(200.0) == Busy(share=0.0, mean=0.0, span_s=10.0)
    for k in range(5000):
        demand.changed(300.0 + k / 1000, k % 2)
    assert len(demand._steps) <= 512 and demand.busy(305.0).share == pytest.approx(0.5, abs=0.01)


def test_latency_against_a_calm_engine() -> None:
    """Calls beside others against calls alone, by new token where both tell them; unknown with too few."""
    demand = Demand()
    for k in range(3):
        demand.answered(float(k), 0.5, new_tokens=500, calm=True)
        assert demand.latency(3.0) is None
    for k in range(2):
        demand.answered(4.0 + k, 1.0, new_tokens=500, calm=False)
    assert demand.latency(6.0) is None
    demand.answered(6.0, 1.0, new_tokens=500, calm=False)
    assert demand.latency(7.0) == Latency(now_s=1.0, calm_s=0.5)
    for k in range(16):
        demand.answered(7.0 + k / 10, 2.0, new_tokens=2000, calm=False)
    assert demand.latency(9.0) == Latency(now_s=2.0, calm_s=2.0), "four times the tokens may take four times as long"
    assert demand.latency(60.0) is None, "what was seen long ago says nothing of now"
    assert Seen(latency=demand.latency(9.0)).slower is False and Seen().slower is None


@virtual
async def test_a_turn_and_its_call_are_one_user() -> None:
    """Users are counted, not what they have open; a call beside another's, or beside our work, was not alone."""
    foreground = Foreground(asyncio.get_running_loop().time)
    foreground.begin("turn", "a")
    await asyncio.sleep(1)
    foreground.begin("call", "a")
    foreground.answered("call", 1.0, None)
    assert foreground.seen().in_flight == 1 and foreground.seen().busy.mean == 1.0
    foreground.begin("other", "b")
    foreground.answered("call", 3.0, None)
    foreground.answered("nobody", 9.0, None)
    foreground.end("other")
    foreground.begin("next", "a")
    foreground.work_began()
    foreground.answered("next", 3.0, None)
    assert foreground.seen().working == 1
    foreground.work_ended()
    for who in ("turn", "call", "next"):
        foreground.end(who)
    foreground.end("turn")
    assert foreground.seen().in_flight == 0 and not foreground._owners
    assert [c.ttft_s for c in foreground._demand._calm] == [1.0]
    assert [c.ttft_s for c in foreground._demand._recent] == [3.0, 3.0]


@virtual
async def test_promise_10_a_user_that_is_gone_counts_for_its_lease_only() -> None:
    """Also for admission."""
    foreground = Foreground(asyncio.get_running_loop().time, lease_s=30.0)
    foreground.begin("dead", "a")
    await asyncio.sleep(31)
    assert foreground.seen().in_flight == 0 and not foreground._owners


# -- the edge ------------------------------------------------------------------------------------------------------


class Server:
    """An engine that tells its load as the test says: a ``Load``, an error, or ``None`` to hang."""

    identity = "http://server#m"

    def __init__(self, told: Load | Exception | None, **known: Any) -> None:
        self.told = told
        self.asked = 0
        self.capabilities = Capabilities(flavour="vllm", **{"metrics": True, **known})

    async def load(self, *, timeout_s: float) -> Load:
        """As told, after 0.1 s."""
        self.asked += 1
        await asyncio.sleep(0.1 if self.told is not None else 1e6)
        if isinstance(self.told, Load):
            return self.told
        raise self.told or AssertionError("it hangs")


def work(engine: Any, **fields: Any) -> Work:
    """A work that loads this engine."""
    return Work(
        key="k", tenant="t", session="s", run=FakeSummarizer, on_done=lambda outcome: None, engine=engine, **fields
    )


def edge(events: Events | None = None, **options: Any) -> LoadAdmission:
    """The default admission, on the loop's clock."""
    clock = asyncio.get_running_loop().time
    return LoadAdmission(clock, EventSink(events, clock), Endpoints(concurrency=8, max_waiting=8), **options)


@virtual
async def test_the_load_is_asked_for_once_for_all() -> None:
    """One request at a time and for half a second; whoever asks meanwhile gets the same answer."""
    server, admission = Server(Load(running=4, waiting=2)), edge()
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(admission.decide(work(server))) for _ in range(5)]
    assert [task.result() for task in asked] == [("defer", 1.0)] * 5 and server.asked == 1
    await asyncio.sleep(0.3)
    assert await admission.decide(work(server)) == ("defer", 1.0) and server.asked == 1
    await asyncio.sleep(0.3)
    server.told = Load(running=1, waiting=0)
    assert await admission.decide(work(server)) == "run" and server.asked == 2


@pytest.mark.parametrize("told", [None, EngineUnreachable("gone"), ValueError("odd")])
@virtual
async def test_an_unknown_load_puts_nothing_off(told: Exception | None) -> None:
    """It hangs or fails: at most 0.3 s later the work runs, and it is not asked again at once."""
    server, admission = Server(told), edge()
    assert await admission.decide(work(server)) == "run" and now() <= 0.3001
    assert await admission.decide(work(server)) == "run" and server.asked == 1


@virtual
async def test_who_is_not_asked() -> None:
    """An engine that shows no load, one that nobody knows, no engine, and for promoted works any."""
    quiet, admission = Server(Load(waiting=9), metrics=False), edge()
    busy = Server(Load(waiting=9))
    assert await admission.decide(work(quiet)) == "run"
    assert await admission.decide(work(busy, promoted=True)) == "run"
    assert await admission.decide(work(None)) == "run"
    assert await admission.decide(work(object())) == "run"
    assert quiet.asked == busy.asked == 0
    assert await AdmitAll().decide(work(busy)) == "run"


@virtual
async def test_promoted_while_the_load_was_asked_for() -> None:
    """It is never put off, also when its turn came in that moment."""
    server, admission = Server(Load(waiting=9)), edge()
    own = work(server)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(admission.decide(own))
        await asyncio.sleep(0.05)
        own.promoted = True
    assert asked.result() == "run"


@virtual
async def test_each_reason_is_said_once() -> None:
    """One event per work and reason, with the figures behind it."""
    events = Events()
    server, admission = Server(Load(running=3, waiting=2, kv_used=0.5)), edge(events)
    own = work(server, due=50.0)
    for _ in range(3):
        await admission.decide(own)
        await asyncio.sleep(1)
    server.told = Load(running=3, waiting=0, kv_used=0.95)
    await admission.decide(own)
    assert [(e.name, e.data["why"]) for e in events] == [
        ("admission.deferred", "waiting"),
        ("admission.deferred", "kv_cache"),
    ]
    assert events[0].data["waiting"] == 2 and events[0].data["due_in_s"] == pytest.approx(49.9)
    assert (events[0].session, events[0].tenant) == ("s", "t")


# -- whole sessions -------------------------------------------------------------------------------------------------


def engine_policy(engine: FakeEngine, **options: Any) -> Policy:
    """Summaries by the agents' own engine."""
    return Policy(Summarize(engine, keep=("messages", 4), max_tokens=64, facts=False), context_window=4000, **options)


async def turn(session: Session, messages: list[Any], seconds: float) -> None:
    """One turn whose model call takes so long."""
    view = await session.commit(messages)
    async with session.foreground() as call:
        await asyncio.sleep(seconds / 2)
        call.first_token()
        await asyncio.sleep(seconds / 2)
    assert view
    messages.append({"role": "assistant", "content": "done"})
    session.observe(messages)
    messages.append(H("go on"))


async def agent(session: Session, messages: list[Any], turns: int, seconds: float, pause: float) -> None:
    """Turns of so many seconds with a pause behind each."""
    for _ in range(turns):
        await turn(session, messages, seconds)
        await asyncio.sleep(pause)


@virtual
async def test_saturated_by_several_agents_then_once_a_minute() -> None:
    """While three agents leave no gap, nothing runs for a minute, with one event; then it does, starved or not."""
    engine, events = FakeEngine("A summary."), Events()
    async with make_runtime(on_event=events) as runtime:
        policy = engine_policy(engine, preload_kv=False)
        sessions = [runtime.session(f"s{k}", policy=policy, engine=engine) for k in range(4)]
        async with asyncio.TaskGroup() as group:
            for k, session in enumerate(sessions[:3]):
                group.create_task(agent(session, chat(1, first=k), 40, 2.0 + k / 10, 0.0))
            await asyncio.sleep(5)
            handle = sessions[3].observe(chat(20, size=80))
            assert handle is not None
            await asyncio.sleep(55)
            assert handle.state is HandleState.PENDING and not engine.calls
            deferred = events.of("admission.deferred")
            assert [e.data["why"] for e in deferred] == ["saturated"] and deferred[0].data["users"] > 2
            await asyncio.sleep(10)
            assert handle.state is HandleState.READY and len(engine.calls) == 1


@virtual
async def test_a_gap_ends_it() -> None:
    """As soon as the foreground leaves gaps, what waits runs."""
    engine = FakeEngine("A summary.")
    async with make_runtime() as runtime:
        policy = engine_policy(engine, preload_kv=False)
        sessions = [runtime.session(f"s{k}", policy=policy, engine=engine) for k in range(3)]
        async with asyncio.TaskGroup() as group:
            for k, session in enumerate(sessions[:2]):
                group.create_task(agent(session, chat(1, first=k), 5, 3.0, 0.0))
            await asyncio.sleep(5)
            handle = sessions[2].observe(chat(20, size=80))
            assert handle is not None
            await asyncio.sleep(9)
            assert not engine.calls
        assert await handle.wait(5) is HandleState.READY and now() < 20


@pytest.mark.parametrize("pause", [0.0, 0.2, 5.0])
@virtual
async def test_one_agent_always_gets_its_lookahead(pause: float) -> None:
    """With idle time, with hardly any, and with none: its own turns are no reason to put it off."""
    engine, events = FakeEngine("A summary."), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=engine_policy(engine, preload_kv=False), engine=engine)
        messages = chat(19, size=80)
        async with asyncio.TaskGroup() as group:
            group.create_task(agent(session, messages, 10, 3.0, pause))
            await asyncio.sleep(6 + pause)
            assert len(engine.calls) == 1, "it began at the end of the first turn"
        assert not events.of("admission.deferred") and runtime.counters.committed == 1


@virtual
async def test_agents_with_short_gaps_get_theirs() -> None:
    """Two agents whose pauses meet now and then are no saturation."""
    engine, events = FakeEngine("A summary."), Events()
    async with make_runtime(on_event=events) as runtime:
        policy = engine_policy(engine, preload_kv=False)
        sessions = [runtime.session(f"s{k}", policy=policy, engine=engine) for k in range(2)]
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(agent(session, chat(19, size=80), 12, 3.0, 0.5))
        assert runtime.counters.committed == 2 and not runtime.counters.stale
        assert now() < 60, "no turn waited"


@virtual
async def test_promise_05_a_promoted_work_is_never_put_off() -> None:
    """At the hard limit the turn gets its summary at once, however busy the engine is."""
    engine = FakeEngine("A summary.")
    async with make_runtime() as runtime:
        policy = engine_policy(engine, preload_kv=False)
        sessions = [runtime.session(f"s{k}", policy=policy, engine=engine) for k in range(4)]
        async with asyncio.TaskGroup() as group:
            for k, session in enumerate(sessions[:3]):
                group.create_task(agent(session, chat(1, first=k), 10, 3.0, 0.0))
            await asyncio.sleep(5)
            began = now()
            await sessions[3].commit(chat(30, size=80))
            assert sessions[3].receipts[-1].how == "promoted" and engine.calls[0].arrived_s == began


@virtual
async def test_an_overloaded_engine_is_left_alone() -> None:
    """Requests wait there: the lookahead is put off for a minute, then dropped; the next turn starts another one."""
    engine, events = FakeEngine("A summary.", metrics=True, speed=Speed(100.0, 20.0)), Events()
    async with make_runtime(on_event=events) as runtime:
        policy = engine_policy(engine, preload_kv=False)
        session = runtime.session("s", policy=policy, engine=engine)
        flood = [H(f"{k} flood", size=400) for k in range(25)]
        async with asyncio.TaskGroup() as group:
            for message in flood:  # of another program
                group.create_task(engine.complete([message], max_tokens=2))
            await asyncio.sleep(1)
            messages = chat(20, size=80)
            handle = session.observe(messages)
            assert handle is not None
            state = await handle.wait(70)
            assert (state, handle.reason) == (HandleState.DISCARDED, Reason.ADMISSION_DENIED)
            assert [e.data["why"] for e in events.of("admission.deferred")] == ["waiting"]
            again = session.observe(messages)
            assert again is not None and again is not handle
        assert await again.wait(60) is HandleState.READY


@virtual
async def test_switched_off() -> None:
    """``AdmitAll`` lets everything run at once."""
    engine = FakeEngine("A summary.")
    async with make_runtime(admission=AdmitAll()) as runtime:
        policy = engine_policy(engine, preload_kv=False)
        sessions = [runtime.session(f"s{k}", policy=policy, engine=engine) for k in range(3)]
        async with asyncio.TaskGroup() as group:
            for k, session in enumerate(sessions[:2]):
                group.create_task(agent(session, chat(1, first=k), 5, 3.0, 0.0))
            await asyncio.sleep(5)
            sessions[2].observe(chat(20, size=80))
            await settle(0.1)
            assert len(engine.calls) == 1


@virtual
async def test_local_works_always_run() -> None:
    """A plain model of which nothing is known is put off by nobody, nor is a transform without a model."""
    model, events = FakeSummarizer(), Events()
    async with make_runtime(on_event=events) as runtime:
        sessions = [runtime.session(f"s{k}", policy=make_policy(model)) for k in range(3)]
        async with asyncio.TaskGroup() as group:
            for k, session in enumerate(sessions[:2]):
                group.create_task(agent(session, chat(1, first=k), 5, 3.0, 0.0))
            await asyncio.sleep(5)
            sessions[2].observe(chat(20, size=80))
            await settle(0.1)
            assert model.calls == 1 and not events.of("admission.deferred")


def test_the_default_is_on() -> None:
    """``admission=None`` means by load."""
    assert isinstance(Runtime()._pool._worker._admission, LoadAdmission)
