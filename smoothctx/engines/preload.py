"""Preload: warm an engine's prefix cache, out of the foreground's way, on unmodified engines.

Three strategies. ``"growing"``: each request extends what the last one cached by one chunk, so that a turn that comes
meanwhile waits for one chunk at most; it asks nothing of the engine. ``"abort"``: one request for all of it, whose
connection is closed when a turn begins; what the turn then waits for is how late the engine notices. ``"timed"``: one
request for as much as is evaluated before a turn is expected, and growing prefixes from then on.

Either way nothing goes out while a turn is in flight or due (or only beside its decode, when time is short), and one
that is under way when a turn begins is aborted. Any number may wait for idle time; few requests go out at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Literal, get_args

from ..foreground import Foreground
from ..usage import Usage
from .completion import running_mean

Strategy = Literal["growing", "abort", "timed"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

#: seconds that one chunk may take, so that a foreground call waits no longer
CHUNK_DELAY_S = 0.1
#: characters of the first chunk, before a rate is known, and of the smallest and the largest one
FIRST_CHUNK = 512
#: characters of a token, before any were counted
TOKEN_CHARS = 4
MIN_CHUNK = 128
MAX_CHUNK = 65_536
#: seconds that a preload takes at most, its waiting for idle time included, whatever the policy says
MAX_WAIT_S = 3600.0
#: tokens after a cut that are not of the view (stubs, and what opens the answer), and some for the estimate's error
_TAIL = 16
#: aborts in a row after which one request for all of it is no way forward, where nothing of it is known to stay
_ABORTS = 3
#: answers in a row that deny that what was evaluated before stayed, after which nothing is sent any more
_MISSES = 3
#: aborts in a row after which what an earlier run has warmed is taken for evicted: it is warmed again chunk by chunk
_EVICTED = 2
#: tokens that a server may need to cache anything, where its answers have not shown yet that it takes fewer
_GRAIN = 1024
#: so many times a chunk is what a request may add where the answers confirm that it is cached already
_STRIDE = 4

Messages = Sequence[Mapping[str, Any]]
Send = Callable[[Messages], Awaitable[Any]]


@dataclass(slots=True)
class Warmth:
    """What is known to be warm of one view, in one place: a slot, or a cache that finds prefixes by their content.

    A later run goes on from it. Whoever uses the place for something else drops it.
    """

    #: what the server has evaluated, without the stubs; its characters, and its tokens as the server counted them
    part: Messages = ()
    done: int = 0
    tokens: int = 0
    #: characters that are likely warm too, of a request that was aborted
    likely: int = 0
    #: characters that the agent's own calls should have left there: gone through in long steps, never taken for warm
    assumed: int = 0
    #: the last answer said that most of what its request added was cached already
    confirmed: bool = False
    #: a request for it went out and was not refused: the place may hold some of it
    begun: bool = False
    #: the last answers in a row that deny that what was evaluated before stayed
    misses: int = 0
    epoch: int = 0  # it was dropped so often
    #: what its requests have used, as far as nobody has taken note of it
    spent: Usage = Usage()

    def drop(self) -> None:
        """Nothing of it is known to be warm any more."""
        self.begun, self.misses, self.epoch, self.assumed = False, 0, self.epoch + 1, 0
        self.restart()

    def restart(self) -> None:
        """It is to be evaluated from the beginning."""
        self.part, self.done, self.tokens, self.likely, self.confirmed = (), 0, 0, 0, False

    def fit(self, messages: Messages) -> None:
        """Keep of it what ``messages`` begin with, too."""
        if not self.done or head(messages, self.done)[0] == self.part:
            return
        part = common(messages, self.part)
        self.part, self.done, self.tokens, self.likely = part, size_of(part), 0, 0

    @property
    def held(self) -> int:
        """Characters that are warm, or likely so."""
        return 0 if self.misses else max(self.done, self.likely)

    def cold(self, messages: Messages) -> float:
        """The share of ``messages`` that is still to be evaluated, as far as can be told."""
        return max(0.0, 1 - self.held / max(1, size_of(messages)))

    def covers(self, messages: Messages, spare: int) -> bool:
        """Is it the beginning of ``messages``, with at most ``spare`` characters behind it?"""
        if not self.done or self.misses or size_of(messages) - self.done > spare:
            return False
        return head(messages, self.done)[0] == self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadReport:
    """What a preload did. ``complete``: the whole view was evaluated, by the server's own answer.

    ``tokens`` is the size of the last prompt as the server counted it; ``aborted`` counts requests that gave way
    to the foreground.
    """

    complete: bool
    tokens: int = 0
    requests: int = 0
    aborted: int = 0
    usage: Usage = Usage()


class Preloader:
    """Warms one session's views, and learns the engine's prefill rate from it.

    Args:
        strategy: one of ``STRATEGIES``, or what gives the present one.
        chunk_delay_s: seconds that one chunk of a growing preload may cost a foreground call.
        clock: seconds.
        block_tokens: gives the size of the engine's cache blocks, where known. A chunk ends at the end of a block,
            since only whole blocks are reused, and is one block at least, however slow the engine.
    """

    def __init__(
        self,
        *,
        strategy: Strategy | Callable[[], Strategy] = "growing",
        chunk_delay_s: float = CHUNK_DELAY_S,
        clock: Callable[[], float] = time.perf_counter,
        block_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._strategy = strategy
        self._delay = chunk_delay_s
        self._now = clock
        self._block = block_tokens
        #: measured prefill rate, tokens per second
        self.rate: float | None = None
        self._speed: float | None = None  # the same in new characters per second
        self._expected: float | None = None  # the same, before the first was measured
        self._last = FIRST_CHUNK
        self._per_token: float | None = None  # characters
        self._grain: int | None = None  # the fewest tokens that an answer reported as cached

    async def run(
        self,
        send: Send,
        view: Callable[[], Messages],
        *,
        foreground: Foreground,
        needed: Callable[[], bool],
        hurried: Callable[[float | None], bool] = lambda rate: False,
        keeps: bool = False,
        may: Callable[[], bool] = lambda: True,
        warmth: Warmth | None = None,
        known_rate: float | None = None,
        quiet: Callable[[], float | None] = lambda: None,
    ) -> PreloadReport:
        """Warm ``view()`` until nothing is left of it, until it is not needed any more, or until the server's answers
        have shown that nothing stays.

        ``hurried(rate)`` says that idle time alone is too little at that rate (tokens per second); work then goes on
        beside the foreground's decode. ``keeps``: the engine is known to keep what an aborted request evaluated.
        ``may()`` is asked before each request, last of all, and whenever the foreground changes. ``warmth``: what is
        warm already, from which this goes on, and what it has come to at the end. ``known_rate``: tokens per second
        that the engine's other calls showed, for as long as none was measured here. ``quiet()``: seconds for which no
        turn is expected, if known.

        Raises:
            Exception: whatever ``send`` raises, as it is.
        """
        if known_rate is not None:
            self._expected = known_rate * TOKEN_CHARS
        warmth = Warmth() if warmth is None else warmth
        carried = warmth.done > 0
        requests, aborted, in_row = 0, 0, 0
        usage = Usage()
        complete = False

        def allowed() -> bool:
            idle = not foreground.busy or (not foreground.prefilling and hurried(self.rate))
            return foreground.room and idle and may()

        while needed():
            messages = view()
            warmth.fit(messages)
            total = size_of(messages)
            if warmth.misses >= _MISSES:
                break
            if warmth.done >= total and not warmth.misses:  # else it is sent once more: did it stay now?
                complete = True
                break
            await foreground.wait_until(lambda: not needed() or allowed())
            if not needed():
                break
            done, tokens, epoch = warmth.done, warmth.tokens, warmth.epoch
            long = keeps or in_row < _ABORTS
            part, upto = head(messages, self._upto(warmth, total, quiet()) if long else self._end(warmth, total))
            prompt = valid(part, messages)  # whole, it may end with a call that still runs
            started = self._now()
            before, warmth.begun = warmth.begun, True
            try:
                with foreground.warming():
                    reply = await foreground.unless(
                        lambda: foreground.prefilling or not needed(), partial(send, prompt)
                    )
            except Exception:  # refused: of this request the place holds nothing
                if warmth.epoch == epoch:
                    warmth.begun = before
                raise
            if reply is None:
                aborted, in_row = aborted + 1, in_row + 1
                if keeps and (speed := self._speed or self._expected) is not None and warmth.epoch == epoch:
                    more = int(speed * (self._now() - started))
                    warmth.likely = min(upto, max(done, warmth.likely) + more)
                if carried and not requests and in_row >= _EVICTED:
                    warmth.restart()
                continue
            requests, in_row = requests + 1, 0
            usage, warmth.spent = usage + reply.usage, warmth.spent + reply.usage
            if upto > done:
                self._learn(upto - done, upto, reply.usage, self._now() - started, alone=not foreground.busy)
                more = reply.usage.input_tokens - tokens
                if tokens and more > 0:
                    self._per_token = running_mean(self._per_token, max(0.25, (upto - done) / more))
            if warmth.epoch != epoch:
                continue  # what it went to is used for something else by now
            self._judge(warmth, reply.usage)
            warmth.confirmed = _found(reply.usage, tokens)
            warmth.part, warmth.done, warmth.tokens, warmth.likely = part, upto, reply.usage.input_tokens, 0
        return PreloadReport(complete=complete, tokens=warmth.tokens, requests=requests, aborted=aborted, usage=usage)

    def _judge(self, warmth: Warmth, usage: Usage) -> None:
        """Did what was evaluated before stay, by this answer? Where it cannot tell, nothing changes."""
        cached, block = usage.cached_tokens, self._block()
        if cached is None:
            return
        if cached:
            self._grain = min(cached, self._grain or cached)
        grain = block or self._grain or _GRAIN
        expected = (warmth.tokens - _TAIL) // grain * grain
        if expected > 0:
            warmth.misses = 0 if cached >= expected / 2 else warmth.misses + 1

    def _upto(self, warmth: Warmth, total: int, quiet_s: float | None) -> int:
        """Characters of the next request's prefix, where a long one may be sent."""
        strategy = self._strategy if isinstance(self._strategy, str) else self._strategy()
        end, speed = self._end(warmth, total), self._speed or self._expected
        if strategy == "abort" or (strategy == "timed" and quiet_s is None):
            return total
        if strategy == "growing" or quiet_s is None or speed is None:  # the first chunk tells the speed
            return end
        chunk = max(self._chunk(), self._block_chars())
        end = max(end, max(warmth.done, warmth.likely) + max(chunk, int(min(total, speed * quiet_s))))
        return total if total - end <= chunk // 4 else end

    def _end(self, warmth: Warmth, total: int) -> int:
        """Characters of the next of growing prefixes."""
        chunk, done, tokens = self._chunk(), warmth.done, warmth.tokens
        if total - done <= chunk * 1.25:
            return total
        if warmth.confirmed and done < warmth.assumed:
            return min(warmth.assumed, done + _STRIDE * max(chunk, self._block_chars()))
        block = self._block()
        if not block or block == 1 or self._per_token is None:
            return done + chunk
        # The end of a block that the chunk's time allows, but always one more than is warm; and a little further, since
        # the size of the chunk is an estimate, and a block that is just missed is evaluated twice.
        blocks = max(tokens // block + 1, int(tokens + chunk / self._per_token) // block)
        if blocks * block - tokens < block // 4:
            blocks += 1
        step = blocks * block - tokens
        return min(total, done + max(MIN_CHUNK, round((step + _TAIL + step // 8) * self._per_token)))

    def _block_chars(self) -> int:
        return int((self._block() or 0) * (self._per_token or TOKEN_CHARS))

    def _chunk(self) -> int:
        speed = self._speed or self._expected
        if speed is None:
            return FIRST_CHUNK
        # What the server had cached already looks fast: grow step by step.
        return max(MIN_CHUNK, min(MAX_CHUNK, 2 * self._last, int(speed * self._delay)))

    def _learn(self, sent: int, upto: int, usage: Usage, seconds: float, *, alone: bool) -> None:
        """Take one request: only what was really evaluated says something of the rate."""
        self._last = max(MIN_CHUNK, sent)
        if seconds <= 0:
            return
        new, known = sent, usage.input_tokens > 0 and usage.cached_tokens is not None
        if known:
            assert usage.cached_tokens is not None
            evaluated = usage.input_tokens - usage.cached_tokens
            new = min(sent, upto * evaluated // usage.input_tokens)
            if alone and evaluated >= 64:
                self.rate = running_mean(self.rate, evaluated / seconds)
        if new >= MIN_CHUNK // 2:
            self._speed = running_mean(self._speed, new / seconds)


@contextmanager
def for_a_while(foreground: Foreground, seconds: float) -> Iterator[Callable[[], bool]]:
    """Inside, on the running loop: is there time left for a preload? Who waits for ``foreground`` asks when it ends."""
    over = False

    def end() -> None:
        nonlocal over
        over = True
        foreground.poke()

    timer = asyncio.get_running_loop().call_later(min(seconds, MAX_WAIT_S), end)
    try:
        yield lambda: not over
    finally:
        timer.cancel()


def _found(usage: Usage, tokens: int) -> bool:
    """Was most of what a request added to the ``tokens`` before it found in the cache, by this answer?"""
    cached = usage.cached_tokens
    return cached is not None and 2 * (usage.input_tokens - cached) <= usage.input_tokens - tokens


def _size(message: Mapping[str, Any]) -> int:
    """Characters of a message's text and calls, at least one."""
    content = message.get("content")
    size = len(content) if isinstance(content, str) else 0
    if isinstance(content, list):
        size = sum(len(p["text"]) for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str))
    for call in message.get("tool_calls") or ():
        size += len(str(call))
    return max(1, size)


def size_of(messages: Messages) -> int:
    """Characters of a conversation, as preloads count them."""
    return sum(map(_size, messages))


def common(messages: Messages, others: Messages) -> list[Mapping[str, Any]]:
    """Those with which both begin."""
    both = zip(messages, others, strict=False)
    return [mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], both)]


def head(messages: Messages, size: int) -> tuple[list[Mapping[str, Any]], int]:
    """The first ``size`` characters of a conversation, and how many they are.

    Whole messages, the last one cut where its text allows; else it is taken whole.
    """
    taken: list[Mapping[str, Any]] = []
    done = 0
    for message in messages:
        own = _size(message)
        left = size - done
        if left <= 0 and taken:
            break
        content = message.get("content")
        if own > left > 0 and isinstance(content, str) and not message.get("tool_calls"):
            taken.append({**message, "content": content[:left]})
            return taken, size
        taken.append(message)
        done += own
    return taken, done


def valid(part: Sequence[Mapping[str, Any]], messages: Messages) -> list[Mapping[str, Any]]:
    """A cut conversation that servers accept: a result for each call, a user's message, and no reply at the end.

    A prompt that ends with the assistant's reply is refused by llama.cpp with a thinking model and by some APIs, and
    others go on writing that reply. The stubs stand after the cut, so what was evaluated before it stays the prefix of
    the whole.
    """
    fixed = list(part)
    last = max((k for k, m in enumerate(part) if m.get("tool_calls")), default=None)
    if last is not None and all(m.get("role") == "tool" for m in part[last + 1 :]):
        answered = {m.get("tool_call_id") for m in part[last + 1 :]}
        for call in part[last]["tool_calls"]:
            if call.get("id") not in answered:
                fixed.append({"role": "tool", "tool_call_id": call.get("id"), "content": ""})
    asked = any(m.get("role") == "user" for m in part) or not any(m.get("role") == "user" for m in messages)
    if not asked or (fixed and fixed[-1].get("role") == "assistant"):
        fixed.append({"role": "user", "content": "."})
    return fixed
