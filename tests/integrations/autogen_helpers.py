"""What the AutoGen tests share: model clients with a script, message builders, and what a provider would refuse."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from autogen_core import CancellationToken, Component, FunctionCall
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import Tool, ToolSchema
from pydantic import BaseModel, SecretStr

from helpers import MARK, fill
from smoothctx_autogen import AutoGenMessages, LookaheadOptions

CODEC = AutoGenMessages()
Reply = str | list[FunctionCall]


# -- messages ------------------------------------------------------------------------------------------------------


def S(text: str = "You are an agent.") -> SystemMessage:
    """A system message."""
    return SystemMessage(content=text)


def H(text: str = "question", *, size: int = 0) -> UserMessage:
    """A user message."""
    return UserMessage(content=fill(text, size), source="user")


def A(text: str = "answer", *calls: str, size: int = 0) -> AssistantMessage:
    """An assistant message; ``calls`` are the ids of its function calls, the text then is its thought."""
    if not calls:
        return AssistantMessage(content=fill(text, size), source="agent")
    made = [FunctionCall(id=c, name="run", arguments='{"x": 1}') for c in calls]
    return AssistantMessage(content=made, thought=fill(text, size), source="agent")


def T(*calls: str, text: str = "result", size: int = 0) -> FunctionExecutionResultMessage:
    """The one message with the results of these calls."""
    return FunctionExecutionResultMessage(
        content=[
            FunctionExecutionResult(content=fill(text, size), name="run", call_id=c, is_error=False) for c in calls
        ]
    )


def chat(turns: int, *, first: int = 0, size: int = 50) -> list[LLMMessage]:
    """User and assistant turns, each message marked with its number."""
    found: list[LLMMessage] = []
    for k in range(first, first + turns):
        found += [H(f"<{2 * k}> question", size=size), A(f"<{2 * k + 1}> answer", size=size)]
    return found


def marks(messages: Iterable[Any]) -> set[int]:
    """Every mark in these messages."""
    return {int(m) for message in messages for m in MARK.findall(CODEC.text(message))}


def summaries(messages: Iterable[Any]) -> list[str]:
    """The texts of the summaries among these messages."""
    return [t for t in map(CODEC.summary_text, messages) if t is not None]


def problems(messages: Sequence[LLMMessage]) -> list[str]:
    """What a provider would refuse: not system first, then user; a call without exactly one result right behind it,
    or a result without its call."""
    found: list[str] = []
    k = 0
    while k < len(messages) and isinstance(messages[k], SystemMessage):
        k += 1
    if k < len(messages) and not isinstance(messages[k], UserMessage):
        found.append(f"messages[{k}]: the first one after the system messages is a {type(messages[k]).__name__}")
    open_ids: list[str] = []
    for i, message in enumerate(messages):
        if isinstance(message, FunctionExecutionResultMessage):
            for result in message.content:
                if result.call_id in open_ids:
                    open_ids.remove(result.call_id)
                else:
                    found.append(f"messages[{i}]: result {result.call_id!r} without its call")
            continue
        if open_ids:
            found.append(f"messages[{i}]: calls without a result: {open_ids}")
        open_ids = [c.id for c in CODEC.calls(message)]
    if open_ids:
        found.append(f"end: calls without a result: {open_ids}")
    return found


def options(
    *, keep: int = 2, trigger: int = 6, hard: int = 1000, land: int = 3, max_tokens: int = 100, **more: Any
) -> LookaheadOptions:
    """Options that count messages and start early, so that a handful of messages shows everything."""
    return LookaheadOptions(
        keep=("messages", keep),
        fallback_keep=("messages", keep),
        trigger=("messages", trigger),
        hard_limit=("messages", hard),
        land_at=("messages", land),
        min_savings=more.pop("min_savings", 0.0),
        max_tokens=max_tokens,
        facts=more.pop("facts", False),
        **more,
    )


# -- clients -------------------------------------------------------------------------------------------------------


class Client(ChatCompletionClient):
    """A model client that answers by a function of the messages, after ``delay`` seconds.

    ``requests`` has what each call was given. The script may be a list of replies, then ``"done"`` for ever.
    """

    component_type = "model"

    def __init__(
        self,
        script: Callable[[Sequence[LLMMessage]], Reply] | Sequence[Reply | Exception] = (),
        *,
        delay: float = 0.0,
        usage: tuple[int, int] = (10, 5),
    ) -> None:
        self.script = script
        self.delay = delay
        self.usage = usage
        self.requests: list[list[LLMMessage]] = []
        self.arguments: list[Mapping[str, Any]] = []
        self.tools: list[Sequence[Tool | ToolSchema]] = []
        self.tokens: list[CancellationToken | None] = []
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.finish: Literal["stop", "length", "function_calls", "content_filter", "unknown"] = "stop"
        self.cached = False
        self.vision = True
        self.family: str = ModelFamily.UNKNOWN

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: Tool | Literal["auto", "required", "none"] = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        self.requests.append(list(messages))
        self.arguments.append(dict(extra_create_args))
        self.tools.append(tools)
        self.tokens.append(cancellation_token)
        self.loops.append(asyncio.get_running_loop())
        waiting = asyncio.get_running_loop().create_task(self.wait())
        if cancellation_token is not None:
            cancellation_token.link_future(waiting)
        await waiting
        return self.answer(messages)

    async def wait(self) -> None:
        """What the model takes."""
        if self.delay:
            await asyncio.sleep(self.delay)

    def answer(self, messages: Sequence[LLMMessage]) -> CreateResult:
        """The next reply of the script."""
        if callable(self.script):
            content = self.script(messages)
        else:
            content = self.script[len(self.requests) - 1] if len(self.requests) <= len(self.script) else "done"
        if isinstance(content, Exception):
            raise content
        finish = self.finish if isinstance(content, str) else "function_calls"
        return CreateResult(
            finish_reason=finish, content=content, usage=RequestUsage(*self.usage), cached=self.cached, thought=None
        )

    async def create_stream(
        self, messages: Sequence[LLMMessage], **more: Any
    ) -> AsyncGenerator[str | CreateResult, None]:
        result = await self.create(messages, **more)
        if isinstance(result.content, str):
            yield result.content
        yield result

    async def close(self) -> None:
        pass

    def actual_usage(self) -> RequestUsage:
        return RequestUsage(0, 0)

    def total_usage(self) -> RequestUsage:
        return RequestUsage(0, 0)

    def count_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        return sum(map(CODEC.estimate, messages))

    def remaining_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        return 1_000_000

    @property
    def capabilities(self) -> Any:
        return self.model_info

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            vision=self.vision, function_calling=True, json_output=True, family=self.family, structured_output=True
        )


class ClientConfig(BaseModel):
    """What a declared summariser is made of."""

    model: str = "small"
    text: str = "The summary."
    delay: float = 0.0
    base_url: str = "https://user:hunter2@models.example/v1?sig=hunter2"
    api_key: SecretStr = SecretStr("hunter2")
    default_headers: dict[str, str] = {"Authorization": "hunter2"}
    max_tokens: int | None = None


class Summarizer(Client, Component[ClientConfig]):
    """A client that writes down the marks it was given.

    ``mode``: ``"answer"``, ``"hold"`` (until ``release`` is set), ``"fail"``, ``"hang"``, ``"empty"``, ``"long"``,
    ``"call"`` (asks for a tool), ``"cut"`` (ends at the output limit), ``"cancel"`` (cancels itself).
    """

    component_config_schema = ClientConfig
    component_provider_override = "autogen_helpers.Summarizer"
    #: every one that was made, for those made from a config
    made: list[Summarizer] = []

    def __init__(self, mode: str = "answer", **config: Any) -> None:
        self.config = ClientConfig(**config)
        super().__init__(self._write, delay=self.config.delay)
        self.mode = mode
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = 0
        Summarizer.made.append(self)

    @property
    def calls(self) -> int:
        """How often it was asked."""
        return len(self.requests)

    async def wait(self) -> None:
        self.started.set()
        try:
            if self.mode == "hold":
                await self.release.wait()
            elif self.mode == "hang":
                await asyncio.sleep(1e9)
            else:
                await super().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.mode == "fail":
            raise RuntimeError("the summariser failed")
        if self.mode == "cancel":
            raise asyncio.CancelledError
        self.finish = "length" if self.mode == "cut" else "stop"

    def _write(self, messages: Sequence[LLMMessage]) -> Reply:
        if self.mode == "empty":
            return "   "
        if self.mode == "long":
            return "".join(CODEC.text(m) for m in messages) * 2
        if self.mode == "call":
            return [FunctionCall(id="1", name="run", arguments="{}")]
        seen = sorted({int(m) for message in messages for m in re.findall(r"<(\d+)>", CODEC.text(message))})
        return f"{self.config.text} {''.join(f'<{m}>' for m in seen)}"

    def _to_config(self) -> ClientConfig:
        return self.config

    @classmethod
    def _from_config(cls, config: ClientConfig) -> Summarizer:
        return cls(**config.model_dump())
