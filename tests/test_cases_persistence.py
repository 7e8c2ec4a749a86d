"""Checkpoint persistence: what another process, a restart or a damaged store finds.

A new ``Runtime`` on the same store stands for another process: nothing but bytes is shared.

Rows of this class that are not here:

| id | why |
| --- | --- |
| B40 | session copies in a workflow are the framework's; one owner per branch is shown in ``test_cases_races`` |
| B123 | per-step checkpoints are the framework's; what the core writes is in ``test_b123_...`` |
"""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

import smoothctx.launch
from driving import fast, feed
from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    chat,
    make_policy,
    make_runtime,
    marks,
    now,
    same_objects,
    settle,
    summaries,
    valid_request,
    virtual,
)
from smoothctx import FolderStore, HandleState, Runtime, Summarize
from smoothctx.codec import OpenAIMessages
from smoothctx.errors import StoreError
from smoothctx.flight import dump_artifact, load_artifact


def reloaded(messages: list[Message]) -> list[Message]:
    """What a process that starts anew has: equal messages, other objects, new ids."""
    return [{**copy.deepcopy(m), "id": f"reloaded-{k}"} for k, m in enumerate(messages)]


async def first_process(store: Any, messages: list[Message], *, session_id: str = "s", **options: Any) -> list[Any]:
    """Summarise, commit, shut down; returns the view that was sent."""
    async with make_runtime(store=store) as runtime:
        session = runtime.session(session_id, policy=make_policy(fast(), model_id="m", **options))
        await session.commit(messages)
        await settle(5)
        view = await session.commit(messages)
        assert summaries(view)
        await settle(5)
        return view


def thirty() -> list[Message]:
    """Over the trigger (1,200 of 2,000), under the hard limit."""
    return chat(12, size=55)


@virtual
async def test_b47_b134_a_commit_is_found_after_a_restart_and_not_paid_for_again() -> None:
    """The next process sends the same bytes at its first turn, and its model is never asked."""
    store, messages = FlakyStore(), thirty()
    before = await first_process(store, messages)
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        again = reloaded(messages)
        view = await session.commit(again)
        session.observe(again)
        await settle(30)
        assert [m["content"] for m in view] == [m["content"] for m in before]
        assert model.calls == 0
        assert [r.how for r in session.receipts] == ["salvaged"]
        assert runtime.counters.salvaged == 1


@virtual
async def test_b47_observe_before_the_first_commit_pays_nothing_either() -> None:
    """A process that observes first finds the artifact by its key."""
    store, messages = FlakyStore(), thirty()
    before = await first_process(store, messages)
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        session.observe(reloaded(messages))
        await settle(5)
        view = await session.commit(reloaded(messages))
        assert [m["content"] for m in view] == [m["content"] for m in before]
        assert model.calls == 0


@virtual
async def test_b47_the_history_grew_before_the_restart() -> None:
    """More turns than the artifact covers: its prefix still matches, the rest is behind it."""
    store, messages = FlakyStore(), thirty()
    await first_process(store, messages)
    messages += [H("<900> next"), A("<901> reply"), H("<902> and")]
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        again = reloaded(messages)
        view = await session.commit(again)
        assert summaries(view)
        assert same_objects(view[-3:], again[-3:])
        assert model.calls == 0


@virtual
async def test_b134_an_edited_history_gets_nothing_of_the_old_artifact() -> None:
    """The stored artifact does not match the edited prefix: raw messages, nothing vanished, nothing wrong applied."""
    store, messages = FlakyStore(), thirty()
    await first_process(store, messages)
    edited = reloaded(messages)
    edited[2]["content"] = "<2> edited elsewhere"
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        view = await session.commit(edited)
        assert same_objects(view, edited)


@virtual
async def test_b124_the_callers_history_is_whole_after_every_commit() -> None:
    """What a user interface shows is what the caller holds: untouched in fifty turns of commits."""
    messages = chat(50, size=55)
    frozen = copy.deepcopy(messages)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        turns = await feed(session, messages, every=False)
        assert any(len(t.view) < len(t.held) for t in turns)
    assert messages == frozen


