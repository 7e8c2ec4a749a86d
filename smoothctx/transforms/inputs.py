"""Inputs for the models that transforms ask: valid OpenAI-style requests, or a plain-text transcript.

A *unit* is what is never cut: an assistant message with all its results. In a unit every call is followed by
exactly one result; a result whose call is not there becomes a plain note, a call whose result never came gets
a placeholder, so that what we send is always valid and leaves nothing out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..codec import USER_STUB, Codec, escape_tag, results_of
from ..openai_parts import read_call
from ..segments import segment
from ..tokens import MESSAGE_TOKENS, count_text

NO_RESULT = "[no result]"
CONVERSATION = "conversation"
_DATA_URL = re.compile(r"data:[\w/+.-]{1,100};base64,[A-Za-z0-9+/=_-]{16,}")


@dataclass(frozen=True, slots=True)
class InputUnit:
    """Messages of one atomic group, in the form and at the size in which they are sent."""

    messages: tuple[dict[str, Any], ...]
    tokens: int
    source: tuple[Any, ...]


def units(messages: Sequence[Any], codec: Codec) -> list[InputUnit]:
    """The messages as valid units, in order."""
    found = segment(codec, messages)
    spans = [(i, i + 1) for i in range(found.lead)] + [(s.start, s.end) for s in found.segments]
    return [_unit(tuple(messages[start:end]), codec) for start, end in spans]


def _unit(source: tuple[Any, ...], codec: Codec) -> InputUnit:
    out: list[dict[str, Any]] = []
    for message, results in paired(source, codec):
        sent = _sound(codec.to_openai(message), message, codec)
        calls = sent.get("tool_calls")
        if results is None and codec.role(message) == "tool":
            out.append({"role": "user", "content": f"[result of an earlier tool call]\n{codec.text(message)}"})
            continue
        if isinstance(calls, list) and calls:
            ids = _unique([str(c.get("id") or "") for c in calls])
            if ids != [c.get("id") for c in calls]:
                sent["tool_calls"] = [{**c, "id": i} for c, i in zip(calls, ids, strict=True)]
            out.append(sent)
            for call_id, result in zip(ids, [*(results or ()), *[None] * len(ids)], strict=False):
                answer = {"role": "tool", "content": NO_RESULT}
                if result is not None:
                    answer = _sound(codec.to_openai(result), result, codec)
                out.append({**answer, "tool_call_id": call_id})
            continue
        out.append(sent)
        out += [_sound(codec.to_openai(r), r, codec) for r in results or () if r is not None]
    placeholders = sum(MESSAGE_TOKENS + 4 for m in out if m.get("content") == NO_RESULT)
    return InputUnit(tuple(out), sum(map(codec.estimate, source)) + placeholders, source)


def _sound(sent: dict[str, Any], message: Any, codec: Codec) -> dict[str, Any]:
    """With a content, and calls that have a name and arguments in JSON: what agents hold now and then lacks them, and
    providers refuse that. What is sound stays as the agent sends it."""
    calls = sent.get("tool_calls")
    if isinstance(calls, list) and calls:
        good = [_sound_call(c) for c in calls]
        return sent if good == calls else {**sent, "tool_calls": good}
    if (sent.get("content") is None or sent.get("content") == []) and not sent.get("function_call"):
        return {**sent, "content": codec.text(message)}
    return sent


def _sound_call(call: Any) -> Any:
    read = read_call(call)
    arguments = (
        read.arguments if is_json(read.arguments) else json.dumps({"text": read.arguments} if read.arguments else {})
    )
    if (read.name, read.arguments) == (read.name or "unknown", arguments):
        return call
    whole = call if isinstance(call, dict) else {}
    return {**whole, "type": "function", "function": {"name": read.name or "unknown", "arguments": arguments}}


def is_json(text: str) -> bool:
    """Can it be parsed?"""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _unique(ids: list[str]) -> list[str]:
    taken: set[str] = set()
    for k, call_id in enumerate(ids):
        if not call_id or call_id in taken:
            ids = [*ids[:k], f"call_{k}_{len(taken)}", *ids[k + 1 :]]
        taken.add(ids[k])
    return ids


def paired(messages: Sequence[Any], codec: Codec) -> list[tuple[Any, list[Any] | None]]:
    """Each message with the results of its calls (``None`` for an unanswered one), moved to their call.

    A tool result without a call stands alone, with ``None`` in place of the list. A message with several results
    comes as one message for each.
    """
    rows: list[tuple[Any, list[Any] | None]] = []
    open_calls: list[tuple[str, list[Any], int]] = []
    for message in messages:
        if codec.role(message) != "tool":
            calls = codec.calls(message)
            results: list[Any] = [None] * len(calls)
            rows.append((message, results))
            open_calls += [(c.id, results, k) for k, c in enumerate(calls)]
            continue
        for result in results_of(codec, message):
            call = _take(open_calls, codec.result_id(result))
            if call is None:
                rows.append((result, None))
            else:
                call[1][call[2]] = result
    return rows


def _take(open_calls: list[tuple[str, list[Any], int]], call_id: str) -> tuple[str, list[Any], int] | None:
    """The newest assistant message's matching call, in order; one without an id answers by position."""
    matching = [c for c in open_calls if c[0] == call_id] if call_id else open_calls
    matching = matching or [c for c in open_calls if not c[0]]
    if not matching:
        return None
    newest = matching[-1][1]
    chosen = next(c for c in matching if c[1] is newest)
    open_calls[:] = [c for c in open_calls if not (c[1] is chosen[1] and c[2] == chosen[2])]
    return chosen


