"""Promise 5: below the hard limit no turn waits for us, whatever a transform, store, engine or admission does; any
internal error means that the turn goes on with the view it had, and is an event."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helpers import (
    CODEC,
    Events,
    FakeSummarizer,
    FlakyStore,
    H,
    Message,
    chat,
    coherent,
    make_policy,
    make_runtime,
    now,
    problems,
    settle,
    virtual,
)
from smoothctx import Event, HandleState, Policy, Rewrite, Runtime, Session
from smoothctx.transforms.base import Locality, TransformRequest

MODES = ["answer", "hold", "fail", "hang", "stubborn", "garbage", "empty", "long", "cancel"]


async def drive(session: Session, messages: list[Message], turns: int = 10) -> None:
    """Turns below the hard limit: each boundary takes no time at all and gives a valid view."""
    first = len(messages) // 2
    for k in range(turns):
        messages += chat(1, size=25, first=first + k, system=False)
        began = now()
        view = await session.commit(messages)
        session.observe(messages)
        assert now() == began
        assert not problems(view)
        assert sum(map(CODEC.estimate, view)) <= 1700
        await settle(3)


@pytest.mark.parametrize("mode", MODES)
@virtual
async def test_promise_05_whatever_the_model_does(mode: str) -> None:
    """Slow, failing, hanging, deaf to cancellation, garbage: commit takes no time."""
    model, events = FakeSummarizer(mode, delay=50), Events()
    async with make_runtime(on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(model))
        await drive(session, chat(10, size=50))
        assert model.calls > 0
        assert not events.of("error"), events.of("error")
        coherent(session, runtime, live=len(session._handles.all()))


@pytest.mark.parametrize("mode", ["fail", "hang", "slow", "corrupt"])
@virtual
async def test_promise_05_whatever_the_store_does(mode: str) -> None:
    """The session works from memory. Only the first commit may wait ``store_wait`` for another process's work."""
    store, events = FlakyStore(mode=mode), Events()
    async with make_runtime(store=store, on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), model_id="m"))
        messages = chat(10, size=50)
        began = now()
        await session.commit(messages)
        assert now() - began <= 0.011
        await drive(session, messages)
        assert session.receipts, "the store does not keep a summary from being used"
        if mode != "slow":
            assert mode == "corrupt" or events.of("store.error")
        assert not events.of("error")


class Admission:
    """Hangs, raises, or answers nonsense."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.asked = 0

    async def decide(self, work: Any) -> Any:
        self.asked += 1
        if self.mode == "hang":
            await asyncio.sleep(1e9)
        if self.mode == "fail":
            raise RuntimeError("no metrics")
        return {"nonsense": 42, "defer": "defer", "skip": "skip"}[self.mode]


@pytest.mark.parametrize("mode", ["hang", "fail", "nonsense", "defer", "skip"])
@virtual
async def test_promise_05_whatever_admission_does(mode: str) -> None:
    """Admission that hangs, raises or answers nonsense counts as "run"; "defer" and "skip" cost the turn nothing."""
    admission, events = Admission(mode), Events()
    async with make_runtime(admission=admission, on_event=events) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        await drive(session, chat(10, size=50))
        assert admission.asked
        if mode in ("hang", "fail", "nonsense"):
            assert session.receipts and events.of("error")
        if mode == "skip":
            assert not session.receipts and runtime.counters.stale["admission_denied"] > 0


class Binding:
    """An engine's binding of which every call hangs or raises."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    async def preload(self, view: Any, **_: Any) -> Any:
        if self.mode == "hang":
            await asyncio.sleep(1e9)
        raise RuntimeError("the engine is gone")

    def _fail(self) -> None:
        if self.mode == "raise-all":
            raise RuntimeError("the engine is gone")

    def request_options(self) -> dict[str, Any]:
        return {}

    def transform_options(self, foreground: Any, urgent: Any) -> dict[str, Any]:
        return {}

    def committed(self, warm: bool) -> None:
        self._fail()

    def discarded(self) -> None:
        self._fail()

    def close(self) -> None:
        self._fail()


class Engine:
    """Hands out such bindings."""

    preload_by_default = True

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def bind(self, session_id: str) -> Binding:
        return Binding(self.mode)


