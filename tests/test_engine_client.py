"""The client for OpenAI-compatible servers, against a real HTTP server that misbehaves in every way that servers do."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from smoothctx import (
    ClosedError,
    ConfigurationError,
    EngineError,
    EngineOverloaded,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
    MessageError,
    Usage,
)
from smoothctx.endpoints import overload
from smoothctx.engines import Binding, OpenAIEngine

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Request:
    """One request as the server read it."""

    line: str
    headers: dict[str, str]
    body: Any


@dataclass
class Server:
    """A scripted server: ``answer`` writes the raw reply of each request."""

    root: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    closed_by_client: asyncio.Event = field(default_factory=asyncio.Event)


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


async def _read(reader: asyncio.StreamReader) -> Request | None:
    head = await reader.readuntil(b"\r\n\r\n")
    line, *rows = head.decode().split("\r\n")
    headers = {k.strip().lower(): v.strip() for k, _, v in (r.partition(":") for r in rows if r)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(line, headers, json.loads(body) if body else None)


@asynccontextmanager
async def serve(answer: Answer) -> AsyncGenerator[Server]:
    """Run a scripted server on a free port."""
    state = Server()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        state.open += 1
        try:
            while True:
                request = await _read(reader)
                if request is None:
                    break
                state.requests.append(request)
                await answer(request, writer)
                await writer.drain()
                if writer.is_closing():
                    break
                if answer is never:
                    await reader.read()
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            state.open -= 1
            state.closed_by_client.set()
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    state.root = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        with anyio.move_on_after(5):
            while state.open:  # connections end as soon as their client has
                await anyio.lowlevel.checkpoint()


async def never(request: Request, writer: asyncio.StreamWriter) -> None:
    """Nothing at all: the connection stays open until the client leaves."""


def sse(*events: Any, done: bool = True, eol: str = "\n") -> bytes:
    """Server-sent events as bytes."""
    rows = [f"data: {json.dumps(e, ensure_ascii=False)}{eol}{eol}" for e in events]
    return "".join([*rows, *([f"data: [DONE]{eol}{eol}"] if done else [])]).encode()


def delta(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One event of a streamed answer."""
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": {**content, **more}, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}},
}
GOOD = sse(delta("he"), delta("llo"), delta(finish="stop"), USAGE)


def stream(body: bytes, *, cut: int = 1 << 30, kind: str = "text/event-stream", ended: bool = True) -> Answer:
    """An answer with a chunked body, cut every ``cut`` bytes."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(body), cut):
            part = body[start : start + cut]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        if ended:
            writer.write(b"0\r\n\r\n")
        else:
            writer.close()

    return answer


def status(code: int, body: str | bytes, *headers: str) -> Answer:
    """An answer with a status and a body."""
    data = body.encode() if isinstance(body, str) else body
    head = "\r\n".join([f"HTTP/1.1 {code} X", f"Content-Length: {len(data)}", *headers])

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + b"\r\n\r\n" + data)

    return answer


@asynccontextmanager
async def engine(answer: Answer, **options: Any) -> AsyncGenerator[tuple[OpenAIEngine, Server]]:
    """A client of a scripted server."""
    async with serve(answer) as server, OpenAIEngine(server.root, "m", **options) as client:
        yield client, server


async def failure(answer: Answer, **options: Any) -> EngineError:
    """The error of one completion, with the server's address masked."""
    async with engine(answer, **options) as (client, server):
        with pytest.raises(EngineError) as caught:
            await client.complete(HELLO)
    caught.value.args = (str(caught.value).replace(server.root, "ROOT"),)
    return caught.value


# --- what goes out and what comes back


async def test_complete_reads_text_usage_and_finish() -> None:
    """A plain answer gives text, reported usage, the reason of its end, and a time to first token."""
    async with engine(stream(GOOD)) as (client, _):
        done = await client.complete(HELLO, max_tokens=5)
    assert (done.text, done.finish_reason, done.tool_calls) == ("hello", "stop", False)
    assert done.usage == Usage(input_tokens=10, output_tokens=2, cached_tokens=7, calls=1)
    assert done.ttft_s is not None and 0 < done.ttft_s <= done.total_s


