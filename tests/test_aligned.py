"""A summary on slots of a model with a sliding window: it is written where everything is, and its agent goes on in a
copy. What could go wrong on the way there costs time, never a turn its warm slot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers import A, H, S, chat, make_runtime, settle, virtual
from slotted import SlidingEngine, SlidingSlot, SlottedEngine, ask, beside, sliding, summarizing
from smoothctx import AdmitAll, EngineRefused, HandleState, Session
from smoothctx.engines.aligned import CHECK_S, STRAYS, Desk
from smoothctx.engines.slots import SlotBinding
from smoothctx.foreground import Foreground

LONG = "An answer that was written in so many words that it is cut off " * 20


async def begun(runtime: Any, engine: SlidingEngine, **options: Any) -> tuple[Session, list[Any]]:
    """A session whose agent has answered; its history, up to the answer."""
    session = runtime.session("s", policy=summarizing(engine, **options), engine=engine)
    messages = [S("rule " * 300), *chat(26, size=100)]
    await ask(session, engine, messages[:-1])
    return session, messages


def summaries(engine: SlidingEngine) -> list[Any]:
    """The calls that asked for a summary."""
    return [c for c in engine.calls if c.max_tokens == 60]


@virtual
async def test_promise_09_a_summary_is_cached_also_where_attention_slides() -> None:
    """And so is the agent's turn that comes meanwhile, in the copy, and the one after the commit, in its own slot."""
    engine = sliding()
    async with make_runtime() as runtime:
        session, messages = await begun(runtime, engine)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        (summary,) = summaries(engine)
        assert summary.options["id_slot"] == 0 and summary.cached_tokens > 0.9 * summary.input_tokens
        assert session.request_options()["id_slot"] == 1, "the agent goes on in the copy"
        engine.calls.clear()
        other = runtime.session("other", policy=summarizing(engine), engine=engine)
        assert other.request_options()["id_slot"] == 2
        call = await ask(session, engine, [*messages, H("next")])
        assert session.receipts and call.options["id_slot"] == 0 and call.cached_tokens > 0.9 * call.input_tokens
        assert engine.free() == 2, "the copy is not needed any more"
    assert engine.free() == 4


@virtual
async def test_a_turn_while_the_summary_is_written_is_warm_in_the_copy() -> None:
    """The agent need not wait for the slot in which its summary is written."""
    engine = sliding(*["word " * 80] * 9)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session, messages = await begun(runtime, engine, commit="hard_limit")
        handle = session.observe(messages)
        assert handle is not None
        await settle(0.5)
        assert handle.state is HandleState.RUNNING and len(summaries(engine)) == 1
        call = await ask(session, engine, [*messages, H("next")])
        assert call.options["id_slot"] == 1 and call.input_tokens - call.cached_tokens < 120
        assert summaries(engine)[0].outcome == "running" and call.first_token_s - call.arrived_s < 0.2


@virtual
async def test_promise_10_a_turn_that_waits_has_its_summary_cached() -> None:
    """Another session's turns are in flight all the time; what is waited for asks little of the engine."""
    engine = sliding(prefill=500.0)
    async with make_runtime(admission=AdmitAll()) as runtime:
        session, messages = await begun(runtime, engine)
        other = runtime.session("other", policy=summarizing(engine), engine=engine)
        async with other.foreground():
            await ask(session, engine, [*messages, H("next " * 3000)])
        (receipt,), (summary,) = session.receipts, summaries(engine)
        assert receipt.how == "promoted" and receipt.waited_s < 1.0
        assert summary.cached_tokens > 0.9 * summary.input_tokens and summary.options["id_slot"] == 0


@virtual
async def test_a_reply_that_is_shown_otherwise_keeps_the_agent_where_it_is() -> None:
    """Templates drop what a model thought. Its copy is cold then: nobody moves there, and after two of them none is
    asked any more."""
    engine = sliding(*["thought " * 50, "A summary."] * 30, prefill=400.0, slots=4)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=summarizing(engine, preload_kv=False), engine=engine)
        messages = [S("rule " * 300), *chat(26, size=100)]
        for round_ in range(STRAYS + 1):
            view = await session.commit(messages[:-1])
            async with session.foreground() as call:
                await engine.complete(view, max_tokens=40, **session.request_options())
                call.first_token()
            asked = len([c for c in engine.calls if c.max_tokens == 1])
            handle = session.observe(messages)
            assert handle is not None and await handle.wait() is HandleState.READY
            checks = [c for c in engine.calls[asked:] if c.max_tokens == 1 and c.outcome == "cancelled"]
            assert engine.table.strays == min(round_ + 1, STRAYS)
            if round_ < STRAYS:
                assert checks[0].ended_s - checks[0].arrived_s == pytest.approx(CHECK_S)
            assert session.request_options()["id_slot"] == 0
            handle.discard("not_needed")
            messages = [*messages, H("more"), A("yes")]


