"""The engine of ``bench ttft``: its background calls are written down, and what it can do is found out first."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ..engines import EmbeddedEngine, OpenAIEngine
from ..engines.wire import refused_option
from ..errors import EngineError, EngineProtocolError, EngineRefused
from ..patience import patiently
from ..usage import Usage
from .ttft_plan import STRATEGIES, Settings, window


@dataclass(slots=True)
class BackgroundCall:
    """One call that is not a turn's own: a summary, or one token of a preload. Times on the engine's clock.

    ``usage`` is ``None`` for a call that was aborted.
    """

    kind: str
    start: float | None = None
    end: float = 0.0
    usage: Usage | None = None


_CALL: ContextVar[BackgroundCall | None] = ContextVar("background_call", default=None)


class Watched:
    """Mixed into an engine: turns go through ``turn``, and whatever goes through ``stream`` is background work."""

    #: the background calls that have ended
    background: list[BackgroundCall]
    clock: Callable[[], float]

    def turn(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, **options: Any
    ) -> AbstractAsyncContextManager[Any]:
        """A turn's own call: the engine's ``stream``."""
        parent: Any = super()
        found: AbstractAsyncContextManager[Any] = parent.stream(messages, max_tokens=max_tokens, **options)
        return found

    @asynccontextmanager
    async def stream(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> AsyncGenerator[Any]:
        """As the engine does, and written down."""
        call = BackgroundCall("preload" if max_tokens == 1 else "summary")
        _CALL.set(call)
        parent: Any = super()
        try:
            async with parent.stream(messages, max_tokens=max_tokens, **options) as stream:
                yield stream
                call.usage = stream.completion.usage if stream.completion is not None else None
        finally:
            _CALL.set(None)
            call.end = self.clock()
            if call.start is not None:
                self.background.append(call)

    def sent(self) -> None:
        """A request goes out now (what came before was waiting)."""
        call = _CALL.get()
        if call is not None and call.start is None:
            call.start = self.clock()


class _OverHTTP(Watched):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.background = []

    @asynccontextmanager
    async def _post(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        if "messages" in body:
            self.sent()
        parent: Any = super()
        async with parent._post(path, body) as response:
            yield response


class _WatchedServer(_OverHTTP, OpenAIEngine):
    pass


class _WatchedEmbedded(_OverHTTP, EmbeddedEngine):
    pass


def embedded(settings: Settings, *, model: Any, slots: int) -> EmbeddedEngine:
    """The embedded engine. Its slots hold a little more than a policy's window: a long turn, and the instruction."""
    room = max(window(strategy, settings) for strategy in STRATEGIES) + (settings.long + 1) * settings.turn_tokens
    return _WatchedEmbedded(model, context_window=-(-room // 256) * 256, slots=slots, preload_strategy=settings.preload)


def server(settings: Settings, url: str, name: str, api_key: str | None) -> OpenAIEngine:
    """Any OpenAI-compatible server."""
    return _WatchedServer(url, name, api_key=api_key, preload_strategy=settings.preload)


@dataclass(slots=True, kw_only=True)
class Calibration:
    """What the engine was found to do before the first cell. Rates in tokens per second of one request alone.

    ``options`` are those of every call; ``refused`` those that it would not take. ``minimal_ms`` is the time of one
    request for one token, the median of five.
    """

    prefill: float
    decode: float
    minimal_ms: float
    options: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    reports_cache: bool = False
    tools: bool = True

    def as_json(self) -> dict[str, Any]:
        """For the file; ``Calibration(**data)`` reads it back."""
        return asdict(self)


#: options that every turn has where the engine takes them: the same length of answers in both modes
_WANTED: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}


async def calibrate(
    engine: Any,
    settings: Settings,
    text: str,
    *,
    clock: Callable[[], float],
    say: Callable[[str], object] = lambda line: None,
) -> Calibration:
    """Find out the options, the time of a minimal request and the rates. ``text``: a turn's worth and more. A call that
    an overloaded server refuses is made again when it wishes, and only the answered one is timed.

    Raises:
        EngineError: when it does not answer at all, or not so that anything can be measured.
    """
    options, refused = await _options(engine, say)

    async def minimal_s() -> float:
        start = clock()
        await engine.complete([{"role": "user", "content": f"{secrets.token_hex(4)}."}], max_tokens=1, **options)
        return clock() - start

    minimal = statistics.median([(await patiently(minimal_s, say))[0] for _ in range(5)])
    rates: list[tuple[float, float]] = []
    cached: int | None = None
    for k in range(2):
        prompt = [{"role": "user", "content": f"{secrets.token_hex(4)} {text}\n\nWrite a note."}]
        ask = partial(engine.complete, prompt, max_tokens=max(16, settings.reply_tokens), **options)
        for again in range(2 if k else 1):
            done, _ = await patiently(ask, say)
            if done.usage.input_tokens < 1:
                raise EngineProtocolError(
                    f"{engine.identity}: the server's usage says prompt_tokens: 0 of a prompt that has many; nothing "
                    "can be measured by it"
                )
            if done.ttft_s is None:
                raise EngineProtocolError(
                    f"{engine.identity}: the server's answers are empty: no first token ever came"
                )
            if again:
                cached = done.usage.cached_tokens
                continue
            decode = max(1e-9, done.total_s - done.ttft_s) / max(1, done.usage.output_tokens - 1)
            rates.append((done.usage.input_tokens / max(1e-3, done.ttft_s - minimal), 1 / max(decode, 1e-6)))
    return Calibration(
        prefill=round(statistics.median(p for p, _ in rates), 1),
        decode=round(statistics.median(d for _, d in rates), 1),
        minimal_ms=round(minimal * 1000, 2),
        options=options,
        refused=refused,
        reports_cache=cached is not None,
        tools=await _takes_tools(engine, options, say),
    )


async def _options(engine: Any, say: Callable[[str], object]) -> tuple[dict[str, Any], list[str]]:
    """The wanted options without those that the engine refuses."""
    options, refused = dict(_WANTED), list[str]()
    hello = [{"role": "user", "content": f"{secrets.token_hex(4)} Say hello."}]
    while True:
        try:
            await patiently(partial(engine.complete, hello, max_tokens=2, **options), say)
            return options, refused
        except EngineRefused as error:
            if not options:
                raise
            name = refused_option(error, options) or list(options)[-1]  # not named: the least common one first
            del options[name]
            refused.append(name)


async def _takes_tools(engine: Any, options: Mapping[str, Any], say: Callable[[str], object]) -> bool:
    """Does its chat template take a tool's result?"""

    async def taken() -> bool:
        try:
            await engine.complete([*opening_call("x"), tool_result(1, "Nothing.")], max_tokens=2, **options)
        except EngineError as error:
            # Everything else was answered: a plain 500 (llama.cpp's, of a template) is about these messages.
            if isinstance(error, EngineRefused) or error.status == 500:
                return False
            raise
        return True

    return (await patiently(taken, say))[0]


def opening_call(task: str) -> list[dict[str, Any]]:
    """The task, and the first call of the tool that reads."""
    return [{"role": "user", "content": task}, {"role": "assistant", "content": "Reading.", "tool_calls": [call(1)]}]


def call(number: int) -> dict[str, Any]:
    """The call for the part of this number."""
    return {
        "id": f"read-{number}",
        "type": "function",
        "function": {"name": "read", "arguments": f'{{"part": {number}}}'},
    }


def tool_result(number: int, text: str) -> dict[str, Any]:
    """What that call gave."""
    return {"role": "tool", "tool_call_id": f"read-{number}", "content": text}
