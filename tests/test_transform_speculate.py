"""Speculate: several candidates, one choice at the commit, by what has happened since."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from helpers import (
    CODEC,
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    S,
    T,
    chat,
    coherent,
    is_subsequence,
    make_runtime,
    problems,
    settle,
    summaries,
    tool_chat,
    virtual,
)
from smoothctx import (
    Candidate,
    Chain,
    ConfigurationError,
    HandleState,
    Isolate,
    KeepRecent,
    Locality,
    MemoryStore,
    Offload,
    ParallelSummarize,
    Policy,
    Reason,
    Rewrite,
    Runtime,
    Session,
    SmoothctxError,
    Speculate,
    Summarize,
    TransformRequest,
    Usage,
)
from smoothctx.engines.preload import PreloadReport
from smoothctx.flight import dump_artifact, load_artifact
from smoothctx.testing import check_locality, run_virtual
from smoothctx.transforms.model import ModelReply, estimate
from smoothctx.transforms.spending import most_tokens
from transform_fakes import FakeEngine, FakeModel, request

KEEP = ("messages", 4)


def short(model: Any, **options: Any) -> Summarize:
    """A summary by this model."""
    return Summarize(model, keep=KEEP, facts=False, max_tokens=100, window=100_000, **options)


def by_words(since: Sequence[Any], candidates: Sequence[Candidate]) -> int:
    """The second one when the user asks for detail."""
    return int(any("detail" in CODEC.text(m) for m in since))


def policy_of(transform: Any, *, window: int = 2000, **options: Any) -> Policy:
    """As `make_policy`, with any transform."""
    return Policy(transform, context_window=window, **options)


def brief_and_long(choose: Any = by_words, **options: Any) -> tuple[Speculate, FakeSummarizer, FakeSummarizer]:
    """Two summaries that can be told apart, each with its model."""
    brief, full = FakeSummarizer(text="Brief."), FakeSummarizer(text="In detail.")
    candidates = [short(brief, model_id="brief"), short(full, model_id="full")]
    return Speculate(candidates, choose, **options), brief, full


async def ready(session: Session, messages: list[Message]) -> Any:
    """A lookahead on these messages, ready."""
    handle = session.observe(messages)
    assert handle is not None
    assert await handle.wait(100) is HandleState.READY, handle
    return handle


# -- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "expected"), [("more", "Brief."), ("in detail", "In detail.")])
def test_the_choice_is_made_at_the_commit_by_what_came_since(word: str, expected: str) -> None:
    """Both were prepared side by side; the other one's tokens are waste."""

    @virtual
    async def run() -> None:
        transform, brief, full = brief_and_long()
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            session, messages = runtime.session("s", policy=policy_of(transform)), chat(13)
            handle = session.observe(messages)
            assert handle is not None
            await settle()
            assert brief.running == full.running == 1, "side by side"
            await handle.wait(100)
            messages.append(H(f"{word}, please"))
            view = await session.commit(messages)
            assert expected in summaries(view)[0] and not problems(view)
            assert all(a is b for a, b in zip(view[-4:], messages[-4:], strict=True))
            receipt = session.receipts[0]
            assert receipt.transform == "speculate" and receipt.usage.calls == 2
            loser = receipt.usage.total_tokens - handle.artifact.usage.total_tokens
            assert runtime.counters.wasted_tokens == loser > 0
            assert not events.of("speculation.default") and not events.of("error")
            coherent(session, runtime)

    run()


@virtual
async def test_choose_sees_what_was_appended_and_what_there_is() -> None:
    """The messages behind the snapshot, the same objects, and one candidate for each transform."""
    seen: list[tuple[list[Any], list[Candidate]]] = []

    def choose(since: list[Any], candidates: list[Candidate]) -> int:
        seen.append((since, candidates))
        return 1

    transform, _, _ = brief_and_long(choose)
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=policy_of(transform)), chat(13)
        await ready(session, messages)
        later = [H("one"), A("two"), H("three")]
        messages += later
        await session.commit(messages)
        since, candidates = seen[-1]
        assert len(since) == 3 and all(a is b for a, b in zip(since, later, strict=True))
        assert [(c.transform, c.ready) for c in candidates] == [("summarize", True)] * 2
        assert "In detail." in CODEC.text(candidates[1].messages[0]) and candidates[1].tokens > 0


