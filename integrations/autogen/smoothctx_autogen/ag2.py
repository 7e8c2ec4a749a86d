"""AG2 1.x (``import ag2``): lookahead as a middleware around the model's calls.

async with Runtime() as runtime:
    lookahead = Middleware(LookaheadMiddleware, runtime=runtime, policy=policy)
    agent = Agent("assistant", config=config, middleware=[lookahead])
"""

from __future__ import annotations

from .ag2_missing import missing

try:
    from ag2.middleware import BaseMiddleware
except ImportError as error:
    raise missing("ag2") from error

import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from ag2.events import BaseEvent, ModelMessageChunk, UsageEvent
from ag2.events.types import Usage as StreamUsage

from smoothctx.calls import ForegroundCall
from smoothctx.errors import ClosedError, ConfigurationError
from smoothctx.handle import LookaheadHandle
from smoothctx.lines import Lines
from smoothctx.policy import Policy
from smoothctx.runtime import Runtime
from smoothctx.session import Session
from smoothctx.states import Reason

from .ag2_events import EventMessage, EventMessages, read, weave
from .ag2_model import ConfigModel, usage_of
from .checks import (
    RawTurns,
    check_engine,
    check_flag,
    check_policy,
    check_request,
    check_runtime,
    check_text,
    guarded,
    saved_texts,
)

__all__ = [
    "ConfigModel",
    "EventMessage",
    "EventMessages",
    "LookaheadMiddleware",
    "forget",
    "restore",
    "saved",
    "sessions",
]

CODEC = EventMessages()
#: sets of options whose sessions are followed at once, and streams whose saved texts wait for a turn: the oldest go
MAX_OPTIONS, MAX_SAVED = 64, 1024