async def test_request_is_exactly_what_was_asked() -> None:
    """Messages, options, key and limits go out unchanged; nothing else does."""
    message = {"role": "user", "content": "é\u2028한", "x_extra": [1]}
    async with engine(stream(GOOD), api_key="sk-1") as (client, server):
        await client.complete([message], max_tokens=5, temperature=0.5, tools=[{"type": "function"}])
    (request,) = server.requests
    assert request.line == "POST /v1/chat/completions HTTP/1.1"
    assert request.headers["authorization"] == "Bearer sk-1"
    assert request.body == {
        "model": "m",
        "messages": [message],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "temperature": 0.5,
        "tools": [{"type": "function"}],
    }


async def test_prefill_repeats_the_request_one_token_long() -> None:
    """The agent's request may hold limits of its own: prefill overrides them instead of failing on them."""
    async with engine(stream(GOOD)) as (client, server):
        await client.prefill(HELLO, max_tokens=99, max_completion_tokens=98, stream=False, n=2, seed=1)
    body = server.requests[0].body
    assert body["max_tokens"] == 1 and body["stream"] is True and body["seed"] == 1
    assert "max_completion_tokens" not in body and "n" not in body


async def test_ttft_counts_from_sending_not_from_the_headers() -> None:
    """A server that sends its headers with the first token has spent its prefill before them."""
    now = 0.0
    inner = stream(GOOD)

    async def slow(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal now
        now = 5.0
        await inner(request, writer)

    async with engine(slow, clock=lambda: now) as (client, _):
        done = await client.complete(HELLO)
    assert done.ttft_s == 5.0 and done.total_s == 5.0


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("eol", ["\n", "\r\n"])
async def test_bytes_cut_anywhere(cut: int, eol: str) -> None:
    """Chunks that end inside a UTF-8 character, a line or an event give the same text."""
    text = "caf\u00e9 \u2028\u2029\u0085 \U0001f680 한국어 line\nbreak \x1c"
    body = b": a comment" + eol.encode() + b"event: x" + eol.encode() + b"data:" + eol.encode() * 2
    body += sse(*(delta(c) for c in text), delta(finish="stop"), USAGE, eol=eol)
    async with engine(stream(body, cut=cut)) as (client, _):
        async with client.stream(HELLO) as running:
            parts = [part async for part in running]
    assert parts == list(text)
    assert running.completion is not None and running.completion.text == text


async def test_no_done_marker_and_no_last_newline() -> None:
    """A stream that ends after its finish reason is whole, with or without [DONE] and a last newline."""
    body = sse(delta("hi"), delta(finish="length"), done=False).rstrip()
    async with engine(stream(body)) as (client, _):
        done = await client.complete(HELLO)
    assert (done.text, done.finish_reason) == ("hi", "length")


async def test_done_without_a_finish_reason_is_an_end() -> None:
    """[DONE] says that the answer is whole even where the reason is missing."""
    async with engine(stream(sse(delta("hi")))) as (client, _):
        done = await client.complete(HELLO)
    assert (done.text, done.finish_reason) == ("hi", None)


async def test_tool_calls_and_reasoning_count_as_first_token() -> None:
    """An answer that only calls a tool is no empty answer; reasoning ends the wait but is not text."""
    body = sse(delta(None, reasoning_content="hm"), delta(None, tool_calls=[{"index": 0}]), delta(finish="tool_calls"))
    async with engine(stream(body)) as (client, _):
        done = await client.complete(HELLO)
    assert done.tool_calls and done.text == "" and done.ttft_s is not None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 1}, Usage(input_tokens=3, output_tokens=1, calls=1)),
        (
            {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
            Usage(input_tokens=3, output_tokens=1, cached_tokens=0, calls=1),
        ),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, Usage(input_tokens=3, calls=1)),
        ({"prompt_tokens": "3", "prompt_tokens_details": {"cached_tokens": True}}, Usage(calls=1)),
        ({"prompt_tokens": -3, "completion_tokens": None}, Usage(calls=1)),
    ],
)
async def test_promise_15_usage_only_as_reported(usage: dict[str, Any], expected: Usage) -> None:
    """A cache hit is claimed only where the server reported a number."""
    body = sse(delta("x", finish="stop"), {"choices": [], "usage": usage})
    async with engine(stream(body)) as (client, _):
        assert (await client.complete(HELLO)).usage == expected


