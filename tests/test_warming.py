"""Preloads leave an engine alone that has asked for it, or that is overloaded by its own word."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from helpers import A, Events, FakeSummarizer, H, chat, make_policy, make_runtime, now, settle, virtual
from slotted import SlottedEngine, ask
from smoothctx import AdmitAll, EngineOverloaded, Runtime, Session
from smoothctx.economics import Speed
from smoothctx.engines.load import Load
from smoothctx.testing import FakeEngine

CALM, OVERLOADED = Load(running=0, waiting=0, kv_used=0.1), Load(running=8, waiting=9, kv_used=0.97)


class Engine(FakeEngine):
    """A server of one's own that tells its load, and may refuse to evaluate prompts ahead."""

    def __init__(self) -> None:
        super().__init__(metrics=True)
        self.capabilities = replace(self.capabilities, flavour="vllm")
        self.told: Load | None = CALM
        self.refusal: Exception | None = None
        self.asked_at: list[float] = []
        self.sent_at: list[float] = []

    async def load(self, *, timeout_s: float = 2.0) -> Load:
        """What it tells now."""
        self.asked_at.append(now())
        if self.told is None:
            raise RuntimeError("no load")
        return self.told

    async def prefill(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Evaluate them, or refuse to."""
        self.sent_at.append(now())
        if self.refusal is not None:
            raise self.refusal
        return await super().prefill(messages, **options)


def sessions(runtime: Runtime, engine: Engine, count: int) -> list[tuple[Session, list[dict[str, Any]]]]:
    """Sessions with a lookahead each, whose view is to be preloaded."""
    found = []
    for k in range(count):
        policy = make_policy(
            FakeSummarizer(delay=2), window=8000, trigger=("fraction", 0.2), commit="hard_limit", preload_kv=True
        )
        session = runtime.session(f"s{k}", policy=policy, engine=engine)
        messages = chat(20, size=100, first=100 * k)
        assert session.observe(messages) is not None
        found.append((session, messages))
    return found


@pytest.mark.parametrize("status", [429, 503])
@virtual
async def test_a_preload_that_is_told_to_stay_away_does(status: int) -> None:
    """The first refusals are heard by all sessions: nothing more is sent before the time is over, and then it is."""
    engine, events = Engine(), Events()
    engine.refusal = EngineOverloaded("slow down", status=status, retry_after_s=60.0)
    async with make_runtime(on_event=events) as runtime:
        turns = sessions(runtime, engine, 4)
        await settle(5)
        refused = len(engine.sent_at)
        assert 1 <= refused <= 2 and runtime.endpoints.rests(engine) > 50  # two go out at once
        for k in range(4):
            for session, messages in turns:
                await session.commit([*messages, H(f"go {k}")])
                messages += [H(f"go {k}"), A("done")]
                session.observe(messages)
            await settle(5)
        assert len(engine.sent_at) == refused and not events.of("error")
        assert [e.data["why"] for e in events.of("preload")] == ["overloaded"] * refused
        assert all("slow down" in e.data["error"] and not e.data["complete"] for e in events.of("preload"))
        engine.refusal = None
        await settle(120)
        assert min(engine.sent_at[refused:]) >= engine.sent_at[0] + 60
        assert all(s.lookahead is not None and s.lookahead.artifact is not None for s, _ in turns)
        assert sum(e.data["complete"] for e in events.of("preload")) == 4


@virtual
async def test_what_fails_without_such_a_wish_is_an_error_and_tried_again() -> None:
    """An error of the server is said as before; the next turn tries again."""
    engine, events = Engine(), Events()
    engine.refusal = EngineOverloaded("broken", status=500)
    async with make_runtime(on_event=events) as runtime:
        ((session, messages),) = sessions(runtime, engine, 1)
        await settle(5)
        assert [e.data["where"] for e in events.of("error")] == ["preload"]
        engine.refusal = None
        await session.commit([*messages, H("go on")])
        session.observe([*messages, H("go on"), A("done")])
        await settle(5)
        assert [e.data["complete"] for e in events.of("preload")] == [True]


@pytest.mark.parametrize("how", ["overloaded", "rate_limited"])
@virtual
async def test_promise_10_a_summariser_elsewhere_is_not_held_back_by_the_agents_engine(how: str) -> None:
    """It loads nothing there: only the preload of what it wrote waits, and the turn waits for neither."""
    events, engine = Events(), Engine()
    async with make_runtime(on_event=events) as runtime:
        if how == "overloaded":
            engine.told = OVERLOADED
        else:
            runtime.endpoints.overloaded(engine, EngineOverloaded("later", status=429, retry_after_s=300.0))
        runtime.foreground(engine).begin("somebody")
        ((session, messages),) = sessions(runtime, engine, 1)
        handle = session.lookahead
        assert handle is not None
        await settle(3)
        assert handle.flight.artifact is not None and not engine.sent_at
        assert not events.of("admission.skipped")
        assert {e.data["work"].split(":")[0] for e in events.of("admission.deferred")} <= {"preload"}
        await session.commit([*messages, H("And now?", size=4000)])
        assert session.receipts[-1].how == "ready" and session.receipts[-1].waited_s == 0


@virtual
async def test_promise_09_nothing_is_preloaded_beside_users_who_leave_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when time is short; as soon as one of them is alone it is."""
    events, engine = Events(), Engine()
    monkeypatch.setattr(Session, "hurried", lambda *_: True)
    async with make_runtime(on_event=events) as runtime:
        foreground = runtime.foreground(engine)
        for user in "abc":
            foreground.begin(user)
            foreground.first_token(user)
        await settle(5)
        sessions(runtime, engine, 1)
        await settle(20)
        assert not engine.sent_at
        assert [e.data["why"] for e in events.of("admission.deferred")] == ["saturated"]
        for user in "ab":
            foreground.end(user)
        await settle(20)
        assert engine.sent_at and foreground.busy


@virtual
async def test_a_preload_waits_while_the_server_is_overloaded() -> None:
    """It began on a calm server; from when others wait there nothing goes out, and on it goes when they are done."""
    engine, events = Engine(), Events()
    async with make_runtime(on_event=events) as runtime:
        sessions(runtime, engine, 2)
        await settle(1)
        engine.told = OVERLOADED
        await settle(30)
        assert engine.sent_at == []
        told = events.of("admission.deferred")
        assert sorted((e.data["work"], e.data["why"]) for e in told) == [
            ("preload:s0", "waiting"),
            ("preload:s1", "waiting"),
        ]
        asked = [t for t in engine.asked_at if t > 5]
        assert len(asked) <= 30, "not more often than a lookahead would"
        engine.told = CALM
        await settle(10)
        assert [e.data["complete"] for e in events.of("preload")] == [True, True]
        assert all(b - a >= 0.5 for a, b in zip(engine.asked_at, engine.asked_at[1:], strict=False))


@pytest.mark.parametrize("how", ["no_admission", "no_load", "not_asked"])
@virtual
async def test_what_is_not_known_holds_nothing_back(how: str) -> None:
    """Where admission is switched off, the load cannot be read, or the server tells none."""
    engine, events = Engine(), Events()
    engine.told = None if how == "no_load" else OVERLOADED
    if how == "not_asked":
        engine.capabilities = replace(engine.capabilities, metrics=False, slots=0)
    async with make_runtime(on_event=events, admission=AdmitAll() if how == "no_admission" else None) as runtime:
        sessions(runtime, engine, 1)
        await settle(10)
        assert [e.data["complete"] for e in events.of("preload")] == [True]
    assert not events.of("error") and not events.of("admission.deferred")


@virtual
async def test_promise_11_a_preload_that_waits_for_the_server_is_cancelled() -> None:
    """Closing the runtime ends it, and nothing is sent."""
    engine, events = Engine(), Events()
    async with make_runtime(on_event=events) as runtime:
        sessions(runtime, engine, 1)
        await settle(1)
        engine.told = OVERLOADED
        await settle(10)
    assert engine.sent_at == [] and not events.of("error")


@virtual
async def test_promise_09_a_turn_that_comes_when_it_may_waits_for_a_chunk_at_most() -> None:
    """On llama.cpp: one request for as long as no turn came lately, then chunks, however long the next one takes."""
    spans: list[tuple[float, float]] = []

    class Slow(SlottedEngine):
        async def prefill(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
            began = now()
            reply = await super().prefill(messages, **options)
            spans.append((began - idle_since, now() - idle_since))
            return reply

    engine = Slow(*["ok"] * 50, speed=Speed(40.0, 100.0), slots=3)
    policy = make_policy(FakeSummarizer(), window=6000, trigger=("tokens", 2600), preload_kv=True)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy, engine=engine)
        messages: list[dict[str, Any]] = chat(1)
        while session.lookahead is None:
            messages.append(H(f"{len(messages)} " + "new text " * 60))
            await ask(session, engine, messages)
            messages.append(A("ok " * 20))
            session.observe(messages)
            idle_since = now()
            await asyncio.sleep(4.0)
        await asyncio.sleep(20.0)
    assert len(spans) > 5 and spans[-1][1] < 24
    (_, first), *others = spans
    assert 3.0 < first < 5.0 and all(end - begin < 1.3 for begin, end in others)
