"""Lines when something inside goes wrong: no endless search, no error but those that a turn can go on from."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import CODEC, Events, FakeSummarizer, Rateless, chat, make_policy, make_runtime, virtual
from smoothctx import ClosedError, ConfigurationError, MessageError, OpenAIMessages, Runtime, Session
from smoothctx.errors import NoSession
from smoothctx.lines import MAX_LINES, Lines


class Forgetful(OpenAIMessages):
    """A codec that cannot compare."""

    def same(self, messages: Any, frozen: Any) -> bool:
        """It never can."""
        raise RuntimeError("cannot compare")


@virtual
async def test_a_codec_that_cannot_compare_ends_in_the_raw_messages() -> None:
    """Each turn has a session, their number stays within the bound, and the events within reason."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()), codec=Forgetful())
        for k in range(1, 2 * MAX_LINES):
            messages = chat(k, size=60)
            with lines.using("b", messages) as session:
                assert await session.commit(messages) == messages
                session.observe(messages)
        assert 1 <= len(lines.sessions("b")) <= MAX_LINES
        assert {e.data["where"] for e in events.of("error")} <= {"recognises", "commit", "observe", "project"}
        assert 0 < len(events.of("error")) <= 2 * MAX_LINES * (MAX_LINES + 3)


@pytest.mark.parametrize("codec", [OpenAIMessages, Forgetful, object(), "openai"], ids=repr)
@virtual
async def test_a_codec_that_is_none_is_refused_at_construction(codec: Any) -> None:
    """A class in the place of an instance is an easy slip: it is named."""
    text = "^codec: expected an instance, got the class" if isinstance(codec, type) else "expected a Codec"
    async with make_runtime() as runtime:
        with pytest.raises(ConfigurationError, match=text):
            Lines(runtime, policy=make_policy(FakeSummarizer()), codec=codec)
        with pytest.raises(ConfigurationError, match=text):
            runtime.session("s", policy=make_policy(FakeSummarizer()), codec=codec)


@pytest.mark.parametrize("name", ["recognises", "share_with"])
@virtual
async def test_an_error_inside_is_an_event_and_the_turn_goes_on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever breaks inside, a caller sees ``NoSession``, a ``ClosedError`` as from a runtime that is closed."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()), codec=CODEC)
        with lines.using("b", chat(3)) as session:
            await session.commit(chat(3))
            monkeypatch.setattr(Session, name, lambda *_: 1 / 0)
            with pytest.raises(NoSession, match="no session for 'b': ZeroDivisionError"):
                lines.find("b", chat(4))
            with pytest.raises(NoSession), lines.using("b", chat(4)):
                raise AssertionError("there is no session")
        monkeypatch.undo()
        assert [e.data["where"] for e in events.of("error")] == ["lines", "lines"]
        assert lines.find("b", chat(4)) is not None
        with pytest.raises(MessageError):
            lines.find("b", "no list")
        with pytest.raises(NoSession):
            lines.find("c", chat(1), parent="no session")  # type: ignore[arg-type]
    for never in (runtime, Runtime()):
        with pytest.raises(ClosedError) as refused:
            Lines(never, policy=make_policy(FakeSummarizer())).find("b", chat(1))
        assert not isinstance(refused.value, NoSession)


@virtual
async def test_something_else_that_was_closed_is_no_closed_runtime() -> None:
    """An engine that was closed says so in the same words; the runtime is open all the same."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        lines = Lines(runtime, policy=make_policy(FakeSummarizer()), engine=Rateless(ClosedError("the engine")))
        with pytest.raises(NoSession, match="the engine"):
            lines.find("b", chat(1))
        assert [e.data["where"] for e in events.of("error")] == ["lines"]
