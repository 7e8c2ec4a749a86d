"""The launcher: builds flights and local artifacts, hands them to the pool, and writes and reads what the store keeps.

The session decides; the launcher carries out. It holds no state of the branch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from .archive import Archive
from .cuts import Run, kept_inside, request_for, safe_end, source_tokens
from .errors import ConfigurationError, StoreError
from .flight import Flight, Plan, dump_artifact, load_artifact
from .handle import LookaheadHandle
from .local import LocalRewrites, offload_of
from .serving import Serving
from .states import WORKING, HandleState
from .tokens import count_text
from .transforms import named_transforms
from .transforms.base import Transform, fingerprint
from .transforms.facts import message_pins
from .transforms.isolate import Isolate
from .transforms.offload import retrieve
from .transforms.speculate import check_future
from .transforms.validators import default_validators
from .view import Artifact, Edit

if TYPE_CHECKING:
    from .runtime import Runtime
    from .session import Session

#: seconds that the first commit of a session may wait for what another process left in the store; what takes longer is
#: read in the background
STORE_WAIT = 0.010
#: seconds that a model's ``retrieve`` waits for the store at most, and what it reads then
RETRIEVE_WAIT = 30.0
UNREADABLE = "error: the offloaded content cannot be read right now"
#: seconds after which a turn that waits looks again whether the result can still come in time
LOOK_S = 1.0
#: seconds that reading what another process left may take in the background
RECOVERY_S = 300.0
#: artifacts in a row that could not be read, after which the others are not tried
LOST_READS = 3
#: artifacts that a session's index in the store names: as many as its shelf holds
INDEX_SIZE = 64


class _Written:
    """The runtime's store for reading, with what still waits to be written to it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def get(self, tenant: str, key: str) -> bytes | None:
        waiting = self._runtime.pending(tenant, key)
        return waiting if waiting is not None else await self._runtime.store.get(tenant, key)


