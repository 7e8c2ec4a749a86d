"""Edits, forks, time travel, deletions, restarts, real checkpointers: no summary of another branch is ever seen."""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from graphs import ask, idle, marks, on, policy_of, true_to
from helpers import FakeSummarizer, fill
from lg_agents import SIZE, Talker, agent_of, covered, is_summary, scribe, talk, talker
from smoothctx import Runtime
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.middleware_commit import LookaheadStateMiddleware
from smoothctx_langgraph.models import ChatModel
from smoothctx_langgraph.stock import lookahead_stock

pytestmark = pytest.mark.langgraph

FORMS = ("view", "state", "stock")


def build(form: str, runtime: Runtime, summariser: Talker) -> Any:
    """A middleware of this form, its summaries by this chat model."""
    if form == "stock":
        stock = SummarizationMiddleware(
            summariser, trigger=("messages", 6), keep=("messages", 2), trim_tokens_to_summarize=None
        )
        return lookahead_stock(stock, runtime)
    policy = policy_of(ChatModel(summariser), layout="standalone")
    return LookaheadMiddleware(runtime, policy) if form == "view" else LookaheadStateMiddleware(runtime, policy)


@pytest.fixture(params=["memory", "sqlite"])
async def saver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """A real checkpointer."""
    if request.param == "memory":
        yield InMemorySaver()
        return
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "graph.sqlite")) as opened:
        yield opened


@asynccontextmanager
async def conversation(form: str, saver: Any, turns: int = 8) -> AsyncIterator[tuple[Any, Talker, Talker, Runtime]]:
    """An agent that had a conversation with commits in it."""
    async with Runtime() as runtime:
        model, summariser = talker(), scribe()
        agent = agent_of(model, build(form, runtime, summariser), checkpointer=saver)
        await talk(agent, runtime, on("t"), range(turns))
        assert covered(model.sent[-1]) and marks(model.sent[-1]) == set(range(2 * turns - 1))
        yield agent, model, summariser, runtime


async def _state_of(agent: Any, config: Any) -> Any:
    return (await agent.aget_state(config)).values["messages"]


def extends(request: Any) -> bool:
    """Does this request to a summariser go on from a summary, instead of reading what that covers once more?"""
    text = html.unescape(" ".join(str(m.content) for m in request))
    return "SUMMARY<0>" in text and "<0> question" not in text


async def _checkpoint_after(agent: Any, turn: int) -> Any:
    """The config of the last checkpoint of a turn."""
    async for state in agent.aget_state_history(on("t")):
        messages = state.values.get("messages", ())
        if messages and not state.next and messages[-1].type == "ai" and 2 * turn + 1 in marks(messages[-1:]):
            return state.config
    raise AssertionError("no such checkpoint")


@pytest.mark.parametrize("form", ["view", "stock"])
async def test_an_edit_under_the_same_id_drops_its_summary(form: str, saver: Any) -> None:
    """The summarised text is edited in place: the model sees the new text, never the old, from the next call on."""
    async with conversation(form, saver) as (agent, model, _, runtime):
        first = (await _state_of(agent, on("t")))[0]
        await agent.aupdate_state(on("t"), {"messages": [HumanMessage(fill("<900> edited", SIZE), id=first.id)]})
        at = len(model.sent)
        await talk(agent, runtime, on("t"), range(8, 14))
        for view in model.sent[at:]:
            assert 900 in marks(view) and 0 not in marks(view)
        assert 900 in covered(model.sent[-1])


@pytest.mark.parametrize("form", ["view", "stock"])
async def test_deleting_summarised_messages_drops_nothing_else(form: str, saver: Any) -> None:
    """Two summarised messages are removed from the state: their marks go, every other one stays in every view."""
    async with conversation(form, saver) as (agent, model, _, runtime):
        held = await _state_of(agent, on("t"))
        await agent.aupdate_state(on("t"), {"messages": [RemoveMessage(id=str(m.id)) for m in held[2:4]]})
        at = len(model.sent)
        await talk(agent, runtime, on("t"), range(8, 14))
        for k, view in enumerate(model.sent[at:]):
            assert marks(view) == set(range(2 * (8 + k) + 1)) - {2, 3}
        assert covered(model.sent[-1])


@pytest.mark.parametrize("form", FORMS)
async def test_time_travel_sees_its_own_branch(form: str, saver: Any) -> None:
    """Going on from an earlier checkpoint with another question: nothing of the other future, and both go on well."""
    async with conversation(form, saver) as (agent, model, _, runtime):
        earlier = await _checkpoint_after(agent, 3)
        at = len(model.sent)
        await agent.ainvoke({"messages": [ask(50, size=SIZE)]}, earlier)
        await idle(runtime)
        assert marks(model.sent[at]) == {*range(8), 100}
        await talk(agent, runtime, on("t"), range(51, 56))
        for k, view in enumerate(model.sent[at:]):
            assert marks(view) == {*range(8), *range(100, 100 + 2 * k + 1)}
        assert covered(model.sent[-1])


