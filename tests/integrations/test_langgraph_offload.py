"""What a policy offloads, and where it can still be read: in the state, in a store, and after a restart."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from graphs import Events, FakeSummarizer, ask, chat_graph, idle, on, policy_of
from helpers import fill
from lg_agents import Talker, agent_of, caller, talk, talker
from smoothctx import FolderStore, MemoryStore, Offload, Policy, Runtime
from smoothctx.transforms.offload import is_stub
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.middleware_commit import LookaheadStateMiddleware
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.premodel import premodel_node
from smoothctx_langgraph.saved import LookaheadState

pytestmark = pytest.mark.langgraph

SIZES: dict[str, Any] = {
    "trigger": ("messages", 6),
    "hard_limit": ("messages", 1000),
    "land_at": ("messages", 4),
    "min_savings": 0.0,
}


@tool
def page(what: str = "") -> str:
    """Read a page."""
    return fill("page", 600)


def offloading(**options: Any) -> Policy:
    """Moves all but the latest result out of the context."""
    return Policy(Offload(min_tokens=50, preview_tokens=5, **options), **SIZES)


def entering() -> Policy:
    """Moves every big result out of the context before the model sees it."""
    return policy_of(FakeSummarizer(delay=0), max_message_tokens=50, trigger=("messages", 100))


def reader() -> Talker:
    """Asks for a page in each turn."""
    model = talker()
    model.answer = caller("page")
    return model


def results(messages: Any) -> list[str]:
    """The texts of the tool results."""
    return [str(m.content) for m in messages if isinstance(m, ToolMessage)]


@pytest.mark.parametrize("policy", [offloading, entering])
@pytest.mark.parametrize("stored", [True, False])
async def test_a_stub_is_shown_after_a_restart_only_where_it_can_be_read(
    policy: Any, stored: bool, tmp_path: Path
) -> None:
    """View mode, a real checkpointer, a new process: with a store the stub and its text, without one the raw text."""
    store: dict[str, Any] = {"store": FolderStore(tmp_path / "store")} if stored else {}
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "checkpoints.db")) as saver:
        async with Runtime(**store) as first:
            model = reader()
            agent = agent_of(model, LookaheadMiddleware(first, policy()), tools=[page], checkpointer=saver)
            await talk(agent, first, on("t"), range(6))
            assert is_stub(results(model.sent[-1])[0]), "it was offloaded"
        events = Events()
        async with Runtime(on_event=events, **store) as second:
            model = talker()
            middleware = LookaheadMiddleware(second, Policy(Offload(min_tokens=50, preview_tokens=5), **SIZES))
            if policy is entering:
                middleware = LookaheadMiddleware(second, policy())
            agent = agent_of(model, middleware, tools=[page], checkpointer=saver)
            # what the model is sent first, before this process has offloaded anything itself
            state = await talk(agent, None, on("t"), [6])
            shown = results(model.sent[0])
            raw = results(state["messages"])
            assert len(raw) == 6 and not any(map(is_stub, raw))
            (retrieve,) = middleware.tools
            for text in filter(is_stub, shown):
                content_id = text.split('id="')[1].split('"')[0]
                read = await retrieve.ainvoke({"id": content_id})
                assert raw[0] in read, "every stub that is shown can be read"
            if policy is offloading:
                assert is_stub(shown[0]) if stored else shown == raw
        assert not events.of("error")


FORMS: dict[str, Any] = {
    "node": lambda runtime, policy: lookahead_node(runtime, policy, mode="state"),
    "pre-model node": lambda runtime, policy: premodel_node(runtime, policy, mode="state"),
    "middleware": LookaheadStateMiddleware,
}


class Held(LookaheadState, total=False):
    """The channels of each form."""

    messages: Any
    llm_input_messages: Any


async def two_turns(form: str, runtime: Runtime, policy: Policy) -> None:
    """Two turns of a form in state mode."""
    made = FORMS[form](runtime, policy)
    if form == "middleware":
        graph = agent_of(talker(), made)
    elif form == "node":
        graph = chat_graph(made(lambda state: {"messages": [AIMessage("answer")]}))
    else:
        graph = chat_graph(made, state=Held)
    for k in range(2):
        await graph.ainvoke({"messages": [ask(k)]}, on("t"))
        await idle(runtime)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", [offloading, entering])
async def test_state_mode_without_a_store_says_what_will_be_gone(
    form: str, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One event and one warning, at the first turn: the state loses the text, and only this process has it."""
    events = Events()
    async with Runtime(on_event=events) as runtime:
        with caplog.at_level(logging.WARNING, logger="smoothctx.langgraph"):
            await two_turns(form, runtime, policy())
    (event,) = events.of("state.unstored")
    assert "no store" in event.data["why"] and "FolderStore" in event.data["why"]
    assert [r.getMessage() for r in caplog.records] == [event.data["why"]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["the runtime's store", "its own store", "nothing is offloaded"])
async def test_state_mode_says_nothing_where_nothing_is_lost(
    form: str, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A store of the user's, or nothing that leaves the context."""
    events = Events()
    policy = policy_of() if case == "nothing is offloaded" else offloading()
    policy = offloading(store=MemoryStore()) if case == "its own store" else policy
    store: dict[str, Any] = {"store": MemoryStore()} if case == "the runtime's store" else {}
    async with Runtime(on_event=events, **store) as runtime:
        await two_turns(form, runtime, policy)
    assert not events.of("state.unstored") and not caplog.records


async def test_view_mode_says_nothing() -> None:
    """The state keeps the text."""
    events = Events()
    async with Runtime(on_event=events) as runtime:
        agent = agent_of(reader(), LookaheadMiddleware(runtime, offloading()), tools=[page])
        await talk(agent, runtime, on("t"), range(2))
    assert not events.of("state.unstored")
