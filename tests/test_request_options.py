"""The constant part of the agent's requests: what of it background calls on the agent's own engine repeat."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import Events, chat, make_runtime, settle, virtual
from smoothctx import HandleState, ParallelSummarize, Policy, Summarize
from smoothctx.engines.wire import without_delivery, without_form
from smoothctx.testing import FakeEngine

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
#: what the prompt and the model's state are made of
PROMPT = {"temperature": 0, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}, "seed": 7}
#: how the agent's own answers come
DELIVERY = {
    "messages": [],
    "max_tokens": 512,
    "max_completion_tokens": 512,
    "min_tokens": 32,
    "n": 2,
    "stream": False,
    "stream_options": {"include_usage": False},
}
FORM = {"response_format": {"type": "json_object"}, "stop": ["\n"], "tool_choice": "required", "guided_json": {}}


@pytest.mark.parametrize("blocks", [False, True])
@virtual
async def test_a_summary_on_the_agents_engine_is_no_answer_of_the_agent(blocks: bool) -> None:
    """It repeats what the cached prefix is made of, and nothing that shapes the agent's own answers."""
    engine, events = FakeEngine(*["A summary of it."] * 20), Events()
    if blocks:
        transform: Any = ParallelSummarize(engine, keep=("messages", 2), facts=False, window=100_000)
    else:
        transform = Summarize(engine, keep=("messages", 2), max_tokens=100, facts=False)
    async with make_runtime(on_event=events) as runtime:
        policy = Policy(transform, context_window=4000, preload_kv=True)
        session = runtime.session("s", policy=policy, engine=engine, request={**PROMPT, **DELIVERY, **FORM})
        handle = session.observe(chat(30))
        assert handle is not None and await handle.wait() is HandleState.READY
        await settle(30)
        assert handle.artifact is not None and handle.artifact.warm
    assert not events.of("error")
    summaries = [c for c in engine.calls if c.max_tokens != 1]
    warming = [c for c in engine.calls if c.max_tokens == 1]
    assert summaries and warming
    for call in summaries:
        assert call.options == {**PROMPT, "tool_choice": "none"}
    for call in warming:
        assert call.options == {**PROMPT, **FORM}


def test_what_is_left_of_a_request() -> None:
    """Prefill leaves out an answer's length and delivery; another question its form as well. The given one stays."""
    request = {**PROMPT, **DELIVERY, **FORM}
    assert without_delivery(request) == {**PROMPT, **FORM}
    assert without_form(request) == PROMPT
    assert set(request) == {*PROMPT, *DELIVERY, *FORM}
