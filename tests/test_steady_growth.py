"""Steady growth with ready results: what was paid for is committed, whatever the raw size of what is sent as a stub."""

from __future__ import annotations

import pytest

from helpers import A, Events, FakeSummarizer, H, Message, S, T, make_runtime, settle, summaries, virtual
from smoothctx import Policy, Session, Summarize

TRIGGER, TURN = 16, 5  # messages at which a lookahead starts, and that a turn adds


def policy(model: FakeSummarizer) -> Policy:
    """Sizes in messages; results of more than 300 tokens are offloaded on entry."""
    return Policy(
        Summarize(model, keep=("messages", 6), facts=False),
        trigger=("messages", TRIGGER),
        hard_limit=("messages", 60),
        land_at=("messages", 12),
        max_message_tokens=300,
    )


async def turns(session: Session, count: int, *, size: int) -> list[int]:
    """``count`` turns with two tool results of ``size`` tokens each, and time between; messages sent at each call."""
    messages: list[Message] = [S()]
    sent: list[int] = []
    for k in range(count):
        messages.append(H(f"<{k}> question", size=20))
        sent.append(len(await session.commit(messages)))
        messages.append(A("calling", f"a{k}", f"b{k}"))
        session.observe(messages)
        messages += [T(f"a{k}", f"result a{k}", size=size), T(f"b{k}", f"result b{k}", size=size)]
        sent.append(len(await session.commit(messages)))
        messages.append(A("done"))
        session.observe(messages)
        await settle(60)
    return sent


@pytest.mark.parametrize("size", [20_000, 2_000, 200, 40])
@virtual
async def test_ready_results_are_committed_on_steady_growth(size: int) -> None:
    """At most one in a row is outgrown, and the view stays under the trigger but for what a turn or two add."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=policy(model := FakeSummarizer(delay=0)))
        sent = await turns(session, 30, size=size)
        ends = [e.name for e in events if e.name in ("lookahead.committed", "lookahead.discarded")]
        assert (
            max(sent) <= TRIGGER + 2 * TURN and max(sent[20:]) <= TRIGGER + TURN
        )  # what pays shows in the first round
        assert model.calls >= 8 and ends.count("lookahead.committed") >= 0.75 * len(ends)
        assert ("lookahead.discarded", "lookahead.discarded") not in zip(ends, ends[1:], strict=False)
        assert runtime.counters.fallbacks == 0 and bool(events.of("message.offloaded")) == (size > 300)


@virtual
async def test_what_stands_behind_a_commit_counts_as_it_is_sent() -> None:
    """A commit re-bills the stubs behind it, not the results that they stand for; growth is of what is sent, too."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy(FakeSummarizer("hang")))
        await turns(session, 3, size=20_000)
        handle = session.lookahead
        assert handle is None or not summaries(session.branch.frozen())
        assert 0 < session.growth() < 2_000
        assert session.branch.tokens < 3_000 < session.branch.history.tokens[-1]


@virtual
async def test_rewrite_mode_keeps_a_lookahead_that_its_stubs_do_not_touch() -> None:
    """The caller's list takes on the stubs of each turn: a lookahead on what stands before them is still wanted."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=policy(FakeSummarizer(delay=20)))
        messages: list[Message] = [S()]
        for k in range(40):
            messages = [*await session.commit([*messages, H(f"<{k}> question", size=20)]), A("calling", f"a{k}")]
            session.observe(messages)
            messages = [*await session.commit([*messages, T(f"a{k}", f"result {k}", size=2_000)]), A("done")]
            session.observe(messages)
            await settle(60)
        assert len(events.of("view.rebased")) > 30
        assert runtime.counters.committed >= 5 and runtime.counters.stale.get("superseded", 0) <= 1
        assert session.branch.messages <= TRIGGER + 3 * 4
