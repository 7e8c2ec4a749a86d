"""Beside us: services that store the history, people who have to agree, and the framework's own compaction."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from agent_framework import (
    AgentSession,
    ChatContext,
    ChatMiddleware,
    CompactionProvider,
    InMemoryHistoryProvider,
    Message,
    MessageInjectionMiddleware,
    SlidingWindowStrategy,
    SummarizationStrategy,
)

from agent_framework_fakes import (
    CODEC,
    FakeClient,
    agent_of,
    ask,
    call,
    delete,
    faults,
    lookup,
    marks,
    stored,
    summaries,
    text,
    user,
)
from driving import small_policy
from helpers import Events, FakeSummarizer, fill, make_runtime, settle, virtual
from smoothctx_autogen.agent_framework import LookaheadMiddleware

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def replies(**options: Any) -> FakeClient:
    """A client that answers at some length."""
    return FakeClient(reply=lambda messages: [text(fill("<900> reply", 60))], **options)


class Storing(FakeClient):
    """A client whose service stores by default."""

    STORES_BY_DEFAULT = True


class Raw(ChatMiddleware):
    """Stands before ours and keeps what it is given."""

    def __init__(self) -> None:
        self.held: list[list[Message]] = []

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        self.held.append(list(context.messages))
        await call_next()


# -- the service stores the history ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["store", "default", "conversation_id", "service session"])
@virtual
async def test_where_the_service_stores_it_stays_out_of_the_way(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The call gets its messages as they are; it is said once, as an event and in the log."""
    client, events, model = (Storing if how == "default" else FakeClient)(), Events(), FakeSummarizer()
    client.conversation_id = "conv-1"
    options = {"store": {"store": True}, "conversation_id": {"conversation_id": "conv-1"}}.get(how, {})
    async with make_runtime(on_event=events) as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model))
        agent = agent_of(client, middleware, default_options=options or None)
        service = how == "service session"
        session = AgentSession(service_session_id="conv-1") if service else agent.create_session()
        with caplog.at_level(logging.WARNING, "smoothctx.agent_framework"):
            for k in range(8):
                await ask(agent, f"<{k}> question", session)
                await settle(1)
        assert [len(r) for r in client.requests] == [1] * 8
        assert model.calls == 0 and middleware.sessions(session) == []
        said = events.of("history.elsewhere")
        assert len(said) == len(caplog.records) == len({e.data["why"] for e in said}) <= 2
        assert said and said[0].data["why"] in caplog.records[0].getMessage()


@virtual
async def test_store_false_hands_the_history_back() -> None:
    """A client that stores by default, told not to: the middleware works."""
    client = Storing(reply=lambda messages: [text(fill("reply", 60))])
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6)))
        agent = agent_of(client, middleware, default_options={"store": False})
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
        assert summaries(client.requests[-1])


@virtual
async def test_history_that_is_loaded_behind_us_is_left_alone() -> None:
    """Per-call persistence loads and stores the history behind every middleware: the model still gets all of it, once;
    from the second run on not even a fallback changes what would be stored."""
    client, events = replies(), Events()
    client.reply = lambda messages: [call("c1", key="1")] if messages[-1].role == "user" else [text("done")]
    policy = small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6), hard_limit=("messages", 8))
    async with make_runtime(on_event=events) as runtime:
        middleware = LookaheadMiddleware(runtime, policy)
        agent = agent_of(
            client,
            middleware,
            tools=[lookup],
            context_providers=[InMemoryHistoryProvider()],
            require_per_service_call_history_persistence=True,
        )
        session = agent.create_session()
        for k in range(5):
            await ask(agent, f"<{k}> question", session)
            await settle(1)
        assert all(not faults(r) for r in client.requests)
        assert [len(r) for r in client.requests] == [n for k in range(5) for n in (4 * k + 1, 4 * k + 3)]
        many = [m for k in range(50, 60) for m in (user(f"<{k}>"), Message("assistant", ["yes"]))]
        await agent.run([*many, user("<60>")], session=session)
        assert {*range(5), *range(50, 61)} <= marks(client.requests[-1]) and not summaries(stored(session))
        assert {*range(5), *range(50, 61)} <= marks(stored(session))
        assert any("loaded behind" in e.data["why"] for e in events.of("history.elsewhere"))


@virtual
async def test_messages_that_are_injected_behind_us_are_no_such_history() -> None:
    """The framework's message injection appends to the view: the middleware goes on with its work."""
    client = replies()
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6)))
        inject = MessageInjectionMiddleware()
        agent = agent_of(client, middleware)
        agent.middleware = [middleware, inject]
        session = agent.create_session()
        for k in range(8):
            inject.enqueue_messages(session, f"<{100 + k}> by the way")
            await ask(agent, fill(f"<{k}> question", 60), session)
            assert 100 + k in marks(client.requests[-1])
            await settle(1)
        assert summaries(client.requests[-1]) and not faults(client.requests[-1])


# -- a person has to agree -----------------------------------------------------------------------------------------


@STREAMS
@virtual
async def test_a_call_that_waits_for_a_person_is_never_rewritten_away(stream: bool) -> None:
    """Many turns in front of it are summarised; the call and its siblings stay until they are answered."""
    client, model = replies(), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware, tools=[lookup, delete])
        session = agent.create_session()
        for k in range(6):
            await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
            await settle(1)
        talks = client.reply
        client.reply = lambda messages: [call("d1", "delete", key="70"), call("l1", key="71")]
        response = await agent.run("<50> delete it", session=session)
        (request,) = response.user_input_requests
        await settle(10)
        client.reply = talks
        await agent.run(Message("user", [request.to_function_approval_response(True)]), session=session)
        after = client.requests[-1]
        assert not faults(after) and summaries(after)
        assert [c.call_id for m in after for c in m.contents if c.type == "function_call"] == ["d1", "l1"]
        assert [c.call_id for m in after for c in m.contents if c.type == "function_result"] == ["d1", "l1"]
        assert {50, 70, 71} <= marks(after)
        for k in range(6):
            await ask(agent, fill(f"<{60 + k}> question", 60), session, stream=stream)
            await settle(1)
        assert all(not faults(r) for r in client.requests)


