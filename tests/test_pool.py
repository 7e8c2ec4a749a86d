"""The task pool, on virtual time: every work gets exactly one outcome, and nothing is left after ``aclose``."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from searching import machine_settings
from smoothctx.breaker import BreakerOpen, Breakers
from smoothctx.errors import ClosedError, ConfigurationError, EngineUnreachable
from smoothctx.foreign import in_background
from smoothctx.pool import Outcome, TaskPool, Work
from smoothctx.scheduler import MAX_IDLE
from smoothctx.states import Reason
from virtual import VirtualTimeLoop, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


class Bench:
    """A pool with everything that came out of it."""

    def __init__(self, **options: Any) -> None:
        self.clock: Callable[[], float] = lambda: self.loop.time()
        self.errors: list[tuple[str, str]] = []
        self.outcomes: dict[str, list[Outcome]] = {}
        self.ended_at: dict[str, float] = {}
        self.started: list[str] = []
        self.loop: asyncio.AbstractEventLoop
        self.options = options
        self.pool = TaskPool(
            clock=lambda: self.loop.time() if hasattr(self, "loop") else 0.0,
            on_error=lambda error, where: self.errors.append((where, f"{type(error).__name__}: {error}")),
            **options,
        )

    async def start(self) -> Bench:
        self.loop = asyncio.get_running_loop()
        await self.pool.start()
        return self

    def work(self, name: str, run: Callable[[], Awaitable[Any]], **fields: Any) -> Work:
        self.outcomes[name] = []

        def done(outcome: Outcome) -> None:
            self.outcomes[name].append(outcome)
            self.ended_at[name] = self.loop.time()

        fields.setdefault("tenant", "t")
        return Work(
            key=name,
            session="s",
            name=name,
            run=run,
            on_start=lambda: self.started.append(name),
            on_done=done,
            **fields,
        )

    def submit(self, name: str, run: Callable[[], Awaitable[Any]], **fields: Any) -> Work:
        work = self.work(name, run, **fields)
        self.pool.submit(work)
        return work

    def outcome(self, name: str) -> Outcome:
        (only,) = self.outcomes[name]
        return only

    def reasons(self) -> dict[str, str | None]:
        return {name: (o.reason and str(o.reason)) for name, (o,) in self.outcomes.items()}


def tasks() -> set[str]:
    """The names of all tasks but the current one."""
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}


def after(seconds: float, value: Any = None) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def run() -> Any:
        await anyio.sleep(seconds)
        return value

    return run


async def hang() -> None:
    await asyncio.Event().wait()


def failing(error: Exception) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def run() -> Any:
        await anyio.sleep(1)
        raise error

    return run


def stubborn(release: asyncio.Event, seen: list[str] | None = None) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Swallows every cancellation until it is released."""

    async def run() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                if seen is not None:
                    seen.append("cancelled")
        return "late"

    return run


async def settle(cycles: int = 30) -> None:
    for _ in range(cycles):
        await asyncio.sleep(0)


