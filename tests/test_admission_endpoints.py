"""Endpoints adapt: fewer calls at once to a server that is overloaded or slows the foreground, more when it is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import now, virtual
from smoothctx import EngineOverloaded, EngineRefused
from smoothctx.endpoints import Endpoint, EndpointFull, Endpoints, calling, endpoint, overload
from smoothctx.foreground import Foreground
from smoothctx.testing import FakeEngine


def calm() -> bool:
    """No turn waits for it."""
    return False


async def call(lane: Endpoint, error: Exception | None = None, *, slower: bool = False, seconds: float = 1.0) -> None:
    """One call that ends so; its error stays here."""
    try:
        async with lane.place("t", "s", calm, lambda: slower):
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
    except EngineOverloaded:
        pass


@virtual
async def test_overload_halves_and_success_raises() -> None:
    """Once for all calls that were in flight together; down to one; back up to the ceiling, and never above."""
    lane = Endpoint(8, 100)
    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(call(lane, EngineOverloaded("busy", status=429)))
    assert lane.limit == 4
    for _ in range(5):
        await call(lane, EngineOverloaded("busy", status=503))
    assert lane.limit == 1
    limits = []
    for _ in range(60):
        await call(lane)
        limits.append(lane.limit)
    assert limits == sorted(limits) and limits[0] == 2 and limits[-1] == 8 and not lane.adapted
    assert limits.index(8) > 20, "slowly"
    with pytest.raises(EngineRefused):
        async with lane.place("t", "s", calm):
            raise EngineRefused("wrong", status=400)
    assert lane.limit == 8


@virtual
async def test_a_slower_foreground_halves() -> None:
    """On a hosted API; on a server of one's own admission sees to it."""
    lane = Endpoint(8, 100)
    await call(lane, slower=True)
    assert lane.limit == 4
    lanes, engine = Endpoints(concurrency=8, max_waiting=10), FakeEngine()
    foreground = Foreground(asyncio.get_running_loop().time)
    for k in range(6):
        foreground.begin(k, k)
        foreground.answered(k, 1.0 if k < 3 else 5.0, None)
        if k < 3:
            foreground.end(k)
    assert [c.ttft_s for c in foreground._demand._calm] == [1.0, 1.0, 1.0, 5.0]

    async def hosted(messages: Any, *, max_tokens: int | None = None) -> str:
        return ""

    for k in range(3):
        foreground.answered(5 - k % 2, 5.0, None)
    assert foreground.seen().slower
    for model, identity, limit in ((hosted, "api#m", 4), (engine, engine.identity, None)):
        with calling(lanes, "t", "s", calm, foreground):
            async with endpoint(model, identity):
                await asyncio.sleep(1)
        kept = lanes._lanes.get(identity)
        assert (None if kept is None else kept.limit) == limit


@virtual
async def test_retry_after_is_honoured() -> None:
    """Nobody is given a place before; those who wait get theirs then; a long rest is a typed discard at once."""
    lane = Endpoint(4, 100)
    await call(lane, EngineOverloaded("busy", status=429, retry_after_s=20.0))
    assert lane.rests_s == 20 and lane.adapted
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(call(lane))
        gone = group.create_task(call(lane))
        await asyncio.sleep(1)
        assert lane.in_flight == 0 and lane.waiting == 4
        gone.cancel()
        await asyncio.sleep(18.5)
        assert lane.in_flight == 0
        await asyncio.sleep(1)
        assert lane.in_flight == 2, "half of what it was"
    assert now() == 23 and lane.waiting == 0 and lane._timer is None
    await call(lane, EngineOverloaded("busy", status=429, retry_after_s=900.0))
    with pytest.raises(EndpointFull, match="900 s without calls"):
        async with lane.place("t", "s", calm):
            raise AssertionError("it was given a place")


@virtual
async def test_what_was_learned_is_kept_and_bounded() -> None:
    """A lower limit is remembered between calls, of the latest endpoints; an anonymous model's is not."""
    lanes = Endpoints(concurrency=8, max_waiting=10)

    async def fail(model: Any, identity: str | None) -> None:
        with pytest.raises(EngineOverloaded), calling(lanes, "t", "s", calm):
            async with endpoint(model, identity):
                raise EngineOverloaded("busy", retry_after_s=30.0)

    for k in range(300):
        await fail(FakeEngine(), f"server{k}#m")
    await fail(FakeEngine(), None)
    assert len(lanes) == 256
    assert lanes.rests(SimpleNamespace(identity="server299#m")) == 30 and lanes.rests(FakeEngine()) == 0.0
    assert lanes.in_flight(SimpleNamespace(identity="server299#m")) == 0


def test_overloads_of_other_clients() -> None:
    """By status and headers, as model clients show them."""

    class ApiError(Exception):
        def __init__(self, status_code: int, **headers: str) -> None:
            self.status_code = status_code
            self.response = SimpleNamespace(headers={k.replace("_", "-"): v for k, v in headers.items()})

    assert overload(ApiError(429, retry_after="7")) == 7.0
    assert overload(ApiError(429, retry_after="Wed, 21 Oct 2026 07:28:00 GMT")) == 0.0
    assert overload(ApiError(429, retry_after="1e9")) == 3600.0
    assert overload(ApiError(529)) == 0.0
    assert overload(ApiError(400, retry_after="7")) is None
    assert overload(ValueError("no")) is None
    assert overload(EngineOverloaded("busy", status=500)) == 0.0
    assert overload(EngineOverloaded("busy", retry_after_s=float("inf"))) == 0.0