@dataclass(slots=True)
class _Kept:
    """What outlives a middleware, of which there is a new one per turn: one of these per runtime."""

    lines: list[_Followed] = field(default_factory=list)  # the one used last at the end
    saved: dict[str, list[str]] = field(default_factory=dict)  # by stream, until its next turn
    told: weakref.WeakSet[LookaheadHandle] = field(default_factory=weakref.WeakSet)  # whose cost is put on a stream
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    policy: Policy
    tenant: str
    engine: Any
    request: Mapping[str, Any] | None

    def same_as(self, other: _Options) -> bool:
        return (
            self.policy.same_as(other.policy)
            and self.tenant == other.tenant
            and self.engine is other.engine
            and self.request == other.request
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Followed:
    options: _Options
    lines: Lines
    raw: RawTurns = field(default_factory=lambda: RawTurns("ag2"))


@dataclass(slots=True, eq=False)
class _Call:
    """A model call that a middleware has rewritten: whatever it starts may still see this when it is over."""

    runtime: Runtime
    options: _Options
    stream: str
    over: bool = False


_calls: ContextVar[tuple[_Call, ...]] = ContextVar("smoothctx_ag2_calls", default=())


def sessions(runtime: Runtime, stream: Any) -> list[Session]:
    """The open sessions of a stream (or of its id), the one used last at the end: one per policy and tenant."""
    kept, name = _kept(runtime), _id(stream)
    with kept.lock:
        followed = list(kept.lines)
    found = [s for f in followed for s in f.lines.sessions(name, tenant=f.options.tenant)]
    return sorted({id(s): s for s in found}.values(), key=lambda s: s.used_at)


async def forget(runtime: Runtime, stream: Any) -> None:
    """Cancel the lookaheads of a stream and forget what they made: call it where its history is dropped.

    A stream whose next turn shares nothing with the one before is forgotten without being told.
    """
    kept = _kept(runtime)
    with kept.lock:
        kept.saved.pop(_id(stream), None)
    for session in sessions(runtime, stream):
        await session.close()


def saved(runtime: Runtime, stream: Any) -> list[str]:
    """What is committed in the views of a stream, as JSON texts to keep beside its events."""
    return [text for session in sessions(runtime, stream) for text in session.saved()]


def restore(runtime: Runtime, stream: Any, texts: Iterable[str]) -> None:
    """Take over what :func:`saved` gave for these events, in this process or another, from the stream's next turn on.

    It applies where the events are the same, whatever the stream's id. A text that cannot be read is an event.

    Raises:
        ConfigurationError: ``texts`` is no collection of texts.
    """
    kept = _kept(runtime)
    found = saved_texts(texts, runtime, where="ag2.restore")
    with kept.lock:
        kept.saved.setdefault(_id(stream), []).extend(found)
        while len(kept.saved) > MAX_SAVED:
            del kept.saved[next(iter(kept.saved))]


class LookaheadMiddleware(BaseMiddleware):
    """Sends the model the view instead of the whole history; the stream's history stays as it is.

    Use it as ``Middleware(LookaheadMiddleware, runtime=runtime, policy=policy)``, ahead of other middleware that
    shortens the history. State is kept by the stream's id: give a stream an id of your own to find it again after a
    restart. Below the hard limit no call waits; at the limit one waits up to ``max_wait``.

    In effect twice on one call (on the agent and in ``ask(middleware=)``, say) with the same runtime, policy and
    tenant, the inner one does nothing.

    A runtime that was closed leaves the calls as they are, and says so once (event ``turn.raw``, and a warning of the
    logger ``smoothctx.ag2``).

    The work itself runs in the runtime's pool, not in ``context.spawn_background``: it is bounded there, shared
    between streams, and goes on when this stream's loop ends. What belongs to the stream goes through the stream's
    own facility: that a background call was paid for is put on it as a ``UsageEvent`` of kind ``"compaction"``, so
    that ``reply.usage()`` is complete.

    Args:
        event: the turn's first event, given by the framework.
        context: the turn's context, given by the framework.
        runtime: where the lookaheads run.
        policy: what the agent does with its context. Prompts and tool schemas are not in the history: count them as
            ``reserved_tokens`` where the provider reports no usage.
        tenant: whose conversation it is.
        engine: the agent's own engine, to preload views (see ``Runtime.session``).
        request: the constant part of the agent's requests.
        report_usage: put the usage of background calls on the stream.

    Raises:
        ConfigurationError: naming option, value and what is allowed. It is made for each turn, so the first one raises.
        ClosedError: at the first call, where the runtime was never opened.
    """

    def __init__(
        self,
        event: BaseEvent,
        context: Any,
        *,
        runtime: Runtime,
        policy: Policy,
        tenant: str = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
        report_usage: bool = True,
    ) -> None:
        super().__init__(event, context)
        check_runtime(runtime)
        check_policy(policy)
        check_text("tenant", tenant)
        check_engine(engine)
        check_request(request)
        check_flag("report_usage", report_usage)
        self._runtime = runtime
        self._tenant = tenant
        self._engine = engine
        self._report_usage = report_usage
        self._options = _Options(policy, tenant, engine, request)
        followed = _followed(runtime, self._options)
        self._lines, self._raw = followed.lines, followed.raw

    async def on_llm_call(self, call_next: Any, events: Sequence[BaseEvent], context: Any) -> Any:
        """One model call with the view of ``events``. What it raises is the call's own."""
        if self._in_effect(context):
            return await call_next(events, context)
        held = list(events)  # the storage's live list: it grows while the model answers
        with ExitStack() as turn, self._taking_effect(context):
            session = messages = None
            try:
                messages = read(held)
                session = turn.enter_context(self._lines.using(self._stream(context, messages), messages))
                self._restore(context, session)
            except ClosedError as error:
                self._raw.refused(error, self._runtime)
            except Exception as error:
                self._failed(error, context)
            if session is None or messages is None:
                return await call_next(events, context)
            sent = await self._view(session, messages, context)
            self._tell(session.lookahead, context)
            answered = messages
            try:
                async with session.foreground() as call, self._first_token(call, context):
                    response = await call_next(held if sent is None else sent, context)
                    with self._guarded(context):
                        if not (used := usage_of(response)).estimated:
                            call.report(used)
                answered = [*messages, EventMessage(response)]
                return response
            finally:
                self._tell(session.observe(answered), context)

    async def _view(self, session: Session, messages: list[EventMessage], context: Any) -> list[BaseEvent] | None:
        """What to send in place of the events; ``None`` where that is these events themselves."""
        sent = None
        with self._guarded(context):
            view = await session.commit(messages)
            if len(view) != len(messages) or any(a is not b for a, b in zip(view, messages, strict=True)):
                sent = weave(view, messages)
        return sent

    def _in_effect(self, context: Any) -> bool:
        """Does one like this stand around this call already?"""
        stream, own = _id(context.stream), self._options
        return any(
            not call.over
            and call.runtime is self._runtime
            and call.stream == stream
            and call.options.tenant == own.tenant
            and call.options.policy.same_as(own.policy)
            for call in _calls.get()
        )

    @contextmanager
    def _taking_effect(self, context: Any) -> Iterator[None]:
        call = _Call(self._runtime, self._options, _id(context.stream))
        token = _calls.set((*_calls.get(), call))
        try:
            yield
        finally:
            call.over = True
            _calls.reset(token)

    def _stream(self, context: Any, messages: Sequence[EventMessage]) -> str:
        """The conversation's name. One whose history was cleared is over: what was held of it is forgotten."""
        stream = _id(context.stream)
        for session in self._lines.sessions(stream, tenant=self._tenant):
            if len(session.branch.history) and not session.recognises(messages[:1])[1]:
                session.close_now(Reason.SESSION_CLOSED)
        return stream

    def _restore(self, context: Any, session: Session) -> None:
        kept = _kept(self._runtime)
        with kept.lock:
            texts = kept.saved.pop(_id(context.stream), [])
        if texts:
            session.restore(texts)

    @asynccontextmanager
    async def _first_token(self, call: ForegroundCall, context: Any) -> AsyncIterator[None]:
        """Tell the engine's background of the first streamed token; without an engine nobody asks."""
        if self._engine is None:
            yield
            return

        async def first(_: ModelMessageChunk) -> None:
            call.first_token()

        with ExitStack() as told:
            with self._guarded(context):
                stream = context.stream.where(ModelMessageChunk)
                listener = stream.subscribe(first)
                told.callback(self._unsubscribe, stream, listener, context)
            yield

    def _unsubscribe(self, stream: Any, listener: Any, context: Any) -> None:
        with self._guarded(context):
            stream.unsubscribe(listener)

    def _tell(self, handle: LookaheadHandle | None, context: Any) -> None:
        """Put what a lookahead costs on the stream that started it, once it has ended."""
        if handle is None or not self._report_usage:
            return
        kept = _kept(self._runtime)
        with kept.lock:
            if any(told.flight is handle.flight for told in kept.told):  # paid for once, whoever makes use of it
                return
            kept.told.add(handle)
        telling = self._put_usage(handle, context)
        with self._guarded(context):
            try:
                context.spawn_background(telling)
            except Exception:
                telling.close()  # it will never run
                raise

    async def _put_usage(self, handle: LookaheadHandle, context: Any) -> None:
        with self._guarded(context):
            await handle.wait()
            usage = handle.flight.usage
            if usage.calls and not usage.estimated:
                spent = StreamUsage(
                    prompt_tokens=usage.input_tokens,
                    completion_tokens=usage.output_tokens,
                    total_tokens=usage.total_tokens,
                    cache_read_input_tokens=usage.cached_tokens,
                )
                await context.send(UsageEvent(spent, kind="compaction", label="smoothctx"))

    def _guarded(self, context: Any) -> AbstractContextManager[None]:
        return guarded(lambda error: self._failed(error, context))

    def _failed(self, error: Exception, context: Any) -> None:
        self._runtime.events.error(error, where="ag2.middleware", session=_id(context.stream), tenant=self._tenant)


def _id(stream: Any) -> str:
    found = getattr(stream, "id", stream)
    if not isinstance(found, str | UUID) or not str(found):
        raise ConfigurationError(f"stream={stream!r}: expected a stream, or its id")
    return str(found)


def _kept(runtime: Runtime) -> _Kept:
    """Lives as long as the runtime: held elsewhere, its sessions would keep the runtime alive."""
    check_runtime(runtime)
    kept: _Kept = vars(runtime).setdefault("_smoothctx_ag2", _Kept())
    return kept


def _followed(runtime: Runtime, options: _Options) -> _Followed:
    """The lines of these options, the same for every turn."""
    kept = _kept(runtime)
    with kept.lock:
        found = next((row for row in kept.lines if row.options.same_as(options)), None)
        if found is None:
            lines = Lines(
                runtime,
                policy=options.policy,
                codec=CODEC,
                tenant=options.tenant,
                engine=options.engine,
                request=options.request,
            )
            found = _Followed(options, lines)
        else:
            kept.lines.remove(found)
        kept.lines.append(found)
        del kept.lines[:-MAX_OPTIONS]  # their sessions stay with the runtime, which finds them by their names
        return found
