"""What a caller may get wrong with AG2 1.x, a middleware that is in effect twice, and results beside a huge one."""

from __future__ import annotations

from typing import Any

import pytest
from ag2.events import ModelResponse, ToolCallsEvent, ToolResultsEvent
from ag2.middleware import BaseMiddleware
from ag2.testing import TestConfig
from streams import FILLER, Model, agent, call, converse, faults, look_up, rendered, small, summarised

from ag2 import Agent, MemoryStream, Middleware, tool
from helpers import Events, FakeSummarizer, Rateless, make_runtime, virtual
from smoothctx import ClosedError, ConfigurationError, Offload, Policy
from smoothctx_autogen.ag2 import ConfigModel, LookaheadMiddleware, forget, restore, saved, sessions


@pytest.mark.parametrize("where", ["agent", "ask"])
@virtual
async def test_the_second_of_one_call_does_nothing(where: str) -> None:
    """Listed twice, or on the agent and in the call: the same requests and the same summaries as with one."""
    found: list[Any] = []
    for twice in (False, True):
        summariser, model = FakeSummarizer(delay=0.1), Model(delay=0.3)
        async with make_runtime() as runtime:
            policy = small(summariser)
            ours = Middleware(LookaheadMiddleware, runtime=runtime, policy=policy)
            # made anew, as by a function that builds the agent's middleware: alike is enough
            again = Middleware(LookaheadMiddleware, runtime=runtime, policy=policy, report_usage=False)
            listed = [ours, again] if twice and where == "agent" else [ours]
            one, stream = Agent("assistant", config=model, middleware=listed), MemoryStream()
            for turn in range(20):
                added = [again] if twice and where == "ask" else []
                await one.ask(f"<{2 * turn}> question {FILLER}", stream=stream, middleware=added)
            (session,) = sessions(runtime, stream)
            receipts = [(r.how, r.tokens_before, r.tokens_after) for r in session.receipts]
            found.append((summariser.calls, receipts, [rendered(r) for r in model.requests]))
            assert receipts and not any(faults(r) for r in model.requests)
    assert found[0] == found[1]


@virtual
async def test_two_that_differ_are_both_at_work() -> None:
    """Another policy is not the same again: the outer one offloads, the inner one summarises what is left."""
    summariser, model = FakeSummarizer(delay=0.1), Model(delay=0.3)
    async with make_runtime() as runtime:
        outer = Policy(Offload(), trigger=("messages", 5), hard_limit=("messages", 100), land_at=("messages", 3))
        both = [Middleware(LookaheadMiddleware, runtime=runtime, policy=p) for p in (outer, small(summariser))]
        await converse(Agent("assistant", config=model, middleware=both), 12)
    assert summariser.calls and summarised(model.requests[-1])


@virtual
async def test_a_call_inside_a_call_on_another_stream_is_one_of_its_own() -> None:
    """An agent that is asked by a middleware inside the call, with the same lookahead: it has its view."""
    summariser, model, inside = FakeSummarizer(delay=0.1), Model(delay=0.3), Model(delay=0.3)
    async with make_runtime() as runtime:
        ours = Middleware(LookaheadMiddleware, runtime=runtime, policy=small(summariser))
        helper, notes = Agent("helper", config=inside, middleware=[ours]), MemoryStream()

        class Asks(BaseMiddleware):
            async def on_llm_call(self, call_next: Any, events: Any, context: Any) -> Any:
                await helper.ask(f"<{len(events)}> aside {FILLER}", stream=notes)
                return await call_next(events, context)

        await converse(Agent("assistant", config=model, middleware=[ours, Middleware(Asks)]), 12)
        assert sessions(runtime, notes)[0].receipts
    assert summarised(model.requests[-1]) and summarised(inside.requests[-1])


@virtual
async def test_a_runtime_that_was_never_opened_is_the_callers_mistake() -> None:
    """The first turn raises, before the model is asked; once it is open everything works."""
    events, model = Events(), Model()
    runtime = make_runtime(on_event=events)
    one = agent(model, runtime, small(FakeSummarizer()))
    for _ in range(2):
        with pytest.raises(ClosedError, match="async with Runtime"):
            await converse(one, 1)
    assert model.requests == [] and events == []
    async with runtime:
        await converse(one, 3)
    assert len(model.requests) == 3


@pytest.mark.parametrize("error", [RuntimeError("no rates"), ClosedError("it was closed")], ids=repr)
@virtual
async def test_an_engine_that_no_session_can_be_had_with_leaves_the_agent_as_it_was(error: Exception) -> None:
    """It is no runtime that was never opened, whatever the engine raises: the turns go on, and events tell of it."""
    events, model = Events(), Model()
    async with make_runtime(on_event=events) as runtime:
        await converse(agent(model, runtime, small(FakeSummarizer()), engine=Rateless(error)), 3)
    assert len(model.requests) == 3
    assert [e.data["where"] for e in events.of("error")] == ["lines"] * 3 and not events.of("turn.raw")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tenant": ""}, "tenant=''"),
        ({"tenant": 3}, "tenant=3"),
        ({"engine": "x"}, "engine='x'"),
        ({"request": 3}, "request=3"),
        ({"request": "x"}, "request='x'"),
        ({"report_usage": "no"}, "report_usage='no'"),
    ],
)
@virtual
async def test_wrong_options_are_named(given: dict[str, Any], names: str) -> None:
    """They raise at the first turn, in the caller's words; nothing is switched off in silence."""
    model = Model()
    async with make_runtime() as runtime:
        ours = Middleware(LookaheadMiddleware, runtime=runtime, policy=small(FakeSummarizer()), **given)
        with pytest.raises(ConfigurationError, match=f"^{names}"):
            await Agent("assistant", config=model, middleware=[ours]).ask("hello")
    assert model.requests == []


