"""What the LangGraph tests share: a chat model that writes down what it was shown, summarisers, graphs, waiting.

Texts carry marks such as ``<12>`` (see ``helpers``), and the fake summariser writes down every mark that it was given:
so a view holds the marks of exactly its branch, whether they stand in raw messages or in a summary.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import PrivateAttr

from driving import small_policy
from helpers import MARK, Events, FakeSummarizer, fill
from smoothctx import Policy, Runtime
from smoothctx_langgraph.codec import LangChainMessages
from smoothctx_langgraph.node import lookahead_node
from smoothctx_langgraph.saved import LookaheadState

CODEC = LangChainMessages()
#: seconds after which a test gives up waiting: reached only on a hang
HANG_S = 60


class Chat(BaseChatModel):
    """Answers each question ``<n>`` with ``<n+1>``. ``seen`` has what each call was shown; streams word by word."""

    size: int = 60
    _seen: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def seen(self) -> list[list[BaseMessage]]:
        """The messages of each call, in order."""
        return self._seen

    @property
    def last(self) -> list[BaseMessage]:
        """The messages of the last call."""
        return self._seen[-1]

    @property
    def _llm_type(self) -> str:
        return "chat"

    def _answer(self, messages: list[BaseMessage]) -> str:
        self._seen.append([m.model_copy() for m in messages])
        found = sorted(marks(messages))
        return fill(f"<{(found[-1] if found else 0) + 1}> answer", self.size)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self._answer(messages)))])

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        for word in self._answer(messages).split(" "):
            chunk = ChatGenerationChunk(message=AIMessageChunk(word + " "))
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for word in self._answer(messages).split(" "):
            chunk = ChatGenerationChunk(message=AIMessageChunk(word + " "))
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


class ChatSummarizer(FakeSummarizer):
    """The fake summariser, asking a chat model of its own in the way a user would write it: streaming, unisolated."""

    def __init__(self) -> None:
        super().__init__(delay=0)
        self.chat = Chat()

    async def __call__(self, messages: Any, *, max_tokens: int | None = None) -> Any:
        async for _ in self.chat.astream([HumanMessage("SUMMARISE THIS")]):
            pass
        return await super().__call__(messages, max_tokens=max_tokens)


class Calls(BaseCallbackHandler):
    """The user's callbacks: how many model runs they heard of, and their tokens."""

    def __init__(self) -> None:
        self.starts = 0
        self.tokens: list[str] = []

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        """A model run began."""
        self.starts += 1

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        """A token came."""
        self.tokens.append(token)


# -- messages ----------------------------------------------------------------------------------------------------------


def ask(k: int, *, size: int = 60, **fields: Any) -> HumanMessage:
    """The question of turn ``k``, marked ``<2k>``."""
    return HumanMessage(fill(f"<{2 * k}> question", size), **fields)


def marks(messages: Sequence[Any]) -> set[int]:
    """Every mark in the texts of these messages."""
    return {int(m) for message in messages for m in MARK.findall(CODEC.text(message))}


def summaries(messages: Sequence[Any]) -> list[str]:
    """The texts of the summaries among these messages."""
    return [t for t in map(CODEC.summary_text, messages) if t is not None]


def true_to(view: Sequence[Any], held: Sequence[Any]) -> bool:
    """Does this view tell of exactly the held messages: nothing lost, nothing of another branch?"""
    return marks(view) == marks(held)


# -- policies, graphs --------------------------------------------------------------------------------------------------


def policy_of(model: Any = None, *, model_id: str | None = "fake", **options: Any) -> Policy:
    """Summarises from the fourth message on and keeps the last two; durable by default."""
    return small_policy(FakeSummarizer(delay=0) if model is None else model, model_id=model_id, **options)


class SavedState(MessagesState, LookaheadState):
    """Messages, and the private channel."""


def chat_graph(node: Callable[..., Any], *, state: Any = MessagesState, **compiled: Any) -> Any:
    """A graph of one node."""
    hidden = {"input_schema": MessagesState, "output_schema": MessagesState} if state is SavedState else {}
    builder = StateGraph(state, **hidden)
    builder.add_node("model", node)
    builder.add_edge(START, "model")
    builder.add_edge("model", END)
    return builder.compile(**compiled)


def on(thread: str, **more: Any) -> Any:
    """A config."""
    return {"configurable": {"thread_id": thread, **more}}


# -- waiting -----------------------------------------------------------------------------------------------------------


def live(runtime: Runtime) -> list[Any]:
    """The lookaheads under way."""
    return [s.lookahead for s in list(runtime._sessions.values()) if s.lookahead is not None]


