"""Slots while the engine is busy, refuses, or was not known yet: who waits for what, and which slot is whose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from flavour_servers import ModelServer
from helpers import A, Events, FakeSummarizer, H, S, chat, make_policy, make_runtime, now, settle, virtual
from slotted import SlottedEngine, ask
from smoothctx import (
    AdmitAll,
    EngineOverloaded,
    EngineRefused,
    HandleState,
    KeepRecent,
    Policy,
    Runtime,
    Session,
    Summarize,
)
from smoothctx.economics import Speed
from smoothctx.engines import OpenAIEngine
from smoothctx.engines.aligned import GAP_WAIT_S
from smoothctx.engines.flavours import Capabilities
from smoothctx.engines.slot_table import SlotTable
from smoothctx.engines.slots import SlotBinding
from smoothctx.foreground import Foreground
from smoothctx.testing.engine import EngineCall


class Copying(SlottedEngine):
    """It writes summaries, and notes the copies that are asked for."""

    def __init__(self, slots: int = 4, prefill: float = 5000.0) -> None:
        super().__init__(*["A summary."] * 50, speed=Speed(prefill, 100.0), slots=slots)
        self.copies: list[str] = []
        self.refusal: Exception | None = None

    async def post_json(self, path: str, body: Any) -> Any:
        """Done, as far as anybody can tell."""
        self.copies.append(path)
        return {}

    async def prefill(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Evaluate them, or refuse to."""
        if self.refusal is not None:
            raise self.refusal
        return await super().prefill(messages, **options)


def summarizing(engine: Any, **options: Any) -> Policy:
    """Its summaries are written by the agent's own engine."""
    options.setdefault("context_window", 4000)
    return Policy(Summarize(engine, keep=("messages", 4), facts=False, max_tokens=60), **options)


# -- whose turn a summariser waits for ---------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "waited"), [(False, GAP_WAIT_S), (True, 20.0)])
@virtual
async def test_promise_10_a_summariser_is_sent_however_busy_the_engine_is(own: bool, waited: float) -> None:
    """It waits a little for a gap, and for the session's own turn only; and that is bounded too: then nothing is
    copied, since the slot is in use."""
    engine = Copying()
    foreground = Foreground(asyncio.get_running_loop().time, lease_s=1e6)
    binding = engine.bind("s")
    foreground.begin("another session's turn, and then its next one")
    options = binding.transform_options(foreground, lambda: False, turn=lambda: own, wait_s=20.0)
    engine.table.copies_keep = True
    async with options["lookahead"]([H("all of it")], {}) as given:
        assert now() == pytest.approx(waited)
        assert given.options == {"id_slot": 1, "cache_prompt": True} and given.evaluated == 0
    assert engine.copies == ([] if own else ["/slots/0?action=save", "/slots/1?action=restore"])


@virtual
async def test_promise_09_a_summary_whose_prompt_was_not_copied_gives_way_to_turns() -> None:
    """A copied slot may be of no use (sliding windows). The prompt is then evaluated as a preload before the summary is
    asked for: a turn that begins meanwhile has the engine for itself, and no hit of the cache is claimed."""
    engine = Copying(prefill=100.0)
    foreground = Foreground(asyncio.get_running_loop().time)
    binding = engine.bind("s")
    prompt = [*chat(26, size=100), H("Summarise.")]
    options = binding.transform_options(foreground, lambda: False, turn=lambda: False)

    async def turn() -> None:
        await asyncio.sleep(3)
        foreground.begin("a turn of anybody")
        await asyncio.sleep(4)
        foreground.end("a turn of anybody")

    async with asyncio.TaskGroup() as group:
        group.create_task(turn())
        done = await engine.complete(prompt, max_tokens=20, **options)
    first, second, summary = engine.calls
    assert first.outcome == "cancelled" and first.ended_s == pytest.approx(3) and second.arrived_s == pytest.approx(7)
    assert [c.max_tokens for c in engine.calls] == [1, 1, 20]
    assert summary.cached_tokens >= summary.input_tokens - 2
    assert done.text and engine.table.copies_keep is None, "what an aborted request brought says nothing of the copy"
    await engine.complete([*prompt, A("x"), H("y " * 300)], max_tokens=20, **options)
    assert [c.max_tokens for c in engine.calls[3:]] == [1, 20] and engine.table.copies_keep is True
    await engine.complete([*prompt, A("x"), H("z " * 300)], max_tokens=20, **options)
    assert [c.max_tokens for c in engine.calls[5:]] == [20], "it is known now that copies are of use"
    await engine.complete([H("quite another conversation " * 30)], max_tokens=20, **options)
    assert engine.table.copies_keep is False


