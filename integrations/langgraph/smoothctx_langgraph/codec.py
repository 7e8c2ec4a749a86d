"""The codec for LangChain messages: how the core reads them, and makes the few that it adds itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from smoothctx.codec import OpenAIMessages, ToolCall
from smoothctx.codec_values import arguments_text, canonical, encode, structure
from smoothctx.errors import MessageError
from smoothctx.tokens import MESSAGE_TOKENS, count_text

from . import codec_dump
from .codec_openai import openai_call, openai_content, openai_name
from .codec_parts import (
    CALLS,
    THINKING,
    content_text,
    content_tokens,
    content_visible,
    is_media,
    parsed,
    part_arguments,
    part_call_id,
    type_of,
    value_tokens,
)

#: key of ``additional_kwargs`` under which a message that we made says so; integrations do not send it to a model
MARK = "smoothctx"

_ROLES: dict[type, str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}
_CHAT_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
_THINKING_KWARGS = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks")
#: what integrations send of ``additional_kwargs``, beside the calls
_SENT_KWARGS = (*_THINKING_KWARGS, "audio", "refusal")
_CALL_KWARGS = ("tool_calls", "function_call")
_STREAMING = frozenset({"in_progress", "queued", "streaming"})
_OPENAI = OpenAIMessages()


class LangChainMessages:
    """Codec for LangChain's message classes, as LangGraph keeps them in its state.

    A chunk (``AIMessageChunk``) that was put into the state is taken as complete, since nothing in it tells, unless it
    is marked: ``response_metadata["status"] == "in_progress"``. A tool's ``artifact`` is not for the model: it is
    neither digested nor counted nor stored. Content parts of any kind are read, those that no integration is known to
    use by the text in them.
    """

    name = "langchain"

    def check(self, message: Any, index: int) -> None:
        """Raise ``MessageError`` when this cannot be a message to a model."""
        cls = type(message)
        if cls in _ROLES and cls is not AIMessage and type(message.content) is str:
            return
        where = f"messages[{index}]"
        if isinstance(message, RemoveMessage):
            raise MessageError(f"{where}: a RemoveMessage changes the state; it is not a message")
        if not isinstance(message, BaseMessage):
            hint = "; chat dicts are read by OpenAIMessages()" if isinstance(message, dict) else ""
            raise MessageError(f"{where}: expected a LangChain message, got {type(message).__name__}{hint}")
        if _role(message) is None:
            what = getattr(message, "role", message.type)
            raise MessageError(f"{where}.role: {what!r} is unknown; expected one of {', '.join(_CHAT_ROLES)}")
        content = message.content
        if content is not None and not isinstance(content, str | list):
            raise MessageError(f"{where}.content: expected a string or a list of parts, got {type(content).__name__}")
        if isinstance(content, list):
            for k, part in enumerate(content):
                if not isinstance(part, str | dict):
                    what = type(part).__name__
                    raise MessageError(f"{where}.content[{k}]: expected a text or a dict, got {what}")
        for field in ("tool_calls", "invalid_tool_calls"):
            calls = getattr(message, field, None)
            if calls is not None and not isinstance(calls, list):
                raise MessageError(f"{where}.{field}: expected a list, got {type(calls).__name__}")
            for k, call in enumerate(calls or ()):
                if not isinstance(call, dict):
                    raise MessageError(f"{where}.{field}[{k}]: expected a dict, got {type(call).__name__}")

    def role(self, message: Any) -> str:
        """By class; that of a ``ChatMessage`` by its ``role``."""
        role = _role(message)
        if role is None:
            raise MessageError(
                f"message of type {getattr(message, 'type', type(message).__name__)!r} has no known role"
            )
        return role

    def text(self, message: Any) -> str:
        """The readable text; media become ``[image]``, thinking is left out."""
        content = message.content
        if isinstance(content, str) and content:
            return content
        refusal = message.additional_kwargs.get("refusal")
        return content_text(content) or (refusal if isinstance(refusal, str) else "")

    def calls(self, message: Any) -> Sequence[ToolCall]:
        """The calls that need a result, those with unreadable arguments included; mirrors of them only once."""
        return [ToolCall(i, n, arguments_text(a)) for i, n, a in _calls(message)] if _is_ai(message) else ()

    def result_id(self, message: Any) -> str:
        """``tool_call_id`` of a tool message."""
        return str(getattr(message, "tool_call_id", None) or "")

    def visible(self, message: Any) -> bytes:
        """Role, content, name, calls, call id, error status and thinking; no ids, usage or response metadata."""
        role, content = self.role(message), message.content
        seen: dict[str, Any] = {"role": role}
        if content:
            seen["content"] = content_visible(content)
        if message.name:
            seen["name"] = canonical(message.name)
        if role == "tool":
            seen["tool_call_id"] = canonical(self.result_id(message))
            if getattr(message, "status", None) == "error":
                seen["status"] = "error"
        if role == "assistant":
            if calls := _calls(message):
                seen["tool_calls"] = [[canonical(i), canonical(n), canonical(parsed(a))] for i, n, a in calls]
            kwargs = message.additional_kwargs
            for key in _SENT_KWARGS if kwargs else ():
                if kwargs.get(key):
                    seen[key] = canonical(kwargs[key])
        if seen.keys() == {"role", "content"} and type(content) is str:
            return f"{role}:{content}".encode("utf-8", "surrogatepass")
        return encode(seen).encode("utf-8", "surrogatepass")

    def freeze(self, message: Any) -> Any:
        """A structural copy of what the model sees: new containers, the same leaves."""
        return structure(_shown(message))

    def same(self, messages: Sequence[Any], frozen: Sequence[Any]) -> bool:
        """Each message's fields against the frozen ones; identical leaves cost one pointer comparison each."""
        if len(messages) != len(frozen):
            return False
        try:
            return all(_shown(m) == f for m, f in zip(messages, frozen, strict=True))
        except (AttributeError, KeyError):  # not a message at all
            return False

    def estimate(self, message: Any) -> int:
        """Estimated tokens: one per CJK character, one per four others, a fixed cost per media part."""
        if not isinstance(message, BaseMessage):
            return MESSAGE_TOKENS + count_text(str(message))
        total = MESSAGE_TOKENS + content_tokens(message.content)
        if message.name:
            total += count_text(message.name)
        if call_id := self.result_id(message):
            total += count_text(call_id)
        for call in self.calls(message):
            total += MESSAGE_TOKENS + count_text(call.name) + count_text(call.arguments)
        if message.additional_kwargs and _is_ai(message):
            total += sum(value_tokens(message.additional_kwargs.get(k)) for k in _SENT_KWARGS)
        return total

    def reported(self, message: Any) -> int | None:
        """``usage_metadata`` of an assistant message: input plus output tokens, as the provider reported them."""
        usage = getattr(message, "usage_metadata", None)
        if not isinstance(usage, dict):
            return None
        prompt, output = usage.get("input_tokens"), usage.get("output_tokens")
        if isinstance(prompt, int) and isinstance(output, int) and prompt > 0:
            return prompt + output
        return None

    def in_progress(self, message: Any) -> bool:
        """``response_metadata["status"]`` of ``in_progress`` (or ``queued``, ``streaming``): half a message."""
        return _is_ai(message) and message.response_metadata.get("status") in _STREAMING

    def summary(self, text: str) -> Any:
        """One fenced and marked ``HumanMessage``."""
        return HumanMessage(_OPENAI.summary(text)["content"], additional_kwargs={MARK: {"kind": "summary"}})

    def summary_text(self, message: Any) -> str | None:
        """The escaped text between the fences; also where the mark was lost, or the content became a list."""
        if not isinstance(message, HumanMessage | ChatMessage):
            return None
        content: Any = message.content
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
            content = content[0].get("text")
        return _OPENAI.summary_text({"role": "user", "content": content})

    def user(self, text: str) -> Any:
        """A marked ``HumanMessage``."""
        return HumanMessage(text, additional_kwargs={MARK: {"kind": "note"}})

    def system(self, text: str) -> Any:
        """A ``SystemMessage``."""
        return SystemMessage(text)

    def with_text(self, message: Any, text: str) -> Any:
        """A marked copy with new text; media beside it, ids, call id, name, status and every other field are kept."""
        parts = message.content if isinstance(message.content, list) else []
        media = [p for p in parts if is_media(p)]
        content = [*media, {"type": "text", "text": text}] if media else text
        kwargs = {**message.additional_kwargs, MARK: {"kind": "stub"}}
        return message.model_copy(update={"content": content, "additional_kwargs": kwargs})

    def without_thinking(self, message: Any) -> Any:
        """A copy without thinking; the same object when there is none.

        Ids by which a provider ties other parts of the message to its thinking go with it.
        """
        if not _is_ai(message):
            return message
        content, kwargs = message.content, message.additional_kwargs
        parts = content if isinstance(content, list) else []
        kept = [p for p in parts if type_of(p) not in THINKING]
        if len(kept) == len(parts) and not any(kwargs.get(k) for k in _THINKING_KWARGS):
            return message
        gone = (*_THINKING_KWARGS, "__openai_function_call_ids__")
        update: dict[str, Any] = {"additional_kwargs": {k: v for k, v in kwargs.items() if k not in gone}}
        if isinstance(content, list):
            update["content"] = [_untied(p) for p in kept] or ""
        return message.model_copy(update=update)

    def to_openai(self, message: Any) -> dict[str, Any]:
        """A dict that any OpenAI-compatible server takes: no thinking, no bookkeeping, arguments as JSON text."""
        role = self.role(message)
        content = openai_content(message.content, role)
        out: dict[str, Any] = {"role": role, "content": content or self.text(message)}
        if (name := openai_name(message.name)) and role in ("user", "assistant"):
            out["name"] = name
        if calls := self.calls(message):
            out["tool_calls"] = [openai_call(c) for c in calls]
            out["content"] = out["content"] or None
        if role == "tool":
            out["tool_call_id"] = self.result_id(message)
        return out

    def dump(self, messages: Sequence[Any]) -> bytes:
        """JSON, UTF-8, in the layout of LangChain's ``messages_to_dict``."""
        return codec_dump.dump(messages)

    def load(self, data: bytes) -> list[Any]:
        """Read and check what :meth:`dump`, or LangChain itself, wrote.

        Raises:
            MessageError: when the data is not a list of messages.
        """
        messages = codec_dump.load(data)
        for i, message in enumerate(messages):
            self.check(message, i)
        return messages


