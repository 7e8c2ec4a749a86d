"""Lines: the messages choose their session, through forks, edits, time travel and parallel use."""

from __future__ import annotations

import copy
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    S,
    chat,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import ClosedError, ConfigurationError, MessageError, Policy, Runtime, Session
from smoothctx.lines import Lines
from virtual import run_virtual


async def turn(lines: Lines, messages: list[Message], *, owner: str = "", bucket: str = "b") -> list[Message]:
    """A turn with time for the background; the reply is the caller's to append."""
    with lines.using(bucket, messages, owner=owner) as session:
        view = await session.commit(messages)
        session.observe(messages)
    await settle(5)
    return view


async def summarised(lines: Lines, *, owner: str = "") -> tuple[Session, list[Message]]:
    """A conversation in bucket ``b`` whose view has a summary."""
    messages = chat(12, size=60)
    for _ in range(2):
        view = await turn(lines, messages, owner=owner)
    assert summaries(view)
    return lines.find("b", messages, owner=owner), messages


@virtual
async def test_a_list_that_goes_on_has_the_session_of_its_beginning() -> None:
    """Also after a reload as equal copies with other bookkeeping, whoever asks."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        messages = chat(3)
        first = lines.find("b", messages)
        await first.commit(messages)
        messages += [H("<90> more"), A("<91> yes")]
        assert lines.find("b", messages) is first
        reloaded = [{**copy.deepcopy(m), "id": str(k)} for k, m in enumerate(messages)]
        assert lines.find("b", reloaded, owner="other") is first
        assert lines.sessions("b") == [first] and first.id == "b"


@virtual
async def test_the_longest_of_several_goes_on() -> None:
    """A fork and the conversation that it left: each list finds the one that holds most of it."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        short, long = chat(2), chat(4)
        with lines.using("b", short, owner="one") as one:
            await one.commit(short)
            with lines.using("b", long, owner="two") as two:
                assert two is not one
                await two.commit(long)
        assert lines.find("b", [*long, H("next")], owner="three") is two
        assert lines.find("b", [*short, H("another")], owner="one") is one
        assert lines.sessions("b") == [two, one], "the one used last is at the end"


@virtual
async def test_an_edit_stays_with_its_owner_and_is_checked_by_digest() -> None:
    """The same session goes on; a summary of what was edited is gone from the view at once."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        session, messages = await summarised(lines)
        edited = [*messages[:3], H("<500> edited"), *messages[4:]]
        assert lines.find("b", edited) is session
        view = await turn(lines, edited)
        assert marks(view) <= marks(edited)
        deleted = [*edited[:7], *edited[9:]]
        assert lines.find("b", deleted) is session


@virtual
async def test_time_travel_goes_back_and_returns_without_another_call() -> None:
    """A prefix of what is held is the same conversation earlier; when it grows again, its summary is there again."""
    async with make_runtime() as runtime:
        model = FakeSummarizer()
        lines = Lines(runtime, policy=make_policy(model))
        session, messages = await summarised(lines)
        assert lines.find("b", messages[:4]) is session
        assert await turn(lines, messages[:4]) == messages[:4]
        assert summaries(await turn(lines, messages))
        assert model.calls == 1 and lines.sessions("b") == [session]


@pytest.mark.parametrize("why", ["other owner", "in use"])
@virtual
async def test_a_fork_has_what_was_summarised_before_it(why: str) -> None:
    """The branch gets a session of its own, with the summary of the common beginning: no second call for it."""
    async with make_runtime() as runtime:
        model = FakeSummarizer()
        lines = Lines(runtime, policy=make_policy(model))
        session, messages = await summarised(lines, owner="one")
        branch = [*messages[:-1], A("<600> another answer"), H("<601> go on")]
        if why == "in use":
            with lines.using("b", messages, owner="one"):
                view = await turn(lines, branch, owner="one")
        else:
            view = await turn(lines, branch, owner="two")
        assert model.calls == 1 and summaries(view) and marks(view) <= marks(branch)
        assert len(lines.sessions("b")) == 2
        assert lines.find("b", messages, owner="one") is session


@virtual
async def test_parallel_users_of_the_same_list_each_have_a_session() -> None:
    """Nobody waits and nobody takes another's; where they part, each finds its own again, and no more are made."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        start = chat(2)
        owners = ["one", "two", "three"]
        for k in range(4):
            using = [lines.using("b", start if not k else [*start, H(f"of {o}")], owner=o) for o in owners]
            sessions = [u.__enter__() for u in using]
            assert len({s.id for s in sessions}) == 3
            for session, owner in zip(sessions, owners, strict=True):
                await session.commit(start if not k else [*start, H(f"of {owner}")])
            for u in using:
                u.__exit__(None, None, None)
        assert len(lines.sessions("b")) == 3


