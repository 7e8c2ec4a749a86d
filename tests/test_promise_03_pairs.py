"""Promise 3: no call without its results and no result without its call; system messages first and verbatim; then a
message that providers accept."""

from __future__ import annotations

import pytest

from helpers import (
    A,
    FakeSummarizer,
    H,
    Message,
    S,
    T,
    chat,
    make_policy,
    make_runtime,
    marks,
    problems,
    settle,
    summaries,
    tool_chat,
    valid_request,
    virtual,
)
from smoothctx.codec import USER_STUB


@pytest.mark.parametrize("calls", [1, 2, 4])
@pytest.mark.parametrize("keep", [1, 2, 3, 5, 8])
@virtual
async def test_promise_03_pairs_stay_together(calls: int, keep: int) -> None:
    """Wherever the cut would fall, every call stays with all its results; every view is a valid request."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=keep, window=3000, max_wait=5))
        whole = tool_chat(25, size=50, calls=calls)
        messages: list[Message] = []
        for m in whole:
            messages.append(m)
            if m["role"] == "user" or (m["role"] == "tool" and m["tool_call_id"].endswith(f"-{calls - 1}")):
                view = await session.commit(messages)
                assert not problems(view), problems(view)
                await settle(0.7)
        assert len(session.receipts) >= 2


@virtual
async def test_promise_03_system_messages_stay_first_and_verbatim() -> None:
    """Several system messages at the head stay what and where they are, under summaries and fallbacks."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, max_wait=1))
        head = [S("one"), {"role": "developer", "content": "two"}]
        messages = [*head, *chat(20, size=60, system=False)]
        view = await session.commit(messages)
        assert [r.how for r in session.receipts] == ["fallback"]
        assert view[0] is head[0] and view[1] is head[1]
        assert view[2]["role"] == "user"


@virtual
async def test_promise_03_a_system_message_inside_stays_word_for_word() -> None:
    """A later system message is the caller's instruction: it is never summarised away."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        inside = S("from now on speak French")
        messages = [*chat(6, size=60), inside, *chat(6, size=60, first=6, system=False)]
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert session.receipts and any(m is inside for m in view)


@virtual
async def test_promise_03_a_fallback_opens_with_a_user_message() -> None:
    """If what stays begins with an assistant, a one-line user message stands before it."""
    model = FakeSummarizer("hang")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=2, max_wait=0))
        messages = [S(), H("<1> do it", size=30)]
        for k in range(30):
            messages += [A(f"<{10 + k}> step", f"c{k}", size=40), T(f"c{k}", "r", size=40)]
        messages.append(H("<999> and now?"))
        view = await session.commit(messages)
        assert valid_request(view), problems(view)
        assert view[1]["role"] == "user"
        assert any(r.how == "fallback" for r in session.receipts)
        assert view[1]["content"] == USER_STUB or view[1] in messages


@virtual
async def test_promise_03_an_open_call_pins_everything_from_it_on() -> None:
    """A call that waits for a person is never summarised, nor is anything behind it, however long that takes."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=1, window=3000, overrun="raw"))
        ask = A("<500> may I?", "ask")
        messages = [*chat(12, size=60), H("<499> go"), ask, *[H(f"<{600 + k}> hint", size=60) for k in range(10)]]
        for _ in range(3):
            view = await session.commit(messages)
            await settle(5)
        assert session.receipts and len(summaries(view)) == 1
        assert any(m is ask for m in view)
        assert all(any(m is x for x in view) for m in messages[messages.index(ask) :])


@virtual
async def test_promise_03_an_old_call_without_result_blocks_nothing() -> None:
    """A call that never got its result is summarised like anything else once a newer answer is there."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = [*chat(2, size=60), A("<700> lost", "gone"), *chat(10, size=60, first=2, system=False)]
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert session.receipts and valid_request(view)
        assert all(valid_request(asked) for asked in model.inputs), [problems(i) for i in model.inputs]


@virtual
async def test_promise_03_orphans_are_passed_through_and_never_made_worse() -> None:
    """An orphan result in the history stays in the view, and is not part of what a summary covers."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        orphan = T("nobody", "<800> odd")
        messages = [*chat(3, size=60), orphan, *chat(9, size=60, first=3, system=False)]
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert session.receipts and any(m is orphan for m in view)
        assert len(problems(view)) <= len(problems(messages))
        assert all(valid_request(asked) for asked in model.inputs)


@pytest.mark.parametrize("ids", [("", ""), ("x", "x")], ids=["empty", "repeated"])
@virtual
async def test_promise_03_repeated_and_empty_ids_are_paired_by_order(ids: tuple[str, str]) -> None:
    """Servers that repeat call ids or leave them out: the cut still falls between whole groups."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=3))
        messages = [S()]
        for k in range(10):
            messages += [H(f"<{k}> q", size=40), A(f"<{100 + k}> a", *ids, size=40)]
            messages += [T(i, f"<{200 + 2 * k + j}> r", size=40) for j, i in enumerate(ids)]
            messages.append(A(f"<{300 + k}> so", size=40))
            view = await session.commit(messages)
            roles = [m["role"] for m in view]
            for i, role in enumerate(roles):
                if role == "tool":
                    assert roles[i - 1] in ("tool", "assistant")
                if view[i].get("tool_calls"):
                    assert roles[i + 1 : i + 3] == ["tool", "tool"]
            await settle(2)
        assert session.receipts


@virtual
async def test_promise_03_a_late_result_becomes_a_note() -> None:
    """The result of a call that was summarised away would be an orphan: the model reads it as a user's note."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        messages = [S(), H("<1> start"), A("<2> background job", "job"), *chat(12, size=60, first=5, system=False)]
        await session.commit(messages)
        await settle(5)
        await session.commit(messages)
        assert session.receipts
        messages += [T("job", "<900> it is done"), H("<901> next")]
        view = await session.commit(messages)
        assert valid_request(view), problems(view)
        assert 900 in marks(view)


@virtual
async def test_promise_03_a_half_streamed_message_is_neither_input_nor_boundary() -> None:
    """The message being streamed is passed through; nothing that is prepared depends on it."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=1))
        messages = chat(10, size=60)
        messages.append({**A("<950> half"), "status": "in_progress"})
        await session.commit(messages)
        await settle(5)
        messages[-1] = A("<950> half, now whole")
        view = await session.commit(messages)
        assert session.receipts and view[-1] is messages[-1]
        assert all(950 not in marks(asked) for asked in model.inputs)


@virtual
async def test_promise_03_thinking_of_older_turns_goes_with_a_rewritten_prefix() -> None:
    """Kept older turns lose their signed thinking whole; the open tool loop keeps it byte for byte."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model, keep=8))
        old = A("<960> thought", reasoning_content="signed")
        loop = A("<961> calling", "c", reasoning_content="signed too")
        messages = [*chat(9, size=60), H("<962> x"), old, H("<963> y"), loop, T("c", "<964> r")]
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert session.receipts
        assert any(m is loop for m in view)
        assert not any(m is old for m in view)
        assert next(m for m in view if "<960>" in (m["content"] or "")) == A("<960> thought")
        assert old["reasoning_content"] == "signed"
