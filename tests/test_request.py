"""The constant part of an agent's request: a prompt kept apart and tools are repeated, and what changes is noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from helpers import A, Events, FakeSummarizer, H, Message, S, chat, make_policy, make_runtime, settle, virtual
from slotted import SlottedEngine
from smoothctx import ConfigurationError, HandleState, Isolate, KStepOff, Policy, Session
from smoothctx.economics import Speed
from smoothctx.request import MAX_REQUESTS, MOST_STEADY, Requests, Steadiness, same
from smoothctx.testing import FakeEngine

RULES = S("A rule of many. " * 500)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
REQUEST = {"messages": [RULES], "tools": [TOOL]}


def engine_of(kind: type[FakeEngine], **options: Any) -> Any:
    """One that writes summaries."""
    speed = Speed(5000.0, 100.0)
    if kind is SlottedEngine:
        return SlottedEngine(*["A summary."] * 50, speed=speed, slots=4)
    return FakeEngine(*["A summary."] * 50, speed=speed, block_tokens=16, **options)


def policy_of(engine: Any, **options: Any) -> Policy:
    """Summaries by the agent's own engine."""
    return make_policy(engine, window=8000, commit="hard_limit", land_at=("fraction", 0.2), preload_kv=True, **options)


async def call(session: Session, engine: Any, messages: list[Message], **changed: Any) -> Any:
    """One turn of an agent whose framework keeps its system prompt apart."""
    view = await session.commit(messages)
    async with session.foreground() as watched:
        options = {"tools": [TOOL], **changed, **session.request_options()}
        await engine.complete([RULES, *view], max_tokens=1, **options)
        watched.first_token()
    return engine.calls[-1]


def ahead(engine: FakeEngine) -> list[Any]:
    """The preloads."""
    return [c for c in engine.calls if c.max_tokens == 1]


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("kind", [FakeEngine, SlottedEngine])
@virtual
async def test_promise_15_a_prompt_kept_apart_is_preloaded_and_stands_before_summaries(
    kind: type[FakeEngine], seen: bool
) -> None:
    """Given, or seen with each turn: the summary is read from the cache, and the commit finds its view warm."""
    engine = engine_of(kind)
    async with make_runtime() as runtime:
        request = None if seen else REQUEST
        session = runtime.session("s", policy=policy_of(engine), engine=engine, request=request)
        if seen:
            session.use_request(REQUEST)
        messages = chat(26, size=100, system=False)
        await call(session, engine, messages[:10])
        before = len(engine.calls)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        own = [c for c in engine.calls[before:] if c.max_tokens != 1]
        assert own and all(c.messages[0] == RULES for c in own)
        assert own[-1].cached_tokens > 2000, "the rules, at least"
        question, done = H("And now?", size=20), len(session.receipts)
        while len(session.receipts) == done:
            if seen:
                session.use_request(REQUEST)
            messages = [*messages, question]
            last = await call(session, engine, messages)
            messages = [*messages, A("ok " * 20)]
            session.observe(messages)
            await settle(5)
        assert session.receipts[-1].warm is True
        assert last.input_tokens - last.cached_tokens < 200


