"""The ``retrieve`` tool as a LangChain tool: its schema, its pages, its tenants, and from any thread and loop."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from smoothctx import ConfigurationError, MemoryStore, Offload, Policy, Runtime, Session, segments
from smoothctx.launch import UNREADABLE
from smoothctx_langgraph.codec import LangChainMessages
from smoothctx_langgraph.tools import NOTHING, retrieve_tool

pytestmark = pytest.mark.langgraph

CODEC = LangChainMessages()
BIG = "\n".join(f"line {k} of a long listing" for k in range(2000))
ID = hashlib.blake2b(BIG.encode(), digest_size=12).hexdigest()


def policy() -> Policy:
    """Offloads old tool results."""
    return Policy(
        Offload(min_tokens=100, keep_recent=1),
        trigger=("tokens", 500),
        hard_limit=("tokens", 90_000),
        land_at=("tokens", 400),
    )


def history() -> list[Any]:
    """One big result that may go, and a small one behind it."""
    messages: list[Any] = []
    for k, text in enumerate([BIG, "small"]):
        call = {"name": "list", "args": {"k": k}, "id": f"c{k}", "type": "tool_call"}
        messages += [HumanMessage(f"q{k}"), AIMessage("", tool_calls=[call])]
        messages += [ToolMessage(text, tool_call_id=f"c{k}", name="list", artifact={"k": k}), AIMessage(f"a{k}")]
    return messages


async def offloaded(runtime: Runtime, **options: Any) -> tuple[Session, list[Any]]:
    """A session whose big result was taken out, and its view."""
    session = runtime.session("s", policy=policy(), codec=CODEC, **options)
    handle = session.observe(history())
    assert handle is not None
    await handle.wait(30)
    return session, await session.commit(history())


def ask(id: str = ID, **more: Any) -> dict[str, Any]:
    """A tool call for the content."""
    return {"name": "retrieve", "args": {"id": id, **more}, "id": "r1", "type": "tool_call"}


async def test_the_schema_is_declared_once() -> None:
    """What a chat model is told of the tool is exactly ``Offload.tool_schema``."""
    tool = retrieve_tool(lambda: None)
    assert convert_to_openai_tool(tool) == Offload.tool_schema
    tool.args_schema["properties"].clear()  # type: ignore[index, union-attr]
    assert convert_to_openai_tool(retrieve_tool(lambda: None)) == Offload.tool_schema


async def test_a_result_is_offloaded_and_read_again() -> None:
    """The stub stands in the tool message (same call id, name and artifact) and its content comes back in pages."""
    async with Runtime() as runtime:
        session, view = await offloaded(runtime)
        stub = view[2]
        assert isinstance(stub, ToolMessage)
        assert (stub.tool_call_id, stub.name, stub.artifact) == ("c0", "list", {"k": 0})
        assert f'retrieve(id="{ID}"' in CODEC.text(stub)
        assert len(segments(view, CODEC)) == len(segments(history(), CODEC))
        tool = retrieve_tool(session)
        message = await tool.ainvoke(ask(limit=20_000))
        assert isinstance(message, ToolMessage)
        assert message.tool_call_id == "r1"
        page = str(message.content)
        assert page.startswith(f"[retrieve id={ID}: characters 0 to 20000 of {len(BIG)}; read on with offset=20000]")
        rest = await tool.ainvoke({"id": ID, "offset": 20_000, "limit": "20000"})
        whole = page.split("\n", 1)[1] + rest.split("\n", 1)[1]
        assert BIG.startswith(whole)
        assert len(whole) == 40_000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "is not a content id"),
        ({"id": 5}, "is not a content id"),
        ({"id": "../etc/passwd"}, "is not a content id"),
        ({"id": "0" * 24}, "no offloaded content"),
        ({"id": ID, "offset": -1}, "offset=-1"),
        ({"id": ID, "limit": "many"}, "limit='many'"),
        ({"id": ID, "offset": 10**9}, "the content has"),
        ({"id": "0" * 24, "invented": True}, "no offloaded content"),
    ],
)
async def test_whatever_a_model_passes_is_answered(arguments: dict[str, Any], named: str) -> None:
    """cases B169: wrong, missing and invented arguments come back as text, never as an exception."""
    async with Runtime() as runtime:
        session, _ = await offloaded(runtime)
        assert named in await retrieve_tool(session).ainvoke(arguments)


async def test_another_tenant_reads_nothing() -> None:
    """Promise 12: the id of another tenant's content is unknown."""
    async with Runtime() as runtime:
        await offloaded(runtime, tenant="one")
        other = runtime.session("s", policy=policy(), codec=CODEC, tenant="two")
        assert "no offloaded content" in await retrieve_tool(other).ainvoke({"id": ID})


async def test_one_tool_for_many_runs() -> None:
    """A callable gives the session of the present run; before there is one, nothing was offloaded."""
    current: contextvars.ContextVar[Session | None] = contextvars.ContextVar("current", default=None)
    tool = retrieve_tool(current.get)
    async with Runtime() as runtime:
        assert await tool.ainvoke({"id": ID}) == NOTHING
        assert tool.invoke({"id": ID}) == NOTHING
        session, _ = await offloaded(runtime)
        current.set(session)
        assert "line 0" in await tool.ainvoke({"id": ID})


async def test_in_a_tool_node_of_a_graph() -> None:
    """A graph's tool node runs it as any other tool."""
    async with Runtime() as runtime:
        session, _ = await offloaded(runtime)
        builder = StateGraph(MessagesState)
        builder.add_node("tools", ToolNode([retrieve_tool(session)]))
        builder.add_edge(START, "tools")
        builder.add_edge("tools", END)
        result = await builder.compile().ainvoke({"messages": [AIMessage("", tool_calls=[ask()])]})
        assert "line 0 of a long listing" in str(result["messages"][-1].content)


class LoopBound(MemoryStore):
    """A store that works on one loop only, as a database connection does."""

    home: asyncio.AbstractEventLoop | None = None

    async def get(self, tenant: str, key: str) -> bytes | None:
        """As in memory, on the loop of the first write."""
        assert asyncio.get_running_loop() is self.home
        return await super().get(tenant, key)

    async def put(self, tenant: str, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """As in memory."""
        self.home = asyncio.get_running_loop()
        await super().put(tenant, key, value, ttl=ttl)


def test_from_synchronous_code_and_from_other_loops() -> None:
    """The store is read on the runtime's own loop, whoever asks: sync code, a thread, another loop."""
    with Runtime.in_thread(store=LoopBound()) as runtime:
        session = runtime.session("s", policy=policy(), codec=CODEC)
        handle = session.observe(history())
        assert handle is not None
        handle.wait_sync(30)
        session.commit_sync(history())
        tool = retrieve_tool(session)
        assert "line 0" in tool.invoke({"id": ID})
        assert "line 0" in str(tool.invoke(ask()).content)
        for _ in range(2):
            assert "line 0" in asyncio.run(tool.ainvoke({"id": ID}))
        with ThreadPoolExecutor(1) as threads:
            assert "line 0" in threads.submit(tool.invoke, {"id": ID}).result(30)
    assert tool.invoke({"id": ID}) == UNREADABLE
    assert asyncio.run(tool.ainvoke({"id": ID})) == UNREADABLE


@pytest.mark.parametrize("make", [lambda: retrieve_tool(None), lambda: retrieve_tool("s")])  # type: ignore[arg-type]
def test_wrong_options(make: Callable[[], Any]) -> None:
    """Raised at construction, naming the option."""
    with pytest.raises(ConfigurationError, match="session="):
        make()
