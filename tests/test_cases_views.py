"""What the model is sent: first messages, ids, thinking, system prompts, drift, branches, sub-agents, concurrency.

Rows of these classes that are not here:

| id | why |
| --- | --- |
| B125, B77 | removals by id and reducers are the framework's; that a view really shrinks is in ``test_b77_...`` |
| B161 | offloading is the transform's, in ``test_transform_offload`` |
| B46 | locks are per session object, none is kept in a dict that is pruned; see ``test_b46_...`` for the effect |
| B139 | tenants: see ``test_b139_...`` |
| B198 | names of tools are the caller's; the core never rewrites a kept message |
"""

from __future__ import annotations

import copy

import anyio
import pytest

from driving import check, drive, fast, feed, small_policy, summarised
from helpers import (
    A,
    Events,
    FakeSummarizer,
    H,
    Message,
    S,
    T,
    chat,
    make_policy,
    make_runtime,
    marks,
    same_objects,
    settle,
    summaries,
    valid_request,
    virtual,
)
from smoothctx import (
    ConfigurationError,
    HandleState,
    Isolate,
    OpenAIMessages,
    Policy,
    Reason,
    Runtime,
    StaleHandle,
    Summarize,
)
from smoothctx.codec import USER_STUB

CODEC = OpenAIMessages()
BIG = 150


def h(k: int) -> Message:
    return H(f"<{k}> question", size=BIG)


def a(k: int, *calls: str) -> Message:
    return A(f"<{k}> answer", *calls, size=BIG)


def t(k: int, call: str) -> Message:
    return T(call, f"<{k}> result", size=BIG)


# -- first message ---------------------------------------------------------------------------------------------------


@virtual
async def test_b12_a_paid_summary_is_in_the_request_as_a_leading_user_turn() -> None:
    """[H,A[1],T1,A,H] with a window of two: the request holds the summary, opens with a user message, cuts no cycle."""
    messages = [h(0), a(1, "1"), t(2, "1"), a(3), h(4)]
    model = fast()
    last = (await drive(messages, small_policy(model, keep=("messages", 2))))[-1].view
    assert model.calls >= 1
    assert summaries([last[0]])
    assert last[0]["role"] == "user"
    assert valid_request(last)
    rendered = [CODEC.to_openai(m) for m in last]
    assert "The summary." in rendered[0]["content"]


@pytest.mark.parametrize(
    "messages",
    [
        [h(0), a(1), h(2), a(3)],
        [S(), h(0), a(1), h(2), a(3)],
        [S(), h(0), a(1, "1"), t(2, "1")],
        [h(0), a(1, "1"), t(2, "1"), a(3), h(4)],
        [S(), S("rules"), h(0), a(1), h(2), a(3), h(4)],
        [S(), h(0), a(1)],
        [h(0), a(1, "1"), t(2, "1"), a(3, "2"), t(4, "2"), a(5)],
    ],
    ids=["B92", "B92-system", "B96", "B97", "two-systems", "B94", "tools-only"],
)
@pytest.mark.parametrize("keep", [0, 1, 2, 3])
@pytest.mark.parametrize("overrun", ["promote", "fallback"])
@virtual
async def test_b92_b94_b96_b97_the_first_message_after_the_system_ones_is_a_user_message(
    messages: list[Message], keep: int, overrun: str
) -> None:
    """Whatever is kept and whichever way it is rewritten, the opening is one that providers accept."""
    limit = max(2, len(messages) - 2)
    policy = small_policy(
        fast(),
        keep=("messages", keep),
        trigger=("messages", 2),
        hard_limit=("messages", limit),
        land_at=("messages", 1),
        overrun=overrun,
    )
    for turn in await drive(messages, policy):
        body = [m for m in turn.view if m["role"] != "system"]
        if not body:
            continue  # nothing but the system message yet
        assert body[0]["role"] == "user"
        assert any(m is messages[-1] or m is turn.held[-1] for m in turn.view)
        check(turn.held, turn.view)


@virtual
async def test_b93_compacting_twice_leaves_one_leading_user_summary() -> None:
    """After the second and third commit there is one summary, of role user, and it covers what the first did."""
    turns = await drive(chat(40, size=55), make_policy(fast()), every=False)
    assert sum(t.rewrote for t in turns) >= 3
    for turn in summarised(turns):
        assert len(summaries(turn.view)) == 1
        assert summaries([turn.view[1]])
        assert turn.view[1]["role"] == "user"
        assert valid_request(turn.view)
        assert marks(turn.view) >= marks(turn.held)


