"""Examine: ask a server what it can do, and measure what it does."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from ..engines import Capabilities, OpenAIEngine
from ..engines.load import Load
from ..engines.wire import dicts
from ..errors import ConfigurationError, EngineError
from . import positions
from .advice import FLAGS
from .asking import HEAD, MIDDLE, Asking, Call
from .findings import Finding, seconds

#: seconds that a background prompt gets to arrive before the foreground's
_START_S = 0.05
#: looks at a server that may be busy with others all the time
_SETTLE = 40
#: seconds below which a difference between two calls says nothing, however equal the short ones are
_NOISE_S = 0.02
#: what a background request may add to a foreground call's first token: seconds, or a share of it
_ADDED_S, _ADDED = 0.1, 0.15
#: why time told nothing
_TOO_FAST = ": these prompts take no time that could be told from chance; ask again with more --tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is measured: prompts of about ``tokens`` tokens, each case ``repeats`` times.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    tokens: int = 1024
    repeats: int = 3

    def __post_init__(self) -> None:
        for option, value, least in (("--tokens", self.tokens, 64), ("--repeats", self.repeats, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{option} {value!r}: expected a whole number of at least {least}")


@dataclass(slots=True)
class Examination:
    """What was found. ``chars_per_s`` is the measured prefill rate."""

    known: Capabilities
    findings: list[Finding]
    chars_per_s: float | None = None


async def examine(
    engine: OpenAIEngine, settings: Settings | None = None, *, say: Callable[[str], object] = lambda text: None
) -> Examination:
    """Examine a server. ``say`` is told of each step.

    Raises:
        EngineError: when it cannot be reached, or answers no completion.
    """
    settings = settings if settings is not None else Settings()
    say("asking the server what it can do")
    known = await engine.probe(timeout_s=15.0, again=True)
    if known.context_window is not None and settings.tokens * 3 > known.context_window:
        settings = Settings(tokens=max(64, known.context_window // 4), repeats=settings.repeats)
        say(f"prompts of {settings.tokens} tokens: the window is small")
    return await _Doctor(engine, settings, known, say).run()


class _Doctor(Asking):
    def __init__(
        self, engine: OpenAIEngine, settings: Settings, known: Capabilities, say: Callable[[str], object]
    ) -> None:
        super().__init__(engine, known, say)
        self._settings = settings
        self._floor_s = 0.0
        self._noise_s = _NOISE_S  # a prompt's time tells nothing where it is no longer than this

    async def run(self) -> Examination:
        say, repeats = self._say, self._settings.repeats
        say("a short prompt")
        await self._ask(self._text(24))  # what is loaded lazily is there now
        short = [(await self._ask(self._text(24))).ttft_s for _ in range(max(2, repeats))]
        self._floor_s = min(short)
        self._noise_s = max(_NOISE_S, 2 * (max(short) - min(short)))  # half of a prompt's time decides
        text, other = self._text(160), self._text(24)
        more = (await self._ask(text)).tokens - (await self._ask(other)).tokens
        self._per_token = max(1.0, (len(text) - len(other)) / max(1, more))
        cold: list[Call] = []
        again: list[Call] = []
        middle: list[Call] = []
        for k in range(repeats):
            say(f"prefix cache: a prompt of about {self._settings.tokens} tokens, {k + 1} of {repeats}")
            text = self._text(self._settings.tokens)
            cold.append(await self._ask(text))
            again.append(await self._ask(text))
            middle.append(await self._ask(self._replaced(text)))
        cold_s = statistics.median(call.ttft_s for call in cold)
        cache = self._cache(cold, again)
        findings = [cache, self._partial(cold_s, middle, cache.status == "bad"), self._reporting()]
        findings.append(await self._headroom())
        say("load, slots and positions")
        findings += [self._priority(), self._metrics(await self._load()), self._slots(), await self._positions()]
        work_s = cold_s - self._floor_s
        rate = self._settings.tokens * self._per_token / work_s if work_s > self._noise_s else None
        return Examination(self._engine.capabilities or self._known, findings, rate)

    def _advice(self, what: str, otherwise: str) -> str:
        return FLAGS[what].get(self._known.flavour, otherwise)

    # -- what was measured -------------------------------------------------------------------------------------------

    def _cache(self, cold: list[Call], again: list[Call]) -> Finding:
        cold_s, again_s = (statistics.median(c.ttft_s for c in calls) for calls in (cold, again))
        work_s = max(1e-9, cold_s - self._floor_s)
        tokens = round(statistics.median(c.tokens for c in again))
        cached = round(statistics.median(c.cached or 0 for c in again))
        saved = (cold_s - again_s) / work_s
        timed = self._reports or work_s > self._noise_s
        good = cached >= 0.5 * tokens if self._reports else saved >= 0.5
        told = f"{cached:,} of {tokens:,} tokens cached, " if self._reports else f"{tokens:,} tokens, "
        how = "" if self._reports else " (judged by time: the server does not report cached tokens)"
        block = self._known.block_size
        why = (
            f": blocks are of {block} tokens, more than this prompt; ask again with more --tokens"
            if block is not None and block >= tokens
            else ""
        )
        if not timed:
            why = _TOO_FAST
        return Finding(
            name="prefix cache",
            status="unknown" if not timed else "ok" if good else "bad",
            found=f"the same prompt again: {told}TTFT {seconds(cold_s)} -> {seconds(again_s)}{how}{why}",
            advice=""
            if good or not timed
            else self._advice("cache", "use a server that caches prefixes, and send equal prefixes byte for byte"),
            effect_s=None if good or not timed else max(0.0, cold_s - self._floor_s),
            data={
                "cold_s": cold_s,
                "again_s": again_s,
                "short_s": self._floor_s,
                "tokens": tokens,
                "cached_tokens": cached if self._reports else None,
                "block_size": block,
            },
        )

    def _partial(self, cold_s: float, middle: list[Call], off: bool) -> Finding:
        name = "changed middle"
        if off:
            return Finding(name=name, status="unknown", found="nothing is cached that could be kept")
        took = statistics.median(c.ttft_s for c in middle)
        tokens = round(statistics.median(c.tokens for c in middle))
        cached = round(statistics.median(c.cached or 0 for c in middle))
        share = HEAD / (1 - MIDDLE)  # of the new prompt stands before the change
        expected = round(share * tokens)
        work_s = max(1e-9, cold_s - self._floor_s)
        block = self._known.block_size or 1
        counted = self._reports and expected > block
        if not counted and work_s <= self._noise_s:
            return Finding(name=name, status="unknown", found=f"TTFT {seconds(took)} after a change{_TOO_FAST}")
        kept = cached >= 0.6 * expected - block if counted else (cold_s * (1 - MIDDLE) - took) / work_s >= 0.2
        told = f"{cached:,} of the {expected:,} tokens before it stayed cached, " if self._reports else ""
        return Finding(
            name=name,
            status="ok" if kept else "bad",
            found=f"after a change in the middle {told}TTFT {seconds(took)}",
            advice=""
            if kept
            else self._advice("head", "the part before a change is lost too: rewrite seldom, and preload each rewrite"),
            effect_s=None if kept else share * max(0.0, took - self._floor_s),
            data={"ttft_s": took, "tokens": tokens, "cached_tokens": cached if self._reports else None},
        )

    def _reporting(self) -> Finding:
        return Finding(
            name="cache reports",
            status="ok" if self._reports else "warn",
            found="usage.prompt_tokens_details.cached_tokens is reported"
            if self._reports
            else "no answer said how much of its prompt was cached",
            advice=""
            if self._reports
            else self._advice("reports", "hits cannot be told from misses here: judge by TTFT"),
        )

    async def _headroom(self) -> Finding:
        """A call that is cached, alone and beside another prompt's prefill."""
        repeats = self._settings.repeats
        text = self._text(self._settings.tokens // 2)
        await self._ask(text)
        alone: list[float] = []
        beside: list[float] = []
        overlapped = refused = 0
        for k in range(repeats):
            self._say(f"headroom: alone and beside a background request, {k + 1} of {repeats}")
            await self._settle()
            alone.append((await self._ask(text)).ttft_s)
            took, met = await self._beside(text)
            beside.append(took)
            overlapped += met is True
            refused += met is None
        if refused == repeats:
            return Finding(name="headroom", status="unknown", found="the background prompts were refused")
        if not overlapped:
            return Finding(
                name="headroom",
                status="ok",
                found=f"a background prompt of {self._settings.tokens * 2} tokens is done before one can meet it",
                data={"alone_s": statistics.median(alone)},
            )
        alone_s, beside_s = statistics.median(alone), statistics.median(beside)
        added = beside_s - alone_s
        allowed = max(_ADDED_S, _ADDED * alone_s)
        status = "ok" if added <= allowed else "warn" if added <= 5 * allowed else "bad"
        return Finding(
            name="headroom",
            status=status,  # type: ignore[arg-type]
            found=f"a cached call: TTFT {seconds(alone_s)} alone, {seconds(beside_s)} beside one background prefill of "
            f"{self._settings.tokens * 2} tokens",
            advice=""
            if status == "ok"
            else self._advice("headroom", "keep OpenAIEngine(preload_strategy='growing')")
            + "; smoothctx's own preload keeps to chunks that cost a turn about 100 ms",
            effect_s=None if status == "ok" else added,
            data={"alone_s": alone_s, "beside_s": beside_s, "overlapped": overlapped},
        )

    async def _settle(self) -> None:
        """Let the server finish with an aborted request, where it shows that one is left; else give it a second."""
        for _ in range(_SETTLE):
            load = await self._load()
            if load.running == 0:
                return
            await anyio.sleep(1.0 if load.running is None else 0.25)
            if load.running is None:
                return

    async def _beside(self, text: str) -> tuple[float, bool | None]:
        """The first token of a call beside a background prefill, and if they met; ``None``: it was refused."""
        other = [{"role": "user", "content": self._text(self._settings.tokens * 2)}]
        options = {**self._slot(1), **self._engine.priority_options("lookahead")}
        ended = refused = early = False
        took: Call | EngineError | None = None

        async def background() -> None:
            nonlocal ended, refused
            try:
                await self._engine.prefill(other, **options)
            except EngineError:
                refused = True  # nothing was beside the call
            ended = True

        async with anyio.create_task_group() as group:
            group.start_soon(background)
            await anyio.sleep(_START_S)
            early = ended
            try:
                took = await self._ask(text)
            except EngineError as error:
                took = error  # bare, not in a group
            group.cancel_scope.cancel()
        if isinstance(took, EngineError):
            raise took
        assert took is not None
        early = early or took.tries > 1  # the one that was answered came long after
        return took.ttft_s, None if refused else not early

    # -- what was told -----------------------------------------------------------------------------------------------

    def _priority(self) -> Finding:
        known = self._known
        if known.priority is not None and not known.priority_sure:
            return Finding(
                name="priority",
                status="unknown",
                found=f"accepted ({known.priority} numbers first); if the queue is sorted by it, only the server's "
                "own flags tell",
                advice=f"make sure of it: {self._advice('priority', 'see its scheduling options')}",
            )
        if known.priority is not None:
            return Finding(name="priority", status="ok", found=f"accepted; {known.priority} numbers go first")
        return Finding(
            name="priority",
            status="warn" if known.flavour in FLAGS["priority"] else "unknown",
            found="a request's priority is refused or ignored"
            if known.flavour in FLAGS["priority"]
            else "this server has none: background work keeps out of the way by itself",
            advice=self._advice("priority", ""),
        )

    async def _load(self) -> Load:
        try:
            return await self._engine.load(timeout_s=10.0)
        except EngineError:
            return Load()

    def _metrics(self, load: Load) -> Finding:
        parts = [
            f"{load.running} running" if load.running is not None else "",
            f"{load.waiting} waiting" if load.waiting is not None else "",
            f"{load.kv_used:.0%} of the KV cache used" if load.kv_used is not None else "",
        ]
        if self._known.metrics:
            return Finding(name="metrics", status="ok", found=", ".join(p for p in parts if p) or "shown")
        return Finding(
            name="metrics",
            status="warn",
            found="/metrics shows no load: admission goes by what we see of our own calls",
            advice=self._advice("metrics", ""),
        )

    def _slots(self) -> Finding:
        count = self._known.slots
        if self._known.flavour != "llama.cpp":
            return Finding(name="slots", status="ok", found="not needed: the cache is found by content")
        return Finding(
            name="slots",
            status="ok" if count >= 2 else "bad",
            found=f"{count} slot{'' if count == 1 else 's'}",
            advice=""
            if count >= 2
            else "start llama-server with --parallel 2 or more (and --slot-save-path): in a single slot background "
            "work takes the place of the agent's own cache",
            data={"slots": count},
        )

    async def _positions(self) -> Finding:
        told: dict[str, Any] = {}
        for path in ("/v1/models", "/props"):
            try:
                found = await self._engine.get_json(path)
            except EngineError:
                continue
            if isinstance(found, dict):
                models = dicts(found.get("data"))
                told |= next((m for m in models if m.get("id") == self._engine.model), {})
                told |= {"model_path": found["model_path"]} if "model_path" in found else {}
        return positions.check(self._engine.model, told)