def boom(since: Sequence[Any], candidates: Sequence[Candidate]) -> int:
    """A choice that fails."""
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("choose", "why"),
    [
        (boom, "RuntimeError: no idea"),
        (lambda since, candidates: 2, "returned 2"),
        (lambda since, candidates: -1, "returned -1"),
        (lambda since, candidates: None, "returned None"),
        (lambda since, candidates: True, "returned True"),
        (lambda since, candidates: "1", "returned '1'"),
    ],
)
def test_a_bad_choice_means_the_first_candidate_and_an_event(choose: Any, why: str) -> None:
    """The turn goes on."""

    @virtual
    async def run() -> None:
        transform, _, _ = brief_and_long(choose)
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            session, messages = runtime.session("s", policy=policy_of(transform)), chat(13)
            await ready(session, messages)
            view = await session.commit([*messages, H("in detail")])
            assert "Brief." in summaries(view)[0]
            assert [why in str(e.data["why"]) for e in events.of("speculation.default")] == [True]

    run()


@virtual
async def test_a_choice_that_cannot_be_had_is_replaced() -> None:
    """Of three one failed; naming it means the first that is ready."""
    events = Events()
    models = [FakeSummarizer(text="One."), FakeSummarizer("fail"), FakeSummarizer(text="Three.")]
    transform = Speculate([short(m) for m in models], lambda since, candidates: 1)
    async with make_runtime(on_event=events) as runtime:
        session, messages = runtime.session("s", policy=policy_of(transform)), chat(13)
        await ready(session, messages)
        assert "One." in summaries(await session.commit([*messages, H("x")]))[0]
        assert [e.data["why"] for e in events.of("speculation.default")] == ["candidate 1 has no result"]


@virtual
async def test_the_first_may_fail_and_a_bad_one_is_left_out() -> None:
    """A candidate that fails, or that a validator refuses, is not there; with one left there is no choice."""
    calls: list[int] = []

    def choose(since: list[Any], candidates: list[Candidate]) -> int:
        calls.append(1)
        return 0

    models = [FakeSummarizer("fail"), FakeSummarizer("long"), FakeSummarizer(text="Left.")]
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=policy_of(Speculate([short(m) for m in models], choose)))
        messages = chat(13)
        await ready(session, messages)
        assert "Left." in summaries(await session.commit([*messages, H("x")]))[0]
        assert not calls and not events.of("speculation.default")


@virtual
async def test_when_all_fail_it_fails() -> None:
    """With the first one's error; the breaker and the counters see one failure."""
    async with make_runtime() as runtime:
        transform = Speculate([short(FakeSummarizer("fail")), short(FakeSummarizer("empty"))], by_words)
        session = runtime.session("s", policy=policy_of(transform))
        handle = session.observe(chat(13))
        assert handle is not None and await handle.wait(100) is HandleState.FAILED
        assert handle.reason is Reason.FAILED and "the model failed" in str(handle.error)
        coherent(session, runtime)


@virtual
async def test_candidates_that_save_nothing_are_left_out() -> None:
    """``min_savings`` holds for each; when none saves enough the reason says so."""
    async with make_runtime() as runtime:
        transform = Speculate([short(FakeSummarizer("long"))] * 2, by_words)
        session = runtime.session("s", policy=policy_of(transform))
        handle = session.observe(chat(13))
        assert handle is not None
        await handle.wait(100)
        assert handle.reason in (Reason.NOT_SMALLER, Reason.FAILED, Reason.INVALID_OUTPUT) and handle.done()
        assert session.observe(chat(13)) is None or handle.reason is not Reason.NOT_SMALLER


@virtual
async def test_two_branches_share_the_work_and_choose_for_themselves() -> None:
    """Single flight: prepared once; each fork gets what fits its own future."""
    transform, brief, full = brief_and_long()
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=policy_of(transform)), chat(13)
        other = session.fork("t")
        first, second = session.observe(messages), other.observe(list(messages))
        assert first is not None and second is not None and first.flight is second.flight
        await first.wait(100)
        one = await session.commit([*messages, H("in detail")])
        two = await other.commit([*messages, H("more")])
        assert "In detail." in summaries(one)[0] and "Brief." in summaries(two)[0]
        assert brief.calls == full.calls == 1
        coherent(session, runtime)