@virtual
async def test_a_history_that_opens_with_the_assistant_gets_a_stub_or_a_summary_in_front() -> None:
    """A greeting of the assistant's is allowed raw; once rewritten, a user message stands first."""
    messages = [S(), a(0), h(1), a(2), h(3), a(4), h(5)]
    policy = small_policy(
        FakeSummarizer("fail"), overrun="fallback", hard_limit=("messages", 5), land_at=("messages", 4)
    )
    for turn in await drive(messages, policy):
        if turn.rewrote:
            assert turn.view[1]["role"] == "user"
            assert turn.view[1]["content"] == USER_STUB or any(turn.view[1] is m for m in messages)


@virtual
async def test_b89_the_newest_user_message_is_always_verbatim() -> None:
    """keep 0, in every place of a turn: the current question is the caller's own object; the summary is tagged."""
    messages = [h(0), a(1), h(2), a(3), h(4), a(5, "1"), t(6, "1"), a(7, "2"), t(8, "2"), a(9)]
    policy = small_policy(fast(), keep=("messages", 0), land_at=("messages", 0))
    for turn in await drive(messages, policy):
        newest = [m for m in turn.held if m["role"] == "user"][-1]
        assert any(m is newest for m in turn.view)
        for m in turn.view:
            assert any(m is x for x in turn.held) or m["content"].startswith(("<conversation_summary>", USER_STUB))


# -- ids -------------------------------------------------------------------------------------------------------------


@virtual
async def test_b21_parallel_calls_with_a_commit_between_their_results() -> None:
    """A[1,2],T1,<commit>,T2: exactly one result per call in every later request."""
    messages = [h(0), a(1), h(2), a(3), h(4), a(5, "1", "2"), t(6, "1"), t(7, "2"), a(8), h(9)]
    turns = await drive(messages, small_policy(fast(), keep=("messages", 0)))
    for turn in turns[7:]:
        ids = [m["tool_call_id"] for m in turn.view if m["role"] == "tool"]
        assert len(ids) == len(set(ids))
        assert valid_request(turn.view)


@pytest.mark.parametrize("name", ["call_0", ""])
@virtual
async def test_b23_ids_that_repeat_every_turn_lose_no_result(name: str) -> None:
    """Constant or empty ids: every kept call has its own result next to it, nothing is taken for a duplicate."""
    messages = [m for k in range(6) for m in (h(10 * k), a(10 * k + 1, name), t(10 * k + 2, name), a(10 * k + 3))]
    turns = await drive(
        messages,
        small_policy(fast(), keep=("messages", 5), trigger=("messages", 9), land_at=("messages", 7)),
        every=False,
    )
    assert summarised(turns)
    for turn in turns:
        for k, m in enumerate(turn.view):
            if m.get("tool_calls"):
                assert turn.view[k + 1]["role"] == "tool"
                assert marks([turn.view[k + 1]]) == {max(marks([m])) + 1}
        assert marks(turn.view) == marks(turn.held)


@virtual
async def test_b77_b133_the_view_really_shrinks_and_everything_new_is_in_it() -> None:
    """After a commit the view has fewer messages; what this turn added is found by identity, not by index."""
    messages = [h(0), a(1), h(2), a(3)]
    async with make_runtime() as runtime:
        session = runtime.session(
            "s", policy=small_policy(fast(), keep=("messages", 1), trigger=("messages", 3), land_at=("messages", 2))
        )
        session.observe(messages)
        await settle(5)
        view = await session.commit(messages)
        assert len(view) < len(messages)
        new = [a(90), h(91)]
        again = await session.commit([*messages, *new])
        assert same_objects([m for m in again if not any(m is v for v in view)], new)


# -- thinking --------------------------------------------------------------------------------------------------------


def thinking(k: int, *calls: str) -> Message:
    """An assistant message with a signed thinking block."""
    message = a(k, *calls)
    signed = {"type": "thinking", "thinking": f"hm {k}", "signature": f"sig{k}"}
    return {**message, "content": [signed, {"type": "text", "text": message["content"]}]}


def thinks(message: Message) -> bool:
    """Has it a thinking block?"""
    content = message["content"]
    return isinstance(content, list) and any(p["type"] == "thinking" for p in content)


