"""The fake engine: tokens, caches, rates and faults, counted exactly; preload as the runtime does it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import anyio
import pytest

from smoothctx import ClosedError, ConfigurationError, EngineError, EngineProtocolError, Policy, Runtime, Summarize
from smoothctx.economics import Speed
from smoothctx.errors import EngineRefused, EngineUnreachable
from smoothctx.foreground import Foreground
from smoothctx.testing import FakeEngine, Recorder, run_virtual
from smoothctx.testing.cache import SlotCache
from smoothctx.transforms.model import ModelEngine

FAST = Speed(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0)


def words(tokens: int, letter: str = "a") -> str:
    """A text of exactly so many tokens, different in each of them."""
    return "".join(f"{letter}{k:03d}" for k in range(tokens))


def user(tokens: int, letter: str = "a") -> dict[str, Any]:
    """A user message of so many tokens, its frame included."""
    return {"role": "user", "content": words(tokens - 2, letter)}


def now() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()


def virtual(main: Any) -> Any:
    """Run the test on virtual time."""

    def test() -> None:
        run_virtual(main)

    test.__doc__, test.__name__ = main.__doc__, main.__name__
    return test


def test_tokens_are_exact() -> None:
    """Two for a message's frame, one for four characters begun, one for the answer's opening; tools stand first."""
    engine = FakeEngine()
    assert engine.count([{"role": "user", "content": ""}]) == 2
    assert engine.count([{"role": "user", "content": "abcd"}]) == 3
    assert engine.count([{"role": "user", "content": "abcde"}, user(100)]) == 4 + 100
    assert len(engine.prompt([user(100)])) == 101
    plain = engine.prompt([user(100)])
    with_tools = engine.prompt([user(100)], tools=[{"type": "function"}])
    assert with_tools[-101:] == plain and len(with_tools) > 101
    assert engine.prompt([user(100)], temperature=0.5) == plain
    salted = engine.prompt([user(100)], cache_salt="x")
    assert len(salted) == 101 and salted[0] != plain[0] and salted[1:] == plain[1:]


@virtual
async def test_it_takes_the_time_that_its_rates_say() -> None:
    """TTFT is the prefill, each further token one step of decoding, plus its share for the context."""
    engine = FakeEngine("abcdefgh", speed=Speed(100.0, 10.0, attention_s=0.001))
    done = await engine.complete([user(99)])
    assert (done.text, done.finish_reason) == ("abcdefgh", "stop")
    assert (done.usage.input_tokens, done.usage.cached_tokens, done.usage.output_tokens) == (100, 0, 3)
    assert done.ttft_s == pytest.approx(1.0)
    assert done.total_s == pytest.approx(1.0 + 2 * 0.1 + (101 + 102) * 0.001)
    call = engine.calls[0]
    assert (call.outcome, call.arrived_s, call.prefill_s, call.ended_s) == ("done", 0.0, 0.0, now())
    assert isinstance(engine, ModelEngine)


@virtual
async def test_rates_are_learnt_from_its_calls() -> None:
    """What the calls show is what the engine was given."""
    engine = FakeEngine(words(50), speed=FAST)
    await engine.complete([user(200)])
    assert engine.rates.prefill == pytest.approx(100.0)
    assert engine.rates.decode == pytest.approx(10.0)


@virtual
async def test_a_warmed_prompt_is_a_hit_except_its_last_block() -> None:
    """After a prefill of the very view everything is cached but the block that holds the last token."""
    for block, tokens in itertools.product((1, 16, 64), (63, 64, 65, 128, 200)):
        engine = FakeEngine(block_tokens=block)
        await engine.prefill([user(tokens - 1)])
        done = await engine.complete([user(tokens - 1)])
        assert done.usage.input_tokens == tokens
        assert done.usage.cached_tokens == (tokens - 1) // block * block < tokens


@virtual
async def test_the_last_prompt_token_is_never_cached() -> None:
    """Even in blocks of one token a repeated prompt has one token to evaluate: its output is needed."""
    engine = FakeEngine(block_tokens=1, speed=FAST)
    await engine.prefill([user(99)])
    began = now()
    done = await engine.prefill([user(99)])
    assert done.usage.cached_tokens == 99
    assert now() - began == pytest.approx(0.01)


@virtual
async def test_blocks_larger_than_the_prefix_never_hit() -> None:
    """Blocks of 784 tokens and a shared prefix of 600: nothing is reused."""
    engine = FakeEngine(block_tokens=784)
    await engine.prefill([user(600), user(300, "b")])
    done = await engine.complete([user(600), user(300, "c")])
    assert done.usage.cached_tokens == 0
    done = await engine.complete([user(600), user(300, "c")])
    assert done.usage.cached_tokens == 784  # the whole request again: one full block


@virtual
async def test_another_prefix_evicts_the_only_slot() -> None:
    """One slot and two clients: each call of the one costs the other its whole cache; a second slot mends it."""
    for slots, cached in ((1, 1), (2, 200)):  # the token that opens a user message is common to both
        engine = FakeEngine(slots=slots, block_tokens=1)
        main, other = [user(200)], [user(200, "z")]
        await engine.complete(main)
        await engine.complete(other)
        again = await engine.complete([*main, user(50, "b")])
        assert again.usage.cached_tokens == cached


@virtual
async def test_a_chosen_slot_is_used_and_waited_for() -> None:
    """`id_slot` sends a call to one slot, even if it has to wait there; a number that is not there is refused."""
    engine = FakeEngine(slots=2, block_tokens=1, speed=FAST)
    await engine.complete([user(100)], id_slot=1)
    assert (await engine.complete([user(100)], id_slot=0)).usage.cached_tokens == 0
    assert (await engine.complete([user(100)], id_slot=1)).usage.cached_tokens == 100
    for wrong in (2, -1, "0"):
        with pytest.raises(EngineRefused, match="id_slot"):
            await engine.complete([user(100)], id_slot=wrong)
    began = now()
    async with anyio.create_task_group() as group:
        for letter in "xy":
            group.start_soon(lambda m: engine.complete([m], id_slot=0), user(99, letter))
    first, second = engine.calls[-2:]
    assert first.prefill_s == began and second.prefill_s == first.ended_s


@virtual
async def test_least_recently_used_blocks_go_first() -> None:
    """A bounded cache forgets the oldest prompt, and a prompt's end before its beginning."""
    engine = FakeEngine(cache_blocks=20, block_tokens=10)
    await engine.prefill([user(99, "a")])  # ten blocks
    await engine.prefill([user(99, "b")])
    await engine.prefill([user(99, "a")])  # used again: now "b" is the older one
    await engine.prefill([user(49, "c")])  # five blocks: the end of "b" goes
    assert (await engine.prefill([user(99, "a")])).usage.cached_tokens == 90
    assert (await engine.prefill([user(99, "b")])).usage.cached_tokens == 50