@virtual
async def test_of_equal_ones_the_free_one_then_ones_own_goes_on() -> None:
    """Somebody else's use of one session makes no third one where another fits as well."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        messages = chat(2)
        with lines.using("b", messages, owner="one") as one, lines.using("b", messages, owner="two") as two:
            await one.commit(messages)
            await two.commit(messages)
        assert lines.find("b", messages, owner="one") is one
        assert lines.find("b", messages, owner="two") is two
        with lines.using("b", messages, owner="two"):
            assert lines.find("b", messages, owner="two") is one
        assert len(lines.sessions("b")) == 2


@virtual
async def test_ones_own_branch_goes_on_where_the_longer_one_is_in_use() -> None:
    """It is given what the longer one holds, although it was opened long before."""
    async with make_runtime() as runtime:
        model = FakeSummarizer()
        lines = Lines(runtime, policy=make_policy(model))
        start = chat(1, size=60)
        with lines.using("b", start, owner="one") as one, lines.using("b", start, owner="two") as two:
            await one.commit(start)
            await two.commit(start)
        messages = [*start, *chat(12, size=60, first=1, system=False)]
        with lines.using("b", messages, owner="one") as used:
            for _ in range(2):
                await used.commit(messages)
                await settle(5)
            assert used is two or used is one
            other = "two" if used is one else "one"
            assert summaries(await turn(lines, messages, owner=other))
        assert model.calls == 1 and len(lines.sessions("b")) == 2


@virtual
async def test_strangers_in_one_bucket_share_nothing() -> None:
    """The same system message alone makes two lists no branches of one conversation."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        session, _ = await summarised(lines)
        other = lines.find("b", [S(), H("something else")])
        assert other is not session and not other.branches()
        assert lines.find("b", [S(), H("yet another")]) is other, "it was never used"
        await other.commit([S()])
        assert lines.find("b", [S(), H("yet another")]) is other, "it holds no more than the system message"


@virtual
async def test_a_caller_that_keeps_the_view_is_followed() -> None:
    """The list that begins with the last view goes on with its session."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        session, messages = await summarised(lines)
        view = await turn(lines, messages)
        assert lines.find("b", [*view, H("next")], owner="other") is session
        again = await turn(lines, [*view, H("next")])
        assert len(summaries(again)) == 1 and len(lines.sessions("b")) == 1


@virtual
async def test_the_one_unused_for_longest_makes_room_but_none_in_use() -> None:
    """At most ``max_lines`` are followed; what is in use or just opened is never closed for it."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()), max_lines=2)
        held = [lines.using("b", [H(f"of {k}")], owner=f"o{k}") for k in range(4)]
        sessions = [h.__enter__() for h in held]
        for k, session in enumerate(sessions):
            await session.commit([H(f"of {k}")])
        assert not any(s.closed for s in sessions) and len(lines.sessions("b")) == 4
        assert not lines.find("b", [H("new")]).closed, "all others are in use"
        for h in held:
            h.__exit__(None, None, None)
        fresh = lines.find("b", [H("newer")])
        assert lines.sessions("b")[-1] is fresh and len(lines.sessions("b")) == 2
        assert [s.closed for s in sessions] == [True, True, True, False], "the latest of them stays"
        with pytest.raises(ConfigurationError, match="max_lines=0"):
            Lines(runtime, policy=make_policy(FakeSummarizer()), max_lines=0)


