"""``LookaheadMiddleware`` in ``create_agent``: what the model sees, what the state keeps, and whom it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    ToolCallLimitMiddleware,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import BaseModel

from graphs import HANG_S, Events, ask, idle, marks, on, policy_of, true_to
from helpers import FakeSummarizer
from lg_agents import agent_of, caller, covered, is_summary, reply, talk, talk_sync, talker
from smoothctx import Chain, MemoryStore, Offload, Policy, Runtime, Summarize
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.saved import SAVED_KEY

pytestmark = pytest.mark.langgraph


@tool
def look(what: str = "") -> str:
    """Look something up."""
    return f"found {what} " + "lorem ipsum " * 200


async def test_the_model_sees_the_view_and_the_state_keeps_the_messages() -> None:
    """Fewer messages are sent than held, what is sent tells of all of them, and the state is as without us."""
    async with Runtime() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        state = await talk(agent, runtime, on("t"), range(10))
        assert len(state["messages"]) == 20 and not any(map(is_summary, state["messages"]))
        assert len(model.sent[-1]) < 8 and covered(model.sent[-1])
        held: list[Any] = []
        for k, view in enumerate(model.sent):
            held = state["messages"][: 2 * k + 1]
            assert true_to(view, held)
        assert marks(held) == set(range(19))


def test_a_synchronous_agent_sees_the_view() -> None:
    """``invoke`` and ``stream`` work with a runtime in a thread of its own."""
    with Runtime.in_thread() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        state = talk_sync(agent, runtime, on("t"), range(8))
        for _ in agent.stream({"messages": [ask(8)]}, on("t"), stream_mode="updates"):
            pass
        assert len(state["messages"]) == 16 and covered(model.sent[-1])
        assert marks(model.sent[-1]) == set(range(17))


def test_one_event_loop_per_request() -> None:
    """``asyncio.run`` for each request: the summary that one began is committed by a later one."""
    with Runtime.in_thread() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        for k in range(8):
            asyncio.run(talk(agent, runtime, on("t"), [k]))
        assert covered(model.sent[-1]) and marks(model.sent[-1]) == set(range(15))


async def test_no_turn_awaits_the_summariser() -> None:
    """Fifteen turns end while the summariser is held; once it is let go, the turns behind have its summary."""
    summariser = FakeSummarizer("hold")
    async with Runtime() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadMiddleware(runtime, policy_of(summariser)), checkpointer=InMemorySaver())
        async with asyncio.timeout(HANG_S):
            await talk(agent, None, on("t"), range(15))
        assert summariser.running == 1 and summariser.calls == 1
        assert not any(map(covered, model.sent))
        summariser.release.set()
        await idle(runtime)
        turn = 15
        while not covered(model.sent[-1]):  # the first result was outgrown: it is recut, once or twice
            assert turn < 20
            await talk(agent, runtime, on("t"), [turn])
            turn += 1
        assert marks(model.sent[-1]) == set(range(2 * turn - 1))
        assert all(r.waited_s == 0 for s in runtime._sessions.values() for r in s.receipts)


def test_no_synchronous_turn_awaits_the_summariser() -> None:
    """The same with ``invoke``."""
    summariser = FakeSummarizer("hang")
    with Runtime.in_thread() as runtime:
        agent = agent_of(talker(), LookaheadMiddleware(runtime, policy_of(summariser)), checkpointer=InMemorySaver())
        talk_sync(agent, None, on("t"), range(15))
        assert not any(s.receipts for s in runtime._sessions.values()) and runtime.counters.started == 1


async def test_concurrent_runs_share_nothing() -> None:
    """Two threads in step on one middleware: no view holds anything of the other conversation."""
    async with Runtime() as runtime:
        models: list[Any] = []
        middleware = LookaheadMiddleware(runtime, policy_of())
        saver = InMemorySaver()

        async def run(name: str, offset: int) -> None:
            model = talker()
            models.append((model, offset))
            await talk(agent_of(model, middleware, checkpointer=saver), runtime, on(name), range(offset, offset + 8))

        async with asyncio.TaskGroup() as group:
            group.create_task(run("a", 0))
            group.create_task(run("b", 500))
        for model, offset in models:
            assert covered(model.sent[-1])
            assert set().union(*map(marks, model.sent)) == set(range(2 * offset, 2 * offset + 15))


async def test_what_is_committed_is_private_state() -> None:
    """In the checkpoint, not in the output, not for callers to inject; and written only where it changed."""
    async with Runtime() as runtime:
        agent = agent_of(talker(), LookaheadMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        await agent.ainvoke({"messages": [ask(0)], SAVED_KEY: {"LookaheadMiddleware": ["injected"]}}, on("t"))
        assert "injected" not in str((await agent.aget_state(on("t"))).values.get(SAVED_KEY))
        state = await talk(agent, runtime, on("t"), range(1, 8))
        assert set(state) == {"messages"}
        saved = (await agent.aget_state(on("t"))).values[SAVED_KEY]
        assert list(saved) == ["LookaheadMiddleware"] and len(saved["LookaheadMiddleware"]) == 1
        receipts = sum(len(s.receipts) for s in runtime._sessions.values())
        writes = 0
        async for chunk in agent.astream({"messages": [ask(8)]}, on("t"), stream_mode="updates"):
            writes += any(SAVED_KEY in update for update in chunk.values())
        assert writes == sum(len(s.receipts) for s in runtime._sessions.values()) - receipts


async def test_two_of_them_side_by_side() -> None:
    """One offloads, one summarises: each has its own sessions and its own place in the private state."""
    async with Runtime(store=MemoryStore()) as runtime:
        model = talker()
        model.answer = caller("look", what="it")
        offload = Policy(
            Offload(min_tokens=20, keep_recent=1, preview_tokens=5),
            trigger=("tokens", 300),
            hard_limit=("tokens", 9000),
            land_at=("tokens", 200),
            min_savings=0.0,
        )
        agent = agent_of(
            model,
            LookaheadMiddleware(runtime, policy_of(keep=("messages", 10), trigger=("messages", 20)), name="summary"),
            LookaheadMiddleware(runtime, offload, name="offload"),
            tools=[look],
            checkpointer=InMemorySaver(),
        )
        await talk(agent, runtime, on("t"), range(14))
        places = [s.values.get(SAVED_KEY, {}) async for s in agent.aget_state_history(on("t"))]
        assert {place for held in places for place in held} == {"offload", "summary"}
        assert any(map(covered, model.sent))
        assert any("[offloaded:" in str(m.content) for view in model.sent for m in view if m.type == "tool")


def test_two_of_one_name_are_refused_by_the_agent() -> None:
    """LangChain's own rule, in its own words."""
    with Runtime.in_thread() as runtime:
        one, two = (LookaheadMiddleware(runtime, policy_of()) for _ in range(2))
        with pytest.raises(AssertionError, match="duplicate middleware"):
            agent_of(talker(), one, two)


