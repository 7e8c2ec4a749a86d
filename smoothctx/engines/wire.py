"""The wire: what OpenAI-compatible servers send, read into ours; every fault becomes an ``EngineError``."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from ..errors import (
    EngineError,
    EngineOverloaded,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
    refuses_messages,
)
from ..retry import retry_after
from ..usage import Usage, token_count

#: HTTP statuses after which the same request may work later
_RETRYABLE = frozenset({408, 409, 425, 429})
#: bytes of a server's error text that are shown
_ERROR_TEXT = 500
#: what to do about a refusal
_TEMPLATE_HINT = " (the model's chat template does not take these messages)"
_HINTS = {401: " (check api_key)", 403: " (check api_key)", 404: " (check the URL and the model's name)"}
#: bytes of a stream without a newline after which it is garbage
_LINE = 16 * 1024 * 1024
#: the event that ends a stream
DONE: dict[str, Any] = {}
#: request options that say how long an answer is and how it is delivered: prefill sets them by itself
_DELIVERY = frozenset(
    "messages max_tokens max_completion_tokens min_tokens n_predict n best_of use_beam_search stream stream_options "
    "ignore_eos logprobs top_logprobs prompt_logprobs".split()
)
#: and those that shape the agent's own answers: no other answer to the same prompt may take their form
_FORM = frozenset(
    "response_format stop stop_token_ids tool_choice function_call logit_bias bad_words allowed_token_ids "
    "structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema grammar regex ebnf "
    "continue_final_message add_generation_prompt prediction modalities audio".split()
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, whatever its status."""

    status: int
    text: str
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Its JSON value, ``None`` where it is none."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


async def read_events(response: httpx.Response, url: str) -> AsyncGenerator[dict[str, Any]]:
    """Server-sent events with JSON data; ``DONE`` is one of them.

    Lines are cut at newlines only: httpx's own line reader also cuts at characters such as U+2028, which may
    stand unescaped inside a JSON string.
    """
    buffer = b""
    try:
        async for data in response.aiter_bytes():
            *lines, buffer = (buffer + data).split(b"\n")
            if len(buffer) > _LINE:
                raise EngineProtocolError(f"{url}: the stream is not one of events: {_LINE} bytes without a newline")
            for line in lines:
                event = _event(line, url)
                if event is not None:
                    yield event
    except httpx.HTTPError as error:
        raise unreachable(url, error) from error
    event = _event(buffer, url)
    if event is not None:
        yield event


def _event(line: bytes, url: str) -> dict[str, Any] | None:
    line = line.strip()
    failed = line.startswith(b"error:")
    if failed:
        line = b"data:" + line[6:]
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if not data:
        return None
    if data == b"[DONE]":
        return DONE
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineProtocolError(f"{url}: the stream is not JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise EngineProtocolError(f"{url}: expected JSON objects in the stream, got {data[:80]!r}")
    return {"error": event} if failed and "error" not in event else event


def dicts(value: Any) -> list[dict[str, Any]]:
    """The dicts of what should be a list of dicts."""
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def without_delivery(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the agent's request, for a call that only evaluates its prompt."""
    return {name: value for name, value in options.items() if name not in _DELIVERY}


def without_form(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the agent's request, for another question behind its prompt: what its prompt and model are made of."""
    return {name: value for name, value in without_delivery(options).items() if name not in _FORM}


def is_url(text: str) -> bool:
    """Is this the address of a server?"""
    try:
        url = httpx.URL(text)
        host, port = url.host, url.port
    except (httpx.InvalidURL, ValueError):  # a host that is no name (UnicodeError), too
        return False
    known = bool(host) and (port is None or 0 < port < 65536)
    return known and url.scheme in ("http", "https") and not url.query and not url.fragment


def shown(message: Mapping[str, Any]) -> str:
    """What a message adds to a prompt, roughly: for estimates where the server counts nothing."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [str(p.get("text") or "") for p in dicts(content)]
    calls = message.get("tool_calls")
    return "".join(parts) + (str(calls) if calls else "")


def read_usage(usage: object) -> Usage:
    """OpenAI usage as ours, from a mapping or an object of an SDK, by the names of chat completions or of responses.

    Cached tokens only where the server reported them; more of them than the prompt has are no report.
    """
    prompt = token_count(_field(usage, "prompt_tokens", "input_tokens")) or 0
    cached = token_count(_field(_field(usage, "prompt_tokens_details", "input_tokens_details"), "cached_tokens"))
    return Usage(
        input_tokens=prompt,
        output_tokens=token_count(_field(usage, "completion_tokens", "output_tokens")) or 0,
        cached_tokens=None if cached is None or cached > prompt else cached,
        calls=1,
    )


def _field(value: object, *names: str) -> Any:
    """The first of these that is there."""
    given = (value.get(n) if isinstance(value, Mapping) else getattr(value, n, None) for n in names)
    return next((v for v in given if v is not None), None)


def error_text(body: Any) -> str:
    """What the server says about the error, cut short."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", error))[:_ERROR_TEXT]
    return str(error if error is not None else body)[:_ERROR_TEXT]


def raise_for_status(url: str, status: int, text: str, headers: Mapping[str, str]) -> None:
    """Raise the ``EngineError`` of an HTTP status; nothing for 200."""
    if status < 400:
        if status != 200:
            raise EngineProtocolError(f"{url}: HTTP {status} where 200 was expected: check the URL", status=status)
        return
    try:
        said = error_text(json.loads(text))
    except (ValueError, RecursionError):
        said = text.strip()[:_ERROR_TEXT]
    what = f"{url}: HTTP {status}" + (f": {said}" if said else "")
    raise _failure(what, status, said, retry_after(headers))


def raise_for_event(url: str, event: Mapping[str, Any]) -> None:
    """Raise the ``EngineError`` of an error that comes inside a stream; nothing for other events.

    Its code is the HTTP status which it would have had before the answer began.
    """
    error = event.get("error")
    if not error:
        return
    said = error_text(event)
    what = f"{url}: the server reported an error in the stream: {said}"
    status = _status(error)
    raise EngineProtocolError(what) if status is None else _failure(what, status, said, None)


def _status(error: Any) -> int | None:
    """The HTTP status in an error's fields, where they tell one: as a number, or by the names of an overload."""
    fields = [error.get(name) for name in ("code", "status", "type")] if isinstance(error, dict) else []
    for value in fields:
        if isinstance(value, int | str) and re.fullmatch(r"[45]\d\d", str(value)):
            return int(value)
    for value in fields:
        if isinstance(value, str) and re.search(r"rate.?limit|resource_exhausted|overloaded", value, re.IGNORECASE):
            return 429
    return None


def _failure(what: str, status: int, said: str, retry_after_s: float | None) -> EngineError:
    if status >= 500 and refuses_messages(said):
        return EngineRefused(what + _TEMPLATE_HINT, status=status)
    if status in _RETRYABLE or status >= 500:
        return EngineOverloaded(what, status=status, retry_after_s=retry_after_s)
    return EngineRefused(what + _HINTS.get(status, ""), status=status)


def refused_option(error: EngineRefused, options: Iterable[str]) -> str | None:
    """The first of these request options which a refusal names, ``None`` where it names none of them."""
    return next((name for name in options if re.search(rf"\b{re.escape(name)}\b", str(error))), None)


def unreachable(url: str, error: httpx.HTTPError) -> EngineError:
    """A transport error as ours."""
    what = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return EngineUnreachable(f"cannot connect to {url} ({what}): is the server running there?")
    return EngineUnreachable(f"{url}: the connection broke or timed out ({what})")
