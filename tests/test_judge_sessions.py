"""The judge in a session: what it holds back, refuses and lets pass; and that no turn ever waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from block_fakes import Blocks, begin, block_policy
from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    chat,
    coherent,
    make_policy,
    make_runtime,
    now,
    settle,
    summaries,
    virtual,
)
from smoothctx import (
    HandleState,
    LookaheadHandle,
    Policy,
    Reason,
    Session,
    Speculate,
    Summarize,
    TrajectoryJudge,
)
from smoothctx.economics import Speed
from smoothctx.judge import Evidence
from smoothctx.testing import FakeEngine
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage
from test_judge import action
from test_promise_05_kstep import Agent, lagging_policy
from transform_fakes import FakeModel

PATH = "src/app/config_7.py"
GOOD, BAD = '{"score": 0.9, "missed": []}', '{"score": 0.1, "missed": ["the port 8080"]}'


def history() -> list[Message]:
    """Over the trigger; the path stands in an old message only."""
    messages = chat(13)
    messages[3] = H(f"<2> we edit {PATH} today", size=50)
    return messages


async def ready(session: Session, messages: list[Message]) -> LookaheadHandle:
    """A lookahead on these messages, ready."""
    handle = session.observe(messages)
    assert handle is not None
    assert await handle.wait(100) is HandleState.READY
    return handle


async def boundary(session: Session, messages: list[Message], reply: Message | None = None) -> list[Any]:
    """One turn: a question is committed, the reply observed, and the background gets time."""
    messages.append(H("and now?"))
    began = now()
    view = await session.commit(messages)
    assert now() == began, "no turn waits for the judge"
    messages.append(reply or A("Thinking about it."))
    session.observe(messages)
    await settle(3)
    return view


class Judge(FakeModel):
    """A judge's model; ``wait`` is awaited before each answer."""

    def __init__(self, *answers: Any, wait: Callable[[], Any] | None = None) -> None:
        super().__init__(*answers)
        self.wait = wait

    @property
    def answered(self) -> int:
        """How often it was asked."""
        return len(self.requests)

    async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> Any:
        if self.wait is not None:
            await self.wait()
        return await super().__call__(messages, max_tokens=max_tokens)


def verdicts(events: Events) -> list[bool]:
    """What was judged, in order."""
    return [bool(e.data["faithful"]) for e in events.of("lookahead.judged")]


def why(events: Events) -> list[str]:
    """Why results went in unjudged."""
    return [str(e.data["why"]) for e in events.of("lookahead.unjudged")]


# -- identifiers alone ---------------------------------------------------------------------------------------------


@virtual
async def test_a_summary_that_lost_what_the_next_action_needs_is_discarded() -> None:
    """It is dropped as judged_unfaithful, its tokens are waste, and what it missed goes into one retry."""
    model, events = FakeSummarizer(), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, validators=[TrajectoryJudge()]))
        messages = history()
        first = await ready(session, messages)
        messages.append(action(PATH, "Opening it."))
        second = session.observe(messages)
        assert (first.state, first.reason) == (HandleState.DISCARDED, Reason.JUDGED_UNFAITHFUL)
        assert runtime.counters.stale == {"judged_unfaithful": 1}
        assert runtime.counters.wasted_tokens == first.flight.usage.total_tokens > 0
        assert second is not None and second is not first
        messages.append({"role": "tool", "tool_call_id": "c1", "content": "PORT = 1"})
        model.text = f"The summary, with {PATH}."
        await second.wait(100)
        asked = str(model.inputs[-1][-1]["content"])
        assert PATH in asked and "<missed>" in asked and "<missed>" not in str(model.inputs[0][-1]["content"])
        view = await boundary(session, messages)
        view = await boundary(session, messages)
        assert PATH in summaries(view)[0]
        assert verdicts(events) == [False, True] and not events.of("error")
        coherent(session, runtime, live=int(session.lookahead is not None))