@virtual
async def test_b122_the_request_stays_bounded_while_the_history_grows() -> None:
    """Fifty turns: the stored history has them all, the request stays under the hard limit."""
    messages = chat(50, size=55)
    codec = OpenAIMessages()
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        turns = await feed(session, messages, every=False)
    assert max(sum(map(codec.estimate, t.view)) for t in turns) <= 1700
    assert len(turns[-1].held) == len(messages) - 1


@virtual
async def test_b123_what_is_written_grows_with_the_commits_not_with_the_turns() -> None:
    """One small record per artifact: the bytes written do not grow with the square of the turns."""
    written: dict[int, int] = {}

    async def model(messages: list[Message], *, max_tokens: int | None = None) -> str:
        return "Always the same summary."

    for turns in (80, 160):
        store = FlakyStore()
        sizes: list[int] = []
        put = store.put

        async def counted(
            tenant: str, key: str, value: bytes, *, ttl: float | None = None, put: Any = put, sizes: Any = sizes
        ) -> None:
            sizes.append(len(value))
            await put(tenant, key, value, ttl=ttl)

        store.put = counted  # type: ignore[method-assign]
        async with make_runtime(store=store) as runtime:
            session = runtime.session("s", policy=make_policy(model, model_id="m"))
            await feed(session, chat(turns, size=55), every=False)
        written[turns] = sum(sizes)
    assert written[160] < 3 * written[80]


@virtual
async def test_b30_b70_a_store_that_fails_once_leaves_everything_as_it_was() -> None:
    """The write of the artifact or of the index fails: the view is right now, and right after a restart."""
    for failing in (0, 1, 2):
        store = FlakyStore()
        puts = 0
        put = store.put

        async def fails_once(
            tenant: str, key: str, value: bytes, *, ttl: float | None = None, put: Any = put, failing: int = failing
        ) -> None:
            nonlocal puts
            puts += 1
            if puts == failing + 1:
                raise StoreError("add failed")
            await put(tenant, key, value, ttl=ttl)

        store.put = fails_once  # type: ignore[method-assign]
        messages = thirty()
        before = await first_process(store, messages)
        assert valid_request(before)
        async with make_runtime(store=store) as runtime:
            session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
            again = reloaded(messages)
            view = await session.commit(again)
            assert len(view) in (len(before), len(again))
            assert valid_request(view)
            assert same_objects(view[-4:], again[-4:])


@virtual
async def test_b70_a_summary_that_failed_leaves_no_boundary_behind() -> None:
    """The summariser raises; after a reload the whole history is sent, and the work is done again, once."""
    store, messages = FlakyStore(), thirty()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("fail"), model_id="m"))
        await session.commit(messages)
        await settle(100)
        assert same_objects(await session.commit(messages), messages)
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        again = reloaded(messages)
        assert same_objects(await session.commit(again), again)
        await settle(5)
        assert summaries(await session.commit(again))
        assert model.calls == 1


@virtual
async def test_b70_a_result_that_was_never_committed_is_not_applied_by_the_next_process() -> None:
    """Ready is not committed: the next process sends the raw view first, then uses the result without paying again."""
    store, messages = FlakyStore(), thirty()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        session.observe(messages)
        await settle(5)
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        again = reloaded(messages)
        assert same_objects(await session.commit(again), again)
        await settle(5)
        assert summaries(await session.commit(again))
        assert model.calls == 0


