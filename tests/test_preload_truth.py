"""What is called warm is warm: for this session, in its slot, as far as the server's own answers say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers import A, Events, FakeSummarizer, H, Message, S, T, chat, make_policy, make_runtime, settle, virtual
from slotted import SlottedEngine, ask
from smoothctx import EngineRefused, HandleState, Offload, Policy, Session, Summarize, Usage
from smoothctx.economics import Speed
from smoothctx.engines.preload import Preloader, Warmth
from smoothctx.foreground import Foreground
from smoothctx.testing import FakeEngine


class Slotted(SlottedEngine):
    """One that writes summaries."""

    def __init__(self, slots: int = 4) -> None:
        super().__init__(*["A summary."] * 50, speed=Speed(5000.0, 100.0), slots=slots)


def at_limit(model: Any, window: int = 4000) -> Policy:
    """Commits wait for the hard limit."""
    return make_policy(model, window=window, commit="hard_limit", land_at=("fraction", 0.2))


@virtual
async def test_promise_15_a_tail_that_outgrew_the_preload_is_not_called_warm() -> None:
    """Warmed once, then the history grows without idle time: the commit has to evaluate the tail, and says so."""
    engine = FakeEngine(*["ok"] * 50, block_tokens=16)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=at_limit(FakeSummarizer(), 8000), engine=engine)
        messages = chat(26, size=100)
        await session.commit(messages)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert handle.artifact is not None and handle.artifact.warm
        for k in range(40):
            messages = [*messages, H(f"{k} " + "new text " * 60)]
            call = await ask(session, engine, messages)
            if session.receipts:
                break
            messages = [*messages, A("ok " * 20)]
            session.observe(messages)  # and the next question is there at once
        assert k > 2 and session.receipts[0].how == "ready"
        assert call.cached_tokens < call.input_tokens / 2 and session.receipts[0].warm is False


@virtual
async def test_promise_15_a_preload_that_kept_up_is_called_warm() -> None:
    """With idle time between the turns what was added is warmed too, for about what it costs, and the commit hits."""
    engine = FakeEngine(*["ok"] * 50, block_tokens=16)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=at_limit(FakeSummarizer()), engine=engine)
        messages = chat(26, size=100)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        for k in range(60):
            before = len(engine.calls)
            messages = [*messages, H(f"{k} " + "new text " * 30)]
            call = await ask(session, engine, messages)
            if session.receipts:
                break
            messages = [*messages, A("ok " * 20)]
            session.observe(messages)
            await settle(20)
            again = engine.calls[before + 1 :]
            assert len(again) <= 2, "from what is warm, not from nothing"
            assert sum(c.input_tokens - c.cached_tokens for c in again) < 200
        assert session.receipts[0].warm is True
        assert call.input_tokens - call.cached_tokens < 200 < call.input_tokens / 2


async def walked(runtime: Any, engine: FakeEngine, *, evict: bool = False) -> list[Any]:
    """The requests of a preload whose view begins with 2,000 tokens that the agent's last call left in the cache."""
    session = runtime.session("s", policy=at_limit(FakeSummarizer(), 8000), engine=engine)
    messages = [S("A rule of many. " * 500), *chat(26, size=100, system=False)]
    await ask(session, engine, messages[:20])
    if evict:
        await engine.prefill([H("Somebody else's.", size=8800)])
    before = len(engine.calls)
    handle = session.observe(messages)
    assert handle is not None and await handle.wait() is HandleState.READY
    assert handle.artifact is not None and handle.artifact.warm
    return engine.calls[before:]


@virtual
async def test_a_preload_goes_in_long_steps_through_what_the_agents_call_left() -> None:
    """The rules before the rewrite are in the cache, and the answers say so: few requests go through them."""
    engine = FakeEngine(*["ok"] * 50, block_tokens=16, speed=Speed(500.0, 100.0))
    async with make_runtime() as runtime:
        requests = await walked(runtime, engine)
        known = [c for c in requests if c.input_tokens < 2000]
        assert 3 < len(known) < 14 < 2000 / 50 and all(c.input_tokens - c.cached_tokens <= 32 for c in known)


