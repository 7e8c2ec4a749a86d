"""Texts that are pinned when a lookahead has started: what it comes to, and what comes back later, carries them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers import (
    CODEC,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    chat,
    make_runtime,
    problems,
    settle,
    tool_chat,
    virtual,
)
from smoothctx import (
    HandleState,
    KStepOff,
    Locality,
    Offload,
    ParallelSummarize,
    Policy,
    Rewrite,
    Session,
    Speculate,
    Summarize,
    TransformRequest,
)

PIN = "Never touch the blue valve on Sundays, please."
KEEP = ("messages", 4)
RULES: list[Any] = ["ready", "hard_limit", KStepOff(2)]


def summarize(delay: float = 5.0, **options: Any) -> Summarize:
    """A summary that says nothing of the pin."""
    model = FakeSummarizer(delay=delay)
    return Summarize(model, keep=KEEP, facts=False, max_tokens=200, window=100_000, **options)


def speculate() -> Speculate:
    """Two of them."""
    return Speculate([summarize(), summarize()], lambda since, candidates: 1)


def blocks() -> ParallelSummarize:
    """One for each 300 tokens."""
    return ParallelSummarize(FakeSummarizer(delay=5.0), block_tokens=300, facts=False, keep=KEEP, window=100_000)


def history(turns: int = 13) -> list[Message]:
    """What is to be pinned stands in the oldest message."""
    messages = chat(turns)
    messages[1] = H(f"<0> {PIN}", size=50)
    return messages


def standing(view: list[Message]) -> int:
    """How many messages of the view have the pinned text."""
    return sum(PIN in CODEC.text(m) for m in view)


async def turns(session: Session, messages: list[Message], count: int = 8) -> list[int]:
    """So many more turns; how often the pin stands in each view. Between commits the view only grows at its end."""
    found: list[int] = []
    before: list[Message] = []
    for _ in range(count):
        rewrites = len(session.receipts)
        view = await session.commit(messages)
        assert not problems(view)
        if len(session.receipts) == rewrites:
            assert view[: len(before)] == before
        found.append(standing(view))
        before = view
        messages += chat(1, first=len(messages), system=False)
        session.observe(messages)
        await settle(10)
    return found


@pytest.mark.parametrize("transform", [summarize, speculate, blocks])
@pytest.mark.parametrize("commit", RULES, ids=str)
def test_a_text_pinned_while_a_lookahead_runs_is_not_lost(transform: Callable[[], Any], commit: Any) -> None:
    """Whatever the rule, and whether it was ready, or waited for at the hard limit: the pin stays in every view."""

    @virtual
    async def run() -> None:
        async with make_runtime() as runtime:
            policy = Policy(transform(), context_window=2000, commit=commit)
            session, messages = runtime.session("s", policy=policy), history()
            session.observe(messages)
            await settle(1)
            session.pin(PIN)
            await settle(10)
            found = await turns(session, messages, 30)
            assert min(found) >= 1, found
            assert {r.how for r in session.receipts} & {"ready", "promoted"}

    run()


@virtual
async def test_without_a_new_pin_there_is_no_note() -> None:
    """A pin that was there from the start, or that stands elsewhere in the view, adds nothing."""
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=Policy(summarize(), context_window=2000)), history()
        session.pin("another text, pinned in time")
        handle = session.observe(messages)
        assert handle is not None
        messages.append(H(f"once more: {PIN}"))
        session.pin(PIN)
        await handle.wait(100)
        view = await session.commit(messages)
        assert len(session.receipts) == 1 and standing(view) == 1
        assert len([m for m in view if CODEC.summary_text(m) is None]) == len(view) - 1
        assert "<pin>" not in "".join(CODEC.text(m) for m in view if CODEC.summary_text(m) is None)


@virtual
async def test_a_pin_that_stands_nowhere_is_carried_by_a_summary_all_the_same() -> None:
    """As it would have been if it had been there when the summary was begun."""
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=Policy(summarize(), context_window=2000)), chat(13)
        handle = session.observe(messages)
        assert handle is not None
        session.pin(PIN)
        await handle.wait(100)
        assert standing(handle.commit(messages)) == 1
        assert session.receipts[-1].tokens_after < session.receipts[-1].tokens_before


class Halve:
    """Drops all but the last message of what it is given, without writing anything."""

    name, locality, fingerprint = "halve", Locality.PREFIX, "halve"

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Nothing of a pin that stands in no message is its business."""
        return Rewrite(messages=list(request.messages[-1:]))


