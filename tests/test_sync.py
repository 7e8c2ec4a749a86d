"""Synchronous callers and restarts, and the faults that a reader of the README alone has found."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

import smoothctx.launch
from smoothctx import (
    ConfigurationError,
    FolderStore,
    HandleState,
    Immediate,
    Isolate,
    MemoryStore,
    Policy,
    Reason,
    Runtime,
    StaleHandle,
    Summarize,
)
from smoothctx.launch import UNREADABLE


class Model:
    """Answers at once and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
        self.calls += 1
        return f"summary number {self.calls}"


def policy(model: Model) -> Policy:
    """A small window, so that a few turns reach the trigger."""
    transform = Summarize(model, keep=("messages", 4), max_tokens=50, facts=False, model_id="test-model", window=50_000)
    return Policy(transform, context_window=1_000)


def talk(session: Any, messages: list[dict[str, Any]], turns: int) -> None:
    """Some turns of a synchronous agent; each live lookahead may finish before the next."""
    for k in range(turns):
        messages.append({"role": "user", "content": f"question {k} " + "x" * 150})
        session.commit_sync(messages)
        messages.append({"role": "assistant", "content": f"answer {k} " + "y" * 150})
        handle = session.observe(messages)
        if handle is not None:
            assert handle.wait_sync(30) in (HandleState.READY, HandleState.COMMITTED)


def test_a_restart_commits_what_the_last_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first synchronous commit of a new process sends the summary, and no second one is paid for."""
    monkeypatch.setattr(smoothctx.launch, "STORE_WAIT", 30.0)  # a folder may be slow: what counts is what is read
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    still = {"clock": lambda: 0.0}  # nothing is learnt of how long things take: the trigger alone says when
    with Runtime.in_thread(store=FolderStore(tmp_path), **still) as runtime:
        session = runtime.session("s", policy=policy(first := Model()))
        talk(session, messages, 12)
        assert session.receipts and first.calls  # how many, and when, is the forecast's: it goes by the clock
        sent = session.commit_sync([*messages, {"role": "user", "content": "more"}])
    with Runtime.in_thread(store=FolderStore(tmp_path)) as runtime:
        session = runtime.session("s", policy=policy(second := Model()))
        assert session.commit_sync([*messages, {"role": "user", "content": "more"}]) == sent
        assert second.calls == 0


def test_event_loops_that_come_and_go() -> None:
    """One event loop per request, many at once, on one runtime: nothing is bound to a loop that ended."""
    model = Model()
    with Runtime.in_thread() as runtime:
        failed: list[BaseException] = []

        def serve(user: int) -> None:
            messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}]

            async def request(k: int) -> None:
                session = runtime.session(f"user-{user}", policy=shared)
                messages.append({"role": "user", "content": f"question {k} " + "x" * 150})
                view = await session.commit(messages)
                assert view[0] is messages[0] and view[-1] is messages[-1]
                messages.append({"role": "assistant", "content": f"answer {k} " + "y" * 150})
                handle = session.observe(messages)
                if handle is not None:
                    await handle.wait(30)

            try:
                for k in range(15):
                    asyncio.run(request(k))
                assert runtime.session(f"user-{user}", policy=shared).receipts
            except BaseException as error:
                failed.append(error)
                raise

        shared = policy(model)
        threads = [threading.Thread(target=serve, args=(user,)) for user in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed
        assert runtime.counters.committed >= 4


def test_offloaded_content_can_be_read_before_the_store_has_it() -> None:
    """While lookaheads hang and admission refuses everything, a stub's content is there all the same."""

    class Refuses:
        asked = 0

        async def decide(self, work: object) -> str:
            Refuses.asked += 1
            return "skip"

    async def main() -> None:
        async with Runtime(admission=Refuses(), concurrency=1) as runtime:
            options = {"trigger": ("tokens", 5000), "hard_limit": ("tokens", 9000), "land_at": ("tokens", 2000)}
            session = runtime.session("s", policy=Policy(Summarize(Model()), max_message_tokens=50, **options))
            call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": "read it"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "line of text\n" * 200},
            ]
            view = await session.commit(messages)
            content_id = view[2]["content"].split('id="')[1].split('"')[0]
            assert "line of text" in await session.retrieve(content_id)
            for _ in range(50):
                await asyncio.sleep(0)
            assert Refuses.asked == 0 and "line of text" in await session.retrieve(content_id)

    asyncio.run(main())


def test_offloaded_content_is_read_from_every_loop_and_without_one() -> None:
    """The store is asked on the runtime's own loop, whoever asks; when that is gone the model is told so."""

    class Bound(MemoryStore):
        loops: ClassVar[set[asyncio.AbstractEventLoop]] = set()

        async def get(self, tenant: str, key: str) -> bytes | None:
            self.loops.add(asyncio.get_running_loop())
            return await super().get(tenant, key)

    with Runtime.in_thread(store=Bound()) as runtime:
        options = {"trigger": ("tokens", 5000), "hard_limit": ("tokens", 9000), "land_at": ("tokens", 2000)}
        session = runtime.session("s", policy=Policy(Summarize(Model()), max_message_tokens=50, **options))
        call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        view = session.commit_sync(
            [
                {"role": "user", "content": "read it"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "line of text\n" * 200},
            ]
        )
        content_id = view[2]["content"].split('id="')[1].split('"')[0]
        assert "line of text" in session.retrieve_sync(content_id)
        assert "line of text" in asyncio.run(session.retrieve(content_id))
        assert session.retrieve_sync("0" * 24).startswith("error: no offloaded content")
        assert len(Bound.loops) == 1
    assert session.retrieve_sync(content_id) == asyncio.run(session.retrieve(content_id)) == UNREADABLE


