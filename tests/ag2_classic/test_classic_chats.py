"""AG2 classic: the hook in sync and async chats. The agents and the chats are the framework's own."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from autogen import ConversableAgent
from chats import HeldModel, assistant, seen, settle, sleeper, small, summarised, user

from helpers import Events, FakeSummarizer, make_runtime, problems, virtual
from smoothctx import ConfigurationError, Reason, Runtime
from smoothctx_autogen.ag2_classic import attach

CONTEXT = {"template": "for prompts"}


@virtual
async def test_transform_turns_of_an_async_chat_take_no_longer_than_others() -> None:
    """Thirty turns of 0.3 s with a summariser of 2 s: each takes 0.3 s, those that rewrite as well."""
    model = FakeSummarizer(delay=2.0)
    agent, asked = sleeper(0.3)
    async with make_runtime() as runtime:
        attached = attach(agent, runtime, small(model, trigger=("messages", 20)))
        await user(30).a_initiate_chat(agent, message="<0> question", silent=True)
        starts = [at for at, _ in asked]
        assert [round(b - a, 6) for a, b in zip(starts, starts[1:], strict=False)] == [0.3] * 29
        rewrites = [r for s in attached.sessions() for r in s.receipts]
        assert len(rewrites) >= 2 and {(r.how, r.waited_s) for r in rewrites} == {("ready", 0.0)}
        assert len(asked[-1][1]) < 30 and summarised(asked[-1][1])
        assert seen(asked[-1][1]) == set(range(59)), "the summary and the kept messages cover every message"


@virtual
async def test_the_loop_is_never_held_up() -> None:
    """A ticker beside the chat ticks on time whatever the summariser does."""
    model = FakeSummarizer("hang")
    agent, _ = sleeper(0.3)
    late: list[float] = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            late.append(loop.time() - due)

    async with make_runtime() as runtime:
        attach(agent, runtime, small(model))
        async with asyncio.TaskGroup() as group:
            ticker = group.create_task(tick())
            await user(12).a_initiate_chat(agent, message="<0> question", silent=True)
            ticker.cancel()
    assert model.calls >= 1 and max(late) < 1e-6


def test_a_sync_chat_goes_on_while_the_summariser_hangs() -> None:
    """No turn waits: the whole chat runs while the summariser is held, and its result is used once it is there."""
    model = HeldModel()
    agent, requests = assistant(lambda m: f"<{2 * len(requests) - 1}> answer")
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, small(model, trigger=("messages", 14)))
        person = user(10)
        person.initiate_chat(agent, message="<0> question", silent=True)
        assert model.started.wait(30) and not any(map(summarised, requests))
        assert [len(r) for r in requests] == list(range(2, 22, 2)), "the raw history each turn, system message first"
        handle = attached.sessions()[0].lookahead
        assert handle is not None
        model.let_go()
        handle.wait_sync(30)
        person.send("<20> question", agent, request_reply=True, silent=True)
        assert summarised(requests[-1]) and len(requests[-1]) < len(requests[-2])
        assert seen(requests[-1]) >= set(range(0, 21, 2)) and not problems(requests[-1])


def test_the_live_list_is_never_touched() -> None:
    """With and without us the agents hold the same messages, and the view is a list of its own."""
    held = []
    for on in (False, True):
        agent, _ = assistant(lambda m: "answer")
        person = user(1)
        with Runtime.in_thread() as runtime:
            attached = attach(agent, runtime, small(HeldModel(held=False))) if on else None
            views: list[Any] = []
            agent.register_hook("process_all_messages_before_reply", lambda m, views=views: views.append(m) or m)
            for turn in range(12):
                message = {"content": f"<{turn}> question {'lorem ipsum ' * 20}", "context": dict(CONTEXT)}
                person.send(message, agent, request_reply=True, silent=True)
                settle(attached)
        live = agent.chat_messages[person]
        assert any(v is live for v in views) is not on
        assert any(map(summarised, views)) is on
        if on:
            assert all(m is n for m, n in zip(views[1], live, strict=False)), "its own message objects"
        held.append(copy.deepcopy(live))
    assert held[0] == held[1]


def test_a_sync_chat_waits_at_the_hard_limit() -> None:
    """At the hard limit a sync chat waits for the promoted lookahead and uses it."""
    model = HeldModel(held=False)
    agent, requests = assistant(lambda m: "answer")
    policy = small(model, trigger=("messages", 8), hard_limit=("messages", 8), max_wait=30.0)
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, policy)
        user(9).initiate_chat(agent, message="<0> question", silent=True)
        hows = {r.how for s in attached.sessions() for r in s.receipts}
        assert hows <= {"promoted", "ready"} and hows, hows
        assert max(map(len, requests)) <= 1 + 8 and summarised(requests[-1])


@virtual
async def test_an_async_chat_falls_back_at_once_at_the_hard_limit() -> None:
    """The hook cannot wait there: the local fallback, and the summary supersedes it when it is ready."""
    model = FakeSummarizer(delay=1.0)
    agent, asked = sleeper(0.3)
    policy = small(model, trigger=("messages", 8), hard_limit=("messages", 8), land_at=("messages", 4))
    async with make_runtime() as runtime:
        attached = attach(agent, runtime, policy)
        await user(20).a_initiate_chat(agent, message="<0> question", silent=True)
        starts = [at for at, _ in asked]
        assert [round(b - a, 6) for a, b in zip(starts, starts[1:], strict=False)] == [0.3] * 19
        hows = [r.how for s in attached.sessions() for r in s.receipts]
        assert "fallback" in hows and "ready" in hows, hows
        assert max(len(m) for _, m in asked) <= 8
        assert any(summarised(m) for _, m in asked)


@virtual
async def test_a_cancelled_chat_neither_loses_nor_repeats_a_message() -> None:
    """Cancelled in the middle of a model call: the history is what the framework made it, and the chat goes on."""
    model = FakeSummarizer(delay=0.5)
    agent, asked = sleeper(0.3)
    person = user(1000)
    async with make_runtime() as runtime:
        attached = attach(agent, runtime, small(model))
        async with asyncio.TaskGroup() as group:
            run = group.create_task(person.a_initiate_chat(agent, message="<0> question", silent=True))
            await asyncio.sleep(0.3 * 9 + 0.1)
            run.cancel()
        assert run.cancelled()
        held = copy.deepcopy(agent.chat_messages[person])
        assert [m["content"].split(" ")[0] for m in held] == [f"<{n}>" for n in range(len(held))]
        await asyncio.sleep(5)
        assert agent.chat_messages[person] == held
        await person.a_send("<100> again", agent, request_reply=False, silent=True)
        await agent.a_generate_reply(sender=person)
        assert seen(asked[-1][1]) == {*range(len(held)), 100}
        assert any(r.how == "ready" for s in attached.sessions() for r in s.receipts)


@pytest.mark.parametrize("clear", ["reset", "clear_history"])
@virtual
async def test_clearing_the_history_cancels_and_forgets(clear: str) -> None:
    """``reset`` and ``clear_history`` end the lookahead under way, and nothing of it comes back."""
    model = FakeSummarizer("hang")
    agent, asked = sleeper(0.1)
    async with make_runtime() as runtime:
        attached = attach(agent, runtime, small(model))
        person = user(6)
        await person.a_initiate_chat(agent, message="<0> question", silent=True)
        session = attached.sessions()[0]
        handle = session.lookahead
        assert handle is not None and model.running == 1
        getattr(agent, clear)()
        assert attached.sessions() == [] and session.closed and handle.reason is Reason.SESSION_CLOSED
        await asyncio.sleep(0.1)
        assert model.cancelled == 1 and model.running == 0
        await person.a_initiate_chat(agent, message="<50> hello", silent=True)
        assert seen(asked[-1][1]) == {50}


@virtual
async def test_a_new_chat_with_the_same_person_starts_over() -> None:
    """``initiate_chat`` clears by default: the sessions of that person end, those of others do not."""
    model = FakeSummarizer("hang")
    agent, asked = sleeper(0.1)
    async with make_runtime() as runtime:
        attached = attach(agent, runtime, small(model))
        one, two = user(6, name="one"), user(6, name="two")
        await one.a_initiate_chat(agent, message="<0> question of one", silent=True)
        await two.a_initiate_chat(agent, message="<1> question of two", silent=True)
        first, second = attached.sessions()
        assert first.lookahead is not None and second.lookahead is not None
        await one.a_initiate_chat(agent, message="<9> anew", silent=True)
        assert first.closed and not second.closed
        assert seen(asked[-1][1]) == {9}


@virtual
async def test_two_chats_of_one_agent_are_kept_apart() -> None:
    """Two people who open alike: nobody reads the other's summary (state is keyed by the conversation)."""
    model = FakeSummarizer(delay=0.2)
    agent, asked = sleeper(0.1)
    async with make_runtime() as runtime:
        attached = attach(agent, runtime, small(model))
        one, two = user(name="one"), user(name="two")
        for person in (one, two):
            await person.a_send("hello", agent, request_reply=False, silent=True)
        for turn in range(12):
            for person, base in ((one, 1000), (two, 2000)):
                await person.a_send(f"<{base + turn}> mine", agent, request_reply=False, silent=True)
                reply = await agent.a_generate_reply(sender=person)
                mine = seen(asked[-1][1])
                other = 3000 - base
                assert not mine & set(range(other, other + 100)), "a message of the other chat"
                assert {m for m in mine if m >= 1000} == set(range(base, base + turn + 1))
                await agent.a_send(f"{person.name}: {len(str(reply))}", person, request_reply=False, silent=True)
        assert len(attached.sessions()) == 2 and any(summarised(m) for _, m in asked)


