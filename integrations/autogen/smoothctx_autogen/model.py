"""A ``ChatCompletionClient`` as the model of a transform."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from autogen_core import CancellationToken, FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)
from pydantic import SecretBytes, SecretStr

from smoothctx import ConfigurationError, EngineUnreachable, Usage
from smoothctx.tokens import count_text
from smoothctx.transforms.model import ModelReply, estimate
from smoothctx.usage import token_count

from .checks import check_text
from .codec import SOURCE

#: seconds between two looks at whether the agent's loop is still there
LOOK_S = 1.0
#: clients by their package, and the argument with which they cap the length of an answer
_CAPS = {
    "autogen_ext.models.anthropic": "max_tokens",
    "autogen_ext.models.azure": "max_tokens",
    "autogen_ext.models.openai": "max_tokens",
}
#: families that only know the newer name
_NEWER = ("o1", "o3", "o4", "gpt-5")
_SECRET = re.compile(
    r"key$|secret|passw|auth|credential|header|cookie|bearer|certificate|(^|_)token(_provider)?$", re.IGNORECASE
)
_FINISH = {"function_calls": "tool_calls"}


class ChatClientModel:
    """An AutoGen model client, asked as a transform asks its model: ``Summarize(client_model(client))``.

    Made by :func:`client_model`. Calls run on the runtime's event loop, unless a context told it which loop its
    agent runs on (see ``LookaheadChatCompletionContext``).
    """

    def __init__(self, client: ChatCompletionClient, *, max_tokens_arg: str | None) -> None:
        self._client = client
        self._max_tokens_arg = max_tokens_arg
        #: the loop that the client belongs to; ``None``: whichever loop asks
        self.home: asyncio.AbstractEventLoop | None = None

    async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> ModelReply:
        """Ask the client.

        Raises:
            EngineUnreachable: the loop that the client belongs to is not running.
            Exception: whatever the client raises.
        """
        home = self.home
        if home is None or home is asyncio.get_running_loop():
            return await self._ask(messages, max_tokens)
        return await _on_loop(home, lambda: self._ask(messages, max_tokens))

    async def _ask(self, messages: list[dict[str, Any]], max_tokens: int | None) -> ModelReply:
        token = CancellationToken()
        capped = self._max_tokens_arg is not None and max_tokens is not None
        try:
            result = await self._client.create(
                from_openai(messages, vision=_sees(self._client)),
                extra_create_args={str(self._max_tokens_arg): max_tokens} if capped else {},
                cancellation_token=token,
            )
        except asyncio.CancelledError:
            token.cancel()  # for clients that only listen to it
            raise
        return _reply(result, messages)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {type(self._client).__name__}>"


class NamedChatClientModel(ChatClientModel):
    """One with an identity: its summaries may be stored, shared and taken to another process."""

    def __init__(self, client: ChatCompletionClient, *, max_tokens_arg: str | None, identity: str) -> None:
        super().__init__(client, max_tokens_arg=max_tokens_arg)
        #: the client's class and its public configuration
        self.identity = identity

    async def complete(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **_: Any) -> ModelReply:
        """As calling it. Request options of the agent are not for this client, and stay out."""
        return await self(messages, max_tokens=max_tokens)


def client_model(
    client: ChatCompletionClient, *, model_id: str | None = None, max_tokens_arg: str | None = "auto"
) -> ChatClientModel:
    """An AutoGen model client as the model of a transform.

    Args:
        client: asked without tools, one request per summary.
        model_id: names the model, so that its summaries can be stored and shared. By default the client's component
            config without secrets; a client that has none stays private to this process.
        max_tokens_arg: the ``extra_create_args`` key that caps the length of an answer. ``"auto"`` knows the clients
            of ``autogen_ext`` for OpenAI, Azure and Anthropic; ``None`` leaves the length to the prompt.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """
    if not isinstance(client, ChatCompletionClient):
        raise ConfigurationError(f"client={client!r}: expected a ChatCompletionClient")
    if max_tokens_arg is not None and (not isinstance(max_tokens_arg, str) or not max_tokens_arg):
        raise ConfigurationError(
            f"max_tokens_arg={max_tokens_arg!r}: expected 'auto', the name of an argument, or None"
        )
    check_text("model_id", model_id, optional=True)
    cap = _cap(client) if max_tokens_arg == "auto" else max_tokens_arg
    identity = model_id or client_identity(client)
    if identity is None:
        return ChatClientModel(client, max_tokens_arg=cap)
    return NamedChatClientModel(client, max_tokens_arg=cap, identity=identity)


def client_identity(client: ChatCompletionClient) -> str | None:
    """Names a client by its class and configuration, secrets left out; ``None`` where it has no component config."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            component = client.dump_component()
        public = json.dumps(_public(component.config), sort_keys=True, default=lambda v: type(v).__qualname__)
    except Exception:  # a client that was never meant to be dumped may raise anything
        return None
    model = component.config.get("model")
    digest = hashlib.blake2b(public.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return " ".join([component.provider, *([model] if isinstance(model, str) else []), digest])


def from_openai(messages: Sequence[Mapping[str, Any]], *, vision: bool = True) -> list[LLMMessage]:
    """OpenAI-style dicts as AutoGen's messages; results that follow each other become one message."""
    out: list[LLMMessage] = []
    names: dict[str, str] = {}
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            call_id = str(message.get("tool_call_id") or "")
            result = FunctionExecutionResult(
                content=_text(content), name=names.get(call_id, ""), call_id=call_id, is_error=False
            )
            last = out[-1] if out else None
            if isinstance(last, FunctionExecutionResultMessage):
                last.content.append(result)
            else:
                out.append(FunctionExecutionResultMessage(content=[result]))
        elif role == "assistant" and message.get("tool_calls"):
            calls = [
                FunctionCall(id=str(c["id"]), name=c["function"]["name"], arguments=c["function"]["arguments"])
                for c in message["tool_calls"]
            ]
            names.update((c.id, c.name) for c in calls)
            out.append(AssistantMessage(content=calls, thought=_text(content) or None, source=SOURCE))
        elif role == "assistant":
            out.append(AssistantMessage(content=_text(content), source=SOURCE))
        elif role in ("system", "developer"):
            out.append(SystemMessage(content=_text(content)))
        elif isinstance(content, list) and vision:
            out.append(UserMessage(content=[_part(p) for p in content], source=SOURCE))
        else:
            out.append(UserMessage(content=_text(content), source=SOURCE))
    return out


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(p if isinstance(p, str) else "[image]" for p in (_part(p, media=False) for p in content))
    return content if isinstance(content, str) else ""


def _part(part: Any, *, media: bool = True) -> str | Image:
    if not isinstance(part, Mapping):
        return str(part)
    if part.get("type") != "image_url":
        text = part.get("text")
        return text if isinstance(text, str) else f"[{part.get('type')}]"
    if media:
        try:
            return Image.from_uri(part["image_url"]["url"])
        except Exception:  # a link, or data that is not an image: it is named, never lost
            pass
    return "[image]"


def _reply(result: CreateResult, messages: Sequence[Mapping[str, Any]]) -> ModelReply:
    called = not isinstance(result.content, str)
    text = "" if called else str(result.content)
    asked, written = token_count(result.usage.prompt_tokens) or 0, token_count(result.usage.completion_tokens) or 0
    if result.cached:
        spent = Usage(calls=1)  # nothing was asked of the provider
    elif asked or written:
        spent = Usage(input_tokens=asked, output_tokens=written, calls=1)
    else:
        spent = Usage(input_tokens=estimate(messages), output_tokens=count_text(text), calls=1, estimated=True)
    finish = _FINISH.get(result.finish_reason, result.finish_reason)
    return ModelReply(text=text, usage=spent, finish_reason=finish, tool_calls=called)


def _sees(client: ChatCompletionClient) -> bool:
    try:
        return bool(client.model_info["vision"])
    except Exception:  # an old client without it
        return False


def _cap(client: ChatCompletionClient) -> str | None:
    for kind in type(client).__mro__:
        for package, argument in _CAPS.items():
            if kind.__module__ == package or kind.__module__.startswith(package + "."):
                family = str(client.model_info.get("family", ""))
                newer = package.endswith("openai") and family.startswith(_NEWER)
                return "max_completion_tokens" if newer else argument
    return None


def _public(value: Any) -> Any:
    """A configuration without what must not leave it: fields named like secrets, and what URLs carry of them."""
    if isinstance(value, Mapping):
        return {str(k): _public(v) for k, v in value.items() if not _SECRET.search(str(k))}
    if isinstance(value, list | tuple):
        return [_public(v) for v in value]
    if isinstance(value, SecretStr | SecretBytes):
        return None
    if isinstance(value, str):
        return re.sub(r"(?<=://)[^/@\s]*@|\?\S*$", "", value) if "://" in value else value
    return value


async def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Coroutine[Any, Any, ModelReply]]) -> ModelReply:
    """Run it on another loop, for as long as that one lives; cancelled here is cancelled there."""
    gone = EngineUnreachable("the event loop of the agent, which its model client belongs to, has ended")
    if loop.is_closed() or not loop.is_running():
        raise gone
    work = call()
    try:
        there = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # it was closed just now
        work.close()
        raise gone from None
    here = asyncio.wrap_future(there)
    try:
        while not here.done():
            await asyncio.wait({here}, timeout=LOOK_S)
            if loop.is_closed():
                break
        if not here.done() or here.cancelled():
            raise gone
        return here.result()
    finally:
        here.cancel()
        if loop.is_closed():
            work.close()  # it was never begun: what had begun there was cancelled before
