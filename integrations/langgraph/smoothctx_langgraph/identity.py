"""Who is running: thread, namespace and task of the present node, read from the run and never from a signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langgraph.config import get_config
from langgraph.runtime import get_runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Where a node runs.

    ``thread``: the thread id, ``None`` without one. ``namespace``: the names of the subgraphs around it, alike in every
    turn (LangGraph's own namespace holds ids that change with each step). ``owner``: that namespace with its ids: it
    tells parallel sub-agents apart. ``task``: this execution of the node, alike in its retries and when it resumes
    after an interrupt. ``config``: the run's config.
    """

    thread: str | None
    namespace: str
    owner: str
    node: str
    task: str
    config: Mapping[str, Any]


def identity() -> Identity | None:
    """The identity of the node that runs now; ``None`` outside a graph."""
    try:
        config = get_config()
    except RuntimeError:
        return None
    configurable = config.get("configurable") or {}
    where = configurable.get("checkpoint_ns") or ""
    if not where:
        return None  # a runnable outside any graph
    owner, _, place = where.rpartition("|")
    names = [part.partition(":")[0] for part in owner.split("|")]
    thread = configurable.get("thread_id")
    return Identity(
        thread=None if thread is None else str(thread),
        namespace="|".join(name for name in names if not name.isdecimal()),  # a number counts the calls of one task
        owner=owner,
        node=place.partition(":")[0],
        task=_task() or where,
        config=config,
    )


def _task() -> str | None:
    try:
        info = get_runtime().execution_info
    except RuntimeError:
        return None
    return getattr(info, "task_id", None)