@virtual
async def test_the_choice_stays_once_it_is_committed() -> None:
    """Whatever comes later; promise 9."""
    transform, _, _ = brief_and_long()
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=policy_of(transform)), chat(13)
        await ready(session, messages)
        messages.append(H("in detail"))
        view = await session.commit(messages)
        for k in range(3):
            messages += [A("ok"), H(f"briefly now {k}")]
            again = await session.commit(messages)
            assert again[: len(view)] == view
            view = again


@virtual
async def test_an_explicit_one_is_committed_by_its_handle() -> None:
    """By name and as an object; the choice is made when the handle commits."""
    transform, _, _ = brief_and_long()
    async with make_runtime() as runtime:
        policy = policy_of(KeepRecent(("messages", 20)), window=20_000)
        session, messages = runtime.session("s", policy=policy), chat(6)
        handle = session.schedule_transform(
            "speculate", messages, candidates=list(transform.transforms), choose=by_words
        )
        await handle.wait(100)
        view = handle.commit([*messages, H("in detail")])
        assert "In detail." in summaries(view)[0]
        assert handle.commit([*messages, H("in detail")]) == view


# -- the budget ----------------------------------------------------------------------------------------------------


async def test_over_budget_only_the_first_is_prepared() -> None:
    """Per session: what the candidates behind the first have cost, and what the next could cost."""
    first, second = FakeEngine("One."), FakeEngine("Two.")  # 120 tokens each time
    messages = chat(4, size=40)
    most = most_tokens(short(second), request(messages)) or 0
    transform = Speculate([short(first), short(second)], by_words, budget_tokens=most + 400)
    counts = []
    for _ in range(8):
        rewrite = await transform.apply(request(messages, session_id="s"))
        counts.append(sum(r is not None for r in rewrite.alternatives))
    assert counts == [2] * 4 + [1] * 4 and len(second.requests) == 4
    again = await transform.apply(request(messages, session_id="another"))
    assert sum(r is not None for r in again.alternatives) == 2
    other = await transform.apply(request(messages, session_id="s", tenant="other"))
    assert sum(r is not None for r in other.alternatives) == 2


class Meter:
    """A model that counts what it reads and writes; with ``cut`` its answers are cut off."""

    def __init__(self, *, cut: bool = False) -> None:
        self.cut = cut
        self.tokens = self.calls = 0

    async def __call__(self, messages: list[Message], *, max_tokens: int | None = None) -> ModelReply:
        assert max_tokens is not None
        usage = Usage(input_tokens=estimate(messages), output_tokens=max_tokens if self.cut else 40, calls=1)
        self.tokens += usage.total_tokens
        self.calls += 1
        await asyncio.sleep(1)
        return ModelReply(text="It says this.", usage=usage, finish_reason="length" if self.cut else "stop")