@contextmanager
def background(run: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join()


# -- results ---------------------------------------------------------------------------------------------------------


def test_value_error_and_order() -> None:
    """Works run a bounded number at once, and come to a value or to the error that they raised."""

    async def main() -> None:
        bench = await Bench(concurrency=2).start()
        bench.submit("a", after(5, "A"))
        error = ValueError("no")
        bench.submit("b", failing(error))
        bench.submit("c", after(1, "C"))
        assert tasks() == {"smoothctx-pool"} and bench.started == []
        await anyio.sleep(1.5)
        assert bench.started == ["a", "b", "c"]
        await anyio.sleep(10)
        assert bench.outcome("a") == Outcome(value="A")
        assert bench.outcome("b") == Outcome(error=error, reason=Reason.FAILED)
        assert bench.outcome("c") == Outcome(value="C")
        assert bench.ended_at == {"a": 5.0, "b": 1.0, "c": 2.0}
        assert bench.errors == []
        await bench.pool.aclose()
        assert tasks() == set()

    run_virtual(main)


def test_retries_inside_the_timeout() -> None:
    """A retryable error is tried again, and the timeout is for all attempts together."""

    async def main() -> None:
        bench = await Bench().start()
        tries = 0

        async def flaky() -> str:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise EngineUnreachable("down")
            return "up"

        async def dead() -> None:
            await anyio.sleep(4)
            raise EngineUnreachable("down")

        bench.submit("flaky", flaky)
        bench.submit("dead", dead, timeout_s=6)
        await anyio.sleep(20)
        assert bench.outcome("flaky").value == "up" and tries == 3
        assert bench.outcome("dead").reason is Reason.TIMEOUT and bench.ended_at["dead"] == 6.0
        await bench.pool.aclose()

    run_virtual(main)


def test_promoted_goes_first_and_queue_full() -> None:
    """A full queue is a typed outcome; a promoted work goes first and may displace a lookahead."""

    async def main() -> None:
        bench = await Bench(concurrency=1, max_pending=2).start()
        bench.submit("running", after(1), promoted=True)
        bench.submit("soon", after(1), due=10.0)
        late = bench.submit("late", after(1), due=99.0)
        bench.submit("over", after(1), due=1.0)
        assert bench.outcome("over").reason is Reason.QUEUE_FULL
        bench.pool.promote(late)
        bench.submit("urgent", after(1), promoted=True)
        assert bench.outcome("soon").reason is Reason.QUEUE_FULL
        await anyio.sleep(10)
        assert bench.started == ["running", "late", "urgent"]
        await bench.pool.aclose()

    run_virtual(main)


def test_callbacks_that_raise_are_reported() -> None:
    """What ``on_start``, ``on_done`` and ``on_error`` raise goes no further."""

    async def main() -> None:
        bench = await Bench().start()
        work = bench.work("a", after(1, "A"))
        seen: list[Outcome] = []

        def broken() -> None:
            raise ValueError("start")

        def done(outcome: Outcome) -> None:
            seen.append(outcome)
            raise ValueError("done")

        work.on_start, work.on_done = broken, done
        bench.pool.submit(work)
        await anyio.sleep(2)
        assert seen == [Outcome(value="A")]
        assert bench.errors == [("on_start of a", "ValueError: start"), ("on_done of a", "ValueError: done")]
        bench.errors = None  # type: ignore[assignment]  # now on_error raises too
        bench.pool.submit(work)
        await anyio.sleep(2)
        assert len(seen) == 2
        await bench.pool.aclose()

    run_virtual(main)


def test_a_callback_may_submit_promote_and_cancel() -> None:
    """The pool may be called from its own callbacks."""

    async def main() -> None:
        bench = await Bench(concurrency=1, max_pending=1).start()
        first = bench.work("first", after(1))
        second, third = bench.work("second", after(1)), bench.work("third", after(1))

        def done(_: Outcome) -> None:
            bench.pool.submit(second)
            bench.pool.promote(second)
            bench.pool.submit(third)
            bench.pool.cancel(third, Reason.SUPERSEDED)

        first.on_done = done
        bench.pool.submit(first)
        await anyio.sleep(5)
        assert bench.outcome("second").reason is None
        assert bench.outcome("third").reason is Reason.SUPERSEDED
        await bench.pool.aclose()

    run_virtual(main)


def test_submitting_twice_is_one_outcome() -> None:
    """A work that is queued or running is not queued again."""

    async def main() -> None:
        bench = await Bench().start()
        work = bench.submit("a", after(1))
        bench.pool.submit(work)
        await anyio.sleep(5)
        assert bench.outcome("a").reason is None
        await bench.pool.aclose()

    run_virtual(main)


def test_what_the_pool_runs_knows_that_it_is_in_the_background() -> None:
    """Also in tasks and threads that a work starts; never in the code of those who started or wait for it."""

    async def main() -> None:
        bench = await Bench().start()
        done = asyncio.Event()

        async def run() -> list[bool]:
            async with asyncio.TaskGroup() as group:
                inner = group.create_task(anyio.to_thread.run_sync(in_background))
            done.set()
            return [in_background(), await inner]

        bench.submit("a", run)
        await done.wait()
        await bench.pool.aclose(drain=True)
        assert bench.outcome("a").value == [True, True] and not in_background()

    asyncio.run(main())


def test_promise_13_background_work_runs_in_a_copied_context() -> None:
    """A work sees the context of ``start``, not that of whoever submits it, and its changes stay its own."""
    var = contextvars.ContextVar("var", default="none")

    async def main() -> None:
        var.set("start")
        bench = await Bench().start()
        var.set("foreground")

        async def run() -> str:
            seen = var.get()
            var.set("background")
            return seen

        for name in ("a", "b"):
            bench.submit(name, run)
        await anyio.sleep(1)
        assert [bench.outcome(name).value for name in ("a", "b")] == ["start", "start"]
        assert var.get() == "foreground"
        await bench.pool.aclose()

    run_virtual(main)


def test_b38_a_running_work_is_not_collected() -> None:
    """B38: nobody holds the pool or its tasks, the collector runs, and the work still ends."""

    async def main() -> None:
        ended: list[Outcome] = []

        async def begin() -> Callable[[], None]:
            pool = TaskPool(clock=lambda: 0.0)
            await pool.start()
            gate = asyncio.get_running_loop().create_future()

            async def run() -> Any:
                return await gate

            pool.submit(Work(key="k", tenant="t", session="s", run=run, on_done=ended.append))
            await settle()
            return lambda: gate.set_result("done")

        release = await begin()
        for _ in range(3):
            gc.collect()
        release()
        await settle()
        assert ended == [Outcome(value="done")]

    run_virtual(main)


# -- cancelling, timing out, failing --------------------------------------------------------------------------------


def test_promise_11_cancel_gives_its_reason() -> None:
    """Queued or running, a cancelled work ends with the reason it was given, once."""

    async def main() -> None:
        bench = await Bench(concurrency=1).start()
        running = bench.submit("running", hang)
        queued = bench.submit("queued", hang)
        await settle()
        bench.pool.cancel(queued, Reason.SUPERSEDED)
        assert bench.outcome("queued").reason is Reason.SUPERSEDED
        bench.pool.cancel(running, Reason.SESSION_CLOSED)
        bench.pool.cancel(running, Reason.CANCELLED)
        await settle()
        assert bench.outcome("running").reason is Reason.SESSION_CLOSED
        bench.pool.cancel(running)
        assert bench.started == ["running"]
        await bench.pool.aclose()

    run_virtual(main)


def test_cancelled_before_the_first_step_never_runs() -> None:
    """A work that was given a slot a moment ago and is cancelled does not run at all."""

    async def main() -> None:
        bench = await Bench().start()
        bench.pool.cancel(bench.submit("a", hang))
        await settle()
        assert bench.outcome("a").reason is Reason.CANCELLED and bench.started == []
        await bench.pool.aclose()

    run_virtual(main)


def test_b147_cancelled_means_no_result() -> None:
    """B147: cancelled after the first part of two, a work that returns that part has no value."""

    async def main() -> None:
        bench = await Bench().start()

        async def parts() -> str:
            await anyio.sleep(1)
            try:
                await anyio.sleep(10)
            except asyncio.CancelledError:
                pass
            return "first part"

        work = bench.submit("a", parts)
        await anyio.sleep(5)
        bench.pool.cancel(work)
        await settle()
        assert bench.outcome("a") == Outcome(reason=Reason.CANCELLED)
        await bench.pool.aclose()

    run_virtual(main)


def test_a_work_that_cancels_itself() -> None:
    """A ``CancelledError`` of the work's own making is a failure, and harms nothing else."""

    async def main() -> None:
        bench = await Bench().start()

        async def odd() -> None:
            raise asyncio.CancelledError

        bench.submit("a", odd)
        bench.submit("b", after(1, "B"))
        await anyio.sleep(2)
        assert bench.outcome("a").reason is Reason.FAILED and bench.outcome("b").value == "B"
        assert "cancelled from within" in str(bench.outcome("a").error)
        await bench.pool.aclose()

    run_virtual(main)


def test_b43_timeout_cancels_the_worker_and_cooldown_is_no_failure() -> None:
    """B43: a timeout ends the run itself; a start during the cooldown does nothing and says so, and no more."""

    async def main() -> None:
        bench = await Bench(breakers=Breakers(threshold=1, cooldown_s=60)).start()
        cleaned: list[float] = []

        async def slow() -> None:
            try:
                await anyio.sleep(1000)
            finally:
                cleaned.append(now())

        bench.submit("slow", slow, timeout_s=30, breaker_key="k")
        await anyio.sleep(40)
        assert bench.outcome("slow").reason is Reason.TIMEOUT
        assert isinstance(bench.outcome("slow").error, TimeoutError)
        assert cleaned == [30.0] and tasks() == {"smoothctx-pool"}
        bench.submit("resting", after(1), breaker_key="k")
        await anyio.sleep(10)
        error = bench.outcome("resting").error
        assert isinstance(error, BreakerOpen) and error.retry_in_s == 50.0
        assert bench.started == ["slow"] and bench.pool.statistics().resting == 1
        await anyio.sleep(41)
        bench.submit("again", after(1, "ok"), breaker_key="k")
        await anyio.sleep(2)
        assert bench.outcome("again").value == "ok", "resting did not prolong the rest"
        assert bench.pool.statistics().resting == 0
        await bench.pool.aclose()

    run_virtual(main)


def test_b48_a_work_that_never_returns_blocks_nobody() -> None:
    """B48: submit returns at once, other works run, and closing is quick."""

    async def main() -> None:
        bench = await Bench(concurrency=2).start()
        bench.submit("never", hang)
        for n in range(5):
            bench.submit(f"w{n}", after(1))
        assert now() == 0.0
        await anyio.sleep(10)
        assert all(bench.outcome(f"w{n}").reason is None for n in range(5))
        await bench.pool.aclose()
        assert now() == 10.0 and bench.outcome("never").reason is Reason.SHUTDOWN

    run_virtual(main)


def test_b150_after_a_hang_a_new_start_works() -> None:
    """B150: hanging works time out, the breaker opens, and after the cooldown a new start works."""

    async def main() -> None:
        bench = await Bench(concurrency=1).start()
        for n in range(3):
            bench.submit(f"hang{n}", hang, timeout_s=10, breaker_key="k")
        bench.submit("open", after(1), breaker_key="k")
        bench.submit("other", after(1, "fine"), breaker_key="other")
        await anyio.sleep(60)
        assert [bench.outcome(f"hang{n}").reason for n in range(3)] == [Reason.TIMEOUT] * 3
        assert isinstance(bench.outcome("open").error, BreakerOpen)
        assert bench.outcome("other").value == "fine", "another key is not concerned"
        await anyio.sleep(31)
        bench.submit("new", after(1, "works"), breaker_key="k")
        await anyio.sleep(2)
        assert bench.outcome("new").value == "works"
        await bench.pool.aclose()

    run_virtual(main)


def test_b81_an_open_breaker_never_raises_to_the_caller() -> None:
    """B81: work rests; ``submit`` itself is as before, and neutral errors do not open anything."""

    async def main() -> None:
        class Unprofitable(Exception):
            breaker_neutral = True

        bench = await Bench(breakers=Breakers(threshold=1)).start()
        bench.submit("neutral", failing(Unprofitable()), breaker_key="k")
        await anyio.sleep(2)
        bench.submit("bad", failing(ValueError()), breaker_key="k")
        await anyio.sleep(2)
        assert bench.started == ["neutral", "bad"]
        for n in range(10):
            bench.submit(f"w{n}", after(1), breaker_key="k")
        await anyio.sleep(2)
        assert all(bench.outcome(f"w{n}").reason is Reason.FAILED for n in range(10)) and len(bench.started) == 2
        await bench.pool.aclose()

    run_virtual(main)


def test_cancelled_probe_does_not_stick() -> None:
    """A half-open breaker whose probe was cancelled lets the next work probe."""

    async def main() -> None:
        bench = await Bench(breakers=Breakers(threshold=1, cooldown_s=10)).start()
        bench.submit("bad", failing(ValueError()), breaker_key="k")
        await anyio.sleep(12)
        probe = bench.submit("probe", hang, breaker_key="k")
        await anyio.sleep(1)
        bench.pool.cancel(probe)
        await anyio.sleep(1)
        bench.submit("next", after(1, "ok"), breaker_key="k")
        await anyio.sleep(2)
        assert bench.outcome("next").value == "ok"
        await bench.pool.aclose()

    run_virtual(main)


def test_swallowed_timeout_is_left_behind_and_keeps_its_slot() -> None:
    """A run that ignores its cancellation gets its outcome after the grace; its slot is free when it ends."""

    async def main() -> None:
        bench = await Bench(concurrency=1).start()
        release = asyncio.Event()
        seen: list[str] = []
        bench.submit("deaf", stubborn(release, seen), timeout_s=10)
        bench.submit("next", after(1, "ok"))
        await anyio.sleep(100)
        assert bench.outcome("deaf").reason is Reason.TIMEOUT and bench.ended_at["deaf"] == 15.0
        assert seen == ["cancelled"]
        assert [where for where, _ in bench.errors] == ["smoothctx:deaf"]
        assert bench.pool.statistics().abandoned == 1 and bench.outcomes["next"] == []
        release.set()
        await anyio.sleep(2)
        assert bench.outcome("next").value == "ok" and bench.pool.statistics().abandoned == 0
        await bench.pool.aclose()
        assert tasks() == set()

    run_virtual(main)


def test_promise_10_works_that_hang_do_not_starve_the_others() -> None:
    """Past their patience they hold no slot: the others run, one stray for each slot, and each has its outcome."""

    async def main() -> None:
        bench = await Bench(concurrency=2, stray_s=60.0).start()
        for k in range(5):
            bench.submit(f"hang{k}", hang, timeout_s=300)
        bench.submit("urgent", after(1, "ok"), promoted=True)
        await anyio.sleep(59)
        assert bench.outcome("urgent").value == "ok" and bench.ended_at["urgent"] == 1.0
        assert "2/2 running" in repr(bench.pool)
        await anyio.sleep(3)
        stats = bench.pool.statistics()
        assert (stats.running, stats.strays, stats.queued) == (4, 2, 1)
        assert "2/2 and 2 strays running" in repr(bench.pool)
        await anyio.sleep(200)
        assert bench.pool.statistics().queued == 1, "no more strays than slots"
        await anyio.sleep(400)
        stats = bench.pool.statistics()
        assert (stats.running, stats.strays, stats.queued) == (0, 0, 0) and stats.submitted == 6
        assert [bench.outcome(f"hang{k}").reason for k in range(5)] == [Reason.TIMEOUT] * 5
        await bench.pool.aclose()

    run_virtual(main)


def test_promise_10_a_work_that_only_waits_for_idle_time_holds_no_slot() -> None:
    """Any number of them start, each after the other's result; of too many the last ends as `queue_full`; a drain
    waits for none."""

    async def main() -> None:
        bench = await Bench(concurrency=1).start()
        works: dict[str, Work] = {}

        def result(name: str) -> Callable[[], Awaitable[Any]]:
            async def run() -> None:
                await anyio.sleep(1)
                bench.pool.idle(works[name])
                await anyio.sleep_forever()

            return run

        names = [f"w{k}" for k in range(MAX_IDLE + 1)]
        for name in names:
            works[name] = bench.submit(name, result(name))
        bench.submit("next", after(1, "ok"))
        await anyio.sleep(MAX_IDLE + 2.5)
        assert bench.ended_at["next"] == MAX_IDLE + 2 and bench.outcome(names[-1]).reason is Reason.QUEUE_FULL
        stats = bench.pool.statistics()
        assert (stats.running, stats.idle, stats.strays) == (MAX_IDLE, MAX_IDLE, 0)
        assert f"0/1 running, {MAX_IDLE} idle, 0/256 queued" in repr(bench.pool)
        bench.pool.cancel(works["w0"])
        await anyio.sleep(0.1)
        await bench.pool.aclose(drain=True)
        assert bench.outcome("w0").reason is Reason.CANCELLED
        assert {bench.outcome(name).reason for name in names[1:]} == {Reason.QUEUE_FULL}

    run_virtual(main)


def test_a_run_that_was_left_behind_gives_up_its_slot_as_well() -> None:
    """Deaf to its cancellation or not, after its patience it holds none; `aclose` does not wait for it."""

    async def main() -> None:
        bench = await Bench(concurrency=1, stray_s=60.0).start()
        release = asyncio.Event()
        bench.submit("deaf", stubborn(release), timeout_s=10, patience_s=30)
        bench.submit("next", after(1, "ok"))
        await anyio.sleep(32)
        assert bench.outcome("deaf").reason is Reason.TIMEOUT and bench.ended_at["next"] == 31.0
        stats = bench.pool.statistics()
        assert (stats.running, stats.strays, stats.abandoned) == (0, 1, 1)
        release.set()
        await anyio.sleep(1)
        assert bench.pool.statistics().strays == 0
        await bench.pool.aclose()
        assert tasks() == set()

    run_virtual(main)


def test_an_abandoned_run_is_not_retried() -> None:
    """A run that turns its cancellation into a retryable error is not started again."""

    async def main() -> None:
        bench = await Bench().start()
        tries = 0

        async def run() -> None:
            nonlocal tries
            tries += 1
            try:
                await hang()
            except asyncio.CancelledError:
                raise EngineUnreachable("broken off") from None

        work = bench.submit("a", run, timeout_s=10)
        await anyio.sleep(1)
        bench.pool.cancel(work)
        await anyio.sleep(60)
        assert tries == 1 and bench.outcome("a").reason is Reason.CANCELLED
        await bench.pool.aclose()

    run_virtual(main)


def test_a_work_that_its_own_on_start_cancels() -> None:
    """It never runs, and has its reason."""

    async def main() -> None:
        bench = await Bench().start()
        ran: list[bool] = []

        async def run() -> None:
            ran.append(True)

        work = bench.work("a", run)
        work.on_start = lambda: bench.pool.cancel(work, Reason.SUPERSEDED)
        bench.pool.submit(work)
        await settle()
        assert bench.outcome("a").reason is Reason.SUPERSEDED and ran == []
        await bench.pool.aclose()

    run_virtual(main)


def test_promise_05_an_internal_error_loses_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the pool itself is reported, the work fails, and the pool goes on."""

    async def main() -> None:
        bench = await Bench().start()
        with monkeypatch.context() as patched:
            patched.setattr("smoothctx.worker.Worker._run", lambda *_: 1 / 0)
            bench.submit("a", after(1))
            await settle()
        assert bench.outcome("a").reason is Reason.FAILED
        assert bench.errors == [("worker of a", "ZeroDivisionError: division by zero")]
        bench.submit("b", after(1, "B"))
        await anyio.sleep(2)
        assert bench.outcome("b").value == "B"
        await bench.pool.aclose()

    run_virtual(main)


# -- admission -------------------------------------------------------------------------------------------------------


class Asked:
    """An admission that answers from a list, the last answer for ever; an answer may be a coroutine function."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.at: list[float] = []

    async def decide(self, work: Work, /) -> object:
        self.at.append(now())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return await answer() if callable(answer) else answer


def test_admission_skip_and_defer() -> None:
    """``skip`` ends a work; ``defer`` puts it off for as long as was said, or a second."""

    async def main() -> None:
        skip = await Bench(admission=Asked("skip")).start()
        skip.submit("a", after(1))
        await settle()
        assert skip.outcome("a").reason is Reason.ADMISSION_DENIED and skip.started == []
        await skip.pool.aclose()

        asked = Asked("defer", ("defer", 7), ("defer", 0), "run")
        bench = await Bench(admission=asked).start()
        bench.submit("a", after(1, "A"))
        await anyio.sleep(20)
        assert bench.outcome("a").value == "A"
        assert asked.at == pytest.approx([0.0, 1.0, 8.0, 8.05])
        await bench.pool.aclose()

    run_virtual(main)


def test_admission_cannot_put_work_off_for_ever() -> None:
    """After 60 s of deferrals a work ends as ``admission_denied``; others go on meanwhile."""

    async def main() -> None:
        bench = await Bench(admission=Asked(("defer", 25)), concurrency=1).start()
        bench.submit("a", after(1))
        await anyio.sleep(100)
        assert bench.outcome("a").reason is Reason.ADMISSION_DENIED and bench.ended_at["a"] == 60.0
        await bench.pool.aclose()

    run_virtual(main)


def test_promoted_work_is_not_deferred_but_may_be_skipped() -> None:
    """A turn waits for it: admission can only refuse it, also when it was promoted while it was put off."""

    async def main() -> None:
        bench = await Bench(admission=Asked(("defer", 50), ("defer", 50), "skip")).start()
        work = bench.submit("a", after(1, "A"))
        await anyio.sleep(1)
        bench.pool.promote(work)
        await anyio.sleep(2)
        assert bench.outcome("a").value == "A"
        bench.submit("b", after(1), promoted=True)
        await settle()
        assert bench.outcome("b").reason is Reason.ADMISSION_DENIED
        await bench.pool.aclose()

    run_virtual(main)


@pytest.mark.parametrize(
    "answer",
    [ValueError("x"), hang, "maybe", None, ("defer", -1), ("defer", float("nan")), ("defer",), 3, after(5, "skip")],
    ids=["raises", "hangs", "word", "none", "negative", "nan", "short", "number", "late"],
)
def test_promise_05_a_broken_admission_never_blocks_work(answer: Any) -> None:
    """An admission that raises, hangs or answers nonsense counts as ``run``, and is reported."""

    async def main() -> None:
        bench = await Bench(admission=Asked(answer)).start()
        bench.submit("a", after(1, "A"))
        await anyio.sleep(3)
        assert bench.outcome("a").value == "A"
        assert [where for where, _ in bench.errors] == ["admission"]
        await bench.pool.aclose()
        assert tasks() == set()

    run_virtual(main)


def test_promise_05_an_admission_that_cannot_be_cancelled() -> None:
    """It is left behind, and not asked again while it hangs: its tasks stay bounded."""

    async def main() -> None:
        release = asyncio.Event()
        asked = Asked(stubborn(release))
        bench = await Bench(admission=asked, concurrency=1).start()
        for n in range(4):
            bench.submit(f"w{n}", after(1, "ok"))
        await anyio.sleep(10)
        assert [bench.outcome(f"w{n}").value for n in range(4)] == ["ok"] * 4
        assert len(asked.at) == 1 and bench.pool.statistics().abandoned == 1
        await bench.pool.aclose()
        release.set()
        await settle()
        assert tasks() == set()

    run_virtual(main)


def test_cancelled_during_admission() -> None:
    """A work that is cancelled while admission thinks about it ends with its reason and never runs."""

    async def main() -> None:
        bench = await Bench(admission=Asked(after(0.5, "run"))).start()
        work = bench.submit("a", after(1))
        await anyio.sleep(0.2)
        bench.pool.cancel(work, Reason.SUPERSEDED)
        await settle()
        assert bench.outcome("a").reason is Reason.SUPERSEDED and bench.started == [] and bench.errors == []
        await bench.pool.aclose()

    run_virtual(main)


# -- closing ---------------------------------------------------------------------------------------------------------


def test_promise_11_after_aclose_nothing_runs() -> None:
    """Queued, deferred and running works end as ``shutdown``; later ones too; calling it again is fine."""

    async def main() -> None:
        bench = await Bench(concurrency=2, admission=Asked("run", ("defer", 30), "run")).start()
        for name in ("running", "deferred", "running too", "queued"):
            bench.submit(name, hang)
        await anyio.sleep(5)
        assert len(bench.started) == 2
        await bench.pool.aclose()
        assert tasks() == set()
        bench.submit("late", hang)
        await bench.pool.aclose()
        await bench.pool.aclose(drain=True)
        assert set(bench.reasons().values()) == {"shutdown"} and len(bench.outcomes) == 5
        bench.pool.cancel(bench.submit("later", hang))
        assert bench.outcome("later").reason is Reason.SHUTDOWN

    run_virtual(main)


def test_b49_drain_waits_for_what_was_begun() -> None:
    """B49: with ``drain`` what waits and runs may finish, deferred works included; new ones are refused."""

    async def main() -> None:
        bench = await Bench(concurrency=1, admission=Asked("run", ("defer", 5), "run")).start()
        for n in range(4):
            bench.submit(f"w{n}", after(1, n))
        closing = asyncio.Event()

        async def close() -> None:
            closing.set()
            await bench.pool.aclose(drain=True)

        async with anyio.create_task_group() as group:
            group.start_soon(close)
            await closing.wait()
            await settle()
            bench.submit("late", after(1))
            assert bench.outcome("late").reason is Reason.SHUTDOWN
        assert [bench.outcome(f"w{n}").value for n in range(4)] == [0, 1, 2, 3]
        assert tasks() == set()

    run_virtual(main)


def test_b49_a_script_that_just_ends() -> None:
    """B49: without ``aclose`` the loop's shutdown cancels everything cleanly, with an outcome for each."""
    bench = Bench(concurrency=1)

    async def main() -> None:
        await bench.start()
        for name in ("running", "queued"):
            bench.submit(name, hang)
        await settle()

    run_virtual(main)
    assert bench.reasons() == {"running": "shutdown", "queued": "shutdown"}
    assert repr(bench.pool) == "<TaskPool ended, 0/1 running, 0/256 queued>"


def test_a_run_that_swallows_cancellation_cannot_hold_aclose() -> None:
    """It is given the grace, then it is reported and left behind with the outcome ``shutdown``."""

    async def main() -> None:
        bench = await Bench().start()
        release = asyncio.Event()
        bench.submit("deaf", stubborn(release))
        bench.submit("fine", hang)
        await settle()
        await bench.pool.aclose(grace_s=3.0)
        assert now() == 3.0
        assert bench.reasons() == {"deaf": "shutdown", "fine": "shutdown"}
        assert bench.ended_at == {"deaf": 3.0, "fine": 0.0}
        assert bench.errors == [
            ("smoothctx:deaf", "TimeoutError: did not end within 3 s of its cancellation, and was left behind")
        ]
        assert tasks() == {"smoothctx:deaf"}
        release.set()
        await settle()
        assert tasks() == set() and len(bench.outcomes["deaf"]) == 1

    run_virtual(main)


def test_left_behind_runs_do_not_hold_a_drain() -> None:
    """A drain does not wait for a slot that a deaf run holds."""

    async def main() -> None:
        bench = await Bench(concurrency=1).start()
        release = asyncio.Event()
        bench.submit("deaf", stubborn(release), timeout_s=1)
        bench.submit("next", after(1, "ok"))
        await anyio.sleep(20)
        await bench.pool.aclose(drain=True)
        assert bench.outcome("next").value == "ok" and now() == 21.0
        release.set()
        await settle()

    run_virtual(main)


def test_clean_up_may_take_its_time_within_the_grace() -> None:
    """A cancelled work that closes a connection first is waited for."""

    async def main() -> None:
        bench = await Bench().start()
        cleaned = False

        async def run() -> None:
            nonlocal cleaned
            try:
                await hang()
            finally:
                await anyio.sleep(4)
                cleaned = True

        bench.submit("a", run)
        await settle()
        await bench.pool.aclose()
        assert cleaned and now() == 4.0 and bench.errors == []

    run_virtual(main)


def test_promise_11_cancelling_aclose_leaves_nothing_half_closed() -> None:
    """A cancelled drain passes its cancellation through; the next call finishes."""

    async def main() -> None:
        bench = await Bench().start()
        bench.submit("never", hang)
        await settle()
        with pytest.raises(TimeoutError):
            with anyio.fail_after(5):
                await bench.pool.aclose(drain=True)
        assert bench.outcomes["never"] == []
        assert repr(bench.pool) == "<TaskPool closing, 1/2 running, 0/256 queued>"
        await bench.pool.aclose()
        assert bench.outcome("never").reason is Reason.SHUTDOWN and tasks() == set()

    run_virtual(main)


def test_aclose_from_any_task_and_from_many() -> None:
    """Another task than the one that started it may close it; several at once all wait for the end."""

    async def main() -> None:
        bench = Bench()
        async with anyio.create_task_group() as group:
            group.start_soon(bench.start)
        bench.submit("a", hang)
        await settle()
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(bench.pool.aclose)
        assert tasks() == set() and bench.outcome("a").reason is Reason.SHUTDOWN

    run_virtual(main)


def test_a_work_may_close_its_own_pool() -> None:
    """It is cancelled like any other; only draining it would be waiting for itself."""

    async def main() -> None:
        bench = await Bench().start()

        async def drains() -> None:
            await bench.pool.aclose(drain=True)

        bench.submit("drains", drains)
        await settle()
        assert isinstance(bench.outcome("drains").error, RuntimeError)
        bench.submit("closes", bench.pool.aclose)
        await settle()
        assert bench.outcome("closes").reason is Reason.SHUTDOWN and tasks() == set()

    run_virtual(main)


@pytest.mark.parametrize("cycles", range(14))
@pytest.mark.parametrize("target", ["owner", "worker", "run", "closer", "loop"])
def test_a_cancellation_at_every_await(target: str, cycles: int) -> None:
    """Whatever is cancelled, and whenever: each work has one outcome, and nothing is left."""
    bench = Bench(concurrency=2, max_pending=3, admission=Asked("run", ("defer", 0.05), "run"))

    async def main() -> None:
        await bench.start()
        release = asyncio.Event()
        bench.submit("a", after(1, "A"))
        bench.submit("b", failing(EngineUnreachable("x")), breaker_key="k")
        bench.submit("c", hang, timeout_s=2)
        bench.submit("d", stubborn(release), timeout_s=1)
        for _ in range(cycles):
            await asyncio.sleep(0)
        if target == "loop":
            asyncio.get_running_loop().call_later(0.5, release.set)
            return
        prefix = {"owner": "smoothctx-pool", "worker": "smoothctx-worker", "run": "smoothctx:"}.get(target)
        for task in asyncio.all_tasks():
            if prefix and task.get_name().startswith(prefix):
                task.cancel()
        if target == "closer":
            async with anyio.create_task_group() as group:
                group.start_soon(bench.pool.aclose)
                for _ in range(cycles):
                    await asyncio.sleep(0)
                group.cancel_scope.cancel()
        await anyio.sleep(1)
        release.set()
        await bench.pool.aclose()
        await settle()
        assert tasks() == set()

    run_virtual(main)
    assert sorted(bench.reasons()) == ["a", "b", "c", "d"]
    assert bench.pool.statistics().running == bench.pool.statistics().queued == 0
    assert [where for where, _ in bench.errors if "worker" in where or where == "pool"] == []


# -- threads and loops -----------------------------------------------------------------------------------------------


def test_other_threads_may_submit_promote_and_cancel() -> None:
    """From another thread everything happens on the pool's loop, in the order it was asked for."""

    async def main() -> None:
        bench = await Bench(concurrency=1).start()
        threads: set[int] = set()

        async def run() -> None:
            threads.add(threading.get_ident())

        def elsewhere() -> None:
            first = bench.work("first", hang)
            bench.pool.submit(first)
            bench.submit("second", run)
            third = bench.submit("third", run)
            bench.pool.promote(third)
            bench.pool.cancel(bench.submit("fourth", run), Reason.SUPERSEDED)
            bench.pool.cancel(first)

        with background(elsewhere):
            pass
        await settle()
        assert bench.started in (["first", "third", "second"], ["third", "second"])
        assert threads == {threading.get_ident()}
        assert bench.reasons() == {"first": "cancelled", "second": None, "third": None, "fourth": "superseded"}
        await bench.pool.aclose()

    run_virtual(main)


def test_a_loop_that_is_gone() -> None:
    """On a closed loop a submission ends as ``shutdown`` at once, and so does what nobody had taken yet."""
    bench = Bench()
    loop = VirtualTimeLoop()
    loop.run_until_complete(bench.start())
    with background(partial(bench.submit, "unseen", hang)):
        pass
    assert bench.outcomes["unseen"] == []
    owner = next(iter(asyncio.all_tasks(loop)))
    owner.cancel()
    loop.run_until_complete(asyncio.wait([owner]))
    loop.close()
    assert bench.outcome("unseen").reason is Reason.SHUTDOWN
    bench.submit("late", hang)
    assert bench.outcome("late").reason is Reason.SHUTDOWN


def test_a_loop_that_was_closed_without_its_shutdown() -> None:
    """Even a loop that was just closed leaves no work without an outcome: the next call sees to it."""
    for how in ("submit", "cancel", "aclose"):
        bench = Bench(concurrency=1)
        loop = VirtualTimeLoop()
        loop.run_until_complete(bench.start())
        with background(partial(bench.submit, "unseen", hang)):
            pass
        loop.run_until_complete(settle())
        bench.loop = loop
        with background(partial(bench.submit, "queued", hang)):
            pass
        owner, *others = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name() != "smoothctx-pool")
        for task in (owner, *others):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        if how == "submit":
            bench.submit("late", hang)
        elif how == "cancel":
            bench.pool.cancel(bench.work("unknown", hang))
            del bench.outcomes["unknown"]
        else:
            run_virtual(bench.pool.aclose)
        assert set(bench.reasons().values()) == {"shutdown"}, how


