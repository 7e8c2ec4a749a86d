"""An unmodified middleware with ``before_model`` as a lookahead, in a real agent."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import pytest
from langchain.agents.middleware import (
    AgentMiddleware,
    ModelCallLimitMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    before_model,
    hook_config,
)
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from graphs import HANG_S, Events, idle, marks, on
from helpers import make_runtime, virtual
from lg_agents import Talker, agent_of, covered, is_summary, scribe, talk, talk_sync, talker
from smoothctx import Runtime
from smoothctx.errors import ConfigurationError
from smoothctx_langgraph.stock import StockTransform, lookahead_stock

pytestmark = pytest.mark.langgraph

SIZES: dict[str, Any] = {"trigger": ("messages", 6), "hard_limit": ("messages", 100)}


def summaries(model: Talker, *, trigger: Any = ("messages", 10), keep: Any = ("messages", 4), **options: Any) -> Any:
    """LangChain's own summaries."""
    return SummarizationMiddleware(model, trigger=trigger, keep=keep, trim_tokens_to_summarize=None, **options)


def trim(state: Any, runtime: Any) -> Any:
    """What a user writes to keep the first and the last messages."""
    messages = state["messages"]
    if len(messages) <= 4:
        return None
    return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), messages[0], *messages[-2:]]}


class Trim(AgentMiddleware):
    """The same as a class with a synchronous hook only."""

    def before_model(self, state: Any, runtime: Any) -> Any:
        return trim(state, runtime)


async def test_its_summary_is_committed_without_a_wait() -> None:
    """The agent goes on while the summary is written; its message keeps its class and its marks of origin."""
    gate = asyncio.Event()
    async with Runtime() as runtime:
        model, summariser = talker(), scribe(gate=gate)
        agent = agent_of(model, lookahead_stock(summaries(summariser), runtime), checkpointer=InMemorySaver())
        async with asyncio.timeout(HANG_S):
            await talk(agent, None, on("t"), range(8))
        assert not any(map(covered, model.sent))
        gate.set()
        await idle(runtime)
        await talk(agent, runtime, on("t"), range(8, 12))
        last = model.sent[-1]
        assert covered(last) and marks(last) == set(range(23))
        (summary,) = [m for m in last if is_summary(m)]
        assert type(summary) is HumanMessage and summary.additional_kwargs["lc_source"] == "summarization"
        assert str(summary.content).startswith("Here is a summary of the conversation to date")
        assert all(r.waited_s == 0 for s in runtime._sessions.values() for r in s.receipts)


def test_in_a_synchronous_agent() -> None:
    """``invoke``, with its asynchronous hook on the runtime's loop."""
    with Runtime.in_thread() as runtime:
        model = talker()
        agent = agent_of(model, lookahead_stock(summaries(scribe()), runtime), checkpointer=InMemorySaver())
        state = talk_sync(agent, runtime, on("t"), range(10))
        assert covered(model.sent[-1]) and marks(model.sent[-1]) == set(range(19))
        assert len(state["messages"]) == 20


async def test_state_mode_rewrites_the_state() -> None:
    """As the middleware itself would, but by ids."""
    async with Runtime() as runtime:
        model = talker()
        ahead = lookahead_stock(summaries(scribe()), runtime, mode="state")
        agent = agent_of(model, ahead, checkpointer=InMemorySaver())
        state = await talk(agent, runtime, on("t"), range(12))
        assert len(state["messages"]) < 14 and is_summary(state["messages"][0])
        assert marks(state["messages"]) == set(range(24))


async def test_one_summary_at_a_time_and_hardly_more_than_in_line() -> None:
    """Forty turns: each summary begun is used, and there are few more than the middleware writes in line.

    What a lookahead leaves is longer by the newest segment and by what came while it ran.
    """
    in_line, ahead = scribe(), scribe()
    stock = agent_of(talker(), summaries(in_line, trigger=("messages", 20)), checkpointer=InMemorySaver())
    await talk(stock, None, on("t"), range(40))
    async with Runtime() as runtime:
        middleware = lookahead_stock(summaries(ahead, trigger=("messages", 20)), runtime)
        agent = agent_of(talker(), middleware, checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(40))
        assert 0 < len(ahead.sent) <= len(in_line.sent) + 2
        assert runtime.counters.started == len(ahead.sent) and not runtime.counters.stale


@virtual  # its retries take their time
async def test_its_errors_never_reach_the_turn() -> None:
    """A summariser that fails: the stock middleware's turn fails, ours goes on, and the failure is an event."""

    def broken(messages: Any) -> AIMessage:
        raise ValueError("it cannot read this")

    events = Events()
    async with make_runtime(on_event=events) as runtime:
        model = talker()
        agent = agent_of(
            model, lookahead_stock(summaries(Talker(answer=broken)), runtime), checkpointer=InMemorySaver()
        )
        state = await talk(agent, runtime, on("t"), range(7))
        assert len(state["messages"]) == 14 and len(model.sent[-1]) == 13
        assert "lookahead.failed" in events.names() and runtime.counters.committed == 0


async def test_at_the_hard_limit_the_fallback_makes_it_fit() -> None:
    """A summariser that never answers: old messages go, as many as the middleware would keep stay."""
    async with Runtime() as runtime:
        model = talker()
        ahead = lookahead_stock(
            summaries(scribe(gate=asyncio.Event())), runtime, hard_limit=("messages", 14), overrun="fallback"
        )
        agent = agent_of(model, ahead, checkpointer=InMemorySaver())
        await talk(agent, None, on("t"), range(20))
        assert max(map(len, model.sent)) <= 14 and runtime.counters.fallbacks >= 1


