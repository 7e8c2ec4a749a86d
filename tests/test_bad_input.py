"""Bad input, row by row of the design's table: what a user reads, and that the turn goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from driving import fast
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
    same_objects,
    settle,
    summaries,
    virtual,
)
from smoothctx import (
    Chain,
    ClosedError,
    ConfigurationError,
    EngineOverloaded,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
    FolderStore,
    HandleNotReady,
    HandleState,
    Immediate,
    Isolate,
    KeepRecent,
    MemoryStore,
    MessageError,
    Offload,
    OpenAIMessages,
    Policy,
    Reason,
    Runtime,
    Salvage,
    SmoothctxError,
    Summarize,
)


class _PlainStore:
    """A store of another framework's making: its methods are not asynchronous."""

    def get(self, tenant: str, key: str) -> None:
        """Nothing."""

    put = delete = get

    def __repr__(self) -> str:
        return "<plain store>"


# -- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["hello", None, 7, {"role": "user", "content": "a"}])
@virtual
async def test_not_a_list_of_messages(given: Any) -> None:
    """``commit`` and ``schedule_transform`` say so; ``observe`` never raises, it becomes an event."""
    events = Events()
    text = f"^messages: expected a list of messages, got {type(given).__name__}$"
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        assert session.observe(given) is None
        (event,) = events.of("message.unreadable")
        assert re.match(text, str(event.data["error"]))
        with pytest.raises(MessageError, match=text):
            await session.commit(given)
        with pytest.raises(MessageError, match=text):
            session.commit_sync(given)
        with pytest.raises(MessageError, match=text):
            session.schedule_transform("summarize", given)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            {"content": "a"},
            "messages[25].role: missing; expected one of system, developer, user, assistant, tool, function",
        ),
        (
            {"role": "robot"},
            "messages[25].role: 'robot' is unknown; expected one of system, developer, user, assistant, ",
        ),
        ("text", "messages[25]: expected a dict with a 'role', got str"),
        (None, "messages[25]: expected a dict with a 'role', got NoneType"),
        (
            {"role": "user", "content": [{"type": "hologram"}]},
            "messages[25].content[0]: unknown content part (type 'hologram')",
        ),
        ({"role": "user", "content": 3}, "messages[25].content: expected a string, a list of parts or None, got int"),
        ({"role": "assistant", "tool_calls": 3}, "messages[25].tool_calls: expected a list, got int"),
    ],
)
@virtual
async def test_a_malformed_message_is_named_and_passed_through(bad: Any, text: str) -> None:
    """Index and field in the event; nothing is scheduled; the turn goes on with the caller's messages, this one too."""
    events = Events()
    messages: list[Any] = [*chat(12, size=55), bad]
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        for _ in range(3):
            assert session.observe(messages) is None
            assert same_objects(await session.commit(messages), messages)
        await settle(5)
        (event,) = events.of("message.unreadable")
        assert str(event.data["error"]).startswith(text)
        assert not events.of("lookahead.started")
        with pytest.raises(MessageError, match="^" + re.escape(text)):
            session.schedule_transform("summarize", messages)
        messages.append(H("<900> behind it"))
        assert (await session.commit(messages))[-1] is messages[-1]
        del messages[25]
        assert session.observe(messages) is not None
        await settle(5)
        assert summaries(await session.commit(messages))


@virtual
async def test_a_malformed_message_at_the_hard_limit_still_leaves_a_request_that_fits() -> None:
    """What can be read is shortened; what cannot be read goes out as it is."""
    messages: list[Any] = [*chat(40, size=55), {"role": "robot", "content": "?"}]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        view = await session.commit(messages)
        assert view[-1] is messages[-1]
        assert len(view) < len(messages)


