"""``BreakEven``: a ready result is committed when it pays, waits while it may, goes at the limit, is dropped when it
never will; and the verdict is the one that counting the whole session gives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from helpers import A, Events, FakeSummarizer, H, Message, S, make_runtime, settle, virtual
from smoothctx import (
    BreakEven,
    ConfigurationError,
    HandleState,
    LookaheadHandle,
    ParallelSummarize,
    Policy,
    Prices,
    Reason,
    Session,
    Speed,
    Summarize,
)
from smoothctx.engines import calibrate
from smoothctx.testing import FakeEngine
from virtual import run_virtual

#: a cached token costs a fifteenth of a new one
DEAR = Prices(7.5, 0.5, 30.0)
#: what a shorter context saves is what attention reads
SLOW = Speed(1000.0, 50.0, attention_s=2e-6)
REPLY = "r" * 80


def tokens(count: int, letter: str) -> str:
    """A text of so many tokens of the fake engine, in which each differs."""
    return "".join(f"{letter}{k % 1000:03d}" for k in range(count))


def engine(**options: Any) -> FakeEngine:
    """The agent's: one slot, exact to the token, never preloaded."""
    return FakeEngine(*[REPLY] * 400, speed=SLOW, slots=1, block_tokens=1, preload=False, **options)


def policy(rule: Any, agent: FakeEngine, *, limit: int = 1_000_000, model: Any = None, **options: Any) -> Policy:
    """Summarises what is older than four messages, beside the agent, once it has 900 tokens."""
    return Policy(
        Summarize(model or FakeSummarizer(delay=0.01, text="s" * 160), keep=("messages", 4), facts=False),
        commit=rule,
        trigger=("tokens", 900),
        hard_limit=("tokens", limit),
        land_at=("tokens", 600),
        min_savings=0.0,
        token_counter=agent.count,
        **options,
    )


def history() -> list[Message]:
    """A thousand tokens that nobody has answered yet."""
    return [S(tokens(48, "s")), *(H(tokens(98, chr(97 + k))) for k in range(10))]


@dataclass
class Run:
    """What one session did and what its agent's calls cost, from the second boundary on."""

    session: Session
    handle: LookaheadHandle | None
    spent: float = 0.0


async def run(rule: Any, rates: Speed | Prices, turns: int) -> Run:
    """An agent that makes ``turns`` calls in all; ``rule`` is a commit rule, or ``None`` for the raw context."""
    agent = engine()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy(rule or "hard_limit", agent), engine=agent)
        messages, done = history(), Run(session, None)
        for turn in range(turns):
            view = await session.commit(messages)
            if rule is None:
                assert view == messages
            async with session.foreground() as call, agent.stream(view, max_tokens=60) as stream:
                async for _ in stream:
                    call.first_token()
                assert stream.completion is not None
                usage = stream.completion.usage
                call.report(usage)
            if turn:
                done.spent += cost(rates, usage, stream.completion.total_s)
            messages.append(A(stream.completion.text))
            session.observe(messages)
            done.handle = done.handle or session.lookahead
            await settle(1.0)
            messages.append(H(tokens(4, chr(65 + turn % 26))))
        return done


def cost(rates: Speed | Prices, usage: Any, seconds: float) -> float:
    """Of one call of the agent."""
    if isinstance(rates, Speed):
        return seconds
    new = usage.input_tokens - usage.cached_tokens
    return (new * rates.input + usage.cached_tokens * rates.cached_input + usage.output_tokens * rates.output) / 1e6


@pytest.mark.parametrize("rates", [DEAR, SLOW], ids=["money", "seconds"])
def test_the_verdict_is_what_counting_gives(rates: Speed | Prices) -> None:
    """Ten settings around break-even, by the turns that are left: both arms are run to the end and counted, and the
    rule decides as the cheaper one on at least eight."""
    probe = run_virtual(lambda: run(BreakEven(rates, turns=10_001), rates, 3))
    expected = probe.session.receipts[0].expected
    assert expected is not None and expected.unit == ("money" if rates is DEAR else "s")
    even = expected.cost / (expected.gain / 10_000)
    assert 5 < even < 40, "so that the settings differ by whole turns"
    agree = []
    for factor in (0.4, 0.6, 0.75, 0.85, 0.95, 1.05, 1.2, 1.4, 1.7, 2.2):
        turns = 1 + round(even * factor)
        rules = (BreakEven(rates, turns=turns), "ready", None)
        rule, ready, raw = (run_virtual(partial(run, r, rates, turns)) for r in rules)
        committed = bool(rule.session.receipts)
        agree.append(committed == (ready.spent < raw.spent))
        assert ready.session.receipts and not raw.session.receipts
        assert rule.spent == pytest.approx(ready.spent if committed else raw.spent)
        if not committed:
            assert rule.handle is not None and rule.handle.reason is Reason.UNPROFITABLE
    assert sum(agree) >= 8, agree
    assert agree[0] and agree[-1]