@virtual
async def test_a_server_that_keeps_only_windows_is_known_after_two_summaries() -> None:
    """``llama-server`` without ``--swa-full``: the agent's own slot is of no more use for one than a copy. From the
    third one on its prompt is evaluated as a preload, out of the turns' way."""
    engine = sliding(prefill=2000.0)
    for lane in engine.lanes:
        assert isinstance(lane, SlidingSlot)
        lane.full = False
    async with make_runtime() as runtime:
        session, messages = await begun(runtime, engine)
        for round_ in range(STRAYS + 1):
            before = len(engine.calls)
            handle = session.observe(messages)
            assert handle is not None and await handle.wait() is HandleState.READY
            assert engine.table.strays == min(round_ + 1, STRAYS)
            first = [c.max_tokens for c in engine.calls[before:]][:2]
            summary = summaries(engine)[-1]
            if round_ < STRAYS:
                assert first == [1, 60] and summary.cached_tokens < 0.5 * summary.input_tokens
            else:
                assert first == [1, 60] and summary.cached_tokens > 0.9 * summary.input_tokens
                assert engine.calls[before].input_tokens == summary.input_tokens, "all of it, as a preload"
            messages = [*messages, H("next"), *[A("reply"), *chat(24, size=100)]]
            await ask(session, engine, messages[:-1])
            assert len(session.receipts) == round_ + 1


@virtual
async def test_without_a_preload_the_agent_goes_back_to_its_own_slot() -> None:
    """There the beginning that both views share is warm; the copy is of no use for a rewritten view."""
    engine = sliding()
    async with make_runtime() as runtime:
        session, messages = await begun(runtime, engine, preload_kv=False)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert session.request_options()["id_slot"] == 1
        call = await ask(session, engine, [*messages, H("next")])
        assert session.receipts and call.options["id_slot"] == 0
        assert call.cached_tokens >= engine.count(messages[:1])
        assert engine.free() == 3


@virtual
async def test_after_a_discard_the_agent_stays_in_the_copy() -> None:
    """Its slot is another's now. The next summary is evaluated as a preload: the copy holds nothing but its end."""
    engine = sliding()
    async with make_runtime() as runtime:
        session, messages = await begun(runtime, engine)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        handle.discard("not_needed")
        assert engine.free() == 3
        messages = [*messages, H("next"), A("reply")]
        call = await ask(session, engine, messages[:-1])
        assert call.options["id_slot"] == 1 and call.input_tokens - call.cached_tokens < 120
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert len(summaries(engine)) == 2 and session.request_options()["id_slot"] == 1
        call = await ask(session, engine, [*messages, H("next")])
        assert call.cached_tokens > 0.9 * call.input_tokens
        assert call.options["id_slot"] != 1, "with the commit it is in a slot that holds everything again"
        later = [*messages, H("next"), A("reply"), *chat(24, size=100)]
        await ask(session, engine, later[:-1])
        handle = session.observe(later)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert summaries(engine)[-1].cached_tokens > 0.9 * summaries(engine)[-1].input_tokens


@virtual
async def test_a_turn_that_begins_while_the_copy_is_asked_stays_where_it_is() -> None:
    """Its call may be on its way to the slot that the agent had."""
    engine = sliding(prefill=100.0)
    foreground = Foreground(asyncio.get_running_loop().time)
    binding = engine.bind("s")
    view = [*chat(4, size=20), H("q"), A("a")]
    await engine.prefill(view[:-1], **binding.request_options())
    turn = [False]
    options = binding.transform_options(foreground, lambda: False, turn=lambda: turn[0], view=lambda: view)

    async def begin() -> None:
        await settle(0.05)
        turn[0] = True
        foreground.poke()
        await settle(5)
        turn[0] = False
        foreground.poke()

    async with asyncio.TaskGroup() as group:
        group.create_task(begin())
        await engine.complete([*view[:4], H("Summarise.")], max_tokens=60, **options)
    assert binding.request_options()["id_slot"] == 0 and not binding.away
    assert summaries(engine)[0].options["id_slot"] == 1 and engine.table.strays == 0


