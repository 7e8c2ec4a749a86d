"""Promise 5 under ``KStepOff``: a memory model that is slower than the agent, that fails or hangs, and no turn waits.

A turn is one model call of the agent. ``step`` runs a commit by hand: it returns at its first step or the test fails.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from helpers import (
    CODEC,
    A,
    Events,
    FakeSummarizer,
    H,
    Message,
    S,
    T,
    coherent,
    make_runtime,
    marks,
    problems,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import ConfigurationError, KStepOff, ParallelSummarize, Policy, Session, Speed, Summarize
from smoothctx.testing import FakeEngine
from virtual import run_virtual

TURN_S = 1.0


def lagging_policy(model: Any, k: int, **options: Any) -> Policy:
    """A policy under the rule; what the rule does not use is set to values that would show."""
    summary = {name: options.pop(name) for name in ("source", "layout", "window") if name in options}
    limit = options.pop("hard_limit", ("tokens", 200_000))
    return Policy(
        Summarize(model, facts=False, max_tokens=1500, keep=("messages", 1000), **summary),
        commit=KStepOff(k),
        trigger=limit,
        hard_limit=limit,
        land_at=("tokens", 10),
        **options,
    )


def step(session: Session, messages: list[Any]) -> list[Any]:
    """``session.commit``, which may not wait for anything."""
    commit = session.commit(messages)
    with pytest.raises(StopIteration) as done:
        commit.send(None)
    view: list[Any] = done.value.value
    return view


class Agent:
    """Goes turn by turn: commit, a model call, a tool call now and then, observe."""

    def __init__(self, session: Session, *, size: int = 60, turn_s: float = TURN_S) -> None:
        self.session, self.size, self.turn_s = session, size, turn_s
        self.messages: list[Message] = [S()]
        self.views: list[list[Message]] = []
        #: for each turn, how many messages of the history its view was made of
        self.held: list[int] = []
        self._numbers = itertools.count()

    def _text(self, what: str) -> str:
        return f"<{next(self._numbers)}> {what}"

    async def turn(self) -> list[Message]:
        """One model call."""
        number = len(self.views)
        if number % 4 == 0:
            self.messages.append(H(self._text("go on"), size=self.size))
        view = step(self.session, self.messages)
        assert not problems(view)
        self.views.append(view)
        self.held.append(len(self.messages))
        await asyncio.sleep(self.turn_s)
        calls = [f"c{number}"] if number % 4 != 3 else []
        self.messages.append(A(self._text("reply"), *calls, size=self.size))
        self.messages += [T(c, self._text("result"), size=self.size) for c in calls]
        self.session.observe(self.messages)
        await settle()
        return view


def tokens(view: list[Message]) -> int:
    """Estimated tokens of a view."""
    return sum(map(CODEC.estimate, view))


def raw_turns(agent: Agent, turn: int) -> int:
    """How many of the last replies before this turn stand in its view, the caller's own objects."""
    replies = [m for m in agent.messages[: agent.held[turn]] if m["role"] == "assistant"]
    shown = {id(m) for m in agent.views[turn]}
    return sum(1 for _ in itertools.takewhile(lambda m: id(m) in shown, reversed(replies)))


