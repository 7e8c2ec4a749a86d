"""Request: the constant part of an agent's requests to its engine, as preloads and aligned summaries repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ConfigurationError

#: messages in OpenAI's form
Prompt = tuple[Mapping[str, Any], ...]


def read_request(request: Mapping[str, Any] | None) -> tuple[dict[str, Any], Prompt]:
    """The options of a request, and the prompt: its ``"messages"``, which stand before the conversation in each call.

    A framework that keeps an agent's system prompt apart from its messages sends it so.

    Raises:
        ConfigurationError: it is no such mapping.
    """
    if request is not None and not isinstance(request, Mapping):
        raise ConfigurationError(f"request={request!r}: expected a mapping of request options, or None")
    options = dict(request or {})
    prompt = options.pop("messages", None) or ()
    if not isinstance(prompt, list | tuple) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in prompt
    ):
        raise ConfigurationError(
            f"request={{'messages': {prompt!r}}}: expected a list of messages such as "
            "{'role': 'system', 'content': '...'}, which stand before the conversation in each of the agent's calls"
        )
    return options, tuple(dict(m) for m in prompt)