async def test_promise_15_missing_usage_is_an_estimate_that_says_so() -> None:
    """Without usage the tokens are estimated, marked as such, and no cache hit is claimed."""
    async with engine(stream(sse(delta("x" * 40, finish="stop")))) as (client, _):
        usage = (await client.complete([{"role": "user", "content": "y" * 400}])).usage
    assert usage == Usage(input_tokens=104, output_tokens=10, calls=1, estimated=True)
    assert usage.cached_tokens is None


async def test_connection_is_used_again() -> None:
    """One connection carries several calls, one after the other."""
    async with engine(stream(GOOD)) as (client, server):
        for _ in range(5):
            await client.complete(HELLO)
        assert (len(server.requests), server.connections) == (5, 1)


async def test_many_calls_at_once() -> None:
    """Fifty calls run beside each other, each with its own answer."""

    async def echo(request: Request, writer: asyncio.StreamWriter) -> None:
        text = request.body["messages"][0]["content"]
        await stream(sse(*(delta(c) for c in text), delta(finish="stop")), cut=5)(request, writer)

    answers: dict[int, str] = {}
    async with engine(echo) as (client, server):

        async def ask(k: int) -> None:
            answers[k] = (await client.complete([{"role": "user", "content": f"number {k}"}])).text

        async with anyio.create_task_group() as group:
            for k in range(50):
                group.start_soon(ask, k)
    assert answers == {k: f"number {k}" for k in range(50)}
    assert len(server.requests) == 50


def test_one_client_on_several_event_loops() -> None:
    """Each short-lived loop gets connections of its own; none is used on another loop."""

    async def turn(client: OpenAIEngine | None) -> OpenAIEngine:
        async with serve(stream(GOOD)) as server:
            client = client or OpenAIEngine(server.root, "m")
            client.root = server.root
            assert (await client.complete(HELLO)).text == "hello"
            await client.disconnect()
        return client

    client = asyncio.run(turn(None))
    assert asyncio.run(turn(client)) is client


async def test_a_given_client_is_not_closed() -> None:
    """A client of the caller's own stays open."""
    async with serve(stream(GOOD)) as server, httpx.AsyncClient() as own:
        async with OpenAIEngine(server.root, "m", client=own) as client:
            await client.complete(HELLO)
        assert not own.is_closed


@pytest.mark.parametrize("key", [None, "sk-1"])
async def test_a_password_in_the_url_is_used_and_never_shown(key: str | None) -> None:
    """As basic authentication, of every request; no name and no text has it."""
    async with serve(status(418, "{}")) as server:
        base = server.root.replace("http://", "http://bob:p%40ss:w@") + "/v1"
        async with OpenAIEngine(base, "m", api_key=key) as client:
            with pytest.raises(EngineRefused) as refused:
                await client.complete(HELLO)
            assert (await client.fetch("/health")).status == (await client.send("/x", {})).status == 418
            shown = [str(refused.value), repr(client), client.identity, client.root, client.url]
    login = b64encode(b"bob:p@ss:w").decode()
    assert [request.headers["authorization"] for request in server.requests] == [f"Basic {login}"] * 3
    assert client.identity == f"{server.root}/v1#m"
    async with OpenAIEngine(base, "m", timeout_s=5) as client:
        with pytest.raises(EngineUnreachable) as gone:
            await client.complete(HELLO)
    for wrong in (base + "?x=1", "http://bob:p%40ss:w@host:port", "bob:p@ss:w@host"):
        with pytest.raises(ConfigurationError) as caught:
            OpenAIEngine(wrong, "m")
        shown.append(str(caught.value))
    assert not [text for text in [*shown, str(gone.value)] if "ss:w" in text or "bob" in text]


async def test_closed_engine_says_so() -> None:
    """After aclose a call fails with ClosedError, and a second aclose does nothing."""
    client = OpenAIEngine("http://127.0.0.1:9/v1", "m")
    await client.aclose()
    await client.aclose()
    with pytest.raises(ClosedError, match="was closed"):
        await client.complete(HELLO)