def metered(kind: str, model: Meter, window: int) -> Any:
    """One of our transforms."""
    if kind == "blocks":
        return ParallelSummarize(model, block_tokens=400, keep=KEEP, window=window, max_tokens=100, workers=2)
    if kind == "chain":
        return Chain(
            Offload(store=MemoryStore(), min_tokens=300), Summarize(model, keep=KEEP, window=window, max_tokens=100)
        )
    return Summarize(model, keep=KEEP, window=window, max_tokens=100, layout=kind)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["aligned", "standalone", "blocks", "chain"]),
    sizes=st.lists(st.integers(5, 600), min_size=4, max_size=10),
    window=st.sampled_from([1500, 4000, 100_000]),
    before=st.integers(0, 400),
    cut=st.booleans(),
)
def test_property_nothing_costs_more_than_its_estimate(
    kind: str, sizes: list[int], window: int, before: int, cut: bool
) -> None:
    """Whatever it reads, in however many parts, with every text asked for twice: so a budget is a limit."""

    async def run() -> None:
        messages = [m for k, n in enumerate(sizes) for m in (H(f"{k} question", size=n), A("answer", size=n // 2))]
        model = Meter(cut=cut)
        own = metered(kind, model, window)
        asked = request(messages, before=[S("You are an agent. " + "Be kind. " * before)])
        most = most_tokens(own, asked)
        assert most is not None
        with contextlib.suppress(SmoothctxError):  # cut off twice
            await own.apply(asked)
        assert 0 < model.tokens <= most

    run_virtual(run)


class Own:
    """A transform of one's own, of whose cost nothing is known before."""

    name, locality, fingerprint = "own", Locality.FUTURE, None

    def __init__(self, calls: int, *, tells: bool) -> None:
        self.calls, self.tells = calls, tells
        self.made = 0

    async def apply(self, request: TransformRequest) -> Rewrite:
        """So many calls of 100 tokens, told one by one or at the end."""
        used = Usage()
        for _ in range(self.calls):
            await asyncio.sleep(1)
            one = Usage(input_tokens=90, output_tokens=10, calls=1)
            self.made += 1
            used += one
            if self.tells and request.on_usage is not None:
                request.on_usage(one)
        return Rewrite(messages=[CODEC.summary("Own.")], usage=used)


@pytest.mark.parametrize("tells", [True, False])
def test_what_ones_own_transform_spends_counts(tells: bool) -> None:
    """It is not free: after what it reported the budget is used up, and nothing further is prepared."""

    @virtual
    async def run() -> None:
        own = Own(2, tells=tells)
        transform = Speculate([KeepRecent(), own, own], by_words, budget_tokens=350)
        ready = [[r is not None for r in (await transform.apply(request(chat(4)))).alternatives] for _ in range(3)]
        assert ready[0] == [True, True, True] if not tells else ready[0][0]
        assert ready[1:] == [[True, False, False]] * 2 and own.made == 4
        nothing = Own(1, tells=tells)
        await Speculate([KeepRecent(), nothing], by_words, budget_tokens=0).apply(request(chat(4)))
        assert nothing.made == 0

    run()


@virtual
async def test_what_uses_the_budget_up_is_ended() -> None:
    """A candidate of unknown cost goes on until its calls have spent what there is, not further."""
    own = Own(50, tells=True)
    rewrite = await Speculate([KeepRecent(), own], by_words, budget_tokens=350).apply(request(chat(4)))
    assert [r is not None for r in rewrite.alternatives] == [True, False]
    assert own.made == 4 and rewrite.usage.calls == 4


@virtual
async def test_two_at_once_do_not_spend_the_same_rest() -> None:
    """What one run may still spend is reserved for it."""
    model = Meter()
    second = Summarize(model, keep=KEEP, max_tokens=100)
    most = most_tokens(second, request(chat(4))) or 0
    transform = Speculate([KeepRecent(), second], by_words, budget_tokens=most + most // 2)
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(transform.apply(request(chat(4)))) for _ in range(2)]
    assert sorted(sum(r is not None for r in run.result().alternatives) for run in runs) == [1, 2]
    assert model.calls == 1
    assert sum(r is not None for r in (await transform.apply(request(chat(4)))).alternatives) == 2


async def test_without_budget_local_candidates_still_come() -> None:
    """What asks no model costs nothing; a budget of zero allows it."""
    transform = Speculate([short(FakeModel("One.")), KeepRecent()], by_words, budget_tokens=0)
    rewrite = await transform.apply(request(chat(4)))
    assert [r is not None for r in rewrite.alternatives] == [True, True]
    models = Speculate([short(FakeModel("One.")), short(FakeModel("Two."))], by_words, budget_tokens=0)
    assert [r is not None for r in (await models.apply(request(chat(4)))).alternatives] == [True, False]


async def test_the_usage_is_that_of_all_failed_ones_included() -> None:
    """A candidate whose answer was of no use has been paid for."""
    spent: list[Usage] = []
    transform = Speculate([short(FakeEngine("One.")), short(FakeEngine("  "))], by_words)
    rewrite = await transform.apply(request(chat(4), on_usage=spent.append))
    assert [r is not None for r in rewrite.alternatives] == [True, False]
    assert rewrite.usage.total_tokens == 240 == sum(u.total_tokens for u in spent) and rewrite.usage.calls == 2


@virtual
async def test_cancelling_ends_all_candidates() -> None:
    """Nothing of it goes on in the background."""
    models = [FakeSummarizer("hang"), FakeSummarizer("hang")]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy_of(Speculate([short(m) for m in models], by_words)))
        handle = session.observe(chat(13))
        assert handle is not None
        await settle(1)
        handle.discard()
        await settle(1)
        assert [m.cancelled for m in models] == [1, 1] and [m.running for m in models] == [0, 0]
        coherent(session, runtime)


# -- one that is slow ----------------------------------------------------------------------------------------------


@virtual
async def test_promise_06_a_turn_takes_the_candidate_that_is_ready() -> None:
    """One candidate is done after a second, the other hangs: at the hard limit the first goes in, at once."""
    good, stuck, events = FakeSummarizer(delay=1.0), FakeSummarizer("hang"), Events()
    async with make_runtime(on_event=events) as runtime:
        policy = policy_of(Speculate([short(good), short(stuck)], lambda since, candidates: 0), timeout=1000.0)
        session, messages = runtime.session("s", policy=policy), chat(13)
        handle = session.observe(messages)
        await settle(50)
        assert handle is not None and handle.state is HandleState.RUNNING
        messages += [A("yes"), H("and now?" + " word" * 800)]
        began = asyncio.get_running_loop().time()
        view = await session.commit(messages)
        assert asyncio.get_running_loop().time() - began <= 0.5
        assert summaries(view) and [r.how for r in session.receipts] == ["promoted"] and stuck.cancelled == 1
        assert session.receipts[0].usage.calls == 1
        coherent(session, runtime)


@virtual
async def test_what_is_ready_is_kept_when_the_time_is_over() -> None:
    """The policy's timeout ends the candidate that hangs, not the one that is done."""
    good, stuck = FakeSummarizer(delay=1.0), FakeSummarizer("hang")
    async with make_runtime() as runtime:
        seen: list[list[bool]] = []

        def choose(since: Sequence[Any], candidates: Sequence[Candidate]) -> int:
            seen.append([c.ready for c in candidates])
            return 0

        three = Speculate([short(good), short(stuck), KeepRecent(KEEP)], choose)
        session, messages = runtime.session("s", policy=policy_of(three, timeout=60.0)), chat(13)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait(100) is HandleState.READY
        assert summaries(handle.commit(messages)) and seen == [[True, False, True]]
        assert stuck.cancelled == 1 and not runtime.counters.failed
        coherent(session, runtime)


@virtual
async def test_where_all_hang_it_is_the_timeout() -> None:
    """Nothing is ready: the reason is the policy's timeout."""
    async with make_runtime() as runtime:
        policy = policy_of(Speculate([short(FakeSummarizer("hang")) for _ in range(2)], by_words), timeout=60.0)
        session = runtime.session("s", policy=policy)
        handle = session.observe(chat(13))
        assert handle is not None and await handle.wait(100) is HandleState.FAILED
        assert handle.reason is Reason.TIMEOUT


# -- preload -------------------------------------------------------------------------------------------------------


class Warming:
    """An engine's binding that warms whatever it is given and writes down what."""

    def __init__(self) -> None:
        self.views: list[list[Message]] = []
        self.calls: list[str] = []

    def bind(self, session_id: str) -> Warming:
        """One session uses it."""
        return self

    preload_by_default = True
    rates = None

    def request_options(self) -> dict[str, Any]:
        """None."""
        return {}

    def transform_options(self, foreground: Any, urgent: Any) -> dict[str, Any]:
        """None."""
        return {}

    async def preload(self, view: Any, **options: Any) -> Any:
        """All of it, at once."""
        self.views.append(list(view()))
        return PreloadReport(complete=True)

    def committed(self, warm: bool) -> None:
        """The agent moves to what was warmed."""
        self.calls.append(f"committed {warm}")

    def discarded(self) -> None:
        """What was warmed is of no use."""
        self.calls.append("discarded")

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(("word", "warm"), [("in detail", True), ("briefly", False)])
def test_the_likeliest_candidate_is_preloaded(word: str, warm: bool) -> None:
    """By what is known then; a commit of another one is not warm, and gives the warmed slot back."""

    @virtual
    async def run() -> None:
        def last_word(since: Sequence[Any], candidates: Sequence[Candidate]) -> int:
            return int(bool(since) and "detail" in CODEC.text(since[-1]))

        transform, _, _ = brief_and_long(last_word)
        engine = Warming()
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=policy_of(transform), engine=engine)
            messages = chat(13)
            session.observe(messages)
            messages = [*messages, H("in detail")]  # known before the work is done
            handle = session.observe(messages)
            assert handle is not None
            await handle.wait(100)
            assert "In detail." in summaries(engine.views[-1])[0], "the second one, with what came since"
            assert engine.views[-1][-1] == messages[-1]
            view = await session.commit([*messages, A("well"), H(f"{word}, then")])
            assert ("In detail." in summaries(view)[0]) is warm
            assert session.receipts[0].warm is warm
            assert engine.calls == (["committed True"] if warm else ["discarded"])

    run()


# -- stores --------------------------------------------------------------------------------------------------------


@virtual
async def test_another_process_commits_what_was_chosen() -> None:
    """The store names the chosen one alone: after a restart the view is the same, and nothing is asked again."""
    store = FlakyStore()
    transform, brief, full = brief_and_long()
    messages = chat(13)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=policy_of(transform))
        await ready(session, messages)
        messages.append(H("in detail"))
        view = await session.commit(messages)
        saved = session.saved()
        await settle(1)
    calls = brief.calls, full.calls
    async with make_runtime(store=store) as runtime:
        again = runtime.session("s", policy=policy_of(transform))
        assert await again.commit(list(messages)) == view
        copy = runtime.session("elsewhere", policy=policy_of(transform))
        copy.restore(saved)
        assert await copy.commit(list(messages)) == view
        assert (brief.calls, full.calls) == calls and again.receipts[0].how == "salvaged"


