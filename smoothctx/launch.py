"""The launcher: a session's way to the outside. Builds flights, and talks to the pool, the engine and the store.

The session decides; the launcher carries out. It holds no state of the branch, only the engine binding and the
latest messages that a preload may warm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from .cuts import Run, kept_inside, safe_end, source_tokens
from .digest import chain
from .errors import ConfigurationError, StoreError
from .flight import Flight, Plan, dump_artifact, load_artifact
from .handle import LookaheadHandle
from .states import HandleState
from .transforms import named_transforms
from .transforms.base import Transform, TransformRequest, fingerprint
from .transforms.isolate import Isolate
from .transforms.offload import Offload, offload_message, retrieve
from .transforms.validators import default_validators
from .view import Artifact, Edit, Replacement, project, units

if TYPE_CHECKING:
    from .engines.binding import EngineBinding
    from .runtime import Runtime
    from .session import Session

T = TypeVar("T")

#: seconds that the first commit of a session may wait for what another process left in the store
STORE_WAIT = 0.010
#: seconds that one transform may take, retries included
TIMEOUT = 300.0
#: tokens of an offloaded entry's preview
PREVIEW_TOKENS = 64
#: artifacts that a session's index in the store names
INDEX_SIZE = 16


class _Written:
    """The runtime's store for reading, with what still waits to be written to it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def get(self, tenant: str, key: str) -> bytes | None:
        waiting = self._runtime.pending(tenant, key)
        return waiting if waiting is not None else await self._runtime.store.get(tenant, key)