@pytest.mark.parametrize("mode", ["corrupt", "fail", "hang", "slow"])
@virtual
async def test_a_store_in_trouble_never_blocks_or_corrupts_the_first_turn(mode: str) -> None:
    """Corrupt, unreachable, hanging or slow: the first commit waits 10 ms at most and sends what is right."""
    store, messages = FlakyStore(), thirty()
    await first_process(store, messages)
    store.mode = mode
    events = Events()
    model = fast()
    async with make_runtime(store=store, on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        again = reloaded(messages)
        start = runtime.now()
        view = await session.commit(again)
        assert runtime.now() - start <= 0.011
        assert same_objects(view, again)
        await settle(30)
        view = await session.commit(again)
        assert summaries(view)
        assert valid_request(view)
        if mode in ("corrupt", "fail"):
            assert events.of("store.error")


@pytest.mark.parametrize("delay", [0.006, 0.5])
@virtual
async def test_b70_what_a_slow_store_holds_is_used_as_soon_as_it_was_read(delay: float) -> None:
    """The index comes in time for the first turn and the artifact not, or neither: the next turn has the summary,
    though the first one had to drop what it stands for and no model answers."""
    store, messages = FlakyStore(), thirty()
    await first_process(store, messages)
    store.mode, store.delay = "slow", delay
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("fail"), model_id="m", overrun="fallback"))
        again = [*reloaded(messages), *chat(4, size=60, first=900, system=False)]
        began = now()
        view = await session.commit(again)
        assert now() - began <= 0.011 and not summaries(view) and valid_request(view)
        await settle(5)
        view = await session.commit(again)
        assert summaries(view) and valid_request(view)
        how = [r.how for r in session.receipts]
        assert how[0] == "fallback" and set(how[1:]) == {"salvaged"}


@virtual
async def test_what_was_committed_by_its_handle_alone_is_found_by_the_next_process() -> None:
    """A caller that schedules and commits by itself, and never asks for a view."""
    store, messages = FlakyStore(), thirty()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        handle = session.schedule_transform("summarize", messages)
        await handle.wait()
        assert summaries(handle.commit(messages))
        await settle(1)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("fail"), model_id="m"))
        assert summaries(await session.commit(reloaded(messages)))


@virtual
async def test_one_artifact_that_cannot_be_read_hides_no_other() -> None:
    """What else the index names is found, and what is committed from then on is named too."""

    class Damaged(FlakyStore):
        bad = ""

        async def get(self, tenant: str, key: str) -> bytes | None:
            if key == self.bad:
                raise StoreError("the row is damaged")
            return await super().get(tenant, key)

    store, messages, named = Damaged(), chat(12, size=55), []
    for k in range(5):
        async with make_runtime(store=store) as runtime:
            session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
            for _ in range(9):
                await session.commit(messages)
                messages += [A(f"<{len(messages)}>", size=55), H(f"<{len(messages) + 1}>", size=55)]
                session.observe(messages)
                await settle(5)
            await session.commit(messages)
            await settle(1)
            assert (runtime.counters.salvaged > 0) == (k > 0) and runtime.counters.committed > 0
        named.append(json.loads(await store.get("default", "index/s") or b"[]"))
        if k == 1:
            store.bad = f"artifact/{next(entry for entry in named[0] if isinstance(entry, str))}"
    assert all(len(a) < len(b) for a, b in zip(named, named[1:], strict=False))


@virtual
async def test_promise_05_a_store_that_is_deaf_to_its_cancellation_holds_no_turn() -> None:
    """Such as a thread that waits for a database: the first commit goes on without it."""

    class Deaf(FlakyStore):
        async def get(self, tenant: str, key: str) -> bytes | None:
            until = now() + 60.0
            while now() < until:
                try:
                    await asyncio.sleep(until - now())
                except asyncio.CancelledError:
                    continue
            return await super().get(tenant, key)

    messages = thirty()
    async with make_runtime(store=Deaf()) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        began = now()
        assert same_objects(await session.commit(messages), messages) and now() - began <= 0.02
        await settle(600)