@virtual
async def test_promise_09_a_beginning_that_was_evicted_is_warmed_chunk_by_chunk() -> None:
    """What the agent sent last is no longer in the cache: one request at most is a longer one than a chunk."""
    engine = FakeEngine(*["ok"] * 50, block_tokens=16, cache_blocks=600, speed=Speed(500.0, 100.0))
    async with make_runtime() as runtime:
        requests = await walked(runtime, engine, evict=True)
        evaluated = sorted(c.input_tokens - c.cached_tokens for c in requests)
        assert evaluated[-1] <= 5 * 50 and evaluated[-2] <= 2 * 50
        assert len([c for c in requests if c.input_tokens < 2000]) > 25


class Refuses(FakeEngine):
    """It evaluates nothing ahead."""

    async def prefill(self, messages: Any, **options: Any) -> Any:
        """Never."""
        raise EngineRefused("no", status=400)


@virtual
async def test_promise_15_what_the_agent_sent_is_no_proof() -> None:
    """Almost all of the new view stood in the agent's last call, but no answer ever said that it stayed."""
    engine = Refuses(*["ok"] * 50, block_tokens=16, cache_blocks=1)
    async with make_runtime() as runtime:
        policy = Policy(
            Offload(min_tokens=200, keep_recent=0), context_window=8000, land_at=("fraction", 0.3), preload_kv=True
        )
        session = runtime.session("s", policy=policy, engine=engine)
        messages = [*chat(20, size=100), H("Look it up.")]
        await ask(session, engine, messages)
        found = [A("Looking.", "c"), T("c", "result", size=3000), A("Done.")]
        messages = [*messages, *found]
        session.observe(messages)
        await settle(5)
        await ask(session, engine, [*messages, H("And now?")])
        assert session.receipts and not any(r.warm for r in session.receipts)


@virtual
async def test_what_a_turn_adds_is_warmed_in_idle_time_that_suffices() -> None:
    """Up to the limit: most of the view is warm already, and nothing runs beside the agent's decode for the rest."""
    engine = FakeEngine(*["ok"] * 80, block_tokens=16, speed=Speed(500.0, 100.0))
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=at_limit(FakeSummarizer(), 8000), engine=engine)
        messages, handle, beside, again = chat(4, size=100), None, 0, 0
        for k in range(60):
            messages = [*messages, H(f"{k} " + "new text " * 60)]
            await asyncio.sleep(2)  # a tool runs: five times what one turn's tokens take
            view = await session.commit(messages)
            if session.receipts:
                break
            async with session.foreground() as call:
                await engine.complete(view, max_tokens=1, **session.request, **session.request_options())
                call.first_token()
                before = len(engine.calls)
                await asyncio.sleep(4)
                beside += len(engine.calls) - before
            messages = [*messages, A("ok " * 20)]
            before = len(engine.calls)
            handle = session.observe(messages) or handle
            await settle(20)
            again += len(engine.calls) > before and handle is not None and handle.state is HandleState.READY
        assert session.receipts[0].warm is True and again >= 3 and not beside


@virtual
async def test_promise_15_a_cache_in_which_nothing_stays_is_found_out() -> None:
    """The answers deny that anything was kept: a few requests, incomplete, no claim; and no more for this result."""
    events = Events()
    engine = FakeEngine(*["ok"] * 50, cache_blocks=1, block_tokens=16)
    async with make_runtime(on_event=events) as runtime:
        policy = make_policy(FakeSummarizer(), window=5000, commit="hard_limit", keep=16)
        session = runtime.session("s", policy=policy, engine=engine)
        messages = chat(60, size=180)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert handle.artifact is not None and not handle.artifact.warm
        assert [e.data["complete"] for e in events.of("preload")] == [False]
        assert 2 <= len(engine.calls) <= 8
        before = len(engine.calls)
        session.observe([*messages, H("more")])
        await settle(30)
        assert len(engine.calls) == before


