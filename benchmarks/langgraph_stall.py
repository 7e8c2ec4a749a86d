"""How long the turns of a LangGraph agent take while its context is rewritten: each form of ours, and in line.

A session of 30 turns with a model of 0.3 s and a summariser of 2.0 s, in real sleeps, one turn right after the other.
In line (LangChain's ``SummarizationMiddleware``) a turn on which the context is rewritten takes both; ahead none should
take longer than the model alone.

    python benchmarks/langgraph_stall.py [--turns 30] [--model-s 0.3] [--summary-s 2.0] [--forms NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent

from smoothctx import Policy, Runtime, Summarize
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.middleware_commit import LookaheadStateMiddleware
from smoothctx_langgraph.models import ChatModel
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.premodel import premodel_node
from smoothctx_langgraph.stock import lookahead_stock

#: in messages: where all forms begin to rewrite, what they keep, and what ours never exceed
TRIGGER, KEEP, LIMIT = 24, 4, 60
QUESTION = "Question {k}: " + "some detail that matters, " * 12


class Sleeper(BaseChatModel):
    """A chat model that takes ``seconds`` for each answer. ``calls`` has its ends, in seconds of ``perf_counter``."""

    seconds: float
    words: str
    model_name: str = "sleeper"
    calls: list[float] = []

    @property
    def _llm_type(self) -> str:
        return "sleeper"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, "seconds": self.seconds}

    def _answer(self) -> ChatResult:
        self.calls.append(time.perf_counter())
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.words))])

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        time.sleep(self.seconds)
        return self._answer()

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(self.seconds)
        return self._answer()


@dataclass
class Session:
    """One session: its models, and the seconds of each turn."""

    turns: int
    model: Sleeper
    summariser: Sleeper
    seconds: list[float] = field(default_factory=list)
    rewritten: list[int] = field(default_factory=list)

    def policy(self) -> Policy:
        """The same sizes in every form; room enough for the turns that a summary takes."""
        return Policy(
            Summarize(ChatModel(self.summariser), keep=("messages", KEEP), layout="standalone"),
            trigger=("messages", TRIGGER),
            hard_limit=("messages", LIMIT),
            land_at=("messages", KEEP + 2),
        )

    def stock(self) -> SummarizationMiddleware[Any, Any]:
        """LangChain's own summaries."""
        return SummarizationMiddleware(self.summariser, trigger=("messages", TRIGGER), keep=("messages", KEEP))

    async def drive(self, graph: Any, rewrites: Callable[[], int]) -> None:
        """All turns of an asynchronous graph."""
        for k in range(self.turns):
            before, start = rewrites(), time.perf_counter()
            await graph.ainvoke(_question(k), _THREAD)
            self._note(k, start, rewrites() - before)

    def drive_sync(self, graph: Any, rewrites: Callable[[], int]) -> None:
        """All turns of a synchronous graph."""
        for k in range(self.turns):
            before, start = rewrites(), time.perf_counter()
            graph.invoke(_question(k), _THREAD)
            self._note(k, start, rewrites() - before)

    def _note(self, turn: int, start: float, rewritten: int) -> None:
        self.seconds.append(time.perf_counter() - start)
        if rewritten:
            self.rewritten.append(turn)


_THREAD: Any = {"configurable": {"thread_id": "bench"}}


def _question(k: int) -> Any:
    return {"messages": [HumanMessage(QUESTION.format(k=k))]}


