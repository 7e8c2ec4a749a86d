"""Circuit breakers: a transform or server that keeps failing rests for a while.

An open breaker means that background work is not started; the turn goes on with the view it has. Pure: the time
is given with every call.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import StrEnum

from .errors import ConfigurationError, TransformError


class BreakerOpen(TransformError):
    """Work was not started, since it failed too often; it may be tried again in ``retry_in_s`` seconds."""

    def __init__(self, key: str, retry_in_s: float) -> None:
        super().__init__(f"{key or 'this work'} failed too often and rests: next attempt in {retry_in_s:.0f} s")
        self.retry_in_s = retry_in_s


class BreakerState(StrEnum):
    """``CLOSED`` works; ``OPEN`` rests; ``HALF_OPEN`` has one probe under way, which decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after ``threshold`` failures in a row; after ``cooldown_s`` seconds lets one probe through.

    Every ``allow`` that said yes is answered by one of ``success``, ``failure`` or ``release`` (the work was
    cancelled, or its end says nothing about the thing it used).

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    __slots__ = ("_cooldown_s", "_failures", "_opened_at", "_probing", "_threshold")

    def __init__(self, threshold: int = 3, cooldown_s: float = 60.0) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
            raise ConfigurationError(f"threshold={threshold!r}: expected a whole number of at least 1")
        if isinstance(cooldown_s, bool) or not isinstance(cooldown_s, int | float) or not cooldown_s > 0:
            raise ConfigurationError(f"cooldown_s={cooldown_s!r}: expected seconds above 0")
        self._threshold = threshold
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """As of the last call; an ``OPEN`` one whose time is over stays so until somebody asks ``allow``."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._probing else BreakerState.OPEN

    @property
    def idle(self) -> bool:
        """Nothing is known against it: a new one would behave the same."""
        return self._opened_at is None and self._failures == 0

    def retry_in(self, now: float) -> float:
        """Seconds until a probe is let through; 0 when something may start now or a probe is under way."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self._cooldown_s - now)

    def allow(self, now: float) -> bool:
        """May work start? After the cooldown the first to ask becomes the probe."""
        if self._opened_at is None:
            return True
        if self.rests_s(now) > 0:
            return False
        self._probing = True
        return True

    def rests_s(self, now: float) -> float:
        """Seconds for which nothing may start; ``inf`` while a probe is under way, whose end decides."""
        return math.inf if self._probing else self.retry_in(now)

    def success(self, now: float) -> None:
        """Work came to its result: closed, and every earlier failure is forgotten."""
        self._failures = 0
        self._opened_at = None
        self._probing = False

    def failure(self, now: float) -> None:
        """Work failed. The probe's failure opens anew; one that began before the opening prolongs nothing."""
        self._failures += 1
        if self._probing or (self._opened_at is None and self._failures >= self._threshold):
            self._opened_at = now
            self._probing = False

    def release(self, now: float) -> None:
        """Work ended without a verdict (cancelled). If it was the probe, the next one to ask is."""
        self._probing = False

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.state}, {self._failures} failures in a row>"


class Breakers:
    """The breakers of many keys. At most ``max_keys`` are kept.

    Beyond that one is forgotten: the first that nothing is known against, else the one used longest ago.
    """

    def __init__(self, threshold: int = 3, cooldown_s: float = 60.0, *, max_keys: int = 1024) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(f"max_keys={max_keys!r}: expected a whole number of at least 1")
        CircuitBreaker(threshold, cooldown_s)  # a wrong option raises here, not at the first use
        self._threshold = threshold
        self._cooldown_s = cooldown_s
        self._max_keys = max_keys
        self._held: OrderedDict[str, CircuitBreaker] = OrderedDict()

    def get(self, key: str) -> CircuitBreaker:
        """The breaker of this key, made if need be. Hold it from ``allow`` to its answer."""
        breaker = self._held.get(key)
        if breaker is None:
            if len(self._held) >= self._max_keys:
                oldest = next(iter(self._held))
                del self._held[next((held for held, known in self._held.items() if known.idle), oldest)]
            breaker = self._held[key] = CircuitBreaker(self._threshold, self._cooldown_s)
        self._held.move_to_end(key)
        return breaker

    def rests_s(self, key: str, now: float) -> float:
        """See :meth:`CircuitBreaker.rests_s`; asking changes nothing."""
        breaker = self._held.get(key)
        return 0.0 if breaker is None else breaker.rests_s(now)

    def resting(self) -> int:
        """How many are open or half-open."""
        return sum(breaker.state is not BreakerState.CLOSED for breaker in list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)