@pytest.mark.parametrize("form", ["view", "stock"])
async def test_a_fork_keeps_what_is_still_valid(form: str, saver: Any) -> None:
    """A fork behind the summarised part is served the summary that exists: no call is paid for it again."""
    async with conversation(form, saver) as (agent, model, summariser, runtime):
        paid = len(summariser.sent)
        late = await _checkpoint_after(agent, 6)
        at = len(model.sent)
        await agent.ainvoke({"messages": [ask(60, size=SIZE)]}, late)
        view = model.sent[at]
        assert marks(view) == {*range(14), 120} and covered(view)
        await idle(runtime)
        assert all(map(extends, summariser.sent[paid:]))  # what it is asked for goes on from there


@pytest.mark.parametrize("form", FORMS)
async def test_everything_removed_starts_anew(form: str, saver: Any) -> None:
    """After ``REMOVE_ALL_MESSAGES`` nothing of what was said is in any view."""
    async with conversation(form, saver) as (agent, model, _, runtime):
        await agent.aupdate_state(on("t"), {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES)]})
        at = len(model.sent)
        await talk(agent, runtime, on("t"), range(20, 28))
        for k, view in enumerate(model.sent[at:]):
            assert marks(view) == set(range(40, 40 + 2 * k + 1))
        assert covered(model.sent[-1])


@pytest.mark.parametrize("form", FORMS)
async def test_regenerating_an_answer_is_a_branch(form: str, saver: Any) -> None:
    """The last answer is replaced by the user: the new one is seen, the old one is not."""
    async with conversation(form, saver) as (agent, model, _, runtime):
        last = (await _state_of(agent, on("t")))[-1]
        await agent.aupdate_state(on("t"), {"messages": [AIMessage(fill("<900> other", SIZE), id=last.id)]})
        at = len(model.sent)
        await talk(agent, runtime, on("t"), range(8, 13))
        for view in model.sent[at:]:
            assert 900 in marks(view) and 15 not in marks(view) and set(range(15)) <= marks(view)


@pytest.mark.parametrize("form", FORMS)
async def test_a_restart_pays_for_no_second_summary(form: str, tmp_path: Path) -> None:
    """New objects of everything on the same file: the first turn is sent what was committed, and nothing is paid."""
    path = str(tmp_path / "graph.sqlite")
    async with AsyncSqliteSaver.from_conn_string(path) as saver, conversation(form, saver, 7) as (_, model, before, _):
        seen = covered(model.sent[-1])
        assert before.sent
    async with AsyncSqliteSaver.from_conn_string(path) as saver, Runtime() as runtime:
        model, summariser = talker(), scribe()
        agent = agent_of(model, build(form, runtime, summariser), checkpointer=saver)
        await agent.ainvoke({"messages": [ask(7, size=SIZE)]}, on("t"))
        assert covered(model.sent[0]) >= seen and marks(model.sent[0]) == set(range(15))
        await idle(runtime)
        await talk(agent, runtime, on("t"), range(8, 14))
        assert summariser.sent and all(map(extends, summariser.sent))
        assert marks(model.sent[-1]) == set(range(27))
        assert runtime.counters.failed == 0


async def test_an_edit_that_came_while_nobody_ran_is_seen_after_a_restart(tmp_path: Path) -> None:
    """What an earlier process committed is validated against the messages as the checkpoint holds them now."""
    path = str(tmp_path / "graph.sqlite")
    async with AsyncSqliteSaver.from_conn_string(path) as saver, conversation("view", saver) as (agent, _, _, _):
        first = (await _state_of(agent, on("t")))[0]
        await agent.aupdate_state(on("t"), {"messages": [HumanMessage(fill("<900> edited", SIZE), id=first.id)]})
    async with AsyncSqliteSaver.from_conn_string(path) as saver, Runtime() as runtime:
        model, summariser = talker(), scribe()
        agent = agent_of(model, build("view", runtime, summariser), checkpointer=saver)
        await talk(agent, runtime, on("t"), range(8, 12))
        for k, view in enumerate(model.sent):
            assert marks(view) == {900, *range(1, 2 * (8 + k) + 1)}


async def test_in_state_mode_an_edited_summary_is_the_users_own(saver: Any) -> None:
    """In state mode the summary is a message like any other: edited, it is read as it stands, and never restored."""
    async with conversation("state", saver) as (agent, model, _, runtime):
        held = await _state_of(agent, on("t"))
        summary = next(m for m in held if is_summary(m))
        await agent.aupdate_state(on("t"), {"messages": [HumanMessage(fill("<900> my own", SIZE), id=summary.id)]})
        at = len(model.sent)
        await talk(agent, runtime, on("t"), range(8, 12))
        gone = covered(held)
        for view in model.sent[at:]:
            assert 900 in marks(view) and not gone & marks(view)


