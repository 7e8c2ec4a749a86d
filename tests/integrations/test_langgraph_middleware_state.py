"""``LookaheadStateMiddleware``: a commit rewrites the agent's state by id."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, BaseMessage, RemoveMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from graphs import Events, ask, idle, marks, on, policy_of
from helpers import FakeSummarizer
from lg_agents import agent_of, caller, covered, is_summary, talk, talk_sync, talker
from smoothctx import KeepRecent, Policy, Runtime
from smoothctx_langgraph.middleware_commit import LookaheadStateMiddleware

pytestmark = pytest.mark.langgraph


@tool
def look(what: str = "") -> str:
    """Look something up."""
    return f"found {what}"


async def test_a_commit_rewrites_the_state() -> None:
    """The state is what the model was sent: short, in order, without a trace of a removal."""
    async with Runtime() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadStateMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        state = await talk(agent, runtime, on("t"), range(12))
        held = state["messages"]
        assert len(held) <= 12 and is_summary(held[0]) and not any(isinstance(m, RemoveMessage) for m in held)
        assert [m.content for m in held[:-1]] == [m.content for m in model.sent[-1]]
        assert marks(held) == set(range(24))
        assert len({m.id for m in held}) == len(held)


def test_a_commit_rewrites_the_state_of_a_synchronous_agent() -> None:
    """The same with ``invoke``."""
    with Runtime.in_thread() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadStateMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        state = talk_sync(agent, runtime, on("t"), range(12))
        assert len(state["messages"]) <= 12 and marks(state["messages"]) == set(range(24))
        assert covered(model.sent[-1])


async def test_the_rewrite_goes_by_ids() -> None:
    """The summary takes the place and the id of a message it stands for, the others are removed one by one."""
    async with Runtime() as runtime:
        agent = agent_of(talker(), LookaheadStateMiddleware(runtime, policy_of()), checkpointer=InMemorySaver())
        writes: list[list[BaseMessage]] = []
        for k in range(8):
            before = {m.id for m in (await agent.aget_state(on("t"))).values.get("messages", ())}
            async for chunk in agent.astream({"messages": [ask(k)]}, on("t"), stream_mode="updates"):
                update = chunk.get("LookaheadStateMiddleware.before_model") or {}
                if found := update.get("messages"):
                    assert {m.id for m in found} <= before
                    writes.append(found)
            await idle(runtime)
        assert writes
        for written in writes:
            assert is_summary(written[0]) and all(isinstance(m, RemoveMessage) for m in written[1:])


async def test_no_turn_awaits_the_summariser() -> None:
    """Fifteen turns end while the summariser is held, and the state stays raw meanwhile."""
    summariser = FakeSummarizer("hold")
    async with Runtime() as runtime:
        agent = agent_of(
            talker(), LookaheadStateMiddleware(runtime, policy_of(summariser)), checkpointer=InMemorySaver()
        )
        state = await talk(agent, None, on("t"), range(15))
        assert len(state["messages"]) == 30 and summariser.calls == 1
        summariser.release.set()
        await idle(runtime)
        state = await talk(agent, runtime, on("t"), [15, 16])
        assert len(state["messages"]) < 12 and marks(state["messages"]) == set(range(34))


async def test_tool_calls_and_results_stay_together() -> None:
    """Each step of a tool loop: no call without its result in any request, and none in the state."""

    async with Runtime() as runtime:
        model = talker()
        model.answer = caller("look", what="it")
        agent = agent_of(
            model, LookaheadStateMiddleware(runtime, policy_of()), tools=[look], checkpointer=InMemorySaver()
        )
        state = await talk(agent, runtime, on("t"), range(8))
        for view in [*model.sent, state["messages"]]:
            calls = [c["id"] for m in view if isinstance(m, AIMessage) for c in m.tool_calls]
            assert calls == [m.tool_call_id for m in view if m.type == "tool"]
        assert covered(model.sent[-1])


async def test_a_fallback_is_written_too() -> None:
    """At the hard limit with a summariser that hangs, old messages leave the state; the turn does not wait."""
    events = Events()
    async with Runtime(on_event=events) as runtime:
        policy = Policy(
            policy_of(FakeSummarizer("hang")).transform,
            trigger=("messages", 4),
            hard_limit=("messages", 10),
            land_at=("messages", 6),
            fallback=KeepRecent(("messages", 4)),
            overrun="fallback",
            min_savings=0.0,
        )
        agent = agent_of(talker(), LookaheadStateMiddleware(runtime, policy), checkpointer=InMemorySaver())
        state = await talk(agent, None, on("t"), range(12))
        assert len(state["messages"]) <= 11 and "fallback.applied" in events.names()
        assert marks(state["messages"][-2:]) == {22, 23}
