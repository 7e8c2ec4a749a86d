"""Artifacts and offloaded content in LangGraph's stores: in memory, and in SQLite across processes and loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.store.base import BaseStore, Result
from langgraph.store.base.batch import AsyncBatchedBaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite.aio import AsyncSqliteStore

from smoothctx import ConfigurationError, Policy, Runtime, StoreError, Summarize
from smoothctx.store import Store
from smoothctx_langgraph.codec import LangChainMessages
from smoothctx_langgraph.models import ChatModel
from smoothctx_langgraph.stores import GraphStore

CODEC = LangChainMessages()
ODD = ["artifact/0a1b", "a.b.c", "", "x" * 2000, "nul\0byte", "per%cent", "%2E", ".", "~", "\uac00\ub098", "a b\n"]
BYTES = [b"", b'{"json": true}', "\uac00\ub098".encode(), b"\xff\xfe\x00", b"nul\x00", bytes(range(256)) * 50]


@asynccontextmanager
async def memory(_: Path) -> AsyncIterator[BaseStore]:
    """LangGraph's store in memory."""
    yield InMemoryStore()


@asynccontextmanager
async def sqlite(path: Path) -> AsyncIterator[BaseStore]:
    """LangGraph's SQLite store."""
    async with AsyncSqliteStore.from_conn_string(str(path / "store.db")) as store:
        await store.setup()
        yield store


every_store = pytest.mark.parametrize("opened", [memory, sqlite])


@every_store
async def test_values_come_back_as_they_were(opened: Any, tmp_path: Path) -> None:
    """Any bytes, under any tenant and key: what LangGraph refuses in a name is written otherwise."""
    async with opened(tmp_path) as inner:
        store: Store = GraphStore(inner)
        for k, name in enumerate(ODD):
            await store.put(name, "key", name.encode() + b"t")
            await store.put("tenant", name, name.encode() + b"k")
            await store.put("values", str(k), BYTES[k % len(BYTES)])
        for k, name in enumerate(ODD):
            assert await store.get(name, "key") == name.encode() + b"t"
            assert await store.get("tenant", name) == name.encode() + b"k"
            assert await store.get("values", str(k)) == BYTES[k % len(BYTES)]
            await store.delete(name, "key")
            assert await store.get(name, "key") is None
            await store.delete(name, "key")
        await store.put("tenant", "a.b.c", b"new")
        assert await store.get("tenant", "a.b.c") == b"new"
        await store.aclose()
        assert await store.get("tenant", "a.b.c") == b"new"


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_two_names_meet(one: str, other: str) -> None:
    """Tenants and keys are apart whatever is in them (promise 12)."""

    async def main() -> None:
        store = GraphStore(InMemoryStore())
        await store.put(one, other, b"1")
        await store.put(one, other + "x", b"2")
        await store.put(one + "x", other, b"3")
        assert [await store.get(*k) for k in ((one, other), (one, other + "x"), (one + "x", other))] == [
            b"1",
            b"2",
            b"3",
        ]
        assert await store.get(other + "y", one) is None

    asyncio.run(main())


@every_store
async def test_values_expire(opened: Any, tmp_path: Path) -> None:
    """By the injected clock, to the second; a value without a ttl stays; ``GraphStore(ttl=)`` is the default."""
    now = [1000.0]
    async with opened(tmp_path) as inner:
        store = GraphStore(inner, clock=lambda: now[0])
        await store.put("t", "short", b"1", ttl=5)
        await store.put("t", "long", b"2")
        bounded = GraphStore(inner, namespace=("other",), ttl=10, clock=lambda: now[0])
        await bounded.put("t", "default", b"3")
        await bounded.put("t", "own", b"4", ttl=100)
        now[0] += 4.9
        assert await store.get("t", "short") == b"1"
        now[0] += 0.2
        assert await store.get("t", "short") is None
        assert await bounded.get("t", "default") == b"3"
        now[0] += 5
        assert await bounded.get("t", "default") is None
        assert await bounded.get("t", "own") == b"4"
        assert await store.get("t", "long") == b"2"


