"""The ``retrieve`` tool for LangChain agents: offloaded tool results, read again page by page."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool

from smoothctx import Session
from smoothctx.errors import ConfigurationError
from smoothctx.transforms.offload import PAGE, TOOL_NAME, TOOL_SCHEMA

#: seconds that one call waits for the store at most
TIMEOUT = 30.0
NOTHING = "error: nothing has been offloaded yet"
UNAVAILABLE = "error: the offloaded content cannot be read right now"


def retrieve_tool(session: Session | Callable[[], Session | None]) -> BaseTool:
    """The tool by which an agent reads what ``Offload`` took out of its context. Sync and async.

    Declare it from the first turn on: adding a tool later re-bills the whole prefix. Errors come back as text, for the
    model; only what the session's own tenant offloaded can be read.

    Args:
        session: the session, or a callable that gives the one of the present run (``None``: nothing offloaded yet).

    Raises:
        ConfigurationError: when ``session`` is neither.
    """
    if not isinstance(session, Session) and not callable(session):
        raise ConfigurationError(f"session={session!r}: expected a Session, or a callable that gives one")

    def current() -> Session | None:
        return session if isinstance(session, Session) else session()

    # A model may pass anything: every argument is optional here, and checked where the content is read.
    async def aretrieve(id: Any = "", offset: Any = 0, limit: Any = PAGE, **_: Any) -> str:
        found = current()
        if found is None:
            return NOTHING
        pages: list[str] = []
        await found._runtime.join_loop(lambda: _read(found, pages, id, offset, limit), TIMEOUT)
        return pages[0] if pages else UNAVAILABLE

    def retrieve(id: Any = "", offset: Any = 0, limit: Any = PAGE, **_: Any) -> str:
        found = current()
        if found is None:
            return NOTHING
        pages: list[str] = []
        found._runtime.on_loop(lambda: _read(found, pages, id, offset, limit), TIMEOUT)
        return pages[0] if pages else UNAVAILABLE

    function = TOOL_SCHEMA["function"]
    return StructuredTool(
        name=TOOL_NAME,
        description=function["description"],
        args_schema=copy.deepcopy(function["parameters"]),
        func=retrieve,
        coroutine=aretrieve,
    )


async def _read(session: Session, pages: list[str], id: Any, offset: Any, limit: Any) -> None:
    pages.append(await session.retrieve(id, offset, limit))
