"""AG2 classic: tool calls, whose results are grouped in one message there. What the model is sent is always valid."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from autogen import Agent, UserProxyAgent
from chats import HeldModel, Message, assistant, seen, settle, small, summarised, texts, user

from helpers import Events, problems
from smoothctx import Chain, KeepRecent, Offload, Policy, Runtime
from smoothctx_autogen.ag2_classic import Attached, attach


def calls(*ids: str, text: str | None = None) -> Message:
    """An assistant message that calls the tool once per id."""
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": "look_up", "arguments": json.dumps({"key": i})}}
            for i in ids
        ],
    }


def worker(agent: Agent, results: Any = None) -> UserProxyAgent:
    """Somebody who runs the tool for ``agent`` and asks nothing by himself."""
    person = user(1)
    person.reply_at_receive[agent] = agent.reply_at_receive[person] = True  # type: ignore[attr-defined]
    person.register_function({"look_up": results or (lambda key: f"value of {key}: {'lorem ipsum ' * 20}")})
    return person


def chat(turns: int, policy: Policy, *, parallel: int = 2, results: Any = None, fixed_ids: bool = False) -> Any:
    """``turns`` questions, each answered after one round of ``parallel`` tool calls. Returns the requests, the agents,
    the events and the receipts."""
    asked = 0

    def answer(messages: list[Message]) -> str | Message:
        nonlocal asked
        if messages[-1]["role"] == "tool":
            return f"<{100 + asked}> answer"
        asked += 1
        return calls(*(f"call-{k}" if fixed_ids else f"call-{asked}-{k}" for k in range(parallel)))

    agent, requests = assistant(answer)
    person = worker(agent, results)
    events = Events()
    with Runtime.in_thread(on_event=events) as runtime:
        attached = attach(agent, runtime, policy)
        for turn in range(turns):
            person.send(f"<{turn}> question {'lorem ipsum ' * 20}", agent, request_reply=True, silent=True)
            settle(attached)
        receipts = [r for s in attached.sessions() for r in s.receipts]
    return requests, agent, person, events, receipts


@pytest.mark.parametrize("parallel", [1, 2, 5])
@pytest.mark.parametrize("fixed_ids", [False, True])
def test_no_request_ever_parts_a_call_from_its_results(parallel: int, fixed_ids: bool) -> None:
    """Parallel calls and their grouped results: every request that reaches the model is valid, also with ids that
    repeat each turn."""
    policy = small(HeldModel(held=False))
    requests, agent, person, events, receipts = chat(8, policy, parallel=parallel, fixed_ids=fixed_ids)
    assert [problems(r) for r in requests] == [[]] * len(requests)
    assert any(map(summarised, requests)) and not events.of("error")
    assert seen(requests[-1]) >= set(range(8)), "every question is in the summary or kept"
    answered = [m for m in agent.chat_messages[person] if m["role"] == "tool"]
    assert len(answered) == 8 and {len(m["tool_responses"]) for m in answered} == {parallel}
    assert any(r.how == "ready" for r in receipts)


def test_what_the_summariser_is_given_is_valid_and_whole() -> None:
    """The summariser's own request has every result under its call, and none is missing."""
    inputs: list[list[Message]] = []

    async def model(messages: list[Message], *, max_tokens: int | None = None) -> str:
        inputs.append(copy.deepcopy(messages))
        return "The summary."

    chat(8, small(model), parallel=3)
    assert inputs
    for request in inputs:
        assert problems(request) == [] and "[no result]" not in texts(request)
        for message in request:
            for call in message.get("tool_calls") or ():
                assert f"value of {call['id']}" in texts(request)


def test_a_call_that_waits_for_its_result_pins_everything_from_it_on() -> None:
    """An unanswered batch is neither summarised nor parted while it waits."""
    agent, requests = assistant(lambda m: "<90> answer")
    person = worker(agent)
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, small(HeldModel(held=False)))
        for turn in range(2):
            person.send(f"<{turn}> question {'lorem ipsum ' * 20}", agent, request_reply=True, silent=True)
        agent.send(calls("a", "b"), person, request_reply=False, silent=True)
        waiting = agent.chat_messages[person][-1]
        for turn in range(3, 12):
            person.send(f"<{turn}> and? {'lorem ipsum ' * 20}", agent, request_reply=False, silent=True)
            view = attached._before_reply(agent.chat_messages[person])
            settle(attached)
            at = next(i for i, m in enumerate(view) if m is waiting)
            assert view[at:] == agent.chat_messages[person][-len(view[at:]) :]


