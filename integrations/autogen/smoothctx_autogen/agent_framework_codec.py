"""The codec for Agent Framework's ``Message`` and ``Content``: every content kind of 1.23."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from agent_framework import Content, Message

from smoothctx.codec import OpenAIMessages, ToolCall
from smoothctx.errors import MessageError
from smoothctx.tokens import MESSAGE_TOKENS, count_text
from smoothctx.usage import token_count

from .agent_framework_contents import (
    APPROVALS,
    CALLS,
    FIELDS,
    MEDIA,
    RESULTS,
    call_arguments,
    call_name,
    is_visible,
    media_kind,
    structure,
    text_of,
    tokens_of,
    with_answer,
)

_OPENAI = OpenAIMessages()
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class AgentFrameworkMessages:
    """Codec for ``agent_framework.Message``.

    An assistant message calls tools by its call contents that have no result in the same message; a tool message may
    answer several calls. The author of a user message is part of what the model sees; that of other messages is not,
    since the framework fills it in after the run.
    """

    name = "agent-framework"

    def __init__(self) -> None:
        self._reported: WeakKeyDictionary[Message, int] = WeakKeyDictionary()

    # -- reading ---------------------------------------------------------------------------------------------

    def check(self, message: Any, index: int) -> None:
        """Raise ``MessageError`` for what is no ``Message``, an unknown role, or an unknown content kind."""
        where = f"messages[{index}]"
        if not isinstance(message, Message):
            raise MessageError(f"{where}: expected an agent_framework Message, got {type(message).__name__}")
        if not isinstance(message.role, str) or message.role not in _ROLES:
            raise MessageError(f"{where}.role: {message.role!r} is unknown; expected one of {', '.join(_ROLES)}")
        if not isinstance(message.contents, list | tuple):
            raise MessageError(f"{where}.contents: expected a list, got {type(message.contents).__name__}")
        for k, content in enumerate(message.contents):
            kind = content.type if isinstance(content, Content) else None
            if not isinstance(kind, str) or kind not in FIELDS:
                what = f"kind {kind!r}" if isinstance(content, Content) else f"a {type(content).__name__}"
                raise MessageError(
                    f"{where}.contents[{k}]: unknown content ({what}); expected a Content whose type is "
                    f"one of {', '.join(sorted(FIELDS))}"
                )

    def role(self, message: Any) -> str:
        """The role; a message of nothing but function results is a tool message, whatever it is called."""
        role = _ROLES[message.role]
        if role == "user" and message.contents and all(c.type == "function_result" for c in message.contents):
            return "tool"
        return role

    def text(self, message: Any) -> str:
        """The readable text: media as ``[image]``, thinking and open calls left out, answered hosted calls as notes."""
        open_calls = {id(c) for c in _open_calls(message)}
        return "\n".join(t for c in message.contents if id(c) not in open_calls and (t := text_of(c)))

    def calls(self, message: Any) -> Sequence[ToolCall]:
        """The calls that are not answered in the message itself, as a service answers those that it runs."""
        if message.role != "assistant":
            return ()
        return [ToolCall(c.call_id or "", call_name(c), call_arguments(c)) for c in _open_calls(message)]

    def result_id(self, message: Any) -> str:
        """The call id of the first result."""
        return next((c.call_id or "" for c in message.contents if c.type in RESULTS), "")

    def results(self, message: Any) -> Sequence[Any]:
        """One message per result; what is no result goes with the one before it."""
        if sum(c.type in RESULTS for c in message.contents) < 2:
            return (message,)
        parts: list[list[Content]] = [[]]
        for content in message.contents:
            if content.type in RESULTS and any(c.type in RESULTS for c in parts[-1]):
                parts.append([])
            parts[-1].append(content)
        return [_changed(message, part) for part in parts]

    def joined(self, message: Any, parts: Sequence[Any]) -> Any:
        """One message with the contents of all parts."""
        return _changed(message, [content for part in parts for content in part.contents])

    def visible(self, message: Any) -> bytes:
        """Role, a user's name, and the model-visible fields of each content, in the default codec's canonical form."""
        role, author, *parts = self.freeze(message)
        content: Any = parts
        if len(parts) == 1 and isinstance(parts[0], str):
            content = parts[0]
        else:
            content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
        seen: dict[str, Any] = {"role": _ROLES[role], "content": content}
        if author is not None:
            seen["name"] = author
        return _OPENAI.visible(seen)

    def freeze(self, message: Any) -> Any:
        """What the model sees of it, as new containers with the same leaves."""
        author = message.author_name if message.role == "user" else None
        contents = message.contents if isinstance(message.contents, list | tuple) else ()
        return [message.role, author, *(structure(c) for c in contents if is_visible(c))]

    def same(self, messages: Sequence[Any], frozen: Sequence[Any]) -> bool:
        """One pass over the leaves; the messages themselves are copied by the framework before every call."""
        if len(messages) != len(frozen):
            return False
        for message, known in zip(messages, frozen, strict=True):
            if not isinstance(message, Message):
                return False
            contents = message.contents
            if not isinstance(contents, list | tuple):
                return False
            if len(known) == 3 and len(contents) == 1 and message.role == known[0]:
                # One text, as most are: the same object as ever, without building anything.
                only = contents[0]
                if type(only) is Content and only.type == "text" and only.text is known[2]:
                    if known[1] == (message.author_name if message.role == "user" else None):
                        continue
            if self.freeze(message) != known:
                return False
        return True

    def estimate(self, message: Any) -> int:
        """Estimated tokens: text by its length, media at a fixed cost, every other kind by its fields."""
        if not isinstance(message, Message):
            return MESSAGE_TOKENS + count_text(str(message))
        return MESSAGE_TOKENS + sum(map(tokens_of, message.contents)) + count_text(message.author_name or "")

    def report(self, message: Message, usage: Mapping[str, Any] | None) -> None:
        """Remember what the provider reported for the call that ended with this message."""
        tokens = _context_tokens(usage)
        if tokens is not None:
            self._reported[message] = tokens

    def reported(self, message: Any) -> int | None:
        """Input plus output tokens: what :meth:`report` was told, or a usage content in the message."""
        if message.role != "assistant":
            return None
        found = self._reported.get(message)
        if found is not None:
            return found
        return next((_context_tokens(c.usage_details) for c in message.contents if c.type == "usage"), None)

    def in_progress(self, message: Any) -> bool:
        """Does a content of it say ``in_progress``?"""
        return any(c.status == "in_progress" for c in message.contents)

    # -- making ----------------------------------------------------------------------------------------------

    def summary(self, text: str) -> Any:
        """One ``user`` message, fenced as in the default codec."""
        return Message("user", [_OPENAI.summary(text)["content"]])

    def summary_text(self, message: Any) -> str | None:
        """The escaped text between the fences of a message that :meth:`summary` made."""
        if not isinstance(message, Message) or len(message.contents) != 1 or message.contents[0].type != "text":
            return None
        return _OPENAI.summary_text({"role": message.role, "content": message.contents[0].text})

    def user(self, text: str) -> Any:
        """A ``user`` message."""
        return Message("user", [text])

    def system(self, text: str) -> Any:
        """A ``system`` message."""
        return Message("system", [text])

    def with_text(self, message: Any, text: str) -> Any:
        """A copy with ``text`` in its result, or in place of its text; calls, media and ids stay."""
        contents: list[Content] = []
        placed = False
        for content in message.contents:
            if content.type in RESULTS:
                contents.append(with_answer(content, text))
                placed = True
            elif content.type in CALLS or content.type in MEDIA or content.type in APPROVALS:
                contents.append(content)
        if not placed:
            contents.insert(0, Content.from_text(text))
        return _changed(message, contents)

    def without_thinking(self, message: Any) -> Any:
        """A copy without reasoning contents; the same object when there are none."""
        kept = [c for c in message.contents if c.type != "text_reasoning"]
        return message if len(kept) == len(message.contents) else _changed(message, kept)

    def to_openai(self, message: Any) -> dict[str, Any]:
        """Role, text, images, calls and call ids; of several results the first."""
        role, text = self.role(message), self.text(message)
        out: dict[str, Any] = {"role": role, "content": text}
        images = [c.uri for c in message.contents if media_kind(c) == "image" and c.uri] if role == "user" else []
        if images:
            shown = "\n".join(t for c in message.contents if media_kind(c) != "image" and (t := text_of(c)))
            out["content"] = [
                *([{"type": "text", "text": shown}] if shown else []),
                *({"type": "image_url", "image_url": {"url": uri}} for uri in images),
            ]
        if role == "user" and message.author_name:
            out["name"] = message.author_name
        if role == "tool":
            first = self.results(message)[0]
            out["content"], out["tool_call_id"] = self.text(first), self.result_id(first)
        calls = self.calls(message)
        if calls:
            out["content"] = text or None
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        return out

    # -- storing ---------------------------------------------------------------------------------------------

    def dump(self, messages: Sequence[Any]) -> bytes:
        """The framework's own dict form, as JSON."""
        data = [m.to_dict() for m in messages]
        return json.dumps(data, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")

    def load(self, data: bytes) -> list[Any]:
        """Parse and check what :meth:`dump` wrote.

        Raises:
            MessageError: when the data is not a list of messages.
        """
        try:
            messages = [Message.from_dict(d) for d in json.loads(data.decode("utf-8", "surrogatepass"))]
        except Exception as error:  # whatever the framework's constructors make of broken data
            raise MessageError(f"stored messages cannot be read: {type(error).__name__}: {error}") from error
        for i, message in enumerate(messages):
            self.check(message, i)
        return messages


def _changed(message: Message, contents: Sequence[Content]) -> Message:
    """A copy with other contents: of what the provider sent nothing is kept that could bring the old ones back."""
    made = copy.copy(message)
    made.contents = list(contents)
    made.additional_properties = dict(message.additional_properties)
    made.raw_representation = None
    return made


def _open_calls(message: Message) -> list[Content]:
    answered = {c.call_id for c in message.contents if c.type in RESULTS}
    return [c for c in message.contents if c.type in CALLS and (not c.call_id or c.call_id not in answered)]


def _context_tokens(usage: Mapping[str, Any] | None) -> int | None:
    if not isinstance(usage, Mapping):
        return None
    read, written = token_count(usage.get("input_token_count")), token_count(usage.get("output_token_count"))
    return read + written if read and written is not None else None