async def test_get_and_post_json() -> None:
    """Other paths of the server are reached below its root, with and without /v1 in the URL."""
    async with serve(status(200, '{"a": 1}')) as server, OpenAIEngine(server.root + "/v1/", "m") as client:
        assert await client.get_json("/props") == {"a": 1}
        assert await client.post_json("/tokenize", {"content": "x"}) == {"a": 1}
    assert [r.line for r in server.requests] == ["GET /props HTTP/1.1", "POST /tokenize HTTP/1.1"]
    async with engine(status(200, "<html>")) as (client, _):
        for call in (client.get_json("/x"), client.post_json("/x", {})):
            with pytest.raises(EngineProtocolError, match="/x: the answer is not JSON"):
                await call


async def test_binding_preloads_with_the_agents_own_request() -> None:
    """The default binding needs no options, and is what bind gives."""
    client = OpenAIEngine("http://127.0.0.1:9", "m")
    assert isinstance(client.bind("s"), Binding) and client.bind("s").request_options() == {}
    assert client.identity == "http://127.0.0.1:9/v1#m"
    await client.aclose()


# --- failures

_NO_ANSWER = "ROOT/v1: the stream held no answer: is it an OpenAI-compatible server?"
_REPORTED = "ROOT/v1: the server reported an error in the stream: "


@pytest.mark.parametrize(
    ("code", "body", "kind", "text"),
    [
        (400, '{"error": {"message": "too long", "code": 400}}', EngineRefused, "ROOT/v1: HTTP 400: too long"),
        (400, '{"error": "flat"}', EngineRefused, "ROOT/v1: HTTP 400: flat"),
        (401, '{"error": {"message": "bad key"}}', EngineRefused, "ROOT/v1: HTTP 401: bad key (check api_key)"),
        (403, "", EngineRefused, "ROOT/v1: HTTP 403 (check api_key)"),
        (404, '"no"', EngineRefused, "ROOT/v1: HTTP 404: no (check the URL and the model's name)"),
        (413, "<html>big</html>", EngineRefused, "ROOT/v1: HTTP 413: <html>big</html>"),
        (422, "[1, 2]", EngineRefused, "ROOT/v1: HTTP 422: [1, 2]"),
        (429, '{"error": {"message": "slow down"}}', EngineOverloaded, "ROOT/v1: HTTP 429: slow down"),
        (500, "oops", EngineOverloaded, "ROOT/v1: HTTP 500: oops"),
        (503, '{"error": {"message": "Loading model"}}', EngineOverloaded, "ROOT/v1: HTTP 503: Loading model"),
        (503, b"\xff\xfe", EngineOverloaded, "ROOT/v1: HTTP 503: \ufffd\ufffd"),
        (500, "[" * 100_000, EngineOverloaded, "ROOT/v1: HTTP 500: " + "[" * 500),
        (302, "", EngineProtocolError, "ROOT/v1: HTTP 302 where 200 was expected: check the URL"),
        (204, "", EngineProtocolError, "ROOT/v1: HTTP 204 where 200 was expected: check the URL"),
    ],
)
async def test_statuses(code: int, body: str | bytes, kind: type[EngineError], text: str) -> None:
    """Each status gives its error, with the server's words, bounded, and whether a retry may help."""
    error = await failure(status(code, body))
    assert type(error) is kind and str(error) == text and error.status == code
    assert error.retryable is (kind is not EngineRefused)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT\r\nDate: Wed, 21 Oct 2026 07:27:20 GMT", 40.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT\r\nDate: Wed, 21 Oct 2026 07:29:00 GMT", 0.0),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 0.0),
    ],
)
async def test_retry_after(header: str, seconds: float | None) -> None:
    """The server's wish is read as seconds or as a date; what is neither is no wish."""
    assert (await failure(status(429, "", f"Retry-After: {header}"))).retry_after_s == seconds
    assert (await failure(status(429, ""))).retry_after_s is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"data: {nope\n\n", "ROOT/v1: the stream is not JSON: b'{nope'"),
        (b'data: "\xff"\n\n', "ROOT/v1: the stream is not JSON: b'\"\\xff\"'"),
        (b"data: " + b"[" * 100_000 + b"\n\n", f"ROOT/v1: the stream is not JSON: {b'[' * 80!r}"),
        (b"data: [1]\n\n", "ROOT/v1: expected JSON objects in the stream, got b'[1]'"),
        (b"<html>hello</html>", _NO_ANSWER),
        (b"", _NO_ANSWER),
        (b"data: [DONE]\n\n", _NO_ANSWER),
        (sse({"choices": [None, 3]}, {"choices": {"a": 1}}), _NO_ANSWER),
        (sse(delta("half an ans"), done=False), "ROOT/v1: the stream ended in the middle of the answer"),
        (sse(delta("x"), {"error": {"message": "died", "code": 7}}), _REPORTED + "died"),
        (b'error: {"error": {"message": "old style"}}\n\n', _REPORTED + "old style"),
    ],
)
async def test_garbage_and_half_streams(body: bytes, text: str) -> None:
    """What is no OpenAI-compatible answer is a protocol error that shows what came."""
    error = await failure(stream(body))
    assert type(error) is EngineProtocolError and str(error) == text and error.retryable


