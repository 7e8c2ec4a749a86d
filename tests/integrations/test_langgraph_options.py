"""Options: wrong ones are refused where they are given, and what only shows in a run is said once, never raised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Annotated, Any

import pytest
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send
from pydantic import BaseModel
from typing_extensions import TypedDict

from graphs import Chat, ask, chat_graph, converse, idle, model_node, on, policy_of, summaries
from helpers import Events
from lg_agents import agent_of, caller, scribe, talk, talker
from smoothctx import ConfigurationError, Offload, OpenAIMessages, Policy, Runtime
from smoothctx_langgraph.codec import LangChainMessages
from smoothctx_langgraph.middleware import LookaheadMiddleware
from smoothctx_langgraph.middleware_commit import LookaheadStateMiddleware
from smoothctx_langgraph.middleware_state import model_input
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.premodel import premodel_node
from smoothctx_langgraph.stock import lookahead_stock
from smoothctx_langgraph.turns import Turns

pytestmark = pytest.mark.langgraph

Make = Callable[..., Any]


def stock(runtime: Any, policy: Any, **options: Any) -> Any:
    """The form that makes its policy itself."""
    summaries = SummarizationMiddleware(scribe(), trigger=("messages", 20), keep=("messages", 6))
    return lookahead_stock(summaries, runtime, **options)


FORMS: dict[str, Make] = {
    "turns": Turns,
    "node": lookahead_node,
    "middleware": LookaheadMiddleware,
    "state middleware": LookaheadStateMiddleware,
    "pre-model node": premodel_node,
    "stock": stock,
}


MIDDLEWARE: tuple[Make, ...] = (LookaheadMiddleware, LookaheadStateMiddleware)


async def whose(config: Any) -> str:
    """A function that a turn could not wait for."""
    return "ann"


class Whose:
    """The same as an object."""

    async def __call__(self, config: Any) -> str:
        return "ann"


class Half:
    """Has a part of what a codec has."""

    name = "half"

    def check(self, message: Any, index: int) -> None:
        """Take anything."""


WRONG: list[tuple[str, Any]] = [
    ("runtime", None),
    ("runtime", Runtime),
    ("policy", None),
    ("policy", {"trigger": 1}),
    ("codec", "x"),
    ("codec", LangChainMessages),
    ("codec", Half()),
    ("codec", OpenAIMessages()),
    ("tenant", 3),
    ("tenant", None),
    ("tenant", " "),
    ("tenant", whose),
    ("tenant", Whose()),
    ("engine", "gpt"),
    ("engine", talker()),
    ("engine", Chat),
    ("request", [1]),
    ("request", "x"),
]


def wrong() -> Iterator[Any]:
    """Each form with each wrong option that it takes."""
    for name, form in FORMS.items():
        for option, value in WRONG:
            if form is not stock or option != "policy":
                yield pytest.param(form, option, value, id=f"{name}-{option}-{type(value).__name__}")


@pytest.mark.parametrize(("form", "option", "value"), list(wrong()))
def test_every_form_names_a_wrong_option(form: Make, option: str, value: Any) -> None:
    """Option, value and what is allowed, before there is any turn."""
    given: dict[str, Any] = {"runtime": Runtime(), "policy": policy_of(), option: value}
    with pytest.raises(ConfigurationError) as caught:
        form(given.pop("runtime"), given.pop("policy"), **given)
    assert str(caught.value).startswith(f"{option}={value!r}: expected ")


@pytest.mark.parametrize(
    ("form", "option", "value"),
    [
        *[
            (f, "name", v)
            for f in (LookaheadMiddleware, LookaheadStateMiddleware, premodel_node)
            for v in ("", None, 3)
        ],
        *[(f, "retrieve", "yes") for f in (LookaheadMiddleware, LookaheadStateMiddleware)],
        *[(f, "mode", v) for f in (lookahead_node, premodel_node, stock) for v in ("both", None)],
        *[(f, "messages_key", v) for f in (lookahead_node, premodel_node) for v in ("", None, 3)],
        (stock, "name", 3),
    ],
)
def test_the_options_of_some_forms_are_named(form: Make, option: str, value: Any) -> None:
    """What only some forms take is checked in the same way."""
    with pytest.raises(ConfigurationError) as caught:
        form(Runtime(), policy_of(), **{option: value})
    assert str(caught.value).startswith(f"{option}={value!r}: expected ")


def test_right_options_are_taken() -> None:
    """A function or an object tells the tenant, a mapping is a request, a codec may be derived."""

    class Mine(LangChainMessages):
        pass

    class Engine:
        def bind(self, session_id: str) -> Any:
            return None

    options: dict[str, Any] = {"codec": Mine(), "tenant": methodcaller("get", "x"), "engine": Engine(), "request": {}}
    for form in FORMS.values():
        assert form(Runtime(), policy_of(), **options) is not None


@pytest.mark.parametrize("option", ["foo", "transform"])
def test_an_unknown_option_of_a_stock_middleware_is_named(option: str) -> None:
    """They go to the policy, which has no such option, or whose it is not to choose."""
    with pytest.raises(ConfigurationError, match=f"^{option}=3: no such option; expected trigger, .*max_wait"):
        stock(Runtime(), None, **{option: 3})


def test_a_wrong_option_of_the_policy_is_named() -> None:
    """A known one with a wrong value is told as the policy tells it."""
    with pytest.raises(ConfigurationError, match="max_wait='soon'"):
        stock(Runtime(), None, max_wait="soon")


def test_a_premodel_node_is_no_decorator() -> None:
    """It says what it is, and what to use instead."""

    def model(state: Any) -> Any:
        return {}

    node: Any = premodel_node(Runtime(), policy_of())
    with pytest.raises(ConfigurationError, match=r"node by itself.*lookahead_node"):
        node(model)


@pytest.mark.parametrize("state", [None, "text", [ask(0)]])
def test_what_is_no_state_has_no_model_input(state: Any) -> None:
    """Nothing to send is not the same as no state."""
    with pytest.raises(ConfigurationError, match=r"^state=.*'messages'"):
        model_input(state)
    assert model_input({}) == [] and model_input({"messages": [ask(0)]})[0].type == "human"


# -- what shows in a run -----------------------------------------------------------------------------------------------


def missing(config: Any) -> str:
    """Fails as a lookup does."""
    return str(config["configurable"]["org"])


def refused(config: Any) -> str:
    """Fails with what is raised at construction elsewhere."""
    raise ConfigurationError("no")


TENANTS: dict[str, tuple[Any, str]] = {
    "raises": (missing, "KeyError"),
    "raises an error of ours": (refused, "ConfigurationError: no"),
    "a number": (lambda config: 7, "got 7"),
    "nothing": (lambda config: None, "got None"),
    "empty": (lambda config: "", "got ''"),
    "a coroutine": (lambda config: whose(config), "got <coroutine"),
}


@pytest.mark.parametrize(("tenant", "says"), TENANTS.values(), ids=TENANTS.keys())
async def test_a_tenant_that_cannot_be_told_is_said_once(
    tenant: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The turns go on with raw messages and no session of anybody; one event, one warning."""
    events, chat = Events(), Chat()
    async with Runtime(on_event=events) as runtime:
        decorate = lookahead_node(runtime, policy_of(), tenant=tenant)
        graph = chat_graph(model_node(chat, decorate), checkpointer=InMemorySaver())
        with caplog.at_level(logging.WARNING, logger="smoothctx.langgraph"):
            await converse(graph, runtime, on("t"), range(8))
        assert len(chat.last) == 15 and not summaries(chat.last) and not runtime._sessions
    (event,) = events.of("turn.raw")
    assert says in event.data["why"] and "tenant=" in event.data["why"]
    assert [r.getMessage() for r in caplog.records] == [event.data["why"]]
    assert not events.of("error")


