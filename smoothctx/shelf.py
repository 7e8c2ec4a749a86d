"""The shelf: the artifacts that one session holds, within bounds. What was committed comes back where it fits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from .blockwise import Blockwise
from .conversation import Conversation
from .cuts import Run
from .local import LocalRewrites
from .policy import Salvage
from .states import Reason
from .turns import turns_behind
from .usage import Cost
from .view import Artifact

#: artifacts held in memory per session, whatever their size
MAX_ARTIFACTS = 64
#: results that wait for their commit, of which a session's index in the store tells other processes
MAX_PREPARED = 4


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


@final
class Shelf:
    """Holds artifacts by key, the one used last at the end. Changed under the session's lock only."""

    def __init__(self, conversation: Conversation, blockwise: Blockwise | None, local: LocalRewrites) -> None:
        self._conversation = conversation
        self._local = local
        self._blockwise = blockwise
        self.artifacts: OrderedDict[str, Artifact] = OrderedDict()
        #: what those that were made here have cost
        self.costs: dict[str, Cost] = {}
        #: keys of those that were committed, here or elsewhere: only these come back by themselves
        self.committed: set[str] = set()
        #: something came from elsewhere since the last boundary
        self.restored = False
        #: results that were ready and are not committed yet, with their runs: here, or in an earlier process
        self.prepared: OrderedDict[str, Run] = OrderedDict()
        #: keys of those that came from an earlier process and are no lookahead of this one yet
        self.arrived: set[str] = set()

    def remember(self, artifact: Artifact, cost: Cost | None = None) -> None:
        """Hold an artifact, as the one used last; ``cost``: what was spent on it, where it is new."""
        self.artifacts[artifact.key] = artifact
        if cost is not None:
            self.costs[artifact.key] = cost
        self.artifacts.move_to_end(artifact.key)
        self._trim()

    def commit(self, artifact: Artifact) -> None:
        """It is in the view now. What was prepared for no more than it covers is not needed any more."""
        self.remember(artifact)
        self.committed.add(artifact.key)
        end = artifact.replacement.end
        for key in [k for k, run in self.prepared.items() if k == artifact.key or run.end <= end]:
            self.unprepare(key)

    def prepare(self, key: str, run: Run) -> None:
        """A result is ready: if this process ends before its commit, another one may find it."""
        self.prepared[key] = run
        self.prepared.move_to_end(key)
        while len(self.prepared) > MAX_PREPARED:
            self.unprepare(next(iter(self.prepared)))

    def unprepare(self, key: str) -> bool:
        """It is not to be committed by another process (any more). Was it?"""
        self.arrived.discard(key)
        return self.prepared.pop(key, None) is not None

    def expect(self, artifact: Artifact, run: Run) -> None:
        """Take over what an earlier process had ready: it becomes a lookahead where its digests match."""
        r = artifact.replacement
        if artifact.key in self.committed or artifact.key in self.prepared or (r.start, r.end) != (run.start, run.end):
            return
        self.artifacts[artifact.key] = replace(artifact, created=self._conversation.runtime.now())
        self.prepare(artifact.key, run)
        self.arrived.add(artifact.key)
        self._trim()

    def adopt(self, artifact: Artifact) -> None:
        """Take over what was committed elsewhere: it applies where its digests match, from the next boundary on."""
        self.artifacts[artifact.key] = replace(artifact, created=self._conversation.runtime.now())
        self.committed.add(artifact.key)
        self.restored = True
        self._trim()

    def take(self, artifacts: dict[str, Artifact], committed: set[str], costs: dict[str, Cost]) -> None:
        """Take over what another session of this process holds."""
        self.artifacts.update(artifacts)
        self.costs.update(costs)
        self.committed |= committed
        self.restored = True
        self._trim()

    def forget(self, key: str) -> None:
        """Let go of one."""
        self.artifacts.pop(key, None)
        self.costs.pop(key, None)
        self.committed.discard(key)

    def clear_dead(self) -> None:
        """Let go of everything that does not fit the present history."""
        history = self._conversation.branch.history
        for key in [k for k, a in self.artifacts.items() if not a.replacement.valid(history)]:
            self.forget(key)

    def clear(self) -> None:
        """Let go of everything."""
        self.artifacts.clear()
        self.costs.clear()
        self.prepared.clear()
        self.arrived.clear()

    def salvage(self, messages: Sequence[Any], before: int, beyond: int = -1, *, late: bool = False) -> None:
        """Apply earlier commits that hold on this branch and end behind ``beyond``; what reaches furthest goes first.

        ``before``: tokens of the view before, for the receipts. ``late``: they have come just now, and go before what a
        fallback had to drop meanwhile, where there is room for them.
        """
        conversation, branch = self._conversation, self._conversation.branch
        policy = conversation.policy
        held = [
            a
            for k, a in self.artifacts.items()
            if k in self.committed and a.replacement.end > beyond and a.replacement.valid(branch.history)
        ]
        for artifact in sorted(held, key=lambda a: (-a.replacement.end, a.replacement.start)):
            r = artifact.replacement
            shown = [o.artifact.replacement for o in branch.applied]
            if late and any(o.drops_only for o in shown):
                shown = [o for o in shown if not o.drops_only]
                if not branch.weigh(artifact, messages).fits(policy):
                    continue
            if any(o.start < r.end and r.start < o.end and o.end >= r.end for o in shown):
                continue  # what is in the view reaches as far
            lag = policy.lag
            if lag is not None and turns_behind(branch.history, r.end) < lag and branch.fits(policy):
                continue  # the last turns stay raw
            if branch.refusal(artifact) is not None or (
                self._blockwise is not None and not self._blockwise.affordable([artifact], messages)
            ):
                continue
            pinned = self._local.with_pins(artifact, messages)
            if pinned is None:
                continue
            if pinned is not artifact:
                artifact = pinned
                self.commit(artifact)
            branch.apply(artifact, messages)
            conversation.runtime.tally.count("salvaged")
            conversation.emit("view.salvaged", key=artifact.key, start=r.start, end=r.end)
            conversation.receipt(replace(artifact, warm=False), "salvaged", before)  # warm once, for an earlier view
            before = branch.tokens

    def listed(self) -> list[BranchInfo]:
        """Everything held, newest last, for a person to read."""
        branch = self._conversation.branch
        shown = {a.artifact.key for a in branch.applied}
        return [
            BranchInfo(
                digest=a.replacement.end_digest.hex(),
                transform=a.transform,
                start=a.replacement.start,
                end=a.replacement.end,
                tokens=a.tokens,
                current=a.replacement.valid(branch.history),
                in_view=a.key in shown,
            )
            for a in self.artifacts.values()
        ]

    def _trim(self) -> None:
        """Keep within the bounds of the discard policy; the oldest unused ones go first."""
        conversation, held = self._conversation, self.artifacts
        rule = conversation.policy.discard
        discard = rule if isinstance(rule, Salvage) else Salvage()
        newest = next(reversed(held), None)
        shown = {a.artifact.key for a in conversation.branch.applied} | {newest}
        oldest = conversation.runtime.now() - discard.ttl
        size = sum(a.tokens for a in held.values()) * 4
        for key in list(held):
            a = held[key]
            dead = a.created < oldest and not a.replacement.valid(conversation.branch.history)
            if key in shown or not (dead or len(held) > MAX_ARTIFACTS or size > discard.max_bytes):
                continue
            size -= a.tokens * 4
            self.forget(key)
            conversation.emit("artifact.dropped", key=key, reason=str(Reason.EXPIRED if dead else Reason.EVICTED))
