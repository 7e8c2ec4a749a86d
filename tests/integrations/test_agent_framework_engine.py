"""The agent's own engine under the Agent Framework: background work keeps out of its calls' way; preloads."""

from __future__ import annotations

from typing import Any

import pytest

from agent_framework_fakes import FakeClient, agent_of, ask, text
from driving import small_policy
from helpers import FakeSummarizer, fill, make_runtime, settle, virtual
from smoothctx.testing import FakeEngine
from smoothctx_autogen.agent_framework import LookaheadMiddleware

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAMS
@virtual
async def test_a_call_is_in_the_foreground_of_the_agents_engine(stream: bool) -> None:
    """While it lasts, and one user per session; the view that a commit gives is preloaded there."""
    engine, seen = FakeEngine(), []
    request = {"tools": [{"type": "function", "function": {"name": "look_up"}}]}
    async with make_runtime() as runtime:
        foreground = runtime.foreground(engine)

        def answers(_: Any) -> list[Any]:
            seen.append((foreground.prefilling, foreground.seen().in_flight))
            return [text(fill("<900> reply", 60))]

        policy = small_policy(FakeSummarizer(delay=0.1), trigger=("messages", 6))
        lookahead = LookaheadMiddleware(runtime, policy, engine=engine, request=request)
        agent = agent_of(FakeClient(reply=answers, delay=0.3), lookahead)
        session = agent.create_session()
        for k in range(8):
            await ask(agent, fill(f"<{k}> question", 60), session, stream=stream)
            assert not foreground.busy
            await settle(2)
        assert seen == [(True, 1)] * 8
        (found,) = lookahead.sessions(session)
        assert found.receipts and all(r.warm for r in found.receipts)
        assert engine.calls and all(call.options["tools"] == request["tools"] for call in engine.calls)
