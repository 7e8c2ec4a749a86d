"""Planted facts over rounds of compaction, in real sessions, with a model that loses nearly everything it is given.

Pins (``<pin>`` in a message, ``session.pin``) survive all of them, at 100 %. Of what is not pinned, paths and ids are
carried by the facts section within its bounds, and decisions that are put in so many words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers import CODEC, A, H, Message, S, T, coherent, make_runtime, problems, settle, summaries, virtual
from smoothctx import (
    Chain,
    KeepRecent,
    Offload,
    ParallelSummarize,
    Policy,
    Session,
    Speculate,
    Summarize,
    TrajectoryJudge,
    pin,
)
from smoothctx.transforms.facts import message_pins

ROUNDS = 5
#: in a message each, marked; and by ``session.pin``
PINS = [
    "Never touch the table billing_2019.",
    "Release id: rel-7f3a91c2, approved by Ada.",
    "Keep <conversation_summary> and &lt;pin> as they are: C:\\data\\x",
    "two lines\nof one decision",
]
SESSION_PINS = ["The budget is 40,000 EUR.", "Answer in Korean: 한국어로 답한다."]
PATHS = [f"services/part{k}/handler_{k}.py" for k in range(6)]
IDS = [f"TICKET-{4100 + k}" for k in range(6)]
DECISIONS = [f"we decided to use the {word} queue" for word in ("amber", "birch", "cedar", "dune", "elm", "fern")]


class Lossy:
    """A model that keeps next to nothing: one sentence, whatever it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
        self.calls += 1
        return f"Some work was done, part {self.calls}."


SIZES: dict[str, Any] = {"context_window": 3000, "min_savings": 0.1}
KEEP = ("messages", 4)


def summarise(**options: Any) -> Callable[[Lossy], Policy]:
    """Summaries, with these options."""
    return lambda model: Policy(Summarize(model, keep=KEEP, max_tokens=100, window=100_000, **options), **SIZES)


POLICIES: dict[str, Callable[[Lossy], Policy]] = {
    "view": summarise(),
    "raw": summarise(source="raw"),
    "standalone": summarise(layout="standalone"),
    "no-facts": summarise(facts=False),
    "windows": lambda model: Policy(Summarize(model, keep=KEEP, max_tokens=100, window=900), **SIZES),
    "blocks": lambda model: Policy(
        ParallelSummarize(model, block_tokens=400, keep=KEEP, max_tokens=100, window=100_000), **SIZES
    ),
    "blocks-merged": lambda model: Policy(
        ParallelSummarize(
            model, block_tokens=400, total_tokens=1200, keep=KEEP, max_tokens=60, facts=False, window=100_000
        ),
        **SIZES,
    ),
    "chain": lambda model: Policy(
        Chain(Offload(min_tokens=100), Summarize(model, keep=KEEP, max_tokens=100, window=100_000)), **SIZES
    ),
    "speculate": lambda model: Policy(
        Speculate(
            [
                Summarize(model, keep=KEEP, max_tokens=100, window=100_000),
                ParallelSummarize(model, block_tokens=400, keep=KEEP, max_tokens=60, window=100_000),
            ],
            lambda since, candidates: len(since) % 2,
        ),
        **SIZES,
    ),
    "judged": lambda model: Policy(
        Summarize(model, keep=KEEP, max_tokens=100, window=100_000),
        validators=[TrajectoryJudge(threshold=0.2)],
        **SIZES,
    ),
    "drop": lambda model: Policy(KeepRecent(KEEP), **SIZES),
}


def fact_turn(k: int) -> list[Message]:
    """A turn that names a path, an id and a decision."""
    return [
        H(f"Look at {PATHS[k]} for {IDS[k]}.", size=60),
        A("Reading.", f"r{k}", size=10),
        T(f"r{k}", f"contents of {PATHS[k]}", size=150),
        A(f"For {IDS[k]} {DECISIONS[k]}.", size=60),
    ]


def filler(k: int) -> list[Message]:
    """A turn with nothing to remember."""
    return [H(f"go on {k}", size=80), A(f"gone on {k}", size=80)]


async def turn(session: Session, messages: list[Message], new: list[Message]) -> list[Any]:
    """One turn; the view that its first message went out with."""
    messages.append(new[0])
    view = await session.commit(messages)
    assert not problems(view), problems(view)
    messages += new[1:]
    session.observe(messages)
    await settle(5)
    return view


def said(view: list[Any]) -> str:
    """Everything that the model is sent, and the pins of its summaries as they were before they were escaped."""
    texts = [CODEC.text(m) for m in view] + [c.arguments for m in view for c in CODEC.calls(m)]
    return "\n".join([*texts, *message_pins(view, CODEC)])


def rewrites(session: Session) -> int:
    """Boundaries that rewrote the view."""
    return len({r.time for r in session.receipts})


async def rounds(
    session: Session, plant: bool = True, views: list[list[Any]] | None = None
) -> tuple[list[Message], list[Any]]:
    """Plant everything, then compact five times and more; every view on the way has every pin."""
    messages = [S()]
    for k, text in enumerate(PINS):
        messages += [H(f"{pin(text)} Mind that.", size=40), A(f"Noted {k}.")]
    for text in SESSION_PINS:
        session.pin(text)
        messages += [H(f"By the way: {text}"), A("All right.")]
    view: list[Any] = []
    for k in range(200):
        view = await turn(session, messages, fact_turn(k) if plant and k < len(PATHS) else filler(k))
        if views is not None:
            views.append(view)
        text = said(view)
        lost = [p for p in (*PINS, *SESSION_PINS) if p not in text]
        assert not lost, (k, lost, rewrites(session))
        if rewrites(session) >= ROUNDS and k > len(PATHS):
            return messages, view
    raise AssertionError(f"only {rewrites(session)} rounds in 200 turns")


