"""``smoothctx bench ttft`` and its engine: what is found out first, the time between turns, and the first token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from typing import Any

import anyio
import httpx
import pytest

from smoothctx import KeepRecent, Policy, Runtime
from smoothctx.bench import ttft
from smoothctx.bench.ttft_agent import Agent, Bench, Line
from smoothctx.bench.ttft_engine import Calibration, Watched, calibrate
from smoothctx.bench.ttft_figures import excess_by_size, pairs
from smoothctx.bench.ttft_plan import ABORT, DEFAULT_PLAN, Cell, Settings, pauses, tool_time
from smoothctx.economics import Speed
from smoothctx.engines import OpenAIEngine
from smoothctx.errors import EngineOverloaded, EngineProtocolError, EngineRefused
from smoothctx.testing import run_virtual
from ttft_fakes import SMALL, SOURCES, Fake, measured

# -- the time between turns -------------------------------------------------------------------------------------------


def test_tool_time_follows_the_load() -> None:
    """More sessions at once, a slower engine: more time between two turns. A given time is taken as it is."""
    assert tool_time(Settings(tool_s=3.0), "summarise", 4, 200.0, 40.0) == 3.0
    one, two = (tool_time(Settings(), "summarise", c, 200.0, 40.0) for c in (1, 2))
    assert 0.5 < one < two and tool_time(Settings(), "summarise", 1, 100.0, 40.0) > one
    assert tool_time(Settings(), "keep-recent", 1, 200.0, 40.0) < one, "no model writes anything"
    assert tool_time(Settings(), "keep-recent", 1, 200.0, 40.0, warming=ABORT) < tool_time(
        Settings(), "keep-recent", 1, 200.0, 40.0
    )


class Served(Fake):
    """As a server is seen from outside: each request costs as much time as a chunk of a preload may take, so that
    warming has half the rate."""

    async def _generate(self, call: Any, tokens: Any, garbage: bool) -> AsyncGenerator[Any]:
        await anyio.sleep(0.05)
        async with aclosing(super()._generate(call, tokens, garbage)) as pieces:
            async for piece in pieces:
                yield piece


def test_pauses_are_those_of_the_session_and_have_the_mean_of_the_plan() -> None:
    """Both modes wait as long before the same turn; sessions differ, so that none stay in step."""
    first, again, other = (list(islice(pauses(Settings(), 8.0, n), 28)) for n in (1, 1, 2))
    assert first == again and not set(first) & set(other)
    assert len(set(first)) == 28 and all(6.0 <= p <= 10.0 for p in first)
    assert sum(first) == pytest.approx(28 * 8.0)
    assert set(islice(pauses(Settings(), 0.0, 1), 4)) == {0.0}


@pytest.mark.parametrize("speed", [Speed(220.0, 40.0), Speed(1800.0, 20.0)], ids=["slow", "fast"])
@pytest.mark.parametrize("strategy", DEFAULT_PLAN)
def test_the_default_tool_time_is_enough_to_warm_what_is_committed(strategy: str, speed: Speed) -> None:
    """Of every strategy, on an engine where idle time warms at half the prefill rate: nothing of the excess is left."""
    data, _ = measured(
        f"{strategy}:1:1", settings=Settings(), engine=lambda: Served(speed=speed), folder=SOURCES.parent
    )
    [(inline, ahead)] = pairs(data).values()
    removed = excess_by_size(inline, ahead)
    assert removed is not None and removed > 0.95
    assert all(t["how"] == "ready" for t in ahead.rewrites)


@pytest.mark.parametrize(("flavour", "way"), [("llama.cpp", True), ("vllm", False)])
def test_the_way_of_preloading_decides_the_tool_time(flavour: Any, way: bool) -> None:
    """One request that gives way has nearly the whole rate; what is asked for goes before what suits the server."""
    engine = Fake()
    engine.capabilities = replace(engine.capabilities, flavour=flavour)
    assert ttft._gives_way(engine, Settings()) is way
    assert ttft._gives_way(engine, Settings(preload="abort")) and ttft._gives_way(engine, Settings(preload="timed"))
    assert ttft._gives_way(engine, Settings(preload="growing")) is False


# -- what is found out first ------------------------------------------------------------------------------------------


def test_calibration_measures_the_rates() -> None:
    """To a tenth of what the engine does."""
    data, _ = measured("keep-recent:1:1")
    found = data["calibration"]
    assert found["prefill"] == pytest.approx(400, rel=0.1) and found["decode"] == pytest.approx(40, rel=0.1)
    assert 0 < found["minimal_ms"] < 100 and found["reports_cache"] and found["tools"]


class Answers(httpx.AsyncByteStream):
    """Events of a server, one each second."""

    def __init__(self, *deltas: dict[str, Any], prompt_tokens: int) -> None:
        choices = [[{"delta": delta}] for delta in deltas] + [[{"delta": {}, "finish_reason": "stop"}]]
        events: list[dict[str, Any]] = [{"choices": choice} for choice in choices]
        self._events = [*events, {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 4}}]

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        for event in self._events:
            await anyio.sleep(1)
            yield f"data: {json.dumps(event)}\n\n".encode()


class Remote(Watched, OpenAIEngine):
    """A server over HTTP that gives the same answer to everything, in virtual time."""

    def __init__(self, *deltas: dict[str, Any], prompt_tokens: int = 9) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Answers(*deltas, prompt_tokens=prompt_tokens))

        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        super().__init__("http://x/v1", "m", client=client, clock=lambda: asyncio.get_running_loop().time())
        self.background = []


@pytest.mark.parametrize(
    ("deltas", "prompt_tokens", "named"),
    [([{"content": "it is"}], 0, "prompt_tokens: 0"), ([], 9, "answers are empty")],
)
def test_a_server_by_which_nothing_can_be_measured_is_named(
    deltas: list[dict[str, Any]], prompt_tokens: int, named: str
) -> None:
    """Before the first cell, in a sentence."""

    async def run() -> None:
        engine = Remote(*deltas, prompt_tokens=prompt_tokens)
        with pytest.raises(EngineProtocolError, match=named):
            await calibrate(engine, SMALL, "text", clock=engine.clock)

    run_virtual(run)


class Picky(Fake):
    """Refuses an option by its name, and a tool's result as llama.cpp does."""

    async def complete(self, messages: Any, *, max_tokens: int | None = None, **options: Any) -> Any:
        """As the fake does, if at all."""
        if "temperature" in options:
            raise EngineRefused("x: HTTP 400: Unsupported value: 'temperature' does not support 0.0", status=400)
        if any(m["role"] == "tool" for m in messages):
            raise EngineOverloaded("x: HTTP 500: Value is not callable: null", status=500)
        return await super().complete(messages, max_tokens=max_tokens, **options)


