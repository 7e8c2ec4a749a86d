"""What travels in the ``AgentSession``: restarts, forks, edits, and what other processes may find there."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from agent_framework import Agent, AgentSession, Message

from agent_framework_fakes import CODEC, FakeClient, agent_of, ask, faults, marks, stored, summaries, text, user
from driving import small_policy
from helpers import Events, FakeSummarizer, FlakyStore, fill, make_runtime, settle, virtual
from smoothctx import Policy, Runtime
from smoothctx_autogen.agent_framework import STATE_KEY, LookaheadMiddleware


def summarizer() -> FakeSummarizer:
    """One that answers at once."""
    return FakeSummarizer(delay=0.1)


def policy_of(model: Any, **options: Any) -> Policy:
    """Durable: the model has an identity."""
    return small_policy(model, trigger=("messages", 6), model_id="fake-1", **options)


def made(runtime: Runtime, model: Any, **options: Any) -> tuple[FakeClient, Agent[Any], LookaheadMiddleware]:
    """A client, an agent on it, and its middleware."""
    client = FakeClient(reply=lambda messages: [text(fill("<900> reply", 60))])
    middleware = LookaheadMiddleware(runtime, policy_of(model), **options)
    return client, agent_of(client, middleware), middleware


async def talk(agent: Agent[Any], session: AgentSession, turns: int, first: int = 0) -> None:
    """Some turns with time between them."""
    for k in range(first, first + turns):
        await ask(agent, fill(f"<{k}> question", 60), session)
        await settle(1)


async def session_with_a_summary(turns: int = 6) -> AgentSession:
    """A session whose process has ended since."""
    async with make_runtime() as runtime:
        client, agent, _ = made(runtime, summarizer())
        session = agent.create_session()
        await talk(agent, session, turns)
        assert summaries(client.requests[-1])
    return session


def through_json(session: AgentSession) -> AgentSession:
    """As another process loads it."""
    return AgentSession.from_dict(json.loads(json.dumps(session.to_dict())))


@virtual
async def test_another_process_uses_the_summary_without_paying_again() -> None:
    """Its first request has the committed summary; no model was asked for it."""
    session = through_json(await session_with_a_summary())
    model, events = summarizer(), Events()
    async with make_runtime(on_event=events) as runtime:
        client, agent, middleware = made(runtime, model)
        await ask(agent, "<50> question", session)
        assert model.calls == 0
        (summary,) = summaries(client.requests[0])
        assert "<0>" in summary and not faults(client.requests[0])
        assert marks(client.requests[0]) == {*range(6), 900, 50}
        assert [r.how for r in middleware.sessions(session)[0].receipts] == ["salvaged"]
        assert runtime.counters.salvaged == 1 and not events.of("error")
        assert len(stored(session)) == 14 and not summaries(stored(session))


@virtual
async def test_a_store_serves_a_session_whose_state_was_lost() -> None:
    """The caller keeps the messages alone: the summary comes out of the runtime's store, and is not paid for again."""
    session = AgentSession(session_id="user/42")
    chat: list[Message] = []
    store = FlakyStore()  # it works, and keeps what it holds when a runtime closes
    async with make_runtime(store=store) as runtime:
        client, agent, _ = made(runtime, summarizer())
        for k in range(6):
            chat.append(user(f"<{k}> question", size=60))
            chat += (await client_run(agent, chat, session)).messages
            await settle(1)
        assert summaries(client.requests[-1])
    model = summarizer()
    async with make_runtime(store=store) as runtime:
        client, agent, _ = made(runtime, model)
        await client_run(agent, [*chat, user("<50>")], AgentSession(session_id="user/42"))
        assert summaries(client.requests[0]) and model.calls == 0


async def client_run(agent: Agent[Any], chat: list[Message], session: AgentSession) -> Any:
    """A run on the whole list, in which the framework keeps no history of its own."""
    session.state.pop("in_memory", None)
    return await agent.run(list(chat), session=session)


@virtual
async def test_state_is_plain_json() -> None:
    """Lists, texts and numbers only, no type of ours to register; it does not grow with the turns."""
    session = await session_with_a_summary()
    held = session.state[STATE_KEY]
    assert json.loads(json.dumps(held)) == held
    assert held["v"] == 1 and [len(v) for v in held["views"].values()] == [1]
    later = await session_with_a_summary(18)
    assert len(json.dumps(later.state[STATE_KEY])) < 2 * len(json.dumps(held))


