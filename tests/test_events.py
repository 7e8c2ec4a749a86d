"""Events: what is said, to whom, and that nobody who listens can hurt a turn."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from driving import fast
from helpers import Events, FakeSummarizer, chat, make_policy, make_runtime, same_objects, settle, summaries, virtual
from smoothctx import Event
from smoothctx.events import EventSink, line


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
    assert [r.getMessage() for r in caplog.records] == [
        "lookahead.started session=s tenant=t handle=1",
        "lookahead.failed session=s reason=timeout",
        'error session=s where=commit error="ValueError: oops"',
    ]
    assert getattr(caplog.records[1], "reason", None) == "timeout"
    assert getattr(caplog.records[2], "error", None) == "ValueError: oops"


@virtual
async def test_a_failing_summariser_is_visible_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Plain `logging` at WARNING says which session's summary failed, and the error's own text."""
    messages = chat(12, size=55)
    with caplog.at_level(logging.WARNING, logger="smoothctx"):
        async with make_runtime() as runtime:
            session = runtime.session("s-1", policy=make_policy(FakeSummarizer("fail")))
            session.observe(messages)
            await settle(5)
            assert same_objects(await session.commit(messages), messages)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and said[0].startswith("lookahead.failed session=s-1 ")
    assert " reason=failed " in said[0] and "the model failed" in said[0]


def test_a_log_line_is_bounded_and_one_line() -> None:
    """Long texts are cut, line ends and quotes escaped; structures, which may hold what users said, are left out."""
    said = line(
        "lookahead.failed", {"error": "a\nb\u2028c" + "x" * 5000, "missed": ["secret"], "session": "", "s": 0.1 + 0.2}
    )
    assert said.startswith('lookahead.failed error="a\\nb\\u2028c') and said.endswith(" s=0.3")
    assert len(said) < 400 and said.isprintable() and "secret" not in said and "session" not in said
    full = line("error", {f"f{k}": "y" * 290 for k in range(9)})
    assert len(full) == 1000 and full.endswith("...")
    assert line("e", {"a": "100% {x} %s", "b": 'q"=', "ok": True}) == 'e a="100% {x} %s" b="q\\"=" ok=True'


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
