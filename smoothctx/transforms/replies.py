"""Replies: what a summariser's answer must be before it may stand for anything."""

from __future__ import annotations

import re

from ..errors import InvalidOutput
from .facts import strip
from .model import ModelReply

_CUT = frozenset({"length", "max_tokens", "model_length", "max_output_tokens"})
_CALLED = frozenset({"tool_calls", "tool_use", "function_call"})
_THINK = re.compile(r"<(think|thinking|reasoning|thought)\b[^<>]{0,100}>", re.IGNORECASE)
_CLOSED_ONLY = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
_MARKUP = re.compile(
    r"<tool_calls?\b|<\|?tool_call|<function_calls?\b|<function=|<invoke\b|<tool_use\b|<use_tool\b|"
    r"\[TOOL_CALLS?\]|<\|python_tag\|>|<\uff5ctool\u2581call|<\|tool_calls_section|"
    r"<\|call\|>|<\|channel\|>commentary to=",
    re.IGNORECASE,
)
_JSON_CALL = re.compile(
    r"(?:```(?:json|tool_code|tool_call)?\s*)?\[?\s*\{\s*\"(?:name|tool|function|tool_name|tool_calls|action|type)\"\s*:"
)
#: markup behind more text than this is taken as something that the text talks about
_PREFACE = 200


def strip_thinking(text: str) -> str:
    """The text without thinking blocks. One that never ends leaves nothing; a stray closing tag ends one."""
    parts: list[str] = []
    position = 0
    while (match := _THINK.search(text, position)) is not None:
        end = re.compile(f"</{match[1]}\\s*>", re.IGNORECASE).search(text, match.end())
        if end is None:
            if text[position : match.start()].strip() or parts:
                break  # only mentioned
            return ""
        parts.append(text[position : match.start()])
        position = end.end()
    rest = "".join(parts) + text[position:]
    if not parts and (match := _CLOSED_ONLY.search(rest)) is not None:  # the template opened it in the prompt
        rest = rest[match.end() :]
    return rest.strip()


def clean(reply: ModelReply) -> str:
    """The usable text of a reply.

    Raises:
        InvalidOutput: nothing but thinking, a tool call, raw tool-call markup, or a filtered answer.
    """
    text = strip(strip_thinking(reply.text))
    if reply.tool_calls or (reply.finish_reason in _CALLED):
        raise InvalidOutput("summary: the model called a tool instead of writing a text")
    if reply.finish_reason == "content_filter":
        raise InvalidOutput("summary: the model's answer was withheld (finish_reason 'content_filter')")
    if not text:
        what = "only thinking, no text" if reply.text.strip() else "an empty text"
        raise InvalidOutput(f"summary: the model returned {what}")
    if is_markup(text):
        raise InvalidOutput(f"summary: the model returned raw tool-call markup: {text[:60]!r}")
    return text


def was_cut(reply: ModelReply) -> bool:
    """Did the answer end at the output limit?"""
    return reply.finish_reason in _CUT


def is_markup(text: str) -> bool:
    """Is this a tool call written out as text, perhaps behind a short preface?"""
    if _JSON_CALL.match(text) and re.search(r'"(?:arguments|parameters|input|args|action_input)"\s*:', text[:4000]):
        return True
    match = _MARKUP.search(text[: _PREFACE + 400])
    if match is None:
        return False
    before = text[: match.start()]
    return not before.strip("`\n \t") or (len(before) <= _PREFACE and before.rstrip(" `").endswith("\n"))
