"""Blockwise: the blocks of one session whose policy compacts them as they fill.

Every filled block has a handle and a replacement of its own. Nothing is committed before the trigger; then all
finished leading blocks go into the view at one boundary. What ``total_tokens`` does not allow waits until the oldest
summaries have been merged. Used under the session's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .blocks import Progress, leading, merge
from .cuts import Run, fresh, kept_inside, plan, source_tokens
from .handle import LookaheadHandle
from .launch import Launcher
from .pieces import (
    Piece,
    Shown,
    Sizes,
    block_of,
    figures_of,
    merged_sizes,
    neighbours,
    pieces_of,
    shown_of,
    summaries_of,
    summary_tokens,
)
from .preloading import Preloading
from .states import FINAL, WORKING, HandleState, Reason
from .transforms.parallel import ParallelSummarize
from .turns import start_of_last
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
Accepts = Callable[[LookaheadHandle, Sequence[Any]], bool]
Digests = tuple[bytes, bytes]


class _Edited(Exception):
    """The caller edited the history in place: it has to be read again first."""


class Blockwise:
    """Prepares the blocks of one session and says which of them may be committed."""

    def __init__(
        self,
        runtime: Runtime,
        session: Session,
        launcher: Launcher,
        preloading: Preloading,
        transform: ParallelSummarize,
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._launcher = launcher
        self._preloading = preloading
        self.transform = transform
        self._handles: list[LookaheadHandle] = []
        self._merging: LookaheadHandle | None = None
        self._failed: OrderedDict[Digests, tuple[int, float]] = OrderedDict()
        self._applied: list[Applied] | None = None
        self._of_applied: list[Shown] = []
        self._tidied: list[Applied] | None = None  # what was applied when it was tidied last
        self._told: tuple[int, list[Applied]] | None = None  # the boundary that was told last
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
        """See :func:`smoothctx.pieces.pieces_of`."""
        return pieces_of(
            self._session.branch,
            messages,
            [h for h in self._handles if h.state not in FINAL],
            self._shown(),
            block_tokens=self.transform.block_tokens,
            given_up=self._given_up,
            at_limit=at_limit,
        )

    def _shown(self) -> list[Shown]:
        applied = self._session.branch.applied
        if applied is not self._applied:  # it is replaced with every change
            self._applied, self._of_applied = applied, shown_of(self._session.branch)
        return self._of_applied

    # -- preparing ---------------------------------------------------------------------------------------------------

    def consider(
        self,
        messages: Sequence[Any],
        drop: Drop,
        sync: Callable[[Sequence[Any]], Any],
        *,
        due: bool = False,
        starts: bool = True,
    ) -> LookaheadHandle | None:
        """Start what is filled. Returns the first live handle; with ``due`` the one that is worth waiting for.

        ``sync`` reads the messages again: what is given to a flight must be what was digested. ``starts``: may anything
        be started?
        """
        try:
            return self._consider(messages, drop, due, starts)
        except _Edited:
            sync(messages)
            return self._consider(messages, drop, due, starts)

    def _consider(self, messages: Sequence[Any], drop: Drop, due: bool, starts: bool) -> LookaheadHandle | None:
        if self._session.branch.applied is not self._tidied:
            self._tidy(drop)
        if starts:
            self._start_filled(messages, drop, due)
        live = self.handles
        if live:
            self._preloading.follow(messages)
            self._warm(messages)
        if not due:
            return live[0] if live else None
        waiting = [h for h in live if h.state in WORKING]
        merging = self._merging
        return merging if merging in waiting else next(iter(waiting), None)

    def _start_filled(self, messages: Sequence[Any], drop: Drop, due: bool) -> None:
        pieces, rest = self.pieces(messages)
        working = sum(h.state in WORKING for h in self._handles)
        for k, piece in enumerate(pieces):
            if piece.progress is not Progress.WORKING or piece.handle is not None:
                continue
            if working >= self.transform.workers:
                break
            working += self._start(messages, piece.start, piece.end, pieces[:k]) is not None
        self._merge(messages, pieces, drop)
        policy, branch = self._session.policy, self._session.branch
        reached = policy.reached(branch.tokens + policy.reserved_tokens, branch.messages)
        idle = all(p.progress in (Progress.COMMITTED, Progress.FAILED) for p in pieces) and self._merging is None
        if (reached or due) and idle:
            self._start_rest(messages, pieces, rest)

    def _tidy(self, drop: Drop) -> None:
        """Drop what something else has overtaken."""
        branch, shown = self._session.branch, self._shown()
        self._tidied = branch.applied
        for handle in self.handles:
            artifact, start, end = handle.flight.artifact, handle.run.start, handle.run.end
            if artifact is not None and (refusal := branch.refusal(artifact)) is not None:
                drop(handle, refusal)
            elif any(first <= start and end <= last for first, last, _ in shown):
                drop(handle, Reason.SUPERSEDED)

    def _start(self, messages: Sequence[Any], start: int, end: int, before: Sequence[Piece]) -> LookaheadHandle | None:
        history = self._session.branch.history
        run = Run(start, end, kept_inside(history, start, end))
        if end - start <= len(run.kept):
            self._note(start, end, MAX_ATTEMPTS)  # all of it stays word for word
            return None
        share = self._shares([*((p.start, p.end) for p in before), (start, end)])[-1]
        handle = self._launch(messages, run, share)
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
            self._start(messages, run.start, run.end, pieces)

    def _launch(self, messages: Sequence[Any], run: Run, cap: int, merged: Sequence[Artifact] = ()) -> LookaheadHandle:
        session = self._session
        if not session.branch.history.unchanged(messages):
            raise _Edited
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

    def affordable(self, artifacts: Sequence[Artifact], messages: Sequence[Any]) -> bool:
        """Would the view's summaries stay within ``total_tokens`` with these among them?"""
        total, branch = self.transform.total_tokens, self._session.branch
        if total is None or not any(summary_tokens(a.replacement.edits, branch.codec) for a in artifacts):
            return True
        shown = branch.preview(artifacts, messages)  # which may hold summaries of the caller's own (rewrite mode)
        return branch.history.count([m for m in shown if branch.codec.summary_text(m) is not None]) <= total

    def _shares(self, runs: Sequence[tuple[int, int]]) -> list[int]:
        """Tokens that the summary of each of these blocks may have, all there are, oldest first."""
        if self.transform.total_tokens is None:
            return [self.transform.block_cap] * len(runs)
        history, sizes = self._session.branch.history, Sizes(self._session.branch)
        return self.transform.shares([block_of(history, sizes, start, end) for start, end in runs])

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
        total, branch = self._aim(), self._session.branch
        if total is None or self._merging is not None:
            return
        having = [p for p in pieces if p.progress in (Progress.COMMITTED, Progress.READY)]
        if len(having) < 2 or sum(p.tokens for p in having) + min(self.transform.block_cap, total // 4) <= total:
            return
        end = self._cut(pieces)
        standing = [p for p in having if p.progress is Progress.COMMITTED or p.end <= end]
        ahead = 0 if len(standing) < len(having) else self.transform.block_cap
        if sum(p.tokens for p in standing) + min(ahead, total // 4) <= total:
            return
        group = neighbours(standing)
        shares = dict(zip((p.start for p in pieces), self._shares([(p.start, p.end) for p in pieces]), strict=True))
        summaries = [summaries_of(branch, messages, piece) for piece in group]
        allotted = [shares[p.start] for p in group]
        sizes = merged_sizes([p.tokens for p in group], summaries, allotted, total, self.transform.merged_tokens)
        count = merge([p.tokens for p in group], sizes, total_tokens=total)
        while count is not None and count <= len(group):
            chosen = group[:count]
            start, stop = chosen[0].start, chosen[-1].end
            if not self._given_up(start, stop):
                made = [p.handle.flight.artifact for p in chosen if p.handle is not None]
                run = Run(start, stop, kept_inside(branch.history, start, stop))
                self._merging = self._launch(messages, run, sizes[count - 2], [a for a in made if a is not None])
                if self._merging.state is HandleState.READY:  # it was made before
                    self.ended(self._merging, None, drop)
                elif self._merging.state in FINAL:
                    self._merging = None
                return
            count += 1

    # -- committing --------------------------------------------------------------------------------------------------

    def commit(
        self, messages: Sequence[Any], drop: Drop, *, at_limit: bool, accepts: Accepts | None = None
    ) -> list[LookaheadHandle]:
        """The handles that go into the view at this boundary, all of them or none, oldest first.

        ``accepts`` is asked last whether each may go.
        """
        session = self._session
        branch, policy = session.branch, session.policy
        reached = policy.lag is not None or policy.reached(branch.tokens + policy.reserved_tokens, branch.messages)
        if at_limit:
            self._tell(messages)
        if not self._handles or not (at_limit or (reached and policy.commit != "hard_limit")):
            return []
        self._tidy(drop)
        chosen = self._chosen(messages, at_limit=at_limit)
        artifacts = [a for a in (h.flight.artifact for h in chosen) if a is not None]
        while artifacts and not self.affordable(artifacts, messages):
            chosen, artifacts = chosen[:-1], artifacts[:-1]
        if not artifacts:
            return []
        weighed = branch.weigh(artifacts, messages)
        if at_limit:
            return chosen if weighed.saved > 0 else []
        warm = self._preloading.warm(artifacts[-1], messages)
        bills = weighed.saved < weighed.rebilled and not warm and policy.lag is None
        if weighed.saved <= 0 or weighed.saved < policy.least_savings * branch.tokens or bills:
            return []  # promise 9
        if not warm and self._preloading.warming and self._warmed == artifacts[-1].key:
            return []  # its view is being preloaded: a turn later it costs less
        if accepts is not None and not all([accepts(handle, messages) for handle in chosen]):
            return []
        return chosen

    def _tell(self, messages: Sequence[Any]) -> None:
        """The hard limit is reached: how far the blocks have come by then, once for a boundary."""
        session = self._session
        boundary = (len(session.branch.history), session.branch.applied)
        if self._told is not None and self._told[0] == boundary[0] and self._told[1] is boundary[1]:
            return
        self._told = boundary
        found, rest = self.pieces(messages)
        figures = figures_of(session.branch, found, rest)
        self._runtime.events.emit("blocks.at_limit", session=session.id, tenant=session.tenant, **figures)

    def _chosen(self, messages: Sequence[Any], *, at_limit: bool = False) -> list[LookaheadHandle]:
        """The ready blocks that lead, as far as ``keep``, ``land_at`` and ``total_tokens`` let them."""
        pieces, _ = self.pieces(messages, at_limit=at_limit)
        end = len(self._session.branch.history) if at_limit else self._cut(pieces)
        within = [p for p in pieces if p.end <= end]
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
        if policy.lag is not None:
            return start_of_last(branch.history, policy.lag) or 0
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
        if policy.lag is not None:
            return True
        return policy.reached(branch.tokens + policy.reserved_tokens + session.growth(), branch.messages + 2)

    def _warm(self, messages: Sequence[Any]) -> None:
        """Preload the view that the next boundary gives, when it is near."""
        if not self._preloading.wished(None) or not self.nearly():
            return
        last = next(reversed(self._chosen(messages)), None)
        if last is not None and last.state is HandleState.READY and last.flight.artifact is not None:
            self._warmed = last.flight.artifact.key
            self._preloading.grew(last, messages)

    # -- ends --------------------------------------------------------------------------------------------------------

    def ended(self, handle: LookaheadHandle, reason: Reason | None, drop: Drop) -> None:
        """A flight is over: a merged summary overtakes its parts, a failure counts."""
        plan_ = handle.flight.plan
        if reason is None:
            if handle is self._merging:
                self._merging = None
                for part in self.handles:
                    if plan_.start <= part.run.start and part.run.end <= plan_.end:
                        self._add_cost(part, handle)
                        drop(part, Reason.SUPERSEDED)
                self._handles.append(handle)
            return
        digests = (plan_.start_digest, plan_.end_digest)
        if reason is Reason.NOT_SMALLER:
            self._note_digests(digests, MAX_ATTEMPTS)
        elif reason in (Reason.FAILED, Reason.TIMEOUT, Reason.INVALID_OUTPUT) and handle.flight.started_at is not None:
            self._note_digests(digests, self._failed.get(digests, (0, 0.0))[0] + 1)

    def _add_cost(self, part: LookaheadHandle, merged: LookaheadHandle) -> None:
        """What the merged summary was made of has cost something too; unless it is another session's as well."""
        flight = part.flight
        alone = flight.cost.holders == 1 and all(other is part for other in flight.handles)
        if flight.ended and not flight.accounted and alone:
            self._runtime.flights.used(flight)
            merged.flight.usage += flight.usage

    def give_up(self, handle: LookaheadHandle) -> None:
        """Its block stays raw for a while."""
        plan_ = handle.flight.plan
        self._note_digests((plan_.start_digest, plan_.end_digest), MAX_ATTEMPTS)

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