@virtual
async def test_an_answer_that_comes_many_turns_later_finds_its_call() -> None:
    """After six other turns the framework brings call and result back: requests are no worse for us (B14)."""
    client, model = replies(), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        raw, middleware = Raw(), LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware, tools=[delete])
        agent.middleware = [raw, middleware]
        session = agent.create_session()
        await ask(agent, "<1> hello", session)
        talks = client.reply
        client.reply = lambda messages: [call("d1", "delete", key="70")]
        (request,) = (await agent.run("<50> delete it", session=session)).user_input_requests
        client.reply = talks
        for k in range(6):
            await ask(agent, fill(f"<{60 + k}> meanwhile", 60), session)
            await settle(1)
        assert summaries(client.requests[-1])
        await agent.run(Message("user", [request.to_function_approval_response(True)]), session=session)
        await settle(1)
        await ask(agent, "<99> and now?", session)
        assert len(raw.held) == len(client.requests) == 10
        for held, request in zip(raw.held, client.requests, strict=True):
            assert len(faults(request)) <= len(faults(held)), (faults(request), faults(held))
        assert 70 in marks(client.requests[-1]) and 70 in marks(client.requests[-2])
        assert {1, 50, *range(60, 66), 99} <= marks(client.requests[-1])


# -- the framework's own compaction --------------------------------------------------------------------------------


@virtual
async def test_a_strategy_of_the_framework_works_on_the_view() -> None:
    """Both at once: ours first, theirs on what is left; requests stay valid, our summary is as we made it each time."""
    client, model = replies(), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware, compaction_strategy=SlidingWindowStrategy(keep_last_groups=8))
        session = agent.create_session()
        for k in range(14):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
        assert all(not faults(r) and len(r) <= 9 for r in client.requests)
        assert summaries(client.requests[-1])
        for line in middleware.sessions(session):
            for applied in line.branch.applied:
                for edit in applied.edits:
                    assert all(not m.additional_properties for m in edit.messages)
        assert len(stored(session)) == 28


@virtual
async def test_what_a_strategy_left_out_does_not_come_back(caplog: pytest.LogCaptureFixture) -> None:
    """A summarising strategy in a tool loop marks messages as excluded: they count no more and are not sent, and the
    strategy goes on as it does behind a middleware that does nothing."""
    found = []
    for ours in (False, True):
        client = replies()
        theirs = FakeClient(reply=lambda messages: [text("".join(f"<{m}>" for m in sorted(marks(messages))))])
        client.reply = lambda messages, client=client: (
            [text(fill("<900> done", 60))]
            if len(client.requests) % 9 == 0
            else [call(f"c{len(client.requests)}", key=f"{700 + len(client.requests)}")]
        )
        caplog.clear()
        async with make_runtime() as runtime:
            middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer("hang"), trigger=("messages", 6)))
            strategy = SummarizationStrategy(client=theirs, target_count=2, threshold=1)
            agent = agent_of(client, None, tools=[lookup], compaction_strategy=strategy)
            agent.middleware = [middleware if ours else Raw()]
            session = agent.create_session()
            with caplog.at_level(logging.WARNING, "agent_framework"):
                for k in range(3):
                    await ask(agent, fill(f"<{k}> question", 60), session)
            if ours:
                assert middleware.sessions(session)[-1].branch.messages < 40, "of more than fifty"
        assert theirs.requests and max(map(len, client.requests)) <= 6
        found.append(
            ([[CODEC.visible(m) for m in r] for r in client.requests], len(theirs.requests), len(caplog.records))
        )
    assert found[0] == found[1]


@virtual
async def test_a_strategy_may_summarise_our_summary(caplog: pytest.LogCaptureFixture) -> None:
    """It is told what ours stands for, so what it makes of it is accepted; nothing of the conversation is missing."""
    client, model = replies(), FakeSummarizer(delay=0.1)
    theirs = FakeClient(reply=lambda messages: [text("".join(f"<{m}>" for m in sorted(marks(messages))))])
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        strategy = SummarizationStrategy(client=theirs, target_count=2, threshold=1)
        agent = agent_of(client, middleware, compaction_strategy=strategy)
        session = agent.create_session()
        with caplog.at_level(logging.WARNING, "agent_framework"):
            for k in range(10):
                await ask(agent, fill(f"<{k}> question", 60), session)
                await settle(1)
                assert {*range(k + 1)} <= marks(client.requests[-1])
        assert any("conversation_summary" in m.text for r in theirs.requests for m in r), "it read ours"
        assert not caplog.records
        assert [len(m.contents) for m in stored(session)] == [1] * 20


@virtual
async def test_a_compaction_provider_changes_the_history_that_we_see() -> None:
    """Its rewritten history is simply another branch: valid requests, no summary of what is gone."""
    client, model = replies(), FakeSummarizer(delay=0.1)
    history = InMemoryHistoryProvider(skip_excluded=True)
    compaction = CompactionProvider(after_strategy=SlidingWindowStrategy(keep_last_groups=6))
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 4)))
        agent = agent_of(client, middleware, context_providers=[history, compaction])
        session = agent.create_session()
        for k in range(12):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
        assert all(not faults(r) for r in client.requests)
        assert max(map(len, client.requests)) <= 9, "theirs keeps six, and works one run behind"
        assert {11, 10} <= marks(client.requests[-1])