def _graph(node: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("model", node)
    builder.add_edge(START, "model")
    builder.add_edge("model", END)
    return builder.compile(checkpointer=InMemorySaver())


def _agent(session: Session, middleware: Any) -> Any:
    return create_agent(session.model, [], middleware=[middleware], checkpointer=InMemorySaver())


async def in_line(session: Session) -> None:
    """LangChain's ``SummarizationMiddleware`` as it is."""
    await session.drive(_agent(session, session.stock()), lambda: len(session.summariser.calls))


async def middleware(session: Session) -> None:
    """``LookaheadMiddleware``."""
    async with Runtime() as runtime:
        ahead = LookaheadMiddleware(runtime, session.policy())
        await session.drive(_agent(session, ahead), lambda: runtime.counters.committed)


async def state_middleware(session: Session) -> None:
    """``LookaheadStateMiddleware``."""
    async with Runtime() as runtime:
        ahead = LookaheadStateMiddleware(runtime, session.policy())
        await session.drive(_agent(session, ahead), lambda: runtime.counters.committed)


async def stock_adapter(session: Session) -> None:
    """``lookahead_stock`` around LangChain's ``SummarizationMiddleware``."""
    async with Runtime() as runtime:
        ahead = lookahead_stock(session.stock(), runtime, hard_limit=("messages", LIMIT))
        await session.drive(_agent(session, ahead), lambda: runtime.counters.committed)


async def premodel(session: Session) -> None:
    """``premodel_node`` in ``create_react_agent``."""
    async with Runtime() as runtime:
        node = premodel_node(runtime, session.policy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            graph: Any = create_react_agent(session.model, [], pre_model_hook=node, checkpointer=InMemorySaver())
        await session.drive(graph, lambda: runtime.counters.committed)


async def decorator(session: Session) -> None:
    """``lookahead_node`` on a coroutine function."""
    async with Runtime() as runtime:

        @lookahead_node(runtime, session.policy())
        async def call_model(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await session.model.ainvoke(state["messages"])]}

        await session.drive(_graph(call_model), lambda: runtime.counters.committed)


async def decorator_sync(session: Session) -> None:
    """``lookahead_node`` on a function, with ``invoke``, on a thread of its own."""

    def run() -> None:
        with Runtime.in_thread() as runtime:

            @lookahead_node(runtime, session.policy())
            def call_model(state: MessagesState) -> dict[str, Any]:
                return {"messages": [session.model.invoke(state["messages"])]}

            session.drive_sync(_graph(call_model), lambda: runtime.counters.committed)

    await asyncio.to_thread(run)


FORMS: dict[str, Callable[[Session], Awaitable[None]]] = {
    "in-line": in_line,
    "decorator": decorator,
    "decorator-sync": decorator_sync,
    "middleware": middleware,
    "middleware-state": state_middleware,
    "premodel": premodel,
    "stock-adapter": stock_adapter,
}


async def measure(name: str, turns: int, model_s: float, summary_s: float) -> dict[str, Any]:
    """One session of one form, as a row of numbers in seconds."""
    session = Session(
        turns,
        Sleeper(seconds=model_s, words="An answer to that, " * 10, calls=[]),
        Sleeper(seconds=summary_s, words="The user asked about many details.", model_name="summariser", calls=[]),
    )
    await FORMS[name](session)
    slow = [session.seconds[k] for k in session.rewritten]
    return {
        "form": name,
        "p50_s": statistics.median(session.seconds),
        "max_s": max(session.seconds),
        "rewrites": len(session.rewritten),
        "rewrite_turns_max_s": max(slow, default=None),
        "turns_s": session.seconds,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="turns of each session (default 30)")
    parser.add_argument("--model-s", type=float, default=0.3, help="seconds of a model call (default 0.3)")
    parser.add_argument("--summary-s", type=float, default=2.0, help="seconds of a summary (default 2.0)")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="by default all")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    print(f"{'form':>17} {'p50':>8} {'max':>8} {'rewrites':>9} {'slowest of those':>17}")
    for name in options.forms:
        row = asyncio.run(measure(name, options.turns, options.model_s, options.summary_s))
        rows.append(row)
        slow = row["rewrite_turns_max_s"]
        shown = "" if slow is None else f"{slow:.3f} s"
        print(f"{name:>17} {row['p50_s']:>6.3f} s {row['max_s']:>6.3f} s {row['rewrites']:>9} {shown:>17}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows, "model_s": options.model_s, "summary_s": options.summary_s}, file, indent=2)


if __name__ == "__main__":
    main()