@virtual
async def test_a_turn_that_waits_for_a_summary_waits_for_no_idle_time() -> None:
    """Promoted, its prompt is no longer evaluated out of the way: the summary is asked for at once."""
    engine, urgent = Copying(prefill=100.0), [False]
    foreground = Foreground(asyncio.get_running_loop().time)
    options = engine.bind("s").transform_options(foreground, lambda: urgent[0], turn=lambda: False)

    async def turn() -> None:
        await asyncio.sleep(3)
        urgent[0] = True
        foreground.poke()

    async with asyncio.TaskGroup() as group:
        group.create_task(turn())
        await engine.complete([*chat(26, size=100), H("Summarise.")], max_tokens=20, **options)
    assert [(c.max_tokens, c.outcome) for c in engine.calls] == [(1, "cancelled"), (20, "done")]
    assert engine.calls[1].arrived_s == pytest.approx(3)


@virtual
async def test_a_summariser_waits_until_the_turn_of_its_own_session_is_over() -> None:
    """The turns of the others go on all the time; the copy is made when the agent's own slot is at rest."""
    engine = Copying(slots=8)
    engine.table.copies_keep = True
    async with make_runtime(admission=AdmitAll()) as runtime:
        session = runtime.session("s", policy=summarizing(engine, context_window=8000), engine=engine)
        other = runtime.session("other", policy=summarizing(engine), engine=engine)
        messages = chat(26, size=100)
        await ask(session, engine, messages[:-1])
        async with other.foreground():
            handle = session.observe(messages)
            assert handle is not None
            await session.commit([*messages, H("next")])
            async with session.foreground() as call:
                await settle(GAP_WAIT_S + 5)
                call.first_token()
                await settle(5)
                assert not engine.copies and handle.state is HandleState.RUNNING
            session.observe([*messages, H("next"), A("done")])
            await settle(5)
            assert len(engine.copies) == 2 and handle.flight.artifact is not None


@virtual
async def test_promise_10_a_summary_comes_within_its_timeout_on_an_engine_without_a_gap() -> None:
    """Two other users take turns about: one of them always has one in flight. The timeout is not used up by waiting."""
    engine, events = Copying(slots=8), Events()
    async with make_runtime(on_event=events, admission=AdmitAll()) as runtime:
        session = runtime.session("s", policy=summarizing(engine, context_window=8000, timeout=10), engine=engine)
        others = [runtime.session(k, policy=summarizing(engine), engine=engine) for k in ("x", "y")]
        messages = chat(26, size=100)
        await ask(session, engine, messages[:-1])

        async def user(own: Session, offset: float) -> None:
            await asyncio.sleep(offset)
            while True:
                async with own.foreground() as call:
                    call.first_token()
                    await asyncio.sleep(2)
                await asyncio.sleep(0.5)

        async with asyncio.TaskGroup() as group:
            users = [group.create_task(user(own, offset)) for own, offset in zip(others, (0, 1.25), strict=True)]
            await settle(2)
            handle = session.observe(messages)
            assert handle is not None
            await settle(9)
            assert handle.flight.artifact is not None and not events.of("lookahead.failed")
            for task in users:
                task.cancel()


