"""What the tests of the core share: message builders, a fake summariser, a failing store, an event recorder.

Texts carry *marks* such as ``<12>``. The fake summariser writes down every mark that it was given, so a test can
tell what a summary covers from the summary itself.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from smoothctx import Event, MemoryStore, OpenAIMessages, Policy, Runtime, Session, StoreError, Summarize
from smoothctx.transforms.model import ModelReply
from smoothctx.usage import Usage
from virtual import run_virtual

CODEC = OpenAIMessages()
Message = dict[str, Any]

MARK = re.compile(r"<(\d+)>")


# -- messages --------------------------------------------------------------------------------------------------


def S(text: str = "You are an agent.") -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def H(text: str = "question", *, size: int = 0) -> Message:
    """A user message, filled up to about ``size`` tokens."""
    return {"role": "user", "content": fill(text, size)}


def A(text: str | None = "answer", *calls: str, size: int = 0, **fields: Any) -> Message:
    """An assistant message; ``calls`` are the ids of its tool calls."""
    message: Message = {"role": "assistant", "content": None if text is None else fill(text, size), **fields}
    if calls:
        message["tool_calls"] = [
            {"id": c, "type": "function", "function": {"name": "run", "arguments": '{"x": 1}'}} for c in calls
        ]
    return message


def T(call_id: str, text: str = "result", *, size: int = 0) -> Message:
    """A tool result."""
    return {"role": "tool", "tool_call_id": call_id, "content": fill(text, size)}


def fill(text: str, size: int) -> str:
    """``text`` with filler behind it, about ``size`` tokens in all (four characters each)."""
    missing = size * 4 - len(text)
    return f"{text} {'lorem ipsum ' * (missing // 12 + 1)}"[: size * 4] if missing > 0 else text


def chat(turns: int, *, size: int = 50, first: int = 0, system: bool = True) -> list[Message]:
    """User and assistant turns, each message about ``size`` tokens and marked with its number."""
    messages = [S()] if system else []
    for k in range(first, first + turns):
        messages += [H(f"<{2 * k}> question", size=size), A(f"<{2 * k + 1}> answer", size=size)]
    return messages


def tool_chat(turns: int, *, size: int = 50, calls: int = 2) -> list[Message]:
    """Turns in which the assistant calls tools (``calls`` in parallel) before it answers."""
    messages = [S()]
    for k in range(turns):
        ids = [f"c{k}-{j}" for j in range(calls)]
        messages.append(H(f"<{10 * k}> question", size=size))
        messages.append(A(f"<{10 * k + 1}> calling", *ids, size=size))
        messages += [T(c, f"<{10 * k + 2 + j}> result", size=size) for j, c in enumerate(ids)]
        messages.append(A(f"<{10 * k + 9}> answer", size=size))
    return messages


def marks(messages: Iterable[Message]) -> set[int]:
    """Every mark in these messages' texts."""
    return {int(m) for message in messages for m in MARK.findall(CODEC.text(message))}


def summaries(messages: Iterable[Message]) -> list[str]:
    """The texts of the summary messages among these."""
    return [t for t in map(CODEC.summary_text, messages) if t is not None]


def is_subsequence(part: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Are these objects (by identity) all in ``whole``, in this order?"""
    rest = iter(whole)
    return all(any(x is y for y in rest) for x in part)


def same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """The same objects in the same order."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def problems(messages: Sequence[Message]) -> list[str]:
    """What a provider would refuse: system messages first, then a user message, each call followed by exactly
    one result per id, no result without its call."""
    found = []
    k = 0
    while k < len(messages) and messages[k]["role"] == "system":
        k += 1
    if k < len(messages) and messages[k]["role"] != "user":
        found.append(f"messages[{k}]: the first one after the system messages is of role {messages[k]['role']}")
    while k < len(messages):
        message = messages[k]
        if message["role"] == "system":
            found.append(f"messages[{k}]: a system message inside")
        if message["role"] == "tool":
            found.append(f"messages[{k}]: result {message.get('tool_call_id')!r} without its call")
        k += 1
        open_ids = [c["id"] for c in message.get("tool_calls") or ()]
        while open_ids and k < len(messages) and messages[k]["role"] == "tool":
            if messages[k].get("tool_call_id") not in open_ids:
                break
            open_ids.remove(messages[k].get("tool_call_id"))
            k += 1
        if open_ids:
            found.append(f"messages[{k}]: calls without result: {open_ids}")
    return found


def valid_request(messages: Sequence[Message]) -> bool:
    """Would a provider accept these messages?"""
    return not problems(messages)


# -- models, stores, events --------------------------------------------------------------------------------------


class FakeSummarizer:
    """A model that writes down the marks it was given.

    ``mode``: ``"answer"`` (after ``delay`` seconds), ``"hold"`` (until ``release`` is set), ``"fail"``,
    ``"hang"`` (for ever), ``"stubborn"`` (goes on for a day when it is cancelled), ``"garbage"`` (not a text),
    ``"empty"``, ``"long"`` (longer than what it was given), ``"cancel"`` (raises ``CancelledError`` by itself).
    ``started`` is set with every call; ``inputs`` has what each call was given.
    """

    def __init__(self, mode: str = "answer", *, delay: float = 1.0, text: str = "The summary.") -> None:
        self.mode = mode
        self.delay = delay
        self.text = text
        self.inputs: list[list[Message]] = []
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.usage: Usage | None = None

    @property
    def calls(self) -> int:
        """How often it was asked."""
        return len(self.inputs)

    async def __call__(self, messages: list[Message], *, max_tokens: int | None = None) -> Any:
        self.inputs.append(copy.deepcopy(messages))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.started.set()
        try:
            return await self._answer(messages)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, messages: list[Message]) -> Any:
        mode = self.mode
        if mode == "hold":
            await self.release.wait()
        elif mode == "hang":
            await asyncio.sleep(1e9)
        elif mode == "stubborn":
            for seconds in (1e9, 1e5):  # ends at last, or the loop itself could not be closed
                try:
                    await asyncio.sleep(seconds)
                except asyncio.CancelledError:
                    self.cancelled += 1
        elif self.delay:
            await asyncio.sleep(self.delay)
        if mode == "fail":
            raise RuntimeError("the model failed")
        if mode == "cancel":
            raise asyncio.CancelledError
        if mode == "garbage":
            return {"no": "text"}
        if mode == "empty":
            return "   "
        if mode == "long":
            return "".join(CODEC.text(m) for m in messages) * 2
        seen = sorted(marks(messages))
        answer = f"{self.text} {''.join(f'<{m}>' for m in seen)}"
        return answer if self.usage is None else ModelReply(text=answer, usage=self.usage)