def call_names(messages: Sequence[Any], codec: Codec) -> dict[int, list[str]]:
    """Name of the called tool for each result of a tool message (``""`` without a call), by the message's ``id()``."""
    parts = {id(m): results_of(codec, m) for m in messages if codec.role(m) == "tool"}
    named = {
        id(result): call.name
        for message, results in paired(_one_result_each(messages, parts), codec)
        for call, result in zip(codec.calls(message), results or (), strict=False)
        if result is not None
    }
    return {key: [named.get(id(part), "") for part in found] for key, found in parts.items()}


def _one_result_each(messages: Sequence[Any], parts: Mapping[int, Sequence[Any]]) -> list[Any]:
    return [part for m in messages for part in parts.get(id(m), (m,))]


def opens_with_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The request with a user stub behind its system messages where it does not open with a user message."""
    lead = next((k for k, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    if lead < len(messages) and messages[lead]["role"] == "user":
        return list(messages)
    return [*messages[:lead], {"role": "user", "content": USER_STUB}, *messages[lead:]]


def transcript(messages: Sequence[Any], codec: Codec) -> str:
    """Plain text: ``role: text`` lines, calls as ``name(arguments)``, media as ``[image]``. No metadata."""
    lines: list[str] = []
    names = call_names(messages, codec)
    for message in messages:
        if codec.role(message) == "tool":
            for part, name in zip(results_of(codec, message), names[id(message)], strict=True):
                lines.append(f"{f'tool {name}' if name else 'tool'}: {plain(codec.text(part))}")
            continue
        role, text = codec.role(message), plain(codec.text(message))
        calls = [f"{c.name}({plain(c.arguments)})" for c in codec.calls(message)]
        if text or not calls:
            lines.append(f"{role}: {text}")
        lines += [f"{role} calls: {call}" for call in calls]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text without base64 data."""
    return _DATA_URL.sub("[data]", text) if ";base64," in text else text


def fence(text: str, tag: str = CONVERSATION) -> str:
    """Text between tags, its own such tags escaped: data, whatever it says."""
    return f"<{tag}>\n{escape_tag(text, tag)}\n</{tag}>"


def head(text: str, tokens: int) -> str:
    """The longest beginning of about ``tokens`` estimated tokens, never more."""
    piece = text[: max(1, tokens * 4)]
    while len(piece) > 1 and (cost := _cost(piece)) > tokens:
        piece = piece[: max(1, min(len(piece) - 1, len(piece) * tokens // cost))]
    return piece


def pieces(text: str, tokens: int) -> list[str]:
    """The whole text in pieces of at most ``tokens`` estimated tokens, cut at line ends where one is near."""
    found: list[str] = []
    position = 0
    while position < len(text):
        piece = head(text[position : position + tokens * 4], tokens)
        line_end = piece.rfind("\n", len(piece) // 2)
        if line_end > 0 and position + len(piece) < len(text):
            piece = piece[: line_end + 1]
        found.append(piece)
        position += len(piece)
    return found


def _cost(text: str) -> int:
    return count_text(" " + text)  # never read as one data URL
