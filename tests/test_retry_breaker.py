"""Retries and their budget; circuit breakers."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from hypothesis import given, strategies as st

from smoothctx.breaker import BreakerOpen, Breakers, BreakerState, CircuitBreaker
from smoothctx.errors import ConfigurationError, EngineOverloaded, EngineRefused, EngineUnreachable
from smoothctx.retry import RetryBudget, is_retryable, retry_after, run_with_retries
from virtual import run_virtual


class Flaky:
    """Raises the given errors, one per call, then returns 7."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.at: list[float] = []

    async def __call__(self) -> int:
        self.at.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)
        return 7


def retried(fn: Flaky, *, attempts: int = 3, budget: RetryBudget | None = None) -> int:
    async def main() -> int:
        clock = asyncio.get_running_loop().time
        return await run_with_retries(fn, attempts=attempts, budget=budget or RetryBudget(clock), rng=random.Random(1))

    return run_virtual(main)


def test_retries_what_may_work_later_with_growing_waits() -> None:
    """Two failures of a retryable kind, then a result; the waits grow and stay within the jitter."""
    fn = Flaky(EngineUnreachable("x"), httpx.ConnectError("x"))
    assert retried(fn) == 7
    first, second = fn.at[1] - fn.at[0], fn.at[2] - fn.at[1]
    assert 0.25 <= first <= 0.5 <= second <= 1.0


@pytest.mark.parametrize(
    "error", [ValueError("x"), EngineRefused("400"), TimeoutError("ours"), httpx.UnsupportedProtocol("x")]
)
def test_what_cannot_be_helped_is_raised_at_once(error: Exception) -> None:
    """A refused request, a bug or a deadline is not tried again, and is the caller's own error object."""
    fn = Flaky(error)
    with pytest.raises(type(error)) as caught:
        retried(fn)
    assert caught.value is error
    assert len(fn.at) == 1


def test_attempts_are_bounded_and_the_last_error_is_raised() -> None:
    """After the last attempt the error comes as it is."""
    fn = Flaky(*(EngineUnreachable(str(n)) for n in range(5)))
    with pytest.raises(EngineUnreachable, match="^2$"):
        retried(fn)
    assert len(fn.at) == 3


@pytest.mark.parametrize(("asked", "waits"), [(7.0, 7.0), (500.0, 30.0)])
def test_retry_after_is_honoured_up_to_a_cap(asked: float, waits: float) -> None:
    """The server's own wish is waited for, but not for ever."""
    fn = Flaky(EngineOverloaded("429", status=429, retry_after_s=asked))
    assert retried(fn) == 7
    assert fn.at[1] - fn.at[0] == pytest.approx(waits)