async def idle(runtime: Runtime) -> None:
    """Wait until every lookahead has ended and is written."""
    for handle in live(runtime):
        await handle.wait(HANG_S)


def idle_sync(runtime: Runtime) -> None:
    """:func:`idle` for synchronous tests."""
    for handle in live(runtime):
        handle.wait_sync(HANG_S)


async def converse(graph: Any, runtime: Runtime, config: Any, turns: range) -> Any:
    """Ask the questions of these turns, with time for the background after each. Returns the last state."""
    state = None
    for k in turns:
        state = await graph.ainvoke({"messages": [ask(k)]}, config)
        await idle(runtime)
    return state


def converse_sync(graph: Any, runtime: Runtime, config: Any, turns: range) -> Any:
    """:func:`converse` for synchronous tests."""
    state = None
    for k in turns:
        state = graph.invoke({"messages": [ask(k)]}, config)
        idle_sync(runtime)
    return state


def model_node(chat: Chat, decorate: Callable[[Any], Any]) -> Any:
    """An asynchronous model node, for the graph's own state."""

    @decorate
    async def model(state: Any) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    return model


@asynccontextmanager
async def memory(folder: Path) -> AsyncIterator[Any]:
    """LangGraph's checkpointer in memory."""
    yield InMemorySaver()


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[Any]:
    """A real file."""
    async with AsyncSqliteSaver.from_conn_string(str(folder / "checkpoints.db")) as saver:
        yield saver


#: each asynchronous checkpointer, opened over a folder
SAVERS = {"memory": memory, "sqlite": sqlite}


@contextmanager
def sqlite_sync(folder: Path) -> Iterator[Any]:
    """The synchronous SQLite checkpointer."""
    with SqliteSaver.from_conn_string(str(folder / "checkpoints.db")) as opened:
        yield opened


class Process:
    """One process: a runtime and a graph of its own over a checkpointer that outlives it."""

    def __init__(self, saver: Any, *, state: Any = SavedState, **options: Any) -> None:
        self.chat = Chat()
        self.summariser = FakeSummarizer(delay=0)
        self.events = Events()
        self._saver, self._state, self._options = saver, state, options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Process:
        self.runtime = await self._stack.enter_async_context(Runtime(on_event=self.events, **self._options))
        node = model_node(self.chat, lookahead_node(self.runtime, policy_of(self.summariser)))
        self.graph = chat_graph(node, state=self._state, checkpointer=self._saver)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not [e for e in self.events if e.name == "error"], self.events
        await self._stack.aclose()

    async def turn(self, config: Any, *messages: BaseMessage) -> dict[str, Any]:
        """One turn; checks that the model saw exactly the branch that the state then holds."""
        state: dict[str, Any] = await self.graph.ainvoke({"messages": list(messages)} if messages else None, config)
        assert true_to(self.chat.last, state["messages"][:-1]), (marks(self.chat.last), marks(state["messages"]))
        assert not summaries(state["messages"])
        await idle(self.runtime)
        return state

    async def talk(self, config: Any, turns: range) -> dict[str, Any]:
        """Several turns."""
        state: dict[str, Any] = {}
        for k in turns:
            state = await self.turn(config, ask(k))
        return state

    async def checkpoint_of(self, config: Any, length: int) -> Any:
        """The config of the checkpoint that holds so many messages and waits for nothing."""
        async for snapshot in self.graph.aget_state_history(config):
            if len(snapshot.values.get("messages", ())) == length and not snapshot.next:
                return snapshot.config
        raise AssertionError(f"no checkpoint of {length} messages")


def check(chat: Chat, state: Any, turns: range = range(6)) -> None:
    """The last call saw a summary of exactly its conversation, and the state is whole and without it."""
    assert summaries(chat.last) and len(chat.last) < len(state["messages"])
    assert true_to(chat.last, state["messages"][:-1])
    assert [m.type for m in state["messages"]] == ["human", "ai"] * len(turns)
    assert marks(state["messages"]) == set(range(2 * len(turns)))


class Gate:
    """Threads or tasks that meet: each arrives, and goes on once everybody is there."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def arrive(self) -> None:
        """Wait for the others."""
        self._barrier.wait(HANG_S)


__all__ = [
    "HANG_S",
    "SAVERS",
    "Calls",
    "Chat",
    "ChatSummarizer",
    "Events",
    "FakeSummarizer",
    "Gate",
    "Process",
    "SavedState",
    "ask",
    "chat_graph",
    "check",
    "converse",
    "converse_sync",
    "idle",
    "idle_sync",
    "live",
    "marks",
    "model_node",
    "on",
    "policy_of",
    "sqlite_sync",
    "summaries",
    "true_to",
]