async def test_a_store_with_ttl_is_told_of_it(tmp_path: Path) -> None:
    """SQLite's own sweep removes what has expired; without a ttl the store's own default is left alone."""
    async with AsyncSqliteStore.from_conn_string(str(tmp_path / "store.db"), ttl={"default_ttl": 60}) as inner:
        await inner.setup()
        store = GraphStore(inner)
        await store.put("t", "gone", b"1", ttl=0.0001)
        await store.put("t", "default", b"2")
        cursor = await inner.conn.execute("SELECT key, ttl_minutes FROM store ORDER BY key")
        rows = {r[0]: r[1] for r in await cursor.fetchall()}
        assert rows["default"] == 60
        assert rows["gone"] == pytest.approx(0.0001 / 60)


async def test_values_are_readable_and_not_embedded() -> None:
    """Text is kept as text for people to read, and no embedding is ever paid for."""
    embedded: list[Any] = []

    def embed(texts: Any) -> list[list[float]]:
        embedded.append(texts)
        return [[0.0] for _ in texts]

    inner = InMemoryStore(index={"dims": 1, "embed": embed})
    await GraphStore(inner).put("t.x", "artifact/1", b'{"a": 1}')
    item = await inner.aget(("smoothctx", "t%2Ex"), "artifact/1")
    assert item is not None
    assert item.value == {"text": '{"a": 1}'}
    assert embedded == []


class Broken(InMemoryStore):
    """Cannot be reached."""

    async def abatch(self, ops: Any) -> list[Result]:
        """Nothing works."""
        raise ConnectionError("down")


async def test_failures_are_store_errors() -> None:
    """An unreachable store and a damaged value are a ``StoreError``, for the core to go on without."""
    store = GraphStore(Broken())
    calls: list[Callable[[], Any]] = [
        lambda: store.get("t", "k"),
        lambda: store.put("t", "k", b"1"),
        lambda: store.delete("t", "k"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="ConnectionError: down"):
            await call()
    inner = InMemoryStore()
    for value in ({"base64": "%%%"}, {"base64": 5}, {}):
        await inner.aput(("smoothctx", "t"), "k", value)
        with pytest.raises(StoreError, match="corrupt"):
            await GraphStore(inner).get("t", "k")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"store": None}, "store=None"),
        ({"namespace": ()}, "namespace=()"),
        ({"namespace": "smoothctx"}, "namespace='smoothctx'"),
        ({"namespace": ("a.b",)}, "namespace=('a.b',)"),
        ({"namespace": ("langgraph",)}, "LangGraph's own"),
        ({"ttl": 0}, "ttl=0"),
        ({"ttl": True}, "ttl=True"),
    ],
)
def test_wrong_options(options: dict[str, Any], named: str) -> None:
    """Raised at construction, naming option, value and what is allowed."""
    given = {"store": InMemoryStore(), **options}
    with pytest.raises(ConfigurationError) as caught:
        GraphStore(given.pop("store"), **given)
    assert named in str(caught.value)


# -- with a runtime --------------------------------------------------------------------------------------------


class Summariser(BaseChatModel):
    """Counts how often it is asked."""

    model: str = "summariser-1"
    asked: list[list[BaseMessage]] = []

    @property
    def _llm_type(self) -> str:
        return "summariser"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.asked.append(messages)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("the gist of it"))])


def history() -> list[BaseMessage]:
    """A conversation that is long enough; new objects with new ids each time, as after a reload."""
    messages: list[BaseMessage] = [SystemMessage("rules")]
    for k in range(10):
        messages += [HumanMessage(f"question {k} " * 20), AIMessage(f"answer {k} " * 20)]
    return messages


def policy(model: Summariser) -> Policy:
    """Summarises all but the last four messages."""
    transform = Summarize(ChatModel(model), keep=("messages", 4), layout="standalone")
    return Policy(transform, trigger=("tokens", 500), hard_limit=("tokens", 90_000), land_at=("tokens", 400))