async def test_a_tenant_that_cannot_be_told_leaves_others_alone() -> None:
    """One run without a tenant between those of another on the same thread: it sees its own messages, they go on."""
    chat = Chat()
    async with Runtime() as runtime:
        decorate = lookahead_node(runtime, policy_of(), tenant=missing)
        graph = chat_graph(model_node(chat, decorate))
        held: list[BaseMessage] = []
        for k in range(8):
            held = (await graph.ainvoke({"messages": [*held, ask(k)]}, on("t", org="ann")))["messages"]
            await idle(runtime)
        assert summaries(chat.last)
        await graph.ainvoke({"messages": [*held, ask(8)]}, on("t"))
        assert len(chat.last) == 17 and not summaries(chat.last)
        await graph.ainvoke({"messages": [*held, ask(8)]}, on("t", org="ann"))
        assert summaries(chat.last)


async def test_the_retrieve_tool_of_an_unknown_tenant_reads_nothing() -> None:
    """Neither the turn nor the tool fails, and the tool answers with nothing of anybody's."""
    events = Events()
    async with Runtime(on_event=events) as runtime:
        policy = Policy(Offload(min_tokens=50), context_window=4000)
        model = talker()
        model.answer = caller("retrieve", id="0" * 24)
        agent = agent_of(model, LookaheadMiddleware(runtime, policy, tenant=missing))
        state = await talk(agent, runtime, on("t"), range(1))
        results = [m for m in state["messages"] if m.type == "tool"]
        assert [r.content for r in results] == ["error: nothing has been offloaded yet"]
        assert not events.of("error") and not runtime._sessions