@pytest.mark.parametrize("model_id", ["", " ", 3])
def test_a_wrong_model_id_is_named(model_id: Any) -> None:
    """It would name artifacts, or quietly be left out."""
    with pytest.raises(ConfigurationError, match="^model_id="):
        ConfigModel(TestConfig("hi"), model_id=model_id)


@pytest.mark.parametrize("texts", [None, "junk", b"junk", {"a": "b"}, 3])
@virtual
async def test_what_is_no_list_of_texts_is_not_restored(texts: Any) -> None:
    """The mistake of a caller, named at once."""
    async with make_runtime() as runtime:
        with pytest.raises(ConfigurationError, match="^saved="):
            restore(runtime, MemoryStream(), texts)


@virtual
async def test_bad_texts_are_events() -> None:
    """Saved texts come from outside: what cannot be read is said, the turns go on, and what can be read applies."""
    events, model, stream = Events(), Model(), MemoryStream()
    policy = small(FakeSummarizer(delay=0.1), model_id="m")
    async with make_runtime() as runtime:
        await converse(agent(Model(), runtime, policy), 8, stream=stream, pause=1.0)
        kept = saved(runtime, stream)
    async with make_runtime(on_event=events) as runtime:
        restore(runtime, stream, [1, "junk", None, *kept])
        assert [e.data["error"] for e in events.of("error")] == [
            "MessageError: saved[0]: expected a text, got int",
            "MessageError: saved[2]: expected a text, got NoneType",
        ]
        await converse(agent(model, runtime, policy), 1, stream=stream, first=9)
    assert summarised(model.requests[0])
    assert [e.data["where"] for e in events.of("error")] == ["ag2.restore", "ag2.restore", "restore"]


@virtual
async def test_no_stream_and_no_runtime_are_named() -> None:
    """In each of the functions beside the middleware."""
    async with make_runtime() as runtime:
        for stream in (None, 3, ""):
            with pytest.raises(ConfigurationError, match="^stream="):
                sessions(runtime, stream)
            with pytest.raises(ConfigurationError, match="^stream="):
                await forget(runtime, stream)
    for wrong in (None, "x"):
        with pytest.raises(ConfigurationError, match="^runtime="):
            saved(wrong, MemoryStream())  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="^runtime="):
            restore(wrong, MemoryStream(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["max_message_tokens", "offload"])
@virtual
async def test_a_small_result_beside_a_huge_one_stays(how: str) -> None:
    """Parallel calls: the huge result becomes a stub, the small one is read as it is."""

    @tool
    async def read_log(key: str) -> str:
        """Read the log."""
        return "log line\n" * 20_000

    def answer(events: list[Any]) -> Any:
        if isinstance(events[-1], ToolResultsEvent):
            return "<90> done"
        log = call(f"log{len(events)}")
        log.name = "read_log"
        return ModelResponse(tool_calls=ToolCallsEvent([log, call(f"small{len(events)}")]))

    summariser = FakeSummarizer()
    limits: dict[str, Any] = {"hard_limit": ("tokens", 400_000), "land_at": ("tokens", 10), "min_savings": 0.0}
    policy = (
        small(summariser, trigger=("tokens", 300_000), hard_limit=("tokens", 400_000), land_at=("tokens", 10_000),
              max_message_tokens=500)
        if how == "max_message_tokens"
        else Policy(Offload(min_tokens=500, keep_recent=0), trigger=("tokens", 20_000), **limits)
    )  # fmt: skip
    model = Model(answer, delay=0.3)
    async with make_runtime() as runtime:
        one = Agent("assistant", config=model, tools=[read_log, look_up],
                    middleware=[Middleware(LookaheadMiddleware, runtime=runtime, policy=policy)])  # fmt: skip
        await converse(one, 3, pause=1.0)
    request = model.requests[-1]
    results = [r for e in request if isinstance(e, ToolResultsEvent) for r in e.results]
    told = {r.parent_id: r.result.parts[0].content for r in results}
    logs = [t for i, t in told.items() if i.startswith("log")]
    others = {i: t for i, t in told.items() if i.startswith("small")}
    assert not faults(request) and len(others) == 3 and len(logs) == 3
    assert all(t == f"value of {i} {FILLER}" for i, t in others.items())
    assert sum("[offloaded:" in t for t in logs) >= (3 if how == "max_message_tokens" else 1)
