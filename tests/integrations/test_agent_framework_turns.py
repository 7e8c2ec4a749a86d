"""The middleware in real agents: what the model is sent, what stays stored, and that no turn waits."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from agent_framework import AgentSession, ChatMiddlewareLayer, Content, Message

from agent_framework_fakes import (
    CODEC,
    FakeClient,
    Plain,
    agent_of,
    ask,
    call,
    faults,
    lookup,
    marks,
    stored,
    summaries,
    text,
    user,
)
from driving import small_policy
from helpers import Events, FakeSummarizer, fill, make_policy, make_runtime, now, settle, virtual
from smoothctx import ConfigurationError, KeepRecent, Policy, Runtime, Summarize
from smoothctx_autogen.agent_framework import LookaheadMiddleware

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def talker(**options: Any) -> FakeClient:
    """A client whose replies carry the number of the call as their mark."""
    client = FakeClient(**options)
    client.reply = lambda messages: [text(fill(f"<{1000 + len(client.requests)}> reply", 60))]
    return client


def searcher(rounds: int = 1, **options: Any) -> FakeClient:
    """A client that calls two tools at once, ``rounds`` times per question, and then answers."""
    client = FakeClient(**options)

    def reply(messages: Any) -> list[Content]:
        n = len(client.requests)
        if n % (rounds + 1):
            return [call(f"c{n}-0", key=f"{10 * n}"), call(f"c{n}-1", key=f"{10 * n + 1}")]
        return [text(fill(f"<{10 * n + 9}> answer", 40))]

    client.reply = reply
    return client


@STREAMS
@virtual
async def test_model_reads_the_view_and_the_store_stays_raw(stream: bool) -> None:
    """Requests stay short with a summary in front; the stored history has every message, unchanged."""
    client, model = talker(), FakeSummarizer(delay=0.5)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        for k in range(12):
            await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
            await settle(1)
        assert len(stored(session)) == 24
        assert marks(stored(session)) == {*range(12), *range(1001, 1013)}
        assert not summaries(stored(session))
        last = client.requests[-1]
        assert len(last) <= 8 and len(summaries(last)) == 1
        assert marks(last) == marks(stored(session)[:-1])  # what is not there in full is in the summary
        assert all(not faults(r) for r in client.requests)
        receipts = [r for s in middleware.sessions(session) for r in s.receipts]
        assert len(receipts) >= 2 and {r.how for r in receipts} == {"ready"}
        assert all(r.waited_s == 0 for r in receipts)


@virtual
async def test_what_is_not_replaced_is_the_same_content() -> None:
    """Kept messages hold the very content objects that the framework holds."""
    client = talker()
    async with make_runtime() as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1))))
        session = agent.create_session()
        for k in range(6):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
        request = client.requests[-1]
        held = {id(c) for m in stored(session) for c in m.contents}
        assert summaries(request)
        for message in request:
            if CODEC.summary_text(message) is None:
                assert all(id(c) in held for c in message.contents)


@STREAMS
@virtual
async def test_view_is_made_for_each_call_of_a_tool_loop(stream: bool) -> None:
    """Parallel calls stay with their results in every request, also where one run is longer than the window."""
    client, model = searcher(rounds=6, delay=1.0), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware, tools=[lookup])
        session = agent.create_session()
        for k in range(3):
            await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
        assert len(client.requests) == 21
        assert all(not faults(r) for r in client.requests), [faults(r) for r in client.requests]
        assert any(summaries(r) for r in client.requests[:7]), "already inside the first run"
        assert len(stored(session)) == 3 * 14 and not faults(stored(session))
        assert max(map(len, client.requests)) < 16
        for k in (0, 1, 2):
            assert k in marks(client.requests[-1])


@STREAMS
@virtual
async def test_turns_with_a_rewrite_take_as_long_as_others(stream: bool) -> None:
    """The summariser needs seven times as long as the model: no run is longer for it."""
    client, model = talker(delay=0.3), FakeSummarizer(delay=2.0)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        took = []
        for k in range(30):
            start = now()
            await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
            took.append(round(now() - start, 6))
            await asyncio.sleep(1.0)
        assert sum(len(s.receipts) for s in middleware.sessions(session)) >= 4
        assert len(set(took)) == 1


@virtual
async def test_messages_alone_name_a_conversation_without_a_session() -> None:
    """A caller that passes the whole list each time gets views as well; another opening is another conversation."""
    client, model = talker(), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6))))
        chats: list[list[Message]] = [[], []]
        for k in range(10):
            for c, chat in enumerate(chats):
                chat.append(user(f"<{100 * c + k}> question of {c}", size=60))
                response = await agent.run(list(chat))
                chat.extend(response.messages)
            await settle(1)
        for c in (0, 1):
            request = client.requests[-2 + c]
            assert summaries(request) and len(request) < 10
            assert not any(100 * (1 - c) <= m < 100 * (1 - c) + 10 for m in marks(request))


@virtual
async def test_any_number_of_conversations_without_a_session() -> None:
    """Thirty at once, in turn: each keeps what was made for it."""
    client, model = FakeClient(reply=lambda messages: [text(fill("reply", 60))]), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6))))
        chats: list[list[Message]] = [[] for _ in range(30)]
        for k in range(6):
            for c, chat in enumerate(chats):
                chat.append(user(f"<{100 * c + k}> question", size=60))
                chat.extend((await agent.run(list(chat))).messages)
            await settle(5)
        assert all(summaries(r) for r in client.requests[-30:])


@virtual
async def test_one_instance_serves_concurrent_runs() -> None:
    """Many sessions at once on one middleware: nobody reads another's messages or summary."""
    client, model = talker(delay=0.2), FakeSummarizer(delay=0.5)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware)
        sessions = [agent.create_session() for _ in range(5)]
        client.reply = lambda messages: [text(fill("reply", 60))]

        async def talk(c: int) -> None:
            for k in range(10):
                await ask(agent, fill(f"<{100 * c + k}> question", 60), sessions[c], stream=bool(c % 2))
                await asyncio.sleep(0.7)

        async with asyncio.TaskGroup() as group:
            for c in range(5):
                group.create_task(talk(c))
        assert any(summaries(r) for r in client.requests)
        for request in client.requests:
            assert len({m // 100 for m in marks(request)}) == 1
        assert all(len(stored(s)) == 20 for s in sessions)


@virtual
async def test_two_runs_of_one_session_at_once_are_branches() -> None:
    """Both get a view of what they were given; both replies are stored once."""
    client, model = talker(), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(model, trigger=("messages", 6)))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        for k in range(6):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
        client.delay = 1.0
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(agent, "<50> this", session))
            group.create_task(ask(agent, "<60> that", session, stream=True))
        this, that = client.requests[-2:]
        assert (50 in marks(this), 60 in marks(this)) == (True, False)
        assert (50 in marks(that), 60 in marks(that)) == (False, True)
        assert summaries(this) and summaries(that) and not faults(this) and not faults(that)
        client.delay = 0.0
        await ask(agent, "<70> both?", session)
        assert len(stored(session)) == 18
        assert {50, 60, 70} <= marks(client.requests[-1])