@pytest.mark.parametrize(("k", "source"), [(1, "view"), (4, "view"), (4, "raw"), (8, "view")])
@virtual
async def test_two_hundred_turns_never_wait(k: int, source: str) -> None:
    """With a memory model three times slower than a turn: no wait, at most one commit in k calls, a bounded view, the
    last k turns raw, every message covered by the summary or shown, and the staleness reported."""
    model, events = FakeSummarizer(delay=3 * TURN_S), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=lagging_policy(model, k, source=source, min_savings=0.9))
        agent = Agent(session)
        commits: list[int] = []
        for turn in range(200):
            before = len(session.receipts)
            view = await agent.turn()
            if len(session.receipts) > before:
                commits.append(turn)
            assert raw_turns(agent, turn) >= min(k, turn)
            held = marks(agent.messages[: agent.held[turn]])
            assert marks(view) == held, "covered by the summary or shown"
        assert len(commits) >= 200 // (2 * k + 5)
        assert all(b - a >= k for a, b in itertools.pairwise(commits))
        assert all(r.waited_s == 0 and r.how == "ready" for r in session.receipts)
        lags = [r.lag for r in session.receipts]
        assert all(k <= lag <= 2 * k + 5 for lag in lags), lags
        assert [e.data["lag"] for e in events.of("view.committed")] == lags
        # The summary's own marks grow with the conversation (a fake); what is raw does not.
        raw = [tokens([m for m in v if CODEC.summary_text(m) is None]) for v in agent.views]
        assert max(raw[50:]) <= (3 * k + 8) * 3 * 70 and max(raw[50:125]) >= 0.9 * max(raw[125:])
        assert not events.of("commit.crowded") and not events.of("fallback.applied") and not events.of("error")
        assert model.most_running == 1
        coherent(session, runtime, live=int(session.lookahead is not None))


@virtual
async def test_the_last_summary_serves_while_the_memory_model_fails() -> None:
    """Failures between two summaries change nothing in the view but its growth at the end."""
    model = FakeSummarizer(delay=0.5)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=lagging_policy(model, 3))
        agent = Agent(session)
        while not session.receipts:
            await agent.turn()
        first = summaries(agent.views[-1])
        model.mode = "fail"
        for _ in range(20):
            view = await agent.turn()
            assert summaries(view) == first
            assert same_objects(view[: len(agent.views[-2])], agent.views[-2])
        assert runtime.counters.failed >= 1
        model.mode = "answer"
        await settle(120)  # the breaker rests
        for _ in range(10):
            await agent.turn()
        assert summaries(agent.views[-1]) != first and len(session.receipts) >= 2


@pytest.mark.parametrize("mode", ["hang", "fail", "empty", "stubborn"])
@virtual
async def test_at_the_hard_limit_the_fallback_comes_at_once(mode: str) -> None:
    """A memory model that is of no use: the view fits all the same, and nobody waited."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        policy = lagging_policy(FakeSummarizer(mode), 3, hard_limit=("tokens", 3000), overrun="promote")
        session = runtime.session("s", policy=policy)
        agent = Agent(session)
        for _ in range(60):
            assert tokens(await agent.turn()) <= 3000
        assert {r.how for r in session.receipts} == {"fallback"}
        assert not events.of("lookahead.promoted") and not session.urgent()


@virtual
async def test_a_late_summary_takes_the_place_of_the_fallback() -> None:
    """It covers what the fallback dropped, which no view showed any more."""
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=lagging_policy(model, 2, hard_limit=("tokens", 3000)))
        agent = Agent(session)
        while not session.receipts:
            await agent.turn()
        assert session.receipts[0].how == "fallback" and len(marks(agent.views[-1])) < len(marks(agent.messages)) / 2
        model.release.set()
        for _ in range(10):
            await agent.turn()
        assert session.receipts[-1].how == "ready"
        assert marks(agent.views[-1]) == marks(agent.messages[: agent.held[-1]])


@virtual
async def test_a_separate_small_memory_model_reads_in_windows() -> None:
    """Its window is a quarter of the agent's history: no request is larger, however long the history gets."""
    speed = Speed(20_000.0, 1_000.0)
    memory = FakeEngine(*["m" * 120] * 2000, context_window=4000, speed=speed, strict=True)
    agent_engine = FakeEngine(*["."] * 100, identity="fake://agent#big", preload=False)
    async with make_runtime() as runtime:
        policy = lagging_policy(memory, 4, source="raw", context_window=100_000)
        session = runtime.session("s", policy=policy, engine=agent_engine)
        agent = Agent(session, size=150)
        for _ in range(60):
            await agent.turn()
        assert len(session.receipts) >= 5 and tokens(agent.messages) > 3 * 4000
        assert all(c.outcome in ("done", "running") for c in memory.calls) and not agent_engine.calls
        per_commit = [r.usage.calls for r in session.receipts]
        assert per_commit[-1] > per_commit[0] == 1, "more windows, not a larger request"