@virtual
async def test_an_uncommitted_one_is_found_with_all_its_candidates() -> None:
    """A process that died before the commit: the next one finds the work done, and chooses by its own future."""
    store = FlakyStore()
    transform, brief, full = brief_and_long()
    messages = chat(13)
    async with make_runtime(store=store) as runtime:
        await ready(runtime.session("s", policy=policy_of(transform)), messages)
        await settle(1)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=policy_of(transform))
        handle = await ready(session, messages)
        assert handle.flight.from_store and brief.calls == full.calls == 1
        assert "In detail." in summaries(await session.commit([*messages, H("in detail")]))[0]
        assert runtime.counters.wasted_tokens == 0, "the other process paid"


@virtual
async def test_an_artifact_with_candidates_survives_the_store() -> None:
    """Written and read back it is the same; a corrupt candidate makes the whole corrupt."""
    transform = Speculate([short(FakeSummarizer("fail"), model_id="a"), *brief_and_long()[0].transforms], by_words)
    async with make_runtime() as runtime:
        handle = await ready(runtime.session("s", policy=policy_of(transform)), chat(13))
        artifact = handle.flight.artifact
        back = load_artifact(CODEC, dump_artifact(CODEC, artifact))
        assert [a is None for a in back.alternatives] == [True, False, False]
        for mine, theirs in zip(artifact.alternatives[1:], back.alternatives[1:], strict=True):
            assert mine.key == theirs.key and mine.replacement == theirs.replacement and mine.tokens == theirs.tokens
        assert len({a.key for a in artifact.alternatives[1:]} | {artifact.key}) == 3


