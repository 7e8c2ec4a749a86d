"""AG2 1.x: tool calls, the provider's own tools, and delegated work. What the model is sent is always whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ag2.events import (
    BaseEvent,
    BuiltinToolCallEvent,
    BuiltinToolResultEvent,
    ModelRequest,
    ModelResponse,
    ProviderReplay,
    ToolCallEvent,
    ToolCallsEvent,
    ToolResult,
    ToolResultEvent,
    ToolResultsEvent,
)
from ag2.tools import tool
from streams import FILLER, Model, agent, converse, faults, look_up, rendered, seen, small, summarised, texts

from ag2 import MemoryStream
from helpers import FakeSummarizer, make_runtime, problems, virtual
from smoothctx import Chain, KeepRecent, Offload, Policy
from smoothctx_autogen.ag2 import sessions


def caller(parallel: int, *, fixed_ids: bool = False) -> Model:
    """A model that answers each question after one round of ``parallel`` calls."""
    asked = 0

    def answer(events: list[BaseEvent]) -> str | list[str]:
        nonlocal asked
        if isinstance(events[-1], ModelRequest):
            asked += 1
            return [f"call-{k}" if fixed_ids else f"call-{asked}-{k}" for k in range(parallel)]
        return f"<{100 + asked}> answer {FILLER}"

    return Model(answer)


@pytest.mark.parametrize("parallel", [1, 2, 5])
@pytest.mark.parametrize("fixed_ids", [False, True])
@virtual
async def test_no_request_ever_parts_a_call_from_its_results(parallel: int, fixed_ids: bool) -> None:
    """Parallel calls, also with ids that repeat each turn: every request is valid for a provider and for the
    framework's own rules of replay."""
    model, summariser = caller(parallel, fixed_ids=fixed_ids), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        reply = await converse(agent(model, runtime, small(summariser)), 8, pause=1.0)
        (session,) = sessions(runtime, reply.context.stream)
        assert any(r.how == "ready" for r in session.receipts)
    assert [faults(r) for r in model.requests] == [[]] * 16
    assert any(map(summarised, model.requests)) and seen(model.requests[-1]) >= set(range(0, 16, 2))
    kept = [e for e in model.requests[-1] if isinstance(e, ToolResultsEvent)]
    assert kept and all(len(e.results) == parallel for e in kept)


@virtual
async def test_what_the_summariser_is_given_is_valid_and_whole() -> None:
    """Every result stands under its call, and none is missing."""
    model, summariser = caller(3), FakeSummarizer(delay=0.1)
    async with make_runtime() as runtime:
        await converse(agent(model, runtime, small(summariser)), 8, pause=1.0)
    assert summariser.calls
    for request in summariser.inputs:
        assert problems(request) == []
        said = "\n".join(str(m.get("content")) for m in request)
        assert "[no result]" not in said
        for message in request:
            for made in message.get("tool_calls") or ():
                assert f"value of {made['id']}" in said


@virtual
async def test_one_question_and_then_only_tool_rounds() -> None:
    """A single question, calls and results for ever: the rounds are summarised, the question stays."""

    def answer(events: list[BaseEvent]) -> str | list[str]:
        n = len(model.requests)
        return [f"r{n}-a", f"r{n}-b"] if n < 14 else "<90> done"

    model = Model(answer, delay=0.3)
    async with make_runtime() as runtime:
        await agent(model, runtime, small(FakeSummarizer(delay=0.1))).ask("<0> the question")
    assert [faults(r) for r in model.requests] == [[]] * 14
    assert summarised(model.requests[-1]) and max(len(rendered(r)) for r in model.requests) < 20
    assert all("<0> the question" in texts(r) for r in model.requests)


@virtual
async def test_big_results_are_offloaded_in_every_copy() -> None:
    """One result above ``max_message_tokens``: neither the wrapped nor the loose copy of it is sent."""

    @tool
    async def look_up(key: str) -> str:
        """Look something up."""
        return "big output " * 2000

    policy = small(
        FakeSummarizer(),
        trigger=("tokens", 50_000),
        hard_limit=("tokens", 100_000),
        land_at=("tokens", 10_000),
        max_message_tokens=500,
        context_window=120_000,
    )
    model, stream = caller(2), MemoryStream()
    async with make_runtime() as runtime:
        await converse(agent(model, runtime, policy, tools=[look_up]), 2, stream=stream)
    assert [faults(r) for r in model.requests] == [[]] * 4
    for request in model.requests[1:]:
        assert "[offloaded:" in texts(request) and sum(len(repr(vars(e))) for e in request) < 30_000
        loose = [e for e in request if isinstance(e, ToolResultEvent)]
        assert not any("big output " * 500 in repr(e.result) for e in loose)
    held = [e for e in await stream.history.get_events() if isinstance(e, ToolResultsEvent)]
    assert all(len(r.result.parts[0].content) > 20_000 for e in held for r in e.results), "the stored ones are whole"


@virtual
async def test_local_transforms_keep_the_pairs() -> None:
    """Offload and keep-recent on wrapped results."""
    policy = Policy(
        Chain(Offload(min_tokens=50), KeepRecent(("messages", 6))),
        trigger=("messages", 8),
        hard_limit=("messages", 40),
        land_at=("messages", 6),
        min_savings=0.0,
    )
    model = caller(3)
    async with make_runtime() as runtime:
        reply = await converse(agent(model, runtime, policy), 10, pause=1.0)
        assert sessions(runtime, reply.context.stream)[0].receipts
    assert [faults(r) for r in model.requests] == [[]] * 20


