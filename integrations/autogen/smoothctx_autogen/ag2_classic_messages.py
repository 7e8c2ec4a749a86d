"""How the messages of AG2 classic are read: chat dicts, in which one message may hold the results of several calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smoothctx.codec import OpenAIMessages
from smoothctx.errors import MessageError


class ClassicMessages(OpenAIMessages):
    """Codec for AG2 classic.

    Results are grouped there: ``{"role": "tool", "tool_responses": [...], "content": <all of them again>}``, or a
    ``user`` message with ``tool_responses`` where a person answered instead of the tools. Both are one tool message
    that answers several calls. The field ``context`` is for prompt templates and is not for the model.
    """

    name = "ag2-classic"

    def check(self, message: Any, index: int) -> None:
        """Raise ``MessageError`` when the dict cannot be a chat message."""
        super().check(message, index)
        responses = message.get("tool_responses")
        if not responses:
            return
        if not isinstance(responses, list):
            raise MessageError(
                f"messages[{index}].tool_responses: expected a list of results, got {type(responses).__name__}"
            )
        for k, response in enumerate(responses):
            try:
                super().check(response, index)
            except MessageError as error:
                where = f"messages[{index}]"
                raise MessageError(str(error).replace(where, f"{where}.tool_responses[{k}]", 1)) from error

    def role(self, message: Any) -> str:
        """The role; a message with results is a tool message, whoever answered."""
        return "tool" if message.get("tool_responses") else super().role(message)

    def results(self, message: Any) -> Sequence[Any]:
        """One tool message per result; what a person said besides is part of the last."""
        parts: list[Any] = list(message.get("tool_responses") or ())
        if not parts:
            return (message,)
        said = super().text(message) if message.get("role") != "tool" else ""
        if said:
            last = parts[-1]
            parts[-1] = {**last, "content": f"{super().text(last)}\n\n{said}"}
        return parts

    def joined(self, message: Any, parts: Sequence[Any]) -> Any:
        """The group with these results. What a person said besides stays as it is, unless it is in the last of them."""
        held, responses = self.results(message), list(parts)
        content: Any = "\n\n".join(map(super().text, responses)) if message.get("role") == "tool" else ""
        if message.get("role") != "tool" and responses[-1] == held[-1]:
            responses[-1], content = message["tool_responses"][-1], message.get("content")
        return {**message, "tool_responses": responses, "content": content}

    def text(self, message: Any) -> str:
        """The readable text, of all results where there are several."""
        if not message.get("tool_responses"):
            return super().text(message)
        return "\n".join(super(ClassicMessages, self).text(part) for part in self.results(message))

    def result_id(self, message: Any) -> str:
        """The call id that it answers, the first of several."""
        parts = message.get("tool_responses")
        return super().result_id(parts[0] if parts else message)

    def visible(self, message: Any) -> bytes:
        """What the model sees. The joined text of a group is sent nowhere: its results are."""
        if not message.get("tool_responses"):
            return super().visible(message)
        return b"results:" + b"\0".join(super(ClassicMessages, self).visible(part) for part in self.results(message))

    def estimate(self, message: Any) -> int:
        """Estimated tokens; a group is its results."""
        if not isinstance(message, Mapping) or not message.get("tool_responses"):
            return super().estimate(message)
        return sum(super(ClassicMessages, self).estimate(part) for part in self.results(message))

    def with_text(self, message: Any, text: str) -> Any:
        """A copy with new content; a group of one result has it in that result."""
        parts = message.get("tool_responses")
        if not parts:
            return super().with_text(message, text)
        return self.joined(message, [{**parts[0], "content": text}])

    def to_openai(self, message: Any) -> dict[str, Any]:
        """The fields that a server reads; of a group its first result."""
        return super().to_openai(self.results(message)[0])