@virtual
async def test_buckets_whose_sessions_were_closed_are_forgotten() -> None:
    """What a runtime with few sessions closes does not pile up here."""
    async with make_runtime(max_sessions=10) as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        for k in range(500):
            await lines.find(f"b{k}", [H(f"{k}")]).commit([H(f"{k}")])
        assert len(lines._buckets) <= 20
        assert len(lines.sessions("b499")) == 1 and not lines.sessions("b0")


@virtual
async def test_closing_a_bucket_ends_its_sessions() -> None:
    """The next list starts anew."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        session, messages = await summarised(lines)
        await lines.close("b")
        await lines.close("never opened")
        assert session.closed and lines.sessions("b") == []
        again = lines.find("b", messages)
        assert again is not session and again.id == "b" and not again.branches()


@virtual
async def test_two_lines_on_one_runtime_with_one_bucket() -> None:
    """With the same policy they share the session of a list; with another policy each has its own."""
    async with make_runtime() as runtime:
        policy = make_policy(FakeSummarizer())
        first, second = Lines(runtime, policy=policy), Lines(runtime, policy=policy)
        session, messages = await summarised(first)
        assert second.find("b", messages) is session
        assert second.find("b", [H("a stranger")]) is not session
        third = Lines(runtime, policy=make_policy(FakeSummarizer(), keep=6))
        other = third.find("b", messages)
        assert other.id != session.id and other.policy is not policy
        assert third.find("b", messages) is other


@virtual
async def test_tenants_have_nothing_in_common() -> None:
    """The same bucket and messages of two tenants are two conversations with two summaries."""
    async with make_runtime() as runtime:
        model = FakeSummarizer()
        lines = Lines(runtime, policy=make_policy(model, model_id="m"), tenant="one")
        session, messages = await summarised(lines)
        assert session.tenant == "one"
        other = lines.find("b", messages, tenant="two")
        await other.commit(messages)
        await settle(5)
        assert other.tenant == "two" and summaries(await other.commit(messages))
        assert model.calls == 2
        assert lines.sessions("b") == [session] and lines.sessions("b", tenant="two") == [other]
        await lines.close("b", tenant="two")
        assert other.closed and not session.closed


@virtual
async def test_a_sub_agent_has_its_parent() -> None:
    """The session that is opened for it draws on the budget of a sub-agent."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        parent = lines.find("b", [H("task")])
        assert lines.find("b/child", [H("task")], parent=parent).parent is parent


@virtual
async def test_a_closed_runtime_and_bad_input_are_named() -> None:
    """Errors of the caller are errors; a malformed message inside the list is not one here."""
    async with make_runtime() as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()))
        with pytest.raises(MessageError, match="expected a list of messages, got str"):
            lines.find("b", "hello")
        bad: list[Any] = [H("fine"), {"no": "role"}]
        for _ in range(2):
            assert await turn(lines, bad) == bad
        assert len(lines.sessions("b")) == 1
    with pytest.raises(ClosedError):
        lines.find("b", [H()])
    with pytest.raises(ClosedError), lines.using("another", [H()]):
        raise AssertionError("unreachable")
    assert not lines.sessions("another")


def test_an_event_handler_may_ask_again() -> None:
    """What is said while a session makes room leads back into the lines without a deadlock."""

    async def main() -> None:
        asked: list[Session] = []
        made: list[Lines] = []

        def handler(event: Any) -> None:
            if event.name == "lookahead.discarded" and made:
                asked.append(made[0].find("asked", [H("again")]))

        async with make_runtime(on_event=handler) as runtime:
            lines = Lines(runtime, policy=make_policy(FakeSummarizer("hang")), max_lines=1)
            made.append(lines)
            await turn(lines, chat(12, size=60))
            lines.find("b", [H("new")], owner="other")
            assert asked and not asked[0].closed

    run_virtual(main)


