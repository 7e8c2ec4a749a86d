"""Endpoints adapt: fewer calls at once to a server that is overloaded or slows the foreground, more when it is not."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import Events, chat, make_policy, make_runtime, now, settle, virtual
from smoothctx import EngineOverloaded, EngineRefused, Policy
from smoothctx.endpoints import Endpoint, EndpointFull, Endpoints, calling, endpoint, overload
from smoothctx.foreground import Foreground
from smoothctx.testing import FakeEngine
from smoothctx.transforms.base import Locality


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
    """A lower limit is remembered between calls, of the latest endpoints."""
    lanes = Endpoints(concurrency=8, max_waiting=10)

    async def fail(model: Any, identity: str | None) -> None:
        with pytest.raises(EngineOverloaded), calling(lanes, "t", "s", calm):
            async with endpoint(model, identity):
                raise EngineOverloaded("busy", retry_after_s=30.0)

    for k in range(300):
        await fail(FakeEngine(), f"server{k}#m")
    assert len(lanes) == 256
    assert lanes.rests(SimpleNamespace(identity="server299#m")) == 30 and lanes.rests(FakeEngine()) == 0.0
    assert lanes.in_flight(SimpleNamespace(identity="server299#m")) == 0


@virtual
async def test_of_a_plain_function_it_is_kept_while_that_lives() -> None:
    """A model without an identity is known by itself: a rest counts for its next call, and goes with it."""
    lanes = Endpoints(concurrency=8, max_waiting=10)

    async def fail(model: Any) -> None:
        with pytest.raises(EngineOverloaded), calling(lanes, "t", "s", calm):
            async with endpoint(model, None):
                raise EngineOverloaded("busy", status=502, retry_after_s=90.0)

    async def model() -> None: ...

    await fail(model)
    assert lanes.rests(model) == 90 and lanes.rests(lambda: None) == 0
    assert await asyncio.to_thread(lanes.rests, model) == 90
    with pytest.raises(EndpointFull, match="90 s without calls"):
        await fail(model)
    del model
    gc.collect()
    assert len(lanes) == 0
    await fail(object())  # it cannot be held weakly
    assert len(lanes) == 0


@pytest.mark.parametrize("how", ["function", "id", "engine"])
@virtual
async def test_promise_06_no_wait_for_a_server_that_is_away(how: str) -> None:
    """At the limit a turn that can know that no result will come in time falls back at once: one that begins then, and
    one that waits already."""

    async def model(messages: Any, *, max_tokens: int | None = None) -> str:
        calls.append(now())
        await asyncio.sleep(3)
        raise EngineOverloaded("busy", status=429, retry_after_s=45.0)

    class Engine:
        identity = "http://x/v1#m"

        async def complete(self, messages: Any, *, max_tokens: int | None = None, **_: Any) -> Any:
            return await model(messages)

    calls: list[float] = []
    given: dict[str, Any] = {"function": (model, {}), "id": (model, {"model_id": "m"}), "engine": (Engine(), {})}[how]
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        for name, began, waited in (("waits", 0, 3), ("comes", 4, 0)):
            session = runtime.session(name, policy=make_policy(given[0], max_wait=30, **given[1]))
            await asyncio.sleep(began - now())
            view = await session.commit(chat(17, size=60))
            assert session.receipts[-1].how == "fallback" and len(view) < 17
            assert waited <= now() - began <= waited + 1 and calls == [0]
            lookahead = session.lookahead
            assert lookahead is None or not lookahead.waited_out
            assert lookahead is None or not lookahead.promoted, "nobody waits for it any more"
            promoted = {e.session for e in events.of("lookahead.promoted")}
            assert promoted == {"waits"}, "the one that comes did not begin to wait"


@virtual
async def test_promise_06_no_wait_for_a_retry_that_comes_too_late() -> None:
    """The same where only the pause before the next try says so."""

    class Busy:
        name = "busy"
        fingerprint = None
        locality = Locality.PREFIX
        keep = ("messages", 4)
        calls = 0

        async def apply(self, request: Any) -> Any:
            self.calls += 1
            raise EngineOverloaded("busy", status=429, retry_after_s=20.0)

    transform = Busy()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=Policy(transform, context_window=2000, max_wait=10))
        messages = chat(12, size=60)
        session.observe(messages)
        await settle(5)
        assert transform.calls == 1
        messages += chat(6, size=60, first=12, system=False)
        await session.commit(messages)
        assert session.receipts[-1].how == "fallback" and now() == 5


@pytest.mark.parametrize("rest_s", [15.0, 28.0])
@virtual
async def test_promise_06_a_rest_counts_before_what_a_result_usually_takes(rest_s: float) -> None:
    """Results take 3 s here: after 15 s of rest one comes within the 30 s of the wait, after 28 s none does."""

    refused: list[float] = []

    async def model(messages: Any, *, max_tokens: int | None = None) -> str:
        if "<200>" in str(messages) and not refused:
            refused.append(now())
            raise EngineOverloaded("busy", status=429, retry_after_s=rest_s)
        await asyncio.sleep(3)
        return "a summary"

    async with make_runtime() as runtime:
        mine, other = (runtime.session(k, policy=make_policy(model, max_wait=30, model_id="m")) for k in "ab")
        messages = chat(12, size=60)
        mine.observe(messages)
        await settle(10)
        await mine.commit(messages)
        assert [receipt.how for receipt in mine.receipts] == ["ready"]
        other.observe(chat(12, size=60, first=100))
        await settle()
        messages += chat(14, size=60, first=12, system=False)
        began = now()
        await mine.commit(messages)
        came = rest_s == 15.0
        assert mine.receipts[-1].how == ("promoted" if came else "fallback")
        assert now() - began == pytest.approx(18.0 if came else 0.0)


@virtual
async def test_a_result_that_comes_is_waited_for_although_the_server_asked_others_to_stay_away() -> None:
    """A call that is in flight is not called off by a rest: its turn waits for it."""
    released = asyncio.Event()

    async def model(messages: Any, *, max_tokens: int | None = None) -> str:
        if "<200>" in str(messages):
            raise EngineOverloaded("busy", status=429, retry_after_s=45.0)
        await released.wait()
        return "a summary"

    async with make_runtime() as runtime:
        mine, other = (runtime.session(k, policy=make_policy(model, max_wait=30, model_id="m")) for k in "ab")
        messages = chat(12, size=60)
        mine.observe(messages)
        await settle(1)
        other.observe(chat(12, size=60, first=100))
        await settle(1)
        assert runtime.endpoints.rests(model, "m") > 40
        messages += chat(6, size=60, first=12, system=False)
        runtime.later(3, released.set)
        await mine.commit(messages)
        assert mine.receipts[-1].how == "promoted" and now() == pytest.approx(5)


def test_overloads_of_other_clients() -> None:
    """By status and headers, as model clients show them."""

    class ApiError(Exception):
        def __init__(self, status_code: int, **headers: str) -> None:
            self.status_code = status_code
            self.response = SimpleNamespace(headers={k.replace("_", "-"): v for k, v in headers.items()})

    assert overload(ApiError(429, retry_after="7")) == 7.0
    date = "Wed, 21 Oct 2026 07:28:00 GMT"
    assert overload(ApiError(429, retry_after=date, date="Wed, 21 Oct 2026 07:27:00 GMT")) == 60.0
    assert overload(ApiError(429, retry_after=date, date="Wed, 21 Oct 2026 07:29:00 GMT")) == 0.0
    assert overload(ApiError(429, retry_after="soon")) == overload(ApiError(429)) == 0.0
    assert overload(ApiError(429, retry_after="1e9")) == 3600.0
    assert [overload(ApiError(status)) for status in (500, 502, 503, 504, 529)] == [0.0] * 5
    assert overload(ApiError(404)) is None
    assert overload(ApiError(400, retry_after="7")) is None
    assert overload(ValueError("no")) is None
    assert overload(EngineOverloaded("busy", status=500)) == 0.0
    assert overload(EngineOverloaded("busy", retry_after_s=float("inf"))) == 0.0


class Client:
    """Somebody's client of a model server: its calls, and the most of them at once."""

    def __init__(self) -> None:
        self.calls = self.now = self.most = 0

    async def summarise(self, messages: Any, *, max_tokens: int | None = None) -> str:
        """One call of five seconds."""
        self.calls, self.now = self.calls + 1, self.now + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(5)
        self.now -= 1
        return "a summary"

    async def judge(self) -> None:
        """Another one."""


