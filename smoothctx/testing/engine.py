"""A fake engine with an exact prefix cache, on the loop's clock."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from ..codec import Codec, OpenAIMessages
from ..economics import Speed
from ..engines.binding import Binding
from ..engines.client import Completion, Rates
from ..engines.flavours import Capabilities, Level
from ..engines.load import Load
from ..engines.preload import Preloader
from ..engines.wire import without_delivery
from ..errors import ClosedError, ConfigurationError, EngineProtocolError, EngineRefused, EngineUnreachable
from ..usage import Usage
from .cache import BlockCache, Cache, SlotCache
from .faults import Faults
from .models import Script
from .requests import valid_request
from .turnstile import Turnstile

#: characters of a message's canonical form that make one token
TOKEN_CHARS = 4
#: options that are written into the prompt, before the messages
_IN_PROMPT = ("tools", "chat_template_kwargs")


@dataclass(slots=True)
class EngineCall:
    """One call as the engine saw it. Times are the loop's seconds; ``None`` for what never happened.

    ``outcome`` is ``"running"``, ``"done"``, ``"failed"`` or ``"cancelled"``.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None
    options: dict[str, Any]
    arrived_s: float
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = "running"


class FakeStream:
    """A running completion: iterate over its text; ``completion`` is there when the iteration has ended.

    ``on_token`` may be set before: it is called whenever a token comes.
    """

    def __init__(self, pieces: AsyncGenerator[str | Completion]) -> None:
        self._pieces = pieces
        self.completion: Completion | None = None
        self.on_token: Callable[[], object] | None = None

    async def __aiter__(self) -> AsyncGenerator[str]:
        async for piece in self._pieces:
            if isinstance(piece, Completion):
                self.completion = piece
            elif piece:
                if self.on_token is not None:
                    self.on_token()
                yield piece

    async def drain(self) -> Completion:
        """Read to the end and return the completion."""
        async for _ in self:
            pass
        assert self.completion is not None
        return self.completion


class _LoopBinding(Binding):
    """A binding whose preload measures on the loop's clock, as the engine does."""

    def __init__(self, engine: FakeEngine, session_id: str) -> None:
        super().__init__(engine, session_id)
        self._preloader = Preloader(clock=lambda: asyncio.get_running_loop().time())


