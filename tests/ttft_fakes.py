"""A fake engine for ``bench ttft``, and whole plans measured on it in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smoothctx.bench import ttft
from smoothctx.bench.ttft_engine import Watched
from smoothctx.bench.ttft_plan import Settings, read_plan
from smoothctx.economics import Speed
from smoothctx.outputs import Output
from smoothctx.testing import FakeEngine, run_virtual

SOURCES = Path(ttft.__file__).resolve().parent.parent / "transforms"
SMALL = Settings(turns=10, turn_tokens=150, reply_tokens=8, summary_tokens=24, window=1024, tool_s=4.0)
FAST = ("--turns", "4", "--turn-tokens", "150", "--reply-tokens", "4", "--summary-tokens", "8", "--window", "1024")
#: a command that measures in no time, once :func:`at_once` was called
FAST_RUN = ("bench", "ttft", "--url", "http://x/v1", "--name", "m", "--path", str(SOURCES), "--tool", "0", *FAST)
WORDS = "it reads a part and says what that is about "


class Fake(Watched, FakeEngine):
    """The fake engine of the tests, with its background calls written down."""

    def __init__(self, **options: Any) -> None:
        super().__init__(WORDS * 40, **{"speed": Speed(400.0, 40.0), "strict": True, **options})
        self.background = []
        self.clock = lambda: asyncio.get_running_loop().time()

    def _check(self, call: Any) -> Any:
        self.sent()
        return super()._check(call)

    async def probe(self) -> Any:
        """Nothing but what it is made with."""
        return self.capabilities


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's server takes no time at all."""

    def server(*_: Any) -> Fake:
        return Fake(speed=Speed(float("inf"), float("inf")))

    monkeypatch.setattr(ttft, "server", server)
    monkeypatch.setattr("smoothctx.bench.ttft.time.perf_counter", lambda: asyncio.get_running_loop().time())


def measured(
    plan: str,
    *,
    settings: Settings = SMALL,
    folder: Path = SOURCES,
    file: Path | None = None,
    engine: Callable[[], Fake] = Fake,
    say: Callable[[str], None] = lambda line: None,
    verbose: bool = False,
) -> tuple[dict[str, Any], Fake]:
    """Measure in virtual time."""
    used: list[Fake] = []

    async def run() -> dict[str, Any]:
        used.append(engine())
        clock = used[0].clock
        return await ttft.run(
            used[0],
            settings,
            read_plan(plan),
            folder,
            out=Output("--json", file),
            say=say,
            verbose=verbose,
            clock=clock,
        )

    return run_virtual(run), used[0]