def test_the_least_recently_used_session_is_closed_first() -> None:
    """A session that is in use stays open when room is needed."""

    async def main() -> None:
        async with Runtime(max_sessions=2) as runtime:
            mine = policy(Model())
            busy, idle = runtime.session("busy", policy=mine), runtime.session("idle", policy=mine)
            await busy.commit([{"role": "user", "content": "hi"}])
            runtime.session("new", policy=mine)
            assert idle.closed and not busy.closed

    asyncio.run(main())


def test_a_list_edited_while_its_commit_waits_is_sent_as_it_is_now() -> None:
    """Nothing is lost: what was inserted during the wait at the hard limit is in the view."""

    async def main() -> None:
        started = asyncio.Event()

        async def slow(messages: list[dict[str, Any]], *, max_tokens: int | None = None) -> str:
            started.set()
            await asyncio.sleep(0.05)
            return "summary"

        async with Runtime() as runtime:
            transform = Summarize(slow, keep=("messages", 4), max_tokens=50, facts=False, window=50_000)
            session = runtime.session("s", policy=Policy(transform, context_window=1_000, max_wait=5))
            messages = [{"role": ("user", "assistant")[k % 2], "content": f"{k} " + "x" * 150} for k in range(41)]
            waiting = asyncio.create_task(session.commit(messages))  # noqa: TID251  # awaited below
            await started.wait()
            inserted = {"role": "user", "content": "INSERTED"}
            messages.insert(40, inserted)
            view = await waiting
            assert any(m is inserted for m in view) and view[-1] is messages[-1]

    asyncio.run(main())


def test_an_isolate_opening_is_not_given_for_another_history() -> None:
    """Promise 4: an opening made from one history is stale for another."""

    async def main() -> None:
        async with Runtime() as runtime:
            session = runtime.session("s", policy=policy(Model()))
            messages = [{"role": "user", "content": "secret"}, {"role": "assistant", "content": "r"}]
            handle = session.schedule_transform(Isolate(instruction="Review."), messages)
            assert await handle.wait(10) is HandleState.READY
            with pytest.raises(StaleHandle, match="not the one that the opening was made from"):
                handle.commit([{"role": "user", "content": "entirely different"}])
            assert handle.reason is Reason.BRANCH_DIVERGED and runtime.counters.committed == 0

    asyncio.run(main())


def test_engines_that_are_gone_leave_nothing_behind() -> None:
    """Promise 10: what the runtime knows of an engine's foreground goes with the engine."""

    class Engine:
        pass

    async def main() -> None:
        async with Runtime() as runtime:
            for k in range(50):
                session = runtime.session(f"s{k}", policy=policy(Model()), engine=Engine())
                await session.commit([{"role": "user", "content": "hi"}])
                await session.close()
            del session
            gc.collect()
            assert len(runtime._foregrounds) == 0

    asyncio.run(main())


def test_immediate_discard_keeps_no_keys_of_dead_branches() -> None:
    """Promise 10: unrelated histories one after another leave nothing that grows."""

    async def main() -> None:
        async with Runtime() as runtime:
            transform = Summarize(Model(), keep=("messages", 4), max_tokens=50, facts=False, window=50_000)
            session = runtime.session("s", policy=Policy(transform, context_window=1_000, discard=Immediate()))
            for k in range(10):
                roles = ("user", "assistant")
                messages = [{"role": roles[i % 2], "content": f"{k} {i} " + "x" * 150} for i in range(41)]
                await session.commit(messages)
            assert session.receipts and len(session._shelf.committed) <= len(session._shelf.artifacts) <= 2

    asyncio.run(main())


def test_a_wait_without_end_is_refused() -> None:
    """Promise 6: the wait at the hard limit is bounded by construction."""
    for value in (float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match=r"max_wait=(inf|nan): expected a number of at least 0"):
            Policy(Summarize(Model()), context_window=1_000, max_wait=value)
    with pytest.raises(ConfigurationError, match=r"reserved_tokens=1.5: expected a whole number of tokens"):
        Policy(Summarize(Model()), context_window=1_000, reserved_tokens=1.5)  # type: ignore[arg-type]


def test_promise_09_in_rewrite_mode_the_cached_view_counts_as_sent() -> None:
    """After the caller kept our view as its list, messages behind a new edit count as re-billed."""

    async def main() -> None:
        async with Runtime() as runtime:
            session = runtime.session("s", policy=policy(Model()))
            messages = [{"role": ("user", "assistant")[k % 2], "content": f"{k} " + "x" * 150} for k in range(41)]
            view = await session.commit(messages)
            assert session.receipts and len(view) < len(messages)
            session.observe(view := [*view, {"role": "assistant", "content": "reply"}])
            assert session.branch.sent == len(view) - 1 and not session.branch.applied

    asyncio.run(main())
