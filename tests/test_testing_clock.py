"""Virtual time: jumps, deadlocks that say who is stuck, threads, and errors that are not the code's own."""

from __future__ import annotations

import asyncio
import selectors
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from smoothctx import Policy, Runtime, Summarize
from smoothctx.retry import jitter
from smoothctx.testing import DeadlockError, FakeModel, Recorder, VirtualTimeLoop, announce_thread, run_virtual

ROOT = Path(__file__).parent.parent


class TimeLimit(BaseException):
    """What a test runner raises at any line when its patience ends."""


def now() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()


def test_import_is_light() -> None:
    """`smoothctx.testing` and `smoothctx.economics` need no test framework, no agent framework and no engine."""
    heavy = ("pytest", "hypothesis", "langgraph", "langchain_core", "autogen_core", "xllamacpp", "numpy")
    code = f"import sys, smoothctx.testing, smoothctx.economics; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_public_names_are_sorted_and_documented() -> None:
    """Everything in __all__ is there, sorted, and says what it is."""
    import smoothctx.testing as module

    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


def test_sleeps_cost_nothing_and_timers_keep_their_order() -> None:
    """asyncio's and anyio's sleeps and time limits meet at the same clock."""

    async def main() -> list[str]:
        order: list[str] = []

        async def at(seconds: float, name: str) -> None:
            await anyio.sleep(seconds)
            order.append(f"{name}@{now():g}")

        async with anyio.create_task_group() as group:
            group.start_soon(at, 3600, "hour")
            group.start_soon(at, 0.001, "ms")
            group.start_soon(at, 86_400 * 3, "days")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(60):
                    await asyncio.sleep(61)
            order.append(f"timeout@{now():g}")
            with anyio.move_on_after(40):
                await anyio.sleep_forever()
            order.append(f"scope@{now():g}")
        return order

    assert run_virtual(main) == ["ms@0.001", "timeout@60", "scope@100", "hour@3600", "days@259200"]


def test_far_and_near_timers_both_fire() -> None:
    """At a large clock reading the steps of a float are coarser than a short sleep: it still ends."""

    async def main() -> float:
        await asyncio.sleep(1e9)
        for _ in range(10):
            await asyncio.sleep(1e-7)
        return now()

    assert run_virtual(main) == pytest.approx(1e9)


async def waits_for_ever() -> None:
    """Blocks at an event that nobody sets."""
    await asyncio.Event().wait()


def test_deadlock_says_who_is_stuck_and_where() -> None:
    """Name, coroutine and line of every blocked task, anyio's and asyncio's alike."""

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_ever(), name="helper")
            async with anyio.create_task_group() as inner:
                inner.start_soon(anyio.Event().wait, name="waiter")

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    error = caught.value
    assert len(error.stuck) == 3
    helper = next(line for line in error.stuck if line.startswith("helper: "))
    line = waits_for_ever.__code__.co_firstlineno + 2
    assert helper == f"helper: waits_for_ever ({__file__}:{line}) > Event.wait"
    assert any(line.startswith("waiter: ") and "Event.wait" in line for line in error.stuck)
    assert any(f".main ({__file__}:" in line for line in error.stuck)
    assert all(line in str(error) for line in error.stuck)
    assert error.__cause__ is None


def test_deadlock_follows_the_calls() -> None:
    """In a chain of calls every line of the code under test is named, from the outside in."""

    async def outer() -> None:
        async with asyncio.timeout(None):
            await waits_for_ever()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(outer)
    (line,) = caught.value.stuck
    first, inner = outer.__code__.co_firstlineno + 2, waits_for_ever.__code__.co_firstlineno + 2
    assert f"outer ({__file__}:{first}) > waits_for_ever ({__file__}:{inner}) > Event.wait" in line


def test_deadlock_in_clean_up_is_reported_too() -> None:
    """A task that will not end when it is cancelled is stuck as well."""

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    assert isinstance(caught.value.__context__, DeadlockError)


def test_a_callback_that_broke_is_the_cause() -> None:
    """An ordinary error in a callback goes to the log, and is named when nothing moves afterwards."""

    async def main() -> None:
        def broken() -> None:
            raise ValueError("the callback broke")

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        asyncio.get_running_loop().call_later(5, broken)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_task_that_died_unseen_is_the_cause() -> None:
    """Somebody waits for a task that ended in an error which nobody has looked at."""
    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        async def dies() -> None:
            raise LookupError("unseen")

        kept.append(asyncio.get_running_loop().create_task(dies()))
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_time_limit_inside_a_callback_is_no_deadlock() -> None:
    """What a test runner raises in a callback ends the run as itself, at once."""

    async def main() -> None:
        def interrupted() -> None:
            raise TimeLimit

        event = asyncio.Event()
        asyncio.get_running_loop().call_later(5, interrupted)
        asyncio.get_running_loop().call_later(9, event.set)
        await event.wait()
        raise AssertionError("the run went on")

    with pytest.raises(TimeLimit):
        run_virtual(main)