@virtual
async def test_blocks_lag_too() -> None:
    """With ``ParallelSummarize``: blocks as they fill, at most one commit in k turns, the last k raw, nobody waits."""
    model, k = FakeSummarizer(delay=3 * TURN_S), 4
    async with make_runtime() as runtime:
        policy = Policy(
            ParallelSummarize(model, block_tokens=400, facts=False, max_tokens=200),
            commit=KStepOff(k),
            trigger=("tokens", 100_000),
            hard_limit=("tokens", 100_000),
            land_at=("tokens", 50_000),
        )
        session = runtime.session("s", policy=policy)
        agent, commits = Agent(session), []
        for turn in range(100):
            before = len(session.receipts)
            view = await agent.turn()
            commits += [turn] if len(session.receipts) > before else []
            assert raw_turns(agent, turn) >= min(k, turn)
            assert marks(view) == marks(agent.messages[: agent.held[turn]])
        assert len(commits) >= 8 and all(b - a >= k for a, b in itertools.pairwise(commits))
        assert len(summaries(agent.views[-1])) >= 8 and all(r.waited_s == 0 for r in session.receipts)
        assert max(tokens([m for m in v if CODEC.summary_text(m) is None]) for v in agent.views[30:]) < 4000


@virtual
async def test_what_comes_back_leaves_the_last_turns_raw() -> None:
    """Back to a time when an earlier commit would have been too new: it comes back once it lies far enough behind."""
    k = 4
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=lagging_policy(FakeSummarizer(delay=0.5), k))
        messages: list[Message] = [S(), H("start")]
        while not session.receipts:
            step(session, messages)
            messages += [A("reply", size=100), H(f"<{len(messages)}> go on", size=100)]
            session.observe(messages)
            await settle(TURN_S)
        assert session.receipts[0].lag >= k
        step(session, [H("another chat")])
        lags = [r.lag for r in list(session.receipts)[1:]]
        assert not lags
        shorter = messages[: -2 * (session.receipts[0].lag - 2)]  # two of the turns behind it are left
        for _ in range(6):
            view = step(session, shorter)
            since = list(session.receipts)[1:]
            assert bool(summaries(view)) is bool(since) and all(r.lag >= k for r in since)
            shorter = [*shorter, A("other", size=100), H("other", size=100)]
        assert since[0].how == "salvaged"


@virtual
async def test_the_new_prefix_is_warm_at_the_switch() -> None:
    """With the agent's engine: the first call with the new view finds all of it in the cache but what is new."""
    engine = FakeEngine(*[f"reply {n:04d} " + "w" * 200 for n in range(400)], speed=Speed(4_000.0, 400.0))
    memory = FakeSummarizer(delay=1.5)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=lagging_policy(memory, 3), engine=engine)
        messages: list[Message] = [S(), H("start")]
        first_calls: list[tuple[bool, int, int]] = []
        for turn in range(60):
            before = len(session.receipts)
            view = step(session, messages)
            async with session.foreground() as call, engine.stream(view, max_tokens=40) as stream:
                async for _ in stream:
                    call.first_token()
                assert stream.completion is not None
                call.report(stream.completion.usage)
            if len(session.receipts) > before:
                cached = stream.completion.usage.cached_tokens or 0
                first_calls.append((session.receipts[-1].warm, cached, stream.completion.usage.input_tokens))
            messages += [A(stream.completion.text), H(f"<{turn}> go on", size=60)]
            session.observe(messages)
            await asyncio.sleep(0.5)  # tools run: time for the preload
        assert len(first_calls) >= 5
        for warm, cached, given in first_calls:
            assert warm and cached >= given - 2 * engine.count(messages[-2:]), (warm, cached, given)
        outcome = session.outcomes()[-2]
        assert outcome.receipt.warm and outcome.uncached_first_tokens is not None
        assert outcome.uncached_first_tokens <= 2 * engine.count(messages[-2:])