@virtual
async def test_promise_15_another_request_is_another_prompt() -> None:
    """Tools that change after the preload: what was warmed counts no more, and the new prompt is warmed instead."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy_of(engine), engine=engine)
        session.use_request(REQUEST)
        messages = chat(26, size=100, system=False)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert handle.artifact is not None and handle.artifact.warm
        warmed = sum(c.input_tokens - c.cached_tokens for c in ahead(engine))
        other = {**TOOL, "function": {**TOOL["function"], "name": "find"}}
        session.use_request({**REQUEST, "tools": [other]})
        assert runtime.counters.wasted_tokens == warmed > 0
        messages = [*messages, H("And now?", size=20)]
        await call(session, engine, messages, tools=[other])
        assert not session.receipts, "it waits for the limit"
        session.use_request({**REQUEST, "tools": [other]})
        before = len(engine.calls)
        session.observe([*messages, A("ok")])
        await settle(10)
        assert {c.options["tools"][0]["function"]["name"] for c in engine.calls[before:]} == {"find"}


@pytest.mark.parametrize("calls", [1, 3])
@virtual
async def test_promise_09_a_clock_in_the_prompt_is_not_preloaded(calls: int) -> None:
    """Not for ever, at least, with one call for each question or with several."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        policy = make_policy(FakeSummarizer(), window=8000, trigger=("fraction", 0.3), preload_kv=True)
        session = runtime.session("s", policy=policy, engine=engine)
        messages: list[Message] = []
        for k in range(60):
            session.use_request({"messages": [S(f"It is {k // calls} o'clock.")]})
            messages = [*messages, *chat(1, size=100, first=k, system=False)]
            await session.commit(messages[:-1])
            session.observe(messages)
            await settle(10)
        assert runtime.counters.started > 2 and len(ahead(engine)) < 12
        assert all(int(c.messages[0]["content"].split()[2]) <= 20 // calls for c in ahead(engine))


@virtual
async def test_tools_that_change_once_cost_no_preload() -> None:
    """Not even that of the lookahead that begins with the very turn in which they did."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy_of(FakeSummarizer()), engine=engine)
        session.use_request({"messages": [RULES]})
        messages = chat(26, size=100, system=False)
        await session.commit(messages[:10])
        session.use_request(REQUEST)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        assert handle.artifact is not None and handle.artifact.warm
        assert {len(c.options.get("tools", ())) for c in ahead(engine)} == {1}


@virtual
async def test_while_the_request_is_unknown_nothing_is_preloaded() -> None:
    """And again as soon as it is known."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy_of(FakeSummarizer()), engine=engine, request=REQUEST)
        session.use_request(None)
        messages = chat(26, size=100, system=False)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY and not engine.calls
        session.use_request({})
        await call(session, engine, [*messages, H("And now?", size=20)])
        session.observe([*messages, H("And now?", size=20), A("ok")])
        await settle(10)
        assert len(engine.calls) > 1 and session.prompt == (RULES,)


@virtual
async def test_promise_15_tools_that_change_in_place_are_another_request() -> None:
    """Their owner's list is not ours."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        tools = [{**TOOL}]
        given = {"tools": tools}
        session = runtime.session("s", policy=policy_of(engine), engine=engine)
        session.use_request(given)
        handle = session.observe(chat(26, size=100, system=False))
        assert handle is not None and await handle.wait() is HandleState.READY
        assert session._serving.preloading.preloaded(*handle.flight.keys)
        tools[0]["function"] = {**TOOL["function"], "name": "find"}
        session.use_request(given)
        assert not session._serving.preloading.preloaded(*handle.flight.keys)
        assert session.request["tools"][0]["function"]["name"] == "find"


@virtual
async def test_promise_15_what_is_salvaged_is_not_called_warm() -> None:
    """It was, for another view: a fork finds nothing of it in its own place."""
    engine = engine_of(SlottedEngine)
    async with make_runtime() as runtime:
        policy = make_policy(engine, window=8000, trigger=("fraction", 0.5), preload_kv=True)
        session = runtime.session("s", policy=policy, engine=engine)
        messages = chat(26, size=100)
        handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        messages = [*messages, H("And now?", size=20)]
        await session.commit(messages)
        assert session.receipts[-1].warm is True
        fork = session.fork("f")
        await fork.commit([*messages[:-1], H("Or rather?", size=20)])
        assert [(r.how, r.warm) for r in fork.receipts] == [("salvaged", False)]


@virtual
async def test_what_was_given_stands_above_what_is_seen() -> None:
    """Also in a fork."""
    async with make_runtime() as runtime:
        engine = engine_of(FakeEngine)
        session = runtime.session("s", policy=policy_of(engine), engine=engine, request={"tools": [TOOL]})
        session.use_request({"tools": [], "messages": [RULES]})
        fork = session.fork("f")
        for one in (session, fork):
            assert one.request == {"tools": [TOOL]} and one.prompt == (RULES,)
        fork.use_request({})
        assert fork.prompt == () and session.prompt == (RULES,)


@pytest.mark.parametrize("wrong", ["You are.", [RULES, "text"], [{"content": "no role"}], 3])
@virtual
async def test_a_prompt_that_is_none_is_refused_with_words(wrong: Any) -> None:
    """Where it is given; one that is seen is an error event, and the turn goes on."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        engine = engine_of(FakeEngine)
        with pytest.raises(ConfigurationError, match="stand before the conversation"):
            runtime.session("s", policy=policy_of(engine), engine=engine, request={"messages": wrong})
        with pytest.raises(ConfigurationError, match="stand before the conversation"):
            Isolate(system="You help.", instruction="Help.", request={"messages": wrong})
        session = runtime.session("s", policy=policy_of(engine), engine=engine, request=REQUEST)
        session.use_request({"messages": wrong, "seed": 1})
        assert session.request == {"tools": [TOOL], "seed": 1} and session.prompt == (RULES,)
        bare = runtime.session("b", policy=policy_of(engine), engine=engine)
        bare.use_request({"messages": wrong})
        assert bare.prompt == () and events.of("error")


@virtual
async def test_promise_15_a_commit_right_after_the_change_is_not_called_warm() -> None:
    """The view is warm behind the old tools only."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        policy = make_policy(engine, window=8000, trigger=("fraction", 0.5), preload_kv=True)
        session = runtime.session("s", policy=policy, engine=engine)
        messages = chat(26, size=100, system=False)
        for change in (False, True):
            session.use_request(REQUEST)
            handle = session.observe(messages)
            assert handle is not None and await handle.wait() is HandleState.READY
            assert handle.artifact is not None and handle.artifact.warm
            messages = [*messages, H("And now?", size=20)]
            if change:
                session.use_request({"messages": [RULES]})
            await call(session, engine, messages)
            assert session.receipts[-1].warm is not change
            messages = [*messages, *chat(26, size=100, first=100, system=False)]


@given(st.lists(st.sampled_from(["same", "change", "unknown"]), max_size=60))
def test_a_request_is_steady_again_after_enough_turns(history: list[str]) -> None:
    """Whatever happened before; never while it is unknown, nor in the turn of a third change in a row."""
    found, row = Steadiness(), 0
    for what in history:
        found.seen({"same": False, "change": True, "unknown": None}[what])
        found.turn()
        row = row + 1 if what == "change" else 0
        assert found.known is (what != "unknown")
        assert not (found.steady and (what == "unknown" or row > 3))
    found.seen(False)
    for _ in range(MOST_STEADY):
        found.turn()
    assert found.steady
    for _ in range(2 * MOST_STEADY):
        found.turn()
    found.seen(True)
    assert found.steady, "long ago is forgotten"


@virtual
async def test_sessions_with_one_request_share_it() -> None:
    """The tools of an agent are held once, however many sessions it has; nothing is copied for one that is open."""
    async with make_runtime() as runtime:
        engine, policy = engine_of(FakeEngine), policy_of(FakeSummarizer())
        sessions = [runtime.session(f"s{k}", policy=policy, engine=engine, request=REQUEST) for k in range(3)]
        seen = runtime.session("seen", policy=policy, engine=engine)
        seen.use_request({"tools": [dict(TOOL)], "messages": [dict(RULES)]})
        assert len({id(s.request) for s in [*sessions, seen]}) == 1
        for k in range(2 * MAX_REQUESTS):
            seen.use_request({"tools": [TOOL], "seed": k})
        assert len(runtime.requests._known) == MAX_REQUESTS
        seen.use_request(REQUEST)
        assert (seen.request, seen.prompt) == (sessions[0].request, sessions[0].prompt)


@virtual
async def test_a_fork_of_an_unknown_request_knows_none_either() -> None:
    """Until it is seen there, too."""
    async with make_runtime() as runtime:
        engine = engine_of(FakeEngine)
        session = runtime.session("s", policy=policy_of(FakeSummarizer()), engine=engine, request=REQUEST)
        session.use_request(None)
        fork = session.fork("f")
        handle = fork.observe(chat(26, size=100, system=False))
        assert handle is not None and await handle.wait() is HandleState.READY and not engine.calls
        assert fork.request == session.request


@virtual
async def test_promise_09_what_another_session_uses_is_not_wasted() -> None:
    """The tools of one of two sessions change; the other commits what was warmed for both."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        policy = make_policy(FakeSummarizer(), window=8000, trigger=("fraction", 0.5), preload_kv=True, model_id="one")
        one, two = (runtime.session(k, policy=policy, engine=engine) for k in ("one", "two"))
        messages = chat(26, size=100, system=False)
        for session in (one, two):
            session.use_request(REQUEST)
            handle = session.observe(messages)
        assert handle is not None and await handle.wait() is HandleState.READY
        one.use_request({"messages": [RULES]})
        await call(two, engine, [*messages, H("And now?", size=20)])
        assert two.receipts[-1].warm is True and not runtime.counters.wasted_tokens


@virtual
async def test_k_step_off_waits_for_no_warmth_that_cannot_come() -> None:
    """The lag is the same as without preload while the request is unknown."""
    lags = []
    for preload in (False, True):
        engine = engine_of(FakeEngine)
        async with make_runtime() as runtime:
            policy = make_policy(FakeSummarizer(), window=20_000, keep=2, commit=KStepOff(3), preload_kv=preload)
            session = runtime.session("s", policy=policy, engine=engine)
            messages: list[Message] = []
            for k in range(30):
                session.use_request(None)
                messages = [*messages, *chat(1, size=100, first=k, system=False)]
                await session.commit(messages[:-1])
                session.observe(messages)
                await settle(5)
            lags.append([r.lag for r in session.receipts])
            assert not engine.calls
    assert lags[0] == lags[1] and lags[0]


@pytest.mark.parametrize("tools", [[], [TOOL]])
@virtual
async def test_promise_15_an_opening_with_the_agents_own_request_goes_with_it(tools: list[Any]) -> None:
    """It is not called warm once that changed, nor is one warmed while it is unknown; one of its own stays."""
    engine = engine_of(FakeEngine)
    async with make_runtime() as runtime:
        parent = runtime.session("p", policy=policy_of(FakeSummarizer()), engine=engine)
        parent.use_request(REQUEST)
        messages = chat(6, size=100, system=False)
        await parent.commit(messages)
        parent.observe(messages)
        request = {"tools": tools} if tools else None
        first = parent.schedule_transform(Isolate(system="You help.", instruction="Help.", request=request), messages)
        assert await first.wait() is HandleState.READY and first.artifact is not None and first.artifact.warm
        done = len(engine.calls)
        parent.use_request(None)
        assert first.artifact is not None and first.artifact.warm is bool(tools)
        assert bool(runtime.counters.wasted_tokens) is not bool(tools)
        again = parent.schedule_transform(Isolate(system="You look.", instruction="Look.", request=request), messages)
        assert await again.wait() is HandleState.READY
        assert (len(engine.calls) > done) is bool(tools)


class Odd:
    """A value that compares with nothing and cannot be copied."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not copyable")


@virtual
async def test_values_that_cannot_be_compared_or_copied_are_taken() -> None:
    """A new object is another request each time, one and the same is not; no turn and no session fails."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        engine, policy = engine_of(FakeEngine), policy_of(FakeSummarizer())
        odd = {"extra_body": {"thing": Odd()}}
        one, two = (runtime.session(k, policy=policy, engine=engine, request=odd) for k in ("one", "two"))
        for session in (one, two, runtime.session("three", policy=policy, engine=engine)):
            for _ in range(3):
                session.use_request(odd)
            assert isinstance(session.request["extra_body"]["thing"], Odd)
        assert not events.of("request.unsteady")
        for _ in range(4):
            session.use_request({"extra_body": {"thing": Odd()}})
        assert events.of("request.unsteady") and not events.of("error")


def test_a_request_is_the_same_where_its_text_is() -> None:
    """The order of names is part of the prompt that a template writes; numbers and truth values are not the same."""
    tool = {"properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    other = {"properties": {"line": {"type": "integer"}, "path": {"type": "string"}}}
    assert tool == other and not same([tool], [other]) and same([tool], [json.loads(json.dumps(tool))])
    assert not same({"logprobs": True}, {"logprobs": 1}) and not same(1, 1.0) and not same([1], (1,))
    known, mine = Requests(), object()
    first = known.read({"tools": [tool], "thing": mine})
    assert known.read({"tools": [other], "thing": mine})[0] is not first[0]
    assert known.read({"tools": [tool], "thing": mine})[0] is first[0]
    assert known.read({"tools": [tool], "thing": object()})[0] is not first[0]
    with pytest.raises(TypeError):
        first[0]["temperature"] = 1  # type: ignore[index]  # it is not one session's alone
    assert {**first[0]} == {"tools": [tool], "thing": mine} and first[0]["tools"][0] is not tool


@pytest.mark.parametrize("opening", [False, True])
@virtual
async def test_promise_09_what_was_being_warmed_when_the_request_changed_is_wasted(opening: bool) -> None:
    """The preload ends, and its requests count, whatever becomes of the result."""
    engine = FakeEngine(*["A summary."] * 50, speed=Speed(100.0, 100.0), block_tokens=16)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy_of(FakeSummarizer()), engine=engine)
        session.use_request({"tools": [TOOL]})
        messages = chat(26, size=100, system=False)
        await session.commit(messages[:10])
        handle = session.observe(messages)
        if opening:
            handle = session.schedule_transform(Isolate(system="You help.", instruction="Help."), messages)
        assert handle is not None
        await settle(5)
        going = [c for c in engine.calls if c.outcome == "running"]
        session.use_request({"tools": []})
        await settle(1)
        assert going and all(c.outcome == "cancelled" for c in going)
        done = [c for c in engine.calls if c.outcome == "done" and c.options.get("tools")]
        assert done and runtime.counters.wasted_tokens >= sum(c.input_tokens - c.cached_tokens for c in done)
