"""AG2 classic: group chats of both kinds, with lookahead on one or on all agents."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from autogen import Agent, ConversableAgent, GroupChat, GroupChatManager
from autogen.agentchat import a_initiate_group_chat, initiate_group_chat
from autogen.agentchat.group.patterns import RoundRobinPattern
from chats import HeldModel, Message, assistant, seen, settle, sleeper, small, summarised, user

from helpers import FakeSummarizer, make_runtime, problems, virtual
from smoothctx import Runtime
from smoothctx_autogen.ag2_classic import attach

FILLER = "lorem ipsum " * 20


def answering(name: str, base: int) -> tuple[ConversableAgent, list[list[Message]]]:
    """An agent that marks its n-th answer with ``base + n``."""
    agent, requests = assistant(lambda m: f"<{base + len(requests)}> {name} says {FILLER}", name=name)
    return agent, requests


@pytest.mark.parametrize("who", ["all", "one"])
def test_a_group_chat_with_a_manager(who: str) -> None:
    """Round robin between three: valid requests, rewritten views, and the group's own record stays whole."""
    (one, seen_one), (two, seen_two) = answering("one", 100), answering("two", 200)
    person = user(1)
    person.register_reply([Agent, None], lambda *_, **__: (True, f"<7> go on {FILLER}"), position=0)
    group = GroupChat([person, one, two], max_round=36, speaker_selection_method="round_robin")
    manager = GroupChatManager(group, llm_config=False)
    with Runtime.in_thread() as runtime:
        attached = [attach(a, runtime, small(HeldModel(held=False))) for a in ([one, two] if who == "all" else [one])]
        for agent, on in zip((one, two), (*attached, None), strict=False):
            if on is not None:
                agent.register_hook("update_agent_state", lambda a, messages, on=on: settle(on))
        person.initiate_chat(manager, message=f"<0> start {FILLER}", silent=True)
        assert len(attached[0].sessions()) == 1
    assert [problems(r) for r in (*seen_one, *seen_two)] == [[]] * len(seen_one + seen_two)
    assert any(map(summarised, seen_one)) and any(map(summarised, seen_two)) is (who == "all")
    assert len(group.messages) == 36 and not any(map(summarised, [group.messages]))
    assert seen(seen_one[-1]) == seen(group.messages[: len(group.messages) - 2]), "nothing lost, nothing twice"


@virtual
async def test_an_async_group_chat_never_waits() -> None:
    """Two agents of 0.3 s each: the rounds take what the models take, whatever is summarised meanwhile."""
    (one, asked_one), (two, asked_two) = sleeper(0.3, name="one"), sleeper(0.3, name="two")
    group = GroupChat([one, two], max_round=41, speaker_selection_method="round_robin")
    manager = GroupChatManager(group, llm_config=False)
    model = FakeSummarizer(delay=2.0)
    async with make_runtime() as runtime:
        attached = [attach(a, runtime, small(model, trigger=("messages", 16))) for a in (one, two)]
        await one.a_initiate_chat(manager, message=f"<0> start {FILLER}", silent=True)
        end = asyncio.get_running_loop().time()
        assert [r.how for a in attached for s in a.sessions() for r in s.receipts].count("ready") >= 2
    assert end == pytest.approx(0.3 * (len(asked_one) + len(asked_two)))


def test_a_group_pattern() -> None:
    """``initiate_group_chat`` with a pattern: the framework's newer group chats use the same hook."""
    (one, seen_one), (two, seen_two) = answering("one", 100), answering("two", 200)
    pattern = RoundRobinPattern(initial_agent=one, agents=[one, two])
    with Runtime.in_thread() as runtime:
        attached = [attach(a, runtime, small(HeldModel(held=False))) for a in (one, two)]
        for agent, on in zip((one, two), attached, strict=True):
            agent.register_hook("update_agent_state", lambda a, messages, on=on: settle(on))
        result, _, _ = initiate_group_chat(pattern=pattern, messages=f"<0> start {FILLER}", max_rounds=24)
    assert [problems(r) for r in (*seen_one, *seen_two)] == [[]] * len(seen_one + seen_two)
    assert any(map(summarised, seen_one)) and any(map(summarised, seen_two))
    assert len(result.chat_history) == 24 and not summarised(result.chat_history)


def test_a_group_pattern_with_parallel_tools() -> None:
    """A pattern runs tools through an agent of its own; calls and results stay together."""

    def look_up(key: str) -> str:
        """Look something up."""
        return f"value of {key} {FILLER}"

    def answer(messages: list[Message]) -> str | Message:
        if messages[-1]["role"] == "tool":
            return f"<{len(requests)}> answer {FILLER}"
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": f"c{len(requests)}-{k}",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": f'{{"key": "k{k}"}}'},
                }
                for k in range(2)
            ],
        }

    agent, requests = assistant(answer, name="worker")
    agent.register_for_llm(description="Look something up.")(look_up)
    agent.register_model_client(model_client_cls=_client(), answer=answer, requests=requests)
    helper, _ = answering("helper", 500)
    pattern = RoundRobinPattern(initial_agent=agent, agents=[agent, helper])
    with Runtime.in_thread() as runtime:
        attached = attach(agent, runtime, small(HeldModel(held=False)))
        agent.register_hook("update_agent_state", lambda a, messages: settle(attached))
        initiate_group_chat(pattern=pattern, messages=f"<0> start {FILLER}", max_rounds=24)
    assert len(requests) >= 6 and [problems(r) for r in requests] == [[]] * len(requests)
    assert any(map(summarised, requests)) and any(m["role"] == "tool" for r in requests for m in r)


def test_an_async_group_pattern() -> None:
    """The asynchronous form, on an event loop of its own, with the runtime on another."""
    (one, seen_one), (two, seen_two) = answering("one", 100), answering("two", 200)
    pattern = RoundRobinPattern(initial_agent=one, agents=[one, two])
    with Runtime.in_thread() as runtime:
        attached = [attach(a, runtime, small(HeldModel(held=False))) for a in (one, two)]
        for agent, on in zip((one, two), attached, strict=True):
            agent.register_hook("update_agent_state", lambda a, messages, on=on: settle(on))
        asyncio.run(a_initiate_group_chat(pattern=pattern, messages=f"<0> start {FILLER}", max_rounds=24))
    assert [problems(r) for r in (*seen_one, *seen_two)] == [[]] * len(seen_one + seen_two)
    assert any(map(summarised, seen_one)) and any(map(summarised, seen_two))


def test_messages_of_the_group_are_not_changed() -> None:
    """The same group chat with and without lookahead leaves the same record."""
    records: list[Any] = []
    for on in (False, True):
        (one, _), (two, _) = answering("one", 100), answering("two", 200)
        group = GroupChat([one, two], max_round=20, speaker_selection_method="round_robin")
        manager = GroupChatManager(group, llm_config=False)
        with Runtime.in_thread() as runtime:
            if on:
                attached = attach(one, runtime, small(HeldModel(held=False)))
                one.register_hook("update_agent_state", lambda a, messages, on=attached: settle(on))
            one.initiate_chat(manager, message=f"<0> start {FILLER}", silent=True)
        records.append(copy.deepcopy(group.messages))
    assert records[0] == records[1]


def _client() -> Any:
    from chats import Client

    return Client