@virtual
async def test_b114_b118_thinking_of_the_open_tool_loop_stays_byte_equal() -> None:
    """In the current turn every thinking block that is kept is the caller's own message."""
    messages = [H("<0>", size=2000), a(1), h(2), a(3), h(4), thinking(5, "1"), t(6, "1"), thinking(7, "2"), t(8, "2")]
    turns = await drive(messages, small_policy(fast(), keep=("messages", 4), land_at=("messages", 6)), every=False)
    last = turns[-1].view
    assert summaries(last)
    assert same_objects(last[-5:], messages[-5:])
    assert valid_request(last)


@virtual
async def test_b114_a_very_long_turn_can_be_compacted_all_the_same() -> None:
    """Forty cycles of thinking in one turn: it is cut between cycles, and what stays is byte equal."""
    messages = [h(0)]
    for k in range(40):
        messages += [thinking(10 * k + 1, f"c{k}"), t(10 * k + 2, f"c{k}")]
    turns = await drive(messages, make_policy(fast()), every=False)
    last = turns[-1].view
    assert summaries(last)
    assert sum(map(CODEC.estimate, last)) <= 1700
    assert all(any(m is x for x in messages) for m in last if thinks(m))
    assert valid_request(last)


@virtual
async def test_b115_thinking_of_older_kept_turns_goes_when_their_prefix_is_rewritten() -> None:
    """After a commit no kept turn before the current one carries thinking; the caller's messages do."""
    messages = [H("<0>", size=2000), a(1), h(2), thinking(3), h(4), thinking(5), h(6)]
    before = copy.deepcopy(messages)
    turns = await drive(
        messages,
        small_policy(fast(), keep=("messages", 3), trigger=("messages", 6), land_at=("messages", 5)),
        every=False,
    )
    last = turns[-1].view
    assert summaries(last)
    assert not any(thinks(m) for m in last)
    assert {3, 5} <= marks(last[1:])
    assert messages == before
    assert any(thinks(m) for m in turns[2].view)


@virtual
async def test_b115_without_a_rewrite_thinking_stays() -> None:
    """As long as the prefix is the same, every block goes out as it came."""
    messages = [h(0), thinking(1), h(2), thinking(3), h(4)]
    turns = await drive(messages, make_policy(fast(), window=20_000))
    assert same_objects(turns[-1].view, messages)


@virtual
async def test_b115_promise_09_the_stripped_form_is_the_same_every_turn() -> None:
    """Between commits nothing of a stripped turn changes again, although turns become older."""
    messages = [h(0), a(1), *(m for k in range(1, 9) for m in (h(10 * k), thinking(10 * k + 1)))]
    policy = small_policy(fast(), keep=("messages", 6), trigger=("messages", 12), land_at=("messages", 8))
    turns = await drive(messages, policy)
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.rewrote or turn.view[: len(before.view)] == before.view


# -- system prompts --------------------------------------------------------------------------------------------------


@virtual
async def test_b85_b86_system_messages_survive_every_commit_verbatim() -> None:
    """Two system messages, one with two blocks; many commits: the same objects in front."""
    rules: Message = {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    messages = [S(), rules, *chat(40, size=55, system=False)]
    turns = await drive(messages, make_policy(fast()), every=False)
    assert sum(t.rewrote for t in turns) >= 2
    for turn in turns:
        assert same_objects(turn.view[:2], messages[:2][: len(turn.held)])


@virtual
async def test_b85_a_developer_message_is_as_safe() -> None:
    """``developer`` is a system message; one that comes later stays word for word too."""
    later: Message = {"role": "developer", "content": "<999> new rules"}
    messages = [
        {"role": "developer", "content": "rules"},
        *chat(6, size=55, system=False),
        later,
        *chat(30, size=55, first=10, system=False),
    ]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        view = await session.commit(messages)
        assert view[0] is messages[0]
        assert any(m is later for m in view)
        assert len(view) < len(messages)


# -- drift -----------------------------------------------------------------------------------------------------------


@virtual
async def test_b91_tool_names_stand_in_the_summary_word_for_word() -> None:
    """With facts, the names of the tools that were used are carried."""
    messages: list[Message] = [S()]
    for k in range(8):
        call = {"id": f"c{k}", "type": "function", "function": {"name": "search_web_v2", "arguments": '{"q": "x"}'}}
        messages += [
            h(10 * k),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            t(10 * k + 1, f"c{k}"),
            a(10 * k + 2),
        ]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast(), window=6000, facts=True))
        session.observe(messages)
        await settle(5)
        (text,) = summaries(await session.commit(messages))
        assert "search_web_v2" in text


