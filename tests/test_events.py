"""Events: what is said, to whom, and that nobody who listens can hurt a turn."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from driving import fast
from helpers import Events, FakeSummarizer, chat, make_policy, make_runtime, same_objects, settle, summaries, virtual
from smoothctx import Event
from smoothctx.events import EventSink


@virtual
async def test_the_life_of_a_lookahead_is_told_in_order() -> None:
    """Started, running, usage, ready, committed: once each, with session, tenant, time and handle."""
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=3)), tenant="t")
        handle = session.observe(messages)
        assert handle is not None
        await settle(5)
        await session.commit(messages)
    names = [n for n in events.names() if n.startswith("lookahead.")]
    assert names == ["lookahead.started", "lookahead.running", "lookahead.ready", "lookahead.committed"]
    assert len(events.of("usage")) == len(events.of("view.committed")) == 1
    assert {e.data["handle"] for e in events if e.name.startswith("lookahead.")} == {handle.id}
    assert {(e.session, e.tenant) for e in events} == {("s", "t")}
    times = [e.time for e in events]
    assert times == sorted(times)
    assert events.of("lookahead.ready")[0].time == pytest.approx(3, abs=1)


@virtual
async def test_promise_05_a_listener_that_raises_is_logged_and_goes_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every event raises in the caller's own callback: the session works all the same."""

    def broken(event: Event) -> None:
        raise RuntimeError(f"cannot take {event.name}")

    messages = chat(12, size=55)
    with caplog.at_level(logging.WARNING, logger="smoothctx"):
        async with make_runtime(on_event=broken) as runtime:
            session = runtime.session("s", policy=make_policy(fast()))
            session.observe(messages)
            await settle(5)
            assert summaries(await session.commit(messages))
    assert any("on_event raised" in r.getMessage() for r in caplog.records)


@virtual
async def test_a_listener_may_use_the_session_from_its_callback() -> None:
    """Reading and committing from within an event neither deadlocks nor recurses for ever."""
    seen: list[Any] = []
    messages = chat(12, size=55)

    def curious(event: Event) -> None:
        if session is not None and event.name in ("lookahead.ready", "view.committed"):
            seen.append((session.branches(), list(session.receipts), repr(session)))

    session: Any = None
    async with make_runtime(on_event=curious) as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        session.observe(messages)
        await settle(5)
        assert summaries(await session.commit(messages))
    assert len(seen) == 2


def test_levels_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are warnings, our own errors are errors, the rest is for debugging; fields travel with the record."""
    sink = EventSink(None, lambda: 1.5)
    with caplog.at_level(logging.DEBUG, logger="smoothctx"):
        sink.emit("lookahead.started", session="s", tenant="t", handle=1)
        sink.emit("lookahead.failed", session="s", reason="timeout")
        sink.error(ValueError("oops"), where="commit", session="s")
    assert [r.levelno for r in caplog.records] == [logging.DEBUG, logging.WARNING, logging.ERROR]
    assert caplog.records[0].getMessage() == "lookahead.started"
    assert getattr(caplog.records[1], "reason", None) == "timeout"
    assert getattr(caplog.records[2], "error", None) == "ValueError: oops"


def test_a_broken_log_handler_is_not_the_turns_business() -> None:
    """Fields that clash with the log record's own, or a handler that raises: the callback still hears."""
    events = Events()
    sink = EventSink(events, lambda: 0.0)

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError

    logger = logging.getLogger("smoothctx")
    handler = Broken()
    logger.addHandler(handler)
    try:
        sink.emit("error", where="x")
        sink.emit("lookahead.failed", message="clashes", args=(1,), exc_info="no")
    finally:
        logger.removeHandler(handler)
    assert events.names() == ["error", "lookahead.failed"]


@virtual
async def test_a_lasting_condition_is_said_once() -> None:
    """An unreadable message and a trigger with nothing to rewrite, turn after turn: one event each."""
    events = Events()
    odd: Any = {"role": "robot"}
    messages = [{"role": "user", "content": "x" * 6000}, odd]
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        for _ in range(10):
            assert same_objects(await session.commit(messages), messages)
            session.observe(messages)
    assert len(events.of("message.unreadable")) == 1
    assert len(events.of("nothing_to_rewrite")) <= 1