@pytest.mark.parametrize(("stands", "expected"), [(True, 1), (False, 0)])
def test_what_writes_nothing_keeps_what_stood_there(stands: bool, expected: int) -> None:
    """A transform that only drops messages loses no pinned text, and need not add one that stood nowhere."""

    @virtual
    async def run() -> None:
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=Policy(Halve(), context_window=2000, min_savings=0))
            messages = history() if stands else chat(13)
            handle = session.observe(messages)
            assert handle is not None and await handle.wait(100) is HandleState.READY
            session.pin(PIN)
            view = await session.commit(messages)
            assert len(session.receipts) == 1 and not problems(view) and standing(view) == expected

    run()


@virtual
async def test_what_comes_back_with_its_branch_carries_later_pins() -> None:
    """A commit whose branch was left and comes back, in this session and in a fork of it."""
    async with make_runtime() as runtime:
        session, messages = runtime.session("s", policy=Policy(summarize(), context_window=2000)), history()
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait(100)
        assert standing(await session.commit(messages)) == 0
        other = [*messages[:1], H("something else")]
        await session.commit(other)
        session.pin(PIN)
        view = await session.commit(messages)
        assert session.receipts[-1].how == "salvaged" and standing(view) == 1 and not problems(view)
        again = await session.commit(messages)
        assert again == view
        fork = session.fork("f")
        assert standing(await fork.commit(messages)) == 1


@virtual
async def test_what_another_process_left_carries_the_pins_of_this_one() -> None:
    """Committed there (`saved`), or only ready there: the store's result was made without the pin."""
    store = FlakyStore()
    sizes: dict[str, Any] = {"trigger": ("messages", 12), "hard_limit": ("messages", 40), "land_at": ("messages", 6)}
    messages = history(8)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=Policy(summarize(model_id="m"), **sizes))
        await session.commit(messages)
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait(100)
        await runtime.aclose(drain=True)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=Policy(summarize(model_id="m"), **sizes))
        session.pin(PIN)
        messages.append(H("and now?"))
        view = await session.commit(messages)
        assert [r.how for r in session.receipts] == ["ready"] and standing(view) == 1
        saved = session.saved()
    async with make_runtime() as runtime:  # as it was committed, with its note
        session = runtime.session("s", policy=Policy(summarize(model_id="m"), **sizes))
        session.restore(saved)
        assert await session.commit(messages) == view


@virtual
async def test_a_stub_that_lost_a_later_pin_does_not_come_back() -> None:
    """Nothing can stand between a call and what stands for its result: it is made anew, with the pin."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        policy = Policy(summarize(), context_window=20_000, max_message_tokens=100)
        session, messages = runtime.session("s", policy=policy), tool_chat(1, calls=1)
        messages[3]["content"] = "word " * 300 + PIN + " word" * 300
        assert standing(await session.commit(messages)) == 0
        await session.commit([*messages[:1], H("something else")])
        session.pin(PIN)
        view = await session.commit(messages)
        assert not problems(view) and standing(view) == 1
        assert not events.of("view.salvaged")


@virtual
async def test_offloading_keeps_what_was_pinned_meanwhile() -> None:
    """A result that was offloaded in the background before its text was pinned."""
    async with make_runtime() as runtime:
        policy = Policy(Offload(min_tokens=100), context_window=2000, land_at=("fraction", 0.3), min_savings=0)
        session, messages = runtime.session("s", policy=policy), tool_chat(4, calls=1)
        messages[3]["content"] = "word " * 600 + PIN + " word" * 600
        handle = session.observe(messages)
        assert handle is not None and await handle.wait(100) is HandleState.READY
        session.pin(PIN)
        view = await session.commit(messages)
        assert len(session.receipts) == 1 and not problems(view) and standing(view) == 1
