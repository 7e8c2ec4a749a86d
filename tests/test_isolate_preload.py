"""A sub-agent's opening is warmed ahead: out of the foreground's way, in a slot of its own, until it begins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers import Events, FakeSummarizer, Message, chat, make_policy, make_runtime, now, settle, virtual
from slotted import SlottedEngine
from smoothctx import ConfigurationError, HandleState, Isolate, LookaheadHandle, Policy, Runtime, Session
from smoothctx.economics import Speed
from smoothctx.engines.binding import Binding, EngineBinding
from smoothctx.engines.load import Load
from smoothctx.engines.slot_table import SlotTable
from smoothctx.foreground import WARMING
from smoothctx.testing import FakeEngine
from smoothctx.testing.engine import EngineCall

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Slotted(SlottedEngine):
    """It evaluates ``rate`` tokens a second."""

    def __init__(self, slots: int = 3, rate: float = 1000.0, *, metrics: bool = False) -> None:
        speed = Speed(prefill_tokens_per_s=rate, decode_tokens_per_s=100.0)
        super().__init__("ok", speed=speed, slots=slots, metrics=metrics)


def policy() -> Policy:
    """One that never rewrites anything by itself."""
    return make_policy(FakeSummarizer(), window=1_000_000)


def isolate(text: str = "Find the cause.", **options: Any) -> Isolate:
    """A sub-agent with a prompt of its own and the last messages of its parent."""
    return Isolate(system="You debug.", instruction=text, select=lambda m: m[-6:], **options)


async def opened(
    runtime: Runtime, engine: FakeEngine, transform: Isolate | None = None, **options: Any
) -> tuple[Session, list[Message], LookaheadHandle]:
    """A parent between two turns that has scheduled a sub-agent's opening."""
    parent = runtime.session("parent", policy=policy(), engine=engine, **options)
    messages = chat(6, size=100)
    await parent.commit(messages)
    parent.observe(messages)
    return parent, messages, parent.schedule_transform(transform or isolate(), messages)


async def ask(session: Session, engine: FakeEngine, messages: list[Message], **options: Any) -> EngineCall:
    """One turn of an agent; returns its call."""
    view = await session.commit(messages)
    async with session.foreground() as call:
        await engine.complete(view, max_tokens=8, **session.request, **session.request_options(), **options)
        call.first_token()
    session.observe([*messages, {"role": "assistant", "content": "ok"}])
    return engine.calls[-1]


@virtual
async def test_the_first_call_of_the_sub_agent_finds_its_opening_cached() -> None:
    """READY comes after the preload, and the child's session leads to the slot that holds it."""
    events, engine = Events(), Slotted()
    async with make_runtime(on_event=events) as runtime:
        parent, messages, handle = await opened(runtime, engine)
        assert await handle.wait() is HandleState.READY
        preload = events.of("preload")[-1].data
        assert preload["complete"] and preload["opening"] and preload["requests"] == 1
        assert events.of("lookahead.ready")[-1].data["warm"] is True
        assert runtime.counters.preload_usage.calls == 1
        opening = handle.commit(messages)
        child = runtime.session("child", policy=policy(), parent=parent, engine=engine)
        own = child.request_options()["id_slot"]
        call = await ask(child, engine, opening)
        assert call.options["id_slot"] == child.request_options()["id_slot"] != own
        assert call.input_tokens > 100 and call.cached_tokens == call.input_tokens - 1
        assert parent.request_options()["id_slot"] == 0 and call.options["id_slot"] != 0
        assert engine.free() == 1  # the one that the child had before
        await child.close()
        assert engine.free() == 2
        await parent.close()
        assert engine.free() == 3
    assert not events.of("error")


@virtual
async def test_with_two_slots_the_sub_agent_gets_the_warm_one() -> None:
    """Where the child's session found no slot of its own, the opening's is its first."""
    engine = Slotted(slots=2)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        child = runtime.session("child", policy=policy(), parent=parent, engine=engine)
        assert await handle.wait() is HandleState.READY
        assert child.request_options()["id_slot"] == 1 and handle.flight.artifact is not None
        assert not handle.flight.artifact.warm  # the child came first: nowhere was left to warm it
        again = parent.schedule_transform(isolate("Another."), messages)
        await child.close()
        await again.wait()
        late = runtime.session("late", policy=policy(), parent=parent, engine=engine)
        assert late.request_options() == {}
        call = await ask(late, engine, again.commit(messages))
        assert call.options["id_slot"] == 1 and call.cached_tokens == call.input_tokens - 1