@virtual
async def test_two_agents_on_one_runtime_share_nothing() -> None:
    """Two agents, two middlewares of their own policies, one session id: two conversations."""
    async with make_runtime() as runtime:
        made = []
        for k, how in enumerate(({"trigger": ("messages", 6)}, {"trigger": ("messages", 8)})):
            client = talker()
            client.reply = lambda messages, k=k: [text(fill(f"<{500 + k}> reply", 60))]
            middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), **how), name=f"agent{k}")
            made.append((client, agent_of(client, middleware), AgentSession(session_id="same"), middleware))
        for k in range(10):
            for c, (_, agent, session, _) in enumerate(made):
                await ask(agent, fill(f"<{100 * c + k}> question", 60), session)
            await settle(1)
        for c, (client, _, session, middleware) in enumerate(made):
            assert summaries(client.requests[-1])
            assert {m // 100 for m in marks(client.requests[-1])} == {c, 5}
            assert 501 - c not in marks(client.requests[-1])
            assert len(middleware.sessions(session)) == 1


@virtual
async def test_an_agent_that_is_a_tool_has_a_context_of_its_own() -> None:
    """Parent and child share middleware and runtime: neither reads the other's conversation."""
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6)))
        inner, outer = talker(), FakeClient()
        child = agent_of(inner, middleware)
        task = Content.from_function_call
        outer.reply = lambda messages: (
            [text(fill("<1> done", 60))]
            if messages[-1].role == "tool"
            else [task(f"c{len(outer.requests)}", "bob", arguments={"task": "<2>"})]
        )
        parent = agent_of(outer, middleware, tools=[child.as_tool()])
        session = parent.create_session()
        for k in range(8):
            await ask(parent, fill(f"<{10 + k}> question", 60), session)
            await settle(1)
        assert len(inner.requests) == 8 and summaries(outer.requests[-1])
        assert all(marks(r) == {2} for r in inner.requests)
        assert {10 + k for k in range(8)} <= marks(outer.requests[-1])
        assert all(not faults(r) for r in outer.requests)


@virtual
async def test_background_keeps_away_from_the_first_token() -> None:
    """The call is in the foreground until its stream's first update, decodes until its end, and is over then."""
    client = talker(delay=1.0)
    async with make_runtime() as runtime:
        foreground = runtime.foreground(None)
        agent = agent_of(client, LookaheadMiddleware(runtime, small_policy(FakeSummarizer())))
        seen: list[tuple[bool, bool]] = []

        async def read() -> None:
            async for _ in agent.run("<1> question", session=agent.create_session(), stream=True):
                seen.append((foreground.busy, foreground.prefilling))

        reading = asyncio.get_running_loop().create_task(read())
        await client.started.wait()
        assert not seen and foreground.busy and foreground.prefilling
        await reading
        assert seen == [(True, False)]
        assert not foreground.busy
        started = asyncio.get_running_loop().create_task(ask(agent, "<2> question"))
        await settle(0.5)
        assert foreground.busy
        await started
        assert not foreground.busy


