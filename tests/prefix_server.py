"""A server with one prefix cache, for the tests of preloads, and the turns beside which they run. On virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from smoothctx import Usage
from smoothctx.engines.preload import Preloader
from smoothctx.foreground import Foreground


def loop_time() -> float:
    """The (virtual) loop's time."""
    return asyncio.get_running_loop().time()


Message = Mapping[str, Any]


def text(messages: Sequence[Message]) -> str:
    """The prompt as a server would see it, in short."""
    return "".join(f"<{m['role']}>{m.get('content')}" for m in messages)


def conversation(turns: int = 6, size: int = 700) -> list[Message]:
    """A system message and some turns."""
    roles = itertools.cycle(["user", "assistant"])
    body = [{"role": r, "content": f"{k:04d} " * (size // 5)} for k, r in zip(range(turns), roles, strict=False)]
    return [{"role": "system", "content": "be brief"}, *body]


@dataclass
class Server:
    """A server with one prefix cache and a constant rate, in characters per second."""

    rate: float = 10_000.0
    overhead: float = 0.0
    reports_cache: bool = True
    cached: str = ""
    sent: list[list[Message]] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    aborted: int = 0
    before: Any = None

    async def send(self, messages: Sequence[Message]) -> Any:
        """Evaluate a prompt; what was evaluated before an abort stays."""
        self.sent.append(list(messages))
        self.started.append(loop_time())
        if self.before is not None:
            await self.before()
        prompt = text(messages)
        shared = len(in_common(prompt, self.cached))
        start = loop_time()
        try:
            await anyio.sleep(self.overhead + (len(prompt) - shared) / self.rate)
        except anyio.get_cancelled_exc_class():
            self.aborted += 1
            self.cached = prompt[: shared + int((loop_time() - start) * self.rate)]
            raise
        self.cached = prompt
        usage = Usage(
            input_tokens=len(prompt) // 4 + 1,
            output_tokens=1,
            cached_tokens=shared // 4 if self.reports_cache else None,
            calls=1,
        )
        return Reply(usage)


@dataclass
class Reply:
    """What a prefill gives."""

    usage: Usage


def in_common(a: str, b: str) -> str:
    return "".join(x for x, _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a, b, strict=False)))


#: stands behind a part that ends with a reply
STUB = {"role": "user", "content": "."}


def foreground() -> Foreground:
    """A foreground on the virtual clock."""
    return Foreground(loop_time)


def preloader(**options: Any) -> Preloader:
    """A preloader on the virtual clock."""
    return Preloader(clock=loop_time, **options)


def always() -> bool:
    """It stays needed."""
    return True


async def with_turns(server: Server, work: Any, *, pause: float, length: float, decoding: float = 0.0) -> Any:
    """Run ``work(foreground)`` beside an agent whose turns prefill for ``length`` and then decode for ``decoding``."""
    front, result = foreground(), []

    async def agent() -> None:
        for k in itertools.count():
            await anyio.sleep(pause)
            front.begin(k)
            await anyio.sleep(length)
            front.first_token(k)
            await anyio.sleep(decoding)
            front.end(k)

    async def run() -> None:
        result.append(await work(front))
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(agent)
        group.start_soon(run)
    return result[0]
