"""What these tests share lies beside them, in ``streams.py``. The framework's threads are announced to virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from virtual import announce_thread

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def announced_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework resolves every subscriber's arguments in a worker thread, which virtual time cannot see."""
    run_sync = anyio.to_thread.run_sync

    async def announced(*args: Any, **options: Any) -> Any:
        with announce_thread():
            return await run_sync(*args, **options)

    monkeypatch.setattr(anyio.to_thread, "run_sync", announced)