def test_a_person_who_interrupts_answers_the_calls() -> None:
    """A user message that carries results: the calls count as answered, and what was said reaches the summariser."""
    inputs: list[list[Message]] = []

    async def model(messages: list[Message], *, max_tokens: int | None = None) -> str:
        inputs.append(copy.deepcopy(messages))
        return "The summary."

    agent, requests = assistant(lambda m: "<90> answer")
    person = user(1)
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, small(model))
        person.send(f"<0> question {'lorem ipsum ' * 20}", agent, request_reply=False, silent=True)
        agent.send(calls("a", "b"), person, request_reply=False, silent=True)
        interrupted = [{"role": "tool", "tool_call_id": i, "content": "USER INTERRUPTED"} for i in "ab"]
        said = {"role": "user", "content": "<1> stop that", "tool_responses": interrupted}
        person.send(said, agent, request_reply=True, silent=True)
        for turn in range(2, 9):
            person.send(f"<{turn}> question {'lorem ipsum ' * 20}", agent, request_reply=True, silent=True)
            settle(attached)
    assert [problems(r) for r in requests] == [[]] * len(requests)
    assert any(map(summarised, requests))
    assert any("<1> stop that" in texts(r) and "[no result]" not in texts(r) for r in inputs)


def test_a_big_result_is_offloaded_in_the_form_that_is_sent() -> None:
    """One result above ``max_message_tokens``: what reaches the model is the stub, also in the nested field."""
    policy = small(
        HeldModel(),
        trigger=("tokens", 50_000),
        hard_limit=("tokens", 100_000),
        land_at=("tokens", 10_000),
        max_message_tokens=500,
        context_window=120_000,
    )
    requests, agent, person, _, _ = chat(2, policy, results=lambda key: "big output " * 2000)
    after = [r for r in requests if r[-1]["role"] == "tool"]
    assert after and [problems(r) for r in requests] == [[]] * len(requests)
    for request in after:
        assert "[offloaded:" in texts(request) and len(texts(request)) < 20_000
    held = [m for m in agent.chat_messages[person] if m["role"] == "tool"]
    assert all(len(r["content"]) > 20_000 for m in held for r in m["tool_responses"]), "the stored ones are whole"


def test_offload_and_keep_recent_keep_the_pairs() -> None:
    """The local transforms on grouped results."""
    policy = Policy(
        Chain(Offload(min_tokens=50), KeepRecent(("messages", 6))),
        trigger=("messages", 8),
        hard_limit=("messages", 30),
        land_at=("messages", 6),
        min_savings=0.0,
    )
    requests, *_, receipts = chat(10, policy, parallel=3)
    assert receipts and [problems(r) for r in requests] == [[]] * len(requests)


def test_one_user_message_and_then_only_tool_rounds() -> None:
    """A single question followed by calls and results for ever: the rounds are summarised, the question stays."""
    rounds = 0

    def answer(messages: list[Message]) -> str | Message:
        nonlocal rounds
        rounds += 1
        return calls(f"r{rounds}-a", f"r{rounds}-b") if rounds < 14 else "<90> done"

    agent, requests = assistant(answer)
    person = worker(agent)
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, small(HeldModel(held=False)))
        agent.register_hook("update_agent_state", lambda a, messages: settle(attached))
        person.send("<0> the question", agent, request_reply=True, silent=True)
    assert [problems(r) for r in requests] == [[]] * len(requests)
    assert summarised(requests[-1]) and max(map(len, requests)) < 20
    assert all("<0> the question" in texts(r) for r in requests)


def test_hooks_that_trim_behind_ours_see_plain_messages() -> None:
    """The view is what any other hook of the framework reads: chat dicts."""
    agent, _ = assistant(lambda m: "answer")
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, small(HeldModel(held=False)))
        assert isinstance(attached, Attached)
        read: list[Any] = []
        agent.register_hook("process_all_messages_before_reply", lambda m: read.append(m) or m[-3:])
        person = user(1)
        for turn in range(10):
            person.send(f"<{turn}> question {'lorem ipsum ' * 20}", agent, request_reply=True, silent=True)
            settle(attached)
        assert all(isinstance(m, dict) and m["role"] in ("user", "assistant") for view in read for m in view)
        assert any(map(summarised, read)) and isinstance(person, Agent)
