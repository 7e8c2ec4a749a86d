"""A branch: what a rewrite requires of the messages around it, and what it leaves alone."""

from __future__ import annotations

import pytest

from driving import small_policy
from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    S,
    T,
    make_runtime,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import Immediate, Offload, OpenAIMessages, Policy, Reason, Salvage, StaleHandle
from smoothctx.branch import Branch
from smoothctx.codec import USER_STUB
from smoothctx.view import Artifact, Edit, Replacement

CODEC = OpenAIMessages()


def replaced(branch: Branch, start: int, end: int, *shown: object) -> Artifact:
    """An artifact that puts ``shown`` in place of ``[start, end)``."""
    chain = branch.history.chain
    edit = Edit(start=start, end=end, messages=shown, tokens=branch.history.count(shown))
    made = Replacement(start=start, end=end, start_digest=chain[start], end_digest=chain[end], edits=(edit,))
    return Artifact(key=f"{start}-{end}", transform="test", replacement=made)


def test_an_edit_further_down_leaves_the_head_as_it_was_sent() -> None:
    """A history that opens with an assistant gets a user message when its head is rewritten, and only then."""
    messages = [S(), A("first", "1"), T("1", "big", size=400), A("second"), H("now")]
    branch = Branch(CODEC, None)
    branch.sync(messages)
    branch.apply(replaced(branch, 2, 3, T("1", "small")), messages)
    assert branch.project(messages) == [*messages[:2], T("1", "small"), *messages[3:]]
    branch.apply(replaced(branch, 1, 3), messages)
    assert branch.project(messages) == [messages[0], H(USER_STUB), *messages[3:]]
    shorter = [*messages[:2], H("edited")]
    branch.sync(shorter)
    assert branch.project(shorter) == shorter


@virtual
async def test_an_offloaded_entry_changes_nothing_that_was_sent() -> None:
    """The prefix cache holds when one oversized result is put away in a history without a user message."""
    async with make_runtime(store=FlakyStore()) as runtime:
        policy = Policy(Offload(min_tokens=10_000), context_window=50_000, max_message_tokens=100)
        session = runtime.session("s", policy=policy)
        messages = [S(), A("first", "1"), T("1", "small"), A("second", "2")]
        before = await session.commit(messages)
        messages.append(T("2", "big", size=400))
        view = await session.commit(messages)
        assert view[:4] == before and CODEC.estimate(view[4]) < 200


@virtual
async def test_an_oversized_entry_is_offloaded_though_it_was_observed_first() -> None:
    """What counts is that no view with it was sent yet; an edit of a sent message is an entry again."""
    async with make_runtime(store=FlakyStore()) as runtime:
        policy = Policy(Offload(min_tokens=10_000), context_window=50_000, max_message_tokens=100)
        session = runtime.session("s", policy=policy)
        messages = [H("go"), A("first", "1")]
        await session.commit(messages[:1])
        session.observe(messages)
        messages.append(T("1", "big", size=400))
        session.observe(messages)
        assert CODEC.estimate((await session.commit(messages))[2]) < 200
        messages[2] = T("1", "another", size=400)
        session.observe(messages)
        view = await session.commit(messages)
        assert "another" in view[2]["content"] and CODEC.estimate(view[2]) < 200
        assert await session.commit([*messages, A("done")]) == [*view, A("done")]


def test_a_summary_never_swallows_the_newest_question() -> None:
    """Cut back to where the run ends, the raw messages are the view; a longer history takes the summary again."""
    messages = [S(), H("one"), A("two"), H("three"), A("four")]
    branch = Branch(CODEC, None)
    branch.sync(longer := [*messages, H("five")])
    made = replaced(branch, 1, 4, H("sum"))
    branch.apply(made, longer)
    back = messages[:4]
    change, lost = branch.sync(back)
    assert change.diverged and [a.artifact for a in lost] == [made] and branch.project(back) == back
    assert branch.refusal(made) is Reason.BRANCH_DIVERGED
    branch.sync(messages)
    assert branch.refusal(made) is Reason.BRANCH_DIVERGED, "'three' is still the last question"
    branch.sync(longer)
    assert branch.refusal(made) is None
    branch.apply(made, longer)
    assert branch.project(longer) == [messages[0], H("sum"), *longer[4:]]


def test_a_replacement_that_leaves_the_last_question_as_it_is_holds() -> None:
    """A single question at the head of a long run of calls stays word for word, so the summary may stay beside it."""
    messages = [H("task"), A("", "1"), T("1"), A("", "2"), T("2"), A("", "3"), T("3")]
    branch = Branch(CODEC, None)
    branch.sync(messages)
    made = replaced(branch, 1, 5, H("sum"))
    assert branch.refusal(made) is None
    branch.apply(made, messages)
    assert branch.sync(messages[:6])[1] == [] and branch.project(messages[:6]) == [messages[0], H("sum"), messages[5]]
    assert [a.artifact for a in branch.sync(messages[:5])[1]] == [made], "the newest calls would be gone"