@virtual
async def test_an_edited_history_is_not_given_the_old_summary() -> None:
    """After a restart an edit before the summary's end shows: raw messages are sent, and all of them."""
    session = through_json(await session_with_a_summary())
    stored(session)[0].contents[0].text = "<77> another question"
    model = summarizer()
    async with make_runtime() as runtime:
        client, agent, _ = made(runtime, model)
        await ask(agent, "<50> question", session)
        assert not summaries(client.requests[0])
        assert len(client.requests[0]) == 13
        assert 77 in marks(client.requests[0]) and 0 not in marks(client.requests[0])


@virtual
async def test_an_edit_that_is_taken_back_finds_the_summary_again() -> None:
    """A run on an edited history does not throw away what was committed before: it is still there after a restart."""
    session = through_json(await session_with_a_summary())
    first = stored(session)[0].contents[0]
    was = first.text
    async with make_runtime() as runtime:
        client, agent, _ = made(runtime, summarizer())
        first.text = "<77> another question"
        await ask(agent, "<50> question", session)
        assert not summaries(client.requests[-1])
    first.text = was
    del stored(session)[12:]
    model = summarizer()
    async with make_runtime() as runtime:
        client, agent, _ = made(runtime, model)
        await ask(agent, "<51> question", through_json(session))
        assert summaries(client.requests[-1]) and model.calls == 0


@virtual
async def test_a_deleted_message_drops_nothing_else() -> None:
    """Messages are told by digest, not by place: after a deletion the others are all there."""
    session = through_json(await session_with_a_summary())
    del stored(session)[2:4]
    async with make_runtime() as runtime:
        client, agent, _ = made(runtime, summarizer())
        await ask(agent, "<50> question", session)
        assert marks(client.requests[0]) == {0, 2, 3, 4, 5, 900, 50}


@virtual
async def test_a_fork_is_a_branch_of_its_own() -> None:
    """A copy of the session goes its own way with the common summary; neither reads the other's messages."""
    async with make_runtime() as runtime:
        model = summarizer()
        client, agent, _ = made(runtime, model)
        session = agent.create_session()
        await talk(agent, session, 6)
        paid = model.calls
        fork = through_json(session)
        assert fork.session_id == session.session_id
        await ask(agent, "<50> here", session)
        await ask(agent, "<60> there", fork)
        here, there = client.requests[-2:]
        assert summaries(here) == summaries(there) != [] and model.calls == paid
        for k in range(8):
            await ask(agent, fill(f"<{51 + k}> here", 60), session)
            await ask(agent, fill(f"<{61 + k}> there", 60), fork)
            await settle(1)
            here, there = client.requests[-2:]
            assert summaries(here) and summaries(there)
            assert not {m for m in marks(here) if 60 <= m < 70} and not {m for m in marks(there) if 50 <= m < 60}
            assert not faults(here) and not faults(there)
        assert len(stored(session)) == len(stored(fork)) == 30


@virtual
async def test_an_older_copy_goes_on_from_where_it_was() -> None:
    """Time travel: a snapshot of before two commits is loaded; what it holds applies, nothing newer does."""
    async with make_runtime() as runtime:
        client, agent, _ = made(runtime, summarizer())
        session = agent.create_session()
        await talk(agent, session, 5)
        then = copy.deepcopy(session)
        await talk(agent, session, 8, first=5)
        await ask(agent, "<50> question", then)
        assert marks(client.requests[-1]) == {*range(5), 900, 50}
        assert not faults(client.requests[-1])
        await ask(agent, "<51> question", session)
        assert marks(client.requests[-1]) == {*range(13), 900, 51}


