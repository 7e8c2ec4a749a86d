"""The worker: everything between a job's start and its outcome. Admission, breaker, retries, timeout."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from .breaker import BreakerOpen, Breakers, CircuitBreaker
from .errors import TransformError
from .foreign import Call, Foreign
from .retry import RetryBudget, run_with_retries
from .states import Reason
from .work import Admission, Outcome, Work, read_answer

#: seconds that admission may take for its answer; then the work runs
ADMISSION_TIMEOUT_S = 1.0


@dataclass(slots=True, eq=False)
class Entry:
    """A work while it is the pool's."""

    id: int
    work: Work
    #: somebody wants it to end, for this reason
    stop: Reason | None = None
    #: a turn waits for it: admission cannot put it off meanwhile
    promoted: bool = False
    #: the foreign code that its worker watches now
    call: Call | None = None
    #: its run, if that had to be left behind
    left: asyncio.Task[Any] | None = None


class Worker:
    """Serves one entry at a time per call of :meth:`serve`; what the calls share is kept here.

    ``grace_s``: seconds that cancelled code may take to clean up.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        admission: Admission | None,
        breakers: Breakers,
        budget: RetryBudget,
        rng: random.Random,
        report: Callable[[BaseException, str], None],
    ) -> None:
        self._now = clock
        self._admission = admission
        self._stuck_admission: asyncio.Task[Any] | None = None
        self.breakers = breakers
        self._budget = budget
        self._rng = rng
        self._report = report
        self.foreign = Foreign(report)
        self.grace_s = 5.0

    async def serve(self, entry: Entry) -> Outcome | float:
        """Admission, breaker, run. A number is the seconds for which admission put it off."""
        work = entry.work
        if entry.stop is not None:  # before its first step
            return Outcome(reason=entry.stop)
        answer = await self._ask_admission(entry)
        if entry.stop is not None:
            return Outcome(reason=entry.stop)
        if answer == "skip":
            return Outcome(reason=Reason.ADMISSION_DENIED)
        if isinstance(answer, float) and not entry.promoted:
            return answer
        breaker = self.breakers.get(work.breaker_key) if work.breaker_key else CircuitBreaker()
        now = self._now()
        if not breaker.allow(now):
            error = BreakerOpen(work.breaker_key, breaker.retry_in(now))
            return Outcome(reason=Reason.FAILED, error=error)
        outcome = Outcome(reason=Reason.SHUTDOWN)
        try:
            outcome = await self._run(entry)
        finally:
            self._judge(breaker, outcome)
        return outcome

    def _judge(self, breaker: CircuitBreaker, outcome: Outcome) -> None:
        """Tell the breaker. What was cancelled says nothing."""
        now = self._now()
        if outcome.reason is None:
            breaker.success(now)
        elif outcome.reason in (Reason.FAILED, Reason.TIMEOUT) and not getattr(outcome.error, "breaker_neutral", False):
            breaker.failure(now)
        else:
            breaker.release(now)

    async def _ask_admission(self, entry: Entry) -> str | float:
        """``"run"``, ``"skip"``, or the seconds to defer for. Whatever goes wrong means ``"run"``."""
        admission = self._admission
        if (
            admission is None
            or entry.work.internal
            or (self._stuck_admission is not None and not self._stuck_admission.done())
        ):
            return "run"

        async def ask(_: Call) -> object:
            return await admission.decide(entry.work)

        call = self.foreign.begin(ask, f"smoothctx-admission:{entry.work.name}")
        ended = await self._watch(entry, call, ADMISSION_TIMEOUT_S, lambda: min(ADMISSION_TIMEOUT_S, self.grace_s))
        if entry.stop is not None:
            return "run"
        if not ended:
            self._stuck_admission = call.task
            self._report(TimeoutError(f"no answer within {ADMISSION_TIMEOUT_S:g} s"), "admission")
            return "run"
        result = _result(call.task)
        if result.reason is not None:
            self._report(result.error or RuntimeError("was cancelled"), "admission")
            return "run"
        answer = read_answer(result.value)
        if answer is None:
            expected = "'run', 'skip', 'defer' or ('defer', seconds)"
            self._report(TypeError(f"answered {result.value!r}: expected {expected}"), "admission")
        return answer or "run"

    async def _run(self, entry: Entry) -> Outcome:
        """The work itself, with its retries, under its timeout."""
        work = entry.work

        async def run(call: Call) -> Any:
            async def attempt() -> Any:
                if call.over:  # it swallowed its cancellation: the retries end here
                    raise asyncio.CancelledError
                return await work.run()

            async def pause(seconds: float) -> None:
                work.resumes_at = self._now() + seconds
                try:
                    await anyio.sleep(seconds)
                finally:
                    work.resumes_at = None

            return await run_with_retries(attempt, budget=self._budget, rng=self._rng, sleep=pause)

        try:
            work.on_start()
        except Exception as error:
            self._report(error, f"on_start of {work.name}")
        if entry.stop is not None:  # on_start did it
            return Outcome(reason=entry.stop)
        call = self.foreign.begin(run, f"smoothctx:{work.name}")
        try:
            ended = await self._watch(entry, call, work.timeout_s, lambda: self.grace_s)
        finally:
            if not call.task.done():
                entry.left = call.task
        if entry.stop is not None:  # also when a result came in the same moment: cancelled means no result
            return Outcome(reason=entry.stop)
        if not ended:
            return Outcome(reason=Reason.TIMEOUT, error=TimeoutError(f"{work.name}: not done in {work.timeout_s} s"))
        return _result(call.task)

    async def _watch(self, entry: Entry, call: Call, timeout_s: float | None, grace_s: Callable[[], float]) -> bool:
        entry.call = call
        try:
            return await call.watch(timeout_s, grace_s)
        finally:
            entry.call = None


def _result(task: asyncio.Task[Any]) -> Outcome:
    if task.cancelled():  # though nobody has asked for that: a client raises it when its own connection is gone
        error = TransformError(f"{task.get_name()} was cancelled from within")
        return Outcome(reason=Reason.FAILED, error=error)
    failed = task.exception()
    if failed is not None:
        return Outcome(reason=Reason.FAILED, error=failed)
    return Outcome(value=task.result())