@pytest.mark.parametrize("how", ["closed", "dropped", "unread", "failed"])
@virtual
async def test_a_stream_that_ends_early_ends_the_turn(how: str) -> None:
    """Closed, dropped, never read, or broken off by the service: the foreground is free, the next run is served."""
    client, events = talker(), Events()
    async with make_runtime(on_event=events) as runtime:
        foreground = runtime.foreground(None)
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6)))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        for k in range(5):
            await ask(agent, fill(f"<{k}> question", 60), session)
            await settle(1)
        working = client.reply

        def half(messages: Any) -> Any:
            yield text("half")
            if how == "failed":
                raise RuntimeError("the service broke off")
            yield text("whole")

        client.reply = lambda messages: half(messages)  # type: ignore[return-value,assignment]
        if how == "failed":
            with pytest.raises(RuntimeError, match="broke off"):
                await ask(agent, "<90> question", session, stream=True)
        else:
            running = agent.run("<90> question", session=session, stream=True)
            if how == "unread":
                await running
            else:
                assert (await anext(aiter(running))) is not None
                assert foreground.busy
            if how == "closed":
                await running.close()
            del running
        for _ in range(3):
            gc.collect()
            await settle()
        assert not foreground.busy
        client.reply = working
        await ask(agent, "<91> question", session)
        assert summaries(client.requests[-1]) and not faults(client.requests[-1])
        assert len(middleware.sessions(session)) == 1
        assert not events.of("error")


@virtual
async def test_a_stream_that_nobody_reads_ends_the_turn() -> None:
    """A client's stream is opened and dropped: nothing of it is left in the foreground."""

    class Bare(ChatMiddlewareLayer, Plain):
        """A client without function invocation."""

    client = Bare()
    async with make_runtime() as runtime:
        client.chat_middleware = [LookaheadMiddleware(runtime, small_policy(FakeSummarizer()))]
        stream = await client.get_response([user()], stream=True)
        assert runtime.foreground(None).busy
        del stream
        gc.collect()
        await settle()
        assert not runtime.foreground(None).busy


@STREAMS
@virtual
async def test_reported_usage_counts_what_messages_do_not_show(stream: bool) -> None:
    """Instructions and tool schemas are in the provider's numbers (B99): the view's size is measured by them."""
    client = talker(usage=True)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, make_policy(FakeSummarizer()))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        await ask(agent, fill("<1> question", 60), session, stream=stream)
        (line,) = middleware.sessions(session)
        raw = sum(map(CODEC.estimate, stored(session)))
        assert raw + 90 <= line.branch.tokens <= raw + 110


@STREAMS
@virtual
async def test_what_the_calls_around_a_commit_cost_is_known(stream: bool) -> None:
    """The usage that the client reports stands in ``session.outcomes()``, with the time of each call."""
    client = talker(usage=True, delay=0.5)
    async with make_runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, small_policy(FakeSummarizer(delay=0.1)))
        agent = agent_of(client, middleware)
        session = agent.create_session()
        for k in range(12):
            await ask(agent, f"<{k}> question", session, stream=stream)
            await settle(1)
        (line,) = middleware.sessions(session)
        outcomes = line.outcomes()
        assert outcomes and outcomes[0].before and outcomes[0].after
        for call in (c for o in outcomes for c in (*o.before, *o.after)):
            assert call.usage is not None and call.usage.input_tokens > 100 and not call.usage.estimated
            assert call.total_s >= 0.5 and (call.ttft_s is not None) == stream


@virtual
async def test_a_runtime_of_its_own_thread_serves_short_loops() -> None:
    """(The runtime's loop is another one than the run's.)"""
    with Runtime.in_thread() as runtime:
        policy = Policy(
            KeepRecent(("messages", 4)), trigger=("messages", 8), hard_limit=("messages", 12), land_at=("messages", 6)
        )
        client = talker()
        middleware = LookaheadMiddleware(runtime, policy)
        agent = agent_of(client, middleware)
        session = agent.create_session()
        for k in range(12):
            await ask(agent, fill(f"<{k}> question", 60), session)
        assert all(len(r) <= 12 and not faults(r) for r in client.requests)
        assert len(stored(session)) == 24


def test_wrong_arguments_are_named() -> None:
    """Runtime, policy, name, tenant."""
    policy = Policy(Summarize(FakeSummarizer()), context_window=1000)
    runtime = Runtime()
    for arguments, where in (
        ((None, policy), "runtime="),
        ((runtime, None), "policy="),
    ):
        with pytest.raises(ConfigurationError, match=where):
            LookaheadMiddleware(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="name=''"):
        LookaheadMiddleware(runtime, policy, name="")
    with pytest.raises(ConfigurationError, match="tenant=3"):
        LookaheadMiddleware(runtime, policy, tenant=3)  # type: ignore[arg-type]