def test_threads_find_and_use_their_sessions() -> None:
    """Many threads on few buckets: no error, a view for each list, and nobody's session is closed under them."""
    failures: list[BaseException] = []
    events = Events()
    with Runtime.in_thread(on_event=events) as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer(delay=0), window=1000), max_lines=8)
        gate = threading.Barrier(6)

        def work(number: int) -> None:
            try:
                gate.wait(30)
                messages = [S(), H(f"<{1000 * number}> task")]
                for k in range(25):
                    with lines.using(f"b{number % 2}", messages, owner=f"o{number}") as session:
                        view = session.commit_sync(messages)
                        assert not session.closed
                    assert marks(view) <= marks(messages)
                    messages.append(A(f"<{1000 * number + 2 * k + 1}> a", size=40))
                    lines.find(f"b{number % 2}", messages, owner=f"o{number}").observe(messages)
                    messages.append(H(f"<{1000 * number + 2 * k + 2}> q", size=40))
                    if k % 10 == 9:
                        messages = messages[: -k // 2]
            except BaseException as error:  # handed to the test
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures, failures
        assert not events.of("error")
        assert all(len(lines.sessions(f"b{n}")) <= 8 for n in range(2))


@dataclass
class Conversation:
    """One caller's list in the property below, and the marks of everything that it was rewritten from."""

    owner: str
    messages: list[Message] = field(default_factory=lambda: [S(), H("<0> task")])


STEP = st.tuples(
    st.sampled_from(["append", "append", "append", "edit", "delete", "truncate", "fork", "hold", "wait"]),
    st.integers(0, 40),
)


@settings(max_examples=40)
@given(st.lists(STEP, min_size=5, max_size=40), st.sampled_from([None, "model"]), st.integers(1, 4))
def test_property_a_view_never_tells_of_what_is_not_in_its_list(
    steps: list[tuple[str, int]], model_id: str | None, max_lines: int
) -> None:
    """Whatever is appended, edited, forked and used at once: a summary covers only what stands at the list's head,
    nothing of the list is missing from its view, and each turn has an open session."""

    async def main() -> None:
        numbers = itertools.count(1)
        events = Events()
        async with make_runtime(on_event=events, store=FlakyStore()) as runtime:
            policy: Policy = make_policy(FakeSummarizer(), keep=2, window=800, model_id=model_id, max_wait=2)
            lines = Lines(runtime, policy=policy, max_lines=max_lines)
            all_of_them = [Conversation("o0")]
            held: list[Any] = []
            for what, k in steps:
                one = all_of_them[k % len(all_of_them)]
                messages = one.messages
                if what == "edit":
                    messages[k % len(messages)] = H(f"<{next(numbers)}> edited")
                elif what == "delete" and len(messages) > 2:
                    del messages[1 + k % (len(messages) - 1)]
                elif what == "truncate":
                    del messages[2 + k % len(messages) :]
                elif what == "fork" and len(all_of_them) < 3:
                    all_of_them.append(Conversation(f"o{k % 2}", list(messages[: 1 + k])))
                elif what == "wait":
                    await settle(10)
                elif what == "hold" and len(held) < 2:
                    held.append(lines.using("b", messages, owner=one.owner))
                    held[-1].__enter__()
                elif held:
                    held.pop().__exit__(None, None, None)
                messages += [H(f"<{next(numbers)}> q", size=50), A(f"<{next(numbers)}> a", size=50)]
                with lines.using("b", messages, owner=one.owner) as session:
                    view = await session.commit(messages)
                    assert not session.closed
                    session.observe(messages)
                check(session, messages, view)
                await settle(0.4)
            for using in held:
                using.__exit__(None, None, None)
            assert not events.of("error"), events.of("error")

    run_virtual(main)


def check(session: Session, messages: list[Message], view: list[Message]) -> None:
    """Does this view stand for this list?"""
    applied = session.branch.applied
    end = max((a.artifact.replacement.end for a in applied), default=0)
    assert same_objects(view[len(view) - (len(messages) - end) :], messages[end:]), "what is behind stays"
    behind = marks(messages[end:])
    assert marks(view) - behind <= marks(messages[:end]), "a summary of something else"
    if not any(a.artifact.transform == "keep_recent" for a in applied):
        assert marks(view) == marks(messages), "something is missing"