@virtual
async def test_the_agents_own_slot_is_never_evicted() -> None:
    """The parent's next call finds everything that it had sent, whatever was prepared meanwhile."""
    engine = Slotted(slots=2)
    async with make_runtime() as runtime:
        parent = runtime.session("parent", policy=policy(), engine=engine)
        messages = chat(6, size=100)
        first = await ask(parent, engine, messages)
        for k in range(4):
            await parent.schedule_transform(isolate(f"Task {k}."), messages).wait()
        second = await ask(parent, engine, [*messages, *chat(1, first=50, system=False)])
        assert second.options["id_slot"] == first.options["id_slot"] == 0
        assert second.cached_tokens >= first.input_tokens - 1


@virtual
async def test_only_the_messages_of_the_opening_lead_to_its_slot() -> None:
    """Another history, or a session of another parent, gets nothing of it; and it is given once."""
    engine = Slotted(slots=5)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        await handle.wait()
        opening = handle.commit(messages)
        warm = next(s for s in (0, 1, 2, 3, 4) if len(engine._cache.slots[s].tokens) > 100)  # type: ignore[union-attr]
        stranger = runtime.session("stranger", policy=policy(), engine=engine)
        other = runtime.session("other", policy=policy(), parent=parent, engine=engine)
        assert (await ask(stranger, engine, opening)).options["id_slot"] != warm
        changed = [*opening[:-1], {"role": "user", "content": "Something else."}]
        assert (await ask(other, engine, changed)).options["id_slot"] != warm
        child = runtime.session("child", policy=policy(), parent=parent, engine=engine)
        longer = [*opening, {"role": "user", "content": "And be quick."}]
        call = await ask(child, engine, longer)
        assert call.options["id_slot"] == warm and call.cached_tokens > 100
        twin = runtime.session("twin", policy=policy(), parent=parent, engine=engine)
        assert (await ask(twin, engine, opening)).options.get("id_slot") != warm


@virtual
async def test_a_discarded_opening_gives_its_slot_back() -> None:
    """Before, while and after it is warmed."""
    engine = Slotted(rate=50.0)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        handle.discard()
        await settle(1)
        assert engine.free() == 2 and not engine.calls
        running = parent.schedule_transform(isolate(), messages)
        await settle(1)
        assert engine.calls[-1].outcome == "running" and engine.free() == 1
        running.discard()
        await settle(0)
        assert engine.calls[-1].outcome == "cancelled" and engine.free() == 2
        ready = parent.schedule_transform(isolate(), messages)
        await ready.wait()
        assert engine.free() == 1
        ready.discard()
        assert engine.free() == 2 and not parent.openings._held


@virtual
async def test_a_shared_opening_stays_for_the_one_that_still_waits() -> None:
    """Two handles of one flight: only when both are gone does the slot go back."""
    engine, transform = Slotted(), isolate()
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine, transform)
        twin = parent.schedule_transform(transform, messages)
        await twin.wait()
        handle.discard()
        assert engine.free() == 1
        twin.discard()
        assert engine.free() == 2


@virtual
async def test_what_nobody_sends_makes_room() -> None:
    """An opening that was handed out and not sent keeps its slot only until another needs one."""
    engine = Slotted()
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        await handle.wait()
        opening = handle.commit(messages)
        one, two = (runtime.session(k, policy=policy(), engine=engine) for k in ("one", "two"))
        assert {s.request_options()["id_slot"] for s in (parent, one, two)} == {0, 1, 2}
        child = runtime.session("child", policy=policy(), parent=parent, engine=engine)
        assert "id_slot" not in (await ask(child, engine, opening)).options
        for session in (one, two, child):
            await session.close()
        assert engine.free() == 2


