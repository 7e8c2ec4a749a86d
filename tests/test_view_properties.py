"""Properties of the pure core: projection, alignment, branches. No session, no clock."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import hypothesis.strategies as st
from hypothesis import assume, given, settings

from helpers import CODEC, A, H, Message, S, T, is_subsequence, problems, same_objects
from smoothctx import OpenAIMessages, Policy, Reason, Summarize
from smoothctx.branch import Branch
from smoothctx.cuts import kept_inside, plan
from smoothctx.segments import segments
from smoothctx.view import Artifact, Edit, Replacement, align, project, units


async def model(messages: list[Message], *, max_tokens: int | None = None) -> str:
    """Never asked."""
    return ""


@st.composite
def histories(draw: st.DrawFn, *, tidy: bool = False) -> list[Message]:
    """Histories of turns with tools; unless ``tidy`` with orphans, lost and late results, thinking and repeated ids."""
    messages: list[Message] = [S() for _ in range(draw(st.integers(0, 2)))]
    lost: list[str] = []
    kinds = ["turn", "turn", "tools"] + ([] if tidy else ["orphan", "lost", "late", "system", "thinking", "assistant"])
    for k, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=8))):
        size = draw(st.integers(1, 30))
        if kind in ("turn", "tools"):
            messages.append(H(f"<{k}>", size=size))
        if kind == "tools":
            ids = [f"c{k}-{j}" if draw(st.booleans()) else f"x{j}" for j in range(draw(st.integers(1, 3)))]
            messages.append(A(f"call {k}", *ids, size=size))
            messages += [T(i, f"r{k}{i}", size=size) for i in draw(st.permutations(ids))]
        if kind in ("turn", "tools", "assistant"):
            messages.append(A(f"answer {k}", size=size))
        elif kind == "orphan":
            messages.append(T("nobody", f"orphan {k}"))
        elif kind == "system":
            messages.append(S(f"later {k}"))
        elif kind == "thinking":
            messages += [H(f"<{k}>"), A(f"thought {k}", reasoning_content="signed")]
        elif kind == "lost":
            lost.append(f"l{k}")
            messages.append(A(f"lost {k}", lost[-1]))
        elif kind == "late" and lost:
            messages.append(T(lost.pop(), f"late {k}"))
    return messages


def policy(land: int, keep: int) -> Policy:
    """Sizes in tokens and messages."""
    return Policy(
        Summarize(model, keep=("messages", keep)),
        trigger=("tokens", 1),
        hard_limit=("tokens", 10**6),
        land_at=("tokens", land),
    )


def branch_of(messages: list[Message]) -> Branch:
    """A branch that follows these messages."""
    branch = Branch(OpenAIMessages(), None)
    branch.sync(messages)
    return branch


def rewrite(branch: Branch, messages: list[Message], *, land: int, keep: int, drop: bool = False) -> Artifact | None:
    """What a transform would make of the run that may be rewritten now: a summary, or nothing at all."""
    run = plan(branch.history, branch.edits, policy(land, keep), ("messages", keep), land=("tokens", land))
    if run is None:
        return None
    before = units(messages, branch.readable, run.start, run.end)
    if all(u.edit is None and u.start in run.kept for u in before):
        return None
    made = [] if drop else [CODEC.summary(f"of {run.start} to {run.end}")]
    edits = align(before, run.kept, made, branch.history.count)
    chain = branch.history.chain
    return Artifact(
        key=f"{run}-{drop}-{chain[run.end].hex()}",
        transform="keep_recent" if drop else "summarize",
        replacement=Replacement(
            start=run.start, end=run.end, start_digest=chain[run.start], end_digest=chain[run.end], edits=edits
        ),
        tokens=sum(e.tokens for e in edits),
    )


sizes = st.integers(1, 400)
keeps = st.integers(0, 6)


@given(histories(), sizes, keeps, histories(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_property_the_view_is_the_replaced_prefix_and_every_later_message(
    messages: list[Message], land: int, keep: int, later: list[Message], drop: bool
) -> None:
    """Promise 2: whatever is appended after the commit stands behind it, the same objects in the same order."""
    branch = branch_of(messages)
    artifact = rewrite(branch, messages, land=land, keep=keep, drop=drop)
    assume(artifact is not None and branch.refusal(artifact) is None)
    assert artifact is not None
    before = copy.deepcopy(messages)
    branch.apply(artifact, messages)
    view = branch.project(messages)
    end = artifact.replacement.end
    assert messages == before
    tail = messages[end:]
    clean = [CODEC.without_thinking(m) for m in tail]
    assert all(a is b or a == c for a, b, c in zip(view[len(view) - len(tail) :], tail, clean, strict=True))
    kept = [m for m in view if any(m is x for x in messages)]
    assert is_subsequence(kept, messages)
    more = [*messages, *(m for m in later if m["role"] in ("user", "assistant") and not m.get("tool_calls"))]
    branch.sync(more)
    assert same_objects(branch.project(more), [*view, *more[len(messages) :]])


@given(histories(), sizes, keeps, st.booleans(), sizes, keeps)
@settings(max_examples=200, deadline=None)
def test_property_no_rewrite_makes_a_request_worse(
    messages: list[Message], land: int, keep: int, drop: bool, again: int, keep_again: int
) -> None:
    """Promise 3: a view of a valid history is valid, and never has more faults than the history, also when a second
    rewrite supersedes the first."""
    branch = branch_of(messages)
    for size, left, dropping in ((land, keep, drop), (again, keep_again, False)):
        artifact = rewrite(branch, messages, land=size, keep=left, drop=dropping)
        if artifact is None or branch.refusal(artifact) is not None:
            continue
        branch.apply(artifact, messages)
        view = branch.project(messages)
        assert len(problems(view)) <= len(problems(messages)), (problems(view), problems(messages))
        lead = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        assert same_objects(view[:lead], messages[:lead])
        if lead < len(messages):
            assert view[lead]["role"] == "user"
        ends = [(e.start, e.end) for e in branch.edits]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        assert branch.tokens == sum(map(CODEC.estimate, view))
        assert branch.messages == len(view)
        run = artifact.replacement
        removed = {i for e in run.edits for i in range(e.start, e.end)} | kept_inside(
            branch.history, run.start, run.end
        )
        for s in segments(messages):  # one is rewritten whole or not at all, but for what has to stay in any case
            assert len(removed & set(range(s.start, s.end))) in (0, s.end - s.start)


@given(histories(), sizes, keeps)
@settings(max_examples=100, deadline=None)
def test_property_the_view_is_a_function_of_history_and_replacements(
    messages: list[Message], land: int, keep: int
) -> None:
    """Promise 9: the same messages and the same replacement give the same bytes, in another process as well."""
    branch = branch_of(messages)
    artifact = rewrite(branch, messages, land=land, keep=keep)
    assume(artifact is not None and branch.refusal(artifact) is None)
    assert artifact is not None
    weighed = branch.weigh(artifact, messages)
    preview = branch.preview(artifact, messages)
    branch.apply(artifact, messages)
    view = branch.project(messages)
    assert same_objects(preview, view) or preview == view
    assert (weighed.after, weighed.messages_after) == (branch.tokens, branch.messages)
    copies = copy.deepcopy(messages)
    other = branch_of(copies)
    assert other.refusal(artifact) is None
    other.apply(artifact, copies)
    assert other.project(copies) == view
    assert branch.project(messages) == view


@given(histories(), sizes, keeps, st.integers(0, 60), st.sampled_from(["edit", "delete", "insert", "truncate"]))
@settings(max_examples=200, deadline=None)
def test_property_a_replacement_is_used_only_where_its_messages_are(
    messages: list[Message], land: int, keep: int, where: int, how: str
) -> None:
    """Promise 4: after a change inside the run it is refused and gone; after a change behind it, it stays, unless the
    newest segment or the last question would be gone."""
    assume(messages)
    branch = branch_of(messages)
    artifact = rewrite(branch, messages, land=land, keep=keep)
    assume(artifact is not None and branch.refusal(artifact) is None)
    assert artifact is not None
    branch.apply(artifact, messages)
    k = where % len(messages)
    changed = list(messages)
    if how == "edit":
        changed[k] = {**changed[k], "content": "changed"}
    elif how == "delete":
        del changed[k]
    elif how == "insert":
        changed.insert(k, H("inserted"))
    else:
        del changed[k:]
    branch.sync(changed)
    end = artifact.replacement.end
    intact = changed[:end] == messages[:end]
    assert (branch.refusal(artifact) is None) == intact or branch.refusal(artifact) is not Reason.DIGEST_MISMATCH
    view = branch.project(changed)
    if changed:
        newest = [changed[i] for s in branch.history.segmenter.segments[-1:] for i in range(s.start, s.end)]
        asked = [m for m in changed if m["role"] == "user"][-1:]
        assert all(any(m is shown for shown in view) for m in (newest[-1:] + asked))
    if branch.applied:
        assert intact
    else:
        assert same_objects(view, changed)
        assert not intact or branch.refusal(artifact) is Reason.BRANCH_DIVERGED
    assert len(problems(view)) <= len(problems(changed))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)), max_size=6), st.integers(1, 8))
def test_property_projection_puts_every_message_in_one_place(gaps: list[tuple[int, int, int]], behind: int) -> None:
    """Each message outside the edits is in the view once; each edit's messages stand where it does."""
    edits, position, made = [], 0, itertools.count()
    for skipped, covered, size in gaps:
        start = position + skipped
        replaced = tuple(f"new {next(made)}" for _ in range(size))
        edits.append(Edit(start=start, end=start + covered, messages=replaced, tokens=size))
        position = start + covered
    messages = [f"raw {i}" for i in range(position + behind)]
    view = project(messages, edits)
    covered_ones = {i for e in edits for i in range(e.start, e.end)}
    assert [m for m in view if m.startswith("raw")] == [m for i, m in enumerate(messages) if i not in covered_ones]
    assert [m for m in view if m.startswith("new")] == [m for e in edits for m in e.messages]
    assert [m for u in units(messages, edits, 0, len(messages)) for m in u.messages] == view


