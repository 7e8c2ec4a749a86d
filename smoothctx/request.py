"""Request: the constant part of an agent's requests to its engine, as preloads and aligned summaries repeat it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError

#: messages in OpenAI's form
Prompt = tuple[Mapping[str, Any], ...]
#: turns for which a request that has changed again and again has to stay the same, at most
MOST_STEADY = 8


def read_request(request: Mapping[str, Any] | None) -> tuple[dict[str, Any], Prompt]:
    """The options of a request, and the prompt: its ``"messages"``, which stand before the conversation in each call.

    A framework that keeps an agent's system prompt apart from its messages sends it so.

    Raises:
        ConfigurationError: it is no such mapping.
    """
    if request is not None and not isinstance(request, Mapping):
        raise ConfigurationError(f"request={request!r}: expected a mapping of request options, or None")
    options = _own(dict(request or {}))  # what is changed in place afterwards is another request
    prompt = options.pop("messages", None) or ()
    if not isinstance(prompt, list | tuple) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in prompt
    ):
        raise ConfigurationError(
            f"request={{'messages': {prompt!r}}}: expected a list of messages such as "
            "{'role': 'system', 'content': '...'}, which stand before the conversation in each of the agent's calls"
        )
    return options, tuple(dict(m) for m in prompt)


def is_request(request: Mapping[str, Any], options: Mapping[str, Any], prompt: Prompt) -> bool:
    """Does ``request`` read as these? Without copying anything: it is asked with each turn."""
    messages = request.get("messages") or ()
    rest = {name: value for name, value in request.items() if name != "messages"}
    return isinstance(messages, list | tuple) and tuple(messages) == prompt and rest == options


def _own(options: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(options)
    except Exception:  # something in it cannot be copied: it is as constant as its owner says
        return options


@dataclass(slots=True)
class Steadiness:
    """Does a request stay the same for long enough that what is warmed for it will be used? Pure.

    A first change says nothing: tools came late. Each further one asks for one turn more without any (``MOST_STEADY``
    at most), until it has stayed the same for twice as many.
    """

    changes: int = 0
    unchanged: int = 0
    known: bool = True
    _seen: bool = False

    def seen(self, changed: bool | None) -> None:
        """It was seen with a turn; ``None``: what it is now could not be told."""
        self.known = changed is not None
        self.changes += bool(changed and self._seen)
        self.unchanged = self.unchanged + 1 if changed is False else 0
        self._seen = True
        if self.unchanged >= 2 * MOST_STEADY:
            self.changes = 0

    @property
    def steady(self) -> bool:
        """Is it worth warming?"""
        return self.known and self.unchanged >= min(MOST_STEADY, self.changes - 1)