def test_aclose_from_another_loop() -> None:
    """A pool on a running loop of another thread is closed there, and the caller waits for it."""
    ready, stop = threading.Event(), threading.Event()
    bench = Bench()

    async def home() -> None:
        await bench.start()
        bench.submit("a", hang)
        await settle()
        ready.set()
        await asyncio.to_thread(stop.wait)

    with background(lambda: asyncio.run(home())):
        assert ready.wait(10)

        async def main() -> None:
            await bench.pool.aclose()

        asyncio.run(main())
        assert bench.outcome("a").reason is Reason.SHUTDOWN
        stop.set()


def test_aclose_when_its_loop_stands_still() -> None:
    """A loop that does not run cannot be waited for: the outcomes are given from here."""
    bench = Bench()
    loop = VirtualTimeLoop()
    loop.run_until_complete(bench.start())
    bench.submit("a", hang)
    run_virtual(bench.pool.aclose)
    assert bench.outcome("a").reason is Reason.SHUTDOWN
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(settle())
    loop.close()


# -- small things ----------------------------------------------------------------------------------------------------


def test_a_pool_starts_once() -> None:
    """Before the start nothing can be submitted, and after it it cannot be started again."""

    async def main() -> None:
        bench = Bench()
        bench.loop = asyncio.get_running_loop()
        assert repr(bench.pool) == "<TaskPool new, 0/2 running, 0/256 queued>"
        with pytest.raises(ClosedError, match="not started"):
            bench.submit("early", hang)
        await bench.start()
        with pytest.raises(ClosedError, match="starts once"):
            await bench.pool.start()
        await bench.pool.aclose()

        never = Bench()
        await never.pool.aclose()
        with pytest.raises(ClosedError, match="starts once"):
            await never.start()
        never.submit("late", hang)
        assert never.outcome("late").reason is Reason.SHUTDOWN

    run_virtual(main)


