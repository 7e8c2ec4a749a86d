"""Isolation: background work that a graph's run never hears of.

Whatever starts inside a node inherits the run's callbacks through context variables: a summariser's tokens would
come out of the user's stream, and its calls would appear in the user's traces. Here these are put aside.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers import context as tracers
from langsmith.run_helpers import _set_tracing_context, get_tracing_context

#: LangGraph leaves calls with this tag out of its message stream
NOSTREAM = "nostream"
#: says in ``metadata["lc_source"]``, where LangChain's own features say it, who made a call
SOURCE = "smoothctx"
_NO_PARENT = {"parent": None, "project_name": None, "tags": None, "metadata": None}

Tokens = list[tuple[contextvars.ContextVar[Any], contextvars.Token[Any]]]


@contextmanager
def isolated() -> Iterator[None]:
    """Run a block without the surrounding run: no config, callbacks, stream writers or parent trace.

    Everything else of the context stays (OpenTelemetry, the application's own variables). Threads and tasks that
    start inside inherit the isolation.
    """
    trace = get_tracing_context()
    tokens = _put_aside()
    try:
        yield
    finally:
        try:
            for var, token in reversed(tokens):
                var.reset(token)
        except ValueError:
            pass  # a coroutine that was left behind is closed in somebody else's context: nothing of ours is there
        else:
            _set_tracing_context(trace)


def isolated_context() -> contextvars.Context:
    """A copy of the present context in which :func:`isolated` holds for good: for ``context.run`` and new tasks."""
    context = contextvars.copy_context()
    context.run(_put_aside)
    return context


def background_config() -> RunnableConfig:
    """The config for a model call of our own: no callbacks of a run, and marked in case it is seen anyway."""
    return {"callbacks": [], "tags": [NOSTREAM], "metadata": {"lc_source": SOURCE}, "run_name": SOURCE}


def _put_aside() -> Tokens:
    tokens: Tokens = [(var, var.set(None)) for var in _inherited()]
    _set_tracing_context(_NO_PARENT)
    return tokens


def _inherited() -> list[contextvars.ContextVar[Any]]:
    """The variables through which LangChain and LangGraph hand a run on to what is called inside it."""
    found: list[contextvars.ContextVar[Any]] = [var_child_runnable_config]
    # what `collect_runs`, `get_usage_metadata_callback` and the like set for the user's own block
    found += [hook[0] for hook in getattr(tracers, "_configure_hooks", ())]
    try:
        from langgraph.pregel._tools import _tool_call_writer
    except ImportError:  # older than its streams of tool output
        return found
    return [*found, _tool_call_writer]
