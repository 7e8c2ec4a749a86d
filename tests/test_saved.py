"""What a session says it committed, and another one takes over: within a process, across two, and across a bad one."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

import smoothctx.launch
from helpers import (
    A,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    S,
    T,
    chat,
    make_policy,
    make_runtime,
    marks,
    now,
    settle,
    summaries,
    virtual,
)
from smoothctx import KeepRecent, Offload, Policy, Runtime, Salvage, Session, StoreError
from smoothctx.codec import OpenAIMessages
from smoothctx.flight import dump_artifact, load_artifact
from smoothctx.shelf import MAX_ARTIFACTS


async def committed(runtime: Runtime, model: FakeSummarizer, **options: Any) -> tuple[Session, list[Message]]:
    """A session whose view has a summary."""
    session = runtime.session("s", policy=make_policy(model, **options))
    messages = chat(12, size=60)
    for _ in range(2):
        view = await session.commit(messages)
        await settle(5)
    assert summaries(view)
    return session, messages


@virtual
async def test_what_is_saved_is_the_view_of_another_process() -> None:
    """A second runtime with nothing in common sends the same summary from its first turn, and pays for none."""
    async with make_runtime() as runtime:
        session, messages = await committed(runtime, FakeSummarizer(), model_id="m")
        view, saved = await session.commit(messages), session.saved()
    assert saved and all(isinstance(json.loads(text), dict) for text in saved)
    async with make_runtime() as runtime:
        other = runtime.session("elsewhere", policy=make_policy(model := FakeSummarizer(), model_id="m"))
        other.restore(saved)
        assert await other.commit(messages) == view
        assert [r.how for r in other.receipts] == ["salvaged"] and model.calls == 0
        assert other.saved() == saved
        other.restore(saved)
        assert len(other.branches()) == 1


@virtual
async def test_the_work_of_a_model_without_an_identity_does_not_leave_the_process() -> None:
    """Neither do fallbacks: they are made anew at no cost."""
    async with make_runtime() as runtime:
        session, _ = await committed(runtime, FakeSummarizer())
        assert session.saved() == []
    async with make_runtime() as runtime:
        policy = make_policy(FakeSummarizer("hang"), model_id="m", max_wait=0, fallback=KeepRecent(("messages", 4)))
        session = runtime.session("s", policy=policy)
        await session.commit(chat(25, size=60))
        assert [r.how for r in session.receipts] == ["fallback"] and session.saved() == []


@virtual
async def test_what_was_saved_before_an_edit_is_not_applied_after_it() -> None:
    """It stays held, and applies again when the old list comes back."""
    async with make_runtime() as runtime:
        session, messages = await committed(runtime, FakeSummarizer(), model_id="m")
        saved = session.saved()
    async with make_runtime() as runtime:
        other = runtime.session("s", policy=make_policy(FakeSummarizer("hang"), model_id="m"))
        other.restore(saved)
        edited = [*messages[:2], H("<700> edited"), *messages[3:]]
        view = await other.commit(edited)
        assert view == edited and not summaries(view)
        await settle(60)
        assert summaries(await other.commit(messages))


@virtual
async def test_what_is_restored_during_a_conversation_is_applied_at_the_next_boundary() -> None:
    """A session that has committed before takes it over as well."""
    async with make_runtime() as runtime:
        session, messages = await committed(runtime, FakeSummarizer(), model_id="m")
        other = runtime.session("other", policy=make_policy(FakeSummarizer("hang"), model_id="m2"))
        assert not summaries(await other.commit(messages))
        other.restore(session.saved())
        assert summaries(await other.commit([*messages, H("next")]))
        third = runtime.session("third", policy=make_policy(FakeSummarizer("hang"), model_id="m3"))
        await third.commit(messages)
        session.share_with(third)
        assert summaries(await third.commit([*messages, H("next")]))


@virtual
async def test_what_is_restored_is_as_old_as_its_coming() -> None:
    """On another branch it is kept for the time that the policy says, counted from when it came."""
    async with make_runtime() as runtime:
        session, messages = await committed(runtime, FakeSummarizer(), model_id="m")
        saved = session.saved()
        await settle(1e6)
        policy = make_policy(FakeSummarizer(), model_id="m", discard=Salvage(ttl=1000))
        other = runtime.session("other", policy=policy)
        other.restore(saved)
        strange = [H("<900> strange"), *chat(12, size=60, first=500, system=False)]
        for _ in range(2):
            await other.commit(strange)
            await settle(5)
        assert other.receipts and summaries(await other.commit(messages)), f"it was dropped at {now()}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"v": 2, "codec": "openai"}',
        pytest.param(None, id="not a text"),
        pytest.param("cut", id="cut short"),
        pytest.param("codec", id="another codec"),
        pytest.param("order", id="edits out of order"),
        pytest.param("negative", id="before the beginning"),
        pytest.param("message", id="a malformed message"),
    ],
)
@virtual
async def test_a_text_that_cannot_be_read_is_an_event(text: str | None) -> None:
    """The others are restored, and the turn goes on."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session, messages = await committed(runtime, FakeSummarizer(), model_id="m")
        (saved,) = session.saved()
        d = json.loads(saved)
        bad = {
            "cut": saved[:-20],
            "codec": json.dumps({**d, "codec": "other"}),
            "order": json.dumps({**d, "edits": [[9, 1, 5, "[]"]]}),
            "negative": json.dumps({**d, "start": -3, "end": -1, "edits": []}),
            "message": json.dumps({**d, "edits": [[1, 5, 5, '[{"role": 1}]']]}),
        }
        other = runtime.session("other", policy=make_policy(FakeSummarizer("hang"), model_id="m"))
        other.restore([bad.get(text, text) if isinstance(text, str) else text, saved])  # type: ignore[list-item]
        assert len(events.of("error")) == 1 and events.of("error")[0].data["where"] == "restore"
        assert len(other.branches()) == 1 and summaries(await other.commit(messages))