async def grow(session: Session, messages: list[Message], agent: FakeEngine, turns: int) -> list[Message]:
    """So many turns; returns the last view."""
    view: list[Message] = []
    for turn in range(turns):
        view = await session.commit(messages)
        messages += [A(REPLY), H(tokens(4, chr(65 + turn % 26)))]
        session.observe(messages[:-1])
        await settle(1.0)
    return view


@virtual
async def test_what_does_not_pay_yet_waits() -> None:
    """Without ``turns`` a session is expected to go on for as long as it has lasted: the result waits until then."""
    agent = engine()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy(BreakEven(DEAR), agent), engine=agent)
        messages = history()
        await grow(session, messages, agent, 3)
        handle = session.lookahead
        assert handle is not None and handle.state is HandleState.READY and not session.receipts
        turns = 3
        while not session.receipts:
            assert session.lookahead is handle and turns < 100
            await grow(session, messages, agent, 1)
            turns += 1
        receipt = session.receipts[0]
        assert handle.state is HandleState.COMMITTED and receipt.how == "ready" and receipt.waited_s == 0
        assert receipt.expected is not None and receipt.expected.pays and turns > 8
        # One turn earlier it did not pay: the gain is that of one turn less.
        assert receipt.expected.gain * (turns - 2) / (turns - 1) <= receipt.expected.cost * 1.2


@virtual
async def test_at_the_hard_limit_it_goes_anyway() -> None:
    """The receipt says that it was not expected to pay."""
    agent, events = engine(), Events()
    async with make_runtime(on_event=events) as runtime:
        rule = BreakEven(Prices(100.0, 0.01, 1.0), turns=60)
        session = runtime.session("s", policy=policy(rule, agent, limit=1500), engine=agent)
        messages = history()
        while not session.receipts:
            await grow(session, messages, agent, 1)
        receipt = session.receipts[0]
        assert receipt.how == "ready" and receipt.expected is not None and not receipt.expected.pays
        assert receipt.tokens_before > 1500 and not events.of("fallback.applied")


@virtual
async def test_what_can_never_pay_is_dropped_once() -> None:
    """Few turns are left and the limit is far: no loop of summaries that nobody uses."""
    agent, events = engine(), Events()
    model = FakeSummarizer(delay=0.01, text="s" * 160)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=policy(BreakEven(DEAR, turns=5), agent, model=model), engine=agent)
        messages = history()
        await grow(session, messages, agent, 8)
        assert [e.data["reason"] for e in events.of("lookahead.discarded")] == ["unprofitable"]
        assert model.calls == 1 and not session.receipts
        assert runtime.counters.stale == {"unprofitable": 1} and runtime.counters.wasted_tokens > 0


@virtual
async def test_nothing_is_started_that_would_not_pay() -> None:
    """Once the growth is known, a summary that costs more than it can save is not even begun."""
    agent, events = engine(), Events()
    model = FakeSummarizer(delay=0.01)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=policy(BreakEven(DEAR, turns=12), agent, model=model), engine=agent)
        messages = history()[:8]  # below the trigger at first
        await grow(session, messages, agent, 11)
        assert sum(map(agent.count, ([m] for m in messages))) > 900
        assert model.calls == 0 and not session.receipts
        assert "it would not pay" in [e.data["why"] for e in events.of("nothing_to_rewrite")]