@pytest.mark.parametrize("form", ["view", "stock"])
async def test_sub_agents_called_by_tools_have_their_own(form: str) -> None:
    """An agent in a tool of an agent, several in parallel, one middleware for all: no view tells of another's."""
    async with Runtime() as runtime:

        @tool
        async def note(n: int) -> str:
            """Note a number."""
            await idle(runtime)
            return fill(f"<{n}> noted", SIZE)

        def work(messages: Any) -> AIMessage:
            last = max(marks(messages))
            if last % 100 == 8:
                return AIMessage("done")
            return AIMessage("", tool_calls=[{"name": "note", "args": {"n": last + 1}, "id": f"n{last}"}])

        def delegating(messages: Any) -> AIMessage:
            if messages[-1].type == "tool":
                return AIMessage("all done")
            starts = (100, 200, 300)
            calls = [{"name": "delegate", "args": {"start": n}, "id": f"c{n}-{len(messages)}"} for n in starts]
            return AIMessage("", tool_calls=calls)

        inner_model, outer_model = Talker(answer=work), Talker(answer=delegating)
        inner = agent_of(inner_model, build(form, runtime, scribe()), tools=[note])

        @tool
        async def delegate(start: int) -> str:
            """Let a sub-agent work."""
            await inner.ainvoke({"messages": [HumanMessage(fill(f"<{start}> work", SIZE))]})
            return f"done {start}"

        agent = agent_of(outer_model, build(form, runtime, scribe()), tools=[delegate], checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(3))
        for view in inner_model.sent:
            start = min(marks(view))
            assert start in (100, 200, 300) and marks(view) == set(range(start, max(marks(view)) + 1))
        assert {min(marks(v)) for v in inner_model.sent if covered(v)} == {100, 200, 300}
        assert true_to(outer_model.sent[-1], [ask(k) for k in range(3)])


async def test_a_slow_summary_for_a_branch_that_is_gone_is_never_seen() -> None:
    """The history is edited while its summary is under way: when it comes, it is not used."""
    summariser = FakeSummarizer("hold")
    async with Runtime() as runtime:
        model = talker()
        agent = agent_of(model, LookaheadMiddleware(runtime, policy_of(summariser)), checkpointer=InMemorySaver())
        await talk(agent, None, on("t"), range(6))
        await summariser.started.wait()
        first = (await _state_of(agent, on("t")))[0]
        await agent.aupdate_state(on("t"), {"messages": [HumanMessage(fill("<900> edited", SIZE), id=first.id)]})
        await talk(agent, None, on("t"), [6])
        summariser.release.set()
        await idle(runtime)
        await talk(agent, runtime, on("t"), range(7, 11))
        assert covered(model.sent[-1])
        for view in model.sent[6:]:
            assert 0 not in marks(view) and 900 in marks(view)


STEPS = st.lists(
    st.tuples(st.sampled_from(["talk", "talk", "talk", "edit", "delete", "travel"]), st.integers(0, 30)),
    min_size=6,
    max_size=16,
)


@settings(max_examples=25)
@given(st.sampled_from(["view", "stock"]), STEPS)
def test_any_walk_through_branches_sees_its_own_alone(form: str, steps: list[tuple[str, int]]) -> None:
    """Turns, edits, deletions and time travel in any order: each view tells of exactly what its branch holds."""

    async def walk() -> None:
        async with Runtime() as runtime:
            model = talker()
            agent = agent_of(model, build(form, runtime, scribe()), checkpointer=InMemorySaver())
            await talk(agent, runtime, on("t"), range(7))
            assert covered(model.sent[-1])
            config = on("t")
            for number, (what, where) in enumerate(steps):
                held = (await agent.aget_state(config)).values.get("messages", [])
                if what == "talk" or not held:
                    await agent.ainvoke({"messages": [ask(1000 + number, size=SIZE)]}, config)
                    config = on("t")
                    await idle(runtime)
                    now = (await agent.aget_state(config)).values["messages"]
                    assert marks(model.sent[-1]) == marks(now[:-1])
                    continue
                message = held[where % len(held)]
                if what == "edit":
                    text = fill(f"<{100 + number}> edited", SIZE)
                    config = await agent.aupdate_state(
                        config, {"messages": [message.model_copy(update={"content": text})]}
                    )
                elif what == "delete":
                    config = await agent.aupdate_state(config, {"messages": [RemoveMessage(id=str(message.id))]})
                else:
                    past = [s.config async for s in agent.aget_state_history(on("t")) if not s.next]
                    config = past[where % len(past)]

    asyncio.run(walk())