@virtual
async def test_a_turn_goes_before_an_opening() -> None:
    """A preload gives way to a turn of the parent and goes on after it; a promoted one goes on beside its decode."""
    engine = Slotted(rate=100.0)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        await settle(1)
        preload = engine.calls[-1]
        assert preload.outcome == "running" and preload.max_tokens == 1
        async with parent.foreground() as call:
            await settle(0)
            assert preload.outcome == "cancelled" and len(engine.calls) == 1
            await settle(5)
            assert len(engine.calls) == 1
            call.first_token()
            await settle(0)
            assert len(engine.calls) == 1
            handle.promote()
            await settle(0)
            assert len(engine.calls) == 2 and engine.calls[-1].outcome == "running"
        assert await handle.wait() is HandleState.READY
        assert engine.calls[-1].cached_tokens > 50  # what was evaluated before the turn


@virtual
async def test_taken_before_it_is_warm() -> None:
    """The messages are there before the preload ends: the child begins on what is warm so far."""
    engine = Slotted(rate=100.0)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        await settle(1)
        opening = handle.commit(messages)
        await settle(0)
        assert engine.calls[-1].outcome == "cancelled"
        child = runtime.session("child", policy=policy(), parent=parent, engine=engine)
        call = await ask(child, engine, opening)
        assert 90 <= call.cached_tokens < call.input_tokens - 1
        assert call.options["id_slot"] == engine.calls[0].options["id_slot"]


@virtual
async def test_it_is_warmed_with_the_request_that_will_be_sent() -> None:
    """The parent's constant request, or the one that the isolate names; then the child's first call hits whole."""
    engine = Slotted(slots=4)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine, request={"tools": TOOLS, "temperature": 0})
        await handle.wait()
        assert engine.calls[-1].options["tools"] == TOOLS and engine.calls[-1].options["temperature"] == 0
        plain = parent.schedule_transform(isolate(request={"temperature": 1}), messages)
        await plain.wait()
        assert "tools" not in engine.calls[-1].options and engine.calls[-1].options["temperature"] == 1
        child = runtime.session("child", policy=policy(), parent=parent, engine=engine, request={"temperature": 1})
        handle.discard()  # the one with tools
        call = await ask(child, engine, plain.commit(messages))
        assert call.cached_tokens == call.input_tokens - 1


@virtual
async def test_promise_09_what_a_discarded_opening_had_warmed_is_wasted() -> None:
    """Its preload was cut off between two chunks: what those cost is counted, as preload and as waste."""
    engine = FakeEngine("ok", block_tokens=16, speed=Speed(prefill_tokens_per_s=100.0, decode_tokens_per_s=100.0))
    async with make_runtime() as runtime:
        _, _, handle = await opened(runtime, engine)
        await settle(3)
        handle.discard()
        await settle(1)
        done = [c for c in engine.calls if c.outcome == "done"]
        assert engine.calls[-1].outcome == "cancelled" and runtime.counters.preload_usage.calls == len(done) > 0
        assert runtime.counters.wasted_tokens == sum(c.input_tokens - c.cached_tokens for c in done)


@virtual
async def test_on_a_server_that_finds_prefixes_by_content() -> None:
    """No slots: it is warmed as well, and any session's call hits."""
    engine = FakeEngine("ok", block_tokens=16)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        assert await handle.wait() is HandleState.READY
        child = runtime.session("child", policy=policy(), parent=parent, engine=engine)
        call = await ask(child, engine, handle.commit(messages))
        assert call.cached_tokens == (call.input_tokens - 1) // 16 * 16 > 100


@virtual
async def test_an_opening_is_made_on_an_overloaded_engine_too() -> None:
    """It asks no model, so admission does not put it off. Nothing is sent to a server that is overloaded by its own
    word: the opening is ready at once, cold, without a slot. On the calm server the next one is warmed."""
    told = [Load(running=9, waiting=9)]

    class Told(Slotted):
        async def load(self, *, timeout_s: float = 2.0) -> Load:
            """What it tells now."""
            return told[-1]

    events, engine = Events(), Told(metrics=True)
    async with make_runtime(on_event=events) as runtime:
        parent, messages, handle = await opened(runtime, engine)
        assert await handle.wait() is HandleState.READY and now() < 1
        assert handle.artifact is not None and not handle.artifact.warm and not engine.calls and engine.free() == 2
        async with parent.foreground():
            late = parent.schedule_transform(isolate("Another."), messages)
            await settle(1)
            assert late.commit(messages)[-1]["content"] == "Another." and not engine.calls
        told.append(Load())
        calm = parent.schedule_transform(isolate("A third."), messages)
        assert await calm.wait() is HandleState.READY and calm.artifact is not None and calm.artifact.warm
    assert not [n for n in events.names() if n.startswith("admission.")] and not events.of("error")


