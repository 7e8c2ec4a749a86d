"""How the events of AG2 1.x are read: what of a stream's history is a message, and what travels with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from ag2.compact import CompactionSummary
from ag2.events import (
    BaseEvent,
    BinaryInput,
    BuiltinToolCallEvent,
    BuiltinToolResultEvent,
    DataInput,
    FileIdInput,
    ModelRequest,
    ModelResponse,
    TextInput,
    ToolResult,
    ToolResultEvent,
    ToolResultsEvent,
    UrlInput,
)
from pydantic import BaseModel

from smoothctx.codec import OpenAIMessages, ToolCall
from smoothctx.errors import MessageError
from smoothctx.tokens import MEDIA_TOKENS, MESSAGE_TOKENS, count_text
from smoothctx.usage import token_count

_FENCE = OpenAIMessages()
#: providers whose prompt count leaves out what was read from, or written to, the cache
UNCACHED = frozenset({"anthropic", "bedrock"})
# Tuples for isinstance: between event classes `|` makes a condition of AG2.
_READ = (ModelRequest, ModelResponse, ToolResultsEvent, ToolResultEvent, CompactionSummary)


@dataclass(frozen=True, slots=True, eq=False)
class EventMessage:
    """One message of a stream: the event that the model reads, and those that come and go with it.

    ``before`` are what the provider made on the way to a response (signed state, its own tool calls and results);
    ``after`` are records that no provider reads, such as the framework's own account of running the tools.
    """

    event: BaseEvent
    before: tuple[BaseEvent, ...] = ()
    after: tuple[BaseEvent, ...] = ()


def read(events: Sequence[BaseEvent]) -> list[EventMessage]:
    """The messages in a stream's history. Every event is in exactly one of them, save those ahead of the first."""
    loose = {c.id for e in events if isinstance(e, ModelResponse) and e.tool_calls for c in e.tool_calls.calls}
    loose -= {r.parent_id for e in events if isinstance(e, ToolResultsEvent) for r in e.results}
    messages: list[EventMessage] = []
    waiting: list[BaseEvent] = []
    for event in events:
        if not _is_message(event, loose):
            waiting.append(event)
            continue
        # Behind a response stand the records of its tools; what stands before one was made on the way to it.
        behind = messages[-1].event if messages else None
        answers = isinstance(event, ModelResponse) and not isinstance(behind, ModelResponse)
        if waiting and behind is not None and not answers:
            messages[-1] = EventMessage(messages[-1].event, messages[-1].before, tuple(waiting))
            waiting = []
        messages.append(EventMessage(event, tuple(waiting)))
        waiting = []
    if waiting and messages:
        messages[-1] = EventMessage(messages[-1].event, messages[-1].before, (*messages[-1].after, *waiting))
    return messages


def _is_message(event: BaseEvent, loose: set[str]) -> bool:
    """Does the model read this event by itself? A result only where it is the one answer to a response's call."""
    if isinstance(event, ToolResultEvent):
        return event.parent_id in loose and not isinstance(event, BuiltinToolResultEvent)
    return isinstance(event, _READ)


def weave(view: Sequence[EventMessage], messages: Sequence[EventMessage]) -> list[BaseEvent]:
    """The events of a view of ``messages``. Where results were shortened, the loose copies of them are left out."""
    own = {id(r) for m in messages for r in _results(m.event)}
    shortened = {r.parent_id for m in view for r in _results(m.event) if id(r) not in own}
    woven: list[BaseEvent] = []
    for message in view:
        for event in (*message.before, message.event, *message.after):
            loose = event is not message.event and isinstance(event, ToolResultEvent)
            if not (loose and event.parent_id in shortened):
                woven.append(event)
    return woven