# -- configuration -------------------------------------------------------------------------------------------------


class Prophet:
    """A transform that says that it depends on the future."""

    name = "prophet"
    locality = Locality.FUTURE
    fingerprint = "prophet"
    keep = KEEP

    async def apply(self, request: TransformRequest) -> Rewrite:
        """One line."""
        return Rewrite(messages=[request.codec.summary("It will be so.")])


async def test_a_future_transform_may_only_be_a_candidate() -> None:
    """Anywhere else it is a mistake that is said at once."""
    sizes: dict[str, Any] = {"trigger": ("messages", 4), "hard_limit": ("messages", 99), "land_at": ("messages", 2)}
    for wrong in (Prophet(), Chain(Offload(), Prophet()), Chain(brief_and_long()[0], KeepRecent())):
        with pytest.raises(ConfigurationError, match="'future'"):
            Policy(wrong, **sizes)
    async with Runtime() as runtime:
        session = runtime.session("s", policy=Policy(Speculate([KeepRecent(), Prophet()], by_words), **sizes))
        with pytest.raises(ConfigurationError, match="'future'"):
            session.schedule_transform(Prophet(), chat(4))


@pytest.mark.parametrize(
    ("candidates", "options", "match"),
    [
        ([], {}, "two or more"),
        ([KeepRecent()], {}, "two or more"),
        ("ab", {}, "two or more"),
        ([KeepRecent(), "summarize"], {}, r"candidates\[1\]"),
        ([KeepRecent(), Isolate(instruction="x")], {}, "cannot be a candidate"),
        ([KeepRecent(), brief_and_long()[0]], {}, "cannot be a candidate"),
        ([KeepRecent(), KeepRecent()], {"choose": 1}, "choose=1"),
        ([KeepRecent(), KeepRecent()], {"budget_tokens": -1}, "budget_tokens"),
        ([KeepRecent(), KeepRecent()], {"budget_tokens": True}, "budget_tokens"),
        ([KeepRecent(), Summarize(FakeModel(), source="raw")], {}, "source"),
    ],
)
def test_wrong_options_name_themselves(candidates: Any, options: dict[str, Any], match: str) -> None:
    """At construction."""
    with pytest.raises(ConfigurationError, match=match):
        Speculate(candidates, **{"choose": by_words, **options})


