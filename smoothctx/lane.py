"""The lane: the blocks of one session whose policy compacts them as they fill.

Every filled block has a handle and a replacement of its own. Nothing is committed before the trigger; then all
finished leading blocks go into the view at one boundary. What ``total_tokens`` does not allow waits until the oldest
summaries have been merged. Used under the session's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .blocks import Block, Progress, cut, leading, merge
from .cuts import Run, fresh, kept_inside, plan, safe_end, source_tokens
from .handle import LookaheadHandle
from .launch import Launcher
from .serving import Serving
from .states import FINAL, WORKING, HandleState, Reason
from .transforms.parallel import ParallelSummarize
from .view import Applied, Artifact

if TYPE_CHECKING:
    from .runtime import Runtime
    from .session import Session

#: how often one block is tried, beside the retries of each flight; then it stays raw for `RETRY_S` seconds
MAX_ATTEMPTS = 2
RETRY_S = 600.0
#: blocks that are remembered as failed
MAX_FAILED = 256

Drop = Callable[[LookaheadHandle, Reason], None]
Digests = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of the present history. ``tokens`` are those of its summary, where there is one."""

    block: Block
    progress: Progress
    tokens: int = 0
    handle: LookaheadHandle | None = None


class Lane:
    """Prepares the blocks of one session and says which of them may be committed."""

    def __init__(
        self, runtime: Runtime, session: Session, launcher: Launcher, serving: Serving, transform: ParallelSummarize
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._launcher = launcher
        self._serving = serving
        self.transform = transform
        self._handles: list[LookaheadHandle] = []
        self._merging: LookaheadHandle | None = None
        self._failed: OrderedDict[Digests, tuple[int, float]] = OrderedDict()
        self._warmed = ""  # the artifact for whose view a preload was started last

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def handles(self) -> list[LookaheadHandle]:
        """The live ones, oldest block first."""
        merging = [] if self._merging is None else [self._merging]
        live = [h for h in [*merging, *self._handles] if h.state not in FINAL]
        return sorted(live, key=lambda h: (h.run.start, h.run.end))

    @property
    def first(self) -> LookaheadHandle | None:
        """The live handle of the oldest block."""
        return next(iter(self.handles), None)

    def holds(self, handle: LookaheadHandle) -> bool:
        """Is it one of these blocks?"""
        return handle is self._merging or handle in self._handles

    def forget(self, handle: LookaheadHandle) -> None:
        """It is final."""
        if handle is self._merging:
            self._merging = None
        self._handles = [h for h in self._handles if h is not handle]

    def pieces(self, messages: Sequence[Any], *, at_limit: bool = False) -> tuple[list[Piece], int]:
        """The blocks of the history, oldest first, and where the part begins that has not filled one yet."""
        history = self._session.branch.history
        limit = safe_end(history)
        found: list[Piece] = []
        live = [h for h in self._handles if h.state not in FINAL]
        applied = [(a, t) for a in self._session.branch.applied if (t := self._summary_tokens(a))]
        position = history.segmenter.lead
        while position < limit:
            handle = max((h for h in live if h.run.start == position), key=lambda h: h.run.end, default=None)
            if handle is not None:  # before what is shown: a merged one takes its place
                found.append(self._piece(handle, at_limit))
                position = handle.run.end
                continue
            shown = next((x for x in applied if _range(x[0])[0] <= position < _range(x[0])[1]), None)
            if shown is not None:
                start, end = _range(shown[0])
                found.append(Piece(self._block(start, end), Progress.COMMITTED, shown[1]))
                position = end
                continue
            if not any(p.progress is not Progress.COMMITTED for p in found) and self._is_summary(messages, position):
                block = self._block(position, position + 1)  # the caller's own list holds it: rewrite mode
                found.append(Piece(block, Progress.COMMITTED, block.tokens))
                position += 1
                continue
            ahead = [_range(a)[0] for a, _ in applied] + [h.run.start for h in live]
            stop = min((s for s in ahead if s > position), default=limit)
            size = self.transform.block_tokens
            for block in cut(history.segmenter.segments, history.tokens, size, start=position, end=min(stop, limit)):
                if not block.filled and stop >= limit:
                    return found, block.start
                given_up = self._given_up(block.start, block.end)
                found.append(Piece(block, Progress.FAILED if given_up else Progress.WORKING))
            position = stop
        return found, min(position, len(history))

    def _piece(self, handle: LookaheadHandle, at_limit: bool) -> Piece:
        artifact = _result(handle, at_limit)
        block = self._block(handle.run.start, handle.run.end)
        if artifact is None:
            return Piece(block, Progress.WORKING, 0, handle)
        return Piece(block, Progress.READY, artifact.tokens, handle)

    def _block(self, start: int, end: int) -> Block:
        history = self._session.branch.history
        tools = sum(
            history.span(s.start, min(s.end, end))
            for s in history.segmenter.segments[history.segmenter.at(start) or 0 :]
            if start <= s.start < end and s.kind in ("tools", "orphan")
        )
        return Block(start, end, history.span(start, end), tools)

    def _is_summary(self, messages: Sequence[Any], index: int) -> bool:
        return self._session.codec.summary_text(messages[index]) is not None

    def _summary_tokens(self, applied: Applied) -> int:
        """Tokens of the summaries that this shows; 0 where it shows none."""
        codec = self._session.codec
        return sum(e.tokens for e in applied.edits if any(codec.summary_text(m) is not None for m in e.messages))

    # -- preparing ---------------------------------------------------------------------------------------------------

    def consider(self, messages: Sequence[Any], drop: Drop, *, due: bool = False) -> LookaheadHandle | None:
        """Start what is filled. Returns the first live handle; with ``due`` the one that is worth waiting for."""
        self._tidy(drop)
        pieces, rest = self.pieces(messages)
        working = sum(h.state in WORKING for h in self._handles)
        for k, piece in enumerate(pieces):
            if piece.progress is not Progress.WORKING or piece.handle is not None:
                continue
            if working >= self.transform.workers:
                break
            working += self._start(messages, piece.block, [p.block for p in pieces[: k + 1]]) is not None
        self._merge(messages, pieces, drop)
        policy, branch = self._session.policy, self._session.branch
        reached = policy.reached(branch.tokens + policy.reserved_tokens, branch.messages)
        idle = all(p.progress in (Progress.COMMITTED, Progress.FAILED) for p in pieces) and self._merging is None
        if (reached or due) and idle:
            self._start_rest(messages, pieces, rest)
        self._serving.follow(messages)
        self._warm(messages, self._chosen(messages))
        if not due:
            return self.first
        waiting = [h for h in self.handles if h.state in WORKING]
        for handle in waiting:
            handle.promote()
        merging = self._merging
        return merging if merging in waiting else next(iter(waiting), None)

    def _tidy(self, drop: Drop) -> None:
        """Drop what something else has overtaken."""
        branch = self._session.branch
        for handle in self.handles:
            artifact = handle.flight.artifact
            if artifact is not None and (refusal := branch.refusal(artifact)) is not None:
                drop(handle, refusal)
            elif any(
                start <= handle.run.start and handle.run.end <= end
                for start, end in (_range(a) for a in branch.applied if self._summary_tokens(a))
            ):
                drop(handle, Reason.SUPERSEDED)

    def _start(self, messages: Sequence[Any], block: Block, upto: Sequence[Block]) -> LookaheadHandle | None:
        history = self._session.branch.history
        run = Run(block.start, block.end, kept_inside(history, block.start, block.end))
        if block.end - block.start <= len(run.kept):
            self._note(block.start, block.end, MAX_ATTEMPTS)  # all of it stays word for word
            return None
        handle = self._launch(messages, run, self.transform.shares(upto)[-1])
        self._handles.append(handle)
        if handle.state in FINAL:
            self.forget(handle)
            return None
        return handle

    def _start_rest(self, messages: Sequence[Any], pieces: Sequence[Piece], rest: int) -> None:
        """The trigger is reached and no block is filled: what there is becomes one."""
        session = self._session
        branch, policy = session.branch, session.policy
        cap = self.transform.block_cap
        run = plan(
            branch.history,
            branch.edits,
            policy,
            self.transform.keep,
            land=policy.land_at,
            expected=sum(p.tokens for p in pieces) + cap,
            scale=branch.scale,
            behind=rest,
        )
        if run is None or not fresh(branch.edits, run) or self._given_up(run.start, run.end):
            return
        source = source_tokens(branch.history, branch.edits, run)
        if (source - min(cap, source // 4)) * branch.scale >= policy.min_savings * branch.tokens:
            block = self._block(run.start, run.end)
            self._start(messages, block, [*(p.block for p in pieces), block])

    def _launch(self, messages: Sequence[Any], run: Run, cap: int, merged: Sequence[Artifact] = ()) -> LookaheadHandle:
        session = self._session
        if not session.branch.history.unchanged(messages):
            raise ValueError("the history was edited in place: it has to be read again first")
        return self._launcher.launch(
            messages,
            self.transform,
            run,
            explicit=False,
            preload_kv=None,
            due=session.due(),
            cap=cap,
            readable=session.branch.overlaid(merged, messages),
        )

    # -- the total ---------------------------------------------------------------------------------------------------

    def affordable(self, artifact: Artifact) -> bool:
        """Would the view's summaries stay within ``total_tokens`` with this one among them?"""
        total = self.transform.total_tokens
        if total is None:
            return True
        r = artifact.replacement
        codec = self._session.codec
        own = sum(e.tokens for e in r.edits if any(codec.summary_text(m) is not None for m in e.messages))
        kept = [a for a in self._session.branch.applied if _range(a)[0] < r.start or _range(a)[1] > r.end]
        return not own or own + sum(map(self._summary_tokens, kept)) <= total

    def _aim(self) -> int | None:
        """What the summaries may have together before the oldest are merged. Without ``total_tokens`` a part of where
        a commit should land: a view of nothing but summaries could not be brought there any more."""
        total = self.transform.total_tokens
        if total is None:
            land = self._session.policy.limit_tokens(self._session.policy.land_at)
            return None if land is None else land // 2
        return total

    def _merge(self, messages: Sequence[Any], pieces: Sequence[Piece], drop: Drop) -> None:
        """Merge the oldest summaries before the next one is too much."""
        total = self._aim()
        if total is None or self._merging is not None:
            return
        end = self._cut(pieces)
        having = [p for p in pieces if p.progress in (Progress.COMMITTED, Progress.READY)]
        standing = [p for p in having if p.progress is Progress.COMMITTED or p.block.end <= end]
        ahead = 0 if len(standing) < len(having) else self.transform.block_cap
        if sum(p.tokens for p in standing) + min(ahead, total // 4) <= total:
            return
        group = _neighbours(standing)
        shares = dict(zip((p.block for p in pieces), self.transform.shares([p.block for p in pieces]), strict=True))
        allotted = [shares[p.block] for p in group]
        count = merge([(p.block.start, p.block.end, p.tokens) for p in group], allotted, total_tokens=total)
        while count is not None and count <= len(group):
            chosen = group[:count]
            start, stop = chosen[0].block.start, chosen[-1].block.end
            if not self._given_up(start, stop):
                cap = min(self.transform.block_cap, sum(allotted[:count]), sum(p.tokens for p in chosen) // 2)
                made = [p.handle.flight.artifact for p in chosen if p.handle is not None]
                history = self._session.branch.history
                run = Run(start, stop, kept_inside(history, start, stop))
                self._merging = self._launch(messages, run, cap, [a for a in made if a is not None])
                if self._merging.state is HandleState.READY:  # it was made before
                    self.ended(self._merging, None, drop)
                elif self._merging.state in FINAL:
                    self._merging = None
                return
            count += 1

    # -- committing --------------------------------------------------------------------------------------------------

    def commit(self, messages: Sequence[Any], drop: Drop, *, at_limit: bool) -> list[LookaheadHandle]:
        """The handles that go into the view at this boundary, all of them or none, oldest first."""
        self._tidy(drop)
        session = self._session
        branch, policy = session.branch, session.policy
        chosen = self._chosen(messages, at_limit=at_limit)
        artifacts = [a for a in (h.flight.artifact for h in chosen) if a is not None]
        if not artifacts:
            return []
        weighed = branch.weigh(artifacts, messages)
        if at_limit:
            return chosen if weighed.saved > 0 else []
        if policy.commit == "hard_limit" or not policy.reached(branch.tokens + policy.reserved_tokens, branch.messages):
            return []
        warm = artifacts[-1].warm
        if weighed.saved < policy.min_savings * branch.tokens or (weighed.saved < weighed.rebilled and not warm):
            return []  # promise 9
        if not warm and self._serving.warming and self._warmed == artifacts[-1].key:
            return []  # its view is being preloaded: a turn later it costs less
        return chosen

    def _chosen(self, messages: Sequence[Any], *, at_limit: bool = False) -> list[LookaheadHandle]:
        """The ready blocks that lead, as far as ``keep``, ``land_at`` and ``total_tokens`` let them."""
        pieces, _ = self.pieces(messages, at_limit=at_limit)
        end = len(self._session.branch.history) if at_limit else self._cut(pieces)
        within = [p for p in pieces if p.block.end <= end]
        total = self.transform.total_tokens
        room = None
        if total is not None:
            room = total - sum(p.tokens for p in pieces if p.progress is Progress.COMMITTED)
        chosen = [within[k] for k in leading([(p.progress, p.tokens) for p in within], room=room, beyond=at_limit)]
        return [p.handle for p in chosen if p.handle is not None]

    def _cut(self, pieces: Sequence[Piece]) -> int:
        """Up to where blocks may be committed: the latest cut that leaves ``keep``, moved on as ``land_at`` asks."""
        session = self._session
        branch, policy = session.branch, session.policy
        run = plan(
            branch.history,
            branch.edits,
            policy,
            self.transform.keep,
            land=policy.land_at,
            expected=sum(p.tokens for p in pieces),
            scale=branch.scale,
        )
        return run.end if run is not None else 0

    def preview(self, artifact: Artifact, messages: Sequence[Any]) -> list[Artifact]:
        """What would be committed together with ``artifact``, itself included, in order."""
        made = [h.flight.artifact for h in self._chosen(messages)]
        others = [a for a in made if a is not None and a.key != artifact.key]
        return sorted([*others, artifact], key=lambda a: a.replacement.start)

    def nearly(self) -> bool:
        """Is the trigger reached, or will it be within a turn?"""
        session = self._session
        branch, policy = session.branch, session.policy
        return policy.reached(branch.tokens + policy.reserved_tokens + session.growth(), branch.messages + 2)

    def _warm(self, messages: Sequence[Any], chosen: Sequence[LookaheadHandle]) -> None:
        """Preload the view that the next boundary gives, when it is near."""
        last = chosen[-1] if chosen else None
        if last is None or last.state is not HandleState.READY or last.flight.artifact is None or not self.nearly():
            return
        if self._serving.preloads(None):
            self._warmed = last.flight.artifact.key
            self._serving.grew(last, messages)

    # -- ends --------------------------------------------------------------------------------------------------------

    def ended(self, handle: LookaheadHandle, reason: Reason | None, drop: Drop) -> None:
        """A flight is over: a merged summary overtakes its parts, a failure counts."""
        plan_ = handle.flight.plan
        if reason is None:
            if handle is self._merging:
                self._merging = None
                for part in self.handles:
                    if plan_.start <= part.run.start and part.run.end <= plan_.end:
                        part.flight.accounted = True  # what it cost is in the merged one
                        drop(part, Reason.SUPERSEDED)
                self._handles.append(handle)
            return
        digests = (plan_.start_digest, plan_.end_digest)
        if reason is Reason.NOT_SMALLER:
            self._note_digests(digests, MAX_ATTEMPTS)
        elif reason in (Reason.FAILED, Reason.TIMEOUT, Reason.INVALID_OUTPUT) and handle.flight.started_at is not None:
            self._note_digests(digests, self._failed.get(digests, (0, 0.0))[0] + 1)

    def _digests(self, start: int, end: int) -> Digests:
        chain = self._session.branch.history.chain
        return chain[start], chain[end]

    def _note(self, start: int, end: int, attempts: int) -> None:
        self._note_digests(self._digests(start, end), attempts)

    def _note_digests(self, digests: Digests, attempts: int) -> None:
        self._failed[digests] = (attempts, self._runtime.now())
        while len(self._failed) > MAX_FAILED:
            self._failed.popitem(last=False)

    def _given_up(self, start: int, end: int) -> bool:
        attempts, at = self._failed.get(self._digests(start, end), (0, 0.0))
        return attempts >= MAX_ATTEMPTS and self._runtime.now() < at + RETRY_S


def _range(applied: Applied) -> tuple[int, int]:
    return applied.artifact.replacement.start, applied.artifact.replacement.end


def _result(handle: LookaheadHandle, at_limit: bool) -> Artifact | None:
    usable = handle.state is HandleState.READY or (at_limit and handle.state in WORKING)
    return handle.flight.artifact if usable else None


def _neighbours(pieces: Sequence[Piece]) -> list[Piece]:
    """The oldest run of at least two that stand side by side; empty without one."""
    group: list[Piece] = []
    for piece in pieces:
        if group and group[-1].block.end != piece.block.start:
            if len(group) > 1:
                break
            group = []
        group.append(piece)
    return group if len(group) > 1 else []