@pytest.mark.parametrize("source", ["view", "raw"])
@virtual
async def test_b154_b155_the_second_summary_covers_the_first(source: str) -> None:
    """In the chat and in one long tool loop: what the first summary said is input of the second, in both sources."""
    loop = [h(0)]
    for k in range(1, 40):
        loop += [A(f"<{10 * k + 1}>", f"c{k}", size=55), T(f"c{k}", f"<{10 * k + 2}>", size=55)]
    for messages in (chat(40, size=55), loop):
        turns = await drive(messages, make_policy(fast(), source=source), every=False)
        assert sum(t.rewrote for t in turns) >= 2
        for turn in summarised(turns):
            assert marks(turn.view) >= marks(turn.held)


# -- branches --------------------------------------------------------------------------------------------------------


@virtual
async def test_b128_a_fork_after_a_commit_has_its_history_and_the_summary() -> None:
    """Regenerate in a fork: the artifact of the common prefix is used, the parent is as before."""
    messages = chat(12, size=55)
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        session.observe(messages)
        await settle(5)
        view = await session.commit(messages)
        fork = session.fork("f")
        other = [*messages[:-1], A("<99> regenerated")]
        forked = await fork.commit(other)
        assert same_objects(forked[:-1], view[:-1])
        assert forked[-1] is other[-1]
        assert same_objects(await session.commit(messages), view)
        assert model.calls == 1
        assert fork.receipts[0].how == "salvaged"


@virtual
async def test_b128_time_travel_to_before_the_commit_gives_the_raw_history() -> None:
    """From step k before the cut: everything is there, nothing is summarised; back again: the summary is too."""
    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        session.observe(messages)
        await settle(5)
        view = await session.commit(messages)
        for k in (0, 1, 2, 5, 9):
            assert same_objects(await session.commit(messages[:k]), messages[:k])
        assert same_objects(await session.commit(messages), view)


@virtual
async def test_b130_rewinding_between_two_commits_finds_the_first() -> None:
    """Commit s1, commit s2, rewind to between them: s1 is in the view; forward again: s2 is. Nobody is asked again."""
    messages = chat(40, size=55)
    model = fast()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        turns = await feed(session, messages, every=False)
        rewrites = [t for t in turns if t.rewrote]
        assert len(rewrites) >= 3
        await settle(60)
        calls = model.calls
        for turn in (rewrites[0], rewrites[1], rewrites[0], rewrites[-1]):
            view = await session.commit(turn.held)
            assert summaries(view)
            assert marks(view) == marks(turn.held)
            assert same_objects(view[-3:], turn.held[-3:])
            assert len(view) <= len(turn.view)
        assert model.calls == calls


@virtual
async def test_b132_an_interrupted_compaction_leaves_no_trace() -> None:
    """Cancelled in the middle, then a rewind: raw messages everywhere."""
    messages = chat(12, size=55)
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        handle = session.observe(messages)
        assert handle is not None
        await model.started.wait()
        handle.discard()
        await settle()
        assert same_objects(await session.commit(messages[:6]), messages[:6])
        assert not session.branches()
        assert not session.receipts


# -- sub-agents and concurrency --------------------------------------------------------------------------------------


@virtual
async def test_b157_b158_b159_a_childs_commit_leaves_its_parent_alone() -> None:
    """Two children and their parent with the same messages: each has its own view, nobody is aborted."""
    messages = chat(12, size=55)
    model = FakeSummarizer("hold")
    async with make_runtime() as runtime:
        parent = runtime.session("p", policy=make_policy(model, window=40_000))
        children = [runtime.session(f"p/{k}", policy=make_policy(model), parent=parent) for k in range(2)]
        handles = [c.observe(messages) for c in children]
        await model.started.wait()
        assert same_objects(await parent.commit(messages), messages)
        model.release.set()
        await settle(5)
        for child, handle in zip(children, handles, strict=True):
            assert handle is not None
            assert summaries(await child.commit(messages))
            assert handle.state is HandleState.COMMITTED
        assert same_objects(await parent.commit(messages), messages)
        assert not parent.receipts
        await children[0].close()
        assert summaries(await children[1].commit(messages))