@virtual
async def test_a_retry_that_is_refused_as_well_ends_it() -> None:
    """By a judge's model that refuses everything: one try, one retry, then the trigger waits for more history."""
    model, events, judge = FakeSummarizer(delay=0.1), Events(), Judge(BAD)
    async with make_runtime(on_event=events) as runtime:
        policy = make_policy(model, window=6000, trigger=("tokens", 1200), validators=[TrajectoryJudge(judge)])
        session, messages = runtime.session("s", policy=policy), history()
        await ready(session, messages)
        for _ in range(8):
            await boundary(session, messages)
        assert runtime.counters.stale == {"judged_unfaithful": 2} and model.calls == judge.answered == 2
        assert "the port 8080" in str(model.inputs[1][-1]["content"])
        assert session.lookahead is None and not summaries(await session.commit(messages))
        coherent(session, runtime)


@virtual
async def test_a_faithful_summary_is_committed_as_ever() -> None:
    """With actions that need nothing of it, at the first boundary behind them."""
    model, events = FakeSummarizer(), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, validators=[TrajectoryJudge()]))
        messages = history()
        await ready(session, messages)
        messages.append(A("On it."))
        session.observe(messages)
        view = await boundary(session, messages)
        assert summaries(view) and [r.how for r in session.receipts] == ["ready"]
        assert verdicts(events) == [True] and not why(events)


@virtual
async def test_without_any_action_it_waits_for_a_few_boundaries_only() -> None:
    """A user who keeps talking: held back three times, then used, with an event."""
    model, events = FakeSummarizer(), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, validators=[TrajectoryJudge(boundaries=3)]))
        messages = history()
        await ready(session, messages)
        for _ in range(3):
            messages.append(H("hello?"))
            assert not summaries(await session.commit(messages))
        messages.append(H("hello?"))
        assert summaries(await session.commit(messages))
        assert why(events) == ["the agent has done nothing since"]


@virtual
async def test_at_the_hard_limit_the_result_is_used_unjudged() -> None:
    """It has to fit: nothing is asked any more."""
    model, events, judge = FakeSummarizer(), Events(), Judge(BAD, wait=lambda: settle(1e6))
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, validators=[TrajectoryJudge(judge)]))
        messages = history()
        await ready(session, messages)
        messages += [A("Doing it."), H("a lot", size=600)]
        began = now()
        view = await session.commit(messages)
        assert summaries(view) and now() == began
        assert why(events) == ["it was needed at once"] and session.receipts[0].how == "ready"


@virtual
async def test_a_user_may_commit_the_handle_unjudged() -> None:
    """``handle.commit`` and explicitly scheduled transforms are the caller's own decision."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        policy = make_policy(FakeSummarizer(), validators=[TrajectoryJudge(Judge(BAD))])
        session, messages = runtime.session("s", policy=policy), history()
        handle = await ready(session, messages)
        assert summaries(handle.commit(messages))
        other = runtime.session("t", policy=policy)
        await other.schedule_transform("summarize", messages[:10]).wait(100)
        assert summaries(await other.commit([*messages[:10], A("x"), H("y")]))
        assert not verdicts(events)


# -- with a model --------------------------------------------------------------------------------------------------


@virtual
async def test_the_models_verdict_decides() -> None:
    """0.9 commits it; what the judge cost is in the usage and in the receipt."""
    usage = Usage(input_tokens=500, output_tokens=11, calls=1)
    judge, events = Judge(ModelReply(text=GOOD, usage=usage)), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), validators=[TrajectoryJudge(judge)]))
        messages = history()
        handle = await ready(session, messages)
        before = runtime.counters.usage
        messages.append(A("On it."))
        session.observe(messages)
        await settle(1)
        assert runtime.counters.usage == before + usage
        assert summaries(await boundary(session, messages))
        assert session.receipts[0].usage == handle.flight.usage and session.receipts[0].usage.calls == 2
        assert verdicts(events) == [True] and judge.answered == 1
        assert [e.data["transform"] for e in events.of("usage")] == ["summarize", "judge"]
        coherent(session, runtime)


@virtual
async def test_promise_15_a_judge_that_is_asked_while_the_preload_goes_on_is_counted_once() -> None:
    """Under ``KStepOff`` no commit waits for a preload, so the judge may end before it: counters, events and receipts
    all say what was really spent."""
    cost = Usage(input_tokens=500, output_tokens=11, calls=1)
    paid = Usage(input_tokens=1000, output_tokens=100, calls=1)
    model, events = FakeSummarizer(), Events()
    model.usage = paid
    judge = Judge(ModelReply(text=GOOD, usage=cost))
    engine = FakeEngine(speed=Speed(3.0, 100.0))  # the preload is not over when the result goes in
    async with make_runtime(on_event=events) as runtime:
        policy = lagging_policy(model, 2, validators=[TrajectoryJudge(judge, boundaries=5)])
        session = runtime.session("s", policy=policy, engine=engine)
        agent = Agent(session)
        while not session.receipts:
            assert len(agent.views) < 40
            await agent.turn()
        assert judge.answered == 1 and session.receipts[0].usage == paid + cost
        await session.close()
        await settle(50)
        spent = runtime.counters.usage
        assert spent.calls == model.calls + 1 and spent.total_tokens == 1100 * model.calls + 511
        assert sum((e.data["usage"] for e in events.of("usage")), Usage()) == spent


@virtual
async def test_promise_05_the_judges_model_is_asked_between_the_first_tokens_of_turns() -> None:
    """It is an engine on which another session's turn waits for its first token."""
    engine, events = FakeEngine(GOOD, speed=Speed(1e6, 100.0)), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), validators=[TrajectoryJudge(engine)]))
        other = runtime.session("other", policy=make_policy(FakeSummarizer()), engine=engine)
        messages = history()
        await ready(session, messages)
        async with other.foreground() as call:
            messages.append(A("On it."))
            session.observe(messages)
            await settle(3)
            assert not engine.calls
            call.first_token()
            await settle(1)
            assert len(engine.calls) == 1 and verdicts(events) == [True]