@virtual
async def test_an_orphan_result_is_passed_through_and_never_part_of_a_cut() -> None:
    """It stays where it was, as the same object, whatever is rewritten around it."""
    orphan = T("nobody", "<700> lost")
    messages = [*chat(6, size=55), orphan, *chat(20, size=55, first=10, system=False)]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(fast()))
        view = await session.commit(messages)
        assert len(view) < len(messages)
        assert sum(m is orphan for m in view) == 1
        with pytest.raises(HandleNotReady):
            session.schedule_transform("summarize", [*messages, A("<900>"), H("<901>")]).commit(messages)


@pytest.mark.parametrize(
    ("messages", "event"),
    [
        ([], None),
        ([S()], None),
        ([S(), S("rules")], None),
        ([S(), H("one huge message", size=5000)], "view.oversized"),
        ([S("s" * 40_000)], "view.oversized"),
        ([H("q"), A("a", "c"), T("c", size=5000)], "view.oversized"),
    ],
    ids=["empty", "system", "two systems", "huge user", "huge system", "huge result"],
)
@virtual
async def test_nothing_can_be_done_and_an_event_says_why(messages: list[Message], event: str | None) -> None:
    """Empty, system only, one message over the window: the view is the history, and a typed event says why."""
    events = Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(fast(), max_wait=0))
        for _ in range(3):
            assert same_objects(await session.commit(messages), messages)
            assert session.observe(messages) is None
    assert not events.of("error")
    if event is not None:
        assert len(events.of(event)) == 1
        assert events.of(event)[0].data["why"]


# -- options -------------------------------------------------------------------------------------------------------


def policy(**options: Any) -> Policy:
    """A policy that is right but for ``options``."""
    return Policy(**{"transform": Summarize(fast()), "context_window": 1000, **options})


WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: policy(transform=None),
        "transform=None: expected a transform (an object with name, locality, fingerprint",
    ),
    (lambda: policy(transform="summarize"), "transform='summarize': expected a transform"),
    (lambda: policy(transform=Summarize), "transform=<class"),
    (lambda: policy(transform=Isolate(instruction="x")), "transform=Isolate(...): it opens a sub-agent's context"),
    (lambda: policy(fallback=Summarize(fast())), "fallback=Summarize(model"),
    (lambda: policy(fallback=None), "fallback=None: expected a transform"),
    (lambda: policy(context_window=0), "context_window=0: expected a number of tokens above 0"),
    (lambda: policy(context_window=-5), "context_window=-5: expected"),
    (lambda: policy(context_window="32k"), "context_window='32k': expected"),
    (lambda: policy(context_window=True), "context_window=True: expected"),
    (lambda: policy(context_window=3.5), "context_window=3.5: expected"),
    (lambda: policy(trigger=0.6), 'trigger=0.6: expected ("fraction", n) or ("tokens", n) or ("messages", n)'),
    (lambda: policy(trigger=5), "trigger=5: expected"),
    (lambda: policy(trigger=None), "trigger=None: expected"),
    (lambda: policy(trigger="tokens"), "trigger='tokens': expected"),
    (lambda: policy(trigger=[]), "trigger=[]: expected at least one size"),
    (lambda: policy(trigger=[("tokens", 5), 7]), "trigger=7: expected"),
    (lambda: policy(trigger=("turns", 3)), "trigger=('turns', 3): expected"),
    (lambda: policy(trigger=("fraction", 0)), "trigger=('fraction', 0): a fraction lies above 0 and at most 1"),
    (lambda: policy(trigger=("fraction", 60)), "trigger=('fraction', 60): a fraction lies above 0 and at most 1"),
    (lambda: policy(trigger=("tokens", -1)), "trigger=('tokens', -1): the size must be a number >= 0"),
    (lambda: policy(trigger=("tokens", float("inf"))), "trigger=('tokens', inf): the size must be a number >= 0"),
    (lambda: policy(trigger=("tokens", float("nan"))), "trigger=('tokens', nan): the size must be a number >= 0"),
    (lambda: policy(trigger=("tokens", 1.5)), "trigger=('tokens', 1.5): tokens are counted in whole numbers"),
    (lambda: policy(trigger=("tokens", "9")), "trigger=('tokens', '9'): the size must be a number >= 0"),
    (lambda: policy(trigger=("tokens", True)), "trigger=('tokens', True): the size must be a number >= 0"),
    (
        lambda: policy(trigger=("fraction", 0.9)),
        "trigger=('fraction', 0.9): must not lie above hard_limit=('fraction', 0.85)",
    ),
    (
        lambda: policy(land_at=("fraction", 0.9)),
        "land_at=('fraction', 0.9): must lie below hard_limit=('fraction', 0.85)",
    ),
    (lambda: policy(land_at=("tokens", 900)), "land_at=('tokens', 900): must lie below hard_limit"),
    (
        lambda: policy(land_at=("messages", 9), hard_limit=("messages", 9), trigger=("messages", 3)),
        "land_at=('messages', 9): must lie below hard_limit=('messages', 9)",
    ),
    (
        lambda: policy(land_at=("messages", 3), hard_limit=("messages", 9), trigger=("messages", 12)),
        "trigger=('messages', 12): must not lie above hard_limit=('messages', 9)",
    ),
    (
        lambda: policy(hard_limit=("fraction", 1.2)),
        "hard_limit=('fraction', 1.2): a fraction lies above 0 and at most 1",
    ),
    (lambda: policy(reserved_tokens=-1), "reserved_tokens=-1: expected a number of at least 0"),
    (lambda: policy(reserved_tokens=850), "reserved_tokens=850: must leave room under hard_limit=('fraction', 0.85)"),
    (lambda: policy(commit="later"), "commit='later': expected "),
    (lambda: policy(overrun="panic"), "overrun='panic': expected one of 'promote', 'fallback', 'raw'"),
    (lambda: policy(max_wait=-1), "max_wait=-1: expected a number of at least 0"),
    (lambda: policy(max_wait=None), "max_wait=None: expected a number of at least 0"),
    (lambda: policy(max_wait=float("nan")), "max_wait=nan: expected a number of at least 0"),
    (lambda: policy(min_savings=1.5), "min_savings=1.5: expected a number between 0 and 1"),
    (lambda: policy(min_savings="30%"), "min_savings='30%': expected a number between 0 and 1"),
    (lambda: policy(max_message_tokens=0), "max_message_tokens=0: expected a number above 0"),
    (lambda: policy(preload_kv="yes"), "preload_kv='yes': expected True, False or 'auto'"),
    (lambda: policy(discard="salvage"), "discard='salvage': expected Salvage(...), Immediate() or Finish()"),
    (lambda: policy(discard=Immediate), "discard=<class"),
    (lambda: policy(token_counter=5), "token_counter=5: expected a callable(list) -> int"),
    (lambda: policy(validators=5), "validators=5: expected a list of callables"),
    (lambda: policy(validators=[5]), "validators=5: expected callables (request, rewrite)"),
    (lambda: Salvage(ttl=0), "Salvage(ttl)=0: expected a number above 0"),
    (lambda: Salvage(ttl="1h"), "Salvage(ttl)='1h': expected a number above 0"),  # type: ignore[arg-type]
    (lambda: Salvage(max_bytes=-1), "Salvage(max_bytes)=-1: expected a number above 0"),
    (lambda: Runtime(concurrency=0), "concurrency=0: expected a whole number of at least 1"),
    (lambda: Runtime(concurrency=True), "concurrency=True: expected a whole number of at least 1"),
    (lambda: Runtime(max_pending=-1), "max_pending=-1: expected a whole number of at least 1"),
    (lambda: Runtime(max_sessions=1.5), "max_sessions=1.5: expected a whole number of at least 1"),  # type: ignore[arg-type]
    (lambda: Runtime(session_ttl=0), "session_ttl=0: expected seconds above 0"),
    (lambda: Runtime(on_event="log"), "on_event='log': expected a callable(Event)"),  # type: ignore[arg-type]
    (lambda: Runtime(store="redis://"), "store='redis://': expected a Store"),  # type: ignore[arg-type]
    (lambda: Runtime(store=_PlainStore()), f"store={_PlainStore()!r}: get, put, delete: expected 'async def'"),  # type: ignore[arg-type]
    (lambda: Runtime(store=MemoryStore), "store=<class"),  # type: ignore[arg-type]
    (lambda: Offload(store=_PlainStore()), f"store={_PlainStore()!r}: get, put, delete: expected 'async def'"),  # type: ignore[arg-type]
    (lambda: Runtime(executor=5), "executor=5: expected an object with async execute(transform, request)"),  # type: ignore[arg-type]
    (lambda: Runtime(admission=5), "admission=5: expected an object with async decide(work)"),
    (lambda: Runtime(clock=5.0), "clock=5.0: expected a callable() -> seconds"),  # type: ignore[arg-type]
    (lambda: MemoryStore(max_bytes=0), "max_bytes=0: expected a whole number above 0"),
    (lambda: MemoryStore(ttl=-1), "ttl=-1: expected a number of seconds above 0, or None"),
    (lambda: FolderStore(""), "path='': expected the path of a folder"),
    (lambda: Summarize("gpt"), "model='gpt': expected an async function"),
    (lambda: Summarize(fast(), keep=4), "keep=4: expected"),  # type: ignore[arg-type]
    (lambda: KeepRecent(("turns", 1)), "keep=('turns', 1): expected"),
    (lambda: Offload(min_tokens=0), "min_tokens=0: expected a whole number of at least 1"),
    (lambda: Chain(), "Chain(): expected at least one transform"),
    (lambda: Isolate(instruction=""), "instruction='': expected a text that is not empty"),
]