async def turn(store: Store, model: Summariser, name: str = "conversation") -> list[Any]:
    """One process: opens a runtime on the store and takes the conversation to its summary."""
    async with Runtime(store=store) as runtime:
        session = runtime.session(name, policy=policy(model), codec=CODEC)
        handle = session.observe(history())
        assert handle is not None
        await handle.wait(30)
        view = await session.commit(history())
        assert CODEC.summary_text(view[1]) is not None
        return view


@every_store
async def test_a_summary_is_paid_for_once(opened: Any, tmp_path: Path) -> None:
    """Promise 4: committed by one process, used by the next one, with the same bytes and no second model call."""
    first, second = Summariser(asked=[]), Summariser(asked=[])
    if opened is memory:
        async with opened(tmp_path) as inner:
            views = [await turn(GraphStore(inner), first), await turn(GraphStore(inner), second)]
    else:
        views = []
        for model in (first, second):
            async with opened(tmp_path) as inner:
                views.append(await turn(GraphStore(inner), model))
    assert (len(first.asked), len(second.asked)) == (1, 0)
    assert [CODEC.visible(m) for m in views[0]] == [CODEC.visible(m) for m in views[1]]


async def test_only_the_same_model_takes_the_summary(tmp_path: Path) -> None:
    """The model's identity is part of the key: another conversation of the same text shares, another model pays."""
    async with sqlite(tmp_path) as inner:
        first, same, other = (Summariser(asked=[], model=m) for m in ("one", "one", "two"))
        await turn(GraphStore(inner), first, "a")
        await turn(GraphStore(inner), same, "b")
        await turn(GraphStore(inner), other, "c")
        assert [len(m.asked) for m in (first, same, other)] == [1, 0, 1]


async def test_a_store_of_another_loop(tmp_path: Path) -> None:
    """A runtime on its own thread uses the SQLite store that was opened here: each call is made on this loop."""
    first, second = Summariser(asked=[]), Summariser(asked=[])
    async with sqlite(tmp_path) as inner:
        for model in (first, second):
            await asyncio.to_thread(_in_thread, GraphStore(inner), model)
    assert (len(first.asked), len(second.asked)) == (1, 0)


def _in_thread(store: Store, model: Summariser) -> None:
    with Runtime.in_thread(store=store) as runtime:
        session = runtime.session("conversation", policy=policy(model), codec=CODEC)
        handle = session.observe(history())
        assert handle is not None
        handle.wait_sync(30)
        assert CODEC.summary_text(session.commit_sync(history())[1]) is not None


def test_a_store_whose_loop_has_ended(tmp_path: Path) -> None:
    """It says so, instead of waiting for ever for a loop that runs no more."""
    held: list[GraphStore] = []

    async def open_and_leave() -> None:
        async with sqlite(tmp_path) as inner:
            held.append(GraphStore(inner))

    asyncio.run(open_and_leave())
    with pytest.raises(StoreError, match="not running any more"):
        asyncio.run(held[0].get("t", "k"))


class Hanging(AsyncBatchedBaseStore):
    """Bound to its loop, and never answers."""

    entered = threading.Event()

    async def abatch(self, ops: Any) -> list[Result]:
        """Waits for ever."""
        self.entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    def batch(self, ops: Any) -> list[Result]:
        """Not used."""
        raise NotImplementedError


def test_a_loop_that_ends_during_a_call() -> None:
    """The call fails like any other; it is not taken for a cancellation of whoever made it."""
    held: list[Hanging] = []
    ready = threading.Event()

    async def home() -> None:
        held.append(Hanging())
        ready.set()
        await asyncio.to_thread(Hanging.entered.wait, 30)

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(asyncio.run, home())
        assert ready.wait(30)
        with pytest.raises(StoreError, match="ended during the call"):
            asyncio.run(GraphStore(held[0]).get("t", "k"))
        done.result(30)


async def test_cancellation_passes_through() -> None:
    """A cancelled call is cancelled."""
    store = Hanging()
    started = asyncio.Event()

    async def ask() -> None:
        started.set()
        await GraphStore(store).get("t", "k")

    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask())
        await started.wait()
        task.cancel()
    assert task.cancelled()
    assert store._task is not None
    store._task.cancel()