@pytest.mark.parametrize(
    "damage", ["truncated", "wrong range", "other codec", "version", "not json", "edits", "message"]
)
def test_b90_b136_stored_records_round_trip_and_damage_is_refused(damage: str) -> None:
    """An artifact is a plain record: it comes back typed and equal, and a damaged one is an error, never a view."""

    async def main() -> None:
        store, messages = FlakyStore(), thirty()
        await first_process(store, messages)
        codec = OpenAIMessages()
        (key,) = {k for _, k in store.puts if k.startswith("artifact/")}
        data = await store.get("default", key)
        assert data is not None
        artifact = load_artifact(codec, data)
        assert load_artifact(codec, dump_artifact(codec, artifact)) == artifact
        d = json.loads(data)
        assert d["key"] == artifact.key
        if damage == "truncated":
            data = data[:-9]
        elif damage == "wrong range":
            data = json.dumps({**d, "start": d["end"] + 1}).encode()
        elif damage == "other codec":
            data = json.dumps({**d, "codec": "langchain"}).encode()
        elif damage == "version":
            data = json.dumps({**d, "v": 2}).encode()
        elif damage == "not json":
            data = b"\x00" * 40
        elif damage == "edits":
            data = json.dumps({**d, "edits": [[*d["edits"][0][:3], "[7]"]]}).encode()
        else:
            data = json.dumps({**d, "edits": [[*d["edits"][0][:3], '[{"role": "robot"}]']]}).encode()
        with pytest.raises(StoreError):
            load_artifact(codec, data)
        await store.put("default", key, data)
        events = Events()
        async with make_runtime(store=store, on_event=events) as runtime:
            session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
            again = reloaded(messages)
            assert same_objects(await session.commit(again), again)
            assert events.of("store.error")

    virtual(main)()


@pytest.mark.parametrize("index", [b"[]", b"{", b'{"a": 1}', b"[1, null]", b'["missing"]', b"null", b"7", b"\xff"])
@virtual
async def test_a_damaged_index_is_no_worse_than_none(index: bytes) -> None:
    """The index names what was committed; whatever stands in it, the turn goes on."""
    store, messages = FlakyStore(), thirty()
    await store.put("default", "index/s", index)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        assert same_objects(await session.commit(messages), messages)
        await settle(5)
        assert summaries(await session.commit(messages))


@virtual
async def test_b135_what_was_pinned_and_what_was_dropped_come_back_by_digest_not_by_offset() -> None:
    """Two commits and a pinned text; after a reload nothing is skipped or shown twice."""
    store = FlakyStore()
    messages = chat(40, size=55)
    messages[1]["content"] += " <pin>the <777> rule</pin>"
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        turns = await feed(session, messages, every=False)
        assert len(session.receipts) >= 2
        assert 777 in marks(turns[-1].view)
        await settle(5)
        before = turns[-1]
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        view = await session.commit(reloaded(before.held))
        assert [m["content"] for m in view] == [m["content"] for m in before.view]


@virtual
async def test_b195_restoring_twice_gives_equal_bytes() -> None:
    """Two processes after each other send byte for byte the same view, over several commits."""
    store = FlakyStore()
    messages = chat(40, size=55)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        last = (await feed(session, messages, every=False))[-1]
        await settle(5)
    seen = []
    for _ in range(2):
        async with make_runtime(store=store) as runtime:
            session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
            view = await session.commit(reloaded(last.held))
            seen.append(json.dumps([{"role": m["role"], "content": m["content"]} for m in view]))
    assert seen[0] == seen[1] == json.dumps([{"role": m["role"], "content": m["content"]} for m in last.view])


@virtual
async def test_another_policy_or_an_anonymous_model_finds_nothing_of_the_others() -> None:
    """A summary by another prompt is another artifact; one by a nameless callable is never stored."""
    store, messages = FlakyStore(), thirty()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        session.observe(messages)
        await settle(5)
        assert summaries(await session.commit(messages))
        await settle(5)
    assert not [k for _, k in store.puts if k.startswith(("artifact/", "index/"))]
    await first_process(store, messages, session_id="t")
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("u", policy=make_policy(model, model_id="m", max_tokens=201))
        session.observe(messages)
        await settle(5)
        assert model.calls == 1