@virtual
async def test_identifiers_are_compared_before_the_model_is_asked() -> None:
    """A lost path refuses at no cost."""
    judge = Judge(GOOD)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), validators=[TrajectoryJudge(judge)]))
        messages = history()
        handle = await ready(session, messages)
        messages.append(action(PATH))
        session.observe(messages)
        assert handle.reason is Reason.JUDGED_UNFAITHFUL and judge.answered == 0


@pytest.mark.parametrize(
    "answer", [RuntimeError("down"), "maybe", '{"score": 7}', 17, ModelReply(text="", tool_calls=True)]
)
def test_whatever_goes_wrong_with_the_judge_the_result_is_used(answer: Any) -> None:
    """Errors, garbage, the wrong type: an event, and the summary goes in at the next boundary."""

    @virtual
    async def run() -> None:
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            policy = make_policy(FakeSummarizer(), validators=[TrajectoryJudge(Judge(answer))])
            session, messages = runtime.session("s", policy=policy), history()
            await ready(session, messages)
            messages.append(A("On it."))
            session.observe(messages)
            await settle(1)
            assert summaries(await boundary(session, messages))
            assert len(why(events)) == 1 and not verdicts(events)
            coherent(session, runtime)

    run()


@virtual
async def test_a_judge_that_hangs_holds_nothing_up() -> None:
    """The turns go on with the raw view; after the last boundary the result is used, and later answers are ignored."""
    events, judge = Events(), Judge(BAD, wait=lambda: settle(50))
    async with make_runtime(on_event=events) as runtime:
        policy = make_policy(FakeSummarizer(), validators=[TrajectoryJudge(judge, boundaries=2)])
        session, messages = runtime.session("s", policy=policy), history()
        handle = await ready(session, messages)
        messages.append(A("On it."))
        session.observe(messages)
        seen = [bool(summaries(await boundary(session, messages))) for _ in range(3)]
        assert seen == [False, False, True] and why(events) == ["no answer in time"]
        await settle(100)
        assert handle.state is HandleState.COMMITTED and not verdicts(events)
        coherent(session, runtime)


@virtual
async def test_a_judge_has_seconds_of_its_own() -> None:
    """After ``timeout_s`` it is given up."""
    events, judge = Events(), Judge(BAD, wait=lambda: settle(1e6))
    async with make_runtime(on_event=events) as runtime:
        policy = make_policy(
            FakeSummarizer(), window=9000, trigger=("tokens", 1200), validators=[TrajectoryJudge(judge, timeout_s=5)]
        )
        session, messages = runtime.session("s", policy=policy), history()
        await ready(session, messages)
        messages.append(A("On it."))
        session.observe(messages)
        await settle(4)
        assert not why(events)
        await settle(2)
        assert ["TimeoutError" in w for w in why(events)] == [True]
        assert summaries(await boundary(session, messages))