class Signed(BaseEvent, ProviderReplay):
    """State that a provider wants back, as its reasoning items are."""

    __replay_role__ = "anchor"

    data: str


@virtual
async def test_what_a_provider_wants_back_travels_with_its_response() -> None:
    """Signed state and the provider's own tools are sent with the response that they led to, or summarised with it."""
    model, stream, summariser = Model(), MemoryStream(), FakeSummarizer(delay=0.1)
    provided = (Signed, BuiltinToolCallEvent, BuiltinToolResultEvent)

    def answer(events: list[BaseEvent]) -> str:
        n = len(model.requests)
        search = BuiltinToolCallEvent("web_search", id=f"s{n + 1}", arguments='{"q": "x"}')
        found = BuiltinToolResultEvent(
            parent_id=f"s{n + 1}", name="web_search", result=ToolResult(f"<{500 + n}> found")
        )
        model.publish = [Signed(data=f"state {n + 1}"), search, found]
        return f"<{2 * n - 1}> answer {FILLER}"

    model.answer = answer
    async with make_runtime() as runtime:
        await converse(agent(model, runtime, small(summariser)), 9, stream=stream, pause=1.0)
    assert any(map(summarised, model.requests)) and [faults(r) for r in model.requests] == [[]] * 9
    history = list(await stream.history.get_events())
    groups: dict[int, list[BaseEvent]] = {}
    for i, event in enumerate(history):
        if isinstance(event, ModelResponse):
            start = max(k for k in range(i) if isinstance(history[k], ModelRequest))
            groups[id(event)] = [e for e in history[start:i] if isinstance(e, provided)]
    assert sum(map(len, groups.values())) == 3 * 8
    for request in model.requests:
        due = [e for event in request for e in groups.get(id(event), ())]
        assert [id(e) for e in request if isinstance(e, provided)] == list(map(id, due))
    assert any("<503> found" in str(m) for r in summariser.inputs for m in r), "what the search found is summarised"


@virtual
async def test_a_tool_that_ends_the_turn_leaves_its_result_loose() -> None:
    """A final tool's result is never wrapped by the framework: it answers its call all the same."""

    @tool
    async def look_up(key: str) -> Any:
        """Look something up."""
        return ToolResult(f"value {FILLER}", final=True)

    asked = 0

    def answer(events: list[BaseEvent]) -> str | list[str]:
        nonlocal asked
        asked += 1
        return [f"final-{asked}"] if asked % 2 else f"<{100 + asked}> answer {FILLER}"

    model, stream = Model(answer), MemoryStream()
    async with make_runtime() as runtime:
        await converse(
            agent(model, runtime, small(FakeSummarizer(delay=0.1)), tools=[look_up]), 12, stream=stream, pause=1.0
        )
        (session,) = sessions(runtime, stream)
        assert session.receipts
    for request in model.requests:
        made = {c.id for e in request if isinstance(e, ModelResponse) for c in e.tool_calls.calls}
        answered = {e.parent_id for e in request if isinstance(e, ToolResultEvent)}
        assert made == answered


@virtual
async def test_a_delegate_has_a_session_of_its_own() -> None:
    """A sub-agent's rewrites leave the parent's session alone, and its stream is another."""
    child_model, parent_model = caller(1), Model()
    async with make_runtime() as runtime:
        policy = small(FakeSummarizer(delay=0.1))
        stream = MemoryStream()
        child = agent(child_model, runtime, policy, name="child")
        delegate = child.as_tool(description="Works.", name="look_up", stream=stream)

        def answer(events: list[BaseEvent]) -> Any:
            if isinstance(events[-1], ModelRequest):
                n = len(parent_model.requests)
                objective = f'{{"objective": "<{n}> do it {FILLER}"}}'
                return ModelResponse(
                    tool_calls=ToolCallsEvent([ToolCallEvent("look_up", id=f"d{n}", arguments=objective)])
                )
            return f"done {FILLER}"

        parent_model.answer = answer
        parent = agent(parent_model, runtime, policy, name="parent", tools=[delegate])
        reply = await converse(parent, 8, pause=1.0)
        (mine,), (its,) = sessions(runtime, reply.context.stream), sessions(runtime, stream)
        assert mine is not its and mine.receipts and its.receipts
    for model in (parent_model, child_model):
        assert [faults(r) for r in model.requests] == [[]] * len(model.requests)
        assert any(map(summarised, model.requests))


@virtual
async def test_no_event_is_changed() -> None:
    """The events of a long tool conversation are what they were, field by field."""
    model, stream = caller(2), MemoryStream()
    async with make_runtime() as runtime:
        one = agent(model, runtime, small(FakeSummarizer(delay=0.1)), tools=[look_up])
        await converse(one, 4, stream=stream, pause=1.0)
        before = [(e, copy.deepcopy(e.to_dict())) for e in await stream.history.get_events()]
        await converse(one, 6, stream=stream, first=4, pause=1.0)
    assert any(map(summarised, model.requests))
    assert all(e.to_dict() == fields for e, fields in before)