@pytest.mark.parametrize(("make", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_wrong_options_are_named_at_construction(make: Callable[[], Any], text: str) -> None:
    """Option, value and what is allowed, in the caller's words, before anything runs."""
    with pytest.raises(ConfigurationError, match="^" + re.escape(text)) as caught:
        make()
    assert isinstance(caught.value, SmoothctxError)
    assert isinstance(caught.value, ValueError)


SESSION: list[tuple[dict[str, Any], str]] = [
    ({"session_id": ""}, "session_id='': expected a string that is not empty"),
    ({"session_id": 7}, "session_id=7: expected a string that is not empty"),
    ({"policy": None}, "policy=None: expected a Policy"),
    ({"tenant": ""}, "tenant='': expected a string that is not empty"),
    ({"codec": OpenAIMessages}, "codec: expected an instance, got the class OpenAIMessages: OpenAIMessages()"),
    ({"codec": "openai"}, "codec='openai': expected a Codec, such as OpenAIMessages()"),
    ({"parent": "p"}, "parent='p': expected the Session whose sub-agent this is, or None"),
    ({"request": "tools"}, "request='tools': expected a mapping of request options, or None"),
]


@pytest.mark.parametrize(("options", "text"), SESSION, ids=[next(iter(o)) for o, _ in SESSION])
@virtual
async def test_wrong_session_options_are_named(options: dict[str, Any], text: str) -> None:
    """The same for ``runtime.session``."""
    async with make_runtime() as runtime:
        given: dict[str, Any] = {"session_id": "s", "policy": policy(), **options}
        with pytest.raises(ConfigurationError, match="^" + re.escape(text)):
            runtime.session(given.pop("session_id"), **given)


@virtual
async def test_wrong_schedules_are_named() -> None:
    """An unknown kind, wrong options, segments that are not there or may not be rewritten."""
    messages = chat(4, size=55)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("compress", {}, "kind='compress': expected one of "),
        (7, {}, "kind=7: expected a name such as 'summarize' or a transform"),
        (KeepRecent(), {"keep": ("messages", 1)}, "keep: options go with a kind given by name, not with a transform"),
        ("keep_recent", {"size": 1}, "schedule_transform('keep_recent'): "),
        ("keep_recent", {"keep": 1}, "keep=1: expected"),
        ("summarize", {"target_segments": []}, "target_segments=[]: expected a contiguous run of indexes"),
        ("summarize", {"target_segments": 3}, "target_segments=3: expected a contiguous run of indexes"),
        (
            "summarize",
            {"target_segments": [0, 2]},
            "target_segments=[0, 2]: the indexes must be contiguous and ascending",
        ),
        (
            "summarize",
            {"target_segments": [1, 0]},
            "target_segments=[1, 0]: the indexes must be contiguous and ascending",
        ),
        ("summarize", {"target_segments": [True]}, "target_segments=[True]: expected a contiguous run of indexes"),
        (
            "summarize",
            {"target_segments": [5, 6, 7, 8]},
            "target_segments=[5, 6, 7, 8]: there are 8 segments, numbered from 0",
        ),
        ("summarize", {"target_segments": [6, 7]}, "target_segments=[6, 7]: the newest segment, unread tool results"),
    ]
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=policy())
        for kind, options, text in cases:
            with pytest.raises(ConfigurationError, match="^" + re.escape(text)):
                session.schedule_transform(kind, messages, **options)
        with pytest.raises(ConfigurationError, match="there is nothing that may be rewritten now"):
            session.schedule_transform("summarize", [S(), H("only")])
        with pytest.raises(ConfigurationError, match=r"^pin\(''\): expected a text that is not empty"):
            session.pin("")
        with pytest.raises(ConfigurationError, match=r"^live_tasks\('task'\): expected a list of names"):
            session.live_tasks("task")
        with pytest.raises(ConfigurationError, match=r"^wrap\(7\): expected an async function"):
            runtime.wrap(7, policy=policy())  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"^policy=7: expected a Policy"):
            runtime.wrap(fast(), policy=7)  # type: ignore[arg-type]
        await session.close()
        with pytest.raises(ClosedError, match="session 's' is closed: open it again"):
            session.schedule_transform("summarize", messages)