def test_a_time_limit_inside_a_background_task_is_no_deadlock() -> None:
    """It ends that task, somebody waits for ever for what the task had to do, and the limit is what is raised."""
    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        event = asyncio.Event()

        async def interrupted() -> None:
            await asyncio.sleep(5)
            raise TimeLimit
            event.set()

        kept.append(asyncio.get_running_loop().create_task(interrupted()))
        await event.wait()

    with pytest.raises(TimeLimit):
        run_virtual(main)


def test_a_cancelled_callback_is_no_time_limit() -> None:
    """CancelledError in a callback is logged like any error, and the run goes on."""

    async def main() -> str:
        def cancelled() -> None:
            raise asyncio.CancelledError

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        asyncio.get_running_loop().call_later(1, cancelled)
        await asyncio.sleep(2)
        return "done"

    assert run_virtual(main) == "done"


def test_executor_threads_are_waited_for() -> None:
    """While a counted thread works the clock stands still, whatever timers are due; closing needs no announcement."""

    async def main() -> tuple[str, float]:
        go = threading.Event()

        def work() -> str:
            assert go.wait(30)
            return "worked"

        async with asyncio.timeout(0.5), asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.to_thread(work))
            await asyncio.sleep(0)
            go.set()
        return task.result(), now()

    assert run_virtual(main) == ("worked", 0.0)


def test_announced_threads_are_waited_for() -> None:
    """A thread that the loop cannot see is waited for once it is announced, and time goes on afterwards."""

    async def main() -> tuple[int, float, float]:
        with announce_thread():
            value = await anyio.to_thread.run_sync(lambda: 7)
        then = now()
        await anyio.sleep(10)
        return value, then, now()

    assert run_virtual(main) == (7, 0.0, 10.0)


def test_an_announcement_may_end_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never calls back wakes the loop when it ends: what is a deadlock then shows."""
    leave, blocking = threading.Event(), selectors.DefaultSelector.select

    def select(self: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        if timeout is None:
            leave.set()  # the loop waits for the thread, in real time
        return blocking(self, timeout)

    async def main() -> None:
        loop, entered = asyncio.get_running_loop(), threading.Event()

        def work() -> None:
            with announce_thread(loop):
                entered.set()
                leave.wait(30)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert entered.wait(30)
            await asyncio.Event().wait()
        finally:
            leave.set()
            thread.join(30)

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    with pytest.raises(DeadlockError):
        run_virtual(main)


def test_an_unannounced_thread_is_hinted_at() -> None:
    """Waiting for a thread that the loop cannot see is told from other deadlocks."""
    go = threading.Event()

    async def main() -> None:
        try:
            await anyio.to_thread.run_sync(go.wait, 30)
        finally:
            go.set()

    with pytest.raises(DeadlockError, match="announce_thread"):
        run_virtual(main)


def test_announcing_means_nothing_to_a_real_loop() -> None:
    """Code that announces its threads runs on any loop."""

    async def main() -> int:
        with announce_thread():
            return await asyncio.to_thread(lambda: 3)

    assert asyncio.run(main()) == 3


def test_a_failing_executor_is_not_counted() -> None:
    """What could not be started is not waited for."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)

        class Refuses:
            def submit(self, *_: object) -> None:
                raise RuntimeError("full")

        with pytest.raises(RuntimeError, match="full"):
            await loop.run_in_executor(Refuses(), print)
        return loop.threads_in_flight

    assert run_virtual(main) == 0


def test_retries_wait_as_long_at_each_run() -> None:
    """The jitter of their waits is the same in virtual time; outside it differs from pool to pool."""

    async def main() -> float:
        model, events = FakeModel(ConnectionError("x"), ConnectionError("x"), "fine"), Recorder()
        sizes = {"trigger": ("messages", 6), "hard_limit": ("messages", 50), "land_at": ("messages", 4)}
        policy = Policy(Summarize(model, keep=("messages", 2)), **sizes)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        async with Runtime(clock=loop.time, on_event=events) as runtime:
            session = runtime.session("s", policy=policy)
            session.observe([{"role": ("user", "assistant")[k % 2], "content": f"{k} " + "w " * 90} for k in range(10)])
            await events.seen("lookahead.ready")
            return loop.time()

    runs = [run_virtual(main) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2] > 0.75
    assert jitter().random() != jitter().random()
