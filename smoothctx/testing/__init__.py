"""For the tests of agents and of own transforms: virtual time, a fake engine that counts, faults, checkers.

Nothing here needs a test framework. See ``docs/testing.md``.
"""

from __future__ import annotations

from .clock import DeadlockError, VirtualTimeLoop, announce_thread, run_virtual
from .engine import EngineCall, FakeEngine, FakeStream
from .events import Recorder
from .faults import Faults
from .locality import LocalityReport, check_locality
from .models import FakeModel, marks
from .requests import assert_valid_request, valid_request
from .stores import FlakyStore

__all__ = (
    "DeadlockError",
    "EngineCall",
    "FakeEngine",
    "FakeModel",
    "FakeStream",
    "Faults",
    "FlakyStore",
    "LocalityReport",
    "Recorder",
    "VirtualTimeLoop",
    "announce_thread",
    "assert_valid_request",
    "check_locality",
    "marks",
    "run_virtual",
    "valid_request",
)
