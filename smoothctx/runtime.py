"""The runtime: owns the task pool, the store, the flights and the sessions of one process."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, TypeVar, final

import anyio
from anyio.from_thread import start_blocking_portal

from .admission import LoadAdmission
from .codec import Codec, OpenAIMessages, check_codec
from .endpoints import Endpoints
from .errors import ClosedError, ConfigurationError, PolicyConflict
from .events import Event, EventSink
from .flight import Executor, LocalExecutor
from .flights import STRAY_S, Flights
from .foreground import Foreground
from .policy import Policy
from .pool import TaskPool, Work
from .probing import Probing, engine_name
from .request import Requests, check_request
from .session import Session
from .states import Reason
from .store import Store, check_store
from .stores import MemoryStore
from .tally import Tally
from .transforms.base import Transform
from .transforms.model import is_plain
from .writer import Writer

T = TypeVar("T")


@final
class Runtime:
    """Runs lookaheads for any number of sessions.

    Use it as an async context manager, or from synchronous code and short-lived event loops through
    :meth:`in_thread`. After :meth:`aclose` no task of it is left.

    Args:
        store: where artifacts and offloaded content are kept; by default in memory, bounded.
        executor: where transforms run; by default on this runtime's loop.
        admission: asked before each lookahead: ``async decide(work) -> "run" | "defer" | "skip"``. By default by the
            load of the engine, see :mod:`smoothctx.admission`; ``AdmitAll()`` switches it off.
        concurrency: lookaheads that run at once. One that takes far longer than usual (60 s where that is unknown)
            gives its slot to one that waits, and goes on; ``concurrency`` at most do so at the same time. One whose
            result only waits to be preloaded holds none: 64 at most do so, each for its policy's ``timeout``.
        max_pending: lookaheads that wait at most; of more the latest of the tenant that has the most is discarded as
            ``queue_full``.
        endpoint_concurrency: calls of transforms in flight to one model endpoint, of all sessions together; an
            engine's own ``max_in_flight`` goes before it. More wait, fairly between tenants and sessions, and
            ``max_pending`` of them at most.
        max_sessions: open sessions; beyond it the least recently used one is closed.
        session_ttl: seconds after which an unused session is closed when room is needed or on the next open.
        clock: seconds, monotonic.
        on_event: called with every :class:`Event`; what it raises is logged and goes no further.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        *,
        store: Store | None = None,
        executor: Executor | None = None,
        admission: Any = None,
        concurrency: int = 2,
        max_pending: int = 256,
        endpoint_concurrency: int = 8,
        max_sessions: int = 100_000,
        session_ttl: float = 86_400.0,
        clock: Callable[[], float] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        for option, value in (
            ("concurrency", concurrency),
            ("max_pending", max_pending),
            ("endpoint_concurrency", endpoint_concurrency),
            ("max_sessions", max_sessions),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{option}={value!r}: expected a whole number of at least 1")
        if isinstance(session_ttl, bool) or not isinstance(session_ttl, int | float) or session_ttl <= 0:
            raise ConfigurationError(f"session_ttl={session_ttl!r}: expected seconds above 0")
        if store is not None:
            check_store(store)
        if clock is not None and not callable(clock):
            raise ConfigurationError(f"clock={clock!r}: expected a callable() -> seconds")
        if on_event is not None and not callable(on_event):
            raise ConfigurationError(f"on_event={on_event!r}: expected a callable(Event)")
        if executor is not None and not callable(getattr(executor, "execute", None)):
            raise ConfigurationError(
                f"executor={executor!r}: expected an object with async execute(transform, request)"
            )
        if admission is not None and not callable(getattr(admission, "decide", None)):
            raise ConfigurationError(f"admission={admission!r}: expected an object with async decide(work)")
        self.now: Callable[[], float] = clock or time.monotonic
        self.events = EventSink(on_event, self.now)
        self.tally = Tally()
        self.requests = Requests()
        self.counters = self.tally.counters
        self.shares_artifacts = store is not None
        self.store: Store = store if store is not None else MemoryStore(clock=self.now)
        self.executor: Executor = executor or LocalExecutor()
        self.endpoints = Endpoints(concurrency=endpoint_concurrency, max_waiting=max_pending)
        self.admission: Any = admission
        if admission is None:
            self.admission = LoadAdmission(self.now, self.events, self.endpoints)
        self._timers: set[asyncio.TimerHandle] = set()
        self._max_sessions = max_sessions
        self._session_ttl = session_ttl
        self._pool = TaskPool(
            concurrency=concurrency,
            max_pending=max_pending,
            clock=self.now,
            admission=self.admission,
            stray_s=STRAY_S,
            on_error=lambda error, where: self.events.error(error, where=where),
        )
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self.flights = Flights(self._pool, self.events, self.tally, self.now)
        self._foregrounds: weakref.WeakKeyDictionary[Any, Foreground] = weakref.WeakKeyDictionary()
        self._foreground = Foreground(self.now)  # of sessions without an engine
        self._probing = Probing(self.events, self.background, self.now)
        self._private: weakref.WeakKeyDictionary[Transform, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._writer = Writer(self.store, self._pool, self.events)
        self._lock = threading.RLock()
        self._open = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Runtime:
        if self._closed:
            raise ClosedError("this Runtime was closed: make a new one")
        if self._open:
            raise ClosedError("this Runtime is open already: enter it once")
        await self._pool.start()
        self._loop = asyncio.get_running_loop()
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, drain: bool = False) -> None:
        """End everything: no task of ours is left afterwards. Calling it again is fine.

        With ``drain`` lookaheads that are queued or running may finish (into the store) first.
        """
        if not self._open:
            self._closed = True
            return
        with self._lock:
            self._closed = True
        self._writer.closing = True
        if not drain:
            self._close_sessions()
        await self._pool.aclose(drain=drain)
        self._close_sessions()
        self._open = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await self._writer.aclose()
        try:
            await self.store.aclose()
        except Exception as error:
            self.events.error(error, where="store.aclose")

    @classmethod
    @contextmanager
    def in_thread(cls, **options: Any) -> Iterator[Runtime]:
        """A runtime on an event loop of its own, in a thread of its own.

        For synchronous callers (``session.commit_sync``) and for servers that run each request on another
        event loop. Models run on the runtime's loop: give it clients that are made there or are safe there.
        """
        runtime = cls(**options)
        with start_blocking_portal(name="smoothctx") as portal:
            portal.call(runtime.__aenter__)
            try:
                yield runtime
            finally:
                portal.call(runtime.aclose)

    @property
    def closed(self) -> bool:
        """Was it closed? (One that was never opened is not.)"""
        return self._closed

    @property
    def is_open(self) -> bool:
        """Was it opened, and not closed since?"""
        return self._open and not self._closed

    # -- sessions --------------------------------------------------------------------------------------------------

    def session(
        self,
        session_id: str,
        *,
        policy: Policy,
        codec: Codec | None = None,
        tenant: str = "default",
        parent: Session | None = None,
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
    ) -> Session:
        """The session of this id and tenant: the open one, or a new one.

        Args:
            policy: what it does with its context; another one for an open session is an error.
            codec: how messages are read; OpenAI-style dicts by default.
            parent: the session whose sub-agent this is: its lookaheads draw on a smaller budget.
            engine: the agent's own engine, to preload the view that a commit will produce. One that can be probed and
                was not is, in the background; a llama.cpp server's slots are used from the next turn after that on.
                Share one object among all sessions on a server: its slots are handed out by it.
            request: the constant part of the agent's request (tools, template options, salt). Its ``"messages"`` are
                those that stand before the history in each call, such as a system prompt that is kept apart.

        Raises:
            ClosedError: the runtime is not open.
            ConfigurationError: wrong values, or another policy for an open id.
        """
        if not isinstance(session_id, str) or not session_id:
            raise ConfigurationError(f"session_id={session_id!r}: expected a string that is not empty")
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy={policy!r}: expected a Policy")
        if not isinstance(tenant, str) or not tenant:
            raise ConfigurationError(f"tenant={tenant!r}: expected a string that is not empty")
        if codec is not None:
            check_codec(codec)
        if parent is not None and not isinstance(parent, Session):
            raise ConfigurationError(f"parent={parent!r}: expected the Session whose sub-agent this is, or None")
        check_request(request)
        with self._lock:
            if self._closed or not self._open:
                raise ClosedError(
                    "the Runtime is not open: use 'async with Runtime() as runtime' or Runtime.in_thread()"
                )
            key = (tenant, session_id)
            found = self._sessions.get(key)
            if found is not None and not found.closed:
                if not found.policy.same_as(policy):
                    raise PolicyConflict(
                        f"session {session_id!r} is open with another policy: close it first, or use another id"
                    )
                self._sessions.move_to_end(key)
                return found
            crowded_out = self._make_room()
            session = Session(
                self,
                session_id,
                policy=policy,
                codec=codec or OpenAIMessages(),
                tenant=tenant,
                parent=parent,
                engine=engine,
                request=request,
            )
            self._sessions[key] = session
        for old, reason in crowded_out:  # outside the lock: a session takes ours under its own
            old.close_now(reason)
        if self.events.heard:
            self.events.emit(
                "session.opened",
                session=session_id,
                tenant=tenant,
                discard=repr(policy.discard),
                transform=policy.transform.name,
                locality=str(policy.transform.locality),
                engine=engine_name(engine),
            )
        self._probing.begin(session)
        return session

    def wrap(
        self, fn: Callable[..., Awaitable[Any]], *, policy: Policy, **options: Any
    ) -> Callable[..., Awaitable[Any]]:
        """Make an async function whose first argument is the messages a lookahead-aware one.

        The keyword ``session=`` of the new function names the conversation (``"default"`` without it);
        ``options`` go to :meth:`session`. The function gets the view and its own arguments, and its result is
        returned as it is.

        Raises:
            ConfigurationError: ``fn`` is not async, or ``policy`` is no policy.
        """
        if not callable(fn) or is_plain(fn):
            raise ConfigurationError(f"wrap({fn!r}): expected an async function of the messages")
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy={policy!r}: expected a Policy")

        @functools.wraps(fn)
        async def call(messages: list[Any], *args: Any, session: str = "default", **kwargs: Any) -> Any:
            mine = self.session(session, policy=policy, **options)
            view = await mine.commit(messages)
            try:
                async with mine.foreground():
                    return await fn(view, *args, **kwargs)
            finally:
                mine.observe(messages)

        return call

    def _make_room(self) -> list[tuple[Session, Reason]]:
        gone: list[tuple[Session, Reason]] = []
        oldest = self.now() - self._session_ttl
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if len(self._sessions) < self._max_sessions and session.used_at >= oldest:
                break
            del self._sessions[key]
            gone.append((session, Reason.EXPIRED if session.used_at < oldest else Reason.EVICTED))
        return gone

    def touch(self, session: Session) -> None:
        """A turn of a session begins: it is the last to go when room is needed."""
        with self._lock:
            key = (session.tenant, session.id)
            if self._sessions.get(key) is session:
                self._sessions.move_to_end(key)
        self._probing.begin(session)

    def forget(self, session: Session) -> None:
        """A session was closed."""
        with self._lock:
            if self._sessions.get((session.tenant, session.id)) is session:
                del self._sessions[(session.tenant, session.id)]

    def _close_sessions(self) -> None:
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close_now(Reason.SHUTDOWN)

    def foreground(self, engine: Any) -> Foreground:
        """The foreground of an engine, shared by every session on it."""
        with self._lock:
            try:
                found = self._foregrounds.get(engine)
                if found is None:
                    found = self._foregrounds[engine] = Foreground(self.now)
            except TypeError:  # None, or an engine that cannot be held weakly
                return self._foreground if engine is None else Foreground(self.now)
            return found

    # -- small background work -------------------------------------------------------------------------------------

    def background(
        self,
        name: str,
        run: Callable[[], Awaitable[Any]],
        session: Session,
        never: Callable[[], None],
        *,
        engine: Any = None,
        idle: bool = False,
    ) -> None:
        """Run something small at lookahead priority; ``never`` is called if it could not be run.

        ``engine`` is what it loads, if anything. ``idle``: it mostly waits for idle time, and holds nobody up.
        """
        work = Work(
            key=name,
            tenant=session.tenant,
            session=session.id,
            child=session.parent is not None,
            due=None,
            timeout_s=600.0,
            name=name,
            engine=engine,
            foreground=None if engine is None else self.foreground(engine),
            run=run,
            on_done=lambda outcome: never() if outcome.reason is not None else None,
        )
        if idle:
            work.on_start = lambda: self._pool.idle(work)
        self._pool.submit(work)

    async def briefly(self, name: str, run: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> bool:
        """Run code that is not ours for so long, on this runtime's loop, while somebody waits for it; did it end?

        Raises:
            Exception: whatever ``run`` raised.
        """
        return await self._pool.briefly(name, run, seconds)

    def later(self, seconds: float, call: Callable[[], None]) -> bool:
        """Call something short on this runtime's loop, ``seconds`` from now; from any thread. Will it be called?"""
        loop = self._loop
        if loop is None or loop.is_closed() or self._closed:
            return False

        def due(timer: list[asyncio.TimerHandle]) -> None:
            self._timers.difference_update(timer)
            call()

        def arm() -> None:
            if not self._closed:
                own: list[asyncio.TimerHandle] = []
                own.append(loop.call_later(seconds, due, own))
                self._timers.update(own)

        try:
            loop.call_soon_threadsafe(arm)
        except RuntimeError:  # closed just now
            return False
        return True

    def soon(self, call: Callable[[], None]) -> None:
        """Call something short on this runtime's loop: now, where that is the running one; from any thread."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            call()
        else:
            self.later(0, call)

    def write(self, tenant: str, key: str, value: bytes) -> None:
        """Put something into the store, in the background. Full means the oldest write is dropped, with an event."""
        self._writer.write(tenant, key, value)

    def pending(self, tenant: str, key: str) -> bytes | None:
        """What waits to be written under a key: it can be read before the store has it."""
        return self._writer.pending(tenant, key)

    def private_id(self, transform: Transform) -> str:
        """Names a transform without a fingerprint, for as long as it lives in this process."""
        with self._lock:
            try:
                number = self._private.get(transform)
                if number is None:
                    number = self._private[transform] = next(self._numbers)
            except TypeError:  # it cannot be held weakly, or not be hashed: nothing of it is shared
                number = next(self._numbers)
            return f"private:{number}"

    def on_loop(self, run: Callable[[], Coroutine[Any, Any, Any]], timeout: float) -> None:
        """For synchronous callers: run something on this runtime's loop, and wait ``timeout`` seconds at most."""
        loop = self._loop
        if loop is None or loop.is_closed() or not loop.is_running():
            return
        try:
            if asyncio.get_running_loop() is loop:
                return  # it would wait for itself
        except RuntimeError:
            pass
        done = _start_on(loop, run)
        if done is None:
            return
        try:
            done.result(timeout)
        except (TimeoutError, CancelledError):
            done.cancel()

    async def join_loop(self, run: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """Run something short on this runtime's loop, from any loop: what a store holds open is bound to ours.

        From another loop it waits ``timeout`` seconds at most.
        """
        loop = self._loop
        if loop is asyncio.get_running_loop():
            await run()
        elif loop is not None and (done := _start_on(loop, run)) is not None:
            there = asyncio.wrap_future(done)
            try:
                with anyio.move_on_after(timeout):
                    await asyncio.wait({there})  # its loop may end under it: that is no cancellation of ours
                if there.done() and not there.cancelled():
                    there.result()
            finally:
                there.cancel()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._open else "new"
        return f"<Runtime {state}, {len(self._sessions)} sessions, {self._pool!r}>"


def _start_on(loop: asyncio.AbstractEventLoop, run: Callable[[], Coroutine[Any, Any, T]]) -> Future[T] | None:
    """Start it on another thread's loop; ``None`` where that does not run any more."""
    if not loop.is_running():
        return None
    call = run()
    try:
        return asyncio.run_coroutine_threadsafe(call, loop)
    except RuntimeError:  # it was closed just now
        call.close()
        return None
