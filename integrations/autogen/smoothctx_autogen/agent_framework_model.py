"""An Agent Framework chat client as the model of a transform, and the mark of background work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast
from urllib.parse import urlsplit

from agent_framework import ChatResponse, Content, Message, SupportsChatGetResponse

from smoothctx import foreign
from smoothctx.errors import ConfigurationError, TransformError
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage, token_count

from .checks import check_text

_background: ContextVar[bool] = ContextVar("smoothctx_agent_framework_background", default=False)


@contextmanager
def background() -> Iterator[None]:
    """Inside it, calls through a client or agent with a :class:`LookaheadMiddleware` are not taken for turns.

    For calls of one's own beside the agent's; what a transform calls is known to be no turn by itself.
    """
    token = _background.set(True)
    try:
        yield
    finally:
        _background.reset(token)


def in_background() -> bool:
    """Does this code run inside :func:`background`, or in a runtime's pool as every transform does?"""
    return _background.get() or foreign.in_background()


class ChatClientModel:
    """A chat client for ``Summarize`` and the like, such as a cheaper one than the agent's own, or the same.

    Args:
        client: any chat client of the framework.
        model: the name of the model, where the client does not tell it, or where it is another one; it is passed on.
        options: chat options for every call, such as ``{"temperature": 0}``.

    Raises:
        ConfigurationError: no chat client, or no model name that artifacts could be filed under.
    """

    def __init__(self, client: Any, *, model: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(client, SupportsChatGetResponse) or isinstance(client, type):
            raise ConfigurationError(f"client={client!r}: expected a chat client with get_response")
        if options is not None and not isinstance(options, Mapping):
            raise ConfigurationError(f"options={options!r}: expected a mapping of chat options, or None")
        check_text("model", model, optional=True)
        name = model or getattr(client, "model", None)
        if not isinstance(name, str) or not name.strip():
            raise ConfigurationError(f"model={model!r}: the client names no model; give its name")
        self._client: Any = client
        self._options: dict[str, Any] = dict(options or {})
        if model:
            self._options["model"] = model
        self._identity = f"{_service(client)}:{name}"
        if options:
            text = json.dumps(dict(options), sort_keys=True, default=str)
            self._identity += "#" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def identity(self) -> str:
        """Service, model and a hash of the options, without credentials."""
        return self._identity

    async def complete(
        self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> ModelReply:
        """Ask the client. ``messages`` are OpenAI-style dicts; nothing is stored at the service.

        Raises:
            TransformError: the client answered with something else than a ``ChatResponse``.
        """
        asked = {**self._options, **options}
        if max_tokens is not None:
            asked["max_tokens"] = max_tokens
        if getattr(self._client, "STORES_BY_DEFAULT", False):
            asked.setdefault("store", False)
        with background():  # also where somebody else than a transform asks
            reply = await self._client.get_response(_messages(messages), options=cast(Any, asked))
        if not isinstance(reply, ChatResponse):
            raise TransformError(f"client: expected a ChatResponse, got {type(reply).__name__}")
        return ModelReply(
            text=reply.text,
            usage=usage_of(reply.usage_details),
            finish_reason=reply.finish_reason,
            tool_calls=any(c.type == "function_call" for m in reply.messages for c in m.contents),
        )

    def __repr__(self) -> str:
        return f"ChatClientModel({self._identity!r})"


def _service(client: Any) -> str:
    """Class and address of a client; user, password and query of the address may be secrets."""
    found = getattr(client, "service_url", None)
    try:
        url = urlsplit(str(found()) if callable(found) else "")
        address = f"{url.scheme}://{url.hostname}{f':{url.port}' if url.port else ''}{url.path}" if url.hostname else ""
    except ValueError:  # not an address
        address = ""
    kind = type(client)
    return f"{kind.__module__}.{kind.__qualname__}{f'@{address}' if address else ''}"


def usage_of(details: Mapping[str, Any] | None) -> Usage:
    """What a client says that one call cost; estimated where it says nothing."""
    if not isinstance(details, Mapping) or not details:
        return Usage(calls=1, estimated=True)
    return Usage(
        input_tokens=token_count(details.get("input_token_count")) or 0,
        output_tokens=token_count(details.get("output_token_count")) or 0,
        cached_tokens=token_count(details.get("cache_read_input_token_count")),
        calls=1,
    )


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """OpenAI-style dicts as the framework's messages."""
    found: list[Message] = []
    for message in messages:
        role, content = str(message["role"]), message.get("content")
        if role == "tool":
            result = Content.from_function_result(call_id=str(message.get("tool_call_id") or ""), result=content or "")
            found.append(Message("tool", [result]))
            continue
        parts = content if isinstance(content, list) else [content] if content else []
        contents = [_content(part) for part in parts]
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            contents.append(
                Content.from_function_call(
                    str(call.get("id") or ""),
                    str(function.get("name") or ""),
                    arguments=function.get("arguments"),
                )
            )
        found.append(Message(role, contents, author_name=message.get("name")))
    return found


def _content(part: Any) -> Content:
    if isinstance(part, str):
        return Content.from_text(part)
    if part.get("type") == "image_url":
        return Content.from_uri(part["image_url"]["url"], media_type="image/*")
    return Content.from_text(str(part.get("text") or f"[{part.get('type')}]"))