@virtual
async def test_rates_of_a_calibrated_engine() -> None:
    """``BreakEven()``: unrated means ready, with one event; from the calibration on it is weighed."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        agent = engine()
        session = runtime.session("s", policy=policy(BreakEven(turns=4), agent), engine=agent)
        messages = history()
        await grow(session, messages, agent, 3)
        assert session.receipts and session.receipts[0].expected is None
        assert len(events.of("breakeven.unrated")) == 1
        known = FakeEngine(*["w" * 4000] * 400, speed=SLOW, slots=1, block_tokens=1, preload=False)
        await calibrate(known)
        second = runtime.session("t", policy=policy(BreakEven(turns=4), known), engine=known)
        messages = history()
        await grow(second, messages, known, 4)
        assert not second.receipts and len(events.of("breakeven.unrated")) == 1
        assert runtime.counters.stale == {"unprofitable": 1}


@virtual
async def test_a_warm_view_costs_nothing_more() -> None:
    """What a preload has warmed is paid for: it pays at the first turn."""
    agent = FakeEngine(*[REPLY] * 400, speed=Speed(20_000.0, 200.0, 1e-6), block_tokens=16)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy(BreakEven(DEAR, turns=30), agent), engine=agent)
        messages = history()
        await grow(session, messages, agent, 3)
        receipt = session.receipts[0]
        assert receipt.warm and receipt.expected is not None
        assert receipt.expected.cost == 0 and receipt.expected.gain > 0


@virtual
async def test_blocks_are_weighed_together() -> None:
    """With a transform of blocks all finished ones go into the view, or none."""
    for turns, commits in ((400, True), (6, False)):
        agent = engine()
        async with make_runtime() as runtime:
            blocks = ParallelSummarize(
                FakeSummarizer(delay=0.01, text="s" * 40), block_tokens=300, keep=("messages", 4), facts=False
            )
            rule = BreakEven(DEAR, turns=turns)
            session = runtime.session(
                "s",
                policy=Policy(
                    blocks,
                    commit=rule,
                    trigger=("tokens", 900),
                    hard_limit=("tokens", 1_000_000),
                    land_at=("tokens", 600),
                    min_savings=0.0,
                    token_counter=agent.count,
                ),
                engine=agent,
            )
            await grow(session, history(), agent, 5)
            assert bool(session.receipts) is commits


@virtual
async def test_outcomes_pair_what_was_expected_with_what_came() -> None:
    """Seconds and tokens of the calls before and after a commit, as the session saw them."""
    done = await run(BreakEven(SLOW, turns=400), SLOW, 8)
    (outcome,) = done.session.outcomes()
    assert outcome.receipt is done.session.receipts[0] and outcome.receipt.expected is not None
    assert len(outcome.before) == 1 and len(outcome.after) == 7
    assert all(c.ttft_s is not None and c.total_s >= c.ttft_s and c.usage is not None for c in outcome.after)
    # The first call prefills the new view, which is what was expected to be the cost; the others find it cached.
    assert outcome.ttft_first_s is not None and outcome.ttft_after_s is not None
    assert outcome.ttft_first_s - outcome.ttft_after_s == pytest.approx(outcome.receipt.expected.cost, rel=0.08)
    assert outcome.uncached_first_tokens == pytest.approx(1000 * outcome.ttft_first_s)


@virtual
async def test_outcomes_of_calls_that_say_nothing() -> None:
    """No first token, no usage: ``None``, not a guess. A call that fails is not counted."""
    async with make_runtime() as runtime:
        agent = engine()
        session = runtime.session("s", policy=policy("ready", agent))
        messages = history()
        for turn in range(6):
            await session.commit(messages)
            if turn == 4:
                with pytest.raises(ValueError, match="down"):
                    async with session.foreground():
                        raise ValueError("down")
            else:
                async with session.foreground():
                    await asyncio.sleep(2)
            messages += [A(REPLY), H("next")]
            session.observe(messages[:-1])
            await settle(1)
        (outcome,) = session.outcomes()
        assert len(outcome.before) + len(outcome.after) == 5
        assert outcome.ttft_before_s is None and outcome.ttft_after_s is None and outcome.uncached_first_tokens is None
        assert {c.total_s for c in (*outcome.before, *outcome.after)} == {2.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rates": 5},
        {"turns": -1},
        {"turns": True},
        {"turns": float("nan")},
        {"output_tokens": "many"},
        {"cached_share": 1.5},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    """By name and value."""
    with pytest.raises(ConfigurationError, match=rf"BreakEven\({next(iter(wrong))}\)="):
        BreakEven(**wrong)


def test_rules_are_values() -> None:
    """Two policies with the same rule are the same policy for an open session."""
    agent = engine()
    model = FakeSummarizer()
    one = policy(BreakEven(DEAR, turns=9), agent, model=model)
    same = Policy(**{name: getattr(one, name) for name in one.__slots__})
    other = Policy(**{**{n: getattr(one, n) for n in one.__slots__}, "commit": BreakEven(DEAR, turns=8)})
    assert one.same_as(same) and not one.same_as(other)