@virtual
async def test_a_cold_result_waits_k_turns_for_warmth_and_no_longer() -> None:
    """The foreground never rests: the preload gets no time, and the commit comes cold."""
    engine, memory = FakeEngine(), FakeSummarizer(delay=0.1)
    k = 3
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=lagging_policy(memory, k), engine=engine)
        agent = Agent(session)
        async with session.foreground():  # another call on the same engine, all the time
            while not memory.calls:
                await agent.turn()
            started = len(agent.views)
            while not session.receipts:
                await agent.turn()
        assert k <= len(agent.views) - started <= k + 2
        assert session.receipts[0].warm is False and session.receipts[0].lag <= 2 * k + 3


@virtual
async def test_the_rule_goes_by_the_history_not_by_a_counter() -> None:
    """After a regenerate to an early point the summary of the common prefix stays, and what follows is counted anew."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=lagging_policy(FakeSummarizer(delay=0.2), 2))
        agent = Agent(session)
        for _ in range(12):
            await agent.turn()
        end = session.branches()[-1].end
        cut = next(i for i in range(end + 1, len(agent.messages)) if agent.messages[i]["role"] == "assistant")
        del agent.messages[cut + 1 :]
        if agent.messages[-1].get("tool_calls"):
            agent.messages.append(T(agent.messages[-1]["tool_calls"][0]["id"], "<900> another"))
        for turn in range(12, 24):
            await agent.turn()
            assert raw_turns(agent, turn) >= 1 and marks(agent.views[-1]) == marks(agent.messages[: agent.held[-1]])
        assert session.receipts[-1].how == "ready"


@settings(max_examples=15)
@given(
    k=st.integers(1, 5),
    delays=st.lists(st.floats(0.05, 9.0), min_size=1, max_size=12),
    sizes=st.lists(st.integers(20, 400), min_size=1, max_size=12),
    limit=st.sampled_from([4_000, 200_000]),
)
def test_whatever_the_speed(k: int, delays: list[float], sizes: list[int], limit: int) -> None:
    """Any mixture of fast and slow summaries and of large and small turns keeps the rule."""

    async def main() -> None:
        model = FakeSummarizer()
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=lagging_policy(model, k, hard_limit=("tokens", limit)))
            agent = Agent(session)
            ready: list[int] = []
            for turn in range(40):
                model.delay, agent.size = delays[turn % len(delays)], sizes[turn % len(sizes)]
                before = len(session.receipts)
                view = await agent.turn()
                ready += [turn for r in list(session.receipts)[before:] if r.how == "ready"]
                assert tokens(view) <= limit
                if limit > 100_000:
                    assert raw_turns(agent, turn) >= min(k, turn)
            if limit > 100_000:
                assert all(b - a >= k for a, b in itertools.pairwise(ready))
            assert all(r.waited_s == 0 for r in session.receipts)

    run_virtual(main)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "2", None])
def test_wrong_k_is_refused(k: Any) -> None:
    """At construction, with the value."""
    with pytest.raises(ConfigurationError, match=r"KStepOff\(k\)="):
        KStepOff(k)


def test_wrong_rules_are_refused() -> None:
    """The allowed ones are named, the new ones too."""
    build: Callable[[Any], Policy] = lambda rule: Policy(  # noqa: E731
        Summarize(FakeSummarizer()), commit=rule, context_window=1000
    )
    for rule in ("later", KStepOff, 3, None):
        with pytest.raises(ConfigurationError, match=r"commit=.*'ready', 'hard_limit', KStepOff\(k\) or BreakEven"):
            build(rule)
    assert build(KStepOff(2)).same_as(build(KStepOff(2))) is False, "two anonymous models"
