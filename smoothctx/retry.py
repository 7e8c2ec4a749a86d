"""Retries: the same call again where that may help, and only as often as the shared budget allows."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import anyio
import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.stop import stop_base

from .errors import ConfigurationError

T = TypeVar("T")

#: seconds: the first wait; it doubles with every attempt
BASE_S = 0.5
#: seconds: no wait is longer, unless the server asks for more
BACKOFF_CAP_S = 10.0
#: seconds: a server's ``retry_after_s`` counts up to here
RETRY_AFTER_CAP_S = 30.0
_seed: ContextVar[int | None] = ContextVar("smoothctx_retry_seed", default=None)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """What is made inside has the same jitter at each run."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def jitter() -> random.Random:
    """Where the jitter of retries comes from: different in every process, but for what is :func:`seeded`."""
    return random.Random(_seed.get())


class RetryBudget:
    """A token bucket that many calls share, so that a dead server is not hammered.

    Each call puts ``ratio`` of a retry in, time puts ``floor_per_s`` in, and each retry takes one out: in the
    long run retries are at most ``ratio`` of the calls, plus the floor. ``burst`` is the most it holds, and what
    it begins with. ``clock`` gives seconds.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self, clock: Callable[[], float], *, ratio: float = 0.2, floor_per_s: float = 0.1, burst: float = 10.0
    ) -> None:
        for option, value in (("ratio", ratio), ("floor_per_s", floor_per_s), ("burst", burst)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigurationError(f"{option}={value!r}: expected a number of at least 0")
        self._clock = clock
        self._ratio = ratio
        self._floor_per_s = floor_per_s
        self._burst = burst
        self._tokens = burst
        self._seen_at = clock()

    def call(self) -> None:
        """A call begins."""
        self._add(self._ratio)

    def take(self) -> bool:
        """Take one retry out, if there is one."""
        now = self._clock()
        self._add(self._floor_per_s * max(0.0, now - self._seen_at))
        self._seen_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._burst, self._tokens + tokens)

    def __repr__(self) -> str:
        return f"<RetryBudget {self._tokens:.1f} of {self._burst:g}>"


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may work later.

    An error that says so itself (``.retryable``) is believed. Broken connections and an HTTP client's timeouts
    are retried. A plain ``TimeoutError`` is not: it is somebody's deadline for the whole work.
    """
    if not isinstance(error, Exception):
        return False
    said = getattr(error, "retryable", None)
    if isinstance(said, bool):
        return said
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):  # our own request is wrong
        return False
    return isinstance(error, httpx.TransportError | ConnectionError)


class _Spent(stop_base):
    """Stops when the budget has no retry left; takes one out otherwise."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget

    def __call__(self, retry_state: RetryCallState) -> bool:
        return not self._budget.take()


def _wall() -> float:
    return datetime.now(UTC).timestamp()  # a date is of the calendar, no clock of ours


def retry_after(headers: Mapping[str, Any], now: Callable[[], float] = _wall) -> float | None:
    """Seconds for which an answer's ``Retry-After`` asks us to stay away, given as a number or as a date (RFC 9110);
    ``None`` where it says nothing that can be read.

    A date counts from the answer's own ``Date``, where it has one: the server's clock may be another than ours.
    """
    asked = headers.get("retry-after")
    try:
        seconds = float(asked)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        until, since = _date(asked), _date(headers.get("date"))
        if until is None:
            return None
        seconds = until - (now() if since is None else since)
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _date(text: Any) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (AttributeError, TypeError, ValueError, OverflowError, IndexError):
        return None


async def run_with_retries(
    fn: Callable[[], Awaitable[T]],
    *,
    attempts: int = 3,
    budget: RetryBudget,
    rng: random.Random | None = None,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> T:
    """``await fn()``, up to ``attempts`` times in all.

    Waits between attempts grow exponentially, with jitter from ``rng``; a server's ``retry_after_s`` is waited
    for, up to 30 s. What cannot be helped by a retry (see :func:`is_retryable`), and cancellation, is raised at
    once; when attempts or budget are spent the last error is raised.
    """
    source = rng or random

    def wait(state: RetryCallState) -> float:
        backoff = min(BACKOFF_CAP_S, BASE_S * 2.0 ** (state.attempt_number - 1)) * (0.5 + source.random() / 2)
        error = state.outcome.exception() if state.outcome is not None else None
        asked = getattr(error, "retry_after_s", None)
        if isinstance(asked, int | float) and asked > 0:
            return max(backoff, min(RETRY_AFTER_CAP_S, asked))
        return backoff

    budget.call()
    retrying = AsyncRetrying(
        sleep=sleep,
        # in this order: the budget is asked only for a retry that would be made
        stop=stop_after_attempt(attempts) | _Spent(budget),
        wait=wait,
        retry=retry_if_exception(is_retryable),
        reraise=True,
    )
    return await retrying(fn)
