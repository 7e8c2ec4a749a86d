"""The turns of one node: which session they belong to, what the model sees, and what is remembered of it.

Decorator, middleware and pre-model node are thin: each begins a turn here with the messages of its state, gives the
view to the model, and ends the turn with the reply.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from smoothctx import ClosedError, Policy, Runtime, Session
from smoothctx.errors import NoSession
from smoothctx.lines import Lines

from .asked import Asked
from .codec import LangChainMessages
from .identity import Identity, identity
from .notices import Notices
from .options import Tenant, check_turns, tenant_of
from .rewrite import Gap, fill, gaps, own
from .tools import forgets

if TYPE_CHECKING:
    from langchain.agents.middleware.types import ModelRequest

#: views kept for a node that may run again: after a retry or an interrupt it sees what it saw before
MAX_PINS = 256


@dataclass(slots=True)
class Turn:
    """One run of a node. ``view`` is what to send to the model; ``gaps`` say where it differs from the messages.

    Outside a graph, or when the runtime is closed, ``session`` is ``None`` and the view is the messages as they are.
    ``saved``: what to keep in the graph's state where that differs from what came from there, else ``None``.
    ``reply``: the messages that the node adds; set it before the turn ends. ``held``: set it to the view where that
    takes the place of the messages in the state. ``shown``: the view is decided.
    """

    view: list[BaseMessage]
    session: Session | None = None
    saved: list[str] | None = None
    gaps: tuple[Gap, ...] = ()
    reply: Sequence[BaseMessage] = ()
    held: Sequence[BaseMessage] | None = None
    shown: bool = False

    def calling(self) -> AbstractContextManager[object]:
        """The model call itself, where the turn is seen to hold nothing else: background work keeps out of its way."""
        return nullcontext() if self.session is None else self.session.foreground_sync()


class Turns:
    """The turns of one node or middleware, for any number of threads and branches.

    Args:
        runtime: open for as long as the graph is used; ``Runtime.in_thread()`` where the graph is called
            synchronously, or with one event loop per request.
        policy: what happens with the context.
        codec: how messages are read.
        tenant: whose conversations these are: a name, or a function of the run's config.
        engine: the agent's own engine, to preload the view that a commit will produce.
        request: the constant part of the agent's request.
        rewrites: the view goes into the state.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    def __init__(
        self,
        runtime: Runtime,
        policy: Policy,
        *,
        codec: LangChainMessages | None = None,
        tenant: Tenant = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
        rewrites: bool = False,
    ) -> None:
        check_turns(runtime, policy, codec=codec, tenant=tenant, engine=engine, request=request)
        self.runtime = runtime
        self.policy = policy
        self.codec = LangChainMessages() if codec is None else codec
        self.notices = Notices(runtime.events)
        self._asked, self._given = Asked(self.codec), dict(request or {})
        self._tenant = tenant
        self._forgets = rewrites and forgets(runtime, policy)
        self._lines = Lines(runtime, policy=policy, codec=self.codec, engine=engine, request=request)
        self._pins: OrderedDict[tuple[str, str], _Pin] = OrderedDict()
        self._restored: weakref.WeakKeyDictionary[Session, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._dumped: weakref.WeakKeyDictionary[Session, tuple[tuple[str, ...], list[str]]]
        self._dumped = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def turn(
        self,
        messages: Sequence[BaseMessage],
        *,
        place: str | None = None,
        saved: Sequence[str] | None = (),
        due_s: float | None = None,
        asked: ModelRequest[Any] | None = None,
    ) -> AsyncIterator[Turn]:
        """A turn of an asynchronous node.

        Args:
            messages: those of the node's state.
            place: names the place in the graph; by default the node that runs.
            saved: what an earlier turn left in the graph's state; ``None`` where nothing is kept there.
            due_s: a later step of the graph makes the model call, in :meth:`call`: it begins within so many seconds.
            asked: the agent's request, where it is known: what it sends beside its messages.
        """
        with self._open(messages, place, saved, due_s, asked) as turn:
            if turn.session is not None and not turn.shown:
                self._see(turn, messages, await turn.session.commit(messages), saved)
            yield turn

    @contextmanager
    def turn_sync(
        self,
        messages: Sequence[BaseMessage],
        *,
        place: str | None = None,
        saved: Sequence[str] | None = (),
        due_s: float | None = None,
        asked: ModelRequest[Any] | None = None,
    ) -> Iterator[Turn]:
        """:meth:`turn` of a synchronous node."""
        with self._open(messages, place, saved, due_s, asked) as turn:
            if turn.session is not None and not turn.shown:
                self._see(turn, messages, turn.session.commit_sync(messages), saved)
            yield turn

    @contextmanager
    def call(
        self, messages: Sequence[BaseMessage], *, place: str, asked: ModelRequest[Any] | None = None
    ) -> Iterator[None]:
        """The model call of a turn that an earlier step of the graph began with ``due_s``; the turn ends with it."""
        session = self._begun(messages, place)
        if session is None:
            yield
            return
        self._ask(session, asked)
        try:
            with session.foreground_sync():
                yield
        finally:
            session.turn_over()

    def _begun(self, messages: Sequence[BaseMessage], place: str) -> Session | None:
        """The session of an earlier step: of those that are open the one that shares most with these messages."""
        try:
            where = identity()
            tenant = None if where is None else self.tenant(where.config)
            if where is None or tenant is None:
                return None
            open_ones = self._lines.sessions(_bucket(where, place, messages, self.codec), tenant=tenant)
            best = max(reversed(open_ones), key=lambda s: s.recognises(messages), default=None)
            return best if best is not None and best.recognises(messages)[1] else None
        except Exception as error:
            self.runtime.events.error(error, where="turn")
            return None

    @contextmanager
    def _open(
        self,
        messages: Sequence[BaseMessage],
        place: str | None,
        saved: Sequence[str] | None,
        due_s: float | None,
        asked: ModelRequest[Any] | None,
    ) -> Iterator[Turn]:
        """The turn of the node that runs now, before its commit; at its end the session observes the reply."""
        where = identity()
        with ExitStack() as stack:
            session = self._session(stack, where, place, messages)
            if session is None or where is None:
                yield Turn(list(messages))
                return
            self._restore(session, saved or ())
            self._ask(session, asked)
            key = (where.task, place or where.node)
            turn = self._pinned(key, session, messages)
            if turn.shown:  # no commit comes, which would begin the turn
                session.turn_begins()
            try:
                yield turn
            except BaseException:  # it may be tried again, or resume after an interrupt
                self._pin(key, turn, len(messages))
                session.observe(messages)
                raise
            with self._lock:
                self._pins.pop(key, None)
            session.observe([*(messages if turn.held is None else turn.held), *turn.reply], due_s=due_s)

    def _ask(self, session: Session, asked: ModelRequest[Any] | None) -> None:
        """Let the session know what the agent sends beside its messages, where an engine is to be warmed with it."""
        if asked is None or session.engine is None:
            return
        try:
            request = self._asked.read(asked, tools="tools" not in self._given)
        except Exception as error:  # a tool without a schema, say
            said = f"{type(error).__name__}: {error}"
            why = (
                "nothing is preloaded, since the tools that the agent sends cannot be told; request={'tools': [...]} "
                f"names them: {said}"
            )
            if self.policy.preload_kv is not False:
                self.notices.once("request.unread", type(error).__name__, why, error=said)
            request = None
        session.use_request(request)

    def _session(
        self, stack: ExitStack, where: Identity | None, place: str | None, messages: Sequence[BaseMessage]
    ) -> Session | None:
        """The session of these messages. Whatever goes wrong in finding it, the node sees its messages."""
        if where is None:
            return None
        runtime = self.runtime
        tenant = self.tenant(where.config)
        if tenant is None:
            return None
        try:
            bucket = _bucket(where, place or where.node, messages, self.codec)
            parent = _parent(runtime, where, tenant)
            using = self._lines.using(bucket, messages, owner=where.owner, tenant=tenant, parent=parent)
            session = stack.enter_context(using)
        except NoSession:
            return None  # the event ``error`` has said why
        except ClosedError:
            if not runtime.closed:
                raise  # it was never opened: a mistake of the caller's, in the caller's words
            self.notices.once("turn.raw", "closed", "the runtime is closed: the model sees the messages as they are")
            return None
        except Exception as error:
            runtime.events.error(error, where="turn")
            return None
        if not where.namespace and where.thread is not None:
            _roots(runtime)[tenant, where.thread] = session
        if self._forgets:
            self.notices.once(
                "state.unstored",
                "",
                "what is offloaded leaves the state, and the Runtime has no store: its text is gone when the process "
                "ends; give it one, such as Runtime(store=FolderStore(path))",
            )
        return session

    def tenant(self, config: Mapping[str, Any]) -> str | None:
        """Whose run this is; ``None``, and it is said once, where that cannot be told. It is nobody else's then."""
        try:
            return tenant_of(self._tenant, config)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            why = f"tenant={self._tenant!r} could not tell whose run this is ({said}): the model sees the messages as "
            self.notices.once("turn.raw", f"tenant: {type(error).__name__}", why + "they are", error=said)
            return None

    def _see(
        self, turn: Turn, messages: Sequence[BaseMessage], view: list[BaseMessage], saved: Sequence[str] | None
    ) -> None:
        """Put the view into the turn. Whatever goes wrong here, the node sees its messages."""
        try:
            turn.gaps = own(messages, gaps(messages, view))
            turn.view = fill(messages, turn.gaps)
            if saved is not None and turn.session is not None:
                texts = self._texts(turn.session)
                turn.saved = None if texts == list(saved) else texts
        except Exception as error:
            turn.view, turn.gaps = list(messages), ()
            self.runtime.events.error(error, where="turn")
        turn.shown = True

    def _texts(self, session: Session) -> list[str]:
        """``session.saved()``, written out anew only where something else is committed."""
        keys = tuple(applied.artifact.key for applied in session.branch.applied)
        known = self._dumped.get(session)
        if known is None or known[0] != keys:
            known = self._dumped[session] = (keys, session.saved())
        return list(known[1])

    def _restore(self, session: Session, saved: Sequence[str]) -> None:
        """Take over what the state holds; reading it costs, so only what is new to this session."""
        with self._lock:
            known = self._restored.get(session, ())
            if saved:
                self._restored[session] = tuple(saved)
        session.restore(text for text in saved if text not in known)

    # -- a node that runs again ------------------------------------------------------------------------------------

    def _pin(self, key: tuple[str, str], turn: Turn, length: int) -> None:
        session = turn.session
        if session is None or not turn.shown:
            return
        chain = session.branch.history.chain
        if length >= len(chain):
            return
        with self._lock:
            self._pins[key] = _Pin(chain[length], turn.gaps, turn.saved)
            self._pins.move_to_end(key)
            while len(self._pins) > MAX_PINS:
                self._pins.popitem(last=False)

    def _pinned(self, key: tuple[str, str], session: Session, messages: Sequence[BaseMessage]) -> Turn:
        with self._lock:
            pin = self._pins.get(key)
        if pin is not None:
            chain = session.branch.history.chain
            n = len(messages)
            if n < len(chain) and chain[n] == pin.digest and session.recognises(messages)[1] == n:
                return Turn(fill(messages, pin.gaps), session, pin.saved, pin.gaps, shown=True)
        return Turn(list(messages), session)


@dataclass(frozen=True, slots=True)
class _Pin:
    """What the view of a task was made of, and the digest of the messages behind it."""

    digest: bytes
    gaps: tuple[Gap, ...]
    saved: list[str] | None


def _bucket(where: Identity, place: str, messages: Sequence[BaseMessage], codec: LangChainMessages) -> str:
    """A name for the conversation, alike in every turn and process. Without a thread its opening names it."""
    thread = where.thread
    if thread is None:
        opening = next((m for m in messages if getattr(m, "type", "") == "human"), None)
        seen = b"" if opening is None else codec.visible(opening)
        thread = "opening-" + hashlib.blake2b(seen, digest_size=8).hexdigest()
    return "/".join(part for part in (thread.replace("/", "//"), where.namespace, place) if part)


#: of each runtime the root agent's session by tenant and thread: the parent of the sub-agents on that thread
_ROOTS: weakref.WeakKeyDictionary[Runtime, weakref.WeakValueDictionary[tuple[str, str], Session]]
_ROOTS = weakref.WeakKeyDictionary()


def _roots(runtime: Runtime) -> weakref.WeakValueDictionary[tuple[str, str], Session]:
    return _ROOTS.setdefault(runtime, weakref.WeakValueDictionary())


def _parent(runtime: Runtime, where: Identity, tenant: str) -> Session | None:
    if not where.namespace or where.thread is None:
        return None
    root = _roots(runtime).get((tenant, where.thread))
    return root if root is not None and not root.closed else None