@virtual
async def test_a_single_miss_is_asked_again() -> None:
    """The last answer said that nothing had stayed: the same is sent once more, and that answer decides."""
    cached = [0, 900, 0, 0, 0, 0]
    sent: list[int] = []

    async def send(messages: Any) -> Any:
        sent.append(len(messages))

        class Reply:
            usage = Usage(input_tokens=1000, output_tokens=1, cached_tokens=cached[len(sent) - 1], calls=1)

        return Reply()

    own = Preloader(clock=lambda: 0.0, strategy="abort", block_tokens=lambda: 16)
    view = [{"role": "user", "content": "x" * 4000}]

    async def run(warmth: Warmth) -> bool:
        foreground = Foreground(asyncio.get_running_loop().time)
        report = await own.run(send, lambda: view, foreground=foreground, needed=lambda: True, warmth=warmth)
        return report.complete

    evicted = Warmth(part=view[:1], done=3000, tokens=750, begun=True)
    evicted.part = [{"role": "user", "content": "x" * 3000}]
    assert await run(evicted) and len(sent) == 2
    never = Warmth(part=[{"role": "user", "content": "x" * 3000}], done=3000, tokens=750, begun=True)
    assert not await run(never) and len(sent) == 5
    assert not never.covers(view, 0) and evicted.covers(view, 0)


@pytest.mark.parametrize("slots", [3, 4])
@virtual
async def test_a_summariser_leaves_the_warm_view_alone(slots: int) -> None:
    """Another transform of the session on the same server writes in a slot beside the one that holds the view."""
    engine = Slotted(slots)
    async with make_runtime() as runtime:
        transform = Summarize(engine, keep=("messages", 4), facts=False, max_tokens=60)
        session = runtime.session("s", policy=Policy(transform, context_window=8000), engine=engine)
        messages = chat(26, size=100)
        await ask(session, engine, messages[:-1])
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        warm = engine.calls[-1].options["id_slot"]
        own = session.request_options()["id_slot"]
        other = session.schedule_transform(
            Summarize(engine, keep=("messages", 8), facts=False, max_tokens=50),
            messages,
            target_segments=[0, 1, 2],
            preload_kv=False,
        )
        await other.wait()
        writer = engine.calls[-1].options["id_slot"]
        assert writer not in (warm, own)
        other.discard()
        call = await ask(session, engine, [*messages, H("next")])
        assert session.receipts[0].warm is True and call.options["id_slot"] == warm
        assert call.cached_tokens > 0.8 * call.input_tokens
        await session.close()
        assert engine.free() == slots


@virtual
async def test_promise_15_a_slot_that_had_to_be_taken_is_not_called_warm() -> None:
    """With no slot beside it the summariser takes that of the warm view: the agent's own is never at risk."""
    engine = Slotted(2)
    async with make_runtime() as runtime:
        transform = Summarize(engine, keep=("messages", 4), facts=False, max_tokens=60)
        session = runtime.session("s", policy=Policy(transform, context_window=8000), engine=engine)
        messages = chat(26, size=100)
        await ask(session, engine, messages[:-1])
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        own = session.request_options()["id_slot"]
        other = session.schedule_transform(
            Summarize(engine, keep=("messages", 8), facts=False, max_tokens=50),
            messages,
            target_segments=[0, 1, 2],
            preload_kv=False,
        )
        await other.wait()
        assert engine.calls[-1].options["id_slot"] != own
        other.discard()
        call = await ask(session, engine, [*messages, H("next")])
        for receipt in session.receipts:
            assert receipt.warm is (call.cached_tokens > 0.8 * call.input_tokens)
        await session.close()
        assert engine.free() == 2


