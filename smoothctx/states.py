"""The states of a lookahead handle and the typed reasons for which one is dropped."""

from __future__ import annotations

from enum import StrEnum


class HandleState(StrEnum):
    """Where a lookahead is in its life.

    ``PENDING -> RUNNING -> READY -> COMMITTED``; ``DISCARDED`` from any of the first three; ``FAILED`` from
    the first two. The last three are final.
    """

    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"
    COMMITTED = "committed"
    DISCARDED = "discarded"
    FAILED = "failed"


class Reason(StrEnum):
    """Why a handle or artifact was dropped, or why a handle failed."""

    DIGEST_MISMATCH = "digest_mismatch"
    BRANCH_DIVERGED = "branch_diverged"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    EVICTED = "evicted"
    NOT_SMALLER = "not_smaller"
    INVALID_OUTPUT = "invalid_output"
    JUDGED_UNFAITHFUL = "judged_unfaithful"
    ADMISSION_DENIED = "admission_denied"
    QUEUE_FULL = "queue_full"
    TIMEOUT = "timeout"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SESSION_CLOSED = "session_closed"
    SHUTDOWN = "shutdown"
    UNPROFITABLE = "unprofitable"


FINAL = frozenset({HandleState.COMMITTED, HandleState.DISCARDED, HandleState.FAILED})
WORKING = frozenset({HandleState.PENDING, HandleState.RUNNING})
