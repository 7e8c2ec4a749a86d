"""A branch: what a rewrite requires of the messages around it, and what it leaves alone."""

from __future__ import annotations

from helpers import A, FlakyStore, H, S, T, make_runtime, virtual
from smoothctx import Offload, OpenAIMessages, Policy
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
