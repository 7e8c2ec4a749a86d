"""Isolation: a run never hears of the background calls that are made in the middle of it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import collect_runs
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.pregel import Pregel
from langsmith.run_helpers import get_current_run_tree, set_run_metadata, tracing_context
from langsmith.run_trees import RunTree
from typing_extensions import TypedDict

from langchain_fakes import ASK, SECRET, USAGE, Fake, Streaming, fake
from smoothctx import Policy, Runtime, Summarize
from smoothctx_langgraph.codec import LangChainMessages
from smoothctx_langgraph.isolation import background_config, isolated, isolated_context
from smoothctx_langgraph.models import ChatModel

pytestmark = pytest.mark.langgraph


# -- isolation -------------------------------------------------------------------------------------------------


class State(TypedDict):
    messages: Annotated[list[BaseMessage], add_messages]


class Recorder(BaseCallbackHandler):
    """Notes everything that the user's callbacks hear."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: self.heard.append(f"{name} {args} {kwargs}")
        return super().__getattribute__(name)


def graph(background: Callable[[], Any]) -> Any:
    """One node that has background work done in the middle of its own streamed model call."""
    model = GenericFakeChatModel(messages=iter([AIMessage("the foreground answer")] * 9))

    async def agent(state: State) -> dict[str, Any]:
        await background()
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(State)
    builder.add_node("agent", agent)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    return builder.compile()


async def direct(chat: Any) -> None:
    """The call is made inside the node's own task: nothing but the isolation keeps it apart."""
    reply = await ChatModel(chat).complete(ASK)
    assert reply.text.replace("-", "") == SECRET.replace("-", "")


async def through_a_runtime(chat: Any) -> None:
    """The call is made by a runtime that was opened inside the node, so that its tasks inherit the run."""
    history = [HumanMessage(f"question {k} " * 20) if k % 2 == 0 else AIMessage(f"answer {k} " * 20) for k in range(20)]
    policy = Policy(
        Summarize(ChatModel(chat), keep=("messages", 2), layout="standalone"),
        trigger=("tokens", 300),
        hard_limit=("tokens", 90_000),
        land_at=("tokens", 200),
    )
    async with Runtime() as runtime:
        handle = runtime.session("s", policy=policy, codec=LangChainMessages()).observe(history)
        assert handle is not None
        await handle.wait(30)
        assert str(handle.state) == "ready", (handle.reason, handle)


V3 = ["v3"] if "stream_events" in vars(Pregel) else []  # an older graph inherits a stub
MODES = ["messages", "updates", "custom", "values", "debug", "tasks", "events v2", *V3]


async def stream(app: Any, mode: str, config: RunnableConfig) -> list[str]:
    """Everything that a user sees of one run, as texts."""
    given = {"messages": [HumanMessage("hi")]}
    if mode == "v3":
        run = await app.astream_events(given, config, version="v3")
        return [repr(event) async for event in run]
    if mode == "events v2":
        return [repr(event) async for event in app.astream_events(given, config, version="v2")]
    return [repr(chunk) async for chunk in app.astream(given, config, stream_mode=mode)]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("kind", [Fake, Streaming])
@pytest.mark.parametrize("background", [direct, through_a_runtime])
@pytest.mark.parametrize("mode", MODES)
async def test_a_run_never_hears_of_it(mode: str, background: Any, kind: type[Fake]) -> None:
    """cases B119: no chunk in any stream mode, no event, no callback, of a call made in the middle of the run."""
    chat, user = fake(kind), Recorder()
    seen = await stream(graph(lambda: background(chat)), mode, {"callbacks": [user]})
    alone = Recorder()
    expected = await stream(graph(lambda: asyncio.sleep(0)), mode, {"callbacks": [alone]})
    assert chat.asked
    for word in ("summary", "Sum it up", "fake-1", "smoothctx"):
        assert not [s for s in seen if word in s]
        assert not [h for h in user.heard if word in h]
    assert len(seen) == len(expected)
    assert len(user.heard) == len(alone.heard) > 0
    assert all(config is None or not config.get("configurable") for config, _ in chat.configs)


async def test_without_the_isolation_it_would_be_heard() -> None:
    """The test above can fail: the same call, made plainly, is in the stream and in the callbacks."""
    chat, user = fake(Streaming), Recorder()

    async def plain() -> None:
        await chat.ainvoke("Sum it up.")

    seen = await stream(graph(plain), "messages", {"callbacks": [user]})
    assert [s for s in seen if "summary" in s]
    assert [h for h in user.heard if "Sum it up" in h]