# -- where the agent goes at a commit ----------------------------------------------------------------------------


async def rewritten(runtime: Runtime, engine: Copying, preload_kv: bool, idle_s: float) -> tuple[EngineCall, int]:
    """The first call after a rewrite that keeps a long system message, and the tokens of that message. A turn comes
    ``idle_s`` seconds after each reply."""
    policy = Policy(KeepRecent(("messages", 4)), context_window=3000, preload_kv=preload_kv, commit="hard_limit")
    session = runtime.session("s", policy=policy, engine=engine)
    messages = [S("rule " * 800)]
    for k in range(60):
        messages = [*messages, H(f"{k} " + "question " * 30)]
        call = await ask(session, engine, messages)
        if session.receipts:
            return call, engine.count(messages[:1])
        messages = [*messages, A("ok " * 20)]
        session.observe(messages)
        await settle(idle_s)
    raise AssertionError("nothing was committed")


@pytest.mark.parametrize("how", ["off", "refused", "overloaded", "no time", "some time", "fine"])
@virtual
async def test_a_preload_never_makes_the_commit_worse(how: str) -> None:
    """The agent goes where more of the new view is: what its own slot shares with it is not given up for a slot that a
    refused or aborted preload has hardly touched."""
    engine = Copying(prefill=500.0)
    refusals = {
        "refused": EngineRefused("no", status=400),
        "overloaded": EngineOverloaded("busy", status=503),
    }
    engine.refusal = refusals.get(how)
    idle_s = {"no time": 0.01, "some time": 0.5}.get(how, 20.0)
    async with make_runtime() as runtime:
        call, head = await rewritten(runtime, engine, how != "off", idle_s)
        assert call.cached_tokens >= head, "at least what stays in any case"
        if how == "fine":
            assert call.options["id_slot"] == 1 and call.cached_tokens > 0.8 * call.input_tokens
        elif how == "some time":
            assert call.options["id_slot"] == 1
        else:
            assert call.options["id_slot"] == 0
    assert engine.free() == 4


# -- slots go back -----------------------------------------------------------------------------------------------


@virtual
async def test_a_failed_summary_gives_its_slot_back() -> None:
    """No lookahead is under way: the session has its agent's slot and no other."""
    engine, events = Copying(), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=summarizing(engine, context_window=8000), engine=engine)
        messages = chat(26, size=100)
        await ask(session, engine, messages[:-1])
        engine.faults.fail(None, error=EngineRefused("no", status=400))
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.FAILED
        assert engine.free() == 3 and session.lookahead is None


@pytest.mark.parametrize("preload_kv", [True, False])
@virtual
async def test_a_commit_gives_the_other_slot_back(preload_kv: bool) -> None:
    """Whether its view was preloaded or not."""
    engine = Copying()
    async with make_runtime() as runtime:
        policy = summarizing(engine, context_window=8000, preload_kv=preload_kv)
        session = runtime.session("s", policy=policy, engine=engine)
        messages = chat(26, size=100)
        await ask(session, engine, messages[:-1])
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY and engine.free() == 2
        await ask(session, engine, [*messages, H("next")])
        assert session.receipts and engine.free() == 3


@virtual
async def test_the_slot_of_a_summary_that_outlives_a_commit_goes_back() -> None:
    """Another summary of the session is being written while the first one is committed."""
    engine = Copying(slots=5)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=summarizing(engine, context_window=8000), engine=engine)
        messages = chat(26, size=100)
        await ask(session, engine, messages[:-1])
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        engine.faults.slow(30)
        transform = Summarize(engine, keep=("messages", 8), facts=False, max_tokens=50)
        other = session.schedule_transform(transform, messages, target_segments=[0, 1, 2], preload_kv=False)
        await settle(1)
        handle.commit(messages)
        assert session.receipts and other.state is HandleState.RUNNING and engine.free() == 3
        await other.wait()
        other.discard()
        assert engine.free() == 4


