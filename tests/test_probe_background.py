"""An engine that nobody probed is probed in the background: once, out of the turn's way, and never the turn's fault."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import anyio
import pytest

from flavour_servers import ModelServer
from helpers import Events, FakeSummarizer, chat, make_policy, make_runtime, now, settle, virtual
from smoothctx import Runtime, Session
from smoothctx.engines import Binding, OpenAIEngine
from smoothctx.engines.slots import SlotBinding
from smoothctx.errors import EngineUnreachable
from smoothctx.probing import engine_name

GETS = ("/version", "/props", "/get_server_info", "/server_info", "/metrics", "/v1/models", "/slots")


class Probed:
    """An engine that says how often it was probed."""

    identity = "http://me:secret@10.0.0.1:8000/v1#m"

    def __init__(self, delay: float = 1.0, error: Exception | None = None) -> None:
        self.capabilities: Any = None
        self.probes = 0
        self._delay, self._error = delay, error

    async def probe(self) -> Any:
        """Takes a while."""
        self.probes += 1
        await anyio.sleep(self._delay)
        if self._error is not None:
            raise self._error
        self.capabilities = "known"
        return self.capabilities


def open_session(runtime: Runtime, name: str, engine: Any) -> Session:
    """A session on this engine."""
    return runtime.session(name, policy=make_policy(FakeSummarizer()), engine=engine)


@virtual
async def test_once_for_each_engine() -> None:
    """However many sessions there are; opening one and its turns take no time."""
    engine, other = Probed(), Probed()
    async with make_runtime() as runtime:
        for name in ("a", "b", "c"):
            session = open_session(runtime, name, engine)
            await session.commit(chat(3))
        open_session(runtime, "d", other)
        assert now() == 0 and engine.capabilities is None
        await settle(5)
        open_session(runtime, "e", engine)
        await settle(5)
        assert (engine.probes, other.probes) == (1, 1) and engine.capabilities == "known"


@virtual
async def test_what_is_known_or_cannot_be_asked_is_left_alone() -> None:
    """A probed engine, one without a probe, one that cannot be remembered, and none at all."""

    class Unhashable(Probed):
        __hash__ = None  # type: ignore[assignment]

    known, unhashable = Probed(), Unhashable()
    known.capabilities = "known"
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        for name, engine in (("a", known), ("b", unhashable), ("c", object()), ("d", None)):
            await open_session(runtime, name, engine).commit(chat(3))
        await settle(5)
    assert known.probes == unhashable.probes == 0 and not events.of("error")


@virtual
async def test_promise_05_a_probe_that_fails_is_an_event() -> None:
    """The turns go on; it is told once, and asked again ever more rarely."""
    events, engine, messages = Events(), Probed(error=EngineUnreachable("gone")), chat(3)
    async with make_runtime(on_event=events) as runtime:
        session = open_session(runtime, "a", engine)
        began: list[float] = []
        for _ in range(900):
            assert await session.commit(messages) == messages
            await settle(0.5)
            if engine.probes > len(began):
                began.append(now())
    (error,) = events.of("error")
    assert error.data["where"] == "engine.probe" and "gone" in error.data["error"] and error.session == "a"
    pauses = [later - sooner - 1 for sooner, later in itertools.pairwise(began)]  # a probe takes one second
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, *[60] * (len(pauses) - 6)], abs=0.6) and len(pauses) > 9


@virtual
@pytest.mark.parametrize("opens", [True, False])
async def test_a_server_that_comes_up_later_is_found(opens: bool) -> None:
    """By the next session on it, or the next turn of one; then it is asked no more."""
    engine = Probed(error=EngineUnreachable("still loading"))
    async with make_runtime() as runtime:
        session = open_session(runtime, "a", engine)
        await settle(100)
        assert (engine.probes, engine.capabilities) == (1, None)
        engine._error = None
        for k in range(2):
            if opens:
                open_session(runtime, f"b{k}", engine)
            else:
                await session.commit(chat(3))
            await settle(100)
        assert (engine.probes, engine.capabilities) == (2, "known")


@virtual
async def test_a_server_that_answered_nothing_in_time_is_asked_again() -> None:
    """It hangs while it loads its model, then says that it is not ready, and is up at last."""
    server = ModelServer("vllm", hang=frozenset(GETS))
    pages = server.pages
    async with server.engine() as engine, make_runtime() as runtime:
        assert isinstance(engine, OpenAIEngine)
        session = open_session(runtime, "a", engine)
        await settle(100)
        assert engine.capabilities is not None and engine.capabilities.flavour == "unknown"
        server.hang, server.pages = frozenset(), {path: (503, {"error": "Loading model"}) for path in GETS}
        await session.commit(chat(3))
        await settle(100)
        assert engine.capabilities.flavour == "unknown" and not engine.preload_by_default
        server.pages = pages
        await session.commit(chat(3))
        await settle(100)
        assert engine.capabilities.flavour == "vllm" and engine.preload_by_default


@virtual
async def test_a_probe_that_could_not_be_run_is_tried_with_the_next_session() -> None:
    """Full means that the queue had no room; the engine is asked when there is some."""

    class Admission:
        answer = "skip"

        async def decide(self, work: Any) -> str:
            """As it is told."""
            return self.answer

    engine, admission = Probed(), Admission()
    async with make_runtime(admission=admission) as runtime:
        open_session(runtime, "a", engine)
        await settle(5)
        assert engine.probes == 0
        admission.answer = "run"
        open_session(runtime, "b", engine)
        await settle(5)
        assert engine.probes == 1


@virtual
async def test_promise_11_a_probe_that_hangs_ends_with_the_runtime() -> None:
    """Nothing of it is left."""
    engine = Probed(delay=1e9)
    async with make_runtime() as runtime:
        open_session(runtime, "a", engine)
        await settle(5)
        assert engine.probes == 1
    assert engine.capabilities is None


@virtual
async def test_slots_are_used_by_sessions_opened_after_it() -> None:
    """A llama.cpp server: the next session has a slot of its own; the first goes on without, up to its next turn."""
    async with ModelServer("llama.cpp").engine() as engine, make_runtime() as runtime:
        assert isinstance(engine, OpenAIEngine)
        early = open_session(runtime, "early", engine)
        assert isinstance(early.serving.binding, Binding) and early.request_options() == {}
        await settle(10)
        late = open_session(runtime, "late", engine)
        assert isinstance(late.serving.binding, SlotBinding) and late.request_options()["id_slot"] == 0
        assert early.request_options() == {} and engine.preload_by_default


# --- what is told of it


@virtual
async def test_a_session_that_is_opened_is_told() -> None:
    """With its discard policy, its transform and the engine's name without secrets; not when it is found again."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        policy = make_policy(FakeSummarizer())
        for _ in range(2):
            runtime.session("a", policy=policy, engine=Probed())
    (opened,) = events.of("session.opened")
    assert opened.session == "a" and opened.data == {
        "discard": repr(policy.discard),
        "transform": "summarize",
        "locality": "prefix",
        "engine": "http://10.0.0.1:8000/v1#m",
    }
    json.dumps(opened.data)