def test_edits_before_the_beginning_are_corrupt() -> None:
    """Negative indexes would be counted from the end of the history."""
    codec = OpenAIMessages()
    text = '{"v":1,"codec":"openai","key":"k","transform":"t","start":-2,"end":-1,"start_digest":"","end_digest":"",'
    with pytest.raises(StoreError, match="out of order"):
        load_artifact(codec, (text + '"edits":[],"usage":[0,0,0],"tokens":0}').encode())


@virtual
async def test_restoring_is_bounded() -> None:
    """However many texts are given, a session holds no more than it may."""
    async with make_runtime() as runtime:
        session, _ = await committed(runtime, FakeSummarizer(), model_id="m")
        (saved,) = session.saved()
        other = runtime.session("other", policy=make_policy(FakeSummarizer(), model_id="m"))
        artifact = load_artifact(session.codec, saved.encode())
        texts = [saved.replace(artifact.key, f"{k:064x}") for k in range(3 * MAX_ARTIFACTS)]
        assert dump_artifact(session.codec, artifact).decode() == saved
        other.restore(texts)
        assert len(other.branches()) <= MAX_ARTIFACTS
        session.share_with(other)
        assert len(other.branches()) <= MAX_ARTIFACTS


@virtual
async def test_asking_what_a_session_recognises_changes_nothing() -> None:
    """It goes on, shares a part, or is a stranger; what cannot be read is an event and shares nothing."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session, messages = await committed(runtime, FakeSummarizer())
        view = await session.commit(messages)
        before = (session.branch.edits, len(session.branch.history), session.receipts.copy())
        assert session.recognises([*messages, H("next")]) == (True, len(messages))
        assert session.recognises([*view, H("next")]) == (True, len(view))
        assert session.recognises(messages[:5]) == (False, 5)
        assert session.recognises([*messages[:5], H("<800> edited"), *messages[6:]]) == (False, 5)
        assert session.recognises([]) == (False, 0)
        assert session.recognises([*messages[:3], "no message"]) == (False, 3)
        assert session.recognises(None) == (False, 0)  # type: ignore[arg-type]
        assert [e.data["where"] for e in events.of("error")] == ["recognises"]
        assert before == (session.branch.edits, len(session.branch.history), session.receipts)


@virtual
async def test_a_turn_that_may_not_wait_falls_back_at_once() -> None:
    """At the hard limit the lookahead goes on, before nobody else's; its result supersedes the fallback later."""
    async with make_runtime() as runtime:
        model = FakeSummarizer(delay=3)
        session = runtime.session("s", policy=make_policy(model))
        messages = chat(20, size=60)
        began = now()
        view = session.commit_now(messages)
        assert now() == began and session.branch.fits(session.policy)
        assert [r.how for r in session.receipts] == ["fallback"] and len(view) < len(messages)
        assert session.lookahead is not None and not session.lookahead.promoted, "no turn waits for it"
        await settle(5)
        messages += [H("<600> next")]
        later = session.commit_now(messages)
        assert summaries(later) and marks(later) == marks(messages)
        assert later[-1] is messages[-1]


@virtual
async def test_a_turn_that_may_not_wait_finds_what_was_left_at_the_next_boundary() -> None:
    """The store is read in the background, however slow it is, and what it names is still named afterwards."""
    store = FlakyStore()
    async with make_runtime(store=store) as runtime:
        await committed(runtime, FakeSummarizer(), model_id="m")
        await settle(5)
    store.mode = "slow"
    async with make_runtime(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(model := FakeSummarizer(), model_id="m"))
        messages = chat(12, size=60)
        began = now()
        assert session.commit_now(messages[:6]) == messages[:6]
        assert now() == began
        await settle(60)
        assert summaries(session.commit_now([*messages, A("more")]))
        assert model.calls == 0