@virtual
async def test_a_preload_that_comes_too_late_takes_no_slot() -> None:
    """Its lookahead is over before it begins, or while it waits for idle time."""
    engine = Copying()
    foreground = Foreground(asyncio.get_running_loop().time)
    binding, needed = engine.bind("s"), [False]

    async def preload() -> Any:
        return await binding.preload(
            lambda: chat(2),
            request={},
            foreground=foreground,
            needed=lambda: needed[0],
            hurried=lambda rate: False,
        )

    assert not (await preload()).complete and engine.free() == 3
    needed[0] = True
    foreground.begin("turn")
    async with asyncio.TaskGroup() as group:
        late = group.create_task(preload())
        await settle(1)
        needed[0] = False
        binding.discarded()
        foreground.end("turn")
    assert not late.result().complete and engine.free() == 3 and not engine.calls


# -- slots that become known late --------------------------------------------------------------------------------


@virtual
async def test_a_session_that_was_opened_before_the_probe_gets_its_slot_with_its_next_turn() -> None:
    """Until then nothing is preloaded: without a slot it would go where the most similar prefix is, the agent's own."""
    async with ModelServer("llama.cpp").engine() as engine, make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), preload_kv=True), engine=engine)
        await session.commit(chat(1))
        preloading = session.serving.preloading
        assert session.request_options() == {} and preloading.wished(None)
        await settle(10)
        assert engine.preload_by_default and not preloading.wished(None) and not preloading.wished(True)
        session.observe(chat(1))
        await session.commit([*chat(1), H("next")])
        assert session.request_options()["id_slot"] == 0 and preloading.wished(None)
        other = runtime.session("other", policy=make_policy(FakeSummarizer()), engine=engine)
        assert other.request_options()["id_slot"] == 1
        await session.close()
        assert isinstance(again := engine.bind("again"), SlotBinding) and again.request_options()["id_slot"] == 0


def test_sessions_that_bind_at_the_same_time_share_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that were opened before the probe bind at their next turns, in threads of their own: one table."""
    engine = OpenAIEngine("http://127.0.0.1:9/v1", "m")
    engine.capabilities = Capabilities(flavour="llama.cpp", slots=4)
    bound: list[Any] = []

    class Interrupted(SlotTable):
        """Another thread binds while it is made, unless it has to wait."""

        def __init__(self, count: int) -> None:
            if threading.current_thread() is not other:
                other.start()
                other.join(0.1)
            super().__init__(count)

    other = threading.Thread(target=lambda: bound.append(engine.bind("other")))
    monkeypatch.setattr("smoothctx.engines.client.SlotTable", Interrupted)
    bound.append(engine.bind("one"))
    other.join()
    assert bound[0].table is bound[1].table


@virtual
async def test_a_lookahead_that_is_under_way_ends_without_slots() -> None:
    """A session changes to slots between two lookaheads, not while one is at work or waits for its commit."""
    async with ModelServer("llama.cpp").engine() as engine, make_runtime() as runtime:
        policy = make_policy(FakeSummarizer(delay=30), window=8000, trigger=("fraction", 0.2), preload_kv=True)
        session = runtime.session("s", policy=policy, engine=engine)
        messages = chat(20, size=100)
        await session.commit(messages[:-1])
        handle = session.observe(messages)
        assert handle is not None
        await settle(10)
        assert engine.capabilities is not None and engine.capabilities.slots == 3
        await session.commit(messages := [*messages, H("next")])
        assert session.request_options() == {}
        session.observe(messages := [*messages, A("done")])
        assert await handle.wait() is HandleState.READY
        assert handle.artifact is not None and not handle.artifact.warm
        for k in range(3):
            await session.commit(messages := [*messages, H(f"{k}")])
            session.observe(messages := [*messages, A("done")])
            await settle(1)
        assert session.receipts and session.request_options()["id_slot"] == 0