@pytest.mark.parametrize(
    "option",
    [
        {"concurrency": 0},
        {"max_pending": 1.5},
        {"max_defer_s": -1},
        {"starvation_s": True},
        {"child_share": 2},
        {"stray_s": -1},
    ],
)
def test_wrong_options_raise_at_construction(option: dict[str, Any]) -> None:
    """The error names the option, its value and what is allowed."""
    ((name, value),) = option.items()
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}: expected"):
        TaskPool(clock=lambda: 0.0, **option)


def test_promise_15_statistics_count_every_end() -> None:
    """Every submission is counted once, by how it ended."""

    async def main() -> None:
        bench = await Bench(concurrency=1, max_pending=2).start()
        bench.submit("ok", after(1))
        bench.submit("bad", failing(ValueError()))
        cancelled = bench.submit("cancelled", hang)
        bench.submit("full", hang)
        bench.pool.cancel(cancelled)
        assert bench.pool.statistics().queued == 1 and bench.pool.statistics().running == 1
        await anyio.sleep(5)
        stats = bench.pool.statistics()
        assert (stats.submitted, stats.finished) == (4, 1)
        assert stats.unfinished == {Reason.FAILED: 1, Reason.CANCELLED: 1, Reason.QUEUE_FULL: 1}
        assert repr(bench.pool) == "<TaskPool open, 0/1 running, 0/2 queued>"
        await bench.pool.aclose()

    run_virtual(main)


