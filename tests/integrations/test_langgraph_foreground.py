"""The engine's foreground under LangGraph: the model call of an agent with a middleware keeps background work away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from langchain.agents.middleware import AgentMiddleware, hook_config
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from graphs import ask, chat_graph, converse, on, policy_of
from lg_agents import agent_of, reply, talk, talk_sync, talker
from smoothctx import Runtime
from smoothctx.testing import FakeEngine
from smoothctx_langgraph import LookaheadMiddleware, LookaheadStateMiddleware
from smoothctx_langgraph.node import lookahead_node

pytestmark = pytest.mark.langgraph

FORMS = [LookaheadMiddleware, LookaheadStateMiddleware]


class Look(AgentMiddleware[Any, Any, Any]):
    """Looks at the foreground in the step between ours and the model's node; may end the run there."""

    def __init__(self, look: Callable[[], object], *, ends: bool = False) -> None:
        super().__init__()
        self._look, self._ends = look, ends

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Looks."""
        self._look()
        return {"jump_to": "end"} if self._ends else None


@pytest.mark.parametrize("form", FORMS)
async def test_the_foreground_is_busy_from_the_turns_begin_to_the_end_of_the_call(form: Any) -> None:
    """In the call, however long it takes, and in state mode in the steps before it; and at no other time."""
    engine, seen, between, time = FakeEngine(), [], [], [0.0]
    async with Runtime(clock=lambda: time[0]) as runtime:
        foreground = runtime.foreground(engine)

        def answer(messages: Any) -> AIMessage:
            time[0] += 1000.0
            seen.append(foreground.prefilling)
            return reply(messages)

        look = Look(lambda: between.append(foreground.prefilling))
        ours = form(runtime, policy_of(), engine=engine)
        agent = agent_of(_answering(answer), ours, look, checkpointer=InMemorySaver())
        for k in range(6):  # it commits on the way
            await talk(agent, runtime, on("t"), [k])
            assert not foreground.busy and not foreground.seen().in_flight
        assert seen == [True] * 6
        assert between == [form is LookaheadStateMiddleware] * 6
        assert runtime.counters.committed


@pytest.mark.parametrize("form", FORMS)
def test_the_same_in_a_synchronous_agent(form: Any) -> None:
    """With ``invoke``."""
    engine, seen = FakeEngine(), []
    with Runtime.in_thread() as runtime:
        foreground = runtime.foreground(engine)

        def answer(messages: Any) -> AIMessage:
            seen.append(foreground.prefilling)
            return reply(messages)

        agent = agent_of(_answering(answer), form(runtime, policy_of(), engine=engine), checkpointer=InMemorySaver())
        talk_sync(agent, runtime, on("t"), range(6))
        assert seen == [True] * 6 and not foreground.busy and runtime.counters.committed


@pytest.mark.parametrize("form", FORMS)
async def test_a_call_that_fails_leaves_no_turn_and_says_if_the_server_is_overloaded(form: Any) -> None:
    """The agent gets the very error; background calls leave the server alone for as long as it asked."""
    engine = FakeEngine()
    sent = httpx.Request("POST", "http://server/v1")
    answered = httpx.Response(429, headers={"retry-after": "20"}, request=sent)
    limited = httpx.HTTPStatusError("slow down", request=sent, response=answered)
    errors = iter([ConnectionError("gone"), limited])
    async with Runtime() as runtime:
        foreground = runtime.foreground(engine)

        def answer(messages: Any) -> AIMessage:
            raise next(errors)

        agent = agent_of(_answering(answer), form(runtime, policy_of(), engine=engine), checkpointer=InMemorySaver())
        with pytest.raises(ConnectionError, match="gone"):
            await agent.ainvoke({"messages": [ask(0)]}, on("t"))
        assert not foreground.busy and not runtime.endpoints.rests(engine)
        with pytest.raises(httpx.HTTPStatusError, match="slow down"):
            await agent.ainvoke({"messages": [ask(0)]}, on("t"))
        assert not foreground.busy and 10 < runtime.endpoints.rests(engine) <= 20


async def test_a_node_that_is_tried_again_is_a_turn_each_time() -> None:
    """A retry sees the view that the first attempt saw; background work keeps out of its way just as well."""
    engine, seen, between = FakeEngine(), [], []
    async with Runtime() as runtime:
        foreground = runtime.foreground(engine)

        @lookahead_node(runtime, policy_of(), engine=engine)
        async def model(state: MessagesState) -> dict[str, Any]:
            seen.append((foreground.prefilling, foreground.seen().in_flight))
            if len(seen) % 3:
                raise ConnectionError("the line is down")
            return {"messages": [reply(state["messages"])]}

        def again(error: Exception) -> bool:
            between.append(foreground.busy)
            return True

        retry = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False, retry_on=again)
        builder = StateGraph(MessagesState)
        builder.add_node("model", model, retry_policy=retry)
        builder.add_edge(START, "model")
        await converse(builder.compile(checkpointer=InMemorySaver()), runtime, on("t"), range(6))
        assert seen == [(True, 1)] * 18 and between == [False] * 12
        assert not foreground.busy and runtime.counters.committed


@pytest.mark.parametrize("sync", [False, True])
def test_a_node_that_goes_on_after_an_interrupt_is_a_turn_again(sync: bool) -> None:
    """The model call that follows a person's answer is in the foreground; while the answer is waited for nothing is."""
    engine, seen = FakeEngine(), []
    with Runtime.in_thread() as runtime:
        foreground = runtime.foreground(engine)
        decorate = lookahead_node(runtime, policy_of(), engine=engine)

        def asks(state: MessagesState) -> dict[str, Any]:
            word = interrupt("go on?")
            seen.append((foreground.prefilling, foreground.seen().in_flight))
            return {"messages": [AIMessage(word)]}

        async def asks_async(state: MessagesState) -> dict[str, Any]:
            return asks(state)

        def run(graph: Any, given: Any) -> None:
            graph.invoke(given, on("t")) if sync else asyncio.run(graph.ainvoke(given, on("t")))
            assert not foreground.busy

        graph = chat_graph(decorate(asks if sync else asks_async), checkpointer=InMemorySaver())
        for k in range(3):
            run(graph, {"messages": [ask(k)]})
            run(graph, Command(resume="yes"))
        assert seen == [(True, 1)] * 3