class FakeEngine:
    """An engine in this process, exact enough to count by. For use on one event loop, best a virtual one.

    *Tokens.* A message is one token that opens it, one for each four characters of its canonical form, and one that
    closes it; a prompt ends with one that opens the answer. ``tools`` and ``chat_template_kwargs`` stand before the
    messages; ``cache_salt`` adds no tokens and separates the caches.

    *Prefill* is serial: one prompt at a time, in order of arrival, without regard to who asks (with ``priority``: the
    lowest ``priority`` of those that wait goes first, 0 where a request has none). The cached part of a prompt takes
    no time, the rest ``1 / speed.prefill_tokens_per_s`` seconds a token. Nothing interrupts it but its own
    cancellation, and what was evaluated until then stays cached.

    *Decode* is batched: calls neither slow each other nor a prefill, nor does a prefill slow them. The first token
    is there when the prefill ends. Each further one takes ``1 / speed.decode_tokens_per_s`` seconds, plus
    ``speed.attention_s`` for each token of its context. A streamed token is made when it is asked for.

    *Cache*: with ``slots``, that many sequences (a call occupies a slot from its prefill to its end, and the option
    ``id_slot`` chooses one); else blocks found by content, at most ``cache_blocks`` of them, the least recently used
    go first. Only whole blocks of ``block_tokens`` are reused, and never the last token of a prompt. The answer is
    cached too, without its last token, which was never evaluated. ``usage`` reports exactly what was reused.

    Args:
        answers: as for :class:`FakeModel`, texts only. A call for one token takes none of them.
        speed: what it can do.
        block_tokens: tokens in a block of the cache.
        slots: number of slots.
        cache_blocks: blocks that stay cached, ``None`` for all.
        context_window: tokens that prompt and answer may have together; a longer prompt is refused.
        reports_cache: say in ``usage`` how much was cached, as not every server does.
        preload: warm the cache ahead of a commit by default.
        priority: requests wait for their prefill in the order of their ``priority``, and ``capabilities`` say so.
        metrics: ``load()`` tells how many calls run and wait, and ``capabilities`` say so.
        strict: refuse what :func:`valid_request` finds fault with.
        identity: URL and model.
        codec: how to read the messages.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        *answers: Any,
        speed: Speed | None = None,
        block_tokens: int = 16,
        slots: int | None = None,
        cache_blocks: int | None = None,
        context_window: int | None = None,
        reports_cache: bool = True,
        preload: bool = True,
        priority: bool = False,
        metrics: bool = False,
        strict: bool = False,
        identity: str = "fake://engine#fake",
        codec: Codec | None = None,
    ) -> None:
        sizes = {"block_tokens": block_tokens, "slots": slots, "cache_blocks": cache_blocks}
        for option, value in {**sizes, "context_window": context_window}.items():
            needed = option == "block_tokens"
            if (value is None and needed) or (value is not None and not _whole(value)):
                raise ConfigurationError(
                    f"{option}={value!r}: expected a whole number of at least 1{'' if needed else ', or None'}"
                )
        if slots is not None and cache_blocks is not None:
            raise ConfigurationError(f"slots={slots} and cache_blocks={cache_blocks}: the cache is of one kind only")
        self.identity = identity
        self.speed = speed if speed is not None else Speed(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0)
        self.context_window = context_window
        self.preload_by_default = preload
        self.reports_cache = reports_cache
        self.strict = strict
        #: what its calls showed of it, as for a real engine
        self.rates = Rates()
        #: what goes wrong in the next calls
        self.faults = Faults(lambda: EngineUnreachable(f"cannot connect to {identity}"))
        #: every call, in order of arrival
        self.calls: list[EngineCall] = []
        self._codec = codec if codec is not None else OpenAIMessages()
        self._script = Script(answers)
        self._slots = slots
        self._cache: Cache = SlotCache(slots, block_tokens) if slots else BlockCache(cache_blocks, block_tokens)
        self._prefill = Turnstile()  # the one unit that evaluates prompts
        #: what a probe of a server like this one finds
        self.capabilities = Capabilities(
            context_window=context_window,
            priority="lower" if priority else None,
            priority_sure=priority,
            preload=preload,
            slots=slots or 0,
            metrics=metrics,
            cached_tokens=reports_cache,
            block_size=block_tokens,
        )
        self._closed = False

    # -- tokens ------------------------------------------------------------------------------------------------------

    def count(self, messages: Sequence[Any]) -> int:
        """Tokens of these messages in a prompt: fit for ``Policy(token_counter=)``. A prompt has one more."""
        return sum(len(self._message(m)) for m in messages)

    def prompt(self, messages: Sequence[Any], **options: Any) -> list[Hashable]:
        """The prompt's tokens, as the cache compares them."""
        head = {name: options[name] for name in _IN_PROMPT if options.get(name)}
        tokens: list[Hashable] = []
        if head:
            tokens += _chunks(json.dumps(head, sort_keys=True, ensure_ascii=False, default=repr))
        for message in messages:
            tokens += self._message(message)
        tokens.append(("open", "assistant"))
        if options.get("cache_salt"):
            tokens[0] = ("salt", options["cache_salt"], tokens[0])
        return tokens

    def _message(self, message: Any) -> list[Hashable]:
        role = self._codec.role(message)
        text = self._codec.visible(message).decode("utf-8", "surrogatepass").removeprefix(f"{role}:")
        return [("open", role), *_chunks(text), ("close",)]

    # -- calls -------------------------------------------------------------------------------------------------------

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> Completion:
        """One completion.

        Raises:
            EngineError: see :attr:`faults`; also for a prompt that a server would refuse.
        """
        async with self.stream(messages, max_tokens=max_tokens, **options) as stream:
            return await stream.drain()

    async def prefill(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Completion:
        """Evaluate a prompt into the cache; one token is generated, as servers demand.

        Raises:
            EngineError: as :meth:`complete`.
        """
        return await self.complete(messages, max_tokens=1, **without_delivery(options))

    @asynccontextmanager
    async def stream(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **options: Any
    ) -> AsyncGenerator[FakeStream]:
        """A streamed completion: ``async with engine.stream(messages) as s: async for text in s: ...``.

        Raises:
            EngineError: as :meth:`complete`.
        """
        if self._closed:
            raise ClosedError(f"{self!r} was closed")
        own = copy.deepcopy([dict(m) for m in messages])
        call = EngineCall(own, max_tokens, dict(options), asyncio.get_running_loop().time())
        self.calls.append(call)
        try:
            garbage = await self.faults.strike()
            tokens = self._check(call)
            async with aclosing(self._generate(call, tokens, garbage)) as pieces:
                yield FakeStream(pieces)
            if call.outcome == "running":
                call.outcome = "cancelled"  # nobody read it to its end
        except BaseException as error:
            call.outcome = "failed" if isinstance(error, Exception) else "cancelled"
            raise
        finally:
            call.ended_s = asyncio.get_running_loop().time()

    def _check(self, call: EngineCall) -> list[Hashable]:
        """The prompt's tokens; refuses what a server refuses."""
        faults: list[str] = valid_request(call.messages, codec=self._codec) if self.strict else []
        if call.max_tokens is not None and call.max_tokens < 1:
            faults.append(f"max_tokens={call.max_tokens}: expected at least 1")
        slot = call.options.get("id_slot")
        if slot is not None and self._slots is not None and slot not in range(self._slots):
            faults.append(f"id_slot={slot!r}: there are {self._slots} slots")
        if faults:
            raise EngineRefused(f"{self.identity}: HTTP 400: {'; '.join(faults)}", status=400)
        tokens = self.prompt(call.messages, **call.options)
        call.input_tokens = len(tokens)
        if self.context_window is not None and len(tokens) >= self.context_window:
            said = f"the prompt has {len(tokens)} tokens, the context window {self.context_window}"
            raise EngineRefused(f"{self.identity}: HTTP 400: {said}", status=400)
        return tokens

    async def _generate(
        self, call: EngineCall, tokens: list[Hashable], garbage: bool
    ) -> AsyncGenerator[str | Completion]:
        loop = asyncio.get_running_loop()
        lane = await self._cache.take(tokens, call.options.get("id_slot") if self._slots else None)
        evaluated = 0
        written: list[Hashable] = []
        try:
            rank = int(call.options.get("priority", 0)) if self.capabilities.priority else 0
            async with self._prefill.turn(rank):
                call.prefill_s = loop.time()
                call.cached_tokens = evaluated = lane.open(tokens)
                try:
                    await anyio.sleep((len(tokens) - evaluated) / self.speed.prefill_tokens_per_s)
                    evaluated = len(tokens)
                finally:
                    if evaluated < len(tokens) and math.isfinite(self.speed.prefill_tokens_per_s):
                        done = (loop.time() - call.prefill_s) * self.speed.prefill_tokens_per_s
                        evaluated = min(len(tokens), evaluated + int(done))
                    lane.keep(tokens[:evaluated])
            call.first_token_s = loop.time()
            if garbage:
                raise EngineProtocolError(f"{self.identity}: the stream is not JSON: b'<html>'")
            chunks = _chunks(self._answer(call))
            limit = min(call.max_tokens or math.inf, (self.context_window or math.inf) - len(tokens))
            whole = len(chunks) < limit
            out: list[Hashable] = [*chunks]
            out = [*out, ("close",)] if whole else out[: int(limit)]
            for k, token in enumerate(out):
                if k:
                    context = len(tokens) + k
                    await anyio.sleep(1 / self.speed.decode_tokens_per_s + context * self.speed.attention_s)
                written.append(token)
                call.output_tokens = len(written)
                yield token if isinstance(token, str) else ""
            call.outcome = "done"
            yield self._completion(call, "".join(t for t in out if isinstance(t, str)), "stop" if whole else "length")
        finally:
            if written:
                lane.keep([*tokens, *written[:-1]])
            self._cache.give(lane)

    def _answer(self, call: EngineCall) -> str:
        if call.max_tokens == 1:
            return "."  # a prefill: it takes no answer from the script
        answer = self._script.next(call.messages)
        if not isinstance(answer, str):
            raise EngineProtocolError(f"{self.identity}: the answer is of type {type(answer).__name__}")
        return answer

    def _completion(self, call: EngineCall, text: str, finish: str) -> Completion:
        now = asyncio.get_running_loop().time()
        usage = Usage(
            input_tokens=call.input_tokens,
            output_tokens=call.output_tokens,
            cached_tokens=call.cached_tokens if self.reports_cache else None,
            calls=1,
        )
        completion = Completion(
            text=text,
            usage=usage,
            finish_reason=finish,
            ttft_s=(call.first_token_s or now) - call.arrived_s,
            total_s=now - call.arrived_s,
        )
        self.rates.learn(completion)
        return completion

    # -- the rest of an engine ---------------------------------------------------------------------------------------

    def priority_options(self, level: Level) -> dict[str, int]:
        """The request option for this level of ``foreground > promoted > lookahead``; nothing where unsupported."""
        return self.capabilities.priority_options(level)

    def salt_options(self) -> dict[str, str]:
        """It has no salt of its own: a request's ``cache_salt`` does."""
        return {}

    async def load(self, *, timeout_s: float = 2.0) -> Load:
        """The calls whose prompt is or was evaluated, and those that wait for it."""
        live = [call for call in self.calls if call.outcome == "running"]
        waiting = sum(call.prefill_s is None for call in live)
        return Load(running=len(live) - waiting, waiting=waiting) if self.capabilities.metrics else Load()

    def bind(self, session_id: str) -> Binding:
        """One session's relation to this engine: preload by growing prefixes."""
        return _LoopBinding(self, session_id)

    async def aclose(self) -> None:
        """Refuse further calls."""
        self._closed = True

    async def disconnect(self) -> None:
        """There are no connections."""

    async def __aenter__(self) -> FakeEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"FakeEngine({self.identity!r}, calls={len(self.calls)})"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _chunks(text: str) -> list[str]:
    return [text[k : k + TOKEN_CHARS] for k in range(0, len(text), TOKEN_CHARS)]
