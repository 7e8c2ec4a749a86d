"""deepagents: ours in the place of its summaries, or beside them; its files, to-dos and sub-agents as without us."""

from __future__ import annotations

from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.memory import InMemorySaver

from graphs import ask, idle, marks, on, policy_of
from helpers import FakeSummarizer, fill
from lg_agents import SIZE, Talker, covered, is_summary, reply, scribe, talk, talk_sync
from smoothctx import Runtime
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.stock import lookahead_stock

#: the name under which deepagents has its own summaries
THEIRS = "SummarizationMiddleware"

# deepagents announces changes of its defaults to everybody who takes them
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def working(messages: list[BaseMessage]) -> AIMessage:
    """Writes a file in each turn, then answers."""
    if messages[-1].type == "tool":
        return reply(messages)
    asked = [m for m in messages if m.type == "human" and not is_summary(m)]
    n = max(marks(asked[-1:]), default=0)
    call = {"name": "write_file", "args": {"file_path": f"/notes/{n}.md", "content": f"note {n}"}, "id": f"w{n}"}
    return AIMessage("", tool_calls=[call])


async def test_ours_takes_the_place_of_its_summaries() -> None:
    """Under their name: the view is ours, its own summaries never run, and every file is written."""
    async with Runtime() as runtime:
        model = Talker(answer=working)
        ours = LookaheadMiddleware(runtime, policy_of(), name=THEIRS)
        agent: Any = create_deep_agent(model=model, middleware=[ours], checkpointer=InMemorySaver())
        state = await talk(agent, runtime, on("t"), range(8))
        assert covered(model.sent[-1]) and {2 * k for k in range(8)} <= marks(model.sent[-1])
        assert set(state["files"]) == {f"/notes/{2 * k}.md" for k in range(8)}
        assert not any(map(is_summary, state["messages"])) and len(state["messages"]) == 32
        values = (await agent.aget_state(on("t"))).values
        assert "_summarization_event" not in values and list(values["smoothctx"]) == [THEIRS]
        nodes = set(agent.get_graph().nodes)
        assert not any("Summar" in node for node in nodes)


def test_ours_in_a_synchronous_deep_agent() -> None:
    """The same with ``invoke``."""
    with Runtime.in_thread() as runtime:
        model = Talker(answer=working)
        ours = LookaheadMiddleware(runtime, policy_of(), name=THEIRS)
        agent: Any = create_deep_agent(model=model, middleware=[ours], checkpointer=InMemorySaver())
        state = talk_sync(agent, runtime, on("t"), range(6))
        assert covered(model.sent[-1]) and len(state["files"]) == 6


async def test_ours_beside_its_summaries() -> None:
    """With a name of its own: theirs stay idle as long as ours keeps the view small."""
    async with Runtime() as runtime:
        model = Talker(answer=working)
        agent: Any = create_deep_agent(
            model=model, middleware=[LookaheadMiddleware(runtime, policy_of())], checkpointer=InMemorySaver()
        )
        state = await talk(agent, runtime, on("t"), range(6))
        assert covered(model.sent[-1]) and len(state["files"]) == 6
        assert "_summarization_event" not in (await agent.aget_state(on("t"))).values


async def test_a_stock_middleware_takes_their_place_by_its_own_name() -> None:
    """LangChain's ``SummarizationMiddleware`` as a lookahead has the name that deepagents replaces."""
    async with Runtime() as runtime:
        model = Talker(answer=working)
        stock = SummarizationMiddleware(scribe(), trigger=("messages", 10), keep=("messages", 4))
        agent: Any = create_deep_agent(
            model=model, middleware=[lookahead_stock(stock, runtime)], checkpointer=InMemorySaver()
        )
        state = await talk(agent, runtime, on("t"), range(8))
        assert covered(model.sent[-1]) and len(state["files"]) == 8


async def test_a_large_result_is_still_put_into_a_file() -> None:
    """Its own offloading of large tool results works, and the view passes on the note that it leaves."""

    def big(n: int) -> str:
        """Return much."""
        return f"<{n}> " + "much " * 40_000

    def answer(messages: list[BaseMessage]) -> AIMessage:
        if messages[-1].type == "tool":
            return reply(messages)
        n = max(marks([m for m in messages if m.type == "human"][-1:]), default=0)
        return AIMessage("", tool_calls=[{"name": "big", "args": {"n": n}, "id": f"b{n}"}])

    async with Runtime() as runtime:
        model = Talker(answer=answer)
        ours = LookaheadMiddleware(runtime, policy_of(), name=THEIRS)
        agent: Any = create_deep_agent(model=model, tools=[big], middleware=[ours], checkpointer=InMemorySaver())
        state = await talk(agent, runtime, on("t"), range(5))
        assert {f for f in state["files"] if f.startswith("/large_tool_results/")} == {
            f"/large_tool_results/b{2 * k}" for k in range(5)
        }
        assert all(len(str(m.content)) < 20_000 for view in model.sent for m in view)
        assert covered(model.sent[-1])


async def test_a_sub_agent_has_its_own() -> None:
    """A sub-agent with the same middleware: its conversations and the lead's never mix, and no turn waits."""
    summariser = FakeSummarizer(delay=0)

    def child(messages: list[BaseMessage]) -> AIMessage:
        last = max(marks([m for m in messages if m.type != "system"]))
        if last % 100 == 8:
            return AIMessage(f"<{last + 1}> the sub-agent is done")
        path = f"/child/{last}.md"
        call = {"name": "write_file", "args": {"file_path": path, "content": "x"}, "id": f"c{last}"}
        return AIMessage(fill(f"<{last + 1}> next", SIZE), tool_calls=[call])

    def lead(messages: list[BaseMessage]) -> AIMessage:
        if messages[-1].type == "tool":
            return reply(messages)
        n = max(marks([m for m in messages if m.type == "human" and not is_summary(m)][-1:]), default=0)
        args = {"description": f"<{(n + 2) * 100}> do it", "subagent_type": "worker"}
        return AIMessage("", tool_calls=[{"name": "task", "args": args, "id": f"t{n}"}])

    async with Runtime() as runtime:
        lead_model, child_model = Talker(answer=lead), Talker(answer=child)
        ours = LookaheadMiddleware(runtime, policy_of(summariser), name=THEIRS)
        worker: Any = {
            "name": "worker",
            "description": "works",
            "system_prompt": "Work.",
            "model": child_model,
            "middleware": [ours],
        }
        agent: Any = create_deep_agent(
            model=lead_model, subagents=[worker], middleware=[ours], checkpointer=InMemorySaver()
        )
        for k in range(4):
            await agent.ainvoke({"messages": [ask(k, size=SIZE)]}, on("t"))
            await idle(runtime)
        for view in child_model.sent:
            seen = marks([m for m in view if m.type != "system"])
            assert len({n // 100 for n in seen}) == 1
            assert seen == set(range(min(seen), max(seen) + 1))
        for view in lead_model.sent:
            assert all(n < 8 or n % 100 in (0, 9) for n in marks([m for m in view if m.type != "system"]))
        assert covered(lead_model.sent[-1])