async def test_a_run_that_ends_before_the_model_is_asked_counts_for_seconds_only() -> None:
    """Another hook jumps to the end: nobody tells of it, and no model call comes."""
    engine, time = FakeEngine(), [0.0]
    async with Runtime(clock=lambda: time[0]) as runtime:
        foreground = runtime.foreground(engine)
        ours = LookaheadStateMiddleware(runtime, policy_of(), engine=engine)
        agent = agent_of(talker(), ours, Look(lambda: None, ends=True), checkpointer=InMemorySaver())
        await agent.ainvoke({"messages": [ask(0)]}, on("t"))
        time[0] += 11.0
        assert not foreground.busy


async def test_the_call_counts_for_the_session_whose_turn_it_is() -> None:
    """One user of the engine per agent that runs, and what was seen of a call stands beside that session's commits."""
    engine, most = FakeEngine(), []
    async with Runtime() as runtime:
        foreground = runtime.foreground(engine)

        def answer(messages: Any) -> AIMessage:
            most.append(foreground.seen().in_flight)
            return reply(messages)

        ours = LookaheadStateMiddleware(runtime, policy_of(), engine=engine)
        agent = agent_of(_answering(answer), ours, checkpointer=InMemorySaver())
        await talk(agent, runtime, on("one"), range(8))
        await talk(agent, runtime, on("two"), range(8))
        assert most == [1] * 16
        for name in ("one", "two"):
            (session,) = [s for (_, key), s in runtime._sessions.items() if key.startswith(name)]
            assert session.outcomes() and all(o.after for o in session.outcomes()[:-1])


def _answering(answer: Callable[[Any], AIMessage]) -> Any:
    model = talker()
    model.answer = answer
    return model
