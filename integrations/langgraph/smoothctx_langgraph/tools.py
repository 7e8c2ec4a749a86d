"""The ``retrieve`` tool for LangChain agents: offloaded tool results, read again page by page."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool

from smoothctx import Offload, Policy, Runtime, Session
from smoothctx.errors import ConfigurationError
from smoothctx.transforms.offload import PAGE, TOOL_NAME, TOOL_SCHEMA

NOTHING = "error: nothing has been offloaded yet"


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
        return NOTHING if found is None else await found.retrieve(id, offset, limit)

    def retrieve(id: Any = "", offset: Any = 0, limit: Any = PAGE, **_: Any) -> str:
        found = current()
        return NOTHING if found is None else found.retrieve_sync(id, offset, limit)

    function = TOOL_SCHEMA["function"]
    return StructuredTool(
        name=TOOL_NAME,
        description=function["description"],
        args_schema=copy.deepcopy(function["parameters"]),
        func=retrieve,
        coroutine=aretrieve,
    )


def offloads(policy: Policy) -> bool:
    """May anything be moved out of the context?"""
    return policy.max_message_tokens is not None or bool(_members(policy))


def forgets(runtime: Runtime, policy: Policy) -> bool:
    """Is what is moved out of the context kept by this process alone?"""
    if runtime.shares_artifacts:
        return False
    return policy.max_message_tokens is not None or any(m.store is None for m in _members(policy))


def _members(policy: Policy) -> list[Offload]:
    members = getattr(policy.transform, "transforms", (policy.transform,))
    return [m for m in members if isinstance(m, Offload)]