@pytest.mark.parametrize(
    ("body", "kind", "code", "text"),
    [
        (sse({"error": {"message": "slow down", "code": 429}}), EngineOverloaded, 429, "slow down"),
        (sse(delta("x"), {"error": {"message": "slow down", "code": "429"}}), EngineOverloaded, 429, "slow down"),
        (sse({"error": {"message": "m", "type": "rate_limit_error"}}), EngineOverloaded, 429, "m"),
        (sse({"error": {"message": "m", "code": "rate_limit_exceeded", "type": 1}}), EngineOverloaded, 429, "m"),
        (sse({"error": {"message": "m", "type": "overloaded_error"}}), EngineOverloaded, 429, "m"),
        (sse(delta("x"), {"error": {"message": "died", "code": 500}}), EngineOverloaded, 500, "died"),
        (b'error: {"code": 503, "message": "loading"}\n\n', EngineOverloaded, 503, "loading"),
        (
            sse({"error": {"message": "too long", "code": 400, "type": "BadRequestError"}}),
            EngineRefused,
            400,
            "too long",
        ),
    ],
)
async def test_an_error_inside_a_stream_is_the_error_of_its_status(
    body: bytes, kind: type[EngineError], code: int, text: str
) -> None:
    """A limit that is told after the headers slows calls down as one that is told by them; a refusal is no retry."""
    error = await failure(stream(body))
    assert type(error) is kind and error.status == code and str(error) == _REPORTED + text


_JINJA = (
    "\n------------\nWhile executing CallExpression at line 19, column 27 in source:\n...% 2 == 0) -%}\n"
    "Error: Jinja Exception: Conversation roles must alternate user/assistant/user/assistant/..."
)


@pytest.mark.parametrize(
    "said",
    [
        _JINJA,
        "Conversation roles must alternate user/assistant at row 19, column 27:\n {%- if (message",
        "Unexpected role at row 5, column 3:\n{{ raise_exception('x') }}",
        "Failed to parse messages: Unsupported content part type",
    ],
)
@pytest.mark.parametrize("inside", [False, True])
async def test_a_chat_template_that_does_not_take_the_messages_is_a_refusal(said: str, inside: bool) -> None:
    """llama.cpp reports it as 500: it would fail each time, and says nothing of the load."""
    body = {"error": {"code": 500, "message": said, "type": "server_error"}}
    error = await failure(stream(sse(body)) if inside else status(500, json.dumps(body)))
    assert type(error) is EngineRefused and error.status == 500 and not error.retryable
    assert str(error).endswith("(the model's chat template does not take these messages)")
    assert overload(error) is None


def test_a_template_is_no_overload_by_the_error_of_another_client_either() -> None:
    """What the SDKs raise for a 500 counts by its text as well."""

    class Failed(Exception):
        """As an SDK's error of a status."""

        status_code = 500

    assert overload(Failed(f"Error code: 500 - {_JINJA}")) is None
    assert overload(Failed("Error code: 500 - oops")) == 0.0


_NO_MAX_TOKENS = {
    "error": {
        "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
        "instead.",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "unsupported_parameter",
    }
}


