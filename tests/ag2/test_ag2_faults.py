"""What goes wrong around a model call of AG2 1.x: the agent gets its answer all the same, and the turn is over."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ag2.events import ModelMessage, ModelResponse, Usage
from streams import FILLER, Model, agent, converse, faults, seen, small, summarised

import smoothctx_autogen.ag2 as ours
from ag2 import Agent, MemoryStream, Middleware
from helpers import Events, FakeSummarizer, make_runtime, virtual
from smoothctx.testing import FakeEngine
from smoothctx_autogen.ag2 import ConfigModel, LookaheadMiddleware, sessions

ODD = [math.nan, math.inf, -5, "12", True]


@pytest.mark.parametrize("provider", ["fake", "anthropic"])
@pytest.mark.parametrize("odd", ODD)
@virtual
async def test_usage_that_is_no_number_of_tokens_is_no_report(odd: Any, provider: str) -> None:
    """The agent has its answers, the summaries are made as ever, and nobody takes the odd number for a size."""
    usage = Usage(
        prompt_tokens=odd, completion_tokens=odd, cache_read_input_tokens=odd, cache_creation_input_tokens=odd
    )
    model, events = Model(delay=0.3), Events()
    model.answer = lambda sent: ModelResponse(
        ModelMessage(f"<{2 * len(model.requests) - 1}> answer {FILLER}"), usage=usage, provider=provider
    )
    async with make_runtime(on_event=events) as runtime:
        one, stream = agent(model, runtime, small(FakeSummarizer(delay=0.1))), MemoryStream()
        await converse(one, 8, stream=stream)
        (session,) = sessions(runtime, stream)
        assert session.receipts and not events.of("error")
        assert 0 < session.branch.tokens < 10_000
        assert all(call.usage is None or call.usage.input_tokens == 0 for o in session.outcomes() for call in o.after)
    assert summarised(model.requests[-1]) and not any(map(faults, model.requests))


@pytest.mark.parametrize("odd", ODD)
async def test_a_summarisers_usage_that_is_no_number_of_tokens_is_no_report(odd: Any) -> None:
    """The summary is paid for, and used."""
    usage = Usage(prompt_tokens=100.0, completion_tokens=odd, cache_read_input_tokens=odd)
    reply = await ConfigModel(Model(lambda _: "It.", usage=usage)).complete([{"role": "user", "content": "q"}])
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.cached_tokens) == (100, 0, None)


class Broken(MemoryStream):
    """A stream of which one method fails, for us alone."""

    def __init__(self, broken: str) -> None:
        self._broken = broken
        self._listeners: list[Any] = []
        super().__init__()

    def subscribe(self, func: Any = None, **options: Any) -> Any:
        """Fails or is remembered, where it is our listener."""
        found = super().subscribe(func, **options)
        if getattr(func, "__module__", "") == ours.__name__:
            self._listeners.append(found)
            if self._broken == "subscribe":
                super().unsubscribe(found)
                raise OSError("broken")
        return found

    def unsubscribe(self, sub_id: Any) -> None:
        """Fails for our listener."""
        super().unsubscribe(sub_id)
        if self._broken == "unsubscribe" and sub_id in self._listeners:
            raise OSError("broken")

    def spawn_background(self, coro: Any) -> Any:
        """Fails for what we put on the stream."""
        if self._broken == "spawn_background" and "smoothctx" in coro.cr_code.co_filename:
            raise OSError("broken")
        return super().spawn_background(coro)


@pytest.mark.parametrize("broken", ["subscribe", "unsubscribe", "spawn_background", "weave", "usage_of"])
@virtual
async def test_nothing_of_ours_around_a_call_reaches_the_agent(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails before, beside or behind the model call is an event; the call is made, and its answer is kept."""

    def fail(*_: Any) -> Any:
        raise OSError("broken")

    if hasattr(ours, broken):
        monkeypatch.setattr(ours, broken, fail)
    model, engine, events, stream = Model(delay=0.3), FakeEngine(), Events(), Broken(broken)
    async with make_runtime(on_event=events) as runtime:
        policy = small(FakeSummarizer(delay=0.1))
        lookahead = Middleware(LookaheadMiddleware, runtime=runtime, policy=policy, engine=engine)
        await converse(Agent("assistant", config=model, middleware=[lookahead]), 8, stream=stream, pause=1.0)
        foreground = runtime.foreground(engine)
        assert not foreground.busy and not foreground.seen().in_flight
        assert events.of("error") and {e.data["where"] for e in events.of("error")} == {"ag2.middleware"}
    assert len(model.requests) == 8 and seen(await stream.history.get_events()) == set(range(16))