async def test_collectors_of_the_users_own_block_get_nothing() -> None:
    """``collect_runs`` and ``get_usage_metadata_callback`` around a turn see the turn only; then they go on."""
    chat = fake(answer=AIMessage("x", usage_metadata=USAGE, response_metadata={"model_name": "m"}))
    with collect_runs() as runs, get_usage_metadata_callback() as usage:
        await ChatModel(chat).complete(ASK)
        assert runs.traced_runs == []
        assert usage.usage_metadata == {}
        await chat.ainvoke("mine")
        assert len(runs.traced_runs) == 1
        assert usage.usage_metadata["m"]["input_tokens"] == 120


async def test_no_parent_trace() -> None:
    """The call has no parent run of the user's trace; afterwards the user's trace is as it was."""
    chat, parent = fake(), RunTree(name="turn", run_type="chain")
    with tracing_context(parent=parent, enabled=False, tags=["mine"]):
        await ChatModel(chat).complete(ASK)
        assert chat.configs[0][1] is None
        assert get_current_run_tree() is parent
        set_run_metadata(still="there")
    assert parent.metadata["still"] == "there"


async def test_the_models_own_callbacks_stay() -> None:
    """Callbacks given to the chat model itself are its own; of a run's tags and callbacks nothing is taken along."""
    own, user = Recorder(), Recorder()
    chat = fake(callbacks=[own])
    token = var_child_runnable_config.set({"callbacks": [user], "tags": ["users"], "metadata": {"users": 1}})
    try:
        await ChatModel(chat).complete(ASK)
        assert var_child_runnable_config.get() is not None
    finally:
        var_child_runnable_config.reset(token)
    assert user.heard == []
    assert own.heard
    assert not [h for h in own.heard if "users" in h]
    assert [h for h in own.heard if "nostream" in h and "smoothctx" in h]


async def test_a_sync_model_runs_in_a_thread_that_inherits_the_isolation() -> None:
    """Without native async a model runs in a thread: not the loop's, and without the run's config."""
    threads: list[int] = []

    class Sync(Fake):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            threads.append(threading.get_ident())
            return super()._generate(*args, **kwargs)

    chat, user = fake(Sync), Recorder()
    token = var_child_runnable_config.set({"callbacks": [user], "configurable": {"thread_id": "users"}})
    try:
        await ChatModel(chat).complete(ASK)
    finally:
        var_child_runnable_config.reset(token)
    assert threads != [threading.get_ident()]
    assert "users" not in repr(chat.configs)
    assert user.heard == []


def test_isolated_keeps_the_rest_of_the_context() -> None:
    """The application's own variables stay; nesting, errors and leaving restore what was there."""
    mine: contextvars.ContextVar[str] = contextvars.ContextVar("mine")
    mine.set("kept")
    config: RunnableConfig = {"tags": ["run"]}
    token = var_child_runnable_config.set(config)
    try:
        with pytest.raises(RuntimeError, match="inside"), isolated():
            with isolated():
                assert var_child_runnable_config.get() is None
            assert var_child_runnable_config.get() is None
            assert mine.get() == "kept"
            raise RuntimeError("inside")
        assert var_child_runnable_config.get() is config
        context = isolated_context()
        assert context.run(var_child_runnable_config.get) is None
        assert context.run(mine.get) == "kept"
        assert var_child_runnable_config.get() is config
    finally:
        var_child_runnable_config.reset(token)


def test_a_block_that_was_left_behind_changes_no_other_context() -> None:
    """A coroutine closed in another context than its own ends quietly and leaves that context alone."""

    async def work() -> None:
        with isolated():
            await asyncio.sleep(0)

    coroutine = work()
    contextvars.copy_context().run(coroutine.send, None)
    config: RunnableConfig = {"tags": ["run"]}
    token = var_child_runnable_config.set(config)
    try:
        coroutine.close()
        assert var_child_runnable_config.get() is config
    finally:
        var_child_runnable_config.reset(token)


def test_background_config_is_fresh_each_time() -> None:
    """Nobody can add to the config of another call."""
    background_config()["tags"].append("mine")
    assert background_config()["tags"] == ["nostream"]
    assert background_config()["callbacks"] == []
    assert background_config()["metadata"] == {"lc_source": "smoothctx"}