@virtual
async def test_promise_10_a_bound_method_is_one_endpoint_however_often_it_is_looked_up() -> None:
    """Each session's transform has a method object of its own; it is the client that is called."""
    client = Client()
    async with make_runtime(endpoint_concurrency=2, concurrency=32) as runtime:
        for k in range(12):
            session = runtime.session(f"s{k}", policy=make_policy(client.summarise))
            session.observe(chat(12, size=60, first=100 * k))
        await settle(100)
        assert client.calls == 12 and client.most == 2 and len(runtime.endpoints) == 0
        other = Client()
        lanes = runtime.endpoints
        async with (
            lanes.place(client.summarise, None, "t", "s", calm),
            lanes.place(other.summarise, None, "t", "s", calm),
        ):
            assert lanes.in_flight(client.summarise) == lanes.in_flight(other.summarise) == 1 and len(lanes) == 2


@virtual
async def test_what_was_learned_of_a_bound_method_goes_with_its_object() -> None:
    """The method object itself is gone at once; a rest counts for the client's next call of the same method."""
    lanes, client = Endpoints(concurrency=8, max_waiting=10), Client()
    with pytest.raises(EngineOverloaded), calling(lanes, "t", "s", calm):
        async with endpoint(client.summarise, None):
            raise EngineOverloaded("busy", status=429, retry_after_s=90.0)
    gc.collect()
    assert lanes.rests(client.summarise) == 90 and lanes.rests(Client().summarise) == lanes.rests(client.judge) == 0
    del client
    gc.collect()
    assert len(lanes) == 0
