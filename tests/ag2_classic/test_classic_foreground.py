"""AG2 classic and the engine's foreground: a turn is open from the hook to the reply, whatever becomes of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import anyio
import pytest
from autogen import Agent, ConversableAgent
from chats import HeldModel, small, user

from helpers import FakeSummarizer, make_runtime, virtual
from smoothctx import Runtime
from smoothctx.testing import FakeEngine
from smoothctx_autogen.ag2_classic import attach


def replying(reply: Callable[..., Any], *, name: str = "agent") -> ConversableAgent:
    """An agent with this one reply function."""
    agent = ConversableAgent(name, llm_config=False, human_input_mode="NEVER")
    agent.register_reply([Agent, None], reply, position=0)
    return agent


def quiet(agent: ConversableAgent) -> None:
    """Nothing is left of ours on the agent."""
    assert not {"clear_history", "generate_reply", "a_generate_reply"} & set(vars(agent))


def test_a_reply_that_fails_leaves_no_turn() -> None:
    """The model is down: nothing is sent, so no other hook tells that the turn is over. The error is the chat's own."""
    engine, during = FakeEngine(), []
    with Runtime.in_thread() as runtime:
        foreground = runtime.foreground(engine)

        def down(*_: Any, **__: Any) -> tuple[bool, str]:
            during.append(foreground.prefilling)
            if len(during) == 2:
                raise ConnectionError("the model is down")
            return True, "an answer"

        agent, person = replying(down), user()
        attached = attach(agent, runtime, small(HeldModel()), engine=engine)
        person.send("hello", agent, request_reply=True, silent=True)
        assert not foreground.busy
        with pytest.raises(ConnectionError, match="the model is down"):
            person.send("hello?", agent, request_reply=True, silent=True)
        assert not foreground.busy and during[:2] == [True, True]
        person.send("hello!", agent, request_reply=True, silent=True)
        assert not foreground.busy and during[2]
        attached.detach()
        quiet(agent)


@pytest.mark.parametrize("how", ["fails", "cancelled"])
@virtual
async def test_an_async_reply_that_never_comes_leaves_no_turn(how: str) -> None:
    """It fails, or whoever waits for it gives up."""
    engine, during = FakeEngine(), []
    async with make_runtime() as runtime:
        foreground = runtime.foreground(engine)

        async def slow(*_: Any, **__: Any) -> tuple[bool, str]:
            await asyncio.sleep(1)
            during.append(foreground.prefilling)
            if how == "fails":
                raise ConnectionError("the model is down")
            await asyncio.sleep(1e6)
            return True, "an answer"

        agent = replying(slow)
        attach(agent, runtime, small(FakeSummarizer()), engine=engine)
        with anyio.move_on_after(10), pytest.raises(ConnectionError) if how == "fails" else nullcontext():
            await user().a_send("hello", agent, request_reply=True, silent=True)
        assert during == [True] and not foreground.busy


def test_a_reply_that_is_sent_to_nobody_ends_its_turn() -> None:
    """Whoever asks for a reply without a chat sends nothing."""
    engine = FakeEngine()
    with Runtime.in_thread() as runtime:
        foreground = runtime.foreground(engine)
        agent = replying(lambda *_, **__: (True, f"busy: {foreground.busy}"))
        attach(agent, runtime, small(HeldModel()), engine=engine)
        assert agent.generate_reply(messages=[{"role": "user", "content": "hello"}]) == "busy: True"
        assert not foreground.busy


def test_a_reply_inside_a_reply_leaves_no_turn() -> None:
    """The agent is asked by another one while it answers the first: none of both is forgotten."""
    engine, seen = FakeEngine(), []
    with Runtime.in_thread() as runtime:
        foreground = runtime.foreground(engine)

        def answer(recipient: Any, messages: Any = None, sender: Any = None, config: Any = None) -> tuple[bool, str]:
            if sender is person:
                other.send("an inner question", agent, request_reply=True, silent=True)
            seen.append((sender.name, foreground.seen().in_flight))
            return True, "an answer"

        agent, person, other = replying(answer), user(name="person"), user(1, name="other")
        attach(agent, runtime, small(HeldModel()), engine=engine)
        person.send("hello", agent, request_reply=True, silent=True)
        assert [name for name, _ in seen] == ["other", "person"] and seen[0][1] == 2
        assert not foreground.busy and not foreground.seen().in_flight