@virtual
async def test_state_of_others_is_left_alone() -> None:
    """Another middleware's part stays; broken, foreign or newer state is ignored, never an error of the turn."""
    for odd in (
        None,
        "text",
        {"v": 2, "views": {"agent": ["x"]}},
        {"v": 1, "views": ["x"]},
        {"v": 1, "views": {"agent": "x"}},
        {"v": 1, "views": {"agent": [3, "{", '{"v": 1}']}},
        {"v": 1, "views": {"other": ["theirs"]}},
    ):
        events = Events()
        async with make_runtime(on_event=events) as runtime:
            client, agent, middleware = made(runtime, summarizer())
            session = agent.create_session()
            session.state[STATE_KEY] = odd
            await talk(agent, session, 6)
            assert summaries(client.requests[-1])
            views = session.state[STATE_KEY]["views"]
            assert len(views["agent"]) == 1 and json.loads(views["agent"][0])["codec"] == "agent-framework"
            if isinstance(odd, dict) and "other" in odd["views"]:
                assert views["other"] == ["theirs"]
                await middleware.forget(session)
                assert session.state[STATE_KEY] == {"v": 1, "views": {"other": ["theirs"]}}
            unread = [e for e in events.of("error") if e.data["where"] == "agent_framework.restore"]
            assert len(unread) == (odd is not None and not (isinstance(odd, dict) and "other" in odd["views"]))
            assert {e.data["where"] for e in events.of("error")} <= {"restore", "agent_framework.restore"}


@virtual
async def test_a_copy_of_the_state_stays_what_it_was() -> None:
    """Somebody holds the state's value: later commits do not reach into it."""
    async with make_runtime() as runtime:
        _, agent, _ = made(runtime, summarizer())
        session = agent.create_session()
        await talk(agent, session, 6)
        held = session.state[STATE_KEY]
        before = copy.deepcopy(held)
        await talk(agent, session, 6, first=6)
        assert session.state[STATE_KEY] != before and held == before


@virtual
async def test_work_of_a_model_without_a_name_stays_in_the_process() -> None:
    """Nothing is written that another process could not tell the origin of."""
    async with make_runtime() as runtime:
        client = FakeClient(reply=lambda messages: [text(fill("reply", 60))])
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(summarizer(), trigger=("messages", 6))))
        session = agent.create_session()
        await talk(agent, session, 6)
        assert summaries(client.requests[-1])
        assert STATE_KEY not in session.state


@virtual
async def test_forgetting_cancels_and_forgets() -> None:
    """What is prepared ends, what was committed is gone from memory and state; the next run sends raw messages."""
    async with make_runtime() as runtime:
        model = summarizer()
        client, agent, middleware = made(runtime, model)
        session = agent.create_session()
        await talk(agent, session, 6)
        model.mode = "hold"
        while not model.running:
            await talk(agent, session, 1, first=40)
        (line,) = middleware.sessions(session)
        handle = line.lookahead
        assert handle is not None
        await middleware.forget(session)
        assert str(handle.reason) == "session_closed" and line.closed
        assert STATE_KEY not in session.state and middleware.sessions(session) == []
        await settle(1)
        assert model.cancelled == 1 and model.running == 0
        model.mode = "answer"
        held = len(stored(session))
        await ask(agent, "<50> question", session)
        assert not summaries(client.requests[-1]) and len(client.requests[-1]) == held + 1
        await middleware.forget(agent.create_session())  # one that was never used


@virtual
async def test_a_cleared_history_starts_anew() -> None:
    """The framework's history is emptied: nothing of the old conversation comes back."""
    async with make_runtime() as runtime:
        client, agent, _ = made(runtime, summarizer())
        session = agent.create_session()
        await talk(agent, session, 8)
        stored(session).clear()
        for k in range(8):
            await ask(agent, fill(f"<{50 + k}> question", 60), session)
            await settle(1)
            assert not any(m < 50 for m in marks(client.requests[-1]))
        assert summaries(client.requests[-1])


@pytest.mark.parametrize("back", [False, True])
@virtual
async def test_lists_of_messages_branch_as_sessions_do(back: bool) -> None:
    """Without a session: the caller edits its list; the summary goes, and comes back with the old text."""
    async with make_runtime() as runtime:
        model = summarizer()
        client, agent, _ = made(runtime, model)
        chat: list[Message] = [user("<99> opening")]
        for k in range(8):
            chat += [user(f"<{k}> question", size=60)]
            chat += (await agent.run(list(chat))).messages
            await settle(1)
        assert summaries(client.requests[-1])
        paid = model.calls
        edited = [chat[0], user("<70> another"), *chat[2:]]
        await agent.run([*edited, user("<71> next")])
        assert not any("<0>" in s for s in summaries(client.requests[-1])) and 70 in marks(client.requests[-1])
        if back:
            await agent.run([*chat, user("<72> next")])
            assert any("<0>" in s for s in summaries(client.requests[-1])) and 70 not in marks(client.requests[-1])
            assert model.calls <= paid + 1
        assert CODEC.name == "agent-framework"