@pytest.mark.parametrize("how", ["argument", "policy", "engine"])
@virtual
async def test_preload_kv_says_whether(how: str) -> None:
    """The argument goes before the policy, the policy before the engine's default."""
    engine = Slotted()
    engine.preload_by_default = how != "engine"
    async with make_runtime() as runtime:
        kept = make_policy(FakeSummarizer(), window=1_000_000, preload_kv=False if how == "policy" else "auto")
        parent = runtime.session("parent", policy=kept, engine=engine)
        messages = chat(6, size=100)
        handle = parent.schedule_transform(isolate(), messages, preload_kv=False if how == "argument" else None)
        assert await handle.wait() is HandleState.READY and not engine.calls and engine.free() == 2
        wanted = parent.schedule_transform(isolate(), messages, preload_kv=True)
        assert await wanted.wait() is HandleState.READY and len(engine.calls) == 1


@virtual
async def test_promise_05_a_failing_engine_only_leaves_it_cold() -> None:
    """The opening is READY without being warm; the error is an event, and the slot goes back."""
    events, engine = Events(), Slotted()
    engine.faults.fail()
    async with make_runtime(on_event=events) as runtime:
        _, messages, handle = await opened(runtime, engine)
        assert await handle.wait() is HandleState.READY
        assert handle.flight.artifact is not None and not handle.flight.artifact.warm
        assert [e.data["where"] for e in events.of("error")] == ["preload"]
        assert engine.free() == 2 and handle.commit(messages)[-1]["content"] == "Find the cause."


@virtual
async def test_promise_11_nothing_stays_when_the_parent_closes() -> None:
    """Its openings go with it, warm or not, and a preload under way is cancelled."""
    engine = Slotted(slots=4, rate=100.0)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        await handle.wait()
        taken = parent.schedule_transform(isolate("Two."), messages)
        await taken.wait()
        taken.commit(messages)
        parent.schedule_transform(isolate("Three."), messages)
        await settle(1)
        assert engine.free() == 1 and engine.calls[-1].outcome == "running"  # the one that was handed out
        await parent.close()
        await settle(0)
        assert engine.free() == 4 and engine.calls[-1].outcome == "cancelled"


@virtual
async def test_an_opening_that_waits_keeps_no_spare_slot() -> None:
    """The slot of the parent's own lookahead goes back although an opening still waits to be taken."""
    engine = Slotted(slots=4)
    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, engine)
        await handle.wait()
        assert engine.free() == 2
        rewrite = parent.schedule_transform("keep_recent", messages, keep=("messages", 2))
        await rewrite.wait()
        assert engine.free() == 1
        rewrite.discard()
        assert engine.free() == 2


@pytest.mark.parametrize("openings", [2, 40])
@virtual
async def test_promise_10_openings_that_wait_hold_nobody_up(openings: int) -> None:
    """While a turn of the parent runs, any number of openings waits, and then few of them are warmed at
    once; another agent's lookaheads start meanwhile."""
    engine = FakeEngine(speed=Speed(prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0))
    async with make_runtime(concurrency=2) as runtime:
        parent = runtime.session("parent", policy=policy(), engine=engine)
        messages = chat(6, size=100)
        async with parent.foreground():
            handles = [parent.schedule_transform(isolate(f"Part {k}."), messages) for k in range(openings)]
            await settle(1)
            waiting = [handle for handle in handles if handle.state is HandleState.RUNNING]
            assert len(waiting) == openings and not engine.calls
            other = runtime.session("other", policy=make_policy(FakeSummarizer(delay=1)))
            lookahead = other.observe(chat(12, size=55))
            assert lookahead is not None and await lookahead.wait(1.5) is HandleState.READY
        for handle in waiting:
            assert await handle.wait(100) is HandleState.READY and handle.artifact is not None and handle.artifact.warm
        assert sum(call.outcome == "done" for call in engine.calls) >= len(waiting)
        assert _most_at_once(engine.calls) <= WARMING


