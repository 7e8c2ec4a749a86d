"""A session: one conversation. Follows the caller's messages, starts lookaheads, commits them at boundaries.

``observe`` and ``commit`` are the whole of it for most callers. Nothing here blocks: state is changed under a
lock that is never held over an await, and what goes wrong inside becomes an event while the turn goes on with
the view it had.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from .archive import Archive
from .blockwise import Blockwise
from .boundary import Boundary
from .branch import Branch
from .calls import Calls, ForegroundCall
from .choice import choose
from .codec import Codec, check_messages
from .conversation import Conversation
from .cuts import Run
from .errors import ClosedError, ConfigurationError
from .flight import Flight, dump_artifact, load_artifact
from .follow import Following
from .handle import LookaheadHandle
from .handles import Handles
from .judge import TrajectoryJudge
from .judging import Judging
from .launch import RETRIEVE_WAIT, UNREADABLE, Launcher
from .openings import Openings
from .outcomes import CommitOutcome
from .policy import Policy
from .receipts import Receipt
from .request import Prompt, is_request
from .rest import Rest
from .serving import Serving
from .shelf import BranchInfo, Shelf
from .states import FINAL, WORKING, Reason
from .transforms.base import Transform
from .transforms.offload import PAGE, has_stubs
from .transforms.parallel import ParallelSummarize
from .trigger import Trigger
from .usage import Cost
from .view import Artifact

if TYPE_CHECKING:
    from .runtime import Runtime


#: why a ready result may be dropped, and another process may commit it all the same
LEFT_BEHIND = (Reason.SESSION_CLOSED, Reason.SHUTDOWN, Reason.EVICTED, Reason.BRANCH_DIVERGED)


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
        self.request: Mapping[str, Any]
        #: messages that stand before the history in each of the agent's calls, where the framework keeps them apart
        self.prompt: Prompt
        self.request, self.prompt = runtime.requests.read(request)
        self._given = {**self.request, **({"messages": self.prompt} if self.prompt else {})}
        #: texts that every summary carries word for word
        self.pins: tuple[str, ...] = ()
        #: names of tasks that every summary lists word for word
        self.tasks: tuple[str, ...] = ()
        self.closed = False
        self.used_at = runtime.now()
        self._runtime = runtime
        self._lock = threading.RLock()
        self._token = object()
        self._first_commit = True
        self._conversation = Conversation(runtime, session_id, tenant, policy, codec, getattr(engine, "rates", None))
        self._serving = Serving(runtime, self)
        self._calls = Calls(runtime, self._conversation, self._serving, self._lock, engine)
        self._archive = Archive(runtime, self)
        self._launcher = Launcher(runtime, self, self._serving, self._archive)
        blocks = policy.transform
        self._blockwise = (
            Blockwise(runtime, self, self._launcher, self._serving.preloading, blocks)
            if isinstance(blocks, ParallelSummarize)
            else None
        )
        self._handles = Handles(self._conversation, self._serving, self._blockwise, self._dropped)
        self._shelf = Shelf(self._conversation, self._blockwise, self._launcher.local)
        self._following = Following(self._conversation, self._handles, self._shelf, self._archive)
        self._trigger = Trigger(
            self._conversation,
            self._handles,
            self._following,
            self._launcher,
            self._serving,
            self._blockwise,
            predicts=engine is not None,
        )
        judge = next((v for v in policy.validators if isinstance(v, TrajectoryJudge)), None)
        self._judging = (
            Judging(
                self, judge, self._conversation, self._handles, self._shelf, self._trigger, self._blockwise, self._lock
            )
            if judge is not None
            else None
        )
        self._boundary = Boundary(
            self._conversation,
            self._handles,
            self._shelf,
            self._following,
            self._trigger,
            self._launcher,
            self._serving,
            self._blockwise,
            self._judging,
        )

        self._rest = None if policy.idle is None else Rest(runtime, policy.idle, self._rested)

    @property
    def branch(self) -> Branch:
        """The history that it holds now, and what replaces it in the view."""
        return self._conversation.branch

    @property
    def receipts(self) -> deque[Receipt]:
        """One per commit, several where blocks go in together; oldest first, the last 1,000 are kept."""
        return self._conversation.receipts

    # -- the two calls of every turn -------------------------------------------------------------------------

    def observe(self, messages: Sequence[Any], *, due_s: float | None = None) -> LookaheadHandle | None:
        """Segment boundary: the model's reply (or a tool result) is in ``messages``.

        Returns at once, from any thread: the lookahead that it started, or the live one of this branch, else
        ``None``. Never raises for bad messages or a failing transform: those become events.

        ``due_s``: there is no reply yet, and the model call begins elsewhere within so many seconds. The turn then goes
        on for that long (an hour at most), unless :meth:`turn_over` ends it. What is no number of seconds is an event,
        and the turn goes on as after a commit.
        """
        try:
            with self._lock:
                if self.closed:
                    return None
                now = self._used()
                if not isinstance(messages, list | tuple):
                    check_messages(self.codec, messages)
                change = self._following.sync(messages, tail_only=True)
                self._follow(messages)
                self._serving.end(self._token) if due_s is None else self._due(self._lease(due_s))
                if messages and self.branch.history.last_assistant == len(self.branch.history) - 1:
                    self._conversation.forecast.rested(now)
                if self._rest is not None:
                    self._rest.begin(messages)
                if self._judging is not None:
                    self._judging.look(messages)
                return self._trigger.consider(messages, change)
        except Exception as error:
            self._conversation.error(error, "observe")
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
        view = self._turn(messages, None)
        if isinstance(view, LookaheadHandle):
            with self._standing():
                await self._launcher.wait_for(view, self._boundary.patience(view))
            return self._after(messages, self._runtime.now() - started)
        return view

    def commit_sync(self, messages: Sequence[Any]) -> list[Any]:
        """:meth:`commit` for synchronous callers (not on the runtime's own loop; see ``Runtime.in_thread``)."""
        started = self._runtime.now()
        if self._first_commit:
            self._launcher.recovered_sync()
        view = self._turn(messages, None)
        if isinstance(view, LookaheadHandle):
            with self._standing():
                self._launcher.wait_for_sync(view, self._boundary.patience(view))
            return self._after(messages, self._runtime.now() - started)
        return view

    def commit_now(self, messages: Sequence[Any]) -> list[Any]:
        """:meth:`commit` for callers that may not wait at all, such as a synchronous hook on an event loop's thread.

        At the hard limit the fallback is applied at once; the lookahead, for which no turn waits, goes on, and its
        result supersedes it at a later boundary. What another process left in the store is applied from the next
        boundary on.
        """
        if self._first_commit:
            self._launcher.recover_later()
        view = self._turn(messages, None)
        if isinstance(view, LookaheadHandle):
            return self._after(messages, 0.0)
        return view

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """The turn waits for background work, which must not keep out of this turn's way meanwhile. A turn that is
        cancelled here is over: no model call is due, and nothing will ever observe it."""
        self._serving.end(self._token)
        yield
        self._due()

    def _due(self, lease_s: float | None = None) -> None:
        """This turn's model call is due: not any more where the session was closed meanwhile."""
        with self._lock:
            if not self.closed:
                self._serving.begin(self._token, lease_s)

    def _lease(self, due_s: float) -> float | None:
        """For how many seconds the turn goes on at most; ``None``, a turn's own lease, where that was not said."""
        if isinstance(due_s, int | float) and not isinstance(due_s, bool) and due_s >= 0:
            return due_s
        self._conversation.error(ConfigurationError(f"due_s={due_s!r}: expected seconds, 0 or more"), "observe")
        return None

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
            self._used()
            check_messages(self.codec, messages)
            return self._trigger.schedule(kind, messages, target_segments, preload_kv, options)

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
        model; only what this session's tenant offloaded can be read. From any loop; at most ``RETRIEVE_WAIT`` seconds.
        """
        pages: list[str] = []
        await self._runtime.join_loop(lambda: self._launcher.page(pages, id, offset, limit), RETRIEVE_WAIT)
        return pages[0] if pages else UNREADABLE

    def retrieve_sync(self, id: str, offset: int = 0, limit: int = PAGE) -> str:
        """:meth:`retrieve` for synchronous callers (not on the runtime's own loop)."""
        pages: list[str] = []
        self._runtime.on_loop(lambda: self._launcher.page(pages, id, offset, limit), RETRIEVE_WAIT)
        return pages[0] if pages else UNREADABLE

    # -- the engine ------------------------------------------------------------------------------------------

    def request_options(self) -> dict[str, Any]:
        """What to merge into the next model call on the agent's engine (slot, salt, priority)."""
        return self._serving.request_options()

    def use_request(self, request: Mapping[str, Any] | None) -> None:
        """The constant part of the agent's request, as seen with the turn that is about to begin; ``None`` where it
        cannot be told. A name that ``runtime.session(request=)`` was given keeps the value from there.

        What was preloaded for another request is cold. While it is unknown, or changes again and again (a clock in the
        system prompt), nothing is preloaded. Never raises.
        """
        with self._lock:
            changed: bool | None = None
            try:
                if request is not None:
                    whole = {**request, **self._given}
                    same = is_request(whole, self.request, self.prompt)
                    if not same:
                        self.request, self.prompt = self._runtime.requests.read(whole)
                    changed = not same
            except Exception as error:
                self._conversation.error(error, "use_request")
            try:
                self._serving.preloading.asked(changed, self._handles.all())
            except Exception as error:
                self._conversation.error(error, "use_request")

    @asynccontextmanager
    async def foreground(self) -> AsyncGenerator[ForegroundCall]:
        """Tell us of a model call that you make yourself, so that background work keeps out of its way."""
        with self._calls.watched(self._token) as call:
            yield call

    @contextmanager
    def foreground_sync(self) -> Iterator[ForegroundCall]:
        """:meth:`foreground` for synchronous callers. It waits for nothing."""
        with self._calls.watched(self._token) as call:
            yield call

    def turn_begins(self) -> None:
        """A model call is due with a view that :meth:`commit` gave before: it is tried again, or goes on after a pause.

        The turn goes on as after a commit, until the next :meth:`observe` or :meth:`turn_over`. Never raises.
        """
        try:
            with self._lock:
                if not self.closed:
                    self._begins()
        except Exception as error:
            self._conversation.error(error, "turn_begins")

    def turn_over(self) -> None:
        """No model call of this turn is due any more, and there is nothing new to :meth:`observe`."""
        self._serving.end(self._token)

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
            request=self._given,
        )
        other.use_request({**self.request, "messages": self.prompt})
        other._serving.preloading.steadiness = replace(self._serving.preloading.steadiness)
        self.share_with(other)
        return other

    def share_with(self, other: Session) -> None:
        """Give another session what this one holds: its artifacts (which apply where their digests match) and pins."""
        with self._lock:  # one lock at a time: two sessions may fork into each other
            artifacts, committed, pins = dict(self._shelf.artifacts), set(self._shelf.committed), self.pins
            costs, tasks, archived = dict(self._shelf.costs), self.tasks, self._archive.head
        with other._lock:
            other._shelf.take(artifacts, committed, costs)
            other.pins = (*pins, *(p for p in other.pins if p not in pins))
            other.tasks = other.tasks or tasks
            other._archive.head = other._archive.head or archived

    def saved(self) -> list[str]:
        """What is committed in the view, as texts that another process can :meth:`restore` from. JSON, one each.

        Left out is what may not leave the process: the work of a model without an identity, fallbacks, and stubs of
        content that is only in this process's memory (without a store of the caller's).
        """
        with self._lock:
            shown = [a.artifact for a in self.branch.applied if a.artifact.durable]
            if not self._launcher.keeps_content:
                shown = [
                    a for a in shown if not has_stubs(self.codec, [m for e in a.replacement.edits for m in e.messages])
                ]
            return [dump_artifact(self.codec, artifact).decode() for artifact in shown]

    def restore(self, saved: Iterable[str]) -> None:
        """Take over what :meth:`saved` gave, here or elsewhere. It applies where its digests match, from the next
        commit on. A text that cannot be read is an event, and nothing else."""
        for text in saved:
            try:
                artifact = load_artifact(self.codec, text.encode())
            except Exception as error:
                self._conversation.error(error, "restore")
                continue
            with self._lock:
                if artifact.key not in self._shelf.committed:
                    self.adopt(artifact)

    def recognises(self, messages: Sequence[Any]) -> tuple[bool, int]:
        """Do these messages go on where this session is, and how many at their head are the same?

        They do when they begin with the whole history that it holds, or with the view that it returned last. Nothing
        changes by asking.
        """
        try:
            with self._lock:
                return self._following.recognises(messages)
        except Exception as error:
            self._conversation.error(error, "recognises")
            return False, 0

    def outcomes(self) -> list[CommitOutcome]:
        """What came of the last 100 boundaries that committed, newest last: the calls inside :meth:`foreground` around
        each."""
        with self._lock:
            return self._conversation.outcomes.listed()

    def branches(self) -> list[BranchInfo]:
        """Every artifact that the session holds, newest last, for a person to read."""
        with self._lock:
            return self._shelf.listed()

    async def close(self) -> None:
        """End the session: its lookaheads are cancelled, what it held is forgotten. Closing twice is fine."""
        self.close_now(Reason.SESSION_CLOSED)

    def close_now(self, reason: Reason) -> None:
        """:meth:`close` without waiting for anything (it never does)."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if self._rest is not None:
                self._rest.end()
            self._handles.close(reason)
            self._serving.end(self._token)
            self._serving.close()
            self._archive.close()
            self._shelf.clear()
            self._following.close()
        self._runtime.forget(self)

    @property
    def lookahead(self) -> LookaheadHandle | None:
        """The live handle of this branch, if there is one; with a transform of blocks, that of the oldest."""
        return self._handles.lookahead

    @property
    def lookaheads(self) -> list[LookaheadHandle]:
        """Every live handle that the policy started, the one of the oldest messages first."""
        with self._lock:
            return self._handles.lookaheads

    def __repr__(self) -> str:
        return f"<Session {self.id!r} {self.branch.messages} messages, {self.branch.tokens} tokens, {self.lookahead!r}>"

    # -- for handles and flights -------------------------------------------------------------------------------

    def commit_handle(self, handle: LookaheadHandle, messages: Sequence[Any]) -> list[Any]:
        """What ``handle.commit`` does."""
        with self._lock:
            if self.closed:
                raise ClosedError(f"session {self.id!r} is closed")
            self._used()
            check_messages(self.codec, messages)
            return self._boundary.commit(handle, messages)

    def promote_handle(self, handle: LookaheadHandle) -> None:
        """What ``handle.promote`` does."""
        if handle.state in WORKING:
            self._conversation.emit("lookahead.promoted", handle=handle.id)
            self._runtime.flights.promote(handle.flight)
            self._serving.poke()

    def release_handle(self, handle: LookaheadHandle) -> None:
        """A turn does not wait for this handle any more."""
        self._runtime.flights.release(handle.flight)

    def discard_handle(self, handle: LookaheadHandle, reason: Reason) -> None:
        """What ``handle.discard`` does."""
        with self._lock:
            self._handles.drop(handle, reason)

    def held(self, key: str) -> Artifact | None:
        """An artifact of this key that an earlier lookahead left."""
        return self._shelf.artifacts.get(key)

    def cost(self, key: str) -> Cost | None:
        """What the artifact of this key that it holds has cost, where that was spent here."""
        return self._shelf.costs.get(key)

    @property
    def prepared(self) -> Mapping[str, Run]:
        """Results that wait for their commit, by key, with their runs."""
        return self._shelf.prepared

    def adopt(self, artifact: Artifact, ready: Run | None = None) -> None:
        """Take over what another process committed: it applies where its digests match, from the next commit on.
        What it only had ``ready`` is this session's to commit, as if it had made it."""
        with self._lock:
            if self.closed:
                return
            if ready is None:
                self._shelf.adopt(artifact)
            else:
                self._shelf.expect(artifact, ready)

    def ended(self, handle: LookaheadHandle, reason: Reason | None, error: Exception | None) -> None:
        """The flight is over. Called on the runtime's loop."""
        with self._lock:
            if handle.state in FINAL:
                return
            flight = handle.flight
            if reason is None and flight.artifact is not None:
                if not flight.plan.opening:  # which replaces nothing: nobody else could make anything of it
                    self._shelf.remember(flight.artifact, flight.cost)
                    self._tell_of(handle, flight.artifact)
                self._handles.ready(handle, flight)
                if self._rest is not None:
                    self._rest.look()
                return
            if reason is Reason.NOT_SMALLER and self._blockwise is None:
                self._trigger.not_smaller(handle)
            self._handles.failed(handle, reason or Reason.FAILED, error)

    def _tell_of(self, handle: LookaheadHandle, artifact: Artifact) -> None:
        """A result is ready: another process may commit it."""
        if artifact.durable and not handle.explicit:
            self._shelf.prepare(artifact.key, handle.run)
            self._launcher.tell()

    def _dropped(self, handle: LookaheadHandle, reason: Reason) -> None:
        """A handle was dropped: no other process is to commit what this one would not, and nobody needs a verdict."""
        if self._judging is not None:
            self._judging.dropped(handle)
        if reason not in LEFT_BEHIND and self._shelf.unprepare(handle.flight.plan.key):
            self._launcher.tell()

    @property
    def serving(self) -> Serving:
        """The agent's engine, as this session uses it."""
        return self._serving

    @property
    def openings(self) -> Openings:
        """What this session's sub-agents will send first, as far as it is warm."""
        return self._serving.openings

    def working(self) -> bool:
        """Is any lookahead of this session under way or waiting to be committed?"""
        return any(not h.flight.plan.opening for h in self._handles.all())

    def finishes(self, handle: LookaheadHandle) -> bool:
        """Does it only finish for the store, since its branch is dead?"""
        return self._handles.finishes(handle)

    def urgent(self) -> bool:
        """Is a turn waiting for one of this session's lookaheads?"""
        return any(h.promoted for h in self._handles.all())

    def hurried(self, rate: float | None, artifact: Artifact, cold: float) -> bool:
        """Is idle time alone too little to preload what is ``cold`` (a share) of the view of ``artifact`` at ``rate``
        tokens per second?"""
        with self._lock:
            return self._conversation.hurried(rate, artifact, cold)

    def quiet(self) -> float | None:
        """Seconds for which this session's next turn is not expected; ``None`` while unknown."""
        in_flight = self._serving.foreground.serves(self._serving)
        with self._lock:
            return self._conversation.forecast.quiet(self._runtime.now(), in_flight=in_flight)

    def preview(self, artifact: Artifact, latest: Callable[[], Sequence[Any]]) -> list[Any]:
        """The view that committing ``artifact`` to the ``latest()`` messages would give (for preload)."""
        with self._lock:
            messages = latest()
            made = artifact if self._blockwise is None else self._blockwise.preview(artifact, messages)
            return self.branch.preview(made, messages)

    def shown(self, latest: Callable[[], Sequence[Any]]) -> list[Any]:
        """The view of the ``latest()`` messages as it is, with nothing new committed."""
        with self._lock:
            return self.branch.project(latest())

    def likeliest(self, flight: Flight, artifact: Artifact, messages: Sequence[Any]) -> Artifact:
        """Of several candidates the one that would be committed now."""
        with self._lock:
            mine = next((h for h in self._handles.all() if h.flight is flight), None)
            return artifact if mine is None else choose(self._conversation, artifact, mine, messages, quiet=True)

    def missed(self, start_digest: bytes) -> str | None:
        """What a refused result for the run that begins here lacked."""
        return None if self._judging is None else self._judging.missed(start_digest)

    def wants_preload(self) -> bool:
        """Is a commit near enough to warm its view? (A single lookahead starts when it is.)"""
        with self._lock:
            return self._blockwise is None or self._blockwise.nearly()

    def due(self) -> float | None:
        """When the hard limit is expected, on the runtime's clock; ``None`` while unknown."""
        return self._conversation.due()

    def growth(self) -> int:
        """Tokens that a turn is expected to add."""
        return int(self._conversation.forecast.growth.value or 0)

    @property
    def usual_s(self) -> float | None:
        """Seconds that a lookahead of this session usually takes, ``None`` while unknown."""
        return self._conversation.forecast.work.value

    def _turn(self, messages: Sequence[Any], waited: float | None) -> list[Any] | LookaheadHandle:
        """One turn boundary. ``waited`` is None the first time: then it may return a handle to wait for."""
        if not isinstance(messages, list | tuple):
            check_messages(self.codec, messages)
        try:
            with self._lock:
                if self.closed:
                    return list(messages)
                first = False
                if waited is None:
                    self._begins()
                    first, self._first_commit = self._first_commit, False
                decided = self._boundary.decide(messages, waited)
                self._follow(messages)
                if first and self.parent is not None:
                    self._serving.begun(self.branch.history.chain)
                return decided
        except Exception as error:
            self._conversation.error(error, "commit")
            return self._as_it_was(messages)

    def _used(self) -> float:
        """It is in use, at this time: it is the last to go when room is needed."""
        self.used_at = self._runtime.now()
        self._runtime.touch(self)
        return self.used_at

    def _follow(self, messages: Sequence[Any]) -> None:
        """While anything is prepared, these are the messages that its view will be made of."""
        if self.working():
            self._serving.preloading.follow(messages)

    def _begins(self) -> None:
        """A turn is in flight from now on: the session is in use, and rests no longer."""
        self._used()
        self._serving.begin(self._token)
        if self._rest is not None:
            self._rest.end()

    def _rested(self, messages: Sequence[Any]) -> None:
        """No turn came for ``policy.idle`` seconds. Called on the runtime's loop."""
        try:
            with self._lock:
                if not self.closed:
                    self._boundary.rest(messages)
        except Exception as error:
            self._conversation.error(error, "rest")

    def _after(self, messages: Sequence[Any], waited: float) -> list[Any]:
        """The boundary decided once more, ``waited`` seconds later."""
        view = self._turn(messages, waited)
        assert not isinstance(view, LookaheadHandle)
        return view

    def _as_it_was(self, messages: Sequence[Any]) -> list[Any]:
        """The view without any of this boundary's decisions."""
        try:
            with self._lock:
                if self.branch.history.unchanged(messages):
                    return self.branch.project(messages)
        except Exception as error:
            self._conversation.error(error, "project")
        return list(messages)