class EventMessages:
    """Codec for :class:`EventMessage`. Timestamps, usage and response ids are not in a digest, nor is signed state:
    they change on reload, or say nothing that the model reads."""

    name = "ag2"

    def check(self, message: Any, index: int) -> None:
        """Raise ``MessageError`` when it is no message of a stream."""
        if not isinstance(message, EventMessage) or not isinstance(message.event, _READ):
            event = getattr(message, "event", message)
            raise MessageError(f"messages[{index}]: expected an event that a model reads, got {type(event).__name__}")

    def role(self, message: EventMessage) -> str:
        """``"user"`` for requests and AG2's own summaries, ``"assistant"`` for responses, ``"tool"`` for results."""
        if isinstance(message.event, ModelResponse):
            return "assistant"
        return "tool" if isinstance(message.event, (ToolResultsEvent, ToolResultEvent)) else "user"

    def text(self, message: EventMessage) -> str:
        """The readable text, what a provider's own tools found included; media as ``[image]``-like marks."""
        return "\n".join(t for t in _texts(message) if t)

    def calls(self, message: EventMessage) -> Sequence[ToolCall]:
        """The calls of a response. Those that the provider ran itself are not among them: nobody else answers."""
        event = message.event
        if not isinstance(event, ModelResponse) or not event.tool_calls:
            return ()
        return [ToolCall(c.id, c.name, c.arguments) for c in event.tool_calls.calls]

    def results(self, message: EventMessage) -> Sequence[EventMessage]:
        """One message per result."""
        if isinstance(message.event, ToolResultsEvent):
            return [EventMessage(ToolResultsEvent([r])) for r in message.event.results]
        return (message,)

    def joined(self, message: EventMessage, parts: Sequence[EventMessage]) -> EventMessage:
        """One event with the results of all parts; what travels with the message stays with it."""
        found = [r for part in parts for r in _results(part.event)]
        return EventMessage(ToolResultsEvent(found), message.before, message.after)

    def result_id(self, message: EventMessage) -> str:
        """The call id that it answers, the first of several."""
        found = _results(message.event)
        return str(found[0].parent_id or "") if found else ""

    def visible(self, message: EventMessage) -> bytes:
        """What the model reads, as canonical JSON; binary data by the hash of its bytes."""
        return _encode(_shape(message)).encode("utf-8", "surrogatepass")

    def freeze(self, message: EventMessage) -> Any:
        """The structure of what the model reads, with the same leaves."""
        return _shape(message)

    def same(self, messages: Sequence[EventMessage], frozen: Sequence[Any]) -> bool:
        """Compared field by field; identical leaves cost one pointer comparison each."""
        return len(messages) == len(frozen) and all(
            isinstance(m, EventMessage) and _shape(m) == f for m, f in zip(messages, frozen, strict=True)
        )

    def estimate(self, message: EventMessage) -> int:
        """Estimated tokens, call arguments and media included."""
        event = message.event
        total = sum(map(count_text, _texts(message))) + MESSAGE_TOKENS * max(1, len(_results(event)))
        for call in self.calls(message):
            total += MESSAGE_TOKENS + count_text(call.name) + count_text(call.arguments)
        return total + MEDIA_TOKENS * sum(_is_media(part) for part in _parts(event))

    def reported(self, message: EventMessage) -> int | None:
        """Prompt plus completion tokens of a response, as its provider reported them."""
        event = message.event
        if not isinstance(event, ModelResponse) or not event.usage:
            return None
        usage = event.usage
        prompt = token_count(usage.prompt_tokens)
        if not prompt:
            return None
        beside = [usage.completion_tokens]
        if event.provider in UNCACHED:
            beside += [usage.cache_read_input_tokens, usage.cache_creation_input_tokens]
        return prompt + sum(token_count(n) or 0 for n in beside)

    def in_progress(self, message: EventMessage) -> bool:
        """Never: a stream's history has no half events."""
        return False

    def summary(self, text: str) -> EventMessage:
        """A request with the fenced summary, as every provider renders it: a user's turn."""
        return self.user(_FENCE.summary(text)["content"])

    def summary_text(self, message: EventMessage) -> str | None:
        """The text inside a message that :meth:`summary` made."""
        event = message.event
        if not isinstance(event, ModelRequest) or len(event.parts) != 1 or not isinstance(event.parts[0], TextInput):
            return None
        return _FENCE.summary_text({"role": "user", "content": event.parts[0].content})

    def user(self, text: str) -> EventMessage:
        """A request with one text."""
        return EventMessage(ModelRequest([TextInput(text)]))

    def system(self, text: str) -> EventMessage:
        """Prompts are not events in AG2, so this is a request as well."""
        return self.user(text)

    def with_text(self, message: EventMessage, text: str) -> EventMessage:
        """The same message with its content replaced."""
        event = message.event
        if isinstance(event, ModelResponse):
            raise MessageError("a model's response is not rewritten")
        results = _results(event)
        if not results:
            return self.user(text)
        result = results[0]
        short = ToolResultEvent(parent_id=result.parent_id, name=result.name, result=ToolResult(text))
        return EventMessage(ToolResultsEvent([short]))

    def without_thinking(self, message: EventMessage) -> EventMessage:
        """Itself: what stays of thinking here is what a provider demands back beside its own tool calls."""
        return message

    def to_openai(self, message: EventMessage) -> dict[str, Any]:
        """An OpenAI-style dict; media are marks in its text."""
        out: dict[str, Any] = {"role": self.role(message), "content": self.text(message)}
        if calls := self.calls(message):
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
            out["content"] = out["content"] or None
        if out["role"] == "tool":
            out["tool_call_id"] = self.result_id(message)
        return out

    def dump(self, messages: Sequence[EventMessage]) -> bytes:
        """JSON, by the framework's own form of an event."""
        rows = [[type(m.event).__name__, m.event.to_dict()] for m in messages]
        return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")

    def load(self, data: bytes) -> list[EventMessage]:
        """Read back what :meth:`dump` wrote.

        Raises:
            MessageError: when the data is something else.
        """
        known = {kind.__name__: kind for kind in _READ}
        try:
            rows = json.loads(data.decode("utf-8", "surrogatepass"))
            return [EventMessage(known[name].from_dict(fields)) for name, fields in rows]
        except Exception as error:
            raise MessageError(f"stored messages cannot be read: {type(error).__name__}: {error}") from error