@given(st.data(), st.integers(0, 10))
@settings(max_examples=150, deadline=None)
def test_property_align_keeps_what_a_rewrite_passes_on(data: st.DataObject, count: int) -> None:
    """For any rewrite that passes some messages on and adds new ones in the gaps, projecting its edits gives the
    rewrite, with the kept messages in their places; messages that were passed on are the same objects."""
    messages: list[Any] = [H(f"<{i}>") for i in range(count)]
    fates = [data.draw(st.sampled_from(["pass", "replace", "drop", "keep"])) for _ in messages]
    kept = frozenset(i for i, f in enumerate(fates) if f == "keep")
    after: list[Any] = []
    for message, fate in zip(messages, fates, strict=True):
        if fate == "pass":
            after.append(message)
        elif fate == "replace":
            after.append(A("new"))
    edits = align(units(messages, (), 0, count), kept, after, len)
    view = project(messages, edits)
    assert same_objects([m for m in view if not any(m is messages[i] for i in kept)], after)
    assert is_subsequence([messages[i] for i in sorted(kept)], view)
    passed = [m for m, f in zip(messages, fates, strict=True) if f in ("pass", "keep")]
    assert is_subsequence(passed, view)
    assert all(a.end <= b.start for a, b in itertools.pairwise(edits))
