"""Virtual time for tests, under the names that they import: see ``smoothctx.testing``."""

from __future__ import annotations

from smoothctx.testing import DeadlockError, VirtualTimeLoop, announce_thread, run_virtual

__all__ = ("DeadlockError", "VirtualTimeLoop", "announce_thread", "run_virtual")