@virtual
async def test_b158_isolate_opens_a_child_and_leaves_the_view_alone() -> None:
    """The handle's commit returns the opening; the parent's view, receipts and history stay."""
    messages = chat(4, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast(), window=40_000))
        handle = session.schedule_transform(Isolate(system="You are a helper.", instruction="Do <900>."), messages)
        assert await handle.wait() is HandleState.READY
        assert same_objects(await session.commit(messages), messages)
        opening = handle.commit(messages)
        assert opening[0] == S("You are a helper.")
        assert opening[-1] == H("Do <900>.")
        assert valid_request(opening)
        assert same_objects(await session.commit(messages), messages)
        assert not session.receipts


@virtual
async def test_b160_live_tasks_are_listed_word_for_word() -> None:
    """Names of running sub-agents stand in the summary whatever the model wrote."""
    messages = chat(20, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast(), window=3000, facts=True))
        session.live_tasks(["task-7f3a", "task-911c"])
        session.observe(messages)
        await settle(5)
        (text,) = summaries(await session.commit(messages))
        assert "task-7f3a" in text
        assert "task-911c" in text


@virtual
async def test_b138_b141_two_sessions_on_one_policy_never_mix() -> None:
    """One policy and transform object, two threads in turn: each summary holds its own marks only."""
    policy = make_policy(fast())
    async with make_runtime() as runtime:
        held = {name: [S(), *chat(30, size=55, first=first, system=False)] for name, first in (("a", 0), ("b", 500))}
        for k in range(2, 61, 2):
            for name, messages in held.items():
                session = runtime.session(name, policy=policy)
                view = await session.commit(messages[:k])
                own = marks(messages)
                assert marks(view) <= own
                session.observe(messages[: k + 1])
                await settle(2)
        assert all(runtime.session(n, policy=policy).receipts for n in held)


@virtual
async def test_b139_promise_12_two_owners_of_one_id_see_their_own() -> None:
    """The same session id under two tenants: two sessions, two summaries."""
    messages = chat(12, size=55)
    model = fast()
    async with make_runtime() as runtime:
        policy = make_policy(model, model_id="m")
        one, two = runtime.session("s", policy=policy, tenant="a"), runtime.session("s", policy=policy, tenant="b")
        assert one is not two
        one.observe(messages)
        await settle(5)
        assert summaries(await one.commit(messages))
        assert same_objects(await two.commit(messages), messages)
        await settle(5)
        assert model.calls == 2


@virtual
async def test_b46_one_id_is_one_session_however_many_ask() -> None:
    """Many tasks open, use and leave the same id: one session, one summary; after close a new one starts afresh."""
    messages = chat(12, size=55)
    model = fast()
    seen = []
    async with make_runtime() as runtime:
        policy = make_policy(model)

        async def user() -> None:
            session = runtime.session("s", policy=policy)
            seen.append(session)
            session.observe(messages)
            await anyio.sleep(1)
            await session.commit(messages)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(user)
        assert len(set(map(id, seen))) == 1
        assert model.calls == 1
        await seen[0].close()
        fresh = runtime.session("s", policy=policy)
        assert fresh is not seen[0]
        with pytest.raises(ConfigurationError, match="is open with another policy"):
            runtime.session("s", policy=make_policy(model, keep=7))


@virtual
async def test_promise_11_handles_of_dead_branches_cannot_be_committed() -> None:
    """After an edit of the covered part the handle says so, and the view stays raw."""
    messages = chat(12, size=55)
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait()
        edited = copy.deepcopy(messages)
        edited[1]["content"] = "edited"
        with pytest.raises(StaleHandle):
            handle.commit(edited)
        assert handle.reason in (Reason.DIGEST_MISMATCH, Reason.BRANCH_DIVERGED)
        assert same_objects(await session.commit(edited), edited)


@virtual
async def test_policies_are_equal_by_what_they_say() -> None:
    """The same id with an equal policy gives the same session; the runtime class needs no special construction."""
    async with make_runtime() as runtime:
        assert isinstance(runtime, Runtime)
        transform = Summarize(fast())
        first = runtime.session("s", policy=Policy(transform, context_window=1000))
        assert runtime.session("s", policy=Policy(transform, context_window=1000)) is first
