"""Request: the constant part of an agent's requests to its engine, as preloads and aligned summaries repeat it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .errors import ConfigurationError

#: messages in OpenAI's form
Prompt = tuple[Mapping[str, Any], ...]
#: turns for which a request that has changed again and again has to stay the same, at most
MOST_STEADY = 8
#: requests that a runtime knows by heart: sessions of one agent share one copy of its tools
MAX_REQUESTS = 64


def check_request(request: Mapping[str, Any] | None) -> None:
    """Is it the constant part of a request?

    Raises:
        ConfigurationError: it is none; naming what is expected.
    """
    if request is not None and not isinstance(request, Mapping):
        raise ConfigurationError(f"request={request!r}: expected a mapping of request options, or None")
    prompt = (request or {}).get("messages") or ()
    if not isinstance(prompt, list | tuple) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in prompt
    ):
        raise ConfigurationError(
            f"request={{'messages': {prompt!r}}}: expected a list of messages such as "
            "{'role': 'system', 'content': '...'}, which stand before the conversation in each of the agent's calls"
        )
    tools = (request or {}).get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConfigurationError(
            f"request={{'tools': {tools!r}}}: expected a list of tools as the API takes them, such as "
            "{'type': 'function', 'function': {'name': '...', 'parameters': {...}}}"
        )


def read_request(request: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], Prompt]:
    """Its options, and the prompt: its ``"messages"``, which stand before the conversation in each call. Copies.

    A framework that keeps an agent's system prompt apart from its messages sends it so.

    Raises:
        ConfigurationError: see :func:`check_request`.
    """
    check_request(request)
    options = _own(request or {})  # what is changed in place afterwards is another request
    prompt = options.pop("messages", None) or ()
    return MappingProxyType(options), tuple(prompt)


def is_request(request: Mapping[str, Any], options: Mapping[str, Any], prompt: Prompt) -> bool:
    """Does ``request`` read as these? Without copying anything: it is asked with each turn."""
    messages = request.get("messages") or ()
    rest = {name: value for name, value in request.items() if name != "messages"}
    return isinstance(messages, list | tuple) and same(tuple(messages), prompt) and same(rest, options)


def same(a: Any, b: Any) -> bool:
    """Is it the same text where it is written as JSON? The order of names counts, and so does 1 against true."""
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    try:
        return bool(a == b)
    except Exception:  # it cannot be compared
        return False


def _own(value: Any) -> Any:
    """A copy of what may be changed in place; what is no plain value stays the object that it is."""
    if isinstance(value, Mapping):
        return {name: _own(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_own(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


class Requests:
    """The requests of one runtime's sessions: equal ones are one object. Thread-safe."""

    def __init__(self) -> None:
        self._known: list[tuple[Mapping[str, Any], Prompt]] = []  # the one used last at the end
        self._lock = threading.Lock()

    def read(self, request: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], Prompt]:
        """:func:`read_request`; what it gives is never changed.

        Raises:
            ConfigurationError: see :func:`check_request`.
        """
        check_request(request)
        with self._lock:
            found = next((r for r in self._known if is_request(request or {}, *r)), None)
        found = read_request(request) if found is None else found
        with self._lock:
            self._known = [*(r for r in self._known if r is not found), found][-MAX_REQUESTS:]
        return found


@dataclass(slots=True)
class Steadiness:
    """Does a request stay the same for long enough that what is warmed for it will be used? Pure.

    A first change says nothing: tools came late. From the second on it has to stay the same for as many turns as there
    were changes (``MOST_STEADY`` at most); they are forgotten once it has for twice as many.
    """

    changes: int = 0
    turns: int = 0
    known: bool = True
    _seen: bool = False

    def turn(self) -> None:
        """A turn begins with it."""
        self.turns += 1
        if self.turns > 2 * MOST_STEADY:
            self.changes = 0

    def seen(self, changed: bool | None) -> None:
        """It was seen; ``None``: what it is now could not be told."""
        self.known = changed is not None
        if changed:
            self.changes, self.turns = self.changes + self._seen, 0
        self._seen = True

    @property
    def steady(self) -> bool:
        """Is it worth warming?"""
        return self.known and (self.changes < 2 or self.turns >= min(MOST_STEADY, self.changes))