@virtual
@pytest.mark.parametrize("used", [True, False])
async def test_a_judge_that_is_not_needed_any_more_is_ended(used: bool) -> None:
    """Its result was committed or dropped meanwhile: the call ends."""
    ended: list[bool] = []

    async def wait() -> None:
        try:
            await settle(1e6)
        finally:
            ended.append(True)

    async with make_runtime() as runtime:
        judge = TrajectoryJudge(Judge(GOOD, wait=wait), timeout_s=1e5)
        session, messages = runtime.session("s", policy=make_policy(FakeSummarizer(), validators=[judge])), history()
        handle = await ready(session, messages)
        messages.append(A("On it."))
        session.observe(messages)
        await settle(1)
        assert not ended
        if used:
            handle.commit(messages)
        else:
            handle.discard()
        await settle(1)
        assert ended == [True]
        coherent(session, runtime)


@virtual
async def test_what_a_late_judge_cost_is_counted() -> None:
    """A judge whose cost is told of after its result was settled: wasted, and in no receipt."""
    usage = Usage(input_tokens=500, output_tokens=11, calls=1)

    async def stubborn() -> None:  # its server answers all the same
        with anyio.CancelScope(shield=True):
            await settle(5)

    judge = Judge(ModelReply(text=GOOD, usage=usage), wait=stubborn)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), validators=[TrajectoryJudge(judge)]))
        messages = history()
        handle = await ready(session, messages)
        messages.append(A("On it."))
        session.observe(messages)
        await settle(1)
        handle.commit(messages)
        await settle(10)
        spent, counters = session.receipts[0].usage, runtime.counters
        assert counters.usage == spent + usage and counters.wasted_tokens == usage.total_tokens
        coherent(session, runtime)


@virtual
async def test_a_session_that_ends_asks_no_more() -> None:
    """The verdict of a closed session's result is of no use to anybody."""
    judge, events = Judge(BAD, wait=lambda: settle(5)), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), validators=[TrajectoryJudge(judge)]))
        messages = history()
        await ready(session, messages)
        messages.append(A("On it."))
        session.observe(messages)
        await session.close()
        await settle(20)
        assert not verdicts(events) and not events.of("error")
        coherent(session, runtime)


@virtual
async def test_a_retry_on_the_same_run_has_the_same_key_and_is_made_anew() -> None:
    """What it missed is no part of the key; neither the session nor the store gives the refused result back."""
    model, store = FakeSummarizer(), FlakyStore()
    async with make_runtime(store=store) as runtime:
        policy = make_policy(model, model_id="m", validators=[TrajectoryJudge()])
        session, messages = runtime.session("s", policy=policy), history()
        first = await ready(session, messages)
        await settle(1)
        longer = session.observe([*messages, action(PATH)])
        assert longer is not None
        longer.discard()
        assert first.reason is Reason.JUDGED_UNFAITHFUL
        second = session.observe(messages)  # regenerated: the same run as at first
        assert second is not None
        assert second.flight.plan.key == first.flight.plan.key
        assert first.flight.plan.request.missed is None and second.flight.plan.request.missed == f"- {PATH}"
        model.text = f"Now with {PATH}."
        assert await second.wait(100) is HandleState.READY
        assert model.calls == 2 and not second.flight.from_store
        await settle(1)
        kept = await store.get("default", f"artifact/{second.flight.plan.key}")
        assert kept is not None and PATH.encode() in kept, "the better one took its place"