class _Retry(AgentMiddleware):
    """Calls the model until it answers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def awrap_model_call(self, request: Any, handler: Callable[..., Any]) -> Any:
        for _ in range(5):
            try:
                return await handler(request)
            except ConnectionError:
                continue
        return await handler(request)


@pytest.mark.parametrize("outside", [True, False])
async def test_a_retry_around_or_inside_it(outside: bool) -> None:
    """Each attempt of a turn sees the same view, and no attempt starts a summary of its own."""
    summariser = FakeSummarizer(delay=0)
    async with Runtime() as runtime:
        failures = {"left": 0}

        def flaky(messages: Any) -> AIMessage:
            if failures["left"]:
                failures["left"] -= 1
                raise ConnectionError("try again")
            return reply(messages)

        model = talker()
        model.answer = flaky
        ours, retry = LookaheadMiddleware(runtime, policy_of(summariser)), _Retry("retry")
        agent = agent_of(model, *([retry, ours] if outside else [ours, retry]), checkpointer=InMemorySaver())
        for k in range(8):
            failures["left"] = 2
            await talk(agent, runtime, on("t"), [k])
            attempts = model.sent[-3:]
            assert [m.content for m in attempts[0]] == [m.content for m in attempts[1]]
            assert [m.content for m in attempts[1]] == [m.content for m in attempts[2]]
        assert covered(model.sent[-1])
        assert runtime.counters.started == summariser.calls
        inputs = [str(i) for i in summariser.inputs]
        assert len(set(inputs)) == len(inputs)


async def test_model_fallback_sees_the_view() -> None:
    """The second model gets what the first one got."""

    def broken(messages: Any) -> AIMessage:
        raise ConnectionError("down")

    async with Runtime() as runtime:
        first, second = talker(), talker()
        first.answer = broken
        agent = agent_of(
            first,
            LookaheadMiddleware(runtime, policy_of()),
            ModelFallbackMiddleware(second),
            checkpointer=InMemorySaver(),
        )
        await talk(agent, runtime, on("t"), range(7))
        assert covered(second.sent[-1])
        assert [m.content for m in first.sent[-1]] == [m.content for m in second.sent[-1]]


class Verdict(BaseModel):
    """A structured answer."""

    good: bool


async def test_structured_output_is_left_alone() -> None:
    """The structured response arrives, and lands in the state, as without us."""

    def answer(messages: Any) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": "Verdict", "args": {"good": True}, "id": f"v{len(messages)}"}])

    async with Runtime() as runtime:
        model = talker()
        model.answer = answer
        agent = agent_of(
            model,
            LookaheadMiddleware(runtime, policy_of()),
            response_format=ToolStrategy(Verdict),
            checkpointer=InMemorySaver(),
        )
        state = await talk(agent, runtime, on("t"), range(6))
        assert state["structured_response"] == Verdict(good=True)
        assert any(map(is_summary, model.sent[-1]))


async def test_human_in_the_loop_and_call_limits_are_left_alone() -> None:
    """An interrupt waits for its person, is resumed once, and the limit counts calls as without us."""
    async with Runtime() as runtime:
        model = talker()
        model.answer = caller("look", what="it")
        agent = agent_of(
            model,
            LookaheadMiddleware(runtime, policy_of()),
            HumanInTheLoopMiddleware(interrupt_on={"look": True}),
            ToolCallLimitMiddleware(thread_limit=4, exit_behavior="continue"),
            tools=[look],
            checkpointer=InMemorySaver(),
        )
        for k in range(6):
            state = await agent.ainvoke({"messages": [ask(k)]}, on("t"))
            while "__interrupt__" in state:
                await idle(runtime)
                state = await agent.ainvoke(Command(resume={"decisions": [{"type": "approve"}]}), on("t"))
            await idle(runtime)
        results = [m for m in state["messages"] if isinstance(m, ToolMessage)]
        assert sum("found it" in str(m.content) for m in results) == 4
        assert any(m.status == "error" for m in results)
        assert covered(model.sent[-1])
        for view in model.sent:
            calls = [c["id"] for m in view if isinstance(m, AIMessage) for c in m.tool_calls]
            assert sorted(calls) == sorted(m.tool_call_id for m in view if isinstance(m, ToolMessage))


async def test_the_retrieve_tool_comes_with_offload() -> None:
    """Declared from the first turn on; it reads what was offloaded, also as the first thing in a new process."""
    policy = Policy(
        Chain(Offload(min_tokens=20, keep_recent=1, preview_tokens=5), Summarize(FakeSummarizer(delay=0))),
        trigger=("messages", 4),
        hard_limit=("messages", 1000),
        land_at=("messages", 3),
        min_savings=0.0,
        max_message_tokens=40,
    )
    async with Runtime() as runtime:
        middleware = LookaheadMiddleware(runtime, policy)
        model = talker()
        model.answer = caller("look", what="<7>")
        agent = agent_of(model, middleware, tools=[look], checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(2))
        assert sorted(model.bound[0]) == ["look", "retrieve"]
        stub = next(m for m in model.sent[-1] if m.type == "tool")
        content_id = str(stub.content).split('id="')[1].split('"')[0]

        def read(messages: Any) -> AIMessage:
            if messages[-1].type == "tool":
                return AIMessage(f"read: {messages[-1].content}")
            call = {"name": "retrieve", "args": {"id": content_id}, "id": "read"}
            return AIMessage("", tool_calls=[call])

        model.answer = read
        state = await talk(agent, runtime, on("t"), [2])
        assert (
            next(m for m in state["messages"] if m.type == "tool" and m.tool_call_id == "read").content.count(
                "lorem ipsum"
            )
            == 200
        )
        assert LookaheadMiddleware(runtime, policy, name="other", retrieve=False).tools == []
    with Runtime.in_thread() as plain:
        assert LookaheadMiddleware(plain, policy_of()).tools == []


async def test_a_closed_runtime_leaves_the_agent_running() -> None:
    """After the runtime's end the model sees its messages as they are, and an event says so."""
    events = Events()
    async with Runtime(on_event=events) as runtime:
        model = talker()
        agent = agent_of(model, LookaheadMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(6))
    await talk(agent, None, on("t"), [6])
    assert len(model.sent[-1]) == 13 and "turn.raw" in events.names()


