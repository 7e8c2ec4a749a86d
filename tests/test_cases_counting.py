"""Token counting: what a trigger and a limit look at.

Rows of this class that are not here: B100, B101, B105, B107 are the codec's, in ``test_codec``; here they are seen
from a session.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from driving import fast
from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    S,
    T,
    chat,
    make_policy,
    make_runtime,
    settle,
    summaries,
    valid_request,
    virtual,
)
from smoothctx import ConfigurationError, OpenAIMessages, Policy, Summarize

CODEC = OpenAIMessages()
TOOLS = [{"type": "function", "function": {"name": f"tool_{k}", "description": "words " * 100}} for k in range(30)]


async def starts(messages: list[Message], **options: Any) -> bool:
    """Does a policy start a lookahead for these messages?"""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast(), **options))
        return session.observe(messages) is not None


@virtual
async def test_b99_reserved_tokens_count_towards_the_trigger_and_the_limit() -> None:
    """Tool schemas of 20,000 tokens beside a history of 5,000: over the trigger, and under the limit after it."""
    messages = chat(50, size=50)
    options: dict[str, Any] = {
        "window": 40_000,
        "trigger": ("tokens", 15_000),
        "hard_limit": ("tokens", 24_000),
        "land_at": ("tokens", 14_000),
    }
    assert not await starts(messages, **options)
    reserved = sum(len(json.dumps(t)) for t in TOOLS) // 4
    assert reserved > 4_000
    async with make_runtime() as runtime:
        session = runtime.session(
            "s",
            policy=make_policy(
                fast(),
                reserved_tokens=20_000,
                land_at=("tokens", 22_000),
                trigger=("tokens", 23_000),
                hard_limit=("tokens", 24_000),
                window=40_000,
                min_savings=0.05,
            ),
        )
        view = await session.commit(messages)
        assert summaries(view)
        assert sum(map(CODEC.estimate, view)) + 20_000 <= 24_000


@virtual
async def test_b99_provider_usage_shows_what_is_not_in_the_messages() -> None:
    """Without ``reserved_tokens`` the provider's own count of a view that was sent brings the tool schemas in."""
    for told, started in ((0, False), (400, True)):
        messages = chat(8, size=50)
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=make_policy(fast(), window=2000))
            own = sum(map(CODEC.estimate, await session.commit(messages)))
            usage = {"prompt_tokens": own + told, "completion_tokens": 50}
            messages.append({**A("an answer"), "usage": usage})
            assert (session.observe(messages) is not None) is started


@virtual
async def test_promise_06_usage_of_an_earlier_session_is_not_of_the_raw_history() -> None:
    """A thread that goes on after a restart, an eviction or a close: the last reply was one to a view that is gone."""
    async with make_runtime() as runtime:
        policy = make_policy(fast(), window=2000)
        messages = [*chat(60, size=50), {**A("an answer"), "usage": {"prompt_tokens": 500, "completion_tokens": 9}}]
        session = runtime.session("s", policy=policy)
        for k in range(3):
            messages.append(H(f"go on {k}"))
            view = await session.commit(messages)
            assert sum(map(CODEC.estimate, view)) <= 0.85 * 2000 < sum(map(CODEC.estimate, messages))
            used = sum(map(CODEC.estimate, view)) // 2
            messages.append({**A("an answer"), "usage": {"prompt_tokens": used, "completion_tokens": 9}})
            session.observe(messages)
            assert session.branch.scale == pytest.approx(0.5, abs=0.05), "this one was to our view"


@virtual
async def test_b99_a_process_for_each_turn_counts_the_tools_too() -> None:
    """No view of its own was answered: the last report is its agent's, and what it has more is not in the messages."""
    messages, over = [S()], [False]
    for k in range(24):
        messages.append(H(f"<{k}>", size=100))
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=make_policy(fast(), window=10_000))
            view = await session.commit(messages)
            used = sum(map(CODEC.estimate, view)) + 6_000
            over.append(used > 8_500)
            assert not all(over[-2:]), "but for the turn after one whose view was cut, of which nothing was kept"
            messages.append({**A(f"<{k}>", size=100), "usage": {"prompt_tokens": used, "completion_tokens": 104}})
            session.observe(messages)
    assert sum(over) and len(messages) > 40