def mark_of(message: Any) -> str | None:
    """What we made this message as (``"summary"``, ``"note"``, ``"stub"``), ``None`` where it is not ours.

    ``"other"``: it stands in a view for what a transform of the user's own replaced.
    """
    kwargs = getattr(message, "additional_kwargs", None)
    mark = kwargs.get(MARK) if isinstance(kwargs, dict) else None
    kind = mark.get("kind") if isinstance(mark, dict) else None
    return kind if isinstance(kind, str) else None


def _role(message: Any) -> str | None:
    cls = type(message)
    role = _ROLES.get(cls)
    if role is not None:
        return role
    if isinstance(message, ChatMessage):
        return _CHAT_ROLES.get(message.role)
    # chunks, and classes that a user derived
    return next((r for base, r in _ROLES.items() if isinstance(message, base)), None)


def _is_ai(message: Any) -> bool:
    return type(message) is AIMessage or _role(message) == "assistant"


def _calls(message: Any) -> list[tuple[str, str, Any]]:
    """Id, name and arguments of each call: parsed ones, unreadable ones, then what stands only elsewhere."""
    rows = [*(getattr(message, "tool_calls", None) or ()), *(getattr(message, "invalid_tool_calls", None) or ())]
    found = [(str(c.get("id") or ""), str(c.get("name") or ""), c.get("args")) for c in rows]
    kwargs = message.additional_kwargs
    if not found and kwargs:
        found = _raw_calls(kwargs.get("tool_calls"))
    if isinstance(message.content, list):
        ids = {i for i, _, _ in found}
        for part in message.content:
            if type_of(part) not in CALLS:
                continue
            own = part_call_id(part)
            # the mirror of a call that is there already; by its place where one of them has no id
            if own in ids if own and "" not in ids else ids:
                continue
            found.append((own, str(part.get("name") or ""), part_arguments(part)))
    if not found and kwargs and isinstance(legacy := kwargs.get("function_call"), dict):
        found = [("", str(legacy.get("name") or ""), legacy.get("arguments"))]
    return found


