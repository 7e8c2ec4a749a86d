"""Would a provider accept these messages?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..codec import Codec, OpenAIMessages
from ..errors import MessageError
from ..transforms.inputs import is_json


def valid_request(messages: Sequence[Any], *, codec: Codec | None = None) -> list[str]:
    """What a provider would refuse in a request with these messages; empty when it is valid.

    Asked are the rules that providers share: known roles and well-formed messages with a content (an assistant's may
    be calls alone), system messages only at the head, a user message first after them, calls with an id, a name and
    arguments in JSON, exactly one result for each of them (by its id, directly behind the call's message), and no
    result without its call.
    """
    codec = codec or OpenAIMessages()
    if not isinstance(messages, list | tuple):
        return [f"messages: expected a list of messages, got {type(messages).__name__}"]
    found: list[str] = []
    for index, message in enumerate(messages):
        try:
            codec.check(message, index)
        except MessageError as error:
            found.append(str(error))
    if found:
        return found  # the rest cannot be read
    k = 0
    while k < len(messages) and codec.role(messages[k]) == "system":
        found += _said(k, messages[k], codec)
        k += 1
    if k < len(messages) and (role := codec.role(messages[k])) != "user":
        found.append(f"messages[{k}]: the first one after the system messages is of role {role!r}, expected 'user'")
    while k < len(messages):
        message, at = messages[k], k
        k += 1
        role = codec.role(message)
        found += _said(at, message, codec)
        if role == "system":
            found.append(f"messages[{at}]: a system message behind other messages")
        elif role == "tool":
            found.append(f"messages[{at}]: a result ({codec.result_id(message)!r}) without its call")
        elif role == "assistant" and (calls := codec.calls(message)):
            results: list[str] = []
            while k < len(messages) and codec.role(messages[k]) == "tool":
                found += _said(k, messages[k], codec)
                results.append(codec.result_id(messages[k]))
                k += 1
            found += _pairing(at, Counter(c.id for c in calls), results)
    return found


def _said(at: int, message: Any, codec: Codec) -> list[str]:
    """What is missing in message ``at`` itself."""
    found: list[str] = []
    role, calls, sent = codec.role(message), codec.calls(message), codec.to_openai(message)
    empty = sent.get("content") is None or sent.get("content") == []
    if empty and role == "assistant":
        fields = message if isinstance(message, dict) else {}
        if not calls and not fields.get("refusal") and not fields.get("audio"):
            found.append(f"messages[{at}]: an assistant message without content and calls")
    elif empty:
        found.append(f"messages[{at}]: a {role} message without content")
    if role == "tool" and not codec.result_id(message) and sent.get("role") != "function":
        found.append(f"messages[{at}]: a result without a tool_call_id")
    for call in () if sent.get("function_call") else calls:  # which is the old form, without ids
        if not call.id:
            found.append(f"messages[{at}]: a call without an id")
        if not call.name:
            found.append(f"messages[{at}]: the call {call.id!r} has no name")
        if not is_json(call.arguments):
            found.append(f"messages[{at}]: the arguments of the call {call.id!r} are no JSON: {call.arguments[:40]!r}")
    return found


def _pairing(at: int, calls: Counter[str], results: Sequence[str]) -> list[str]:
    """What is wrong between the calls of message ``at`` and the results that stand right behind it."""
    found = [f"messages[{at}]: {n} calls with the id {name!r}" for name, n in calls.items() if n > 1 and name]
    left = Counter(calls)
    for offset, name in enumerate(results, at + 1):
        if left[name] > 0:
            left[name] -= 1
        elif name in calls:
            found.append(f"messages[{offset}]: a second result for the call {name!r}")
        else:
            found.append(f"messages[{offset}]: a result ({name!r}) without its call")
    found += [f"messages[{at}]: the call {name!r} has no result" for name, n in left.items() for _ in range(n)]
    return found


def assert_valid_request(messages: Sequence[Any], *, codec: Codec | None = None) -> None:
    """Fail the test where :func:`valid_request` finds a problem.

    Raises:
        AssertionError: naming every problem and the roles of the messages.
    """
    codec = codec or OpenAIMessages()
    found = valid_request(messages, codec=codec)
    if found:
        listed = messages if isinstance(messages, list | tuple) else ()
        shown = ", ".join(str(m.get("role")) if isinstance(m, dict) else type(m).__name__ for m in listed)
        raise AssertionError("a provider would refuse this request:\n  " + "\n  ".join(found) + f"\n  roles: {shown}")