@pytest.mark.parametrize("broken", ["save", "restore", "check", "view"])
@virtual
async def test_promise_05_a_summary_comes_whatever_fails_before_it(broken: str) -> None:
    """Without the copy, or without its check, everything stays where it is."""
    engine = sliding()
    copied, prefill = engine.post_json, engine.prefill

    async def post_json(path: str, body: Any) -> Any:
        if path.endswith(broken):
            raise EngineRefused("no", status=501)
        return await copied(path, body)

    async def refuse(messages: Any, **options: Any) -> Any:
        if broken == "check" and len(engine.copies) == 2 and not summaries(engine):
            raise EngineRefused("no", status=400)
        return await prefill(messages, **options)

    engine.post_json, engine.prefill = post_json, refuse  # type: ignore[method-assign]
    async with make_runtime() as runtime:
        session, messages = await begun(runtime, engine)
        if broken == "view":
            session.shown = lambda messages: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert session.request_options()["id_slot"] == 0
        call = await ask(session, engine, [*messages, H("next")])
        assert session.receipts and call.cached_tokens > 0.9 * call.input_tokens


@virtual
async def test_a_summary_that_is_asked_for_again_finds_everything_where_it_was() -> None:
    """The first answer was cut off: the second call goes to the same slot, which is not overwritten by a copy."""
    engine = sliding(LONG, "A summary.")
    async with make_runtime() as runtime:
        session, messages = await begun(runtime, engine)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert [c.options["id_slot"] for c in summaries(engine)] == [0, 0]
        assert all(c.cached_tokens > 0.9 * c.input_tokens for c in summaries(engine))
        assert len(engine.copies) == 2


@virtual
async def test_of_two_summaries_at_once_one_brings_what_both_extend() -> None:
    """They share the slot, and so the agent's prefix in it."""
    engine = sliding()
    _, view, options = await beside(engine)
    async with asyncio.TaskGroup() as group:
        for cut in (16, 8):
            group.create_task(engine.complete([*view[:cut], H("Summarise.")], max_tokens=60, **options))
    assert len(engine.copies) == 2
    assert all(c.options["id_slot"] == 0 and c.cached_tokens > 0.5 * c.input_tokens for c in summaries(engine))


class Places(RuleBasedStateMachine):
    """Two sessions on one server, in any order of what can happen to their slots."""

    @initialize(slots=st.integers(2, 6))
    def start(self, slots: int) -> None:
        """Their engine."""
        self.engine = SlottedEngine(slots=slots)
        self.slots = slots
        self.sessions: list[SlotBinding] = [self.engine.bind(k) for k in ("a", "b")]
        self.desks: list[tuple[SlotBinding, Desk]] = []
        self.closed: set[int] = set()

    which = st.integers(0, 1)

    @rule(k=which)
    def sit(self, k: int) -> None:
        """A summariser takes its place."""
        desk = self.sessions[k].sit()
        if desk is not None:
            self.desks.append((self.sessions[k], desk))
            assert desk.slot != self.sessions[k].agent

    @precondition(lambda self: self.desks)
    @rule(turn=st.booleans(), data=st.data())
    def change(self, turn: bool, data: Any) -> None:
        """And changes it with the agent, once, and not in the middle of a turn."""
        binding, desk = data.draw(st.sampled_from(self.desks))
        if binding.away or not binding.at(desk):
            return
        before = (binding.agent, desk.slot)
        moved = binding.change_places(desk, unless=lambda: turn)
        assert moved is not turn
        assert (binding.agent, desk.slot) == (before[::-1] if moved else before)

    @precondition(lambda self: self.desks)
    @rule(keep=st.booleans(), data=st.data())
    def rise(self, keep: bool, data: Any) -> None:
        """Its summary is written."""
        pair = data.draw(st.sampled_from(self.desks))
        self.desks.remove(pair)
        pair[0].rise(pair[1], keep=keep)

    @rule(k=which, warm=st.booleans())
    def committed(self, k: int, warm: bool) -> None:
        """A view is committed: the agent is at home again."""
        self.sessions[k].committed(warm)
        assert not self.sessions[k].away

    @rule(k=which)
    def discarded(self, k: int) -> None:
        """Nothing more comes of its lookaheads."""
        self.sessions[k].discarded()

    @rule(k=which)
    def close(self, k: int) -> None:
        """The session ends."""
        self.sessions[k].close()
        self.closed.add(k)

    @invariant()
    def every_slot_is_somebodys(self) -> None:
        """One place each, and none is lost."""
        held = [b.agent for b in self.sessions if b.agent is not None]
        held += [b._spare for b in self.sessions if b._spare is not None]
        held += {desk: desk.slot for _, desk in self.desks}.values()
        assert len(held) == len(set(held)) == self.slots - self.engine.free()
        assert all(self.sessions[k].agent is None for k in self.closed)


Places.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPlaces = Places.TestCase