async def test_a_server_that_wants_max_completion_tokens_gets_it() -> None:
    """The refusal is understood once: the call succeeds, and later ones are sent so at once."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        refused = status(400, json.dumps(_NO_MAX_TOKENS))
        await (refused if "max_tokens" in request.body else stream(GOOD))(request, writer)

    async with engine(answer) as (client, server):
        assert (await client.complete(HELLO, max_tokens=9, seed=1)).text == "hello"
        await client.prefill(HELLO)
        await client.complete(HELLO)
    first, again, prefill, bare = (r.body for r in server.requests)
    assert first.pop("max_tokens") == again.pop("max_completion_tokens") == 9 and first == again
    assert prefill["max_completion_tokens"] == 1 and "max_tokens" not in prefill
    assert "max_completion_tokens" not in bare


async def test_many_calls_at_once_are_refused_max_tokens_once_each() -> None:
    """Calls that went out before the first refusal came back are each sent again; none fails."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        refused = status(400, json.dumps(_NO_MAX_TOKENS))
        await (refused if "max_tokens" in request.body else stream(GOOD))(request, writer)

    async with engine(answer) as (client, server), anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(partial(client.complete, HELLO, max_tokens=9))
    assert sum("max_completion_tokens" in r.body for r in server.requests) == 5


@pytest.mark.parametrize(
    "said",
    [
        "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is 8192",
        "max_tokens is too large: 9000",
        "Unsupported parameter: 'max_tokens'",
    ],
)
async def test_a_refused_value_is_not_taken_for_a_refused_name(said: str) -> None:
    """Only what names the other option as the one to use is sent again."""
    async with engine(status(400, json.dumps({"error": {"message": said}}))) as (client, server):
        with pytest.raises(EngineRefused):
            await client.complete(HELLO, max_tokens=9000)
        assert len(server.requests) == 1


async def test_what_refuses_both_names_is_asked_twice() -> None:
    """The second refusal is the caller's to know."""
    async with engine(status(400, json.dumps(_NO_MAX_TOKENS))) as (client, server):
        with pytest.raises(EngineRefused, match="max_completion_tokens"):
            await client.complete(HELLO, max_tokens=9)
        assert len(server.requests) == 2


async def test_odd_choices_do_not_break_the_reader() -> None:
    """Fields of a wrong type are passed over where the answer is there all the same."""
    odd = {"choices": [{"delta": None}, {"delta": "x"}, {"delta": {"content": ["no text"]}}], "usage": "none"}
    async with engine(stream(sse(odd, delta("ok", finish="stop")))) as (client, _):
        assert (await client.complete(HELLO)).text == "ok"


