"""How the tests run: hypothesis repeats itself by default, and what this environment lacks is not collected."""

from __future__ import annotations

import os
import signal
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that what was green stays green. `make search` looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", max_examples=2_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("SMOOTHCTX_PROFILE", "steady"))

# A shell starts what it runs in the background with SIGINT ignored; the scripts that we interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: tests that need what only the full development environment has
NEEDS = {
    "test_agent_framework_": "agent-framework-core",
    "test_autogen_": "autogen-core",
    "test_langgraph_deepagents": "deepagents",
    "test_langgraph_postgres": "langgraph-checkpoint-postgres",
    "test_langgraph_providers": "langchain-anthropic",
}


#: folders and files whose tests run on the real clock
REAL_TIME = {"integrations", "ag2", "ag2_classic", "test_docs.py", "test_engine_embedded.py"}


def installed(distribution: str) -> str | None:
    """The version of a distribution, if it is installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Collect what can run in this environment; each environment has a Make target of its own.

    AG2 and its classic line share one name, and the oldest supported langgraph is tested without other frameworks.
    """
    name = collection_path.name
    if name in ("ag2", "ag2_classic"):
        version = installed("ag2")
        classic = version is not None and version.startswith("0.")
        return None if version is not None and classic == (name == "ag2_classic") else True
    if name.startswith("test_engine_vllm"):
        return None if os.environ.get("SMOOTHCTX_VLLM_URL") else True  # `make test-vllm`
    needed = next((d for prefix, d in NEEDS.items() if name.startswith(prefix)), None)
    return True if needed is not None and installed(needed) is None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Try a test of the real clock again, on a machine that stalled for a moment: the frameworks run threads and timers
    of their own, and a script is a process of its own. Everything else is deterministic and gets one try."""
    for item in items:
        if item.path.parent.name in REAL_TIME or item.path.name in REAL_TIME:
            test = getattr(item, "function", None)
            test = getattr(getattr(test, "hypothesis", None), "inner_test", test)
            if not getattr(test, "on_virtual_time", False):
                item.add_marker(pytest.mark.flaky(reruns=2))