def _most_at_once(calls: list[EngineCall]) -> int:
    return max(sum(c.arrived_s <= call.arrived_s < (c.ended_s or 0.0) for c in calls) for call in calls)


@virtual
async def test_promise_10_an_opening_that_never_gets_warm_is_ready_after_the_timeout() -> None:
    """On an engine that is always busy, or hangs, `wait()` ends: cold, and the slot on the server goes back."""
    events, busy, hung = Events(), Slotted(), Slotted()
    hung.faults.hang()
    async with make_runtime(on_event=events) as runtime:
        parent = runtime.session("busy", policy=make_policy(FakeSummarizer(), timeout=30), engine=busy)
        other = runtime.session("hung", policy=make_policy(FakeSummarizer(), timeout=30), engine=hung)
        messages = chat(6, size=100)
        began = now()
        async with parent.foreground():
            handles = [session.schedule_transform(isolate(), messages) for session in (parent, other)]
            for handle in handles:
                assert await handle.wait(100) is HandleState.READY and now() - began == pytest.approx(30)
                assert handle.artifact is not None and not handle.artifact.warm
        assert [event.data["complete"] for event in events.of("preload")] == [False, False]
        assert not busy.calls and hung.calls[0].outcome == "cancelled"
        assert len(handles[0].commit(messages)) > 2


@virtual
async def test_promise_10_views_that_wait_to_be_warmed_hold_nobody_up() -> None:
    """Neither the first warming of a result nor the one after the history grew takes another session's slot."""
    engine = FakeEngine(speed=Speed(prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0))
    async with make_runtime(concurrency=1) as runtime:
        ready = runtime.session("ready", policy=make_policy(FakeSummarizer(delay=1), window=4000), engine=engine)
        messages = chat(24, size=55)
        handle = ready.observe(messages)
        assert handle is not None and await handle.wait(100) is HandleState.READY
        lead = runtime.session("lead", policy=policy(), engine=engine)
        async with lead.foreground():
            messages += chat(1, size=5, first=24, system=False)
            ready.observe(messages)  # it is to be warmed again
            waits = runtime.session("waits", policy=make_policy(FakeSummarizer(delay=1)), engine=engine)
            first = waits.observe(chat(12, size=56))
            await settle(2)
            assert first is not None and first.state is HandleState.RUNNING and first.flight.artifact is not None
            other = runtime.session("other", policy=make_policy(FakeSummarizer(delay=1)))
            lookahead = other.observe(chat(12, size=57))
            assert lookahead is not None and await lookahead.wait(1.5) is HandleState.READY
        assert await first.wait(100) is HandleState.READY and first.artifact is not None and first.artifact.warm


@virtual
async def test_promise_10_a_view_that_never_gets_warm_is_ready_after_the_timeout() -> None:
    """Cold, on an engine that is always busy; so is its warming after the history grew, which ends the same way."""
    events = Events()
    engine = FakeEngine(speed=Speed(prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0))
    async with make_runtime(on_event=events) as runtime:
        lead = runtime.session("lead", policy=policy(), engine=engine)
        session = runtime.session(
            "s", policy=make_policy(FakeSummarizer(delay=1), window=4000, timeout=30), engine=engine
        )
        messages = chat(24, size=55)
        async with lead.foreground():
            handle = session.observe(messages)
            assert handle is not None and await handle.wait(100) is HandleState.READY and now() == pytest.approx(31)
            assert handle.artifact is not None and not handle.artifact.warm
            messages += chat(1, size=5, first=24, system=False)
            session.observe(messages)
            await settle(29)
            assert len(events.of("preload")) == 1
            await settle(2)
        assert [event.data["complete"] for event in events.of("preload")] == [False, False] and not engine.calls


@virtual
async def test_promise_10_a_deaf_preload_is_left_to_itself() -> None:
    """One of an engine of somebody's own, which does not ask whether it is still needed."""

    class Deaf(Binding):
        async def preload(self, view: Any, **_: Any) -> Any:
            await asyncio.sleep(1e6)

    class Own(FakeEngine):
        def bind(self, session_id: str) -> Any:
            return Deaf(self, session_id)

    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=1), timeout=30), engine=Own())
        handle = session.observe(chat(12, size=55))
        assert handle is not None and await handle.wait(100) is HandleState.READY and now() == pytest.approx(36)
        assert handle.artifact is not None and not handle.artifact.warm