async def test_endless_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body without newlines ends as an error and not as memory."""
    monkeypatch.setattr("smoothctx.engines.wire._LINE", 1000)
    error = await failure(stream(b"x" * 5000, cut=700))
    assert type(error) is EngineProtocolError and "without a newline" in str(error)


async def test_body_broken_off() -> None:
    """A connection that ends inside the body is a broken connection, whatever was read before."""
    error = await failure(stream(sse(delta("half"), done=False), ended=False))
    assert type(error) is EngineUnreachable and error.retryable
    assert str(error).startswith("ROOT/v1: the connection broke or timed out (RemoteProtocolError")


async def test_dropped_before_the_headers() -> None:
    """A server that hangs up without a word."""

    async def drop(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.close()

    error = await failure(drop)
    assert type(error) is EngineUnreachable and "Server disconnected without sending a response" in str(error)


async def test_not_http_at_all() -> None:
    """Another protocol on that port."""

    async def ssh(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    error = await failure(ssh)
    assert type(error) is EngineUnreachable and "RemoteProtocolError" in str(error)


async def test_connection_refused() -> None:
    """Nobody listens there."""
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    root = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    async with OpenAIEngine(root, "m") as client:
        for call in (client.complete(HELLO), client.get_json("/health"), client.post_json("/x", {})):
            with pytest.raises(EngineUnreachable) as caught:
                await call
            assert str(caught.value).startswith(f"cannot connect to {root}/v1 (ConnectError")
            assert str(caught.value).endswith("is the server running there?")


async def test_a_server_that_never_answers_times_out() -> None:
    """No byte within timeout_s is a failure, before the headers and in the middle of a stream."""
    error = await failure(never, timeout_s=0.05)
    assert type(error) is EngineUnreachable
    assert str(error) == "ROOT/v1: the connection broke or timed out (ReadTimeout)"

    async def stalls(request: Request, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        part = sse(delta("half"), done=False)
        writer.write(head + f"{len(part):x}\r\n".encode() + part + b"\r\n")

    error = await failure(stalls, timeout_s=0.05)
    assert type(error) is EngineUnreachable and "ReadTimeout" in str(error)


async def test_a_server_that_keeps_the_body_open_after_done() -> None:
    """The answer is whole at [DONE]: nobody waits for a body that does not end."""

    async def keeps(request: Request, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + f"{len(GOOD):x}\r\n".encode() + GOOD + b"\r\n")

    async with engine(keeps) as (client, _):
        with anyio.fail_after(5):
            assert (await client.complete(HELLO)).text == "hello"


async def test_promise_11_a_cancelled_call_closes_its_connection() -> None:
    """Cancelling a call reaches the server as the end of its connection: it stops working."""
    async with engine(never) as (client, server):
        with anyio.move_on_after(5) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(client.complete, HELLO)
                while not server.requests:
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        assert not scope.cancelled_caught
        with anyio.fail_after(5):
            await server.closed_by_client.wait()


async def test_promise_11_leaving_a_stream_closes_its_connection() -> None:
    """A reader that stops in the middle ends the server's work too."""

    async def endless(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        part = sse(delta("x"), done=False)
        while not writer.is_closing():
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)

    async with engine(endless) as (client, server):
        async with client.stream(HELLO) as running:
            async for _ in running:
                break
        with anyio.fail_after(5):
            await server.closed_by_client.wait()
    assert running.completion is None


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": b"bytes"}], "Object of type bytes is not JSON serializable"),
        ([{"role": "user", "content": float("nan")}], "Out of range float values are not JSON compliant"),
    ],
)
async def test_messages_that_are_no_json(messages: Sequence[dict[str, Any]], text: str) -> None:
    """They fail before anything is sent, with an error of ours."""
    async with engine(stream(GOOD)) as (client, server):
        with pytest.raises(MessageError, match="cannot be written as JSON: " + text):
            await client.complete(messages)
    assert server.requests == []


async def test_half_a_surrogate_pair_is_sent_as_valid_utf8() -> None:
    """Text cut inside a character (by a tool) does not make the request invalid."""
    async with engine(stream(GOOD)) as (client, server):
        await client.complete([{"role": "user", "content": "a\ud83dz"}])
    assert server.requests[0].body["messages"][0]["content"] == "a?z"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000': expected http://host:port"),
        ({"base_url": "http://"}, "base_url='http://': expected http://host:port"),
        ({"base_url": "http://host:port"}, "base_url='http://host:port': expected"),
        ({"base_url": "http://host/v1?x=1"}, "base_url='http://host/v1?x=1': expected"),
        ({"base_url": None}, "base_url=None: expected"),
        ({"model": ""}, "model='': expected the model's name"),
        ({"timeout_s": 0}, "timeout_s=0: expected seconds above 0"),
        ({"timeout_s": True}, "timeout_s=True: expected seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: expected seconds above 0"),
        ({"base_url": "http://127.0.0.1:80000"}, "base_url='http://127.0.0.1:80000': expected http://host:port"),
        ({"base_url": "http://127.0.0.1:0"}, "base_url='http://127.0.0.1:0': expected"),
        ({"base_url": "http://xn--/"}, "base_url='http://xn--/': expected"),
        ({"preload": "no"}, "preload='no': expected True, False or None"),
        ({"context_window": -5}, "context_window=-5: expected a number of tokens above 0, or None"),
        ({"context_window": "4096"}, "context_window='4096': expected a number of tokens"),
        ({"context_window": True}, "context_window=True: expected a number of tokens"),
        ({"chunk_delay_s": float("inf")}, "chunk_delay_s=inf: expected seconds above 0"),
        ({"api_key": "sk\n1"}, "api_key: expected printable ASCII"),
        ({"api_key": "ключ"}, "api_key: expected printable ASCII"),
    ],
)
def test_configuration_errors(options: dict[str, Any], text: str) -> None:
    """Wrong options fail at construction and say what is allowed; a key is never shown."""
    with pytest.raises(ConfigurationError) as caught:
        OpenAIEngine(**{"base_url": "http://127.0.0.1:1", "model": "m", **options})
    assert str(caught.value).startswith(text)
