"""What an agent of LangChain sends beside its messages, its system prompt and its tools, is preloaded with them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest
from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from graphs import CODEC, on, policy_of
from helpers import Events
from lg_agents import SIZE, agent_of, talk
from smoothctx import ConfigurationError, Runtime
from smoothctx.testing import FakeEngine
from smoothctx_langgraph import LookaheadMiddleware, LookaheadStateMiddleware, lookahead_node, premodel_node
from smoothctx_langgraph.asked import Asked

pytestmark = pytest.mark.langgraph

FORMS = [LookaheadMiddleware, LookaheadStateMiddleware]
RULES = "A rule of many. " * 200


@tool
def look(where: str) -> str:
    """Look at a place, of which there are many, and say what is there."""
    return f"found it at {where}"


class Sender(BaseChatModel):
    """Sends what it is given to an engine, as OpenAI-style requests; answers at some length."""

    engine: Any
    tools: list[dict[str, Any]] = []

    @property
    def _llm_type(self) -> str:
        return "sender"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Runnable[Any, Any]:
        """With these tools in each request."""
        return self.model_copy(update={"tools": [convert_to_openai_tool(t) for t in tools]})

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        options = {"tools": self.tools} if self.tools else {}
        sent = [CODEC.to_openai(m) for m in messages]
        await self.engine.complete(sent, max_tokens=1, extra_body={"foreground": True}, **options)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("word " * SIZE))])


def asked(engine: FakeEngine) -> list[Any]:
    """The agent's own calls."""
    return [c for c in engine.calls if "extra_body" in c.options]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tools", [[], [look]])
async def test_promise_15_the_system_prompt_and_the_tools_are_warm_at_the_commit(form: Any, tools: list[Any]) -> None:
    """The agent is as its framework makes it, nothing is told of its prompt: the commit finds it cached."""
    engine = FakeEngine(block_tokens=16)
    async with Runtime() as runtime:
        ours = form(runtime, policy_of(preload_kv=True), engine=engine)
        agent = agent_of(Sender(engine=engine), ours, tools=tools, system_prompt=RULES, checkpointer=InMemorySaver())
        committed = []
        for k in range(8):
            before = runtime.counters.committed
            await talk(agent, runtime, on("t"), [k])
            if runtime.counters.committed > before:
                committed.append(asked(engine)[-1])
        assert committed and all(c.messages[0]["content"] == RULES for c in committed)
        for call in committed:
            assert call.input_tokens - call.cached_tokens < 2 * SIZE + 32, "no more than the question"
            assert call.cached_tokens > len(RULES) / 4 + 20, "the summary too"
        ahead = [c for c in engine.calls if "extra_body" not in c.options]
        assert ahead and all(c.options.get("tools") == asked(engine)[0].options.get("tools") for c in ahead)


class Clock(AgentMiddleware[Any, Any, Any]):
    """Puts the time into the system prompt, outside of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        """With the time."""
        self.calls += 1
        return await handler(request.override(system_prompt=f"It is {self.calls} o'clock."))


class Tools(AgentMiddleware[Any, Any, Any]):
    """Gives the model these tools."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self.given = given

    @property
    def name(self) -> str:
        """One of its own for each."""
        return f"Tools{len(self.given)}"

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        """With them."""
        return await handler(request.override(tools=self.given))


async def test_promise_09_a_prompt_that_changes_with_every_turn_is_not_preloaded() -> None:
    """It would never be sent again."""
    engine = FakeEngine(block_tokens=16)
    async with Runtime() as runtime:
        ours = LookaheadMiddleware(runtime, policy_of(preload_kv=True), engine=engine)
        agent = agent_of(Sender(engine=engine), Clock(), ours, system_prompt=RULES, checkpointer=InMemorySaver())
        await talk(agent, runtime, on("t"), range(8))
        assert runtime.counters.committed and len(asked(engine)) == 8
        fourth = engine.calls.index(asked(engine)[3])
        assert engine.calls[fourth:] == asked(engine)[3:], "a change or two says nothing yet"


async def test_a_tool_without_a_schema_is_said_once_and_the_turns_go_on() -> None:
    """What was known of the request stays."""
    engine, events = FakeEngine(block_tokens=16), Events()

    async with Runtime(on_event=events) as runtime:
        ours = LookaheadMiddleware(runtime, policy_of(), engine=engine)
        around = Tools([object()]), ours, Tools([])
        agent = agent_of(Sender(engine=engine), *around, system_prompt=RULES, checkpointer=InMemorySaver())
        state = await talk(agent, runtime, on("t"), range(8))
        assert runtime.counters.committed and len(asked(engine)) == 8 and len(state["messages"]) == 16
        (event,) = events.of("request.unread")
        assert "ValueError" in event.data["error"] and not events.of("error")
        assert len(engine.calls) == 8, "nothing is preloaded with a request that is not known"


class Answer(BaseModel):
    """What the agent has to say in the end."""

    text: str


@pytest.mark.parametrize("given", [False, True])
async def test_promise_15_structured_output_adds_tools_that_are_not_seen(given: bool) -> None:
    """Nothing is preloaded, and that is said once; with the tools given it is."""
    engine, events = FakeEngine(block_tokens=16), Events()
    request = {"tools": [convert_to_openai_tool(t) for t in (look, Answer)]} if given else None
    async with Runtime(on_event=events) as runtime:
        ours = LookaheadMiddleware(runtime, policy_of(preload_kv=True), engine=engine, request=request)
        options = {"system_prompt": RULES, "response_format": ToolStrategy(Answer), "checkpointer": InMemorySaver()}
        agent = agent_of(Sender(engine=engine), ours, tools=[look], **options)
        await talk(agent, runtime, on("t"), range(8))
        ahead = [c for c in engine.calls if "extra_body" not in c.options]
        assert runtime.counters.committed and bool(ahead) is given
        assert all(RULES.startswith(c.messages[0]["content"]) and len(c.options["tools"]) == 2 for c in ahead)
        assert len(events.of("request.unread")) == (not given)


async def test_a_tool_that_changes_in_place_is_another_tool() -> None:
    """Its schema is made anew."""
    asked_for, changing = Asked(CODEC), look.model_copy()
    sent = ModelRequest(model=Sender(engine=None), messages=[], tools=[changing])
    before = asked_for.read(sent)
    assert asked_for.read(sent)["tools"][0] is before["tools"][0], "made once"
    changing.description = "Look elsewhere."
    assert asked_for.read(sent)["tools"][0]["function"]["description"] == "Look elsewhere."


@pytest.mark.parametrize("form", [*FORMS, premodel_node, lookahead_node])
async def test_a_prompt_of_the_frameworks_own_messages_is_refused_where_it_is_given(form: Any) -> None:
    """In words that say what is expected."""
    async with Runtime() as runtime:
        with pytest.raises(ConfigurationError, match="'role': 'system'"):
            form(runtime, policy_of(), engine=FakeEngine(), request={"messages": [SystemMessage("You are.")]})
