"""A session: one conversation. Follows the caller's messages, starts lookaheads, commits them at boundaries.

``observe`` and ``commit`` are the whole of it for most callers. Nothing here blocks: state is changed under a
lock that is never held over an await, and what goes wrong inside becomes an event while the turn goes on with
the view it had.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from .archive import Archive
from .branch import Branch
from .codec import Codec, check_messages
from .cuts import Run, fresh, plan, source_tokens
from .errors import ClosedError, ConfigurationError, HandleNotReady, MessageError, StaleHandle
from .flight import dump_artifact, load_artifact
from .forecast import Forecast
from .handle import LookaheadHandle
from .history import Change
from .launch import Launcher
from .policy import Immediate, Policy, Salvage
from .receipts import Receipt
from .serving import Serving
from .states import FINAL, WORKING, HandleState, Reason
from .transforms.base import Size, Transform
from .transforms.isolate import Isolate
from .transforms.offload import PAGE
from .usage import Usage
from .view import Artifact, Replacement

if TYPE_CHECKING:
    from .runtime import Runtime

#: receipts kept per session
MAX_RECEIPTS = 1000
#: artifacts held in memory per session, whatever their size
MAX_ARTIFACTS = 64
#: a run that did not shrink is not tried again before it has grown by this factor
BARREN_GROWTH = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchInfo:
    """What a session holds, for a person to read.

    ``digest`` names the end of the run in the history; ``current`` says that the present history contains it;
    ``in_view`` that it is applied now. Sizes in tokens and messages.
    """

    digest: str
    transform: str
    start: int
    end: int
    tokens: int
    current: bool
    in_view: bool


class ForegroundCall:
    """A model call that the caller makes itself: tell us of its first token."""

    def __init__(self, first_token: Callable[[], None]) -> None:
        self._first_token = first_token

    def first_token(self) -> None:
        """The first token came: background prefill still waits, background decode may go on."""
        self._first_token()


@final
class Session:
    """One conversation of one tenant. Get it from ``runtime.session(...)``."""

    def __init__(
        self,
        runtime: Runtime,
        session_id: str,
        *,
        policy: Policy,
        codec: Codec,
        tenant: str,
        parent: Session | None,
        engine: Any,
        request: Mapping[str, Any] | None,
    ) -> None:
        self.id = session_id
        self.tenant = tenant
        self.policy = policy
        self.codec = codec
        self.parent = parent
        self.engine = engine
        self.request: Mapping[str, Any] = dict(request or {})
        #: one per boundary that rewrote the view, oldest first; the last 1,000 are kept
        self.receipts: deque[Receipt] = deque(maxlen=MAX_RECEIPTS)
        self.closed = False
        self._runtime = runtime
        self._lock = threading.RLock()
        self.branch = Branch(codec, policy.token_counter)
        self._forecast = Forecast()
        self._live: LookaheadHandle | None = None
        self._explicit: list[LookaheadHandle] = []
        self._finishing: list[LookaheadHandle] = []  # of dead branches, under `Finish`
        self._artifacts: OrderedDict[str, Artifact] = OrderedDict()
        self._committed: set[str] = set()
        #: texts that every summary carries word for word
        self.pins: tuple[str, ...] = ()
        #: names of tasks that every summary lists word for word
        self.tasks: tuple[str, ...] = ()
        self._barren: tuple[str | None, int] | None = None
        self._outgrown = False  # the last result was dropped because the tail had outgrown it
        self._said: dict[str, str] = {}  # by the event's name
        # the last rewritten view, frozen as it was sent: to recognise it as the caller's new list
        self._base: list[Any] | None = None
        self._first_commit = True
        self._restored = False
        self._serving = Serving(runtime, self)
        self._archive = Archive(runtime, self)
        self._launcher = Launcher(runtime, self, self._serving, self._archive)
        self._token = object()
        self.used_at = runtime.now()

    # -- the two calls of every turn -------------------------------------------------------------------------

    def observe(self, messages: Sequence[Any]) -> LookaheadHandle | None:
        """Segment boundary: the model's reply (or a tool result) is in ``messages``.

        Returns at once, from any thread: the lookahead that it started, or the live one of this branch, else
        ``None``. Never raises for bad messages or a failing transform: those become events.
        """
        try:
            with self._lock:
                if self.closed:
                    return None
                now = self.used_at = self._runtime.now()
                if not isinstance(messages, list | tuple):
                    check_messages(self.codec, messages)
                change = self._sync(messages, tail_only=True)
                self._serving.end(self._token)
                if messages and self.branch.history.last_assistant == len(self.branch.history) - 1:
                    self._forecast.rested(now)
                return self._consider(messages, change)
        except Exception as error:
            self._error(error, "observe")
            return None

    async def commit(self, messages: Sequence[Any]) -> list[Any]:
        """Turn boundary: returns what to send to the model.

        Everything that is not replaced is the caller's own message object, in order. Below the hard limit it
        never waits. At the hard limit it waits at most ``max_wait`` for a promoted lookahead, then falls back.

        Raises:
            MessageError: when ``messages`` is not a list. A malformed message in it is passed through.
        """
        started = self._runtime.now()
        if self._first_commit:
            await self._launcher.recovered()
        view = self._boundary(messages, None)
        if isinstance(view, LookaheadHandle):
            with self._standing():
                await self._launcher.wait_for(view, self._patience(view))
            view = self._boundary(messages, self._runtime.now() - started)
        assert not isinstance(view, LookaheadHandle)
        return view

    def commit_sync(self, messages: Sequence[Any]) -> list[Any]:
        """:meth:`commit` for synchronous callers (not on the runtime's own loop; see ``Runtime.in_thread``)."""
        started = self._runtime.now()
        if self._first_commit:
            self._launcher.recovered_sync()
        view = self._boundary(messages, None)
        if isinstance(view, LookaheadHandle):
            with self._standing():
                self._launcher.wait_for_sync(view, self._patience(view))
            view = self._boundary(messages, self._runtime.now() - started)
        assert not isinstance(view, LookaheadHandle)
        return view

    def commit_now(self, messages: Sequence[Any]) -> list[Any]:
        """:meth:`commit` for callers that may not wait at all, such as a synchronous hook on an event loop's thread.

        At the hard limit the lookahead is promoted and the fallback is applied at once; the result supersedes it at
        a later boundary. What another process left in the store is applied from the next boundary on.
        """
        if self._first_commit:
            self._launcher.recover_later()
        view = self._boundary(messages, None)
        if isinstance(view, LookaheadHandle):
            view = self._boundary(messages, 0.0)
        assert not isinstance(view, LookaheadHandle)
        return view

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """The turn waits for background work, which must not keep out of this turn's way meanwhile."""
        self._serving.end(self._token)
        try:
            yield
        finally:
            self._serving.begin(self._token)

    # -- explicit work ---------------------------------------------------------------------------------------

    def schedule_transform(
        self,
        kind: str | Transform,
        messages: Sequence[Any],
        *,
        target_segments: Sequence[int] | None = None,
        preload_kv: bool | None = None,
        **options: Any,
    ) -> LookaheadHandle:
        """Schedule a transform of your own choice and return its handle at once.

        Args:
            kind: a transform, or a name such as ``"summarize"``: the policy's transform of that name, or a new
                one made with ``options``.
            messages: the history as it is now.
            target_segments: a contiguous run of indexes into ``smoothctx.segments(messages)``; by default what
                the policy would rewrite now.
            preload_kv: overrides the policy's.

        Raises:
            MessageError: a malformed message, by index and field.
            ConfigurationError: an unknown kind, wrong options, or a run that may not be rewritten.
            ClosedError: the session is closed.
        """
        with self._lock:
            if self.closed:
                raise ClosedError(
                    f"session {self.id!r} is closed: open it again with runtime.session({self.id!r}, ...)"
                )
            check_messages(self.codec, messages)
            transform = self._launcher.transform(kind, options)
            self._sync(messages)
            if target_segments is not None:
                run: Run | None = self._launcher.target(target_segments)
            elif isinstance(transform, Isolate):
                run = self._launcher.whole()
            else:
                run = self._plan(_keep(transform), _expected(transform, 0))
            if run is None:
                raise ConfigurationError(
                    f"schedule_transform({transform.name!r}): there is nothing that may be rewritten now "
                    "(only finished segments before the newest one)"
                )
            handle = self._launch(messages, transform, run, explicit=True, preload_kv=preload_kv)
            if len(self._explicit) > MAX_ARTIFACTS:
                self._drop(self._explicit.pop(0), Reason.EVICTED)
            self._explicit.append(handle)
            return handle

    def pin(self, text: str) -> None:
        """Mark a text that every summary has to carry word for word."""
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(f"pin({text!r}): expected a text that is not empty")
        with self._lock:
            if text not in self.pins:
                self.pins = (*self.pins, text)

    def live_tasks(self, names: Sequence[str]) -> None:
        """Name the tasks (such as running sub-agents) that a summary must list word for word."""
        if isinstance(names, str) or not all(isinstance(n, str) and n.strip() for n in names):
            raise ConfigurationError(f"live_tasks({names!r}): expected a list of names, none of them empty")
        with self._lock:
            self.tasks = tuple(names)

    async def retrieve(self, id: str, offset: int = 0, limit: int = PAGE) -> str:
        """The ``retrieve`` tool of this session: a page of offloaded content, by characters.

        Its schema is ``Offload.tool_schema``: declare it from the first turn on. Errors come back as text, for the
        model; only what this session's tenant offloaded can be read.
        """
        return await self._launcher.retrieve(id, offset, limit)

    # -- the engine ------------------------------------------------------------------------------------------

    def request_options(self) -> dict[str, Any]:
        """What to merge into the next model call on the agent's engine (slot, salt, priority)."""
        return self._serving.request_options()

    @asynccontextmanager
    async def foreground(self) -> AsyncGenerator[ForegroundCall]:
        """Tell us of a model call that you make yourself, so that background work keeps out of its way."""
        who = object()
        self._serving.begin(who)
        try:
            yield ForegroundCall(lambda: self._serving.first_token(who, self._token))
        finally:
            self._serving.end(who)

    # -- life ------------------------------------------------------------------------------------------------

    def fork(self, new_id: str) -> Session:
        """A session of its own that starts with everything this one holds; its branch goes its own way."""
        if self.closed:
            raise ClosedError(f"session {self.id!r} is closed: nothing is left to fork from")
        other = self._runtime.session(
            new_id,
            policy=self.policy,
            codec=self.codec,
            tenant=self.tenant,
            parent=self.parent,
            engine=self.engine,
            request=self.request,
        )
        self.share_with(other)
        return other

    def share_with(self, other: Session) -> None:
        """Give another session what this one holds: its artifacts (which apply where their digests match) and pins."""
        with self._lock:  # one lock at a time: two sessions may fork into each other
            artifacts, committed, pins = dict(self._artifacts), set(self._committed), self.pins
            tasks, archived = self.tasks, self._archive.head
        with other._lock:
            other._artifacts.update(artifacts)
            other._committed |= committed
            other._restored = True
            other._trim()
            other.pins = (*pins, *(p for p in other.pins if p not in pins))
            other.tasks = other.tasks or tasks
            other._archive.head = other._archive.head or archived

    def saved(self) -> list[str]:
        """What is committed in the view, as texts that another process can :meth:`restore` from. JSON, one each.

        Left out is what may not leave the process: the work of a model without an identity, and fallbacks.
        """
        with self._lock:
            shown = [a.artifact for a in self.branch.applied if a.artifact.durable]
            return [dump_artifact(self.codec, artifact).decode() for artifact in shown]

    def restore(self, saved: Iterable[str]) -> None:
        """Take over what :meth:`saved` gave, here or elsewhere. It applies where its digests match, from the next
        commit on. A text that cannot be read is an event, and nothing else."""
        for text in saved:
            try:
                artifact = load_artifact(self.codec, text.encode())
            except Exception as error:
                self._error(error, "restore")
                continue
            with self._lock:
                if artifact.key not in self._committed:
                    self.adopt(artifact)

    def recognises(self, messages: Sequence[Any]) -> tuple[bool, int]:
        """Do these messages go on where this session is, and how many at their head are the same?

        They do when they begin with the whole history that it holds, or with the view that it returned last. Nothing
        changes by asking.
        """
        try:
            with self._lock:
                history, base = self.branch.history, self._base
                if history.unchanged(messages):
                    return True, len(history)
                if base is not None and len(messages) >= len(base) and self.codec.same(messages[: len(base)], base):
                    return True, len(base)
                shared = history.shared(messages)
                return shared == len(history), shared
        except Exception as error:
            self._error(error, "recognises")
            return False, 0

    def branches(self) -> list[BranchInfo]:
        """Every artifact that the session holds, newest last, for a person to read."""
        with self._lock:
            shown = {a.artifact.key for a in self.branch.applied}
            return [
                BranchInfo(
                    digest=a.replacement.end_digest.hex(),
                    transform=a.transform,
                    start=a.replacement.start,
                    end=a.replacement.end,
                    tokens=a.tokens,
                    current=a.replacement.valid(self.branch.history),
                    in_view=a.key in shown,
                )
                for a in self._artifacts.values()
            ]

    async def close(self) -> None:
        """End the session: its lookaheads are cancelled, what it held is forgotten. Closing twice is fine."""
        self.close_now(Reason.SESSION_CLOSED)

    def close_now(self, reason: Reason) -> None:
        """:meth:`close` without waiting for anything (it never does)."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for handle in [*self._handles(), *self._finishing]:
                self._drop(handle, reason)
            self._live, self._explicit, self._finishing = None, [], []
            self._serving.end(self._token)
            self._serving.close()
            self._archive.close()
            self._artifacts.clear()
            self._base = None
        self._runtime.forget(self)

    @property
    def lookahead(self) -> LookaheadHandle | None:
        """The live handle of this branch, if there is one."""
        live = self._live
        return live if live is not None and live.state not in FINAL else None

    def __repr__(self) -> str:
        return f"<Session {self.id!r} {self.branch.messages} messages, {self.branch.tokens} tokens, {self._live!r}>"

    # -- for handles and flights -------------------------------------------------------------------------------

    def commit_handle(self, handle: LookaheadHandle, messages: Sequence[Any]) -> list[Any]:
        """What ``handle.commit`` does."""
        with self._lock:
            if self.closed:
                raise ClosedError(f"session {self.id!r} is closed")
            check_messages(self.codec, messages)
            if handle.flight.opening is not None:
                self._sync(messages)
                made = handle.flight.plan
                chain = self.branch.history.chain
                if made.end >= len(chain) or chain[made.end] != made.end_digest:
                    self._drop(handle, Reason.DIGEST_MISMATCH)
                    raise StaleHandle(
                        f"lookahead {handle.id} does not fit these messages: the history up to message {made.end} "
                        "is not the one that the opening was made from"
                    )
                if handle.move(HandleState.COMMITTED):
                    self._account(handle)
                    self._runtime.count("committed")
                    self._emit("lookahead.committed", handle=handle.id, how="ready", saved=0)
                    self._forget_handle(handle)
                return list(handle.flight.opening)
            self._sync(messages)
            artifact = handle.flight.artifact
            if artifact is None:
                raise HandleNotReady(f"lookahead {handle.id} has no result")
            if handle.state is HandleState.COMMITTED:
                if not any(a.artifact.key == artifact.key for a in self.branch.applied):
                    raise StaleHandle(f"lookahead {handle.id} was committed and is not part of this branch any more")
                return self.branch.project(messages)
            if handle.state is not HandleState.READY:  # the messages are of another branch, or its base was replaced
                raise StaleHandle(f"lookahead {handle.id} was dropped with its branch ({handle.reason})")
            refusal = self.branch.refusal(artifact)
            if refusal is not None:
                self._drop(handle, refusal)
                raise StaleHandle(
                    f"lookahead {handle.id} does not fit these messages ({refusal}): the history up to message "
                    f"{artifact.replacement.end} is not the one it was made from, or ends there"
                )
            self._apply(handle, messages, how="ready", waited=0.0)
            return self._sent(messages)

    def promote_handle(self, handle: LookaheadHandle) -> None:
        """What ``handle.promote`` does."""
        if handle.state in WORKING:
            self._emit("lookahead.promoted", handle=handle.id)
            self._runtime.promote(handle.flight)
            self._serving.poke()

    def discard_handle(self, handle: LookaheadHandle, reason: Reason) -> None:
        """What ``handle.discard`` does."""
        with self._lock:
            self._drop(handle, reason)

    def held(self, key: str) -> Artifact | None:
        """An artifact of this key that an earlier lookahead left."""
        return self._artifacts.get(key)

    def adopt(self, artifact: Artifact) -> None:
        """Take over what another process committed: it applies where its digests match, from the next commit on."""
        with self._lock:
            self._artifacts[artifact.key] = replace(artifact, created=self._runtime.now())
            self._committed.add(artifact.key)
            self._restored = True
            self._trim()

    def ended(self, handle: LookaheadHandle, reason: Reason | None, error: Exception | None) -> None:
        """The flight is over. Called on the runtime's loop."""
        with self._lock:
            if handle.state in FINAL:
                return
            flight = handle.flight
            if reason is None and flight.artifact is not None:
                if not flight.plan.opening:  # which replaces nothing: nobody else could make anything of it
                    self._remember(flight.artifact)
                handle.move(HandleState.READY)
                self._emit(
                    "lookahead.ready",
                    handle=handle.id,
                    transform=handle.transform.name,
                    tokens=flight.artifact.tokens,
                    warm=flight.artifact.warm,
                )
                if flight.started_at is not None:
                    self._forecast.work.add(flight.busy_s)
                if handle in self._finishing:
                    self._drop(handle, Reason.BRANCH_DIVERGED)  # its artifact is held in case the branch comes back
                return
            reason = reason or Reason.FAILED
            if reason is Reason.NOT_SMALLER:
                self._barren = (handle.transform.fingerprint, flight.plan.source_tokens)
            failed = reason in (Reason.FAILED, Reason.TIMEOUT, Reason.INVALID_OUTPUT)
            moved = handle.move(HandleState.FAILED if failed else HandleState.DISCARDED, reason, error)
            if moved and failed:
                self._runtime.count("failed")
                self._emit(
                    "lookahead.failed", handle=handle.id, reason=str(reason), error=f"{type(error).__name__}: {error}"
                )
            elif moved:
                self._runtime.count_stale(reason)
                self._emit("lookahead.discarded", handle=handle.id, reason=str(reason), error=str(error or ""))
            self._runtime.wasted(flight, reason)
            self._forget_handle(handle)

    def working(self) -> bool:
        """Is any lookahead of this session under way or waiting to be committed?"""
        return bool(self._handles())

    def urgent(self) -> bool:
        """Is a turn waiting for one of this session's lookaheads?"""
        return any(h.promoted for h in self._handles())

    def hurried(self, rate: float | None, artifact: Artifact) -> bool:
        """Is idle time alone too little to preload the view of ``artifact`` at ``rate`` tokens per second?"""
        with self._lock:
            branch, policy = self.branch, self.policy
            end = artifact.replacement.end
            remaining = (
                artifact.tokens + branch.history.tokens[-1] - branch.history.tokens[min(end, len(branch.history))]
            )
            limit = policy.limit_tokens(policy.hard_limit)
            return self._forecast.hurried(rate, remaining, branch.tokens + policy.reserved_tokens, limit)

    def preview(self, artifact: Artifact, messages: Sequence[Any]) -> list[Any]:
        """The view that committing ``artifact`` to these messages would give (for preload)."""
        with self._lock:
            return self.branch.preview(artifact, messages)

    # -- the boundary ------------------------------------------------------------------------------------------

    def _boundary(self, messages: Sequence[Any], waited: float | None) -> list[Any] | LookaheadHandle:
        """One turn boundary. ``waited`` is None the first time: then it may return a handle to wait for."""
        if not isinstance(messages, list | tuple):
            check_messages(self.codec, messages)
        try:
            with self._lock:
                if self.closed:
                    return list(messages)
                return self._decide(messages, waited)
        except Exception as error:
            self._error(error, "commit")
            return self._as_it_was(messages)

    def _decide(self, messages: Sequence[Any], waited: float | None) -> list[Any] | LookaheadHandle:
        policy = self.policy
        change: Change | None = None
        if waited is None:
            now = self.used_at = self._runtime.now()
            self._runtime.touch(self)
            self._serving.begin(self._token)
            change = self._sync(messages)
            branch = self.branch
            self._first_commit = False
            restored, self._restored = self._restored, False
            if restored:  # of an earlier process, or of the session it forked from
                self._salvage(messages, branch.tokens)
                branch.recalibrate()
            self._forecast.boundary(now, branch.history.tokens[-1])
            if policy.max_message_tokens is not None:
                self._offload_entries(messages)
        else:
            self._sync(messages)  # while we waited the list may have been edited, or another one committed
        branch = self.branch
        if branch.fits(policy):
            self._commit_ready(messages, at_limit=False)
            if waited is None:
                self._consider(messages, change)
            return self._sent(messages)
        self._commit_ready(messages, at_limit=True, how="ready" if waited is None else "promoted", waited=waited or 0.0)
        if branch.fits(policy) or policy.overrun == "raw":
            if branch.fits(policy) or waited is None:
                self._consider(messages, None)
            return self._sent(messages)
        if policy.overrun == "promote" and waited is None:
            handle = self._consider(messages, None, due=True)
            if handle is not None and handle.state in WORKING and self._patience(handle) > 0:
                handle.promote()
                return handle
        self._fall_back(messages, waited or 0.0)
        return self._sent(messages)

    def _patience(self, handle: LookaheadHandle) -> float:
        """How long the turn may wait for this handle: at most ``max_wait``, nothing when it cannot make it."""
        remaining = handle.flight.remaining_s(self._forecast.work.value)
        if remaining is not None and remaining > self.policy.max_wait:
            return 0.0
        return self.policy.max_wait

    def _sync(self, messages: Sequence[Any], *, tail_only: bool = False) -> Change:
        if self._base is not None and not self.branch.history.continues(messages, tail_only=tail_only):
            self._rebase(messages)
        branch = self.branch  # after a rebase it is another one
        change, lost = branch.sync(messages, tail_only=tail_only)
        if change.error is not None:
            self._say("message.unreadable", str(change.error), error=str(change.error))
        else:
            self._said.pop("message.unreadable", None)
        if change.diverged:
            self._diverged(messages, lost)
        elif len(branch.history) > change.previous:
            # A branch that comes back grows into it, or past the question that an earlier commit would have swallowed.
            asked = branch.history.last_user >= change.previous
            self._salvage(messages, branch.tokens, beyond=-1 if asked else change.previous - 1)
        return change

    def _diverged(self, messages: Sequence[Any], lost: Sequence[Any]) -> None:
        """Another branch: drop what does not match any more, apply what an earlier commit left for this one."""
        branch, policy = self.branch, self.policy
        before = branch.tokens
        for handle in self._handles():
            r = handle.flight.plan
            if Replacement(
                start=r.start, end=r.end, start_digest=r.start_digest, end_digest=r.end_digest, edits=()
            ).valid(branch.history):
                continue
            running = handle.state in WORKING
            if isinstance(policy.discard, Immediate | Salvage) or not running:
                self._drop(handle, Reason.BRANCH_DIVERGED)
            else:
                self._forget_handle(handle)  # it finishes into the store
                self._finishing.append(handle)
        for applied in lost:
            fits = applied.artifact.replacement.valid(branch.history)
            reason = Reason.BRANCH_DIVERGED if fits else Reason.DIGEST_MISMATCH
            self._emit("view.dropped", key=applied.artifact.key, reason=str(reason))
            if isinstance(policy.discard, Immediate):
                self._artifacts.pop(applied.artifact.key, None)
        if isinstance(policy.discard, Immediate):
            for key in [k for k, a in self._artifacts.items() if not a.replacement.valid(branch.history)]:
                del self._artifacts[key]
            self._committed &= self._artifacts.keys()
        self._salvage(messages, before)

    def _salvage(self, messages: Sequence[Any], before: int, beyond: int = -1) -> None:
        """Earlier commits that hold on this branch and end behind ``beyond``, the one that reaches furthest first."""
        branch = self.branch
        held = [
            a
            for k, a in self._artifacts.items()
            if k in self._committed and a.replacement.end > beyond and a.replacement.valid(branch.history)
        ]
        for artifact in sorted(held, key=lambda a: a.replacement.end, reverse=True):
            r = artifact.replacement
            shown = [o.artifact.replacement for o in branch.applied]
            if any(o.start < r.end and r.start < o.end and o.end >= r.end for o in shown):
                continue  # what is in the view reaches as far
            if branch.refusal(artifact) is not None:
                continue
            branch.apply(artifact, messages)
            self._runtime.count("salvaged")
            self._emit("view.salvaged", key=artifact.key, start=r.start, end=r.end)
            self._receipt(artifact, "salvaged", before, 0.0, None)

    def _rebase(self, messages: Sequence[Any]) -> None:
        """Rewrite mode: the caller's list begins with the view we returned. That view is the history now."""
        base = self._base
        if base is None or len(messages) < len(base):
            return
        if not self.codec.same(messages[: len(base)], base):
            return
        self._archive.keep()
        self._base = None
        old, self.branch = self.branch, Branch(self.codec, self.policy.token_counter)
        self.branch.inherit(old, len(base))
        for handle in self._handles():
            self._drop(handle, Reason.SUPERSEDED)
        self._emit("view.rebased", messages=len(base))

    def _commit_ready(
        self, messages: Sequence[Any], *, at_limit: bool, how: str = "ready", waited: float = 0.0
    ) -> None:
        branch, policy = self.branch, self.policy
        for handle in self._handles():
            artifact = handle.flight.artifact
            usable = handle.state is HandleState.READY or (at_limit and handle.state in WORKING)
            if artifact is None or not usable or handle.flight.plan.opening:
                continue
            refusal = branch.refusal(artifact)
            if refusal is not None:
                self._drop(handle, refusal)
                continue
            if not at_limit and not handle.explicit:
                if policy.commit == "hard_limit":
                    continue
                weighed = branch.weigh(artifact, messages)
                size = (weighed.after + policy.reserved_tokens, weighed.messages_after)
                again = policy.reached(*size) and not artifact.warm and self._recut_helps(handle)
                if policy.over(policy.hard_limit, *size) or again:
                    self._outgrown = True
                    self._drop(handle, Reason.SUPERSEDED)  # the tail outgrew it: the next run covers more
                    continue
                if weighed.saved < weighed.rebilled and not artifact.warm:
                    continue  # promise 9: an edit that re-bills more than it saves waits
            self._apply(handle, messages, how=how, waited=waited)

    def _recut_helps(self, handle: LookaheadHandle) -> bool:
        """Is a new run worth more than this result, which leaves the view above the trigger? Once in a row at most:
        where the tail outgrows every run, a late result is better than none."""
        if self._outgrown:
            return False
        run = self._plan(_keep(handle.transform), _expected(handle.transform, self.branch.history.tokens[-1]))
        return run is not None and run.end > handle.run.end

    def _apply(self, handle: LookaheadHandle, messages: Sequence[Any], *, how: str, waited: float) -> None:
        artifact = handle.flight.artifact
        assert artifact is not None
        if any(a.artifact.key == artifact.key for a in self.branch.applied):  # another handle of it was faster
            handle.move(HandleState.COMMITTED)
            handle.receipt = next((r for r in reversed(self.receipts) if r.key == artifact.key), None)
            self._account(handle)
            self._runtime.count("committed")
            self._emit("lookahead.committed", handle=handle.id, how=how, saved=0)
            self._forget_handle(handle)
            return
        before = self.branch.tokens
        self.branch.apply(artifact, messages)
        self._outgrown = False
        self._remember(artifact)
        self._committed.add(artifact.key)
        handle.move(HandleState.COMMITTED)
        self._serving.committed(artifact)
        self._launcher.name(artifact)
        handle.receipt = self._receipt(artifact, how, before, waited, handle)
        self._account(handle)
        self._runtime.count("committed")
        self._emit("lookahead.committed", handle=handle.id, how=how, saved=before - self.branch.tokens)
        self._forget_handle(handle)

    def _fall_back(self, messages: Sequence[Any], waited: float) -> None:
        """Drop whole oldest segments until ``land_at``: behind what is already rewritten, else everything old."""
        branch, policy = self.branch, self.policy
        before = branch.tokens
        done = max((a.artifact.replacement.end for a in branch.applied), default=0)
        for behind in (done, 0) if done else (0,):
            run = plan(
                branch.history,
                branch.edits,
                policy,
                _keep(policy.fallback),
                land=policy.land_at,
                scale=branch.scale,
                drop_pinned=False,
                behind=behind,
            )
            if run is None:
                continue
            artifact = self._launcher.removal(run)
            if branch.refusal(artifact) is not None:
                continue
            weighed = branch.weigh(artifact, messages)
            size = (weighed.after + policy.reserved_tokens, weighed.messages_after)
            if policy.over(policy.hard_limit, *size) and behind:
                continue
            if weighed.saved <= 0:
                continue
            branch.apply(artifact, messages)
            self._remember(artifact)
            self._committed.add(artifact.key)
            self._runtime.count("fallbacks")
            self._receipt(artifact, "fallback", before, waited, None)
            self._emit("fallback.applied", start=run.start, end=run.end, saved=before - branch.tokens, waited_s=waited)
            break
        if not branch.fits(policy):
            self._say(
                "view.oversized",
                f"{len(branch.history)}",
                tokens=branch.tokens,
                why="pinned texts and the newest segment alone exceed the hard limit",
            )

    def _offload_entries(self, messages: Sequence[Any]) -> None:
        """A single result larger than ``max_message_tokens`` is offloaded before the model ever sees it."""
        branch, limit = self.branch, self.policy.max_message_tokens or 0
        for i in range(branch.sent, len(branch.history)):
            if branch.history.span(i, i + 1) <= limit or self.codec.role(messages[i]) != "tool":
                continue
            if any(e.start <= i < e.end and (e.end - e.start > 1 or not e.messages) for e in branch.edits):
                continue  # it is not in the view
            artifact = self._launcher.entry(messages[i], i)
            if artifact is not None and branch.refusal(artifact) is None:
                branch.apply(artifact, messages)
                self._remember(artifact)
                self._committed.add(artifact.key)

    # -- starting ------------------------------------------------------------------------------------------------

    def _consider(
        self, messages: Sequence[Any], change: Change | None, *, due: bool = False, again: bool = True
    ) -> LookaheadHandle | None:
        """Start a lookahead if it is time to. Returns the live handle, if any."""
        live = self._live
        if live is not None and live.state not in FINAL:
            self._serving.grew(live, messages)
            return live
        if change is not None and change.error is not None:
            return None  # what stands behind an unreadable message is unknown: nothing is started for it
        branch, policy = self.branch, self.policy
        tokens = branch.tokens + policy.reserved_tokens
        if not due and not policy.reached(tokens, branch.messages):
            if self.engine is None and self._forecast.work.value is None:
                return None  # nothing is known of how long it takes: the trigger says when
            limit = policy.limit_tokens(policy.hard_limit)
            early = policy.over(policy.land_at, tokens, branch.messages) and self._forecast.late(
                tokens, limit, self._work()
            )
            if not early:
                return None
        transform = policy.transform
        # It should land where the policy says when it commits, with what the session adds until then.
        growth = 0 if due else self._forecast.growth_during(self._work())
        run = self._plan(_keep(transform), _expected(transform, branch.history.tokens[-1]) + growth)
        source = source_tokens(branch.history, branch.edits, run) if run else 0
        barren = (
            self._barren is not None
            and self._barren[0] == transform.fingerprint
            and source < self._barren[1] * BARREN_GROWTH
        )
        expected = _expected(transform, source)
        too_little = (source - expected) * branch.scale < policy.min_savings * branch.tokens
        nothing = run is None or not fresh(branch.edits, run)
        if run is None or nothing or barren or too_little:
            self._say("nothing_to_rewrite", "", why="nothing before the kept tail" if nothing else "too little to save")
            return None
        if not branch.history.unchanged(messages):
            self._sync(messages)  # an edit in place further up: what we snapshot must be what we digested
            return self._consider(messages, change, due=due, again=False) if again else None
        self._live = self._launch(messages, transform, run, explicit=False, preload_kv=None)
        return self._live if self._live.state not in FINAL else None

    def _work(self) -> float | None:
        """Seconds that a lookahead is expected to take by what the engine has shown; ``None`` while unknown."""
        land = self.policy.limit_tokens(self.policy.land_at)
        return self._serving.work_s(_expected(self.policy.transform, 0), land or 0)

    def _plan(self, keep: Size, expected: int) -> Run | None:
        branch = self.branch
        return plan(
            branch.history,
            branch.edits,
            self.policy,
            keep,
            land=self.policy.land_at,
            expected=expected,
            scale=branch.scale,
        )

    def _launch(
        self, messages: Sequence[Any], transform: Transform, run: Run, *, explicit: bool, preload_kv: bool | None
    ) -> LookaheadHandle:
        tokens = self.branch.tokens + self.policy.reserved_tokens
        due = self._forecast.due(self._runtime.now(), tokens, self.policy.limit_tokens(self.policy.hard_limit))
        handle = self._launcher.launch(messages, transform, run, explicit=explicit, preload_kv=preload_kv, due=due)
        self._said.pop("nothing_to_rewrite", None)
        return handle

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def _sent(self, messages: Sequence[Any]) -> list[Any]:
        view = self.branch.project(messages)
        self.branch.sent = len(self.branch.history)
        self._base = self.branch.frozen() if self.branch.edits else None
        self._archive.sent(messages, bool(self.branch.edits))
        return view

    def _as_it_was(self, messages: Sequence[Any]) -> list[Any]:
        """The view without any of this boundary's decisions."""
        try:
            with self._lock:
                if self.branch.history.unchanged(messages):
                    return self.branch.project(messages)
        except Exception as error:
            self._error(error, "project")
        return list(messages)

    def _handles(self) -> list[LookaheadHandle]:
        live = [self._live] if self._live is not None and self._live.state not in FINAL else []
        return [*live, *(h for h in self._explicit if h.state not in FINAL)]

    def _drop(self, handle: LookaheadHandle, reason: Reason) -> None:
        if handle.move(HandleState.DISCARDED, reason):
            self._emit("lookahead.discarded", handle=handle.id, reason=str(reason))
            self._serving.discarded(handle.flight.plan.key)
            self._runtime.leave(handle.flight, handle, reason)
        self._forget_handle(handle)

    def _forget_handle(self, handle: LookaheadHandle) -> None:
        if self._live is handle:
            self._live = None
        for handles in (self._explicit, self._finishing):
            if handle in handles:
                handles.remove(handle)

    def _remember(self, artifact: Artifact) -> None:
        """Hold an artifact, as the one used last."""
        self._artifacts[artifact.key] = artifact
        self._artifacts.move_to_end(artifact.key)
        self._trim()

    def _trim(self) -> None:
        """Hold artifacts within the bounds of the discard policy; the oldest unused ones go first."""
        held = self._artifacts
        discard = self.policy.discard if isinstance(self.policy.discard, Salvage) else Salvage()
        newest = next(reversed(held), None)
        shown = {a.artifact.key for a in self.branch.applied} | {newest}
        oldest = self._runtime.now() - discard.ttl
        size = sum(a.tokens for a in held.values()) * 4
        for key in list(held):
            a = held[key]
            dead = a.created < oldest and not a.replacement.valid(self.branch.history)
            if key in shown or not (dead or len(held) > MAX_ARTIFACTS or size > discard.max_bytes):
                continue
            size -= a.tokens * 4
            del held[key]
            self._committed.discard(key)
            self._emit("artifact.dropped", key=key, reason=str(Reason.EXPIRED if dead else Reason.EVICTED))

    def _receipt(
        self, artifact: Artifact, how: str, before: int, waited: float, handle: LookaheadHandle | None
    ) -> Receipt:
        r = artifact.replacement
        receipt = Receipt(
            how=how,
            transform=artifact.transform,
            key=artifact.key,
            tokens_before=before,
            tokens_after=self.branch.tokens,
            messages_replaced=sum(e.end - e.start for e in r.edits),
            waited_s=waited,
            usage=handle.flight.usage if handle else Usage(),
            warm=artifact.warm,
            time=self._runtime.now(),
        )
        self.receipts.append(receipt)
        self._emit("view.committed", how=how, tokens_before=before, tokens_after=receipt.tokens_after)
        return receipt

    def _account(self, handle: LookaheadHandle) -> None:
        handle.flight.accounted = True

    def _say(self, name: str, what: str, **data: Any) -> None:
        """An event about a condition that lasts: said once until it changes."""
        mark = f"{name}:{what}:{data.get('why', '')}"
        if mark != self._said.get(name):
            self._said[name] = mark
            self._emit(name, **data)

    def _emit(self, name: str, **data: Any) -> None:
        self._runtime.events.emit(name, session=self.id, tenant=self.tenant, **data)

    def _error(self, error: Exception, where: str) -> None:
        if isinstance(error, MessageError):
            self._say("message.unreadable", str(error), error=str(error))
        else:
            self._runtime.events.error(error, where=where, session=self.id, tenant=self.tenant)


def _keep(transform: Transform) -> Size:
    keep: Size = getattr(transform, "keep", ("messages", 20))
    return keep


def _expected(transform: Transform, source: int) -> int:
    """Tokens that a result is expected to have: at most its cap, and never more than a quarter of the source."""
    cap = getattr(transform, "max_tokens", 0) or 0
    return min(int(cap), source // 4) if source else int(cap)
