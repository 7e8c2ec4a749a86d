"""A sub-agent's opening on the real embedded engine: its first call is cached, as the server itself reports."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Generator

import pytest

from helpers import FakeSummarizer, Message, make_policy
from smoothctx import HandleState, Isolate, Runtime, Session
from smoothctx.engines import Completion, EmbeddedEngine, find_weights

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the extra 'local'"),
]
FACTS = [
    f"Note {k}: the sensor in room {k} shows {k * 7} degrees, and its battery is at {90 - k} percent." for k in range(6)
]


@pytest.fixture(scope="module")
def server() -> Generator[EmbeddedEngine]:
    """One engine with three slots."""
    with asyncio.Runner() as runner:
        engine = EmbeddedEngine(find_weights(), context_window=1024, slots=3, start_timeout_s=300.0)
        runner.run(engine.start())
        runner.run(engine.disconnect())
        yield engine
        runner.run(engine.aclose())


def history() -> list[Message]:
    """A parent's turns."""
    messages: list[Message] = [{"role": "system", "content": "You watch over a building."}]
    for fact in FACTS:
        messages += [{"role": "user", "content": fact}, {"role": "assistant", "content": "Noted."}]
    return messages


async def ask(session: Session, engine: EmbeddedEngine, messages: list[Message]) -> Completion:
    """One turn: what the server answered and counted."""
    view = await session.commit(messages)
    async with session.foreground() as call:
        answer = await engine.complete(view, max_tokens=4, temperature=0, **session.request_options())
        call.first_token()
    session.observe([*messages, {"role": "assistant", "content": answer.text}])
    return answer


@pytest.mark.parametrize("preloaded", [True, False])
async def test_the_first_call_of_a_sub_agent(server: EmbeddedEngine, preloaded: bool) -> None:
    """Preloaded, all but the last tokens of its prompt are cached, and the parent's own cache is whole; without, none
    of what is its own is."""
    await server.clear()
    policy = make_policy(FakeSummarizer(), window=100_000)
    async with Runtime() as runtime:
        parent = runtime.session("parent", policy=policy, engine=server)
        messages = history()
        first = await ask(parent, server, messages)
        isolate = Isolate(system="You find the warmest room.", instruction="Which is it?", select=lambda m: m[-8:])
        handle = parent.schedule_transform(isolate, messages, preload_kv=preloaded)
        assert await handle.wait(300) is HandleState.READY
        child = runtime.session("child", policy=policy, parent=parent, engine=server)
        answer = await ask(child, server, handle.commit(messages))
        again = await ask(parent, server, [*messages, {"role": "user", "content": "And now?"}])
    prompt, cached = answer.usage.input_tokens, answer.usage.cached_tokens
    assert prompt > 100 and cached is not None
    assert again.usage.cached_tokens is not None and again.usage.cached_tokens >= first.usage.input_tokens - 16
    if preloaded:
        assert cached >= prompt - 2
        assert runtime.counters.preload_usage.input_tokens == prompt
    else:
        assert cached < prompt // 4 and not runtime.counters.preload_usage.calls
    await server.disconnect()
