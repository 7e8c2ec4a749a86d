"""Real agents of AG2 classic with fake models behind them, for the tests in this folder."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from autogen import Agent, ConversableAgent, UserProxyAgent

from helpers import MARK
from smoothctx import KeepRecent, Policy, Summarize

Message = dict[str, Any]
#: what a fake model answers to a request: a text, or a message with tool calls
Answer = Callable[[list[Message]], "str | Message"]


class Client:
    """A model client as the framework wants it. What it was sent is in ``requests``."""

    def __init__(self, config: Any, answer: Answer, requests: list[list[Message]]) -> None:
        self.answer = answer
        self.requests = requests

    def create(self, params: dict[str, Any]) -> Any:
        """Answer, as a server would."""
        self.requests.append(copy.deepcopy(params["messages"]))
        answer = self.answer(params["messages"])
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        choice = SimpleNamespace(message=SimpleNamespace(**{"tool_calls": None, **message}), finish_reason="stop")
        usage = SimpleNamespace(prompt_tokens=100, completion_tokens=20)
        return SimpleNamespace(id=f"response-{len(self.requests)}", choices=[choice], model="fake", usage=usage)

    def message_retrieval(self, response: Any) -> list[Any]:
        """The messages in a response."""
        return [vars(c.message) if c.message.tool_calls else c.message.content for c in response.choices]

    def cost(self, response: Any) -> float:
        """Nothing."""
        return 0.0

    @staticmethod
    def get_usage(response: Any) -> dict[str, Any]:
        """Nothing."""
        return {}


def assistant(answer: Answer, *, name: str = "assistant") -> tuple[ConversableAgent, list[list[Message]]]:
    """An agent with a fake model behind the framework's own client wrapper, and what that was sent."""
    requests: list[list[Message]] = []
    agent = ConversableAgent(
        name,
        system_message="You are an agent.",
        llm_config={"config_list": [{"model": "fake", "model_client_cls": "Client"}]},
        human_input_mode="NEVER",
    )
    agent.register_model_client(model_client_cls=Client, answer=answer, requests=requests)
    return agent, requests


def user(turns: int = 1000, *, name: str = "user", size: int = 20) -> UserProxyAgent:
    """Somebody who asks ``turns`` times in all, each question with its mark."""
    asked = 0

    def ask(recipient: Any, messages: Any = None, sender: Any = None, config: Any = None) -> tuple[bool, str | None]:
        nonlocal asked
        if (messages or [{}])[-1].get("tool_calls"):
            return False, None
        asked += 1
        return True, f"<{2 * asked}> question {'lorem ipsum ' * size}" if asked < turns else None

    agent = UserProxyAgent(name, human_input_mode="NEVER", code_execution_config=False)
    agent.register_reply([Agent, None], ask, position=0)
    return agent


def sleeper(seconds: float, *, name: str = "assistant") -> tuple[ConversableAgent, list[tuple[float, list[Message]]]]:
    """An agent whose model takes ``seconds`` of the loop's time; and when it was asked what."""
    asked: list[tuple[float, list[Message]]] = []

    async def reply(recipient: Any, messages: Any = None, sender: Any = None, config: Any = None) -> tuple[bool, str]:
        asked.append((asyncio.get_running_loop().time(), list(messages)))
        await asyncio.sleep(seconds)
        return True, f"<{2 * len(asked) - 1}> answer {'dolor sit ' * 20}"

    agent = ConversableAgent(name, llm_config=False, human_input_mode="NEVER")
    agent.register_reply([Agent, None], reply, position=0)
    return agent, asked


def texts(messages: list[Message]) -> str:
    """All text of a request."""
    return "\n".join(str(m.get("content")) for m in messages)


def seen(messages: list[Message]) -> set[int]:
    """Every mark in a request."""
    return {int(m) for m in MARK.findall(texts(messages))}


def summarised(messages: list[Message]) -> bool:
    """Does a request hold a summary?"""
    return "<conversation_summary>" in texts(messages)


class HeldModel:
    """A summariser that answers once it is let go, whatever thread and loop it runs on. ``started`` says that it was
    asked, ``calls`` how often."""

    def __init__(self, *, held: bool = True) -> None:
        self.started = threading.Event()
        self.calls = 0
        self._held = held
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def let_go(self) -> None:
        """Answer, now and from now on."""
        with self._lock:
            self._held = False
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)

    async def __call__(self, messages: list[Message], *, max_tokens: int | None = None) -> str:
        self.calls += 1
        gone = asyncio.Event()
        with self._lock:
            if self._held:
                self._waiting.append((asyncio.get_running_loop(), gone))
            else:
                gone.set()
        self.started.set()
        await gone.wait()
        marks = sorted({int(m) for message in messages for m in MARK.findall(str(message.get("content")))})
        return "The summary. " + "".join(f"<{m}>" for m in marks)


def small(model: Any, **options: Any) -> Policy:
    """A policy that counts messages and starts early."""
    summary = {k: options.pop(k) for k in ("model_id", "max_tokens", "layout", "facts") if k in options}
    keep = options.pop("keep", ("messages", 2))
    options = {
        "trigger": ("messages", 6),
        "hard_limit": ("messages", 1000),
        "land_at": ("messages", 4),
        "min_savings": 0.0,
        "fallback": KeepRecent(keep),
        **options,
    }
    return Policy(
        Summarize(model, keep=keep, **{"facts": False, "max_tokens": 100, "window": 100_000, **summary}), **options
    )


def settle(attached: Any) -> None:
    """Wait for the lookaheads of an attached agent (of nobody: for nothing)."""
    for session in attached.sessions() if attached is not None else ():
        if session.lookahead is not None:
            session.lookahead.wait_sync(30)