class Words(TypedDict):
    """A state whose messages have another name."""

    words: Annotated[list[BaseMessage], add_messages]
    mood: str
    llm_input_messages: list[BaseMessage]


class Object(BaseModel):
    """The same as an object."""

    words: Annotated[list[BaseMessage], add_messages] = []
    mood: str = ""
    llm_input_messages: list[BaseMessage] = []


def misplaced(runtime: Runtime, form: str) -> Any:
    """A node that looks for ``messages``."""
    if form == "pre-model node":
        return premodel_node(runtime, policy_of())

    def answer(state: Any) -> dict[str, Any]:
        return {"words": [AIMessage("answer")]}

    return lookahead_node(runtime, policy_of(), mode=form)(answer)


@pytest.mark.parametrize("state", [Words, Object])
@pytest.mark.parametrize("form", ["view", "state", "pre-model node"])
def test_a_key_that_is_not_in_the_state_is_said_once(state: Any, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """The node runs as it is; one event and one warning say which keys there are."""
    events = Events()
    with Runtime.in_thread(on_event=events) as runtime:
        builder = StateGraph(state)
        builder.add_node("model", misplaced(runtime, form))
        builder.add_edge(START, "model")
        graph = builder.compile(checkpointer=InMemorySaver())
        with caplog.at_level(logging.WARNING, logger="smoothctx.langgraph"):
            for _ in range(3):
                held = graph.invoke({"words": [("user", "hi")], "mood": "good"}, on("t"))
    assert len(held["words"]) >= 3
    (event,) = events.of("messages.missing")
    assert event.data["keys"] == ["llm_input_messages", "mood", "words"] and event.data["node"] == "model"
    assert event.data["why"].startswith("model: messages_key='messages' is not in the state")
    assert "words" in event.data["why"] and [r.getMessage() for r in caplog.records] == [event.data["why"]]


class Last(TypedDict, total=False):
    """Messages without a reducer: there are none before somebody writes them."""

    messages: list[BaseMessage]
    mood: str


async def test_messages_that_are_not_there_yet_are_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    """A channel that is not set, an empty one, or a ``Send`` of something else: nothing to say."""
    events = Events()
    async with Runtime(on_event=events) as runtime:

        @lookahead_node(runtime, policy_of())
        def work(state: Any) -> dict[str, Any]:
            return {}

        for state in (Last, MessagesState):
            builder = StateGraph(state)
            builder.add_node("work", work)
            builder.add_conditional_edges(START, lambda _: ["work", Send("work", {"mood": "good"}), Send("work", 7)])
            builder.add_edge("work", END)
            await builder.compile().ainvoke({"mood": "good"} if state is Last else {"messages": []}, on("t"))
    assert not events.of("messages.missing") and not events.of("error") and not caplog.records