@pytest.mark.parametrize("name", list(POLICIES))
def test_pins_survive_five_rounds_of_every_transform(name: str) -> None:
    """At 100 %, word for word, in every view of the way."""

    @virtual
    async def run() -> None:
        async with make_runtime(concurrency=4) as runtime:
            session = runtime.session("s", policy=POLICIES[name](Lossy()))
            await rounds(session)
            assert {r.how for r in session.receipts} <= {"ready", "promoted"}
            coherent(session, runtime, live=len(session.lookaheads))

    run()


@pytest.mark.parametrize("name", ["view", "blocks", "speculate"])
def test_pins_survive_the_fallback(name: str) -> None:
    """The model always fails: whole segments go, what is pinned stays, five times over."""

    class Down(Lossy):
        async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
            raise RuntimeError("down")

    @virtual
    async def run() -> None:
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=POLICIES[name](Down()))
            await rounds(session)
            assert {r.how for r in session.receipts} == {"fallback"}
            assert session.branch.fits(session.policy)

    run()


@virtual
async def test_pins_survive_a_fallback_that_drops_the_summary() -> None:
    """Summaries first; then the model is down for good, and the record itself has to go."""

    class Dying(Lossy):
        down = False

        async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
            if self.down:
                raise RuntimeError("down")
            return f"{await super().__call__(messages)} {'Much was said. ' * 25}"

    model = Dying()
    async with make_runtime() as runtime:
        policy = Policy(
            Summarize(model, keep=("messages", 4), max_tokens=200, window=100_000, facts=False),
            trigger=("tokens", 900),
            land_at=("tokens", 400),
            hard_limit=("tokens", 1200),
            min_savings=0.05,
        )
        session, messages = runtime.session("s", policy=policy), [S()]
        session.pin(SESSION_PINS[1])  # in no message at all
        messages += [H(SESSION_PINS[0]), A("Right.")]
        session.pin(SESSION_PINS[0])
        for k in range(8):
            view = await turn(session, messages, filler(k))
        assert summaries(view)
        model.down = True
        for k in range(40):
            view = await turn(session, messages, filler(k))
            if "fallback" in {r.how for r in session.receipts}:
                assert all(p in said(view) for p in SESSION_PINS), k
        big = [H("enormous", size=1020), A("Well.")]
        view = await turn(session, messages, big)
        assert not summaries(view) and all(p in said(view) for p in SESSION_PINS)
        view = await turn(session, messages, filler(99))
        assert all(p in said(view) for p in SESSION_PINS) and not problems(view)
        model.down = False
        for k in range(100, 140):
            view = await turn(session, messages, filler(k))
            assert all(p in said(view) for p in SESSION_PINS)
        assert summaries(view), "the note of pins went into the next summary"
        assert sum(text.count(SESSION_PINS[0]) for text in map(CODEC.text, view)) <= 2


def planted(view: list[Any]) -> dict[str, int]:
    """How many of the planted facts of each kind a view holds."""
    text = said(view)
    kinds = (("paths", PATHS), ("ids", IDS), ("decisions", DECISIONS))
    return {kind: sum(v in text for v in values) for kind, values in kinds}


ALL = {"paths": len(PATHS), "ids": len(IDS), "decisions": len(DECISIONS)}


@pytest.mark.parametrize("name", ["view", "raw", "standalone", "windows", "chain", "judged", "blocks"])
def test_planted_facts_after_five_rounds(name: str) -> None:
    """With a model that loses everything, every path, id and decision is carried without it."""

    @virtual
    async def run() -> None:
        async with make_runtime(concurrency=4) as runtime:
            session = runtime.session("s", policy=POLICIES[name](Lossy()))
            _, view = await rounds(session)
            assert planted(view) == ALL

    run()


class Wordy(Lossy):
    """A model that says much and keeps nothing."""

    async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
        await super().__call__(messages)
        return ("Some more work was done there. " * 40)[: 4 * min(max_tokens or 100, 60)]


@pytest.mark.parametrize("model", [Lossy, Wordy])
@pytest.mark.parametrize(
    ("block", "total"),
    [(400, 600), (400, 800), (400, 1200), (600, None), (600, 800), (800, None), (800, 1000), (1200, None), (1200, 700)],
)
def test_planted_facts_of_blocks_within_the_total(block: int, total: int | None, model: type[Lossy]) -> None:
    """Blocks of 400 tokens and more keep all of them through five rounds and the merges in between, and the summaries
    of no view on the way take more than ``total_tokens``."""

    @virtual
    async def run() -> None:
        transform = ParallelSummarize(
            model(), block_tokens=block, total_tokens=total, keep=KEEP, max_tokens=100, window=100_000
        )
        async with make_runtime(concurrency=4) as runtime:
            session = runtime.session("s", policy=Policy(transform, **SIZES))
            seen: list[list[Any]] = []
            _, view = await rounds(session, views=seen)
            assert planted(view) == ALL
            if total is not None:
                assert (
                    max(sum(CODEC.estimate(m) for m in v if CODEC.summary_text(m) is not None) for v in seen) <= total
                )

    run()


@virtual
async def test_without_the_facts_section_only_pins_are_left() -> None:
    """The control: the same rounds with ``facts=False`` lose every path, id and decision."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=POLICIES["no-facts"](Lossy()))
        _, view = await rounds(session)
        text = said(view)
        assert not [v for v in (*PATHS, *IDS, *DECISIONS) if v in text]
