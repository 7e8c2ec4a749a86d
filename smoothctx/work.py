"""What the pool is given and what it gives back: works, outcomes, and the admission that is asked about them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .states import Reason

if TYPE_CHECKING:
    from .foreground import Foreground

#: seconds after which admission is asked again, where it did not say
DEFER_S = 1.0
#: seconds: no deferral is shorter, so that a source that says "defer, 0 s" cannot make the pool spin
MIN_DEFER_S = 0.05
#: seconds that admission may put one work off, in all
MAX_DEFER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a work: its ``value``, or a ``reason`` (and the ``error`` behind it, if there was one)."""

    value: Any = None
    error: BaseException | None = None
    reason: Reason | None = None


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Work:
    """Something to run in the background.

    ``due``: when the result will be wanted, in the pool's clock, if known. ``timeout_s``: for the run with all
    its retries; ``None`` for no limit. ``patience_s``: seconds after which it may have to give its slot to another
    work (it goes on); ``None`` for the pool's ``stray_s``. ``promoted``: in front, from the start or while a turn waits
    for it; ``wanted()`` says whether one does. ``waited_s``: seconds that the work has waited whose place it takes.
    ``breaker_key``: works of the same key share a circuit breaker; an empty one has none.
    ``on_start`` is called when ``run`` begins (not if it never does), ``on_done`` exactly once, both on the pool's
    loop (or, when that is gone, on the caller's thread). What they raise is reported and goes no further.

    For admission: ``engine`` is what it loads (``None``: nothing that is known), ``foreground`` whose turns it may
    disturb there, ``usual_s`` how long such a work usually takes.

    An error of ``run`` may carry ``retryable``, ``retry_after_s`` (see :mod:`smoothctx.retry`), and
    ``breaker_neutral = True``: it says nothing against what was used, so the breaker does not count it.
    """

    key: str
    tenant: str
    session: str
    run: Callable[[], Awaitable[Any]]
    on_done: Callable[[Outcome], None]
    on_start: Callable[[], None] = lambda: None
    child: bool = False
    due: float | None = None
    timeout_s: float | None = None
    patience_s: float | None = None
    name: str = "work"
    breaker_key: str = ""
    promoted: bool = False
    wanted: Callable[[], bool] = lambda: False
    waited_s: float = 0.0
    engine: Any = None
    foreground: Foreground | None = None
    usual_s: float | None = None
    #: while it waits to be tried again: when that is, in the pool's clock
    resumes_at: float | None = None
    #: the runtime's own (a store write): nobody is asked whether it may run
    internal: bool = False


class Admission(Protocol):
    """Asked before each work starts."""

    async def decide(self, work: Work, /) -> object:
        """``"run"``, ``"skip"``, ``"defer"``, or ``("defer", seconds)``.

        Anything else, an error, or no answer within a second, counts as ``"run"`` and is reported.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """A snapshot. ``running``: all that a worker looks after. ``strays``: those that hold no slot any more, running or
    left behind. ``idle``: those whose result is there, and that hold none either. ``abandoned``: left behind and still
    running. ``unfinished``: how many ended without a value."""

    queued: int
    running: int
    strays: int
    idle: int
    abandoned: int
    resting: int
    submitted: int
    finished: int
    unfinished: Mapping[Reason, int]


def read_answer(answer: object) -> str | float | None:
    """What admission said: ``"run"``, ``"skip"``, or the seconds to defer for; ``None`` for anything else."""
    if isinstance(answer, str):
        words: dict[str, str | float] = {"run": "run", "skip": "skip", "defer": DEFER_S}
        return words.get(answer)
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str) and answer[0] == "defer":
        seconds = answer[1]
        if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf:
            return max(MIN_DEFER_S, float(seconds))
    return None