def test_a_first_commit_on_another_loop_finds_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store holds open belongs to the runtime's loop: a caller's own loop reads through it."""
    monkeypatch.setattr(smoothctx.launch, "STORE_WAIT", 30.0)  # a slow machine reads as well
    store, messages = FlakyStore(), chat(12, size=60)
    with Runtime.in_thread(store=store) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=0), model_id="m"))
        session.commit_sync(messages)
        handle = session.observe(messages) or session.lookahead
        if handle is not None:
            handle.wait_sync(30)
        assert summaries(session.commit_sync(messages))
    loops: list[Any] = []
    reads = FlakyStore.get

    class Watched(FlakyStore):
        async def get(self, tenant: str, key: str) -> bytes | None:
            loops.append(asyncio.get_running_loop())
            return await reads(store, tenant, key)

    with Runtime.in_thread(store=Watched()) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer("hang"), model_id="m"))

        async def on_a_loop_of_its_own() -> list[Message]:
            view = await session.commit(messages)
            assert asyncio.get_running_loop() not in loops
            return view

        assert summaries(asyncio.run(on_a_loop_of_its_own()))
        assert loops and len({id(loop) for loop in loops}) == 1


def test_work_joined_from_another_loop_has_an_end() -> None:
    """A loop that does not answer in time is not waited for, and one that is gone is no error."""
    ran: list[str] = []

    async def hang() -> None:
        ran.append("hang")
        await asyncio.sleep(1e6)

    async def short() -> None:
        ran.append("short")

    async def ended() -> None:
        raise asyncio.CancelledError  # as when its loop ends under it

    with Runtime.in_thread() as runtime:
        asyncio.run(runtime.join_loop(ended, 30))
        runtime.on_loop(ended, 30)
        asyncio.run(runtime.join_loop(short, 30))
        asyncio.run(runtime.join_loop(hang, 0.01))
    assert ran in (["short", "hang"], ["short"])
    asyncio.run(runtime.join_loop(hang, 30))
    runtime.on_loop(hang, 30)
    assert ran.count("hang") <= 1

    async def on_its_own_loop() -> None:
        async with Runtime() as own:
            await own.join_loop(short, 30)

    asyncio.run(on_its_own_loop())
    assert ran.count("short") == 2


@pytest.mark.parametrize("where", ["memory", "runtime", "offload"])
@virtual
async def test_stubs_are_saved_only_with_a_store_of_the_callers(where: str) -> None:
    """Without one, what a stub stands for ends with the process: another one starts from the raw messages."""
    messages: list[Message] = [S()]
    for k in range(8):
        messages += [
            H(f"<{k}> question", size=20),
            A("calling", f"c{k}"),
            T(f"c{k}", f"result {k}", size=400),
            A("done"),
        ]
    store = FlakyStore()

    def policy() -> Policy:
        own = Offload(min_tokens=100, store=store if where == "offload" else None)
        return Policy(own, context_window=2500, land_at=("tokens", 1000), min_savings=0.1)

    async with make_runtime(store=store if where == "runtime" else None) as runtime:
        session = runtime.session("s", policy=policy())
        for _ in range(2):
            view = await session.commit(messages)
            await settle(10)
        assert session.receipts and sum("retrieve(id=" in m["content"] for m in view if m["content"]) > 3
        saved = session.saved()
        assert bool(saved) == (where != "memory")
    async with make_runtime(store=store if where == "runtime" else None) as runtime:
        session = runtime.session("later", policy=policy())
        session.restore(saved)
        view = await session.commit(messages)
        ids = re.findall(r'retrieve\(id="([0-9a-f]+)"', json.dumps(view).replace("\\", ""))
        assert ids and any(r.how == "salvaged" for r in session.receipts) == (where != "memory")
        for content_id in ids:
            assert "result" in await session.retrieve(content_id)


@virtual
async def test_a_summary_is_saved_whatever_the_store() -> None:
    """Also one of results that were offloaded on entry: it stands for itself."""
    messages = [
        S(),
        H("question"),
        A("calling", "c"),
        T("c", "result", size=900),
        A("done"),
        *chat(8, system=False, size=60),
    ]
    async with make_runtime() as runtime:
        policy = make_policy(FakeSummarizer(), model_id="m", max_message_tokens=200, trigger=("tokens", 800))
        session = runtime.session("s", policy=policy)
        for _ in range(2):
            view = await session.commit(messages)
            await settle(10)
        assert summaries(view) and len(session.saved()) == 1