@pytest.mark.parametrize("preloading", [False, True], ids=["promoted", "promoted while preloading"])
@virtual
async def test_b47_b134_a_promoted_commit_is_found_after_a_restart_too(preloading: bool) -> None:
    """The turn commits what it waited for before the flight has ended: the next process finds that as well."""

    class Binding:
        """Never done with its preload."""

        def request_options(self) -> dict[str, Any]:
            return {}

        def transform_options(self, foreground: object, urgent: object) -> dict[str, Any]:
            return {}

        async def preload(self, view: object, **options: object) -> Any:
            await settle(3600)

        def committed(self, warm: bool) -> None: ...

        def discarded(self) -> None: ...

        def close(self) -> None: ...

    class Engine:
        preload_by_default = True

        def bind(self, session_id: str) -> Binding:
            return Binding()

    store, messages = FlakyStore(), chat(16, size=55)  # over the hard limit
    policy = {"model_id": "m"}
    async with make_runtime(store=store) as runtime:
        engine = Engine() if preloading else None
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=3), **policy), engine=engine)
        before = await session.commit(messages)
        assert [r.how for r in session.receipts] == ["promoted"] and summaries(before)
        await settle(5)
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, **policy))
        view = await session.commit(reloaded(messages))
        assert summaries(view) == summaries(before) and marks(view) == marks(before)
        assert [r.how for r in session.receipts] == ["salvaged"]
        await settle(5)
        assert model.calls == 0


@virtual
async def test_promise_12_another_tenant_with_the_same_id_finds_nothing() -> None:
    """Same session id, same messages, same store: another tenant pays for its own."""
    store, messages = FlakyStore(), thirty()
    await first_process(store, messages)
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"), tenant="other")
        again = reloaded(messages)
        assert same_objects(await session.commit(again), again)
        await settle(5)
        assert model.calls == 1


@virtual
async def test_the_artifact_of_a_common_prefix_is_shared_between_sessions_of_a_tenant() -> None:
    """Content-addressed: another session with the same prefix does not pay again."""
    store, messages = FlakyStore(), thirty()
    await first_process(store, messages)
    model = fast()
    async with make_runtime(store=store) as runtime:
        session = runtime.session("another", policy=make_policy(model, model_id="m"))
        handle = session.observe(reloaded(messages))
        assert handle is not None
        assert await handle.wait() is HandleState.READY
        assert model.calls == 0


async def test_a_folder_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through real files: the second runtime sends the summary at its first turn without a call."""
    monkeypatch.setattr(smoothctx.launch, "STORE_WAIT", 5.0)
    messages = thirty()
    async with Runtime(store=FolderStore(tmp_path / "store")) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=0), model_id="m"))
        handle = session.observe(messages)
        assert handle is not None
        await handle.wait(30)
        before = await session.commit(messages)
        assert summaries(before)
    model = FakeSummarizer(delay=0)
    async with Runtime(store=FolderStore(tmp_path / "store")) as runtime:
        session = runtime.session("s", policy=make_policy(model, model_id="m"))
        view = await session.commit(reloaded(messages))
        assert [m["content"] for m in view] == [m["content"] for m in before]
    assert model.calls == 0


@virtual
async def test_usage_of_reloaded_messages_does_not_distort_the_size_of_a_restored_view() -> None:
    """Replies carry the provider's usage of the views they were made from; a restored view keeps its true size."""
    store = FlakyStore()
    codec = OpenAIMessages()
    messages: list[Message] = []
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        for k in range(14):
            messages.append(H(f"<{2 * k}> q", size=55))
            view = await session.commit(messages)
            size = sum(map(codec.estimate, view))
            reply = A(f"<{2 * k + 1}> a", size=55, usage={"prompt_tokens": size, "completion_tokens": 60})
            messages.append(reply)
            session.observe(messages)
            await settle(5)
        assert session.receipts
        true = session.branch.tokens
        await settle(5)
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), model_id="m"))
        again = reloaded(messages)
        view = await session.commit(again)
        assert summaries(view)
        assert abs(session.branch.tokens - true) <= 0.1 * true


def test_summaries_of_an_engine_or_a_named_model_have_a_fingerprint() -> None:
    """What may be stored is what has an identity."""
    assert Summarize(fast()).fingerprint is None
    assert Summarize(fast(), model_id="m").fingerprint is not None
