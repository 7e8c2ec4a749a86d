"""What one process had ready, another one commits: turns that each run in a process of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    S,
    chat,
    make_runtime,
    marks,
    settle,
    summaries,
    virtual,
)
from smoothctx import FolderStore, ParallelSummarize, Policy, Receipt, Runtime, Store, Summarize
from smoothctx.launch import INDEX_SIZE
from smoothctx.shelf import MAX_PREPARED
from smoothctx.states import HandleState
from smoothctx.usage import Usage


def policy(model: FakeSummarizer, *, identity: str = "m", **options: Any) -> Policy:
    """Sizes in messages, and a model whose work is shared."""
    sizes: dict[str, Any] = {"trigger": ("messages", 12), "hard_limit": ("messages", 24), "land_at": ("messages", 6)}
    made = Summarize(model, keep=("messages", 4), facts=False, model_id=identity)
    return Policy(made, **{**sizes, **options})


async def process(
    store: Store, messages: list[Message], rule: Policy, *, events: Events | None = None, seconds: float = 60
) -> tuple[list[Message], list[Receipt]]:
    """One turn in a process of its own: the view that was sent, and the receipts. The reply is added."""
    async with make_runtime(store=store, on_event=events) as runtime:
        session = runtime.session("s", policy=rule)
        view = await session.commit(messages)
        messages.append(A(f"<{len(messages)}> answer", size=40))
        session.observe(messages)
        await settle(seconds)
        await runtime.aclose(drain=True)
        receipts = list(session.receipts)
        assert runtime.counters.committed == sum(r.how in ("ready", "promoted") for r in receipts)
    return view, receipts


@virtual
async def test_one_turn_a_process_pays_for_one_summary_a_commit() -> None:
    """The next process commits what the last one had ready, as a ready result, and pays for nothing twice."""
    store, model = FlakyStore(), FakeSummarizer()
    model.usage = Usage(input_tokens=100, output_tokens=10, calls=1)
    messages, ready, most = [S()], 0, 0
    for k in range(60):
        messages.append(H(f"<{len(messages)}> question", size=40))
        view, receipts = await process(store, messages, policy(model))
        most = max(most, len(view))
        assert marks(view) == marks(messages[:-1]), f"turn {k}"
        for receipt in receipts:
            ready += receipt.how == "ready"
            assert receipt.how in ("ready", "salvaged") and receipt.waited_s == 0
            assert receipt.usage == Usage() and receipt.tokens_after < receipt.tokens_before
    assert most <= 14 and ready >= 10
    assert ready <= model.calls <= ready + 1


def test_a_folder_is_such_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on disk, with a store and a loop of its own in each process, and threads that read and write."""
    monkeypatch.setattr("smoothctx.launch.STORE_WAIT", 30.0)  # a slow machine reads as well
    model, messages = FakeSummarizer(delay=0), [S()]

    async def turn() -> list[str]:
        async with Runtime(store=FolderStore(tmp_path)) as runtime:
            session = runtime.session("s", policy=policy(model))
            await session.commit(messages)
            messages.append(A("answer", size=40))
            session.observe(messages)
            await runtime.aclose(drain=True)
            return [r.how for r in session.receipts]

    came: list[str] = []
    for _ in range(20):
        messages.append(H("question", size=40))
        came += asyncio.run(turn())
    assert came.count("ready") >= 2 and set(came) <= {"ready", "salvaged"}
    assert model.calls <= came.count("ready") + 1


async def prepared(store: Store, model: FakeSummarizer) -> list[Message]:
    """A history whose summary is ready in the store and was never committed."""
    messages = [S(), *chat(6, size=40, system=False), H("<50> question", size=40)]
    await process(store, messages, policy(model))
    assert model.calls == 1 and b"[[" in (await store.get("default", "index/s") or b"")
    return [*messages, H("<60> next", size=40)]


@virtual
async def test_an_edited_history_never_uses_what_was_prepared_for_another() -> None:
    """Nor does a shorter one; and it is still there when the old list comes back."""
    store, model = FlakyStore(), FakeSummarizer()
    messages = await prepared(store, model)
    edited = [*messages[:3], H("<700> edited", size=40), *messages[4:]]
    hanging = FakeSummarizer("hang")
    for other in (edited, messages[:5], [S("another agent"), *messages[1:]]):
        async with make_runtime(store=store) as runtime:
            session = runtime.session("s", policy=policy(hanging))
            assert await session.commit(other) == other and not session.receipts
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=policy(hanging))
        await session.commit(edited)
        assert session.lookahead is not None
        session.lookahead.discard()
        assert summaries(await session.commit(messages)) and session.receipts[-1].how == "ready"