def test_a_clock_that_stands_still_does_not_make_it_spin() -> None:
    """The pool's clock may be another one than the loop's: deferrals then last longer, and cost nothing."""

    async def main() -> None:
        ended: list[Outcome] = []
        pool = TaskPool(clock=lambda: 0.0, admission=Asked(("defer", 1)))
        await pool.start()
        pool.submit(Work(key="k", tenant="t", session="s", run=hang, on_done=ended.append))
        await anyio.sleep(100)
        await pool.aclose()
        assert [outcome.reason for outcome in ended] == [Reason.SHUTDOWN]

    run_virtual(main)


# -- everything at once ----------------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Random works, calls and time: bounds hold throughout, and in the end everybody has one outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.answer: Any = "run"
        self.bench = Bench(
            concurrency=2, max_pending=4, admission=self, breakers=Breakers(threshold=2, cooldown_s=20), stray_s=25.0
        )
        self.works: list[Work] = []
        self.running = 0
        self.peak = 0
        self.closed = False
        self.runner.run(self.bench.start())

    async def decide(self, work: Work, /) -> object:
        if self.answer == "hang":
            await hang()
        if self.answer == "raise":
            raise ValueError
        return self.answer

    def do(self, act: Callable[[], object]) -> None:
        async def main() -> None:
            act()
            await settle(5)

        self.runner.run(main())

    @rule(answer=st.sampled_from(["run", "run", "run", "skip", "defer", ("defer", 10), "hang", "raise", "garbage"]))
    def admission_changes(self, answer: Any) -> None:
        self.answer = answer

    @rule(
        kind=st.sampled_from(["ok", "ok", "fail", "retry", "hang", "deaf", "self-cancel"]),
        tenant=st.sampled_from("ab"),
        child=st.booleans(),
        promoted=st.booleans(),
        seconds=st.floats(0, 20),
        timeout_s=st.none() | st.floats(0.1, 60),
        patience_s=st.none() | st.floats(0, 30),
        thread=st.booleans(),
    )
    def submit(self, kind: str, thread: bool, seconds: float, **fields: Any) -> None:
        async def run() -> str:
            self.running += 1
            self.peak = max(self.peak, self.running)
            try:
                if kind == "hang":
                    await hang()
                elif kind == "deaf":
                    release = asyncio.Event()
                    asyncio.get_running_loop().call_later(40, release.set)  # longer than any grace
                    await stubborn(release)()
                await anyio.sleep(seconds)
                if kind == "fail":
                    raise ValueError
                if kind == "retry":
                    raise EngineUnreachable("x")
                if kind == "self-cancel":
                    raise asyncio.CancelledError
                return kind
            finally:
                self.running -= 1

        work = self.bench.work(f"w{len(self.works)}", run, breaker_key=kind, **fields)
        self.works.append(work)

        def act() -> None:
            if thread:
                with background(lambda: self.bench.pool.submit(work)):
                    pass
            else:
                self.bench.pool.submit(work)

        self.do(act)

    @precondition(lambda self: self.works)
    @rule(data=st.data(), reason=st.sampled_from([Reason.CANCELLED, Reason.SUPERSEDED]))
    def cancel(self, data: st.DataObject, reason: Reason) -> None:
        work = data.draw(st.sampled_from(self.works))
        self.do(lambda: self.bench.pool.cancel(work, reason))

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.works))
        self.do(lambda: self.bench.pool.promote(work))

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.works))
        self.do(lambda: self.bench.pool.demote(work))

    @rule(seconds=st.floats(0.1, 30))
    def time_passes(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @precondition(lambda self: len(self.works) > 5)
    @rule(drain=st.booleans())
    def close(self, drain: bool) -> None:
        async def main() -> None:
            with anyio.move_on_after(100 if drain else None):
                await self.bench.pool.aclose(drain=drain)

        self.runner.run(main())

    @invariant()
    def bounded(self) -> None:
        """Promise 10: never more at once than allowed, in the queue or running, deaf ones and strays included."""
        stats = self.bench.pool.statistics()
        assert stats.queued <= 4 and stats.strays <= 2 and stats.running <= 6
        assert stats.running + stats.abandoned <= 4 + stats.strays or self.draining  # two of them promoted
        assert self.peak <= 6 or self.bench.pool.statistics().submitted == 0 or self.draining
        assert all(len(outcomes) <= 1 for outcomes in self.bench.outcomes.values())

    @property
    def draining(self) -> bool:
        return "open" not in repr(self.bench.pool)

    def teardown(self) -> None:
        async def main() -> None:
            await self.bench.pool.aclose()
            await anyio.sleep(100)  # the deaf ones end by themselves
            assert tasks() == set()

        with self.runner:
            self.runner.run(main())
        assert all(len(outcomes) == 1 for outcomes in self.bench.outcomes.values())
        assert not [e for e in self.bench.errors if "worker" in e[0] or e[0].startswith(("pool", "on_"))]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings(examples=60, steps=25)