def test_what_the_server_refuses_is_left_out_by_name_and_so_are_tools() -> None:
    """The option that a refusal names goes, the other stays; a 500 for a tool's result is the template's."""
    data, _ = measured("keep-recent:1:1", engine=Picky)
    found = data["calibration"]
    assert found["refused"] == ["temperature"] and found["options"] == {"ignore_eos": True} and not found["tools"]


def test_a_busy_server_is_not_taken_for_one_without_tools() -> None:
    """A 429 in that place, again and again, ends the run as anywhere."""

    class Busy(Picky):
        async def complete(self, messages: Any, **options: Any) -> Any:
            if any(m["role"] == "tool" for m in messages):
                raise EngineOverloaded("slow down", status=429)
            return await super().complete(messages, **options)

    with pytest.raises(EngineOverloaded, match="slow down"):
        measured("keep-recent:1:1", engine=Busy)


def test_the_first_token_may_be_reasoning() -> None:
    """Time to first token, and the gaps, are those of all tokens; the foreground is told at the first."""

    async def run() -> None:
        engine = Remote({"reasoning_content": "hm"}, {"reasoning": "so"}, {"content": "it"}, {"content": " is"})
        bench = Bench(engine, SMALL, Calibration(prefill=1.0, decode=1.0, minimal_ms=1.0), engine.clock)
        async with Runtime(clock=engine.clock) as runtime:
            agent = Agent(bench, Cell("summarise", "off", 1, 0), runtime, Line("n", 0), 0, 0.0, 0.0)
            session = runtime.session("s", policy=Policy(KeepRecent(), context_window=2000), engine=engine)
            prefilling: list[bool] = []

            async def watch() -> None:
                for _ in range(2):
                    await anyio.sleep(0.75)
                    prefilling.append(runtime.foreground(engine).prefilling)

            async def ask() -> None:
                asked = [{"role": "user", "content": "x"}]
                found.append(await agent.turn(1, session, asked, {}, kind="turn", new_tokens=1))

            found: list[Any] = []
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                group.start_soon(ask)
        [(answer, turn)] = found
        assert answer["content"] == "it is" and prefilling == [True, False], "after 0.75 and 1.5 seconds"
        assert turn.ttft_ms == 1000 and turn.gaps_ms == [1000, 1000, 1000]

    run_virtual(run)
