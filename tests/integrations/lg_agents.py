"""What the tests of the middleware share, beside ``graphs``: a chat model that does what it is told, and agents."""

from __future__ import annotations

import html
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field

from graphs import CODEC, ask, idle, idle_sync, marks
from helpers import MARK, fill
from smoothctx import Runtime

SIZE = 60


class Talker(BaseChatModel):
    """Answers with ``answer(messages)`` and keeps what it was ``sent``; streams word by word.

    ``gate``: an event that its asynchronous answers wait for. Its name makes it one model in every process.
    """

    answer: Callable[[list[BaseMessage]], AIMessage]
    model_name: str = "talker"
    sent: list[list[BaseMessage]] = Field(default_factory=list)
    bound: list[list[str]] = Field(default_factory=list)
    gate: Any = None

    @property
    def _llm_type(self) -> str:
        return "talker"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name}

    def bind_tools(self, tools: Any, **kwargs: Any) -> Runnable[Any, Any]:
        self.bound.append([getattr(t, "name", str(t)) for t in tools])
        return self

    def _said(self, messages: list[BaseMessage]) -> AIMessage:
        self.sent.append(list(messages))
        return self.answer(messages)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._said(messages))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        if self.gate is not None:
            await self.gate.wait()
        return self._generate(messages)

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in _chunks(self._said(messages)):
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        if self.gate is not None:
            await self.gate.wait()
        for chunk in _chunks(self._said(messages)):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def _chunks(message: AIMessage) -> Iterator[ChatGenerationChunk]:
    calls: Any = [
        {"name": c["name"], "args": json.dumps(c["args"]), "id": c["id"], "index": k, "type": "tool_call_chunk"}
        for k, c in enumerate(message.tool_calls)
    ]
    for k, word in enumerate(str(message.content).split(" ")):
        yield ChatGenerationChunk(message=AIMessageChunk(word + " ", tool_call_chunks=[] if k else calls))


def reply(messages: Sequence[BaseMessage]) -> AIMessage:
    """An answer marked with the number behind the newest question's."""
    asked = [m for m in messages if isinstance(m, HumanMessage) and not is_summary(m)]
    return AIMessage(fill(f"<{max(marks(asked[-1:]), default=0) + 1}> answer", SIZE))


def talker(**options: Any) -> Talker:
    """A model that answers each question ``<n>`` with ``<n+1>``."""
    return Talker(answer=reply, **options)


def scribe(**options: Any) -> Talker:
    """A chat model that summarises by writing down the marks that it read."""

    def write(messages: Sequence[BaseMessage]) -> AIMessage:
        read = [HumanMessage(html.unescape(CODEC.text(m))) for m in messages]
        return AIMessage("SUMMARY" + "".join(f"<{n}>" for n in sorted(marks(read))))

    return Talker(answer=write, model_name="scribe", **options)


def caller(tool: str, then: Callable[[Sequence[BaseMessage]], AIMessage] = reply, **args: Any) -> Any:
    """An answer function: calls the tool for each question, then answers."""

    def answer(messages: Sequence[BaseMessage]) -> AIMessage:
        if isinstance(messages[-1], ToolMessage):
            return then(messages)
        k = max(marks([m for m in messages if isinstance(m, HumanMessage)][-1:]), default=0)
        return AIMessage("", tool_calls=[{"name": tool, "args": args, "id": f"call-{k}"}])

    return answer


def is_summary(message: Any) -> bool:
    """One of ours, or one of LangChain's own summaries."""
    return CODEC.summary_text(message) is not None or message.additional_kwargs.get("lc_source") == "summarization"


def covered(view: Iterable[Any]) -> set[int]:
    """The marks of what the summaries in a view cover."""
    return {int(n) for m in view if is_summary(m) for n in MARK.findall(CODEC.text(m))}


def agent_of(model: Any, *middleware: Any, tools: Sequence[Any] = (), **options: Any) -> Any:
    """``create_agent``."""
    return create_agent(model, list(tools), middleware=list(middleware), **options)


async def talk(agent: Any, runtime: Runtime | None, config: Any, turns: Iterable[int]) -> Any:
    """The questions of these turns, with time for the background after each, unless there is no runtime to wait for."""
    state = None
    for k in turns:
        state = await agent.ainvoke({"messages": [ask(k, size=SIZE)]}, config)
        if runtime is not None:
            await idle(runtime)
    return state


def talk_sync(agent: Any, runtime: Runtime | None, config: Any, turns: Iterable[int]) -> Any:
    """:func:`talk` for synchronous agents."""
    state = None
    for k in turns:
        state = agent.invoke({"messages": [ask(k, size=SIZE)]}, config)
        if runtime is not None:
            idle_sync(runtime)
    return state
