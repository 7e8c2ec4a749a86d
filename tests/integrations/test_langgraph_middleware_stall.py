"""What a turn takes, in virtual time: the model alone, where the stock middleware takes the summary too."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from graphs import ask, on
from helpers import make_runtime, now, virtual
from lg_agents import Talker, agent_of, covered, reply
from smoothctx import Policy, Runtime, Summarize
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.middleware_commit import LookaheadStateMiddleware
from smoothctx_langgraph.middleware_state import model_input
from smoothctx_langgraph.models import ChatModel
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.premodel import premodel_node
from smoothctx_langgraph.stock import lookahead_stock

pytestmark = pytest.mark.langgraph

MODEL_S, SUMMARY_S, TURNS = 0.3, 2.0, 30
TRIGGER, KEEP, LIMIT = 24, 4, 60


class Sleeper(Talker):
    """Takes its time."""

    seconds: float

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        await asyncio.sleep(self.seconds)
        return self._generate(messages)


def policy(summariser: Sleeper) -> Policy:
    """The sizes of all forms."""
    return Policy(
        Summarize(ChatModel(summariser), keep=("messages", KEEP), layout="standalone", facts=False),
        trigger=("messages", TRIGGER),
        hard_limit=("messages", LIMIT),
        land_at=("messages", KEEP + 2),
    )


def stock(summariser: Sleeper) -> Any:
    """LangChain's own summaries."""
    return SummarizationMiddleware(summariser, trigger=("messages", TRIGGER), keep=("messages", KEEP))


def _own(model: Sleeper, runtime: Runtime, summariser: Sleeper) -> Any:
    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return _line(lookahead_node(runtime, policy(summariser))(call_model))


def _premodel(model: Sleeper, runtime: Runtime, summariser: Sleeper) -> Any:
    async def call_model(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(model_input(state))]}

    return _line(premodel_node(runtime, policy(summariser), mode="state"), call_model)


def _line(*nodes: Any) -> Any:
    builder = StateGraph(MessagesState)
    before = START
    for k, node in enumerate(nodes):
        builder.add_node(f"n{k}", node)
        builder.add_edge(before, f"n{k}")
        before = f"n{k}"
    builder.add_edge(before, END)
    return builder.compile(checkpointer=InMemorySaver())


def _agent(make: Callable[[Runtime, Sleeper], Any]) -> Callable[..., Any]:
    return lambda model, runtime, summariser: agent_of(model, make(runtime, summariser), checkpointer=InMemorySaver())


FORMS: dict[str, Callable[[Sleeper, Runtime, Sleeper], Any]] = {
    "decorator": _own,
    "premodel": _premodel,
    "middleware": _agent(lambda runtime, s: LookaheadMiddleware(runtime, policy(s))),
    "middleware-state": _agent(lambda runtime, s: LookaheadStateMiddleware(runtime, policy(s))),
    "stock-adapter": _agent(lambda runtime, s: lookahead_stock(stock(s), runtime, hard_limit=("messages", LIMIT))),
}


@asynccontextmanager
async def turns_of(make: Callable[..., Any]) -> AsyncIterator[tuple[list[float], Sleeper, Runtime]]:
    """Thirty turns, one right after the other: the seconds of each."""
    async with make_runtime() as runtime:
        model = Sleeper(answer=reply, seconds=MODEL_S)
        graph = make(model, runtime, Sleeper(answer=reply, seconds=SUMMARY_S, model_name="summariser"))
        seconds = []
        for k in range(TURNS):
            start = now()
            await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            seconds.append(now() - start)
        yield seconds, model, runtime


@pytest.mark.parametrize("form", list(FORMS))
@virtual
async def test_every_turn_takes_the_model_alone(form: str) -> None:
    """Thirty turns of 0.3 s with two commits among them, though each summary takes 2.0 s."""
    async with turns_of(FORMS[form]) as (seconds, model, runtime):
        assert seconds == pytest.approx([MODEL_S] * TURNS, abs=0.01)
        assert runtime.counters.committed >= 2 and runtime.counters.fallbacks == 0
        assert max(map(len, model.sent)) < LIMIT
        assert len(model.sent[-1]) <= TRIGGER + 2 * (SUMMARY_S / MODEL_S + 1)


@virtual
async def test_in_line_the_same_turns_take_the_summary_too() -> None:
    """LangChain's own middleware: 2.3 s on each turn that rewrites, 0.3 s on the others."""
    make = _agent(lambda runtime, summariser: stock(summariser))
    async with turns_of(make) as (seconds, model, _):
        slow = [s for s in seconds if s > 1]
        assert len(slow) >= 2 and slow == pytest.approx([MODEL_S + SUMMARY_S] * len(slow), abs=0.01)
        assert any(map(covered, model.sent))


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """Every form, a few quick turns: a row for each in the table and in the file."""
    script = Path(__file__).parents[2] / "benchmarks" / "langgraph_stall.py"
    quick = ["--turns", "3", "--model-s", "0", "--summary-s", "0", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run([sys.executable, str(script), *quick], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["form"] for row in rows} == {"in-line", "decorator-sync", *FORMS}
    assert all(len(row["turns_s"]) == 3 and row["form"] in done.stdout for row in rows)
