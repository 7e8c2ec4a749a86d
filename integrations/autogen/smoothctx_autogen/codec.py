"""How the core reads AutoGen's messages (``LLMMessage``), and makes the few that it adds itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from autogen_core import FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)
from pydantic import TypeAdapter

from smoothctx.codec import SUMMARY_NOTE, SUMMARY_TAG, ToolCall, escape_tag
from smoothctx.errors import MessageError
from smoothctx.tokens import MEDIA_TOKENS, MESSAGE_TOKENS, count_text

#: ``source`` of the messages that we make ourselves: a name that every provider accepts
SOURCE = "smoothctx"
KINDS = (SystemMessage, UserMessage, AssistantMessage, FunctionExecutionResultMessage)

#: what the content of each kind may be made of, and whether it may be a plain text
_PARTS: dict[type, tuple[tuple[type, ...], bool]] = {
    SystemMessage: ((), True),
    UserMessage: ((str, Image), True),
    AssistantMessage: ((FunctionCall,), True),
    FunctionExecutionResultMessage: ((FunctionExecutionResult,), False),
}

_HEAD = f"<{SUMMARY_TAG}>\n{SUMMARY_NOTE}\n\n"
_TAIL = f"\n</{SUMMARY_TAG}>"
_ADAPTER: TypeAdapter[list[LLMMessage]] = TypeAdapter(list[LLMMessage])
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class AutoGenMessages:
    """Codec for AutoGen's ``LLMMessage``.

    Every field of these messages may reach the model, depending on the client, so every field counts for the digest.
    An image counts by its pixels.
    """

    name = "autogen"

    def check(self, message: Any, index: int) -> None:
        """Raise ``MessageError`` when this is not an ``LLMMessage``, or one with content of another type."""
        where = f"messages[{index}]"
        if not isinstance(message, KINDS):
            expected = ", ".join(kind.__name__ for kind in KINDS)
            raise MessageError(f"{where}: expected one of {expected}, got {type(message).__name__}")
        content: Any = message.content
        parts, text = _PARTS[next(kind for kind in KINDS if isinstance(message, kind))]
        if text and isinstance(content, str):
            return
        if not parts or not isinstance(content, list):
            listed = f"a list of {_names(parts)}" if parts else ""
            expected = " or ".join([*(["a string"] if text else []), *([listed] if listed else [])])
            raise MessageError(f"{where}.content: expected {expected}, got {type(content).__name__}")
        for k, item in enumerate(content):
            if not isinstance(item, parts):
                raise MessageError(f"{where}.content[{k}]: expected {_names(parts)}, got {type(item).__name__}")

    def role(self, message: Any) -> str:
        """By the class of the message."""
        if isinstance(message, UserMessage):
            return "user"
        if isinstance(message, AssistantMessage):
            return "assistant"
        return "system" if isinstance(message, SystemMessage) else "tool"

    def text(self, message: Any) -> str:
        """The readable text; an image is ``[image]``. ``thought`` counts where it is what was said beside calls."""
        content = message.content
        if isinstance(content, str):
            return content
        if isinstance(message, AssistantMessage):
            return message.thought or ""
        if isinstance(message, FunctionExecutionResultMessage):
            return "\n".join(r.content for r in message.content)
        return "\n".join(p if isinstance(p, str) else "[image]" for p in content)

    def calls(self, message: Any) -> Sequence[ToolCall]:
        """The function calls of an assistant message."""
        if not isinstance(message, AssistantMessage) or isinstance(message.content, str):
            return ()
        return [ToolCall(c.id, c.name, c.arguments) for c in message.content]

    def result_id(self, message: Any) -> str:
        """The call id of the (first) result."""
        return message.content[0].call_id if message.content else ""

    def visible(self, message: Any) -> bytes:
        """Every field as JSON; an image by the hash of its pixels."""
        kind, *fields = self.freeze(message)
        return _encode([kind, *map(_readable, fields)]).encode("utf-8", "surrogatepass")

    def freeze(self, message: Any) -> Any:
        """The fields as a tuple of immutable leaves (images by reference)."""
        content = message.content
        if isinstance(message, UserMessage):
            return ("user", content if isinstance(content, str) else tuple(content), message.source)
        if isinstance(message, AssistantMessage):
            said = content if isinstance(content, str) else tuple((c.id, c.name, c.arguments) for c in content)
            return ("assistant", said, message.source, message.thought)
        if isinstance(message, FunctionExecutionResultMessage):
            return ("tool", tuple((r.call_id, r.name, r.content, r.is_error) for r in content))
        return ("system", content)

    def same(self, messages: Sequence[Any], frozen: Sequence[Any]) -> bool:
        """Compared field by field; nothing is hashed."""
        if len(messages) != len(frozen):
            return False
        try:
            return all(self.freeze(m) == f for m, f in zip(messages, frozen, strict=True))
        except (AttributeError, TypeError):
            return False  # not a message at all

    def estimate(self, message: Any) -> int:
        """Estimated tokens, calls, thoughts and names included; an image at a fixed cost."""
        if not isinstance(message, KINDS):
            return MESSAGE_TOKENS + count_text(str(message))
        content: Any = message.content
        total = MESSAGE_TOKENS + count_text(getattr(message, "source", ""))
        if isinstance(content, str):
            total += count_text(content)
        elif isinstance(message, FunctionExecutionResultMessage):
            texts = [t for r in message.content for t in (r.content, r.name, r.call_id)]
            total += MESSAGE_TOKENS * max(0, len(content) - 1) + sum(map(count_text, texts))
        elif isinstance(message, AssistantMessage):
            total += sum(MESSAGE_TOKENS + count_text(c.name) + count_text(c.arguments) for c in content)
        else:
            total += sum(count_text(p) if isinstance(p, str) else MEDIA_TOKENS for p in content)
        return total + count_text(getattr(message, "thought", None) or "")

    def reported(self, message: Any) -> int | None:
        """Nothing: these messages carry no usage."""
        return None

    def in_progress(self, message: Any) -> bool:
        """Never: AutoGen adds a message once it is complete."""
        return False

    def summary(self, text: str) -> Any:
        """A ``UserMessage`` fenced by ``<conversation_summary>`` tags, delimiters in the text escaped."""
        return self.user(f"{_HEAD}{escape_tag(text, SUMMARY_TAG)}{_TAIL}")

    def summary_text(self, message: Any) -> str | None:
        """The escaped text between the fences of a message that :meth:`summary` made."""
        content = message.content if isinstance(message, UserMessage) else None
        if isinstance(content, str) and content.startswith(_HEAD) and content.endswith(_TAIL):
            return content[len(_HEAD) : -len(_TAIL)]
        return None

    def user(self, text: str) -> Any:
        """A ``UserMessage``."""
        return UserMessage(content=_whole(text), source=SOURCE)

    def system(self, text: str) -> Any:
        """A ``SystemMessage``."""
        return SystemMessage(content=_whole(text))

    def with_text(self, message: Any, text: str) -> Any:
        """A copy with new text. Calls stay; of several results each stays, the first one with the text."""
        text = _whole(text)
        if isinstance(message, FunctionExecutionResultMessage):
            texts = [text] + ["[see the first result]"] * (len(message.content) - 1)
            results = [r.model_copy(update={"content": t}) for r, t in zip(message.content, texts, strict=False)]
            return message.model_copy(update={"content": results})
        field = "thought" if self.calls(message) else "content"
        return message.model_copy(update={field: text})

    def without_thinking(self, message: Any) -> Any:
        """The same message: a ``thought`` is plain text without a signature, bound to no prefix."""
        return message

    def to_openai(self, message: Any) -> dict[str, Any]:
        """An OpenAI-style dict; images as data URLs."""
        if isinstance(message, FunctionExecutionResultMessage):
            return {"role": "tool", "tool_call_id": self.result_id(message), "content": self.text(message)}
        if calls := self.calls(message):
            functions = [{"name": c.name, "arguments": c.arguments} for c in calls]
            listed = [{"id": c.id, "type": "function", "function": f} for c, f in zip(calls, functions, strict=True)]
            return {"role": "assistant", "content": self.text(message) or None, "tool_calls": listed}
        content = message.content
        if isinstance(message, UserMessage) and not isinstance(content, str):
            parts = [
                {"type": "text", "text": p} if isinstance(p, str) else {"type": "image_url", "image_url": {"url": u}}
                for p in content
                for u in [None if isinstance(p, str) else p.data_uri]
            ]
            return {"role": "user", "content": parts}
        return {"role": self.role(message), "content": content if isinstance(content, str) else ""}

    def dump(self, messages: Sequence[Any]) -> bytes:
        """JSON, as AutoGen writes these messages itself."""
        return _ADAPTER.dump_json(list(messages))

    def load(self, data: bytes) -> list[Any]:
        """Read back what :meth:`dump` wrote.

        Raises:
            MessageError: when the data is not a list of messages.
        """
        try:
            # AutoGen's images read text parts beside them only from parsed JSON.
            return list(_ADAPTER.validate_python(json.loads(data)))
        except (ValueError, TypeError, OSError) as error:  # an image that cannot be opened is an OSError
            raise MessageError(f"stored messages: {error}") from error


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


def _readable(value: Any) -> Any:
    if isinstance(value, Image):
        pixels = value.image
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest()
        return {"image": digest, "size": list(pixels.size)}
    return [_readable(v) for v in value] if isinstance(value, tuple) else value


def _whole(text: str) -> str:
    """Without lone surrogates, which these messages refuse."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