async def shared(runtime: Any, engine: FakeEngine, model: Any) -> tuple[Session, Session, list[Message], Any, Any]:
    """A session and its fork that share one flight."""
    messages = chat(26, size=100)
    first = runtime.session("a", policy=make_policy(model, window=8000), engine=engine)
    await ask(first, engine, messages[:-1])
    second = first.fork("b")
    await ask(second, engine, messages[:-1])
    one, two = first.observe(messages), second.observe(messages)
    assert one is not None and two is not None and one.flight is two.flight
    return first, second, messages, one, two


@pytest.mark.parametrize("slotted", [True, False])
@virtual
async def test_promise_15_a_fork_claims_only_what_is_warm_for_it(slotted: bool) -> None:
    """One flight, two sessions: a slot is one session's; what is found by its content is warm for both."""
    engine = Slotted(5) if slotted else FakeEngine(*["ok"] * 50, block_tokens=16)
    async with make_runtime() as runtime:
        _, second, messages, _, two = await shared(runtime, engine, FakeSummarizer(delay=30))
        assert await two.wait() is HandleState.READY
        call = await ask(second, engine, [*messages, H("next")])
        hit = call.cached_tokens > 0.8 * call.input_tokens
        assert [r.warm for r in second.receipts] in ([hit], []) and hit is not slotted
        if not slotted:
            assert [r.warm for r in second.receipts] == [True]


@virtual
async def test_a_fork_is_warmed_when_the_session_that_began_the_work_closes() -> None:
    """The flight's preload goes through a session that still lives; the closed one takes no slot, and nothing fails."""
    events, engine = Events(), Slotted(5)
    async with make_runtime(on_event=events) as runtime:
        first, second, messages, _, two = await shared(runtime, engine, FakeSummarizer(delay=30))
        await settle(0.5)
        await first.close()
        assert await two.wait() is HandleState.READY
        call = await ask(second, engine, [*messages, H("next")])
        assert [r.warm for r in second.receipts] == [True] and call.cached_tokens > 0.8 * call.input_tokens
        await second.close()
        assert engine.free() == 5
    assert not events.of("error")


@virtual
async def test_promise_15_what_a_caller_scheduled_is_preloaded_with_the_turns_that_came_meanwhile() -> None:
    """Nothing else is prepared: its view is made of the latest messages all the same."""
    events, engine = Events(), FakeEngine(*["ok"] * 9, speed=Speed(1000.0, 100.0))
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=3), window=20000), engine=engine)
        messages = chat(12, size=100)
        await ask(session, engine, messages)
        session.observe(messages)
        handle = session.schedule_transform("summarize", messages, preload_kv=True)
        for k in range(2):
            messages += [H(f"question {k}", size=30)]
            await ask(session, engine, messages)
            messages += [A("ok", size=30)]
            session.observe(messages)
            await settle(0.2)
        assert await handle.wait(30) is HandleState.READY and handle.artifact is not None and handle.artifact.warm
        handle.commit(messages)
        messages += [H("next")]
        call = await ask(session, engine, messages)
        assert not events.of("error") and call.cached_tokens > 0.9 * call.input_tokens


@virtual
async def test_promise_11_a_closed_binding_takes_no_slot() -> None:
    """Whatever comes after the close: a summariser, a preload, a warm opening."""
    engine = Slotted(3)
    foreground = Foreground(asyncio.get_running_loop().time)
    binding = engine.bind("s")
    opening = binding.opening()
    await _warm(opening, foreground)
    prepare = binding.transform_options(foreground, lambda: False)["lookahead"]
    async with prepare([], {}) as prepared:
        assert prepared.options["id_slot"] == 2
        binding.close()
    binding.take_over(opening)
    async with prepare([], {}) as prepared:
        assert prepared.options == {}
    assert not (await _warm(binding, foreground)).complete
    opening.close()
    assert engine.free() == 3


async def _warm(binding: Any, foreground: Foreground) -> Any:
    return await binding.preload(
        lambda: [{"role": "user", "content": "hello " * 50}],
        request={},
        foreground=foreground,
        needed=lambda: True,
        hurried=lambda rate: False,
    )
