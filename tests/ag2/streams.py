"""Real agents and streams of AG2 1.x with fake models behind them, for the tests in this folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from ag2._replay import is_replayable
from ag2.events import (
    BaseEvent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextInput,
    ToolCallEvent,
    ToolCallsEvent,
    ToolResultsEvent,
    Usage,
)
from ag2.events._serialization import import_event_class, qualified_name

from ag2 import Agent, MemoryStream, Middleware, tool
from helpers import MARK, problems
from smoothctx import KeepRecent, Policy, Runtime, Summarize
from smoothctx_autogen.ag2 import LookaheadMiddleware

FILLER = "lorem ipsum " * 20
Message = dict[str, Any]
#: what a fake model answers to the events that it was sent
Answer = Callable[[list[BaseEvent]], "str | ModelResponse | list[str]"]


class Model:
    """A model config and its client. ``requests`` has the events of every call, ``asked`` the loop's time."""

    provider = "fake"
    model = "fake-1"

    def __init__(self, answer: Answer | None = None, *, delay: float = 0.0, usage: Usage | None = None) -> None:
        self.answer = answer or (lambda events: f"<{2 * len(self.requests) - 1}> answer {FILLER}")
        self.delay = delay
        self.usage = usage or Usage()
        self.requests: list[list[BaseEvent]] = []
        self.asked: list[float] = []
        self.prompts: list[list[str]] = []
        self.publish: list[BaseEvent] = []

    def copy(self) -> Model:
        """Itself."""
        return self

    def create(self) -> Model:
        """The client."""
        return self

    async def __call__(self, messages: Sequence[BaseEvent], context: Any, **options: Any) -> ModelResponse:
        self.requests.append(list(messages))
        self.asked.append(asyncio.get_running_loop().time())
        self.prompts.append(list(context.prompt))
        if self.delay:
            await asyncio.sleep(self.delay)
        for event in self.publish:
            await context.send(event)
        answer = self.answer(list(messages))
        if isinstance(answer, ModelResponse):
            return answer
        if isinstance(answer, list):
            return ModelResponse(tool_calls=ToolCallsEvent([call(i) for i in answer]), usage=self.usage)
        return ModelResponse(ModelMessage(answer), usage=self.usage)


def call(call_id: str) -> ToolCallEvent:
    """A call of the tool."""
    return ToolCallEvent("look_up", id=call_id, arguments=json.dumps({"key": call_id}))


@tool
async def look_up(key: str) -> str:
    """Look something up."""
    return f"value of {key} {FILLER}"


def agent(
    model: Model, runtime: Runtime | None, policy: Policy | None, *, name: str = "assistant", **options: Any
) -> Any:
    """A real agent, with lookahead if there is a runtime."""
    extra = {k: options.pop(k) for k in ("tenant", "report_usage", "engine") if k in options}
    middleware = [Middleware(LookaheadMiddleware, runtime=runtime, policy=policy, **extra)] if runtime else []
    options = {"tools": [look_up], **options, "middleware": [*middleware, *options.get("middleware", ())]}
    return Agent(name, "You are an agent.", config=model, **options)


async def converse(one: Any, turns: int, *, stream: Any = None, first: int = 0, pause: float = 0.0) -> Any:
    """Ask ``turns`` questions on one stream, each with its mark; returns the last reply."""
    stream = stream or MemoryStream()
    reply = None
    for turn in range(first, first + turns):
        reply = await one.ask(f"<{2 * turn}> question {FILLER}", stream=stream)
        if pause:
            await asyncio.sleep(pause)
    return reply


def small(model: Any, **options: Any) -> Policy:
    """A policy that counts messages and starts early."""
    summary = {k: options.pop(k) for k in ("model_id", "max_tokens", "layout", "facts") if k in options}
    keep = options.pop("keep", ("messages", 2))
    options = {
        "trigger": ("messages", 6),
        "hard_limit": ("messages", 1000),
        "land_at": ("messages", 4),
        "min_savings": 0.0,
        "fallback": KeepRecent(keep),
        **options,
    }
    return Policy(
        Summarize(model, keep=keep, **{"facts": False, "max_tokens": 100, "window": 100_000, **summary}), **options
    )


def rendered(events: Iterable[BaseEvent]) -> list[Message]:
    """The request that a provider's mapper makes of these events: requests, responses and wrapped results only."""
    out: list[Message] = []
    for event in events:
        if isinstance(event, ModelRequest):
            text = "".join(p.content for p in event.parts if isinstance(p, TextInput))
            out.append({"role": "user", "content": text})
        elif isinstance(event, ModelResponse):
            out.append({"role": "assistant", "content": event.content})
            if event.tool_calls:
                out[-1]["tool_calls"] = event.tool_calls.to_api()
        elif isinstance(event, ToolResultsEvent):
            for result in event.results:
                text = "".join(p.content for p in result.result.parts)
                out.append({"role": "tool", "tool_call_id": result.parent_id, "content": text})
    return out


def faults(events: Sequence[BaseEvent]) -> list[str]:
    """What a provider, or the framework's own rules of replay, would find wrong with these events."""
    found = problems(rendered(events))
    return found if is_replayable(events, 0) else [*found, "the framework would drop some of these"]


def texts(events: Iterable[BaseEvent]) -> str:
    """All text of a request."""
    return "\n".join(str(m.get("content")) for m in rendered(events))


def seen(events: Iterable[BaseEvent]) -> set[int]:
    """Every mark in a request."""
    return {int(m) for m in MARK.findall(texts(events))}


def summarised(events: Iterable[BaseEvent]) -> bool:
    """Does a request hold a summary of ours?"""
    return "<conversation_summary>" in texts(events)


def exported(events: Iterable[BaseEvent]) -> str:
    """A history as JSON, by the framework's own form of an event."""
    return json.dumps([[qualified_name(e), e.to_dict()] for e in events])


def imported(text: str) -> list[BaseEvent]:
    """Read back what :func:`exported` wrote."""
    found = []
    for name, fields in json.loads(text):
        kind = import_event_class(name)
        assert kind is not None, name
        found.append(kind.from_dict(fields))
    return found


def stream_of(number: int) -> Any:
    """A stream with an id of its own choice."""
    return MemoryStream(id=UUID(int=number))