async def test_a_failing_summariser_never_reaches_the_turn() -> None:
    """The agent answers as if there were no lookahead, and the failure is counted."""
    async with Runtime() as runtime:
        model = talker()
        agent = agent_of(
            model, LookaheadMiddleware(runtime, policy_of(FakeSummarizer("fail"))), checkpointer=InMemorySaver()
        )
        state = await talk(agent, runtime, on("t"), range(8))
        assert len(state["messages"]) == 16 and len(model.sent[-1]) == 15
        assert runtime.counters.failed >= 1 and runtime.counters.committed == 0


async def test_messages_are_passed_on_as_the_same_objects() -> None:
    """What is not replaced is the state's own message, byte for byte as it was."""
    async with Runtime() as runtime:
        given: list[Any] = []

        class Spy(AgentMiddleware):
            async def awrap_model_call(self, request: Any, handler: Any) -> Any:
                given.append((list(request.messages), list(request.state["messages"])))
                return await handler(request)

        agent = agent_of(talker(), LookaheadMiddleware(runtime, policy_of()), Spy(), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(8))
        assert any(len(view) < len(held) for view, held in given)
        for view, held in given:
            own = [m for m in view if not is_summary(m)]
            assert all(any(m is h for h in held) for m in own)
            assert own[-1] is held[-1]


def test_an_agent_without_a_thread_works() -> None:
    """Without a checkpointer the caller brings the messages: they are recognised by what they say."""
    with Runtime.in_thread() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadMiddleware(runtime, policy_of()))
        held: list[Any] = []
        for k in range(8):
            state = agent.invoke({"messages": [*held, ask(k)]})
            held = state["messages"]
            for session in list(runtime._sessions.values()):
                if session.lookahead is not None:
                    session.lookahead.wait_sync(HANG_S)
        assert covered(model.sent[-1]) and marks(model.sent[-1]) == set(range(15))
        assert isinstance(held[0], HumanMessage) and len(held) == 16