class Launcher:
    """Carries out what one session decides."""

    def __init__(self, runtime: Runtime, session: Session) -> None:
        self._runtime = runtime
        self._session = session
        self._foreground = runtime.foreground(session.engine)
        bind = getattr(session.engine, "bind", None)
        self._binding: EngineBinding | None = self._ask("bind", lambda: bind(session.id), None) if bind else None
        self._latest: list[Any] = []
        self._index: list[str] = []
        self._rewarming = False
        self._preloading = ""  # the artifact whose view the engine is warming, or has warmed
        #: rewrite mode: how many messages the rewritten head has, its digest, and the store key of its raw form
        self.archived: tuple[int, bytes, str] | None = None
        self._last_raw: list[Any] = []

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

    def launch(
        self,
        messages: Sequence[Any],
        transform: Transform,
        run: Run,
        *,
        explicit: bool,
        preload_kv: bool | None,
        due: float | None,
    ) -> LookaheadHandle:
        """Make a handle, and start its flight or join the one that is under way."""
        session, runtime = self._session, self._runtime
        branch = session.branch
        history = branch.history
        opening = isinstance(transform, Isolate)
        print_ = transform.fingerprint
        parts = [
            print_ or self._runtime.private_id(transform),
            str(run.start),
            history.chain[run.start].hex(),
            history.chain[run.end].hex(),
        ]
        key = fingerprint("artifact", {"parts": parts, "kept": sorted(run.kept)})
        flight = runtime.flight(session.tenant, key)
        held = session.held(key)
        if held is not None:  # made earlier, for this very prefix: nothing to do again
            plan = self._plan(key, messages, transform, run, opening)
            done = Flight(plan=plan, tenant=session.tenant, store=None, executor=runtime.executor, clock=runtime.now)
            done.artifact, done.ended, done.from_store = held, True, True
            handle = LookaheadHandle(session, transform, run, done, explicit=explicit)
            runtime.started(handle)
            handle.move(HandleState.READY)
            return handle
        if flight is None:
            plan = self._plan(key, messages, transform, run, opening)
            flight = Flight(
                plan=plan,
                tenant=session.tenant,
                store=runtime.store,
                executor=runtime.executor,
                clock=runtime.now,
                raw=self._raw_loader(transform, run),
                save=None if opening else self.save,
            )
            if not opening and self._preloads(preload_kv):
                flight.preload = lambda artifact, own=flight: self._preload(own, artifact)
            flight = runtime.claim(flight)
        handle = LookaheadHandle(session, transform, run, flight, explicit=explicit)
        self._latest = list(messages)
        runtime.join(flight, handle, due=due)
        return handle

    def _plan(self, key: str, messages: Sequence[Any], transform: Transform, run: Run, opening: bool) -> Plan:
        session, runtime = self._session, self._runtime
        branch, policy, codec = session.branch, session.policy, session.codec
        history = branch.history
        source = getattr(transform, "source", "view")
        edits = branch.readable if source == "view" else ()
        pieces = units(messages, edits, run.start, run.end)
        shown = [m for u in pieces if not (u.edit is None and u.start in run.kept) for m in u.messages]
        earlier = next((t for t in map(codec.summary_text, shown) if t is not None), None)
        whole = [m for u in pieces for m in u.messages]
        before = project(messages[: run.start], [e for e in branch.edits if e.end <= run.start and e.start < run.start])
        request = TransformRequest(
            messages=shown,
            shown=whole if len(whole) != len(shown) else None,
            before=before,
            codec=codec,
            earlier_summary=earlier,
            pins=session.pins,
            live_tasks=session.tasks,
            deadline=runtime.now() + TIMEOUT,
            tenant=session.tenant,
            session_id=session.id,
            store=runtime.store,
            context_tokens=policy.context_window,
            options=self._aligned(transform),
        )
        # What the run costs the view now, whatever the transform reads.
        spent = source_tokens(history, branch.edits, run)
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
            view_tokens=history.tokens[-1] + sum(e.tokens - history.span(e.start, e.end) for e in branch.edits),
            min_savings=policy.min_savings,
            validators=(*default_validators(), *policy.validators),
            count=history.count,
            timeout_s=TIMEOUT,
            opening=opening,
        )

    def removal(self, run: Run) -> Artifact:
        """A local artifact that removes a run (the fallback): it needs no model and cannot fail."""
        history = self._session.branch.history
        edits: list[Edit] = []
        position = run.start
        for index in [*sorted(run.kept), run.end]:
            if index > position:
                edits.append(Edit(start=position, end=index, messages=(), tokens=0))
            position = index + 1
        return self._local(
            "keep_recent", run.start, run.end, tuple(edits), history.chain[run.start], history.chain[run.end]
        )

    def entry(self, message: Any, index: int) -> Artifact | None:
        """One oversized tool result as a local offload; its content goes to the store in the background."""
        session = self._session
        limit = session.policy.max_message_tokens or 0
        own = self.offload()
        made = offload_message(
            message,
            session.codec,
            max_tokens=limit,
            preview_tokens=min(PREVIEW_TOKENS, limit // 2),
            redact=own.redact if own is not None else None,
            pins=session.pins,
        )
        if made is None:
            return None
        stub, content_id, content = made
        self._runtime.write(session.tenant, content_id, content)
        history = session.branch.history
        edit = Edit(start=index, end=index + 1, messages=(stub,), tokens=history.count([stub]))
        self._runtime.events.emit(
            "message.offloaded",
            session=session.id,
            tenant=session.tenant,
            index=index,
            id=content_id,
            bytes=len(content),
        )
        return self._local("offload", index, index + 1, (edit,), history.chain[index], history.chain[index + 1])

    def offload(self) -> Offload | None:
        """The policy's own ``Offload``, alone or in a chain."""
        transform = self._session.policy.transform
        members = getattr(transform, "transforms", (transform,))
        return next((m for m in members if isinstance(m, Offload)), None)

    async def retrieve(self, id: str, offset: int, limit: int) -> str:
        """A page of what was offloaded: from the ``Offload``'s own store if it has one, else from the runtime's."""
        own, tenant = self.offload(), self._session.tenant
        if own is not None and own.store is not None:
            found = await own.retrieve(id, offset, limit, tenant=tenant)
            if not found.startswith("error: no offloaded content"):
                return found
        return await retrieve(_Written(self._runtime), id, offset, limit, tenant=tenant)

    def _local(
        self, name: str, start: int, end: int, edits: tuple[Edit, ...], start_digest: bytes, end_digest: bytes
    ) -> Artifact:
        key = fingerprint(
            name, {"start": start_digest.hex(), "end": end_digest.hex(), "edits": [[e.start, e.end] for e in edits]}
        )
        return Artifact(
            key=key,
            transform=name,
            replacement=Replacement(
                start=start, end=end, start_digest=start_digest, end_digest=end_digest, edits=edits
            ),
            created=self._runtime.now(),
            tokens=sum(e.tokens for e in edits),
        )

    # -- raw sources in rewrite mode -----------------------------------------------------------------------------

    def sent(self, messages: Sequence[Any], rewritten: bool) -> None:
        """Remember the raw messages behind a rewritten view, by reference."""
        self._last_raw = list(messages) if rewritten else []

    def archive(self) -> None:
        """Rewrite mode: the caller dropped the raw messages; keep them in the store for ``source="raw"``."""
        session = self._session
        branch = session.branch
        last = max((e.end for e in branch.edits), default=0)
        lead = branch.history.segmenter.lead
        if not self._last_raw or last <= lead:
            return
        head = project(self._last_raw[:last], [e for e in branch.edits if e.end <= last])
        raw = self._last_raw[lead:last]
        key = f"raw/{session.id}/{branch.history.chain[last].hex()}"
        # Earlier archives chain: the new one names the one before it.
        earlier = self._archive_of_this_branch()
        record = json.dumps({"before": earlier[1] if earlier else None, "skip": earlier[0] - lead if earlier else 0})
        self._runtime.write(session.tenant, key, record.encode() + b"\n" + session.codec.dump(raw))
        self.archived = (len(head), chain(session.codec, head)[-1], key)
        self._last_raw = []

    def _archive_of_this_branch(self) -> tuple[int, str] | None:
        """Length and store key of the archived head, if the history still begins with it."""
        if self.archived is None:
            return None
        length, digest, key = self.archived
        digests = self._session.branch.history.chain
        return (length, key) if length < len(digests) and digests[length] == digest else None

    def _raw_loader(self, transform: Transform, run: Run) -> Any:
        """For ``source="raw"`` behind an archived base: reads the raw messages back, or says that they are gone."""
        session, runtime = self._session, self._runtime
        archived = self._archive_of_this_branch()
        if archived is None or getattr(transform, "source", "view") != "raw":
            return None
        length, key = archived
        if run.start != session.branch.history.segmenter.lead or run.end < length:
            return None  # it takes the rewritten head whole or not at all
        behind = length - run.start
        kept = sum(run.start <= i < length for i in run.kept)  # not in `request.messages`, but in `request.shown`

        async def load(request: TransformRequest) -> TransformRequest:
            raw = await self._read_archive(key)
            if raw is None:
                runtime.events.emit(
                    "source.degraded",
                    session=session.id,
                    tenant=session.tenant,
                    why="the raw messages are not in the store any more",
                )
                return request
            shown = request.shown if request.shown is not None else request.messages
            return replace(
                request,
                messages=[*raw, *request.messages[behind - kept :]],
                shown=[*raw, *shown[behind:]],
                earlier_summary=None,
            )

        return load

    async def _read_archive(self, key: str) -> list[Any] | None:
        try:
            data = await self._runtime.store.get(self._session.tenant, key)
            if data is None:
                return None
            head, _, body = data.partition(b"\n")
            record = json.loads(head)
            messages = self._session.codec.load(body)
            if record["before"] is None:
                return messages
            before = await self._read_archive(record["before"])
            return None if before is None else [*before, *messages[record["skip"] :]]
        except Exception as error:
            self._store_error(error)
            return None

    # -- the store -------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Before a session's first commit: what another process left, if it comes within ``STORE_WAIT``."""
        if not self._runtime.shares_artifacts:
            return
        try:
            with anyio.move_on_after(STORE_WAIT):
                await self._load_index()
        except Exception as error:
            self._store_error(error)

    async def _load_index(self) -> None:
        session, store = self._session, self._runtime.store
        data = await store.get(session.tenant, f"index/{session.id}")
        if data is None:
            return
        keys = [k for k in json.loads(data) if isinstance(k, str)][-INDEX_SIZE:]
        for key in keys:
            found = await store.get(session.tenant, f"artifact/{key}")
            if found is not None:
                try:
                    session.adopt(load_artifact(session.codec, found))
                except StoreError as error:
                    self._store_error(error)
        self._index = keys

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
        session = self._session
        self._index = [*(k for k in self._index if k != artifact.key), artifact.key][-INDEX_SIZE:]
        self._runtime.write(session.tenant, f"index/{session.id}", json.dumps(self._index).encode())

    def _store_error(self, error: Exception) -> None:
        session = self._session
        self._runtime.events.emit(
            "store.error", session=session.id, tenant=session.tenant, error=f"{type(error).__name__}: {error}"
        )

    # -- waiting -----------------------------------------------------------------------------------------------------

    async def wait_for(self, handle: LookaheadHandle, patience: float) -> None:
        """Wait at the hard limit until the handle has a result, at most ``patience`` seconds."""
        try:
            await handle.wait_result(patience)
        except TimeoutError:
            pass

    def wait_for_sync(self, handle: LookaheadHandle, patience: float) -> None:
        """:meth:`wait_for` for synchronous callers."""
        try:
            handle.wait_result_sync(patience)
        except TimeoutError:
            pass

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _ask(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """Ask the engine's binding; what it raises is an event, never the turn's."""
        try:
            return call()
        except Exception as error:
            self._runtime.events.error(
                error, where=f"engine.{what}", session=self._session.id, tenant=self._session.tenant
            )
            return otherwise

    def request_options(self) -> dict[str, Any]:
        """Options of the agent's next call."""
        binding = self._binding
        return self._ask("request_options", lambda: dict(binding.request_options()), {}) if binding is not None else {}

    def foreground_begin(self, who: object) -> None:
        """A turn or a call is due."""
        self._foreground.begin(who)

    def foreground_first_token(self, who: object, turn: object) -> None:
        """The first token of a call, and so of its turn, is there."""
        self._foreground.first_token(who)
        self._foreground.first_token(turn)

    def foreground_poke(self) -> None:
        """Background work that waits for the foreground asks again whether it still has to."""
        self._foreground.poke()

    def foreground_end(self, who: object) -> None:
        """The turn or call is over."""
        self._foreground.end(who)

    def work_s(self, output_tokens: int, prompt_tokens: int) -> float | None:
        """Seconds to write a result and to preload its view, at the rates that the engine has shown."""
        rates = getattr(self._session.engine, "rates", None)
        if rates is None or not rates.prefill or not rates.decode or not self._preloads(None):
            return None
        return float(output_tokens / rates.decode + prompt_tokens / rates.prefill)

    def _preloads(self, preload_kv: bool | None) -> bool:
        wish = self._session.policy.preload_kv if preload_kv is None else preload_kv
        if self._binding is None or wish is False:
            return False
        return True if wish is True else bool(getattr(self._session.engine, "preload_by_default", False))

    def _aligned(self, transform: Transform) -> dict[str, Any]:
        """For a summariser on the agent's own engine: the constant part of its request, and where its cache is."""
        session = self._session
        if session.engine is None or not _uses(transform, session.engine):
            return {}
        options = dict(session.request)
        if (binding := self._binding) is not None:
            none: dict[str, Any] = {}
            own = self._ask("options", lambda: dict(binding.transform_options(self._foreground, session.urgent)), none)
            options.update(own)
        return options

    async def _preload(self, flight: Flight, artifact: Artifact) -> bool:
        session = self._session
        if self._binding is None:
            return False
        self._preloading = artifact.key

        def view() -> list[dict[str, Any]]:
            shown = session.preview(artifact, self._latest)
            return [session.codec.to_openai(m) for m in shown]

        def needed() -> bool:
            return any(h.state in (HandleState.PENDING, HandleState.RUNNING, HandleState.READY) for h in flight.handles)

        try:
            report = await self._binding.preload(
                view,
                request=session.request,
                foreground=self._foreground,
                needed=needed,
                hurried=lambda rate: session.hurried(rate, artifact),
            )
        except Exception as error:  # a cold commit is slower, never wrong
            self._runtime.events.error(error, where="preload", session=session.id, tenant=session.tenant)
            return False
        self._runtime.preloaded(report.usage)
        self._runtime.events.emit(
            "preload",
            session=session.id,
            tenant=session.tenant,
            complete=report.complete,
            tokens=report.tokens,
            requests=report.requests,
        )
        return bool(report.complete)

    def grew(self, handle: LookaheadHandle, messages: Sequence[Any]) -> None:
        """The history grew while a lookahead lives: preload warms what was added too."""
        self._latest = list(messages)
        flight = handle.flight
        if handle.state is HandleState.READY and flight.preload is not None and not self._rewarming and flight.artifact:
            artifact, preload = flight.artifact, flight.preload
            self._rewarming = True

            async def again() -> None:
                try:
                    warm = await preload(artifact)
                    if flight.artifact is artifact:
                        flight.artifact = replace(artifact, warm=warm)
                finally:
                    self._rewarming = False

            def never() -> None:
                self._rewarming = False

            self._runtime.background(f"preload:{self._session.id}", again, self._session, never)

    def committed(self, artifact: Artifact) -> None:
        """If it was preloaded, what the engine holds of it is what the agent sends from now on."""
        if (binding := self._binding) is not None and self._preloading == artifact.key:
            self._preloading = ""
            self._ask("committed", lambda: binding.committed(artifact.warm), None)
            self._foreground.poke()

    def discarded(self, key: str) -> None:
        """If this artifact was preloaded (or its summary was being written), its slot is free again."""
        binding = self._binding
        if binding is not None and self._preloading in ("", key) and not self._session.working():
            self._preloading = ""
            self._ask("discarded", binding.discarded, None)
            self._foreground.poke()

    def close(self) -> None:
        """Give the engine's slots back."""
        if self._binding is not None:
            self._ask("close", self._binding.close, None)
        self._latest, self._last_raw = [], []


def _uses(transform: Transform, engine: Any) -> bool:
    members = getattr(transform, "transforms", (transform,))
    return any(getattr(m, "engine", None) is engine for m in members)