@virtual
async def test_a_runtime_that_is_not_open_says_so() -> None:
    """Before and after its ``async with``, and twice."""
    runtime = make_runtime()
    with pytest.raises(ClosedError, match="is not open: use 'async with Runtime"):
        runtime.session("s", policy=policy())
    async with runtime:
        with pytest.raises(ClosedError, match="open already"):
            await runtime.__aenter__()
    with pytest.raises(ClosedError, match="is not open"):
        runtime.session("s", policy=policy())
    with pytest.raises(ClosedError, match="was closed: make a new one"):
        await runtime.__aenter__()
    await runtime.aclose()


# -- engines and stores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (EngineUnreachable("no connection"), 2),
        (EngineOverloaded("HTTP 503", status=503), 2),
        (EngineProtocolError("half a stream"), 2),
        (EngineRefused("HTTP 400", status=400), 1),
        (ValueError("garbage"), 1),
    ],
    ids=lambda e: type(e).__name__,
)
@virtual
async def test_engine_trouble_is_retried_where_it_helps_then_failed(error: Exception, tries: int) -> None:
    """What may pass is tried again, within a budget; what cannot is not. The turn goes on either way."""
    calls = 0

    async def model(messages: list[Message], *, max_tokens: int | None = None) -> str:
        nonlocal calls
        calls += 1
        raise error

    messages = chat(12, size=55)
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=make_policy(model))
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() is HandleState.FAILED
        assert handle.reason is Reason.FAILED
        assert handle.error is error
        assert calls == 1 if tries == 1 else 2 <= calls <= 10
        assert same_objects(await session.commit(messages), messages)


@pytest.mark.parametrize("mode", ["fail", "hang", "corrupt"])
@virtual
async def test_a_store_in_trouble_leaves_the_session_working_from_memory(mode: str) -> None:
    """Unreachable, hanging or corrupt from the start: summaries are made and committed, an event tells of the store."""
    events = Events()
    messages = chat(12, size=55)
    async with make_runtime(store=FlakyStore(mode=mode), on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(delay=0.1), model_id="m"))
        await session.commit(messages)
        await settle(30)
        assert summaries(await session.commit(messages))
        await settle(60)
        assert events.of("store.error") or mode == "corrupt"