@pytest.mark.parametrize("mode", ["hang", "raise", "raise-all"])
@virtual
async def test_promise_05_whatever_the_engine_does(mode: str) -> None:
    """A preload that hangs or raises, a binding that raises everywhere: the turn goes on."""
    async with make_runtime(on_event=(events := Events())) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()), engine=Engine(mode))
        await drive(session, chat(10, size=50))
        if mode != "hang":
            assert session.receipts and events.of("error")
        await session.close()


@virtual
async def test_promise_05_an_event_callback_that_raises() -> None:
    """``on_event`` is the application's business, never the turn's."""

    def broken(event: Event) -> None:
        raise RuntimeError(event.name)

    async with make_runtime(on_event=broken) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        await drive(session, chat(10, size=50))
        assert session.receipts


class Odd:
    """A transform that is broken in some way."""

    name = "odd"
    locality = Locality.PREFIX
    fingerprint: str | None = None
    keep = ("messages", 4)

    def __init__(self, mode: str) -> None:
        self.mode = mode

    async def apply(self, request: TransformRequest) -> Any:
        match self.mode:
            case "none":
                return None
            case "not messages":
                return Rewrite(messages=[1, 2, 3])
            case "same":
                return Rewrite(messages=list(request.messages))
            case "nothing":
                return Rewrite(messages=[])
            case "swapped":
                pairs = zip(request.messages[1::2], request.messages[::2], strict=False)
                return Rewrite(messages=[m for pair in pairs for m in pair])
            case "system":
                return Rewrite(messages=[{"role": "system", "content": "obey"}])
            case "infinite":
                return Rewrite(messages=range(10**6))
        raise KeyError(self.mode)


@pytest.mark.parametrize("mode", ["none", "not messages", "same", "swapped", "system", "infinite", "raise"])
@virtual
async def test_promise_05_whatever_a_transform_returns(mode: str) -> None:
    """Garbage is refused with a typed reason; the view stays raw."""
    async with make_runtime() as runtime:
        session = runtime.session("s", policy=Policy(Odd(mode), context_window=2000))
        messages = chat(12, size=55)
        handle = session.observe(messages)
        assert handle is not None
        assert await handle.wait() in (HandleState.FAILED, HandleState.DISCARDED)
        assert handle.reason is not None
        view = await session.commit(messages)
        assert len(view) == len(messages) and not session.receipts


@virtual
async def test_promise_05_a_broken_token_counter_or_validator() -> None:
    """The user's own callables may raise: the turn gets the messages, we emit an event, and estimate instead."""

    def counter(messages: list[Any]) -> int:
        raise ZeroDivisionError

    async with make_runtime(on_event=(events := Events())) as runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer(), token_counter=counter))
        messages = chat(12, size=60)
        assert await session.commit(messages) == messages
        assert session.observe(messages) is not None
        assert events.of("error")

        def validator(*_: Any) -> bool:
            raise ZeroDivisionError

        session = runtime.session("t", policy=make_policy(FakeSummarizer(), validators=[validator]))
        await drive(session, chat(10, size=50))
        assert not session.receipts


@virtual
async def test_promise_05_the_pool_is_gone() -> None:
    """A turn on a runtime that was closed meanwhile: the view is the history, no exception."""
    runtime = make_runtime()
    async with runtime:
        session = runtime.session("s", policy=make_policy(FakeSummarizer()))
        messages = chat(17, size=60)
        await session.commit(messages[:10])
    assert await session.commit(messages) == messages
    assert session.observe(messages) is None


def test_promise_05_the_loop_ends_in_the_middle() -> None:
    """The event loop of a runtime is shut down while lookaheads run: handles end, a later turn still gets a view."""
    model = FakeSummarizer("hang")
    messages = chat(12, size=60)
    kept: list[Any] = []

    async def main() -> None:
        runtime = Runtime()
        await runtime.__aenter__()
        session = runtime.session("s", policy=make_policy(model))
        handle = session.observe(messages)
        await asyncio.sleep(0.01)
        kept.extend([runtime, session, handle])

    asyncio.run(main())
    _, session, handle = kept
    assert handle.done()

    async def later() -> None:
        assert await session.commit([*messages, H("more")])

    asyncio.run(later())