class Launcher:
    """Carries out what one session decides."""

    def __init__(self, runtime: Runtime, session: Session, serving: Serving, archive: Archive) -> None:
        self._runtime = runtime
        self._session = session
        self._serving = serving
        self._preloading = serving.preloading
        self._archive = archive
        self.local = LocalRewrites(runtime, session)
        self._index: list[str] = []
        self._index_known = False  # it has been read: what is written of it from now on loses nothing
        self._unwritten = False  # something waits for that
        self._unread: list[str] = []  # keys that it names, and of those that were ready the runs
        self._ready: dict[str, Run] = {}
        self._asked = self._recovering = False  # for what the store holds: ever, now

    # -- building work -------------------------------------------------------------------------------------------

    def transform(self, kind: str | Transform, options: Mapping[str, Any]) -> Transform:
        """The transform that ``schedule_transform`` means."""
        if not isinstance(kind, str):
            if not isinstance(kind, Transform):
                raise ConfigurationError(f"kind={kind!r}: expected a name such as 'summarize' or a transform")
            if options:
                raise ConfigurationError(
                    f"{', '.join(options)}: options go with a kind given by name, not with a transform"
                )
            check_future("kind", kind)
            return kind
        own = self._session.policy.transform
        members: list[Transform] = [own, *getattr(own, "transforms", ())]
        if not options:
            for member in members:
                if member.name == kind:
                    return member
        known = named_transforms()
        if kind not in known:
            raise ConfigurationError(
                f"kind={kind!r}: expected one of {', '.join(sorted(known))}, or a transform object"
            )
        try:
            made: Transform = known[kind](**options)
        except TypeError as error:
            raise ConfigurationError(f"schedule_transform({kind!r}): {error}") from error
        return made

    def target(self, target_segments: Sequence[int]) -> Run:
        """The run that explicit segment indexes name."""
        history = self._session.branch.history
        segments = history.segmenter.segments
        what = f"target_segments={target_segments!r}"
        wanted: Any = list(target_segments) if isinstance(target_segments, Sequence | range) else []
        if not wanted or any(isinstance(k, bool) or not isinstance(k, int) for k in wanted):
            raise ConfigurationError(f"{what}: expected a contiguous run of indexes into smoothctx.segments(messages)")
        if wanted != list(range(wanted[0], wanted[0] + len(wanted))):
            raise ConfigurationError(f"{what}: the indexes must be contiguous and ascending")
        if wanted[0] < 0 or wanted[-1] >= len(segments):
            raise ConfigurationError(f"{what}: there are {len(segments)} segments, numbered from 0")
        start, end = segments[wanted[0]].start, segments[wanted[-1]].end
        if end > safe_end(history):
            raise ConfigurationError(
                f"{what}: the newest segment, unread tool results and everything from an unanswered call on "
                "cannot be rewritten yet"
            )
        for edit in self._session.branch.edits:
            if edit.start < start < edit.end or edit.start < end < edit.end:
                raise ConfigurationError(
                    f"{what}: cuts through what an earlier commit rewrote ([{edit.start}, {edit.end}))"
                )
        return Run(start, end, kept_inside(history, start, end))

    def whole(self) -> Run:
        """Everything behind the system messages (what an ``Isolate`` may select from)."""
        history = self._session.branch.history
        return Run(history.segmenter.lead, len(history), frozenset())

    def key(self, transform: Transform, run: Run) -> str:
        """Names the artifact that this transform makes of this run of the present history."""
        chain = self._session.branch.history.chain
        parts = [
            transform.fingerprint or self._runtime.private_id(transform),
            str(run.start),
            chain[run.start].hex(),
            chain[run.end].hex(),
        ]
        return fingerprint("artifact", {"parts": parts, "kept": sorted(run.kept)})

    def launch(
        self,
        messages: Sequence[Any],
        transform: Transform,
        run: Run,
        *,
        explicit: bool,
        preload_kv: bool | None,
        due: float | None,
        cap: int | None = None,
        readable: Sequence[Edit] | None = None,
        waited_s: float = 0.0,
    ) -> LookaheadHandle:
        """Make a handle, and start its flight or join the one that is under way.

        With ``cap`` the run is one block, whose result may have that many tokens and has to be smaller than the block;
        ``readable`` are the edits with which it is read, by default those of the view. ``waited_s``: seconds that the
        one has waited in the queue whose place it takes.
        """
        session, runtime = self._session, self._runtime
        opening = isinstance(transform, Isolate)
        key = self.key(transform, run)
        flight = runtime.flights.find(session.tenant, key)
        held = session.held(key)
        if held is not None:  # made earlier, for this very prefix: nothing to do again
            plan = self._plan(key, messages, transform, run, opening, cap, readable)
            done = Flight(plan=plan, tenant=session.tenant, store=None, executor=runtime.executor, clock=runtime.now)
            done.artifact, done.ended, done.from_store = replace(held, warm=False), True, True
            done.cost = runtime.flights.share(session.cost(key))
            handle = LookaheadHandle(session, transform, run, done, explicit=explicit)
            runtime.flights.started(handle)
            handle.move(HandleState.READY)
            return handle
        if flight is None:
            plan = self._plan(key, messages, transform, run, opening, cap, readable)
            burden = self._serving.burden(transform, preload_kv)
            if opening:  # it is made at once, without a model; its preload keeps out of the way by itself
                burden["engine"] = None
            flight = Flight(
                plan=plan,
                tenant=session.tenant,
                store=runtime.store,
                executor=runtime.executor,
                clock=runtime.now,
                endpoints=runtime.endpoints,
                raw=self._archive.loader(transform, run),
                save=None if opening else self.save,
                **burden,
            )
            if self._preloading.wished(preload_kv):
                flight.preload = lambda artifact, own=flight: self._preloading.warm_up(own, artifact, preload_kv)
            flight = runtime.flights.claim(flight)
        handle = LookaheadHandle(session, transform, run, flight, explicit=explicit)
        self._preloading.follow(messages)
        if runtime.flights.join(flight, handle, due=due, usual_s=session.usual_s, waited_s=waited_s):
            return handle
        return self.launch(  # the others left it just now: one of its own
            messages,
            transform,
            run,
            explicit=explicit,
            preload_kv=preload_kv,
            due=due,
            cap=cap,
            readable=readable,
            waited_s=waited_s,
        )

    def _plan(
        self,
        key: str,
        messages: Sequence[Any],
        transform: Transform,
        run: Run,
        opening: bool,
        cap: int | None = None,
        readable: Sequence[Edit] | None = None,
    ) -> Plan:
        session, runtime = self._session, self._runtime
        branch, policy, codec = session.branch, session.policy, session.codec
        history = branch.history
        source = getattr(transform, "source", "view")
        edits = () if source != "view" else branch.readable if readable is None else readable
        # What the run costs the view now, whatever the transform reads.
        spent = source_tokens(history, branch.edits if cap is None else edits, run)
        pins = session.pins if cap is None else self.local.block_pins(run, messages, spent)
        pieces, request = request_for(
            messages,
            run,
            codec,
            edits=edits,
            before=branch.edits,
            pins=pins,
            live_tasks=session.tasks,
            deadline=runtime.now() + policy.timeout,
            tenant=session.tenant,
            session_id=session.id,
            store=runtime.store,
            context_tokens=policy.context_window,
            max_tokens=cap,
            missed=session.missed(history.chain[run.start]),
            options=self._serving.beside.options(transform, key),
            prompt=self._serving.beside.prompt(transform),
        )
        carried = {*pins, *message_pins(request.messages, codec)}  # they stay in any case
        shown_tokens = history.tokens[-1] + sum(e.tokens - history.span(e.start, e.end) for e in branch.edits)
        return Plan(
            key=key,
            transform=transform,
            request=request,
            units=tuple(pieces),
            frozen=tuple(history.frozen[u.start] for u in pieces if u.edit is None),
            kept=run.kept,
            start=run.start,
            end=run.end,
            start_digest=history.chain[run.start],
            end_digest=history.chain[run.end],
            source_tokens=spent,
            view_tokens=shown_tokens if cap is None else max(0, spent - sum(map(count_text, carried))),
            min_savings=policy.least_savings,
            validators=(*default_validators(), *policy.validators),
            count=history.count,
            timeout_s=policy.timeout,
            opening=opening,
        )

    @property
    def keeps_content(self) -> bool:
        """Is what is offloaded kept in a store that the caller gave, rather than in this process's memory?"""
        own = offload_of(self._session.policy.transform)
        return self._runtime.shares_artifacts or (own is not None and own.store is not None)

    async def page(self, pages: list[str], id: str, offset: int, limit: int) -> None:
        """Add a page of what was offloaded to ``pages``, unless the store takes too long."""
        with anyio.move_on_after(RETRIEVE_WAIT):
            pages.append(await self._retrieve(id, offset, limit))

    async def _retrieve(self, id: str, offset: int, limit: int) -> str:
        """From the ``Offload``'s own store if it has one, else from the runtime's."""
        own, tenant = offload_of(self._session.policy.transform), self._session.tenant
        if own is not None and own.store is not None:
            found = await own.retrieve(id, offset, limit, tenant=tenant)
            if not found.startswith("error: no offloaded content"):
                return found
        return await retrieve(_Written(self._runtime), id, offset, limit, tenant=tenant)

    # -- the store -------------------------------------------------------------------------------------------------

    async def recovered(self) -> None:
        """Before a session's first commit: what another process left, if it comes within ``STORE_WAIT``; else it is
        applied at a later boundary."""
        if self._runtime.shares_artifacts:
            self._asked = True
            # A busy loop that is not ours gets as long again.
            await self._runtime.join_loop(lambda: self._recover(STORE_WAIT), 2 * STORE_WAIT)
            self.recover_later()

    def recovered_sync(self) -> None:
        """:meth:`recovered` for synchronous callers."""
        if self._runtime.shares_artifacts:
            self._asked = True
            self._runtime.on_loop(lambda: self._recover(STORE_WAIT), 2 * STORE_WAIT)
            self.recover_later()

    def recover_later(self) -> None:
        """:meth:`recovered` in the background, for a turn that may not wait (any longer)."""
        known = self._index_known and not self._unread
        if not self._runtime.shares_artifacts or known or self._recovering:
            return
        self._asked = self._recovering = True

        async def run() -> None:
            await self._recover(RECOVERY_S)
            over()

        def over() -> None:
            self._recovering = False

        self._runtime.background(f"recover:{self._session.id}", run, self._session, over)

    async def _recover(self, within: float) -> None:
        try:
            await self._runtime.briefly(f"recover:{self._session.id}", self._load_index, within)
        except Exception as error:
            self._store_error(error)

    async def _load_index(self) -> None:
        session, store = self._session, self._runtime.store
        if not self._index_known:
            self._read_index(await store.get(session.tenant, f"index/{session.id}"))
        failed = 0
        while self._unread:  # what an attempt without enough time has left
            key = self._unread[0]
            try:
                found = await store.get(session.tenant, f"artifact/{key}")
            except Exception as error:  # it may be there another time: it stays in the index
                self._store_error(error)
                failed += 1
                if failed >= LOST_READS:
                    return
            else:
                failed = 0
                self._found(found, self._ready.pop(key, None))
            if self._unread[:1] == [key]:
                del self._unread[0]

    def _found(self, data: bytes | None, run: Run | None) -> None:
        if data is not None:
            try:
                self._session.adopt(load_artifact(self._session.codec, data), run)
            except StoreError as error:
                self._store_error(error)

    def _read_index(self, data: bytes | None) -> None:
        """From now on what is written of it loses nothing."""
        if self._index_known:  # another attempt was faster
            return
        try:
            entries = [] if data is None else list(json.loads(data))
        except (ValueError, TypeError) as error:  # nothing can be made of it any more
            self._store_error(error)
            entries = []
        keys = [k for k in entries if isinstance(k, str)][-INDEX_SIZE:]
        self._ready = dict(filter(None, map(_prepared, entries)))
        # The latest reach furthest: they come first, in case time runs out.
        self._unread = [*reversed(self._ready), *reversed(keys)]
        self._index = [*(k for k in keys if k not in self._index), *self._index][-INDEX_SIZE:]
        self._index_known = True
        if self._unwritten:
            self.tell()

    def save(self, artifact: Artifact) -> None:
        """Keep an artifact for other processes, in the background."""
        if not artifact.durable:
            return
        session = self._session
        try:
            data = dump_artifact(session.codec, artifact)
        except (TypeError, ValueError) as error:
            self._store_error(error)
            return
        self._runtime.write(session.tenant, f"artifact/{artifact.key}", data)

    def name(self, artifact: Artifact) -> None:
        """Name a committed artifact in the session's index, so that another process finds it."""
        if not artifact.durable:
            return
        self._index = [*(k for k in self._index if k != artifact.key), artifact.key][-INDEX_SIZE:]
        self._asked = True
        self.tell()

    def tell(self) -> None:
        """Name what is committed, and what is ready to be, in the session's index: another process finds it there. Not
        before what that holds was read, which would be lost."""
        self._unwritten = not self._index_known
        if self._index_known:
            self._write_index()
        elif self._asked:
            self.recover_later()

    def _write_index(self) -> None:
        """Keys of what is committed, and of what is ready to be: those with start, end and what is kept inside."""
        session = self._session
        runs = {**self._ready, **session.prepared}
        ready = [[key, run.start, run.end, sorted(run.kept)] for key, run in runs.items() if key not in self._index]
        self._runtime.write(session.tenant, f"index/{session.id}", json.dumps([*ready, *self._index]).encode())

    def _store_error(self, error: Exception) -> None:
        session = self._session
        self._runtime.events.emit(
            "store.error", session=session.id, tenant=session.tenant, error=f"{type(error).__name__}: {error}"
        )

    # -- waiting -----------------------------------------------------------------------------------------------------

    async def wait_for(self, handle: LookaheadHandle, patience: float) -> None:
        """Wait at the hard limit until the handle has a result, at most ``patience`` seconds; not once it is known that
        none comes in time. It is promoted for that long, with all others that the turn could use."""
        left = patience
        with self._awaited(handle):
            while self._may_come(handle, left):
                span = min(left, LOOK_S)
                try:
                    return await handle.wait_result(span)
                except TimeoutError:
                    left -= span
            handle.waited_out = 0 < patience and left <= 0

    def wait_for_sync(self, handle: LookaheadHandle, patience: float) -> None:
        """:meth:`wait_for` for synchronous callers."""
        left = patience
        with self._awaited(handle):
            while self._may_come(handle, left):
                span = min(left, LOOK_S)
                try:
                    return handle.wait_result_sync(span)
                except TimeoutError:
                    left -= span
            handle.waited_out = 0 < patience and left <= 0

    @contextmanager
    def _awaited(self, handle: LookaheadHandle) -> Iterator[None]:
        """A turn waits inside: for this one, and of blocks for all that are under way."""
        working = [h for h in self._session.lookaheads if h.state in WORKING and h is not handle]
        with ExitStack() as stack:
            for one in (handle, *working):
                stack.enter_context(one.awaited())
            yield

    def _may_come(self, handle: LookaheadHandle, left: float) -> bool:
        return left > 0 and self._serving.away_s(handle.flight) < left


def _prepared(entry: Any) -> tuple[str, Run] | None:
    """What an index says of a result that was ready; ``None`` for anything else in it."""
    match entry:
        case [str(key), int(start), int(end), [*kept]] if 0 <= start < end and all(isinstance(i, int) for i in kept):
            return key, Run(start, end, frozenset(kept))
    return None
