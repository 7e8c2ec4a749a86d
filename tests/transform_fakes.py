"""Fakes for the transform tests: models that record what they are asked, and a checker of requests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from smoothctx.codec import OpenAIMessages
from smoothctx.transforms.base import Rewrite, TransformRequest
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage

CODEC = OpenAIMessages()


class FakeModel:
    """A plain async model: answers in turn, the last answer again and again; raises what is an exception."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers) or ["The summary."]
        self.requests: list[list[dict[str, Any]]] = []
        self.max_tokens: list[int | None] = []

    def _next(self, messages: list[dict[str, Any]], max_tokens: int | None) -> Any:
        self.requests.append(copy.deepcopy(messages))
        self.max_tokens.append(max_tokens)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer(messages) if callable(answer) else answer

    async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> Any:
        return self._next(messages, max_tokens)


class FakeEngine(FakeModel):
    """An engine: identity, usage, finish reasons and options."""

    def __init__(self, *answers: Any, identity: str = "http://test/v1 m", context_window: int | None = None) -> None:
        super().__init__(*answers)
        self.identity = identity
        self.context_window = context_window
        self.options: list[dict[str, Any]] = []

    async def complete(
        self, messages: list[dict[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> ModelReply:
        self.options.append(options)
        answer = self._next(messages, max_tokens)
        if isinstance(answer, str):
            usage = Usage(input_tokens=100, output_tokens=20, calls=1)
            return ModelReply(text=answer, usage=usage, finish_reason="stop")
        return answer


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: str, name: str = "run", arguments: str = "{}") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": c, "type": "function", "function": {"name": name, "arguments": arguments}} for c in calls
        ]
    return message


def tool(call_id: str, text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text, **fields}


def chat(turns: int, *, size: int = 200) -> list[dict[str, Any]]:
    """User and assistant turns with some text in them."""
    filler = "the build was slow again today " * (size // 31 + 1)
    return [m for k in range(turns) for m in (user(f"question {k}: {filler}"), assistant(f"answer {k}: {filler}"))]


def request(messages: Sequence[Any], **fields: Any) -> TransformRequest:
    fields.setdefault("before", [])
    return TransformRequest(messages=messages, codec=CODEC, **fields)


def valid(messages: Sequence[dict[str, Any]]) -> None:
    """What providers demand: system first, then user, each call followed by exactly one result per id."""
    k = 0
    while k < len(messages) and messages[k]["role"] == "system":
        k += 1
    assert k < len(messages) and messages[k]["role"] == "user", [m["role"] for m in messages]
    while k < len(messages):
        message = messages[k]
        assert message["role"] != "system", f"system message at {k}"
        assert message["role"] != "tool", f"orphan result at {k}"
        ids = [c["id"] for c in message.get("tool_calls") or ()]
        assert len(set(ids)) == len(ids) and all(ids), ids
        answered = [m.get("tool_call_id") for m in messages[k + 1 : k + 1 + len(ids)] if m["role"] == "tool"]
        assert sorted(answered) == sorted(ids), (k, ids, answered)
        k += 1 + len(ids)


def content(rewrite: Rewrite) -> str:
    """The text of the one summary message."""
    assert len(rewrite.messages) == 1
    text = CODEC.summary_text(rewrite.messages[0])
    assert text is not None
    return text


def all_text(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(CODEC.text(m) for m in messages)
