"""A flight: the work behind one artifact key, shared by every handle that asks for it (single flight).

``Flight.run`` is the only place where a transform is applied: store look-up, transform, validators, edits,
savings, preload. It runs in the pool and knows nothing of the session's present state but what it was given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from . import urgency
from .codec import Codec
from .endpoints import Caller, EndpointFull, Endpoints, calling
from .errors import InvalidOutput, MessageError, StoreError, TransformError
from .foreground import Foreground
from .states import Reason
from .store import Store
from .transforms.base import Rewrite, Transform, TransformRequest, fingerprint
from .transforms.validators import NotSmaller, validate
from .usage import Cost, Usage
from .view import Artifact, Edit, Replacement, Unit, align

if TYPE_CHECKING:
    from .handle import LookaheadHandle
    from .pool import Work

Count = Callable[[Sequence[Any]], int]

#: seconds after the policy's timeout, of which a preload has as much again, until an engine's is abandoned
PRELOAD_GRACE_S = 5.0
#: seconds that a store may take to say what it has
STORED_S = 1.0
#: seconds after its timeout until code that does not end when it is cancelled is left behind
OVERDUE_S = 1.0


class Executor(Protocol):
    """Where transforms run. The default applies them on the runtime's own loop."""

    async def execute(self, transform: Transform, request: TransformRequest) -> Rewrite:
        """Apply ``transform`` and return its rewrite; raise what it raised."""
        ...


