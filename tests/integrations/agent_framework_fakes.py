"""What the tests of the Agent Framework integration share: a chat client of ours on the framework's own layers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from agent_framework import (
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    Message,
    tool,
)

from helpers import MARK, fill, problems
from smoothctx.codec import openai_messages
from smoothctx_autogen.agent_framework import AgentFrameworkMessages, LookaheadMiddleware

CODEC = AgentFrameworkMessages()
Reply = Callable[[Sequence[Message]], Sequence[Content]]


class Plain(BaseChatClient):
    """Answers by ``reply`` after ``delay`` seconds and keeps every request; ``hold`` makes it wait for ``release``."""

    model = "fake-1"

    def __init__(self, *, reply: Reply | None = None, delay: float = 0.0, usage: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reply = reply or (lambda messages: [Content.from_text("ok")])
        self.delay = delay
        self.usage = usage
        self.hold = False
        self.finish_reason = "stop"
        self.conversation_id: str | None = None
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.requests: list[list[Message]] = []
        self.options: list[dict[str, Any]] = []

    def service_url(self) -> str:
        """An address with secrets in it."""
        return "https://user:secret@models.example:8443/v1?key=secret"

    def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **kwargs: Any) -> Any:
        self.requests.append(list(messages))
        self.options.append(dict(options))
        if stream:
            return self._build_response_stream(self._updates(messages))
        return self._response(messages)

    async def _wait(self) -> None:
        self.started.set()
        if self.hold:
            await self.release.wait()
        if self.delay:
            await asyncio.sleep(self.delay)

    async def _response(self, messages: Sequence[Message]) -> ChatResponse:
        await self._wait()
        contents = list(self.reply(messages))
        usage = self._usage(messages, contents)
        return ChatResponse(
            messages=[Message("assistant", contents)],
            usage_details=usage,
            finish_reason=self.finish_reason,
            conversation_id=self.conversation_id,
        )

    async def _updates(self, messages: Sequence[Message]) -> Any:
        await self._wait()
        contents = list(self.reply(messages))
        for content in contents:
            yield ChatResponseUpdate(role="assistant", contents=[content])
            await asyncio.sleep(0.05)
        usage = self._usage(messages, contents)
        if usage is not None:
            yield ChatResponseUpdate(role="assistant", contents=[Content.from_usage(usage)])

    def _usage(self, messages: Sequence[Message], contents: list[Content]) -> Any:
        if not self.usage:
            return None
        read = sum(map(CODEC.estimate, messages)) + 100  # tool schemas, say
        return {"input_token_count": read, "output_token_count": CODEC.estimate(Message("assistant", contents))}


class FakeClient(FunctionInvocationLayer, ChatMiddlewareLayer, Plain):
    """The same with the framework's function invocation and chat middleware around it."""


@tool(approval_mode="never_require")
async def lookup(key: str) -> str:
    """Look something up."""
    return f"<{key}> found, {fill('and more', 40)}"


@tool(approval_mode="always_require")
async def delete(key: str) -> str:
    """Delete something; a person has to agree."""
    return f"<{key}> deleted"


def text(value: str) -> Content:
    """A text content."""
    return Content.from_text(value)


def call(call_id: str, name: str = "lookup", **arguments: Any) -> Content:
    """A call of a tool."""
    return Content.from_function_call(call_id, name, arguments=arguments)


def answer(call_id: str, value: str = "result") -> Content:
    """The result of a call."""
    return Content.from_function_result(call_id, result=value)


def user(value: str = "question", *, size: int = 0) -> Message:
    """A user message."""
    return Message("user", [fill(value, size)])


def assistant(value: str | None = "answer", *calls: str, size: int = 0) -> Message:
    """An assistant message; ``calls`` are the ids of its tool calls."""
    contents = [] if value is None else [text(fill(value, size))]
    return Message("assistant", [*contents, *(call(c, key=c) for c in calls)])


def results(*ids: str, size: int = 0) -> Message:
    """One tool message that answers these calls."""
    return Message("tool", [answer(i, fill("result", size)) for i in ids])


def agent_of(
    client: Any, middleware: LookaheadMiddleware | None, *, tools: Sequence[Any] = (), **options: Any
) -> Agent[Any]:
    """An agent on a client, with the middleware where there is one."""
    return Agent(
        client=client,
        name="bob",
        instructions="You are an agent.",
        tools=list(tools),
        middleware=[middleware] if middleware is not None else None,
        **options,
    )


async def ask(agent: Agent[Any], question: Any, session: AgentSession | None = None, *, stream: bool = False) -> str:
    """One run, to its end."""
    if not stream:
        return (await agent.run(question, session=session)).text
    running = agent.run(question, session=session, stream=True)
    async for _ in running:
        pass
    return (await running.get_final_response()).text


def stored(session: AgentSession) -> list[Message]:
    """What the framework's own history provider holds."""
    found: list[Message] = session.state["in_memory"]["messages"]
    return found


def faults(messages: Sequence[Message]) -> list[str]:
    """What a provider would refuse in a request."""
    return problems([d for m in messages for d in openai_messages(CODEC, m)])


def marks(messages: Sequence[Message]) -> set[int]:
    """Every mark such as ``<12>`` in these messages."""
    return {int(k) for m in messages for k in MARK.findall(CODEC.text(m))}


def summaries(messages: Sequence[Message]) -> list[str]:
    """The texts of the summary messages."""
    return [t for m in messages if (t := CODEC.summary_text(m)) is not None]