def test_a_late_result_that_joins_segments_across_the_cut_takes_nothing_back() -> None:
    """The newest segment then begins inside the run, but its newest messages are behind it."""
    messages = [H("go"), A("", "slow"), H("meanwhile"), A("yes"), H("and"), A("so")]
    branch = Branch(CODEC, None)
    branch.sync(messages)
    made = replaced(branch, 0, 4, H("sum"))
    branch.apply(made, messages)
    messages = [*messages, T("slow", "late")]
    branch.sync(messages)
    assert len(branch.history.segmenter.segments) == 2 and branch.refusal(made) is None
    assert branch.project(messages)[:3] == [H("sum"), *messages[4:6]]


def test_an_offloaded_entry_stays_where_it_is_the_newest() -> None:
    """Its stub stands for it: nothing is swallowed."""
    messages = [H("go"), A("", "1"), T("1", "big", size=400), A("done")]
    branch = Branch(CODEC, None)
    branch.sync(messages)
    branch.apply(replaced(branch, 2, 3, T("1", "small")), messages)
    assert branch.sync(messages[:3])[1] == [] and branch.project(messages[:3])[2] == T("1", "small")


@pytest.mark.parametrize("discard", [Salvage(), Immediate()], ids=["salvage", "immediate"])
@virtual
async def test_regenerate_keeps_the_question_and_then_takes_the_summary_again(discard: Salvage | Immediate) -> None:
    """The user takes the last message back, then writes it again: one model call in all."""
    model, events = FakeSummarizer(), Events()
    async with make_runtime(on_event=events) as runtime:
        policy = small_policy(
            model, trigger=("messages", 10), keep=("messages", 0), land_at=("messages", 1), discard=discard
        )
        session = runtime.session("s", policy=policy)
        messages = [m for k in range(4) for m in (H(f"<{2 * k}> q", size=60), A(f"<{2 * k + 1}> a", size=60))]
        messages += [H("<90> the question", size=60), H("<91> and this", size=60)]
        await session.commit(messages)
        await settle(5)
        there = await session.commit(messages)
        (applied,) = session.branch.applied
        assert applied.artifact.replacement.end == 9 and summaries(there)
        back = messages[:9]
        assert same_objects(await session.commit(back), back)
        assert [e.data["reason"] for e in events.of("view.dropped")] == ["branch_diverged"]
        again = await session.commit(messages)
        assert model.calls == 1
        if discard == Salvage():
            assert same_objects(again, there) and [r.how for r in session.receipts] == ["ready", "salvaged"]
        else:
            assert same_objects(again, messages) and len(session.receipts) == 1


@virtual
async def test_an_answer_that_is_still_to_the_swallowed_question_waits_for_the_next_one() -> None:
    """Regenerated, the question is the last one, and stays until the user goes on; then the summary comes back."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        policy = small_policy(model, trigger=("messages", 12), keep=("messages", 0), land_at=("messages", 1))
        session = runtime.session("s", policy=policy)
        messages = [m for k in range(5) for m in (H(f"<{2 * k}> q", size=60), A(f"<{2 * k + 1}> a", size=60))]
        messages += [H("<80> question", size=60), H("<81> and this", size=60)]
        await session.commit(messages)
        await settle(5)
        assert session.lookahead is not None
        covered = session.lookahead.run.end
        await session.commit(messages := [*messages, H("<90> next", size=60)])
        assert session.branch.applied and covered == 11
        back = messages[:covered]
        assert same_objects(await session.commit(back), back)
        other = [*back, A("<91> another answer", size=60)]
        assert any(m is other[10] for m in await session.commit(other))
        view = await session.commit([*other, H("<92> on", size=60)])
        assert summaries(view) and session.receipts[-1].how == "salvaged" and model.calls == 1


@virtual
async def test_a_result_that_would_swallow_the_question_is_not_committed() -> None:
    """Also not by hand; what it made is held, and costs no second call when the branch has grown."""
    model = FakeSummarizer()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=small_policy(model, trigger=("messages", 100)))
        messages = [H("<0> q", size=60), A("<1> a", size=60), H("<2> question", size=60), H("<3> more", size=60)]
        handle = session.schedule_transform("summarize", messages, target_segments=range(3))
        await settle(5)
        back = messages[:3]
        with pytest.raises(StaleHandle, match="branch_diverged"):
            handle.commit(back)
        assert handle.reason is Reason.BRANCH_DIVERGED and same_objects(await session.commit(back), back)
        again = session.schedule_transform("summarize", messages, target_segments=range(3))
        assert summaries(again.commit(messages)) and model.calls == 1
