"""The pre-model node: in ``create_react_agent`` and in graphs of one's own."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AnyMessage, RemoveMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from typing_extensions import TypedDict

from graphs import Events, ask, idle, idle_sync, marks, on, policy_of
from helpers import FakeSummarizer
from lg_agents import Talker, caller, covered, is_summary, talk, talk_sync, talker
from smoothctx import Runtime
from smoothctx_langgraph.middleware_state import VIEW_KEY, ViewState, model_input
from smoothctx_langgraph.premodel import premodel_node
from smoothctx_langgraph.saved import SAVED_KEY

pytestmark = [
    pytest.mark.langgraph,
    # `create_react_agent` is deprecated in favour of `create_agent`, and goes on working
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
    pytest.mark.filterwarnings("ignore:AgentStatePydantic has been moved"),
]


class State(MessagesState, ViewState):
    """Messages, and the channels of a pre-model node."""


@tool
def look(what: str = "") -> str:
    """Look something up."""
    return f"found {what}"


def own_graph(model: Talker, node: Any, *, state: Any = State, outside: Any = MessagesState, **compiled: Any) -> Any:
    """A graph of two nodes: ours, and one that calls the model; its outside knows of messages only."""

    async def call_model(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(model_input(state))]}

    builder = StateGraph(state, input_schema=outside, output_schema=outside)
    builder.add_node("prepare", node)
    builder.add_node("model", call_model)
    builder.add_edge(START, "prepare")
    builder.add_edge("prepare", "model")
    builder.add_edge("model", END)
    return builder.compile(**compiled)


@pytest.mark.parametrize("mode", ["view", "state"])
async def test_in_create_react_agent(mode: str) -> None:
    """With tools: the hook runs before every call, the model sees the view, calls and results stay together."""
    async with Runtime() as runtime:
        model = talker()
        model.answer = caller("look", what="it")
        node = premodel_node(runtime, policy_of(), mode=mode)
        agent: Any = create_react_agent(model, [look], pre_model_hook=node, checkpointer=InMemorySaver())
        state = await talk(agent, runtime, on("t"), range(8))
        assert covered(model.sent[-1]) and {2 * k for k in range(8)} <= marks(model.sent[-1])
        for view in model.sent:
            calls = [c["id"] for m in view if m.type == "ai" for c in m.tool_calls]  # type: ignore[attr-defined]
            assert calls == [m.tool_call_id for m in view if m.type == "tool"]  # type: ignore[attr-defined]
        assert (len(state["messages"]) == 32) == (mode == "view")


@pytest.mark.parametrize("mode", ["view", "state"])
def test_in_a_synchronous_create_react_agent(mode: str) -> None:
    """The same with ``invoke``."""
    with Runtime.in_thread() as runtime:
        model = talker()
        node = premodel_node(runtime, policy_of(), mode=mode)
        agent: Any = create_react_agent(model, [], pre_model_hook=node, checkpointer=InMemorySaver())
        state = talk_sync(agent, runtime, on("t"), range(10))
        assert covered(model.sent[-1]) and marks(model.sent[-1]) == set(range(19))
        assert (len(state["messages"]) == 20) == (mode == "view")


@pytest.mark.parametrize("mode", ["view", "state"])
async def test_in_a_graph_of_ones_own(mode: str) -> None:
    """The view is nowhere in the checkpoint; what is committed is."""
    async with Runtime() as runtime:
        model = talker()
        graph = own_graph(model, premodel_node(runtime, policy_of(), mode=mode), checkpointer=InMemorySaver())
        state = await talk(graph, runtime, on("t"), range(10))
        assert set(state) == {"messages"} and marks(model.sent[-1]) == set(range(19)) and covered(model.sent[-1])
        values = (await graph.aget_state(on("t"))).values
        assert VIEW_KEY not in values
        assert bool(values.get(SAVED_KEY)) == (mode == "view")
        assert (len(state["messages"]) == 20) == (mode == "view")


@pytest.mark.parametrize("mode", ["view", "state"])
async def test_nothing_of_it_is_in_the_token_stream(mode: str) -> None:
    """``stream_mode="messages"``: the answers alone, in both kinds of graph."""
    async with Runtime() as runtime:
        for make in (_react, own_graph):
            model = talker()
            name = make.__name__
            node = premodel_node(runtime, policy_of(), mode=mode, name=f"premodel-{name}")
            graph = make(model, node, checkpointer=InMemorySaver())
            for k in range(10):
                words = ""
                async for message, metadata in graph.astream({"messages": [ask(k)]}, on(name), stream_mode="messages"):
                    assert not is_summary(message) and not isinstance(message, RemoveMessage), message
                    assert metadata["langgraph_node"] in ("agent", "model")
                    words += str(message.content)
                assert marks([ask(0).model_copy(update={"content": words})]) == {2 * k + 1}
                await idle(runtime)
            assert covered(model.sent[-1])


def _react(model: Any, node: Any, **options: Any) -> Any:
    return create_react_agent(model, [], pre_model_hook=node, **options)


async def test_a_run_that_resumes_between_the_nodes_reads_the_messages() -> None:
    """The view is not in the checkpoint, so after an interrupt before the model it is sent the messages themselves."""
    async with Runtime() as runtime:
        model = talker()
        graph = own_graph(
            model,
            premodel_node(runtime, policy_of()),
            checkpointer=InMemorySaver(),
            interrupt_before=["model"],
        )
        for k in range(8):
            await graph.ainvoke({"messages": [ask(k)]}, on("t"))
            assert len(model.sent) == k
            await graph.ainvoke(None, on("t"))
            await idle(runtime)
            assert marks(model.sent[-1]) == set(range(2 * k + 1))
        assert len(model.sent[-1]) == 15


async def test_a_restart_takes_over_what_is_committed(tmp_path: Path) -> None:
    """New objects on the same file: the first turn is sent the summary, without a call to a summariser."""
    path = str(tmp_path / "graph.sqlite")
    async with AsyncSqliteSaver.from_conn_string(path) as saver, Runtime() as runtime:
        model = talker()
        await talk(
            own_graph(model, premodel_node(runtime, policy_of()), checkpointer=saver), runtime, on("t"), range(7)
        )
        seen = covered(model.sent[-1])
        assert seen
    summariser = FakeSummarizer("hold")
    async with AsyncSqliteSaver.from_conn_string(path) as saver, Runtime() as runtime:
        model = talker()
        graph = own_graph(model, premodel_node(runtime, policy_of(summariser)), checkpointer=saver)
        await talk(graph, None, on("t"), [7])
        assert covered(model.sent[0]) >= seen and marks(model.sent[0]) == set(range(15))


class AppendOnly(TypedDict):
    """A state whose reducer knows no ids."""

    messages: Annotated[list[AnyMessage], operator.add]


class AppendOnlyWithView(AppendOnly, ViewState):
    """The same, with the channels of a pre-model node."""


async def test_state_mode_falls_back_where_the_reducer_does_not_shrink() -> None:
    """It says so, the state grows by turns only, and the model is sent the view."""
    events = Events()
    async with Runtime(on_event=events) as runtime:
        model = talker()
        graph = own_graph(
            model,
            premodel_node(runtime, policy_of(), mode="state"),
            state=AppendOnlyWithView,
            outside=AppendOnly,
            checkpointer=InMemorySaver(),
        )
        state = await talk(graph, runtime, on("t"), range(10))
        assert len(state["messages"]) == 20 and not any(isinstance(m, RemoveMessage) for m in state["messages"])
        assert covered(model.sent[-1]) and marks(model.sent[-1]) == set(range(19))
        assert "state.kept" in events.names()


class Replaced(TypedDict):
    """A list without a reducer: what a node writes takes its place."""

    messages: list[AnyMessage]


class ReplacedWithView(Replaced, ViewState):
    """The same, with the channels of a pre-model node."""


@pytest.mark.parametrize("state", [Replaced, ReplacedWithView])
@pytest.mark.parametrize("mode", ["view", "state"])
async def test_a_list_without_a_reducer_keeps_every_message(mode: str, state: Any) -> None:
    """Where there is nothing to commit nothing is written; where there is, it cannot be, and the view is used."""
    events = Events()
    async with Runtime(on_event=events) as runtime:
        model = talker()

        async def call_model(state: Any) -> dict[str, Any]:
            return {"messages": [*state["messages"], await model.ainvoke(model_input(state))]}

        builder = StateGraph(state, input_schema=Replaced, output_schema=Replaced)
        builder.add_node("prepare", premodel_node(runtime, policy_of(), mode=mode))
        builder.add_node("model", call_model)
        builder.add_edge(START, "prepare")
        builder.add_edge("prepare", "model")
        graph: Any = builder.compile(checkpointer=InMemorySaver())
        held: list[Any] = []
        for k in range(10):
            held = (await graph.ainvoke({"messages": [*held, ask(k, id=f"q{k}")]}, on("t")))["messages"]
            assert marks(held) == set(range(2 * k + 2)) and marks(model.sent[-1]) == set(range(2 * k + 1))
            await idle(runtime)
        assert len(held) == 20 and bool(covered(model.sent[-1])) == (state is ReplacedWithView)
        assert ("state.kept" in events.names()) == (mode == "state")


async def test_no_turn_awaits_the_summariser() -> None:
    """Fifteen turns end while the summariser hangs."""
    summariser = FakeSummarizer("hang")
    async with Runtime() as runtime:
        model = talker()
        graph = own_graph(model, premodel_node(runtime, policy_of(summariser)), checkpointer=InMemorySaver())
        state = await talk(graph, None, on("t"), range(15))
        assert len(state["messages"]) == 30 and summariser.running == 1


def test_a_sub_graph_may_have_one() -> None:
    """A graph with a pre-model node as a node of another: its conversations are its own, turn after turn."""
    with Runtime.in_thread() as runtime:
        model = talker()
        node = premodel_node(runtime, policy_of())
        inner: Any = create_react_agent(model, [], pre_model_hook=node)
        builder = StateGraph(MessagesState)
        builder.add_node("inner", inner)
        builder.add_edge(START, "inner")
        builder.add_edge("inner", END)
        graph = builder.compile(checkpointer=InMemorySaver())
        for k in range(8):
            graph.invoke({"messages": [ask(k)]}, on("t"))
            idle_sync(runtime)
        assert covered(model.sent[-1]) and marks(model.sent[-1]) == set(range(15))