@virtual
async def test_names_of_chats_that_are_over_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that talks with one person after the other holds the names of those with open sessions only."""
    monkeypatch.setattr("smoothctx_autogen.ag2_classic.MAX_OTHERS", 5)
    agent, _ = sleeper(0.1)
    async with make_runtime(max_sessions=3) as runtime:
        attached = attach(agent, runtime, small(FakeSummarizer()))
        for k in range(40):
            await user(2, name=f"person-{k}").a_initiate_chat(agent, message="<0> hello", silent=True)
            assert len(attached._others) <= 5 and len(attached.sessions()) <= 3


@virtual
async def test_an_edited_history_is_not_answered_with_a_stale_summary() -> None:
    """A message that the summary covers is edited: the view shows the edit, not the summary of what was."""
    model = FakeSummarizer(delay=0.2)
    agent, asked = sleeper(0.1)
    async with make_runtime() as runtime:
        attach(agent, runtime, small(model))
        person = user(10)
        await person.a_initiate_chat(agent, message="<0> question", silent=True)
        assert summarised(asked[-1][1])
        agent.chat_messages[person][0]["content"] = "<77> edited"
        await person.a_send("<78> and now?", agent, request_reply=False, silent=True)
        await agent.a_generate_reply(sender=person)
        assert 77 in seen(asked[-1][1]) and 0 not in seen(asked[-1][1])


def test_context_of_a_message_is_not_part_of_its_digest() -> None:
    """The framework takes ``context`` out of the newest message when it asks the model: no new branch for that."""
    events = Events()
    agent, _ = assistant(lambda m: "answer")
    with Runtime.in_thread(on_event=events) as runtime:
        attached = attach(agent, runtime, small(HeldModel(held=False)))
        person = user()
        for turn in range(8):
            message = {"content": f"<{turn}> question", "context": dict(CONTEXT)}
            person.send(message, agent, request_reply=False, silent=True)
            agent.send(str(agent.generate_reply(sender=person)), person, request_reply=False, silent=True)
            settle(attached)
        assert len(attached.sessions()) == 1 and not events.of("view.dropped")
        assert [r.how for r in attached.sessions()[0].receipts].count("ready") >= 1


@virtual
async def test_errors_of_ours_never_reach_the_chat(caplog: pytest.LogCaptureFixture) -> None:
    """A closed runtime, a message that cannot be read: the chat goes on with what it holds, which is said once."""
    events = Events()
    agent, asked = sleeper(0.1)
    runtime = make_runtime(on_event=events)
    async with runtime:
        attached = attach(agent, runtime, small(FakeSummarizer()))
        odd = [{"role": "user", "content": "hi"}, {"role": "nobody", "content": "?"}]
        assert attached._before_reply(odd) == odd
        assert events.of("message.unreadable")
    await user(5).a_initiate_chat(agent, message="<0> question", silent=True)
    assert [len(m) for _, m in asked] == [1, 3, 5, 7, 9]
    (event,) = events.of("turn.raw")
    assert event.data["where"] == "ag2_classic" and "raw messages" in event.data["why"]
    assert [r.levelname for r in caplog.records if r.name == "smoothctx.ag2_classic"] == ["WARNING"]
    assert not events.of("error")


@virtual
async def test_detach_leaves_the_agent_as_it_was() -> None:
    """No hook, no patched method, no session, no task."""
    model = FakeSummarizer("hang")
    agent, asked = sleeper(0.1)
    async with make_runtime() as runtime:
        hooks = {k: list(v) for k, v in agent.hook_lists.items()}
        attached = attach(agent, runtime, small(model))
        with pytest.raises(ConfigurationError, match="attached already"):
            attach(agent, runtime, small(model))
        await user(6).a_initiate_chat(agent, message="<0> question", silent=True)
        assert attached.sessions()
        attached.detach()
        attached.detach()
        assert agent.hook_lists == hooks
        for method in ("clear_history", "generate_reply", "a_generate_reply"):
            assert method not in vars(agent) and getattr(agent, method).__func__ is getattr(ConversableAgent, method)
        await asyncio.sleep(0.1)
        assert model.running == 0 and attached.sessions() == []
        attach(agent, runtime, small(model)).detach()


@pytest.mark.parametrize(
    ("change", "names"),
    [({"agent": object()}, "agent"), ({"runtime": None}, "runtime"), ({"policy": "x"}, "policy")],
)
def test_wrong_values_are_named(change: dict[str, Any], names: str) -> None:
    """Configuration mistakes raise at once, in the caller's words."""
    agent, _ = assistant(lambda m: "answer")
    with Runtime.in_thread() as runtime:
        given = {"agent": agent, "runtime": runtime, "policy": small(HeldModel()), **change}
        with pytest.raises(ConfigurationError, match=f"^{names}="):
            attach(**given)