def test_promise_11_cancellation_is_never_retried() -> None:
    """A cancelled attempt is cancelled."""
    fn = Flaky(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        retried(fn)
    assert len(fn.at) == 1
    assert not is_retryable(asyncio.CancelledError())


def test_cancelled_while_waiting_for_the_next_attempt() -> None:
    """Cancellation also ends the wait between two attempts."""
    fn = Flaky(EngineUnreachable("x"))

    async def main() -> None:
        async with asyncio.timeout(0.1):
            await run_with_retries(fn, budget=RetryBudget(lambda: 0.0))

    with pytest.raises(TimeoutError):
        run_virtual(main)
    assert len(fn.at) == 1


def test_a_dead_server_is_not_hammered() -> None:
    """Over many failing calls, retries stay within the ratio, the burst and the floor."""
    now = 0.0
    budget = RetryBudget(lambda: now, ratio=0.2, floor_per_s=0.1, burst=10)
    calls = 0
    for _ in range(500):
        fn = Flaky(*(EngineUnreachable("x") for _ in range(9)))
        with pytest.raises(EngineUnreachable):
            retried(fn, budget=budget)
        calls += len(fn.at)
    assert calls - 500 <= 10 + 0.2 * 500
    now = 20.0
    assert budget.take() and budget.take() and not budget.take(), "time gives two back"


def test_retry_budget_options() -> None:
    """Wrong options raise at construction, in the caller's words."""
    with pytest.raises(ConfigurationError, match="ratio=-1: expected"):
        RetryBudget(lambda: 0.0, ratio=-1)
    assert repr(RetryBudget(lambda: 0.0)) == "<RetryBudget 10.0 of 10>"


def test_promise_07_breaker_rests_and_recovers() -> None:
    """Closed, open after failures in a row, one probe after the cooldown, closed again by its success."""
    breaker = CircuitBreaker(threshold=3, cooldown_s=60.0)
    for now in (1.0, 2.0):
        assert breaker.allow(now)
        breaker.failure(now)
    breaker.success(3.0)
    for now in (4.0, 5.0, 6.0):
        assert breaker.allow(now)
        breaker.failure(now)
    assert str(breaker.state) == "open"
    assert not breaker.allow(65.9)
    assert breaker.retry_in(46.0) == 20.0
    assert breaker.allow(66.0)
    assert str(breaker.state) == "half_open"
    assert not breaker.allow(67.0), "one probe"
    breaker.failure(70.0)
    assert not breaker.allow(129.0)
    assert breaker.allow(130.0)
    breaker.success(131.0)
    assert breaker.state is BreakerState.CLOSED and breaker.idle


def test_cancelled_work_counts_as_neither() -> None:
    """A cancelled probe hands the probe on; a cancelled work changes nothing."""
    breaker = CircuitBreaker(threshold=1, cooldown_s=10.0)
    breaker.release(0.0)
    assert breaker.idle
    breaker.failure(0.0)
    assert breaker.allow(10.0)
    breaker.release(11.0)
    assert breaker.allow(11.0)


def test_late_failures_do_not_prolong_the_rest() -> None:
    """Works that began before the opening fail later: the cooldown counts from the opening."""
    breaker = CircuitBreaker(threshold=1, cooldown_s=10.0)
    breaker.failure(0.0)
    breaker.failure(9.0)
    assert breaker.allow(10.0)


@given(st.lists(st.tuples(st.sampled_from(["success", "failure", "release"]), st.floats(0, 100)), max_size=60))
def test_breaker_always_comes_back(history: list[tuple[str, float]]) -> None:
    """Whatever happened, one cooldown after the last event a start is allowed (nothing stays blocked)."""
    breaker = CircuitBreaker(threshold=2, cooldown_s=60.0)
    now = 0.0
    for verdict, gap in history:
        now += gap
        if breaker.allow(now):
            getattr(breaker, verdict)(now)
    assert breaker.allow(now + 60.0)


def test_promise_10_breakers_are_bounded_and_forget_the_harmless_first() -> None:
    """Keys beyond the bound are forgotten, those without failures before those that rest."""
    breakers = Breakers(threshold=1, max_keys=3)
    breakers.get("bad").failure(0.0)
    for n in range(10):
        breakers.get(f"fine{n}")
    assert len(breakers) == 3
    assert not breakers.get("bad").allow(1.0)
    assert breakers.resting() == 1
    for n in range(3):
        breakers.get(f"bad{n}").failure(0.0)
    assert len(breakers) == 3 and breakers.get("bad").allow(1.0), "the oldest is forgotten when all of them rest"


def test_breaker_options_and_error() -> None:
    """Wrong options raise at construction; the error says when it goes on."""
    for options in ({"threshold": 0}, {"threshold": True}, {"cooldown_s": 0}, {"max_keys": 0}):
        with pytest.raises(ConfigurationError, match="expected"):
            Breakers(**options)
    error = BreakerOpen("summarize", 12.0)
    assert "summarize" in str(error) and "12 s" in str(error) and error.retry_in_s == 12.0 and not error.retryable
    assert repr(CircuitBreaker()) == "<CircuitBreaker closed, 0 failures in a row>"


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("7", 7.0),
        (7, 7.0),
        ("-1", 0.0),
        ("nan", None),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 37.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 37.0),
        ("Sun Nov  6 08:49:37 1994", 37.0),
        ("Sun, 06 Nov 1994 08:48:00 GMT", 0.0),
        ("Sun, 06 Nov 1994 10:49:37 +0200", 37.0),
        ("Sun, 32 Nov 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 99999999 08:49:37 GMT", None),
        ("", None),
        (None, None),
        (b"7", 7.0),
        (object(), None),
    ],
)
def test_a_wish_to_be_left_alone_is_a_number_or_a_date(asked: object, seconds: float | None) -> None:
    """All three forms of a date; by our own clock where the answer has no date of its own that can be read."""
    clock = 784111740.0  # 1994-11-06 08:49:00 UTC
    for headers in ({"retry-after": asked}, {"retry-after": asked, "date": "today"}):
        assert retry_after(headers, lambda: clock) == seconds
    assert retry_after({}) is None