class Rateless:
    """An engine with which no session can be opened: to ask it for its rates raises ``error``."""

    context_window = 1000

    def __init__(self, error: Exception) -> None:
        self.error = error

    @property
    def rates(self) -> Any:
        """None are had."""
        raise self.error

    async def complete(self, *_: Any, **__: Any) -> Any:
        """Nothing ever gets this far."""
        raise self.error


class FlakyStore(MemoryStore):
    """A store whose failures can be switched on.

    ``mode``: ``None`` (works), ``"fail"``, ``"hang"``, ``"slow"`` (``delay`` seconds), ``"corrupt"`` (reads give
    other bytes than were written). ``closed`` says that it was released.
    """

    def __init__(self, *, mode: str | None = None, delay: float = 5.0) -> None:
        super().__init__(clock=lambda: 0.0)
        self.mode = mode
        self.delay = delay
        self.closed = False
        self.gets: list[tuple[str, str]] = []
        self.puts: list[tuple[str, str]] = []

    async def _trouble(self) -> None:
        if self.mode == "fail":
            raise StoreError("the store is unreachable")
        if self.mode == "hang":
            await asyncio.sleep(1e9)
        if self.mode == "slow":
            await asyncio.sleep(self.delay)

    async def get(self, tenant: str, key: str) -> bytes | None:
        self.gets.append((tenant, key))
        await self._trouble()
        value = await super().get(tenant, key)
        return b"\xff\x00{" + value[3:] if value is not None and self.mode == "corrupt" else value

    async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
        self.puts.append((tenant, key))
        await self._trouble()
        await super().put(tenant, key, value, ttl=ttl)

    async def aclose(self) -> None:
        """Remembers that it was closed and keeps what it holds, as a server would."""
        self.closed = True


class Events(list[Event]):
    """Records events: give it to ``Runtime(on_event=...)``."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def names(self) -> list[str]:
        """Names in order."""
        return [e.name for e in self]

    def of(self, name: str) -> list[Event]:
        """The events of one name."""
        return [e for e in self if e.name == name]


# -- running -------------------------------------------------------------------------------------------------------


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the virtual-time loop: sleeps cost nothing, a deadlock is an error."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(lambda: test(*args, **kwargs))

    run.__dict__["on_virtual_time"] = True  # it is deterministic: see conftest.py
    return run


def now() -> float:
    """The (virtual) time of the running loop."""
    return asyncio.get_running_loop().time()


def make_runtime(**options: Any) -> Runtime:
    """A runtime on the running loop's clock."""
    return Runtime(clock=asyncio.get_running_loop().time, **options)


def make_policy(model: Any, *, keep: int = 4, window: int = 2000, **options: Any) -> Policy:
    """A policy that summarises with ``model`` and keeps ``keep`` messages raw."""
    summary = {
        k: options.pop(k) for k in ("source", "layout", "model_id", "max_tokens", "facts", "window") if k in options
    }
    summary.setdefault("facts", False)
    summary.setdefault("max_tokens", 200)
    summary.setdefault("window", 100_000)  # the fakes read anything in one call
    return Policy(Summarize(model, keep=("messages", keep), **summary), context_window=window, **options)


async def settle(seconds: float = 0.0) -> None:
    """Let everything that is due happen, then (virtual) time pass."""
    await asyncio.sleep(seconds)
    for _ in range(20):
        await asyncio.sleep(0)


def coherent(session: Session, runtime: Runtime, *, live: int = 0) -> None:
    """The counters add up: every started lookahead was committed, dropped, failed, or is still alive."""
    c = runtime.counters
    assert c.started == c.committed + c.stale_total + c.failed + live, (c, live)
