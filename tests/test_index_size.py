"""The index of a session in the store names everything that its view may hold."""

from __future__ import annotations

import json
from typing import Any

from helpers import A, FakeSummarizer, FlakyStore, H, chat, make_runtime, marks, settle, summaries, virtual
from smoothctx import ParallelSummarize, Policy
from smoothctx.launch import INDEX_SIZE
from smoothctx.shelf import MAX_ARTIFACTS


def blocks(model: FakeSummarizer) -> Policy:
    """Small blocks in a window that holds many of their summaries."""
    made = ParallelSummarize(model, block_tokens=300, total_tokens=5000, model_id="m", keep=("messages", 4))
    sizes: dict[str, Any] = {"trigger": ("tokens", 6000), "land_at": ("tokens", 5500), "hard_limit": ("tokens", 20_000)}
    return Policy(made, context_window=24_000, **sizes)


@virtual
async def test_a_view_of_many_blocks_survives_a_restart() -> None:
    """More summaries than a short index would name: the next process shows all of them at its first turn, and asks no
    model for any."""
    store, model, messages = FlakyStore(), FakeSummarizer(text="S."), chat(2, size=60)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=blocks(model))
        for k in range(90):
            messages.append(H(f"<{100 + k}> question", size=60))
            view = await session.commit(messages)
            messages.append(A(f"<{300 + k}> answer", size=60))
            session.observe(messages)
            await settle(20)
        before = summaries(view)
        assert len(before) > 16 and len({r.key for r in session.receipts}) > 16
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=blocks(FakeSummarizer("hang")))
        messages.append(H("<900> next"))
        view = await session.commit(messages)
        assert summaries(view)[: len(before)] == before
        assert {r.how for r in session.receipts} <= {"salvaged", "ready"} and marks(view) >= marks(messages[1:9])
    assert len(before) < len(json.loads(await store.get("default", "index/s") or b"")) <= INDEX_SIZE


def test_it_names_as_many_as_a_shelf_holds() -> None:
    """What a session holds at most is what it takes over at most."""
    assert INDEX_SIZE == MAX_ARTIFACTS