@virtual
async def test_the_answer_is_cached_for_the_next_turn() -> None:
    """The next turn finds prompt and answer, but for the answer's last token, which was never evaluated."""
    engine = FakeEngine("abcdefgh", block_tokens=1)
    history = [user(100)]
    done = await engine.complete(history)
    history += [{"role": "assistant", "content": done.text}, user(20, "b")]
    done = await engine.complete(history)
    assert done.usage.cached_tokens == 101 + 2
    assert done.usage.input_tokens == 100 + 4 + 20 + 1


@virtual
async def test_a_cut_answer_is_cached_too() -> None:
    """`max_tokens` ends the answer in its middle; what was evaluated of it is found again."""
    engine = FakeEngine("abcdefghijkl", block_tokens=1)
    done = await engine.complete([user(100)], max_tokens=2)
    assert (done.text, done.finish_reason, done.usage.output_tokens) == ("abcdefgh", "length", 2)
    done = await engine.complete([user(100), {"role": "assistant", "content": "abcdefgh"}, user(9)])
    assert done.usage.cached_tokens == 102


@virtual
async def test_options_in_the_prompt_are_part_of_the_prefix() -> None:
    """Other tools or another salt share nothing; options of sampling do not matter."""
    engine = FakeEngine(block_tokens=1)
    await engine.prefill([user(100)], tools=[{"name": "x"}])
    assert (await engine.prefill([user(100)])).usage.cached_tokens == 0
    assert (await engine.prefill([user(100)], cache_salt="s")).usage.cached_tokens == 0
    assert (await engine.prefill([user(100)], temperature=1, stream=True, n=4)).usage.cached_tokens == 100


@virtual
async def test_background_prefill_delays_the_foreground() -> None:
    """Prompts are evaluated one at a time, in order of arrival; decoding goes on beside it."""
    engine = FakeEngine(words(9, "r"), speed=FAST)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.prefill, [user(999, "z")])  # ten seconds
        await anyio.sleep(1)
        done = await engine.complete([user(99)])
    assert done.ttft_s == pytest.approx(9 + 1)
    assert done.total_s == pytest.approx(10 + 9 * 0.1)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.complete, [user(99, "x")])
        await anyio.sleep(1.5)  # that one decodes now
        done = await engine.complete([user(99, "y")])
    assert done.ttft_s == pytest.approx(1.0)