class LocalExecutor:
    """Applies the transform in the pool's task."""

    async def execute(self, transform: Transform, request: TransformRequest) -> Rewrite:
        """``await transform.apply(request)``."""
        return await transform.apply(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A frozen description of the work: everything is finished history."""

    key: str
    transform: Transform
    request: TransformRequest
    units: tuple[Unit, ...]
    #: what the raw ones among the units looked like when their digests were taken
    frozen: tuple[Any, ...]
    kept: frozenset[int]
    start: int
    end: int
    start_digest: bytes
    end_digest: bytes
    source_tokens: int
    view_tokens: int
    min_savings: float
    validators: tuple[Callable[..., Any], ...]
    count: Count
    timeout_s: float
    #: an ``Isolate``: its messages are a sub-agent's opening, not a replacement
    opening: bool = False

    def check_unedited(self) -> None:
        """The messages are the caller's own, and it may have edited them in place since: what is made of the new
        text must not be kept under the digest of the old one."""
        raw = [u.messages[0] for u in self.units if u.edit is None]
        if not self.request.codec.same(raw, list(self.frozen)):
            raise Edited("messages were edited in place while the lookahead waited or ran")


class Edited(TransformError):
    """What was to be rewritten is not what it was any more."""

    breaker_neutral = True


@dataclass(slots=True)
class Flight:
    """One piece of work and what came of it. Owned by the runtime; changed on the runtime's loop only."""

    plan: Plan
    tenant: str
    store: Store | None
    executor: Executor
    clock: Callable[[], float]
    raw: Callable[[TransformRequest], Awaitable[TransformRequest]] | None = None
    save: Callable[[Artifact], None] | None = None
    preload: Callable[[Artifact], Awaitable[bool]] | None = None
    #: called before ``preload``, which mostly waits for idle time: the pool has nothing to do for it
    idle: Callable[[], None] = lambda: None
    #: called where what it runs has not ended though its time is over: the pool goes on without it
    overdue: Callable[[], None] = lambda: None
    endpoints: Endpoints | None = None
    #: what it loads, if that is known, and whose turns it may disturb there
    engine: Any = None
    foreground: Foreground | None = None
    handles: list[LookaheadHandle] = field(default_factory=list)
    work: Work | None = None
    #: for whom its model calls are made, once they are
    caller: Caller | None = None
    artifact: Artifact | None = None
    opening: tuple[Any, ...] | None = None
    cost: Cost = field(default_factory=Cost)
    #: of its preloads
    warmed: Usage = Usage()
    #: when it came into the queue, and the seconds that the one has waited there whose place it took
    queued_at: float = 0.0
    waited_s: float = 0.0
    started_at: float | None = None
    #: when its result was there; what comes after is preload
    arrived_at: float | None = None
    ended_at: float | None = None
    #: it counts as work on ``foreground``'s engine
    burdens: bool = False
    ended: bool = False
    reason: Reason | None = None
    error: Exception | None = None
    from_store: bool = False
    accounted: bool = False
    #: nobody uses its result
    lost: bool = False

    async def run(self) -> Artifact:
        """Do the work. Raises what the transform, a validator or the savings check raised."""
        plan = self.plan
        found = await self._stored()
        if found is not None:
            self.artifact, self.from_store = found, True
        else:
            spent = self.usage
            request = replace(plan.request, on_usage=self._spend)
            plan.check_unedited()
            async with self._limited(plan.timeout_s):
                if self.raw is not None:
                    request = await self.raw(request)
                with self._calling() as self.caller:
                    rewrite = await self.executor.execute(plan.transform, request)
            plan.check_unedited()
            self.usage, self.cost.made = spent + rewrite.usage, True
            self.artifact = self._artifact(request, rewrite)
            if self.save is not None:  # before anybody can commit it: what an index names has to be there
                self.save(self.artifact)
        self.arrived_at = self.clock()
        self.settled()
        for handle in list(self.handles):
            handle.arrived()
        if self.preload is not None:
            self.idle()
            with suppress(TimeoutError):  # it gives up by itself before that
                async with self._limited(plan.timeout_s + PRELOAD_GRACE_S):
                    warm = await self.preload(self.artifact)
                    self.artifact = replace(self.artifact, warm=warm)
        return self.artifact

    @asynccontextmanager
    async def _limited(self, seconds: float) -> AsyncGenerator[None]:
        """Inside, code that is not ours has so much time. It is cancelled once: one that goes on after that would be
        cancelled in each of its awaits, which makes a loop of retries spin.

        Raises:
            TimeoutError: its time was over.
        """
        late = asyncio.get_running_loop().call_later(seconds + OVERDUE_S, lambda: self.overdue())
        try:
            async with asyncio.timeout(seconds):
                yield
        finally:
            late.cancel()

    def hurry(self) -> None:
        """A turn waits for its result: until that is there, other background work keeps out of its way as out of a
        turn's."""
        if self.foreground is not None and self.artifact is None and not self.ended:
            self.foreground.begin(id(self))
            if self.artifact is not None or self.ended:  # just now, on the runtime's loop
                self.settled()

    def settled(self) -> None:
        """The result is there, never comes, or is not waited for any more."""
        if self.foreground is not None:
            self.foreground.end(id(self))

    def _calling(self) -> AbstractContextManager[Caller | None]:
        """Whose model calls these are, for the lanes of the endpoints."""
        if self.endpoints is None:
            return nullcontext()
        plan, loop = self.plan, asyncio.get_running_loop()
        return calling(
            self.endpoints,
            self.tenant,
            plan.request.session_id,
            self.urgent,
            self.foreground,
            aside_s=urgency.aside_s(plan.timeout_s),
            ends_at=loop.time() + plan.timeout_s,
        )

    def urgent(self) -> bool:
        """Does a turn wait for its result?"""
        return any(handle.promoted for handle in list(self.handles))

    def _spend(self, usage: Usage) -> None:
        """One call's usage as it ends: it counts even if the transform fails afterwards."""
        self.usage = self.usage + usage

    @property
    def usage(self) -> Usage:
        """What its result has cost."""
        return self.cost.usage

    @usage.setter
    def usage(self, usage: Usage) -> None:
        self.cost.usage = usage

    @property
    def busy_s(self) -> float:
        """Seconds from start to end, or so far, on the runtime's clock."""
        return (self.clock() if self.ended_at is None else self.ended_at) - (self.started_at or 0.0)

    @property
    def write_s(self) -> float:
        """Seconds from start to result, without the preload after it."""
        return (self.arrived_at or 0.0) - (self.started_at or 0.0)

    @property
    def answering(self) -> bool:
        """Is a model at work for it now?"""
        return self.caller is not None and self.caller.calls > 0

    @property
    def usable(self) -> bool:
        """Could a turn have some result of it at once?"""
        return self.caller is not None and self.caller.usable

    @property
    def paused_s(self) -> float:
        """Seconds until it is tried again; 0 where it does not wait for that."""
        resumes_at = None if self.work is None else self.work.resumes_at
        return 0.0 if resumes_at is None else max(0.0, resumes_at - self.clock())

    def remaining_s(self, usual: float | None) -> float | None:
        """Seconds of work expected to be left, given the usual duration; ``None`` while unknown."""
        if usual is None:
            return None
        spent = 0.0 if self.started_at is None else self.clock() - self.started_at
        return max(0.0, usual - spent)

    @property
    def keys(self) -> list[str]:
        """Of its result, and of the candidates in it."""
        candidates = self.artifact.alternatives if self.artifact is not None else ()
        return [self.plan.key, *(a.key for a in candidates if a is not None)]

    def _artifact(self, request: TransformRequest, rewrite: Rewrite) -> Artifact:
        """What passed the checks; of several candidates those that did."""
        plan = self.plan
        if not rewrite.alternatives:
            validate(request, rewrite, plan.validators)
            return self._made(rewrite, plan.key)
        made: list[Artifact | None] = []
        failed: InvalidOutput | None = None
        for k, candidate in enumerate(rewrite.alternatives):
            made.append(None)
            if candidate is None:
                continue
            try:
                validate(request, candidate, plan.validators)
                made[k] = self._made(candidate, fingerprint("candidate", {"of": plan.key, "index": k}))
            except InvalidOutput as error:
                failed = failed or error
        first = next((a for a in made if a is not None), None)
        if first is None:
            raise failed or InvalidOutput(f"{plan.transform.name}: no candidate has a result")
        return replace(first, key=plan.key, usage=rewrite.usage, alternatives=tuple(made))

    def _made(self, rewrite: Rewrite, key: str) -> Artifact:
        plan = self.plan
        if plan.opening:
            self.opening = tuple(rewrite.messages)
            edits: tuple[Edit, ...] = ()
        else:
            edits = align(plan.units, plan.kept, rewrite.messages, plan.count)
        tokens = sum(e.tokens for e in edits)
        replaced = {i for e in edits for i in range(e.start, e.end)} | plan.kept
        passed = sum(plan.count(u.messages) for u in plan.units if u.edit is None and u.start not in replaced)
        saved = plan.source_tokens - tokens - passed
        if not plan.opening and (not edits or saved < plan.min_savings * plan.view_tokens):
            raise NotSmaller(
                f"{plan.transform.name} saves {saved} of {plan.view_tokens} tokens; "
                f"min_savings asks for {plan.min_savings:.0%}"
            )
        return Artifact(
            key=key,
            transform=plan.transform.name,
            replacement=Replacement(
                start=plan.start,
                end=plan.end,
                start_digest=plan.start_digest,
                end_digest=plan.end_digest,
                edits=edits,
            ),
            usage=rewrite.usage,
            created=self.clock(),
            tokens=tokens,
            durable=plan.transform.fingerprint is not None,
        )

    async def _stored(self) -> Artifact | None:
        """What another process or an earlier run left under this key. A store's failure is not ours."""
        if self.store is None or self.plan.transform.fingerprint is None or self.plan.opening:
            return None
        if self.plan.request.missed is not None:  # what is there was refused
            return None
        try:
            async with asyncio.timeout(STORED_S):
                data = await self.store.get(self.tenant, f"artifact/{self.plan.key}")
                if data is not None:
                    artifact = load_artifact(self.plan.request.codec, data)
                    return artifact if _matches(artifact, self.plan) else None
        except Exception:  # corrupt or unreachable: do the work
            return None
        return None


def _matches(artifact: Artifact, plan: Plan) -> bool:
    r = artifact.replacement
    return (artifact.key, r.start, r.end, r.start_digest, r.end_digest) == (
        plan.key,
        plan.start,
        plan.end,
        plan.start_digest,
        plan.end_digest,
    )


def reason_of(error: Exception) -> Reason:
    """The typed reason for a failure."""
    if isinstance(error, NotSmaller):
        return Reason.NOT_SMALLER
    if isinstance(error, InvalidOutput):
        return Reason.INVALID_OUTPUT
    if isinstance(error, EndpointFull):
        return Reason.QUEUE_FULL
    if isinstance(error, Edited):
        return Reason.DIGEST_MISMATCH
    if isinstance(error, TimeoutError):
        return Reason.TIMEOUT
    return Reason.FAILED


def dump_artifact(codec: Codec, artifact: Artifact) -> bytes:
    """An artifact as JSON, for a store."""
    return json.dumps({"v": 1, "codec": codec.name, **_dumped(codec, artifact)}).encode()


def _dumped(codec: Codec, artifact: Artifact) -> dict[str, Any]:
    r = artifact.replacement
    found: dict[str, Any] = {
        "key": artifact.key,
        "transform": artifact.transform,
        "start": r.start,
        "end": r.end,
        "start_digest": r.start_digest.hex(),
        "end_digest": r.end_digest.hex(),
        "edits": [[e.start, e.end, e.tokens, codec.dump(e.messages).decode("utf-8", "surrogatepass")] for e in r.edits],
        "usage": [artifact.usage.input_tokens, artifact.usage.output_tokens, artifact.usage.calls],
        "tokens": artifact.tokens,
    }
    if artifact.alternatives:
        found["alternatives"] = [None if a is None else _dumped(codec, a) for a in artifact.alternatives]
    return found


def load_artifact(codec: Codec, data: bytes) -> Artifact:
    """Read back what :func:`dump_artifact` wrote.

    Raises:
        StoreError: when it is corrupt, or was written for another codec.
    """
    try:
        d = json.loads(data)
        if d["v"] != 1 or d["codec"] != codec.name:
            raise StoreError(f"artifact of codec {d['codec']!r} version {d['v']!r} cannot be read by {codec.name!r}")
        return _loaded(codec, d)
    except (KeyError, TypeError, ValueError, AttributeError, MessageError) as error:
        raise StoreError(f"stored artifact is corrupt: {type(error).__name__}: {error}") from error


def _loaded(codec: Codec, d: dict[str, Any]) -> Artifact:
    edits = tuple(
        Edit(start=int(s), end=int(e), tokens=int(t), messages=tuple(codec.load(m.encode("utf-8", "surrogatepass"))))
        for s, e, t, m in d["edits"]
    )
    start, end = int(d["start"]), int(d["end"])
    ordered = [start, *(x for e in edits for x in (e.start, e.end)), end]
    if start < 0 or ordered != sorted(ordered):
        raise StoreError("artifact edits are out of order")
    tokens_in, tokens_out, calls = d["usage"]
    return Artifact(
        key=str(d["key"]),
        transform=str(d["transform"]),
        replacement=Replacement(
            start=start,
            end=end,
            start_digest=bytes.fromhex(d["start_digest"]),
            end_digest=bytes.fromhex(d["end_digest"]),
            edits=edits,
        ),
        usage=Usage(input_tokens=int(tokens_in), output_tokens=int(tokens_out), calls=int(calls)),
        tokens=int(d["tokens"]),
        durable=True,
        alternatives=tuple(None if a is None else _loaded(codec, a) for a in d.get("alternatives", ())),
    )