def test_evidence_that_cannot_be_read_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours in the comparison: one event, and the result goes in as without a judge."""

    def broken(*_: Any) -> bool:
        raise ValueError("unreadable")

    monkeypatch.setattr(Evidence, "read", broken)

    @virtual
    async def run() -> None:
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            session = runtime.session("s", policy=make_policy(FakeSummarizer(), validators=[TrajectoryJudge()]))
            messages = history()
            await ready(session, messages)
            messages.append(A("On it."))
            session.observe(messages)
            assert summaries(await boundary(session, messages))
            assert why(events) == ["ValueError: unreadable"]
            assert [e.data["where"] for e in events.of("error")] == ["judge"]
            coherent(session, runtime)

    run()


# -- blocks --------------------------------------------------------------------------------------------------------


@virtual
async def test_each_block_is_judged_for_itself() -> None:
    """A block that lost the path is written again, told what it missed; nothing is committed before that."""
    model, events = Blocks(), Events()
    async with make_runtime(concurrency=4, on_event=events) as runtime:
        session, messages = runtime.session("s", policy=block_policy(model, validators=[TrajectoryJudge()])), begin()
        wrong = ""
        for k in range(14):
            messages.append(H(f"<{k}> question {PATH if k == 1 else ''}", size=100))
            view = await session.commit(messages)
            if runtime.counters.stale.get("judged_unfaithful") and not wrong:
                wrong = json.dumps(view)
                model.text = lambda seen: f"Record with {PATH}."
            messages.append(action(PATH) if k == 9 else A(f"<{k}> answer", size=100))
            if k == 9:
                messages.append({"role": "tool", "tool_call_id": "c1", "content": "x"})
            session.observe(messages)
            await settle(5)
        assert runtime.counters.stale["judged_unfaithful"] >= 1
        assert "Record" not in wrong, "nothing was committed at that boundary"
        assert any("<missed>" in str(request[-1]["content"]) for request in model.inputs)
        shown = summaries(await session.commit([*messages, H("next")]))
        assert shown and PATH in shown[0] and not events.of("error")
        assert not [w for w in why(events) if "at once" in w]


# -- candidates ----------------------------------------------------------------------------------------------------


def candidates(good: int, chosen: list[int]) -> Speculate:
    """Two summaries, of which the one at ``good`` has the path; ``chosen[-1]`` is the choice."""
    texts = [f"It has {PATH}." if k == good else "It has nothing." for k in range(2)]
    return Speculate(
        [Summarize(FakeSummarizer(text=t), keep=("messages", 4), facts=False, window=100_000) for t in texts],
        lambda since, found: chosen[-1],
    )


@pytest.mark.parametrize("model", [None, GOOD])
@pytest.mark.parametrize(("good", "chosen"), [(1, 1), (0, 1), (0, 0), (1, 0)])
def test_of_several_candidates_the_chosen_one_is_judged(good: int, chosen: int, model: str | None) -> None:
    """Not the default one: what would be committed is what has to have what the actions needed."""

    @virtual
    async def run() -> None:
        events, asked = Events(), Judge(model or "")
        judge = TrajectoryJudge(asked if model else None)
        policy = Policy(candidates(good, [chosen]), context_window=2000, validators=[judge])
        async with make_runtime(on_event=events) as runtime:
            session, messages = runtime.session("s", policy=policy), history()
            handle = await ready(session, messages)
            messages.append(action(PATH, "Opening it."))
            session.observe(messages)
            await settle(3)
            messages.append({"role": "tool", "tool_call_id": "c1", "content": "PORT = 1"})
            view = await boundary(session, messages)
            view = await boundary(session, messages)
            if good == chosen:
                assert handle.state is HandleState.COMMITTED and f"It has {PATH}." in summaries(view)[0]
                assert verdicts(events)[0] is True
                assert [f"It has {PATH}." in str(r) for r in asked.requests[:1]] == [True] * bool(model)
            else:
                assert handle.reason is Reason.JUDGED_UNFAITHFUL and verdicts(events)[0] is False
            assert not why(events) and not events.of("error")

    run()


@virtual
async def test_a_verdict_on_one_candidate_is_none_on_another() -> None:
    """At the hard limit another one than the judged one is used: it goes in unjudged, and that is said."""
    events, chosen = Events(), [1]
    policy = Policy(candidates(1, chosen), context_window=2000, validators=[TrajectoryJudge()], commit="hard_limit")
    async with make_runtime(on_event=events) as runtime:
        session, messages = runtime.session("s", policy=policy), history()
        handle = await ready(session, messages)
        messages += [action(PATH, "Opening it."), {"role": "tool", "tool_call_id": "c1", "content": "PORT = 1"}]
        await boundary(session, messages)
        assert verdicts(events) == [True] and handle.state is HandleState.READY
        chosen.append(0)
        messages += [H("more", size=400), A("yes")]
        await boundary(session, messages)
        assert handle.state is HandleState.COMMITTED and why(events) == ["it was needed at once"]