@virtual
async def test_a_cancelled_prefill_leaves_what_it_evaluated() -> None:
    """Both kinds of cache keep the part that was done, and the next one begins there."""
    for slots in (None, 1):
        engine = FakeEngine(slots=slots, block_tokens=1, speed=FAST)
        with anyio.move_on_after(3.005):
            await engine.prefill([user(999)])
        assert engine.calls[0].outcome == "cancelled" and engine.calls[0].ended_s == now()
        began = now()
        done = await engine.prefill([user(999)])
        assert done.usage.cached_tokens == 300
        assert now() - began == pytest.approx(7.0)


@virtual
async def test_cancelled_waiters_hold_nothing() -> None:
    """Cancelled while it waits for a slot or for the prefill, a call leaves both to the next one."""
    engine = FakeEngine(slots=1, speed=FAST)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.prefill, [user(99)])
        await anyio.sleep(0.5)
        with anyio.move_on_after(0.1):
            await engine.complete([user(99, "b")])
        with anyio.move_on_after(0.4):  # cancelled at the moment in which the slot comes free
            await engine.complete([user(99, "c")])
    done = await engine.complete([user(99, "d")])
    assert done.ttft_s == pytest.approx(1.0)
    assert [c.outcome for c in engine.calls] == ["done", "cancelled", "cancelled", "done"]


@virtual
async def test_a_slot_granted_to_a_cancelled_call_is_free_again() -> None:
    """Cancelled between the grant and its first step, a call gives the slot back, and the next one gets it."""
    cache = SlotCache(1, 1)
    slot = await cache.take([1], None)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(cache.take([1], None))
        second = group.create_task(cache.take([1], None))
        await asyncio.sleep(0)
        cache.give(slot)  # goes to the first
        first.cancel()
    assert first.cancelled() and second.result() is slot and not slot.free


@virtual
async def test_a_stream_can_be_read_token_by_token_and_left() -> None:
    """Pieces come one by one; leaving early cancels the call and keeps what was written."""
    engine = FakeEngine("abcdefgh", speed=FAST, block_tokens=1)
    async with engine.stream([user(99)]) as stream:
        assert [piece async for piece in stream] == ["abcd", "efgh"]
    assert stream.completion is not None and stream.completion.text == "abcdefgh"
    async with engine.stream([user(99)]) as stream:
        async for piece in stream:
            assert piece == "abcd"
            break
    assert stream.completion is None
    assert [c.outcome for c in engine.calls] == ["done", "cancelled"]
    assert (await engine.complete([user(99)])).usage.cached_tokens == 99


@virtual
async def test_it_can_keep_its_cache_to_itself() -> None:
    """A server that does not report cached tokens: it has them all the same."""
    engine = FakeEngine(reports_cache=False, speed=FAST, block_tokens=1)
    await engine.prefill([user(99)])
    done = await engine.prefill([user(99)])
    assert done.usage.cached_tokens is None and done.ttft_s == pytest.approx(0.01)


@virtual
async def test_it_refuses_what_servers_refuse() -> None:
    """No output, a prompt over the window, an invalid request if it is strict, a closed engine."""
    engine = FakeEngine("abcdefghijkl", context_window=103, strict=True)
    with pytest.raises(EngineRefused, match="max_tokens=0"):
        await engine.complete([user(20)], max_tokens=0)
    with pytest.raises(EngineRefused, match="103 tokens, the context window 103"):
        await engine.complete([user(102)])
    with pytest.raises(EngineRefused, match="without its call"):
        await engine.complete([user(20), {"role": "tool", "tool_call_id": "x", "content": ""}])
    done = await engine.complete([user(100)])  # room for two tokens of the answer
    assert (done.finish_reason, done.usage.output_tokens) == ("length", 2)
    assert [c.outcome for c in engine.calls] == ["failed"] * 3 + ["done"]
    async with engine:
        await engine.disconnect()
    with pytest.raises(ClosedError):
        await engine.complete([user(20)])


@virtual
async def test_faults_strike_in_order_and_end() -> None:
    """Each call takes one fault; afterwards it works again."""
    engine = FakeEngine("fine", speed=FAST)
    engine.faults.fail(2)
    engine.faults.fail(error=EngineProtocolError("odd"))
    engine.faults.slow(50.0)
    engine.faults.garbage()
    for kind in (EngineUnreachable, EngineUnreachable, EngineProtocolError):
        with pytest.raises(kind):
            await engine.complete([user(9)])
    began = now()
    assert (await engine.complete([user(99)])).text == "fine"
    assert now() - began == pytest.approx(51.1)
    with pytest.raises(EngineProtocolError, match="not JSON"):
        await engine.complete([user(9)])
    assert (await engine.complete([user(9)])).text == "fine"
    assert repr(engine.faults) == "Faults()"


