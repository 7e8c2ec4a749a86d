"""Request checker, fake model, flaky store and recorder."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import pytest

from helpers import A, H, S, T, make_policy, make_runtime, problems, tool_chat
from smoothctx import Event, StoreError
from smoothctx.testing import FakeModel, FlakyStore, Recorder, assert_valid_request, marks, run_virtual, valid_request
from smoothctx.transforms.model import ModelReply


def virtual(main: Any) -> Any:
    """Run the test on virtual time."""

    def test() -> None:
        run_virtual(main)

    test.__doc__, test.__name__ = main.__doc__, main.__name__
    return test


def call(call_id: str, arguments: Any, *, name: str = "run") -> dict[str, Any]:
    """An assistant message with one call."""
    one = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [one]}


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], []),
        ([S()], []),
        ([S(), S(), H(), A()], []),
        ([{"role": "developer", "content": "x"}, H()], []),
        (tool_chat(3), []),
        ([H(), A(None, "a", "b"), T("b"), T("a"), A()], []),
        ([H(), A(None, refusal="I will not.")], []),
        ([H(), A(None, function_call={"name": "run", "arguments": ""}), {"role": "function", "content": "x"}], []),
        ([{"role": "user", "content": None}], ["messages[0]: a user message without content"]),
        ([{"role": "user"}], ["messages[0]: a user message without content"]),
        ([{"role": "user", "content": []}], ["messages[0]: a user message without content"]),
        ([{"role": "system"}, H()], ["messages[0]: a system message without content"]),
        ([H(), A(None)], ["messages[1]: an assistant message without content and calls"]),
        (
            [H(), {"role": "assistant", "tool_calls": []}],
            ["messages[1]: an assistant message without content and calls"],
        ),
        ([H(), A(None, "a"), {"role": "tool", "tool_call_id": "a"}], ["messages[2]: a tool message without content"]),
        (
            [H(), A(None, ""), T("")],
            ["messages[1]: a call without an id", "messages[2]: a result without a tool_call_id"],
        ),
        ([H(), call("a", "{"), T("a")], ["messages[1]: the arguments of the call 'a' are no JSON: '{'"]),
        ([H(), call("a", None), T("a")], ["messages[1]: the arguments of the call 'a' are no JSON: ''"]),
        ([H(), call("a", "{}", name=""), T("a")], ["messages[1]: the call 'a' has no name"]),
        ("x", ["messages: expected a list of messages, got str"]),
        (None, ["messages: expected a list of messages, got NoneType"]),
        ([S(), A()], ["messages[1]: the first one after the system messages is of role 'assistant'"]),
        ([H(), S()], ["messages[1]: a system message behind"]),
        ([H(), T("a")], ["messages[1]: a result ('a') without its call"]),
        ([H(), A(None, "a")], ["messages[1]: the call 'a' has no result"]),
        ([H(), A(None, "a"), H(), T("a")], ["messages[1]: the call 'a' has no result", "messages[3]: a result ('a')"]),
        ([H(), A(None, "a"), T("a"), T("a")], ["messages[3]: a second result for the call 'a'"]),
        ([H(), A(None, "a"), T("b")], ["messages[2]: a result ('b') without", "messages[1]: the call 'a' has no"]),
        ([H(), A(None, "a", "a"), T("a"), T("a")], ["messages[1]: 2 calls with the id 'a'"]),
        ([H(), {"role": "robot", "content": "x"}], ["messages[1].role: 'robot' is unknown"]),
        ([H(), {"content": "x"}, 7], ["messages[1].role: missing", "messages[2]: expected a dict"]),
    ],
)
def test_what_a_provider_refuses(messages: list[Any], said: list[str]) -> None:
    """Each fault is named with its place, and a valid request has none."""
    found = valid_request(messages)
    assert len(found) == len(said) and all(f.startswith(s) for f, s in zip(found, said, strict=True)), found
    if not said:
        assert_valid_request(messages)
        assert problems([m for m in messages if m["role"] != "developer"]) == []  # as the tests of the core have it
        return
    with pytest.raises(AssertionError) as caught:
        assert_valid_request(messages)
    assert all(f in str(caught.value) for f in found) and "roles: " in str(caught.value)


# -- the model -------------------------------------------------------------------------------------------------------


@virtual
async def test_model_answers_by_its_script() -> None:
    """In turn, the last one again and again: texts, errors, callables, replies, garbage."""
    reply = ModelReply(text="with usage")
    model = FakeModel("one", ValueError("two"), lambda m: f"{len(m)} messages", reply, {"no": "text"}, KeyError)
    assert await model([H()], max_tokens=5) == "one"
    with pytest.raises(ValueError, match="two"):
        await model([H()])
    assert await model([H(), A()]) == "2 messages"
    assert await model([H()]) is reply
    assert await model([H()]) == {"no": "text"}
    for _ in range(2):
        with pytest.raises(KeyError):
            await model([H()])
    assert model.calls == 7 and model.max_tokens == [5, *[None] * 6] and model.running == 0


@virtual
async def test_model_writes_down_the_marks_of_its_input() -> None:
    """Without a script the answer names what it covers; requests are copies."""
    model = FakeModel()
    messages = [H("<3> a"), A("<12> b")]
    assert await model(messages) == "The summary. <3><12>"
    messages[0]["content"] = "edited"
    assert model.seen == marks(model.requests[0]) == {3, 12}


@virtual
async def test_model_is_held_back_and_let_go() -> None:
    """`started` and `release` order a test by events; a cancelled call is counted."""
    model = FakeModel("done", hold=True)
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await model([H()]))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await model.started.wait()
        assert (model.running, answers) == (1, [])
        with anyio.move_on_after(60):
            await ask()
        assert (model.cancelled, model.running, model.most_running) == (1, 1, 2)
        model.release.set()
    assert answers == ["done"]
    began = asyncio.get_running_loop().time()
    await FakeModel("x", delay_s=7)([H()])
    assert asyncio.get_running_loop().time() - began == 7


# -- the store -------------------------------------------------------------------------------------------------------


@virtual
async def test_store_fails_hangs_delays_and_corrupts_on_demand() -> None:
    """Reads and writes apart; the revision counts what took effect."""
    store = FlakyStore()
    store.writes.fail()
    with pytest.raises(StoreError, match="unreachable"):
        await store.put("t", "k", b"value")
    assert store.revision == 0 and await store.get("t", "k") is None
    await store.put("t", "k", b"value")
    store.reads.garbage()
    assert await store.get("t", "k") == b"\xff\x00{ue"
    assert await store.get("t", "k") == b"value"
    store.reads.hang()
    with anyio.move_on_after(99) as scope:
        await store.get("t", "k")
    assert scope.cancelled_caught
    began = asyncio.get_running_loop().time()
    store.writes.slow(5.0)
    await store.delete("t", "k")
    assert asyncio.get_running_loop().time() - began == 5 and store.revision == 2
    assert await store.get("t", "k") is None
    store.writes.garbage()
    await store.put("t", "k", b"value")
    assert await store.get("t", "k") == b"\xff\x00{ue"
    await store.aclose()
    assert store.closed and await store.get("t", "k") is not None
    assert "revision=3" in repr(store)


@virtual
async def test_store_revision_can_be_waited_for() -> None:
    """A test waits for the n-th write instead of sleeping; a value that is there already is not waited for."""
    store = FlakyStore()
    async with anyio.create_task_group() as group:
        for k in range(3):
            store.writes.slow(k + 1.0)
            group.start_soon(store.put, "t", str(k), b"x")
        await store.reached(2)
        assert (asyncio.get_running_loop().time(), store.revision) == (2.0, 2)
    await store.reached(3)


@virtual
async def test_runtime_on_a_flaky_store_with_recorder() -> None:
    """All of it together: artifacts reach the store, and the events say what happened."""
    store, events, model = FlakyStore(), Recorder(), FakeModel()
    async with make_runtime(store=store, on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, window=400, model_id="m"))
        messages = tool_chat(2, size=20)
        session.observe(messages)
        (ready,) = await events.seen("lookahead.ready")
        assert ready.session == "s" and model.calls == 1
        await store.reached(1)
        assert_valid_request(await session.commit(messages))
    assert "view.committed" in events.names() and [e.name for e in events.of("lookahead.ready")] == ["lookahead.ready"]


# -- the recorder ----------------------------------------------------------------------------------------------------


def test_recorder_is_waited_for_from_any_thread() -> None:
    """Events come from another thread; loops and plain threads wait for them."""
    events = Recorder()

    def emit() -> None:
        for _ in range(3):
            events(Event(name="x", time=0.0))

    async def main() -> int:
        thread = threading.Thread(target=emit)
        async with asyncio.timeout(30):
            async with asyncio.TaskGroup() as group:
                task = group.create_task(events.seen("x", 3))
                await asyncio.sleep(0)
                thread.start()
        thread.join(30)
        return len(task.result())

    assert asyncio.run(main()) == 3
    emit()  # the loop that waited is gone
    assert len(events.seen_sync("x", 6)) == 6
    with pytest.raises(TimeoutError, match="6 of 7 events 'x'"):
        events.seen_sync("x", 7, timeout=0.0)
