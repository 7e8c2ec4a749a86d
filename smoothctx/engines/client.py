"""A client for OpenAI-compatible model servers: completions, streams with TTFT, prefill.

Wire format: the OpenAI chat completions API with ``stream_options.include_usage``; cached prompt tokens are
read from ``usage.prompt_tokens_details.cached_tokens`` and are ``None`` where the server does not report them.
"""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from ..errors import ClosedError, ConfigurationError, EngineError, EngineProtocolError, MessageError
from ..tokens import MESSAGE_TOKENS, count_text
from ..usage import Usage
from .binding import Binding, EngineBinding
from .wire import DONE, dicts, error_text, is_url, raise_for_status, read_events, read_usage, shown, unreachable

#: seconds that a server gets to end its answer after the last event, so that the connection can be used again
_END_S = 0.1
#: options that ``prefill`` sets by itself
_OUTPUT = frozenset({"max_tokens", "max_completion_tokens", "stream", "stream_options", "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished model call.

    ``ttft_s`` and ``total_s`` are seconds from sending the request to the first token (``None`` when not
    streamed, or nothing came) and to the end. ``tool_calls`` says that the model called a tool.
    """

    text: str
    usage: Usage
    finish_reason: str | None
    tool_calls: bool = False
    ttft_s: float | None = None
    total_s: float = 0.0


class Rates:
    """What the calls of one client showed of its server, in tokens per second; ``None`` while unknown."""

    def __init__(self) -> None:
        self.prefill: float | None = None
        self.decode: float | None = None

    def learn(self, completion: Completion) -> None:
        """Take one finished stream; only what the server reported counts."""
        usage, ttft = completion.usage, completion.ttft_s
        if ttft is None or usage.cached_tokens is None:
            return
        new, more = usage.input_tokens - usage.cached_tokens, usage.output_tokens - 1
        if new >= 64 and ttft > 0:
            self.prefill = _mean(self.prefill, new / ttft)
        if more >= 8 and completion.total_s > ttft:
            self.decode = _mean(self.decode, more / (completion.total_s - ttft))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + 0.3 * (new - old)


class Stream:
    """A running completion: iterate over its text; ``completion`` is there when the iteration has ended."""

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any]],
        now: Callable[[], float],
        url: str,
        rates: Rates,
        *,
        started: float,
        prompt: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._events = events
        self._rates = rates
        self._now = now
        self._url = url
        self._started = started
        self._prompt = prompt
        self.completion: Completion | None = None

    async def __aiter__(self) -> AsyncGenerator[str]:
        parts: list[str] = []
        usage: Usage | None = None
        finish: str | None = None
        ttft: float | None = None
        tools = ended = answered = False
        async for event in self._events:
            if event is DONE:
                ended = True
                break
            if event.get("error"):
                raise EngineProtocolError(
                    f"{self._url}: the server reported an error in the stream: {error_text(event)}"
                )
            if isinstance(event.get("usage"), dict):
                usage = read_usage(event["usage"])
            for choice in dicts(event.get("choices")):
                answered = True
                delta = choice.get("delta")
                delta = delta if isinstance(delta, dict) else {}
                text = delta.get("content")
                called = bool(delta.get("tool_calls") or delta.get("function_call"))
                tools = tools or called
                finish = choice.get("finish_reason") or finish
                if ttft is None and (text or called or delta.get("reasoning_content") or delta.get("reasoning")):
                    ttft = self._now() - self._started
                if isinstance(text, str) and text:
                    parts.append(text)
                    yield text
        total = self._now() - self._started
        if not answered:
            raise EngineProtocolError(f"{self._url}: the stream held no answer: is it an OpenAI-compatible server?")
        if finish is None and not ended:
            raise EngineProtocolError(f"{self._url}: the stream ended in the middle of the answer")
        if ended:
            await self._finish()
        self.completion = Completion(
            text="".join(parts),
            usage=usage or self._estimate("".join(parts)),
            finish_reason=finish,
            tool_calls=tools,
            ttft_s=ttft,
            total_s=total,
        )
        self._rates.learn(self.completion)

    async def _finish(self) -> None:
        """Read the end of the body, which is due now: the connection can then be used again."""
        with anyio.move_on_after(_END_S):
            try:
                async for _ in self._events:
                    pass
            except EngineError:
                pass  # the answer is whole

    def _estimate(self, text: str) -> Usage:
        tokens = sum(count_text(shown(m)) + MESSAGE_TOKENS for m in self._prompt)
        return Usage(input_tokens=tokens, output_tokens=count_text(text), calls=1, estimated=True)

    async def drain(self) -> Completion:
        """Read to the end and return the completion."""
        async for _ in self:
            pass
        assert self.completion is not None
        return self.completion


class OpenAIEngine:
    """An OpenAI-compatible server (llama.cpp, vLLM, SGLang, a hosted API).

    Args:
        base_url: with or without ``/v1``, such as ``http://127.0.0.1:8000/v1``.
        model: the model's name as the server knows it.
        api_key: sent as a bearer token.
        context_window: the model's window in tokens, where known.
        timeout_s: seconds without any byte from the server before the call fails.
        preload: warm the cache ahead of a commit by default (one's own server: yes; a paid API: no).
        client: an ``httpx.AsyncClient`` of your own; it is not closed by us.

    Raises:
        ConfigurationError: when the URL or the model cannot be right.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        context_window: int | None = None,
        timeout_s: float = 300.0,
        preload: bool = False,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(base_url, str) or not is_url(base_url):
            raise ConfigurationError(f"base_url={base_url!r}: expected http://host:port or https://host, /v1 or not")
        if not isinstance(model, str) or not model:
            raise ConfigurationError(f"model={model!r}: expected the model's name as the server knows it")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ConfigurationError(f"timeout_s={timeout_s!r}: expected seconds above 0")
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise ConfigurationError("api_key: expected printable ASCII without line breaks (its value is not shown)")
        root = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.root = root
        self.url = f"{root}/v1"
        self.model = model
        self.context_window = context_window
        self.preload_by_default = preload
        #: what the calls so far showed of the server
        self.rates = Rates()
        self._now = clock
        self._given = client
        # A client belongs to the loop that its connections were made on, an engine to every loop that uses it.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._clients = weakref.WeakKeyDictionary()
        self._closed = False
        self._trust_env = True
        self._timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def identity(self) -> str:
        """URL and model: what makes this model this model."""
        return f"{self.url}#{self.model}"

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> Completion:
        """One completion, not streamed to anybody.

        It is sent as a stream all the same: a cancelled call then stops the server's work at once.

        Raises:
            EngineError: see its subclasses.
        """
        async with self.stream(messages, max_tokens=max_tokens, **options) as stream:
            return await stream.drain()

    @asynccontextmanager
    async def stream(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> AsyncGenerator[Stream]:
        """A streamed completion: ``async with engine.stream(messages) as s: async for text in s: ...``.

        Raises:
            EngineError: see its subclasses; also raised from the iteration.
        """
        async with _lookahead(options) as body_options:
            body: dict[str, Any] = {
                "model": self.model,
                "messages": list(messages),
                "stream": True,
                "stream_options": {"include_usage": True},
                **body_options,
            }
            if max_tokens is not None:
                body["max_tokens"] = max_tokens
            started = self._now()  # a server may send even its headers with the first token only
            async with self._post("/v1/chat/completions", body) as response:
                async with aclosing(read_events(response, self.url)) as events:
                    yield Stream(events, self._now, self.url, self.rates, started=started, prompt=messages)

    async def prefill(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        """Evaluate a prompt so that the server caches it: one token is generated, since some servers refuse zero.

        Options of the agent's own request that shape only its output's length and delivery are left out.

        Raises:
            EngineError: see its subclasses.
        """
        kept = {name: value for name, value in options.items() if name not in _OUTPUT}
        return await self.complete(messages, max_tokens=1, **kept)

    async def get_json(self, path: str) -> Any:
        """GET a path below the server's root.

        Raises:
            EngineError: see its subclasses.
        """
        try:
            response = await self._http().get(f"{self.root}{path}", headers=self._headers)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        raise_for_status(self.url, response.status_code, response.text, response.headers)
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise EngineProtocolError(f"{self.root}{path}: the answer is not JSON") from error

    async def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON to a path below the server's root, and read JSON back.

        Raises:
            EngineError: see its subclasses.
        """
        async with self._post(path, body) as response:
            try:
                return json.loads(await response.aread())
            except (ValueError, RecursionError) as error:
                raise EngineProtocolError(f"{self.root}{path}: the answer is not JSON") from error
            except httpx.HTTPError as error:
                raise unreachable(self.url, error) from error

    def bind(self, session_id: str) -> EngineBinding:
        """One session's relation to this engine (preload, options of its calls)."""
        return Binding(self, session_id)

    async def aclose(self) -> None:
        """Close the connections that this client opened on the running loop, and refuse further calls."""
        self._closed = True
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connections of the running loop, before it ends; another loop, or a later call, opens its own."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _http(self) -> httpx.AsyncClient:
        if self._closed:
            raise ClosedError(f"{self!r} was closed")
        if self._given is not None:
            return self._given
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            limits = httpx.Limits(max_connections=256, max_keepalive_connections=32)
            client = httpx.AsyncClient(
                timeout=self._timeout,
                limits=limits,
                trust_env=self._trust_env,
                verify=self.root.startswith("https://"),  # loading certificates takes a while
            )
            self._clients[loop] = client
        return client

    async def __aenter__(self) -> OpenAIEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.root!r}, {self.model!r})"

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx.Response]:
        client = self._http()
        try:
            text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError(f"a message or option cannot be written as JSON: {error}") from error
        # Half a surrogate pair is no UTF-8: servers answer it with errors of every kind.
        content = text.encode("utf-8", "replace")
        headers = {"Content-Type": "application/json", **self._headers}
        request = client.build_request("POST", f"{self.root}{path}", content=content, headers=headers)
        try:
            response = await _send(client, request)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from error
        try:
            if response.status_code != 200:
                try:
                    text = (await response.aread()).decode("utf-8", "replace")
                except httpx.HTTPError:
                    text = ""
                raise_for_status(self.url, response.status_code, text, response.headers)
            yield response
        finally:
            await response.aclose()


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Send it, and once more where a kept connection turns out to be closed before any answer (RFC 9112, 9.3.1)."""
    try:
        return await client.send(request, stream=True)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
        if isinstance(error, httpx.RemoteProtocolError) and "without sending a response" not in str(error):
            raise
        return await client.send(request, stream=True)


@asynccontextmanager
async def _lookahead(options: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
    """A binding may prepare a background call (its ``lookahead`` option is a factory of such a context)."""
    prepare = options.get("lookahead")
    if prepare is None:
        yield options
        return
    async with prepare() as own:
        yield {**{k: v for k, v in options.items() if k != "lookahead"}, **own}