async def test_what_it_is_called_by() -> None:
    """Its fingerprint is that of its candidates, in order; the choice and the budget change nothing of them."""
    one, two = short(FakeModel(), model_id="1"), short(FakeModel(), model_id="2")
    prints = [
        Speculate([one, two], by_words).fingerprint,
        Speculate([one, two], boom, budget_tokens=5).fingerprint,
        Speculate([two, one], by_words).fingerprint,
        Speculate([one, short(FakeModel())], by_words).fingerprint,
    ]
    assert prints[0] == prints[1] != prints[2] and prints[3] is None and prints[0] is not None
    transform = Speculate([one, two], by_words, keep=("messages", 9))
    assert transform.keep == ("messages", 9) and Speculate([one, two], by_words).keep == KEEP
    assert transform.locality is Locality.FUTURE and "Summarize" in repr(transform)
    assert (await check_locality(transform)).runs == 0, "nothing can be checked of what may depend on anything"


async def test_refused_by_a_validator_of_ones_own() -> None:
    """The user's validators see each candidate by itself."""

    def no_brief(request: TransformRequest, rewrite: Rewrite) -> bool:
        return "Brief." not in str(rewrite.text)

    @virtual
    async def run() -> None:
        transform, _, _ = brief_and_long(lambda since, candidates: 0)
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=policy_of(transform, validators=[no_brief]))
            messages = chat(13)
            await ready(session, messages)
            assert "In detail." in summaries(await session.commit([*messages, H("x")]))[0]

    await asyncio.to_thread(run)


# -- properties ----------------------------------------------------------------------------------------------------


@given(
    st.integers(4, 9),
    st.booleans(),
    st.lists(st.sampled_from(["fail", "answer", "empty", "long", "local"]), min_size=2, max_size=4),
    st.integers(-1, 4),
    st.lists(st.sampled_from(["question", "tools", "cut"]), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_property_views_are_valid_whatever_is_chosen(
    turns: int, tools: bool, modes: list[str], index: int, later: list[str]
) -> None:
    """Promises 1, 2 and 3: every view is a valid request, its untouched messages are the caller's own in order, and
    between commits it only grows."""

    async def run() -> None:
        members: list[Any] = [KeepRecent(KEEP) if m == "local" else short(FakeSummarizer(m)) for m in modes]
        transform = Speculate(members, lambda since, candidates: (index + len(since)) % (len(members) + 1))
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            session = runtime.session("s", policy=policy_of(transform, window=1500, min_savings=0.05))
            messages = tool_chat(turns) if tools else chat(2 * turns)
            before: list[Any] = []
            for k, kind in enumerate(["question", *later]):
                if kind == "cut":
                    del messages[-2:]
                if kind == "tools":
                    messages += [H(f"do {k}"), A(None, f"n{k}"), T(f"n{k}", "done", size=60), A("ok")]
                messages.append(H(f"question {k}", size=40))
                had = len(session.receipts)
                view = await session.commit(messages)
                assert not problems(view), problems(view)
                assert is_subsequence([m for m in view if any(m is x for x in messages)], messages)
                assert view[-1] is messages[-1]
                if kind != "cut" and len(session.receipts) == had and before:
                    assert view[: len(before)] == before
                before = view
                messages.append(A(f"answer {k}", size=40))
                session.observe(messages)
                await settle(5)
                before = before if kind != "cut" else []
            assert not events.of("error")
            coherent(session, runtime, live=int(session.lookahead is not None))

    run_virtual(run)
