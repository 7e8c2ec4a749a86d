"""The handles of one session: of its branch, of ``schedule_transform``, and those of dead branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from .blockwise import Blockwise
from .conversation import Conversation
from .flight import Flight
from .handle import LookaheadHandle
from .receipts import Receipt
from .serving import Serving
from .states import FINAL, HandleState, Reason

#: handles of ``schedule_transform`` held per session
MAX_EXPLICIT = 64


@final
class Handles:
    """Holds a session's handles until they are final. Changed under the session's lock only.

    ``blockwise`` holds those of blocks, where the policy's transform works in blocks.
    """

    def __init__(
        self,
        conversation: Conversation,
        serving: Serving,
        blockwise: Blockwise | None,
        dropped: Callable[[LookaheadHandle, Reason], None],
    ) -> None:
        self._dropped = dropped
        self._conversation = conversation
        self._serving = serving
        self._preloading = serving.preloading
        self._blockwise = blockwise
        #: the lookahead of the present branch, as it was last started
        self.live: LookaheadHandle | None = None
        self.explicit: list[LookaheadHandle] = []
        #: of dead branches, under ``Finish``
        self.finishing: list[LookaheadHandle] = []

    @property
    def lookaheads(self) -> list[LookaheadHandle]:
        """The live ones of the present branch: at most one, or one per block, oldest first."""
        if self._blockwise is not None:
            return self._blockwise.handles
        return [self.live] if self.live is not None and self.live.state not in FINAL else []

    @property
    def lookahead(self) -> LookaheadHandle | None:
        """The first of :attr:`lookaheads`."""
        return next(iter(self.lookaheads), None)

    def all(self) -> list[LookaheadHandle]:
        """Those that may still be committed to the present branch."""
        return [*self.lookaheads, *(h for h in self.explicit if h.state not in FINAL)]

    def finishes(self, handle: LookaheadHandle) -> bool:
        """Is it of a dead branch, under ``Finish``?"""
        return handle in self.finishing

    def add(self, handle: LookaheadHandle) -> None:
        """Hold one that was scheduled explicitly; the oldest goes when there are too many."""
        if len(self.explicit) > MAX_EXPLICIT:
            self.drop(self.explicit.pop(0), Reason.EVICTED)
        self.explicit.append(handle)

    def finish(self, handle: LookaheadHandle) -> None:
        """Its branch is dead: let it finish into the store."""
        self._forget(handle)
        self.finishing.append(handle)

    def drop(self, handle: LookaheadHandle, reason: Reason) -> None:
        """Discard one; work that nobody else needs is cancelled."""
        if handle.move(HandleState.DISCARDED, reason):
            self._conversation.emit("lookahead.discarded", handle=handle.id, reason=str(reason))
            self._serving.discarded(*handle.flight.keys)
            self._conversation.runtime.flights.leave(handle.flight, handle, reason)
            self._dropped(handle, reason)
        self._forget(handle)

    def committed(self, handle: LookaheadHandle, receipt: Receipt | None, *, how: str, saved: int) -> None:
        """Its result is in use: it is final, and its tokens were not wasted."""
        handle.move(HandleState.COMMITTED)
        handle.receipt = receipt
        self._conversation.runtime.flights.used(handle.flight)
        if not handle.flight.ended:  # a turn could not wait for its preload: the slow ones teach most
            self._learn(handle)
        self._conversation.runtime.tally.count("committed")
        self._conversation.emit("lookahead.committed", handle=handle.id, how=how, saved=saved)
        self._forget(handle)
        self._serving.settled()

    def sent(self, view: Sequence[Any]) -> None:
        """This view is what the agent sends now."""
        self._preloading.sent(view)

    def ready(self, handle: LookaheadHandle, flight: Flight) -> None:
        """Its flight has landed with a result."""
        assert flight.artifact is not None
        handle.move(HandleState.READY)
        self._conversation.emit(
            "lookahead.ready",
            handle=handle.id,
            transform=handle.transform.name,
            tokens=flight.artifact.tokens,
            warm=flight.artifact.warm and (flight.plan.opening or self._preloading.preloaded(*flight.keys)),
            cached_share=flight.usage.cached_share,
        )
        self._learn(handle)
        if handle in self.finishing:
            self.drop(handle, Reason.BRANCH_DIVERGED)  # its artifact is held in case the branch comes back
        elif self._blockwise is not None and self._blockwise.holds(handle):
            self._blockwise.ended(handle, None, self.drop)

    def failed(self, handle: LookaheadHandle, reason: Reason, error: Exception | None) -> None:
        """Its flight has ended without a result."""
        conversation, runtime = self._conversation, self._conversation.runtime
        if self._blockwise is not None and self._blockwise.holds(handle):
            self._blockwise.ended(handle, reason, self.drop)
        failed = reason in (Reason.FAILED, Reason.TIMEOUT, Reason.INVALID_OUTPUT)
        moved = handle.move(HandleState.FAILED if failed else HandleState.DISCARDED, reason, error)
        if moved and failed:
            runtime.tally.count("failed")
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            conversation.emit("lookahead.failed", handle=handle.id, reason=str(reason), error=text)
        elif moved:
            runtime.tally.stale(reason)
            conversation.emit("lookahead.discarded", handle=handle.id, reason=str(reason), error=str(error or ""))
        runtime.flights.wasted(handle.flight, reason)
        self._forget(handle)
        self._serving.discarded(*handle.flight.keys)

    def close(self, reason: Reason) -> None:
        """Drop all."""
        for handle in [*self.all(), *self.finishing]:
            self.drop(handle, reason)
        self.live = None
        self.explicit.clear()
        self.finishing.clear()

    def _learn(self, handle: LookaheadHandle) -> None:
        """How long it took is what the next one is expected to take."""
        flight = handle.flight
        if flight.started_at is not None and not flight.from_store and self._of_policy(handle):
            asked = flight.usage.calls > 0
            self._conversation.forecast.landed(flight.busy_s, flight.write_s, asked=asked)

    def _of_policy(self, handle: LookaheadHandle) -> bool:
        """Is it the policy's own transform, which turns wait for? Openings and others say nothing about how long
        that takes."""
        own, other = self._conversation.policy.transform, handle.transform
        return other is own or (own.fingerprint is not None and other.fingerprint == own.fingerprint)

    def _forget(self, handle: LookaheadHandle) -> None:
        if self.live is handle:
            self.live = None
        if self._blockwise is not None:
            self._blockwise.forget(handle)
        for handles in (self.explicit, self.finishing):
            if handle in handles:
                handles.remove(handle)