async def test_the_middleware_itself_stays_as_it_was() -> None:
    """It can be used in line beside: nothing of it was changed."""
    stock = summaries(scribe())
    before = copy.copy(vars(stock))
    async with Runtime() as runtime:
        agent = agent_of(talker(), lookahead_stock(stock, runtime), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(10))
    assert vars(stock) == before
    assert await stock.abefore_model({"messages": [HumanMessage("one")]}, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("made", ["class", "function", "coroutine"])
async def test_a_users_own_hook_runs_ahead(made: str) -> None:
    """A plain trimming hook, synchronous (off the loop) or not, sizes given: what it leaves is what is sent."""
    where: list[int] = []

    async def atrim(state: Any, runtime: Any) -> Any:
        """The same, asynchronous."""
        return trim(state, runtime)

    def noted(state: Any, runtime: Any) -> Any:
        """Says on which thread it runs."""
        where.append(threading.get_ident())
        return trim(state, runtime)

    hooks: dict[str, Any] = {"class": Trim(), "function": before_model(noted), "coroutine": before_model(atrim)}
    async with Runtime() as runtime:
        model = talker()
        agent = agent_of(model, lookahead_stock(hooks[made], runtime, **SIZES), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(10))
        last = model.sent[-1]
        assert len(last) < 8 and 0 in marks(last) and {16, 17, 18} <= marks(last)
        assert threading.get_ident() not in where


async def test_a_hook_that_finds_nothing_to_do_is_asked_rarely() -> None:
    """Asked once, then again only after the history has grown by a quarter: no loop."""
    asked: list[int] = []

    @before_model
    async def nothing(state: Any, runtime: Any) -> Any:
        """Never has anything to do."""
        asked.append(len(state["messages"]))
        return None

    async with Runtime() as runtime:
        agent = agent_of(talker(), lookahead_stock(nothing, runtime, **SIZES), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(20))
        assert 1 < len(asked) < 12 and all(b >= a * 1.2 for a, b in zip(asked, asked[1:], strict=False))


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"messages": [RemoveMessage(id="unknown")]}, "unknown"),
        ({"messages": [], "todos": [1]}, "'todos'"),
        ({"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), SystemMessage("so far: ...")]}, "system message"),
        ("text", "str"),
    ],
)
async def test_what_cannot_be_prepared_ahead_is_an_event(update: Any, word: str) -> None:
    """An update with more than messages, an unknown id, a new system message: refused, and the turn goes on."""

    @before_model
    async def odd(state: Any, runtime: Any) -> Any:
        """Returns something odd."""
        return update

    events = Events()
    async with Runtime(on_event=events) as runtime:
        model = talker()
        agent = agent_of(model, lookahead_stock(odd, runtime, **SIZES), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(6))
        assert len(model.sent[-1]) == 11
        assert word in str(events.of("lookahead.failed")[0].data["error"])


class Jumping(AgentMiddleware):
    """Ends the run at will."""

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: Any, runtime: Any) -> Any:
        return {"jump_to": "end"}


class Nothing(AgentMiddleware):
    """Has no hook."""


class Wrapping(Trim):
    """Has another hook."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request)


@pytest.mark.parametrize(
    ("middleware", "options", "word"),
    [
        (Jumping(), SIZES, "jump"),
        (ModelCallLimitMiddleware(run_limit=3), SIZES, "jump"),
        (Nothing(), SIZES, "no before_model"),
        (TodoListMiddleware(), SIZES, "no before_model"),
        (Wrapping(), SIZES, "wrap_model_call"),
        (object(), SIZES, "AgentMiddleware"),
        (Trim(), {}, "trigger="),
        (Trim(), {"trigger": ("messages", 6)}, "hard_limit="),
        (Trim(), {**SIZES, "mode": "both"}, "mode="),
        (Trim(), {**SIZES, "identity": ""}, "identity="),
    ],
)
def test_what_cannot_run_ahead_is_refused_at_construction(middleware: Any, options: dict[str, Any], word: str) -> None:
    """In the caller's words, before anything runs."""
    with Runtime.in_thread() as runtime, pytest.raises(ConfigurationError, match=word):
        lookahead_stock(middleware, runtime, **options)


def test_its_fingerprint_says_what_its_work_depends_on() -> None:
    """The same model and options give the same one in every process; another prompt, keep or model another one."""
    one = StockTransform(summaries(scribe())).fingerprint
    assert one is not None and one == StockTransform(summaries(scribe())).fingerprint
    assert one == StockTransform(summaries(scribe(), trigger=("messages", 99))).fingerprint
    others = [
        summaries(scribe(), keep=("messages", 5)),
        summaries(scribe(), summary_prompt="{messages}: shorter"),
        summaries(talker()),
    ]
    assert len({one, *(StockTransform(m).fingerprint for m in others)}) == 4
    assert StockTransform(Trim()).fingerprint is None
    assert StockTransform(Trim(), identity="trim-v1").fingerprint is not None


async def test_its_model_calls_are_accounted() -> None:
    """What the summaries cost is counted, as reported where the model reports it."""

    def write(messages: Any) -> AIMessage:
        usage = {"input_tokens": 1000, "output_tokens": 50, "total_tokens": 1050}
        return AIMessage("SUMMARY", usage_metadata=usage)  # type: ignore[arg-type]

    async with Runtime() as runtime:
        summariser = Talker(answer=write)
        agent = agent_of(talker(), lookahead_stock(summaries(summariser), runtime), checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(12))
        usage = runtime.counters.usage
        assert usage.calls == len(summariser.sent) > 0 and not usage.estimated
        assert usage.input_tokens == 1000 * usage.calls and usage.output_tokens == 50 * usage.calls