@virtual
async def test_promise_05_what_an_earlier_process_left_is_weighed_by_our_own_replies() -> None:
    """It is read after a first turn whose reply told the raw view's size: that is no report of the view with it."""
    store, messages = FlakyStore(), chat(50, size=100)
    async with make_runtime(store=store) as runtime:
        policy = make_policy(fast(), model_id="m", window=100_000, trigger=("tokens", 4000), keep=20)
        session = runtime.session("s", policy=policy)
        await session.commit(messages)
        await settle(5)
        assert summaries(await session.commit(messages))
        await settle(5)
    store.mode, store.delay = "slow", 0.05
    async with make_runtime(store=store) as runtime:
        policy = make_policy(FakeSummarizer("hang"), model_id="m", window=13_000, keep=20, max_wait=3)
        session = runtime.session("s", policy=policy)
        messages.append(H("next"))
        view = await session.commit(messages)
        used = int(0.45 * sum(map(CODEC.estimate, view)))
        messages.append({**A("ok"), "usage": {"prompt_tokens": used, "completion_tokens": 2}})
        session.observe(messages)
        await settle(1)
        messages.append(H("again", size=7000))
        view = await session.commit(messages)
        assert summaries(view) and [(r.how, r.waited_s) for r in session.receipts] == [("salvaged", 0.0)]
        assert session.branch.tokens == pytest.approx(0.45 * sum(map(CODEC.estimate, view)), rel=0.05)


@virtual
async def test_promise_06_usage_of_another_agent_says_nothing_of_this_view() -> None:
    """Agents that share a list of messages: what one read is not what the other is sent."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast(), window=20_000))
        messages: list[Message] = []
        for k in range(8):
            messages += [
                H(f"question {k}", size=50),
                {**A("found"), "usage": {"prompt_tokens": 18_000, "completion_tokens": 9}},
            ]
            view = await session.commit(messages)
            assert view == messages and session.branch.scale == pytest.approx(1.0, abs=0.5)
            own = sum(map(CODEC.estimate, view))
            messages.append({**A("ok"), "usage": {"prompt_tokens": own + 30, "completion_tokens": 3}})
            assert session.observe(messages) is None
        assert session.branch.tokens == pytest.approx(own + 33, abs=20)


@virtual
async def test_b104_without_usage_the_estimate_triggers() -> None:
    """``usage=None`` on every reply: the trigger fires all the same."""
    messages = chat(14, size=50)
    for message in messages:
        if message["role"] == "assistant":
            message["usage"] = None
    assert await starts(messages, window=2000)


@virtual
async def test_b100_a_picture_does_not_trigger() -> None:
    """One image of 400 KB is a fixed cost, not 100,000 tokens."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 100_000}}
    messages = [
        S(),
        H("q"),
        A("a"),
        {"role": "user", "content": [{"type": "text", "text": "look"}, image]},
        A("a"),
        H("q"),
    ]
    assert not await starts(messages, window=4000, keep=2)
    assert CODEC.estimate(messages[3]) < 2000


