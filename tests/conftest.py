"""How the tests run: hypothesis repeats itself by default, and what needs another AG2 is not collected."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from hypothesis import HealthCheck, settings

# The same examples in every run, so that what was green stays green. `make search` looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", max_examples=2_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("SMOOTHCTX_PROFILE", "steady"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """AG2 and its classic line share one name: each has an environment and a Make target of its own."""
    if collection_path.name not in ("ag2", "ag2_classic"):
        return None
    try:
        classic = int(metadata.version("ag2").split(".")[0]) < 1
    except metadata.PackageNotFoundError:
        return True
    return None if classic == (collection_path.name == "ag2_classic") else True