def _raw_calls(raw: Any) -> list[tuple[str, str, Any]]:
    """Calls that stand in ``additional_kwargs`` only, as LangChain reads them when it loads the message."""
    rows = (
        [c for c in raw if isinstance(c, dict) and isinstance(c.get("function"), dict)] if isinstance(raw, list) else []
    )
    found = [
        (str(c.get("id") or ""), str(c["function"].get("name") or ""), parsed(c["function"].get("arguments")))
        for c in rows
    ]
    return sorted(found, key=lambda call: isinstance(call[2], str))  # the unreadable ones last


def _shown(message: Any) -> tuple[Any, ...]:
    """What the model sees of a message, by reference."""
    held = message.__dict__  # a missing field costs much more through pydantic
    kwargs = held["additional_kwargs"]
    return (
        _role(message),
        held["content"],
        held.get("name"),
        held.get("tool_calls"),
        held.get("invalid_tool_calls"),
        held.get("tool_call_id"),
        held.get("status"),
        kwargs and {k: kwargs[k] for k in (*_SENT_KWARGS, *_CALL_KWARGS) if k in kwargs},
    )


def _untied(part: Any) -> Any:
    """A part without the id that ties it to the thinking beside it (OpenAI's items); call ids stay."""
    if not isinstance(part, dict):
        return part
    if part.get("type") in ("text", "output_text", "function_call") and "id" in part:
        return {k: v for k, v in part.items() if k != "id"}
    extras = part.get("extras")
    if part.get("type") == "tool_call" and isinstance(extras, dict) and "item_id" in extras:
        return {**part, "extras": {k: v for k, v in extras.items() if k != "item_id"}}
    return part
