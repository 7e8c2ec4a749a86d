"""A client for OpenAI-compatible model servers: completions, streams with TTFT, prefill, what the server can do.

Wire format: the OpenAI chat completions API with ``stream_options.include_usage``; cached prompt tokens are
read from ``usage.prompt_tokens_details.cached_tokens`` and are ``None`` where the server does not report them.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import httpx

from ..errors import ConfigurationError, EngineProtocolError, EngineRefused, EngineUnreachable
from .binding import Binding, EngineBinding, Prepared
from .completion import Completion, Rates, Stream
from .flavours import Capabilities, Level, probe
from .http import Server
from .load import Load, read_load, read_slots
from .preload import CHUNK_DELAY_S, STRATEGIES, Preloader, Strategy
from .slot_table import SlotTable
from .slots import SlotBinding
from .wire import read_events, refused_option, without_delivery

__all__ = ("Completion", "OpenAIEngine", "Rates", "Stream")

_CHAT = "/v1/chat/completions"
#: the option that caps an answer, and what hosted reasoning models want instead
_CAP, _NEW_CAP = "max_tokens", "max_completion_tokens"
#: tokens by which prefixes grow at least on llama.cpp: with what stands behind the cut about a batch of 128
LLAMA_PART = 100
#: a refusal of the option's name, unlike one of its value ("max_tokens or max_completion_tokens is too large")
_UNSUPPORTED = re.compile(r"unsupported|not supported|instead|unrecogni[sz]ed|unknown|deprecated", re.IGNORECASE)


class OpenAIEngine(Server):
    """An OpenAI-compatible server (llama.cpp, vLLM, SGLang, a hosted API).

    Args:
        base_url: with or without ``/v1``, such as ``http://127.0.0.1:8000/v1``.
        model: the model's name as the server knows it.
        api_key: sent as a bearer token.
        context_window: the model's window in tokens, where known.
        timeout_s: seconds without any byte from the server before the call fails.
        preload: warm the cache ahead of a commit by default (one's own server: yes; a paid API: no). ``None``: as
            ``probe`` finds, and no before it.
        preload_strategy: ``"growing"`` prefixes, one request that is aborted when a turn begins (``"abort"``), or one
            for as long as no turn is expected (``"timed"``). ``None``: what suits the server, see ``Preloader``.
        chunk_delay_s: seconds that one chunk of a growing preload may cost a turn.
        cache_salt: keeps this client's cached prefixes apart from those of other users of a shared vLLM; sent only
            where ``probe`` found that it is understood.
        client: an ``httpx.AsyncClient`` of your own; it is not closed by us.
        clock: seconds, for every time that is measured here.

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
        preload: bool | None = None,
        preload_strategy: Strategy | None = None,
        chunk_delay_s: float = CHUNK_DELAY_S,
        cache_salt: str | None = None,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(base_url, api_key=api_key, timeout_s=timeout_s, client=client)
        if not isinstance(model, str) or not model:
            raise ConfigurationError(f"model={model!r}: expected the model's name as the server knows it")
        if preload_strategy not in (None, *STRATEGIES):
            known = ", ".join(map(repr, STRATEGIES))
            raise ConfigurationError(f"preload_strategy={preload_strategy!r}: expected {known} or None")
        if context_window is not None and (
            isinstance(context_window, bool) or not isinstance(context_window, int) or context_window < 1
        ):
            raise ConfigurationError(f"context_window={context_window!r}: expected a number of tokens above 0, or None")
        if preload is not None and not isinstance(preload, bool):
            raise ConfigurationError(f"preload={preload!r}: expected True, False or None")
        number = isinstance(chunk_delay_s, int | float) and not isinstance(chunk_delay_s, bool)
        if not number or not 0 < chunk_delay_s < math.inf:
            raise ConfigurationError(f"chunk_delay_s={chunk_delay_s!r}: expected seconds above 0")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ConfigurationError("cache_salt: expected a text that is not empty, or None (its value is not shown)")
        self.model = model
        self.context_window = context_window
        self.preload_by_default = bool(preload)
        #: calls of transforms that it gets at once; of a llama.cpp server as many as it has slots, once that is known
        self.max_in_flight: int | None = None
        #: what ``probe`` found; ``None`` before it
        self.capabilities: Capabilities | None = None
        #: what the calls so far showed of the server
        self.rates = Rates()
        #: seconds, as everything here is timed
        self.clock = clock
        self._preload = preload
        self._strategy: Strategy | None = preload_strategy
        self._chunk_delay_s = chunk_delay_s
        self._salt = cache_salt
        self._cap = _CAP
        self._streams: set[Stream] = set()  # answers that come in now
        self._table: SlotTable | None = None
        self._binding = threading.Lock()

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
        async with _prepared(messages, options) as ready:
            body: dict[str, Any] = {
                "model": self.model,
                "messages": list(messages),
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.salt_options(),
                **ready.options,
            }
            if max_tokens is not None:
                body[self._cap] = max_tokens
            async with self._ask(body) as (started, response):
                async with aclosing(read_events(response, self.url)) as events:
                    stream = Stream(
                        events,
                        self.clock,
                        self.url,
                        self.rates,
                        started=started,
                        prompt=messages,
                        evaluated=ready.evaluated,
                    )
                    self._streams.add(stream)
                    try:
                        yield stream
                    finally:
                        self._streams.discard(stream)
                    self._saw(stream.completion)
                    if stream.completion is not None:
                        ready.seen(stream.completion.usage)

    @asynccontextmanager
    async def _ask(self, body: dict[str, Any]) -> AsyncGenerator[tuple[float, httpx.Response]]:
        """Post it, and once more where the server refuses the name of the cap and says the one that it takes: when
        it was sent, and the response."""
        async with AsyncExitStack() as stack:
            started = self.clock()  # a server may send even its headers with the first token only
            try:
                response = await stack.enter_async_context(self._post(_CHAT, body))
            except EngineRefused as refused:
                if not _wants_new_cap(refused, body):
                    raise
                self._cap = _NEW_CAP
                body = {(_NEW_CAP if name == _CAP else name): value for name, value in body.items()}
                started = self.clock()
                response = await stack.enter_async_context(self._post(_CHAT, body))
            yield started, response

    async def prefill(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        """Evaluate a prompt so that the server caches it: one token is generated, since some servers refuse zero.

        Options of the agent's own request that shape only its output's length and delivery are left out.

        Raises:
            EngineError: see its subclasses.
        """
        return await self.complete(messages, max_tokens=1, **without_delivery(options))

    async def probe(self, *, timeout_s: float = 5.0, again: bool = False) -> Capabilities:
        """Find out which server this is and what it can do, and remember it; a second call gives what is known.

        Everything is asked at once, and whatever fails or takes too long counts as missing. On vLLM, and on SGLang
        with priority scheduling, one short completion is among it: only that shows that a priority is accepted.

        Raises:
            EngineUnreachable: when no server is there, or it is not ready.
        """
        if self.capabilities is None or again:
            found = await probe(self, timeout_s)
            self.capabilities = found
            if self.context_window is None:
                self.context_window = found.context_window
            if self._preload is None:
                self.preload_by_default = found.preload
            if self.max_in_flight is None and found.slots:
                self.max_in_flight = found.slots
        return self.capabilities

    async def load(self, *, timeout_s: float = 2.0) -> Load:
        """How busy the server is now, as far as it says.

        Raises:
            EngineUnreachable: when it does not answer within ``timeout_s`` seconds.
        """
        load = Load()
        with anyio.move_on_after(timeout_s) as scope:
            answer = await self.fetch("/metrics")
            load = read_load(answer.text) if answer.status == 200 else load
            if not load.known and (self.capabilities is None or self.capabilities.flavour == "llama.cpp"):
                answer = await self.fetch("/slots")
                load = read_slots(answer.json()) if answer.status == 200 else load
        if scope.cancelled_caught:
            raise EngineUnreachable(f"{self.root}: no word of its load within {timeout_s:g} s")
        return load

    async def tokenize(self, text: str) -> list[int]:
        """The model's own tokens of a text, without special ones (vLLM, SGLang, llama.cpp).

        Raises:
            EngineRefused: when the server does not tell.
            EngineError: see its subclasses.
        """
        body = {"model": self.model, "content": text, "prompt": text}
        found = await self.post_json("/tokenize", {**body, "add_special": False, "add_special_tokens": False})
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(t, int) for t in tokens):
            raise EngineProtocolError(f"{self.url}: expected tokens, got {str(found)[:80]}")
        return tokens

    async def count_tokens(self, text: str) -> int:
        """How many tokens the model's own tokenizer makes of a text; see ``tokenize``.

        Raises:
            EngineError: see its subclasses.
        """
        return len(await self.tokenize(text))

    def priority_options(self, level: Level) -> dict[str, int]:
        """The request option for this level of ``foreground > promoted > lookahead``; nothing where unsupported."""
        return self.capabilities.priority_options(level) if self.capabilities is not None else {}

    def salt_options(self) -> dict[str, str]:
        """The cache salt as a request option; nothing where there is none, or no server that understands it."""
        known = self.capabilities
        return {"cache_salt": self._salt} if self._salt and known is not None and known.cache_salt else {}

    def _saw(self, completion: Completion | None) -> None:
        """An answer that tells how much was cached shows that the server does."""
        known = self.capabilities
        if completion is not None and known is not None and not known.cached_tokens:
            if completion.usage.cached_tokens is not None:
                self.capabilities = replace(known, cached_tokens=True)

    def bind(self, session_id: str) -> EngineBinding:
        """One session's relation to this engine (preload, options of its calls).

        Slots of its own where ``probe`` found a llama.cpp server with two or more. Each engine object hands out all of
        them: share one among all sessions on a server.
        """
        known = self.capabilities
        if known is None or not known.slotted:
            return Binding(self, session_id, preloader=self.preloader())
        with self._binding:  # sessions bind in threads of their own, and two tables would hand out the same slots
            if self._table is None:
                self._table = SlotTable(known.slots)
        return SlotBinding(self, self._table, session_id, preloader=self.preloader())

    def preloader(self) -> Preloader:
        """What warms this engine for one session: see ``Preloader``."""
        return Preloader(
            strategy=self._choose, chunk_delay_s=self._chunk_delay_s, clock=self.clock, block_tokens=self._block
        )

    def _choose(self) -> Strategy:
        if self._strategy is not None:
            return self._strategy
        # Measured (docs/engines.md): beside growing prefixes a turn comes about 0.1 s later, beside one request 0.6 to
        # 1.2 s. llama.cpp has long requests nevertheless while one session is open and expects no turn: small ones cost
        # it a third of its rate, and it keeps what it did. But it notices a closed connection only while it streams to
        # nobody else.
        alone = not self._streams and (self._table is None or self._table.sessions < 2)
        return "timed" if self._llama and alone else "growing"

    def _block(self) -> int | None:
        if self._llama:
            return LLAMA_PART
        return self.capabilities.block_size if self.capabilities is not None else None

    @property
    def _llama(self) -> bool:
        return self.capabilities is not None and self.capabilities.flavour == "llama.cpp"

    async def __aenter__(self) -> OpenAIEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.root!r}, {self.model!r})"


def _wants_new_cap(refused: EngineRefused, body: Mapping[str, Any]) -> bool:
    named = refused_option(refused, (_CAP,)) and refused_option(refused, (_NEW_CAP,))
    return bool(named) and _CAP in body and _NEW_CAP not in body and _UNSUPPORTED.search(str(refused)) is not None


@asynccontextmanager
async def _prepared(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> AsyncGenerator[Prepared]:
    """A binding may prepare a background call: its ``lookahead`` option makes such a context of messages, options."""
    prepare = options.get("lookahead")
    if prepare is None:
        yield Prepared(options)
        return
    rest = {k: v for k, v in options.items() if k != "lookahead"}
    async with prepare(messages, rest) as own:
        yield replace(own, options={**rest, **own.options})