def test_engine_names() -> None:
    """Nothing for nothing, and no error of an engine's own."""

    class Broken:
        @property
        def identity(self) -> str:
            """It fails."""
            raise RuntimeError("mine")

    assert engine_name(None) == engine_name(object()) == engine_name(Broken()) == ""
    assert engine_name(Probed()) == "http://10.0.0.1:8000/v1#m"


@virtual
async def test_the_first_token_of_each_call_is_told() -> None:
    """Once per call: its TTFT, and whether it is the first since the view was rewritten."""
    events, messages = Events(), chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=1)))

        async def turn(ttft: float) -> None:
            await session.commit(messages)
            async with session.foreground() as call:
                await anyio.sleep(ttft)
                call.first_token()
                await anyio.sleep(1)
                call.first_token()
            messages.extend(chat(1, first=len(messages), system=False)[::-1])
            session.observe(messages)
            await settle(20)

        await turn(0.5)
        await turn(2.0)
        await turn(0.25)
    told = [e.data for e in events.of("ttft")]
    assert [t["ttft_s"] for t in told] == pytest.approx([0.5, 2.0, 0.25])
    assert [t["rewritten"] for t in told] == [False, True, False] and not any(t["waited_s"] for t in told)


@virtual
async def test_nothing_is_told_where_nobody_listens() -> None:
    """No callback and no debug logging: the first token costs no event, and warnings are logged all the same."""
    async with make_runtime() as runtime:
        assert not runtime.events.heard
        session = open_session(runtime, "s", None)
        await session.commit(chat(3))
        async with session.foreground() as call:
            call.first_token()


def test_who_listens(caplog: pytest.LogCaptureFixture) -> None:
    """A callback, or a logger that takes debug lines."""
    assert not Runtime().events.heard and Runtime(on_event=print).events.heard
    with caplog.at_level(logging.DEBUG, logger="smoothctx"):
        assert Runtime().events.heard