@virtual
async def test_b101_call_arguments_trigger() -> None:
    """Replies whose weight is all in call arguments fill the window like text."""
    arguments = json.dumps({"patch": "line of code " * 60})
    messages: list[Message] = [S()]
    for k in range(10):
        call = {"id": f"c{k}", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        messages += [H("q"), {"role": "assistant", "content": None, "tool_calls": [call]}, T(f"c{k}", "ok"), A("a")]
    assert await starts(messages, window=2000)


@pytest.mark.parametrize("option", ["trigger", "hard_limit", "land_at"])
def test_b106_a_fraction_of_an_unknown_window_is_refused_at_construction(option: str) -> None:
    """No silent guess of 170,000 tokens: the policy says which option needs what."""
    sizes: dict[str, Any] = {"trigger": ("tokens", 600), "hard_limit": ("tokens", 900), "land_at": ("tokens", 300)}
    Policy(Summarize(fast()), **sizes)
    with pytest.raises(ConfigurationError, match=rf"^{option}=\('fraction', 0.5\): a fraction needs context_window="):
        Policy(Summarize(fast()), **{**sizes, option: ("fraction", 0.5)})


@virtual
async def test_b106_a_small_window_is_respected() -> None:
    """A window of 32k: started at 60 %, never sent above 85 %."""
    messages: list[Message] = [S()]
    async with make_runtime() as runtime:
        session = runtime.session(
            "s", policy=Policy(Summarize(fast(), facts=False, max_tokens=500), context_window=32_000)
        )
        for k in range(60):
            messages.append(H(f"<{2 * k}>", size=500))
            view = await session.commit(messages)
            assert sum(map(CODEC.estimate, view)) <= 0.85 * 32_000
            messages.append(A(f"<{2 * k + 1}>", size=500))
            session.observe(messages)
            await settle(5)
        assert len(session.receipts) >= 2
        assert all(r.how == "ready" for r in session.receipts)


@virtual
async def test_b107_an_unknown_part_crashes_nothing() -> None:
    """A part of no known kind: an event names it, the messages go out as they are, and the session recovers."""
    events = Events()
    odd: Message = {"role": "user", "content": [{"type": "hologram", "data": object()}]}
    messages = [*chat(12, size=55), odd]
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        view = await session.commit(messages)
        assert view[-1] is odd
        assert session.observe(messages) is None
        await settle(5)
        view = await session.commit(messages)
        assert view[-1] is odd
        (event,) = events.of("message.unreadable")
        assert "messages[25].content[0]: unknown content part (type 'hologram')" in str(event.data["error"])
        messages[-1] = H("<900> better")
        assert session.observe(messages) is not None
        await settle(5)
        assert summaries(await session.commit(messages))


@virtual
async def test_b196_a_result_that_alone_exceeds_its_cap_is_shrunk_inside_its_pair() -> None:
    """A kept pair with a huge result: the result is offloaded on entry, call and result stay together."""
    messages = [H("<0>", size=300), A("<1>", "1"), T("1", "<2>", size=18_000)]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast(), window=2000, max_message_tokens=500))
        view = await session.commit(messages)
        assert valid_request(view)
        assert view[1] is messages[1]
        assert view[2]["tool_call_id"] == "1"
        assert sum(map(CODEC.estimate, view)) <= 1700
        again = await session.commit([*messages, A("<3> read"), H("<4> next")])
        assert [m["content"] for m in again[:3]] == [m["content"] for m in view]


@virtual
async def test_b53_usage_of_before_the_commit_does_not_trigger_again() -> None:
    """A manual commit, then a look at the old usage: it is the new view that counts, in view and in rewrite mode."""
    for rewrite in (False, True):
        model = fast()
        messages = chat(11, size=55)
        own = sum(map(CODEC.estimate, messages))
        messages[-1]["usage"] = {"prompt_tokens": own + 40, "completion_tokens": 60}
        async with make_runtime() as runtime:
            session = runtime.session("s", policy=make_policy(model))
            handle = session.schedule_transform("summarize", messages)
            await handle.wait()
            view = handle.commit(messages)
            assert summaries(view)
            held = list(view) if rewrite else messages
            for k in range(3):
                held = [*held, H(f"<{900 + k}>", size=20)]
                sent = await session.commit(held)
                assert session.observe(held) is None
                await settle(5)
                assert len(summaries(sent)) == 1
            assert model.calls == 1
            assert session.branch.tokens < own


@virtual
async def test_a_counter_of_ones_own_is_what_counts_and_is_additive() -> None:
    """``token_counter`` decides; it is asked about runs of messages and summed."""
    asked: list[int] = []

    def counter(messages: list[Message]) -> int:
        asked.append(len(messages))
        return 100 * len(messages)

    messages = chat(4, size=5)
    assert await starts([*messages, *chat(3, size=5, first=10, system=False)], token_counter=counter, window=2000)
    assert asked


@pytest.mark.parametrize(
    "counter",
    [
        lambda m: 1 / 0,
        lambda m: None,
        lambda m: "many",
        lambda m: float("nan"),
        lambda m: -1,
        lambda m: True,
        lambda m: asyncio.sleep(0),
    ],
)
@virtual
async def test_a_counter_that_fails_never_reaches_the_turn(counter: Any) -> None:
    """It raises or returns nonsense: one error event, and the estimate counts instead, up to the hard limit."""
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("hang"), token_counter=counter, max_wait=1))
        assert await session.commit(messages) == messages
        assert session.observe(messages) is not None
        messages += chat(12, size=55, first=50, system=False)
        view = await session.commit(messages)
        assert len(view) < len(messages) and session.branch.fits(session.policy)
    assert [e.data["where"] for e in events.of("error")] == ["token_counter"]


@virtual
async def test_a_counter_may_round() -> None:
    """A fraction of a token counts as one."""
    assert await starts(chat(12, size=5), token_counter=lambda m: 99.5 * len(m), window=2000)
    assert not await starts(chat(12, size=5), token_counter=lambda m: 0.5 * len(m), window=2000)