@virtual
async def test_another_transform_does_not_commit_it() -> None:
    """It is this policy's own work that goes on: another model's summary is none."""
    store = FlakyStore()
    messages = await prepared(store, FakeSummarizer())
    view, receipts = await process(store, list(messages), policy(FakeSummarizer("hang"), identity="other"))
    assert view == messages and not receipts


@virtual
async def test_it_is_committed_by_the_rules_of_the_policy() -> None:
    """Under ``commit="hard_limit"`` it stays ready, and nothing is paid for a second time; at the limit it goes in."""
    store, model = FlakyStore(), FakeSummarizer()
    messages = await prepared(store, model)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=policy(FakeSummarizer("hang"), commit="hard_limit"))
        assert await session.commit(messages) == messages
        assert session.lookahead is not None and session.lookahead.state is HandleState.READY
        longer = [*messages, *chat(6, size=40, first=100, system=False)]
        assert summaries(await session.commit(longer))
        assert [(r.how, r.waited_s) for r in session.receipts] == [("ready", 0)]


@virtual
async def test_what_was_dropped_is_no_other_process_s_to_commit() -> None:
    """A result that its owner discarded is not named any more."""
    store, model = FlakyStore(), FakeSummarizer()
    messages = chat(8, size=40)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=policy(model))
        await session.commit(messages)
        await settle(10)
        assert session.lookahead is not None and session.lookahead.state is HandleState.READY
        session.lookahead.discard()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=policy(FakeSummarizer("hang")))
        messages += [H("<90> next", size=40)]
        assert await session.commit(messages) == messages


@virtual
async def test_the_index_is_bounded() -> None:
    """However many results were ready and never committed, and whatever else stands in it."""
    store, model = FlakyStore(), FakeSummarizer()
    for k in range(3 * MAX_PREPARED):
        messages = [S(f"agent {k}"), *chat(8, size=40, system=False)]
        await process(store, messages, policy(model, commit="hard_limit"))
    index = json.loads(await store.get("default", "index/s") or b"")
    assert len(index) <= MAX_PREPARED and all(isinstance(e, list) for e in index)
    junk = [*index, ["k"], ["k", 5, 3, []], ["k", 0, 9, "x"], ["k", True], {"a": 1}, None, 7, *["gone"] * 100]
    await store.put("default", "index/s", json.dumps(junk).encode())
    events = Events()
    view, receipts = await process(store, [*messages, H("<80> next", size=40)], policy(model), events=events)
    assert summaries(view) and [r.how for r in receipts] == ["ready"] and not events.of("error")
    assert len(json.loads(await store.get("default", "index/s") or b"")) <= INDEX_SIZE + MAX_PREPARED


@virtual
async def test_an_index_that_could_not_be_read_is_not_written_over() -> None:
    """A store too slow for the first commit: what it names is still named afterwards, beside what came since."""
    store, model = FlakyStore(), FakeSummarizer()
    await prepared(store, model)
    before = json.loads(await store.get("default", "index/s") or b"")
    store.mode, store.delay = "slow", 1.0
    view, receipts = await process(store, chat(8, size=40, first=300), policy(model), seconds=600)
    store.mode = None
    assert not summaries(view) and not receipts and model.calls == 2
    after = json.loads(await store.get("default", "index/s") or b"")
    assert len(after) == 2 and all(entry in after for entry in before)


@virtual
async def test_blocks_that_were_ready_are_committed_by_the_next_process() -> None:
    """A transform that works in blocks finds them without asking a model again."""
    store, model = FlakyStore(), FakeSummarizer()

    def blocks(model: FakeSummarizer) -> Policy:
        made = ParallelSummarize(model, block_tokens=300, model_id="m", keep=("messages", 4))
        return Policy(made, context_window=2000)

    messages, paid = chat(10, size=60), 0
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=blocks(model))
        await session.commit(messages)
        await settle(60)
        paid = model.calls
        assert paid >= 2 and not session.receipts
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=blocks(model))
        messages += chat(1, size=60, first=50, system=False)
        view = await session.commit(messages)
        assert {r.how for r in session.receipts} == {"ready"} and marks(view) >= marks(messages[1:9])
        assert model.calls == paid