@virtual
async def test_faults_last_until_they_are_cleared() -> None:
    """For all calls, not for a number of them; hanging calls go on when cleared, and can be cancelled."""
    engine = FakeEngine("fine")
    engine.faults.fail(None)
    for _ in range(5):
        with pytest.raises(EngineError):
            await engine.complete([user(9)])
    engine.faults.clear()
    engine.faults.hang(None)
    with anyio.move_on_after(1000) as scope:
        await engine.complete([user(9)])
    assert scope.cancelled_caught and engine.faults.hanging == 0
    async with anyio.create_task_group() as group:
        group.start_soon(engine.complete, [user(9)])
        await anyio.sleep(1000)
        assert engine.faults.hanging == 1
        engine.faults.clear()
    assert engine.calls[-1].outcome == "done"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"block_tokens": None}, "block_tokens=None"),
        ({"slots": True}, "slots=True"),
        ({"cache_blocks": -1}, "cache_blocks=-1"),
        ({"context_window": 1.5}, "context_window=1.5"),
        ({"slots": 1, "cache_blocks": 1}, "one kind only"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    """Named at construction."""
    with pytest.raises(ConfigurationError, match=said):
        FakeEngine(**options)


@pytest.mark.parametrize("times", [0, True, 1.5])
def test_wrong_faults_are_refused(times: Any) -> None:
    """A number of calls is a whole number of at least one."""
    with pytest.raises(ConfigurationError, match="times="):
        FakeEngine().faults.fail(times)
    with pytest.raises(ConfigurationError, match="delay_s="):
        FakeEngine().faults.slow(float("nan"))


@virtual
async def test_preload_through_a_binding_makes_the_next_call_a_hit() -> None:
    """The growing prefixes of a real preload, on the engine's own clock: then only the last block is left."""
    engine = FakeEngine(speed=FAST, block_tokens=16)
    view = [user(500), user(300, "b")]
    foreground = Foreground(now)
    report = await engine.bind("s").preload(
        lambda: view, request={}, foreground=foreground, needed=lambda: True, hurried=lambda rate: False
    )
    assert report.complete and report.requests > 2
    chunks = [c.input_tokens - c.cached_tokens for c in engine.calls]
    assert max(chunks[2:]) <= 16 + 32 + 16  # a tenth of a second, the least chunk, and what a block costs
    began = now()
    done = await engine.complete(view)
    assert done.usage.cached_tokens == 800 and done.usage.input_tokens == 801
    assert done.ttft_s == pytest.approx(0.01) and now() > began


async def missed(preload: bool) -> tuple[list[int], Recorder]:
    """Run a session on the engine that is its agent's and its summariser's: for each turn of the agent the tokens
    that had to be evaluated beside the turn's own, and the events."""
    engine = FakeEngine("a short answer", speed=Speed(1000.0, 50.0), block_tokens=16, preload=preload)
    policy = Policy(
        Summarize(engine, keep=("messages", 4), max_tokens=64, facts=False),
        context_window=2000,
        token_counter=engine.count,
    )
    events, over = Recorder(), []
    async with Runtime(clock=now, on_event=events) as runtime:
        session = runtime.session("s", policy=policy, engine=engine)
        messages: list[Any] = [{"role": "system", "content": "Be brief."}]
        for turn in range(24):
            messages.append(user(80, chr(97 + turn)))
            view = await session.commit(messages)
            done = await engine.complete(view, **session.request_options())
            assert done.usage.cached_tokens is not None
            over.append(done.usage.input_tokens - done.usage.cached_tokens - 80)
            messages.append({"role": "assistant", "content": done.text})
            session.observe(messages)
            await anyio.sleep(20)
        assert session.receipts and all(r.how == "ready" for r in session.receipts)
    return over, events


@virtual
async def test_a_session_on_it_commits_into_a_warm_cache() -> None:
    """End to end: summarise and preload beside the agent, commit, and no turn evaluates more than its own message
    and what two blocks hold; without preload the turns that commit evaluate the whole new view."""
    over, events = await missed(preload=True)
    assert max(over) <= 2 * 16
    assert events.of("preload") and all(e.data["complete"] for e in events.of("preload"))
    cold, events = await missed(preload=False)
    assert sum(n > 100 for n in cold) == len(events.of("view.committed")) >= 1
    assert not events.of("preload")