@virtual
async def test_promise_11_two_sub_agents_of_one_opening_leave_no_slot_behind() -> None:
    """The first has its messages while the preload goes on for the second: what was offered and what was taken since
    both go back."""
    engine = Slotted(slots=6, rate=20.0)
    async with make_runtime() as runtime:
        parent, messages, one = await opened(runtime, engine, shared := isolate())
        two = parent.schedule_transform(shared, messages)
        assert one.flight is two.flight
        await settle(2)
        first = one.commit(messages)
        await settle(2)
        async with parent.foreground():  # the preload gives way, and goes on in a slot of its own
            await settle(1)
        await settle(3)
        child = runtime.session("one", policy=policy(), parent=parent, engine=engine)
        await ask(child, engine, first)
        await two.wait()
        other = runtime.session("two", policy=policy(), parent=parent, engine=engine)
        await ask(other, engine, two.commit(messages))
        for session in (child, other, parent):
            await session.close()
        await settle(60)
        assert engine.free() == 6


@virtual
async def test_promise_09_preloads_are_told_for_how_long_no_turn_is_expected() -> None:
    """Views and openings alike: while the agent rests, while its turn is in flight, and after one that ended unseen."""
    told: list[float | None] = []

    class Told(Binding):
        async def preload(self, view: Any, *, quiet: Any, **options: Any) -> Any:
            told.append(quiet())
            await asyncio.sleep(2)
            told.append(quiet())
            return await super().preload(view, quiet=quiet, **options)

        def opening(self) -> Any:
            return Told(self._engine, self._id)

    class Own(FakeEngine):
        def bind(self, session_id: str) -> Any:
            return Told(self, session_id)

    async with make_runtime() as runtime:
        parent, messages, handle = await opened(runtime, Own(*["ok"] * 9))
        assert await handle.wait() is HandleState.READY and told == [None, None]
        await settle(20 - now())
        await parent.commit(messages)
        quiet: Any = parent.quiet
        assert quiet() == pytest.approx(20)
        parent.turn_over()
        assert quiet() == 0
        await parent.commit(messages)
        parent.observe(messages)
        handle = parent.schedule_transform(isolate(), messages)
        await handle.wait()
        assert told[2:] == [pytest.approx(20), pytest.approx(18)]


@virtual
async def test_an_engine_that_works_for_a_preload_only_at_times() -> None:
    """A preload counts as work on the engine while its request runs, not while it waits."""
    engine = Slotted(rate=100.0)
    async with make_runtime() as runtime:
        parent, _, handle = await opened(runtime, engine)
        await settle(1)
        assert runtime.foreground(engine).seen().working == 1
        async with parent.foreground():
            await settle(1)
            assert handle.state is HandleState.RUNNING and runtime.foreground(engine).seen().working == 0
        await handle.wait()
        assert runtime.foreground(engine).seen().working == 0


def test_a_request_that_is_no_mapping_is_refused() -> None:
    """In the caller's words."""
    with pytest.raises(ConfigurationError, match=r"request=\[\]: expected a mapping"):
        Isolate(instruction="x", request=[])  # type: ignore[arg-type]
    one, two = Isolate(instruction="x", request={"tools": TOOLS}), Isolate(instruction="x")
    assert one.fingerprint != two.fingerprint


def test_slots_of_another_server_are_not_taken_over() -> None:
    """A binding takes over only what is warm on its own server."""
    engine = Slotted()
    child: EngineBinding = engine.bind("child")
    foreign: EngineBinding = Slotted().bind("parent").opening()
    plain: EngineBinding = FakeEngine().bind("parent").opening()
    child.take_over(foreign)
    child.take_over(plain)
    plain.take_over(child)
    assert child.request_options()["id_slot"] == 0


def test_a_slot_that_changed_hands_is_not_reclaimed() -> None:
    """Offered, taken and offered again by another: the first offer is void."""
    table = SlotTable(1)
    slot = table.take()
    assert slot == 0 and table.take() is None
    first = table.offer(slot)
    assert table.take() == slot
    second = table.offer(slot)
    assert table.reclaim(first) is None and table.reclaim(second) == slot and table.take() is None
