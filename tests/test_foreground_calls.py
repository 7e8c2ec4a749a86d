"""Calls that the agent makes itself: what it reports of them in whatever form it has it, and nothing fails by it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from helpers import Events, FakeSummarizer, H, make_policy, make_runtime, settle, virtual
from smoothctx import EngineOverloaded, EngineRefused, Runtime, Usage
from smoothctx.testing import FakeEngine


class Broken:
    """An object whose fields cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no such field")


CHAT = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
SDK = SimpleNamespace(
    prompt_tokens=10, completion_tokens=3, prompt_tokens_details=SimpleNamespace(cached_tokens=8, audio_tokens=None)
)
RESPONSES = SimpleNamespace(input_tokens=10, output_tokens=3, input_tokens_details=SimpleNamespace(cached_tokens=8))
READ = Usage(input_tokens=10, output_tokens=3, cached_tokens=8, calls=1)


@pytest.mark.parametrize("first_token", [True, False])
@pytest.mark.parametrize(
    ("reported", "read"),
    [
        (READ, READ),
        (CHAT, READ),
        (SDK, READ),
        (RESPONSES, READ),
        ({"prompt_tokens": 10}, Usage(input_tokens=10, calls=1)),
        (SimpleNamespace(prompt_tokens=10, prompt_tokens_details=None), Usage(input_tokens=10, calls=1)),
        ({**CHAT, "prompt_tokens_details": {"cached_tokens": 11}}, Usage(input_tokens=10, output_tokens=3, calls=1)),
        (None, None),
    ],
)
@virtual
async def test_promise_15_a_call_is_reported_in_any_form(reported: Any, read: Usage | None, first_token: bool) -> None:
    """A usage of ours, a client's object or a mapping; more cached tokens than the prompt has are no hit."""
    events, engine = Events(), FakeEngine()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        async with session.foreground() as call:
            if first_token:
                call.first_token()
            call.report(reported)
        assert call.usage == read
        assert not runtime.foreground(engine).busy
        await settle()
    assert not events.of("error")


@pytest.mark.parametrize("reported", [{}, {"tokens": 10}, "10", 10, object(), Broken()], ids=lambda v: type(v).__name__)
@virtual
async def test_promise_13_a_usage_that_cannot_be_read_is_an_event(reported: Any) -> None:
    """The turn goes on, the call ends, and what is wrong is said."""
    events, engine = Events(), FakeEngine()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        async with session.foreground() as call:
            call.first_token()
            call.report(reported)
        assert call.usage is None and not runtime.foreground(engine).busy
        await settle()
    (error,) = events.of("error")
    assert error.data["where"] == "foreground.report"


@virtual
async def test_promise_13_figures_that_are_none_of_ours_never_fail_a_call() -> None:
    """A usage whose fields are no numbers: what is written down of the call is an event, the call is the caller's."""
    events, engine = Events(), FakeEngine()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        messages = [H("hi")]
        await session.commit(messages)
        async with session.foreground() as call:
            call.first_token()
            call.report(Usage(input_tokens="many", cached_tokens=3))  # type: ignore[arg-type]
        session.observe([*messages, {"role": "assistant", "content": "ho"}])
        assert not runtime.foreground(engine).busy
        await settle()
    assert [e.data["where"] for e in events.of("error")] == ["foreground"]


@virtual
async def test_errors_of_the_caller_pass_as_they_are() -> None:
    """What the caller's own call raises is the caller's."""
    engine = FakeEngine()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        with pytest.raises(ValueError, match="mine"):
            async with session.foreground() as call:
                call.first_token()
                raise ValueError("mine")
        assert not runtime.foreground(engine).busy


@virtual
async def test_a_turn_whose_call_failed_holds_nobody_up() -> None:
    """Without an ``observe`` after it the turn would count as open until its lease ends."""
    engine = FakeEngine()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        await session.commit([H("hello")])
        foreground = runtime.foreground(engine)
        assert foreground.busy
        with pytest.raises(ConnectionError):
            async with session.foreground():
                raise ConnectionError("the server went away")
        assert not foreground.busy
        async with session.foreground():  # tried again
            assert foreground.busy
        assert not foreground.busy


# -- an overloaded server ------------------------------------------------------------------------------------------


class ApiError(Exception):
    """As the clients of OpenAI and Anthropic raise it."""

    def __init__(self, status_code: int, **headers: str) -> None:
        super().__init__(f"Error code: {status_code}")
        self.status_code = status_code
        self.code = "rate_limit_exceeded"
        self.response = httpx.Response(status_code, headers={k.replace("_", "-"): v for k, v in headers.items()})


class Opaque(Exception):
    """Its fields cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no such field")


def raised(status: int, **headers: str) -> httpx.HTTPStatusError:
    """What httpx raises for such an answer."""
    request = httpx.Request("POST", "http://server/v1/chat/completions")
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    try:
        httpx.Response(status, headers=named, request=request).raise_for_status()
    except httpx.HTTPStatusError as error:
        return error
    raise AssertionError("it is an error")


@pytest.mark.parametrize(
    "error",
    [
        EngineOverloaded("busy", status=429, retry_after_s=20.0),
        ApiError(429, retry_after="20"),
        ApiError(503, Retry_After="20"),
        raised(429, Retry_After="20"),
    ],
    ids=["ours", "openai", "openai-503", "httpx"],
)
@virtual
async def test_background_calls_leave_a_server_alone_that_refused_the_agents_own(error: Exception) -> None:
    """Before ``Retry-After`` no summary goes there; the agent gets the very error."""
    engine, other = FakeEngine("a summary"), FakeEngine("a summary", identity="another")
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(engine), engine=engine)
        messages = [H(f"<{k}> question", size=100) for k in range(8)]
        await session.commit(messages)
        with pytest.raises(type(error)) as caught:
            async with session.foreground():
                raise error
        assert caught.value is error
        assert runtime.endpoints.rests(engine) == pytest.approx(20) and not runtime.endpoints.rests(other)
        handle = session.schedule_transform("summarize", messages)
        await settle(19)
        assert not handle.done() and not engine.calls
        await settle(30)
        assert handle.done() and engine.calls


@pytest.mark.parametrize(
    "error",
    [ValueError("mine"), EngineRefused("wrong", status=400), ApiError(404, retry_after="20"), Opaque(), raised(418)],
    ids=["own", "400", "404", "opaque", "418"],
)
@virtual
async def test_other_errors_of_the_agents_call_say_nothing_of_its_server(error: Exception) -> None:
    """They pass as they are, and nothing is made of them."""
    events, engine = Events(), FakeEngine()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        with pytest.raises(type(error)) as caught:
            async with session.foreground():
                raise error
        await settle()
        assert caught.value is error and not len(runtime.endpoints) and not events.of("error")


@virtual
async def test_without_an_engine_an_overload_is_nobodys() -> None:
    """Which server the agent calls is not known then."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        with pytest.raises(ApiError):
            async with session.foreground():
                raise ApiError(429, retry_after="20")
        await settle()
        assert not len(runtime.endpoints)


def test_an_overload_may_be_told_from_any_thread() -> None:
    """A synchronous caller's call fails in its own thread; what is learned from it is learned on the runtime's loop."""
    engine, told = FakeEngine(), threading.Event()
    with Runtime.in_thread() as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=engine)
        with pytest.raises(ApiError), session.foreground_sync():
            assert runtime.foreground(engine).prefilling
            raise ApiError(429, retry_after="2000")
        assert not runtime.foreground(engine).busy
        runtime.later(0.001, told.set)
        assert told.wait(30)
        assert runtime.endpoints.rests(engine) > 1000