# -- what the model reads of an event ------------------------------------------------------------------------------


def _results(event: BaseEvent) -> Sequence[ToolResultEvent]:
    if isinstance(event, ToolResultsEvent):
        found: Sequence[ToolResultEvent] = event.results
        return found
    return (event,) if isinstance(event, ToolResultEvent) else ()


def _parts(event: BaseEvent) -> Iterator[Any]:
    """The inputs in a request or in results."""
    if isinstance(event, ModelRequest):
        yield from event.parts
    for result in _results(event):
        yield from result.result.parts


def _is_media(part: Any) -> bool:
    return not isinstance(part, (TextInput, DataInput))


def _texts(message: EventMessage) -> Iterator[str]:
    for event in message.before:
        if isinstance(event, BuiltinToolCallEvent):
            yield f"[{event.name}({event.arguments})]"
        elif isinstance(event, BuiltinToolResultEvent):
            yield from map(_part_text, event.result.parts)
    event = message.event
    if isinstance(event, ModelResponse):
        yield event.content or ""
        yield from ("[file]" for _ in event.files)
    elif isinstance(event, CompactionSummary):
        yield event.summary
    yield from map(_part_text, _parts(event))


def _part_text(part: Any) -> str:
    if isinstance(part, TextInput):
        return str(part.content)
    if isinstance(part, DataInput):
        return part.data if isinstance(part.data, str) else _encode(part.data)
    kind = getattr(getattr(part, "kind", None), "value", "file")
    return f"[{'file' if kind in ('binary', 'document') else kind}]"


def _shape(message: EventMessage) -> tuple[Any, ...]:
    """The model-visible fields of a message, nested, with the event's own leaves."""
    event = message.event
    shape: tuple[Any, ...]
    if isinstance(event, ModelResponse):
        calls = tuple((c.id, c.name, c.arguments) for c in event.tool_calls.calls) if event.tool_calls else ()
        files = tuple(file.data for file in event.files)
        shape = ("assistant", event.content, calls, files)
    elif isinstance(event, CompactionSummary):
        shape = ("summary", event.summary)
    elif isinstance(event, ModelRequest):
        shape = ("user", *map(_part_shape, event.parts))
    else:
        results = _results(event)
        shape = ("tool", *((r.parent_id, r.name, tuple(map(_part_shape, r.result.parts))) for r in results))
    if message.before:
        provided = tuple(s for s in map(_provided_shape, message.before) if s)
        if provided:
            shape = (*shape, ("provider", provided))
    return shape


def _provided_shape(event: BaseEvent) -> tuple[Any, ...]:
    if isinstance(event, BuiltinToolCallEvent):
        return (event.name, event.arguments)
    if isinstance(event, BuiltinToolResultEvent):
        return tuple(map(_part_shape, event.result.parts))
    return ()


def _part_shape(part: Any) -> Any:
    if isinstance(part, TextInput):
        return part.content
    if isinstance(part, DataInput):
        return ("data", _plain(part.data))
    if isinstance(part, BinaryInput):
        return ("binary", part.media_type, part.data, _plain(part.vendor_metadata))
    if isinstance(part, UrlInput):
        return ("url", part.url)
    if isinstance(part, FileIdInput):
        return ("file", part.file_id, part.filename)
    return (type(part).__name__, _plain(part.to_dict()))


def _plain(value: Any) -> Any:
    """Data as it is after a reload: no tuples, models or dataclasses."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json"))
    if is_dataclass(value) and not isinstance(value, type):
        return {k: _plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k != "created_at"}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _opaque(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return "blake2b:" + hashlib.blake2b(bytes(value), digest_size=16).hexdigest()
    if isinstance(value, BaseModel) or is_dataclass(value):
        return _plain(value)
    return value.to_dict() if isinstance(value, BaseEvent) else repr(value)


_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_opaque).encode
