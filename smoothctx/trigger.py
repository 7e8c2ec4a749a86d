"""The trigger: when a lookahead is started, and on which run of the history."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from . import verdict
from .blockwise import Blockwise
from .conversation import Conversation
from .cuts import Run, fresh, plan, shown_tokens, source_tokens
from .errors import ConfigurationError
from .follow import Following
from .handle import LookaheadHandle
from .handles import Handles
from .history import Change
from .launch import Launcher
from .serving import Serving
from .states import FINAL, HandleState, Reason
from .transforms.base import Size, Transform
from .transforms.isolate import Isolate
from .turns import lagging

#: a run that did not shrink is not tried again before it has grown by this factor
BARREN_GROWTH = 1.25
#: part of the hard limit from which on whatever can be prepared is
NEAR = 0.85
#: seconds after which what has not begun waits in the queue
WAITS_S = 1.0
#: part of what a lookahead was to rewrite that has to be in the view still when it begins
WORTHWHILE = 0.5
#: what the next lookahead takes over from one that was dropped in the queue: the seconds that this has waited there,
#: and whether a turn has waited for it in vain
_NO_PLACE = (0.0, False)
#: seconds for which it does
PLACE_S = 60.0


def keep_of(transform: Transform) -> Size:
    """What a transform leaves raw at the end."""
    keep: Size = getattr(transform, "keep", ("messages", 20))
    return keep


def expected_tokens(transform: Transform, source: int) -> int:
    """Tokens that a result is expected to have: at most its cap, and never more than a quarter of the source."""
    cap = getattr(transform, "max_tokens", 0) or 0
    return min(int(cap), source // 4) if source else int(cap)


@final
class Trigger:
    """Starts the lookaheads of one session. Called under the session's lock only.

    ``predicts``: the session has an engine, so that work can be predicted before anything was measured. ``blockwise``
    starts them where the policy's transform works in blocks.
    """

    def __init__(
        self,
        conversation: Conversation,
        handles: Handles,
        following: Following,
        launcher: Launcher,
        serving: Serving,
        blockwise: Blockwise | None,
        *,
        predicts: bool,
    ) -> None:
        self._conversation = conversation
        self._handles = handles
        self._following = following
        self._launcher = launcher
        self._serving = serving
        self._preloading = serving.preloading
        self._blockwise = blockwise
        self._predicts = predicts
        self._barren: tuple[str | None, int] | None = None
        self._in_vain = False  # a result has waited until it was too old, as its commit re-billed more than it saved
        self._spared = 0  # tokens of the last run whose result was not worth a commit
        self._recut = False  # the last lookahead was dropped in the queue since the tail had outgrown it
        self._place, self._left_at = _NO_PLACE, 0.0

    def consider(
        self,
        messages: Sequence[Any],
        change: Change | None,
        *,
        due: bool = False,
        resting: bool = False,
        again: bool = True,
    ) -> LookaheadHandle | None:
        """Start a lookahead if it is time to. Returns the live handle, if any.

        ``due``: the hard limit is reached. ``resting``: there is time for whatever is over ``land_at``.
        """
        transform = self._conversation.policy.transform
        if self._blockwise is not None:
            if change is not None and change.error is not None:
                return self._blockwise.first
            starts = not self._rests(transform)
            return self._blockwise.consider(messages, self._handles.drop, self._following.sync, due=due, starts=starts)
        self.give_up_place()
        live = self._handles.lookahead
        if live is not None and not self._outgrown(live):
            self._preloading.grew(live, messages)
            return live
        if change is not None and change.error is not None:
            return live  # what stands behind an unreadable message is unknown: nothing is started for it
        run = self._chosen(due=due, resting=resting)
        if run is None or (live is not None and run.end <= live.run.end) or self._rests(transform):
            return live
        if not self._conversation.branch.history.unchanged(messages):
            self._following.sync(messages)  # an edit in place further up: what we snapshot must be what we digested
            return self.consider(messages, change, due=due, resting=resting, again=False) if again else live
        if live is not None:
            self._recut = True
            self._drop_waiting(live)
        stale = self._conversation.runtime.now() - self._left_at > PLACE_S
        waited_s, waited_out = _NO_PLACE if stale else self._place
        self._place = _NO_PLACE
        live = self._handles.live = self.launch(
            messages, transform, run, explicit=False, preload_kv=None, waited_s=waited_s
        )
        live.waited_out = waited_out
        return live if live.state not in FINAL else None

    def give_up_place(self) -> None:
        """Drop what still waits in the queue, and for nothing: fallbacks took most of what it would have rewritten. The
        next lookahead takes its place."""
        live = self._handles.lookahead if self._blockwise is None else None
        if live is None or not self._waits(live):
            return
        left = source_tokens(self._conversation.branch.history, self._conversation.branch.edits, live.run)
        if left < WORTHWHILE * live.flight.plan.source_tokens:
            self._recut = False
            self._drop_waiting(live)

    def _chosen(self, *, due: bool, resting: bool) -> Run | None:
        """The run of a lookahead that it is time for."""
        conversation, branch, policy = self._conversation, self._conversation.branch, self._conversation.policy
        transform = policy.transform
        if policy.lag is not None:
            run = lagging(branch.history, branch.edits, policy.lag, self._covered())
            if run is None:
                return None
        else:
            if not due and not self._time_to(resting=resting):
                return None
            # It should land where the policy says when it commits, with what the session adds until then.
            growth = 0 if due else conversation.forecast.growth_during(self._work())
            run = self.plan(transform, branch.history.tokens[-1], growth)
        source = source_tokens(branch.history, branch.edits, run) if run else 0
        barren = (
            self._barren is not None
            and self._barren[0] == transform.fingerprint
            and source < self._barren[1] * BARREN_GROWTH
        )
        expected = expected_tokens(transform, source)
        too_little = (source - expected) * branch.scale < policy.least_savings * branch.tokens
        nothing = run is None or not fresh(branch.edits, run)
        if run is None or nothing or barren or too_little:
            why = "nothing before the kept tail" if nothing else "too little to save"
            conversation.say("nothing_to_rewrite", "", why=why)
            return None
        if not due and not resting and self._too_early(run, expected):
            conversation.say("nothing_to_rewrite", "", why="it would save less than what stands behind it costs")
            return None
        spared = source < self._spared * BARREN_GROWTH
        if not due and (spared or not verdict.worth_starting(conversation, source=source, expected=expected)):
            conversation.say("nothing_to_rewrite", "", why="it would not pay")
            return None
        return run

    def _outgrown(self, live: LookaheadHandle) -> bool:
        """Would what still waits in the queue leave the view above the trigger, so that its result would only make way
        for a longer run? (Once in a row at most: where the tail outgrows every run, a late result is better than none.)
        """
        branch, policy = self._conversation.branch, self._conversation.policy
        if self._recut or policy.lag is not None or not self._waits(live):
            return False
        run, source = live.run, source_tokens(branch.history, branch.edits, live.run)
        saved = (source - expected_tokens(live.transform, source)) * branch.scale
        inside = [e for e in branch.edits if run.start <= e.start and e.end <= run.end]
        shown = run.end - run.start + sum(len(e.messages) - (e.end - e.start) for e in inside)
        fewer = max(0, shown - len(run.kept) - 1)
        return policy.reached(int(branch.tokens - saved) + policy.reserved_tokens, branch.messages - fewer)

    def _waits(self, live: LookaheadHandle) -> bool:
        """Does it wait in the queue, so that nothing has been spent on it? (One that came just now may be starting.)"""
        flight, now = live.flight, self._conversation.runtime.now()
        if live.state is not HandleState.PENDING or flight.started_at is not None or flight.plan.opening:
            return False
        return now - flight.queued_at >= WAITS_S

    def _drop_waiting(self, live: LookaheadHandle) -> None:
        """It makes way while it still waits in the queue. Its place there is kept for the next one."""
        now = self._conversation.runtime.now()
        self._place, self._left_at = (live.flight.waited_s + now - live.flight.queued_at, live.waited_out), now
        self._handles.drop(live, Reason.SUPERSEDED)

    def _rests(self, transform: Transform) -> bool:
        """Is the transform's circuit breaker open, so that whatever is started now only fails? Said once, until it is
        tried again."""
        conversation = self._conversation
        seconds = conversation.runtime.flights.rests_s(conversation.tenant, transform)
        if seconds > 0:
            rests_s = None if math.isinf(seconds) else seconds
            conversation.say("lookahead.resting", "", transform=transform.name, rests_s=rests_s)
        else:
            conversation.over("lookahead.resting")
        return seconds > 0

    def schedule(
        self,
        kind: str | Transform,
        messages: Sequence[Any],
        target_segments: Sequence[int] | None,
        preload_kv: bool | None,
        options: Mapping[str, Any],
    ) -> LookaheadHandle:
        """Start the transform that ``schedule_transform`` means.

        Raises:
            ConfigurationError: an unknown kind, wrong options, or a run that may not be rewritten.
        """
        transform = self._launcher.transform(kind, options)
        self._following.sync(messages)
        if target_segments is not None:
            run: Run | None = self._launcher.target(target_segments)
        elif isinstance(transform, Isolate):
            run = self._launcher.whole()
        else:
            run = self.plan(transform, 0)
        if run is None:
            raise ConfigurationError(
                f"schedule_transform({transform.name!r}): there is nothing that may be rewritten now "
                "(only finished segments before the newest one)"
            )
        handle = self.launch(messages, transform, run, explicit=True, preload_kv=preload_kv)
        self._handles.add(handle)
        return handle

    def plan(self, transform: Transform, source: int, growth: int = 0) -> Run | None:
        """The run that ``transform`` would rewrite now; ``source``: the tokens that its result stands for, if known."""
        branch, policy = self._conversation.branch, self._conversation.policy
        return plan(
            branch.history,
            branch.edits,
            policy,
            keep_of(transform),
            land=policy.land_at,
            expected=expected_tokens(transform, source) + growth,
            scale=branch.scale,
        )

    def pays(self, run: Run, expected: int) -> bool:
        """Does a result of ``expected`` tokens for this run save more than what stands behind it costs to prefill?"""
        branch, growth = self._conversation.branch, self._conversation.forecast.growth_during(self._work())
        behind = shown_tokens(branch.history, branch.edits, run.end) + growth
        return source_tokens(branch.history, branch.edits, run) - expected > behind

    def _too_early(self, run: Run, expected: int) -> bool:
        """Would the result only wait, as an earlier one did, since its commit re-bills more than it saves (promise 9)?
        A longer run will pay, a little later. Near the hard limit it is wanted all the same, and where it is preloaded
        nothing is re-billed."""
        branch, policy = self._conversation.branch, self._conversation.policy
        if (
            not self._in_vain
            or policy.lag is not None
            or policy.commit == "hard_limit"
            or self._preloading.wished(None)
        ):
            return False
        tokens, messages = branch.tokens + policy.reserved_tokens, branch.messages
        if policy.over(policy.hard_limit, int(tokens / NEAR), int(messages / NEAR)):
            return False
        return not self.pays(run, expected)

    def launch(
        self,
        messages: Sequence[Any],
        transform: Transform,
        run: Run,
        *,
        explicit: bool,
        preload_kv: bool | None,
        waited_s: float = 0.0,
    ) -> LookaheadHandle:
        """Start a lookahead on this run. ``waited_s``: seconds that the one has waited whose place it takes."""
        due = self._conversation.due()
        handle = self._launcher.launch(
            messages, transform, run, explicit=explicit, preload_kv=preload_kv, due=due, waited_s=waited_s
        )
        self._conversation.over("nothing_to_rewrite")
        return handle

    def not_smaller(self, handle: LookaheadHandle) -> None:
        """Its result saved too little: nothing is tried again before there is more to rewrite."""
        self._barren = (handle.transform.fingerprint, handle.flight.plan.source_tokens)

    def unprofitable(self, handle: LookaheadHandle) -> None:
        """Its commit does not pay: nothing is tried again before there is more to rewrite, or the limit is reached."""
        self._spared = handle.flight.plan.source_tokens

    def committed(self) -> None:
        """A result went into the view."""
        self._recut, self._place = False, _NO_PLACE

    def in_vain(self) -> None:
        """A result made way for a longer one without ever having been worth its commit."""
        self._in_vain = True

    def _covered(self) -> int:
        """Messages that the last summary in the view stands for."""
        applied = [a.artifact.replacement for a in self._conversation.branch.applied]
        return max((r.end for r in applied if not r.drops_only and r.end - r.start > 1), default=0)

    def _time_to(self, *, resting: bool) -> bool:
        """Has the trigger been reached, or must the work begin earlier to be done before the limit?"""
        conversation, policy = self._conversation, self._conversation.policy
        tokens, messages = conversation.branch.tokens + policy.reserved_tokens, conversation.branch.messages
        if policy.reached(tokens, messages) or (resting and policy.over(policy.land_at, tokens, messages)):
            return True
        if policy.in_line or (not self._predicts and conversation.forecast.work.value is None):
            return False  # as was asked; or nothing is known of how long it takes: the trigger says when
        limit = policy.limit_tokens(policy.hard_limit)
        return policy.over(policy.land_at, tokens, messages) and conversation.forecast.late(tokens, limit, self._work())

    def _work(self) -> float | None:
        """Seconds that a lookahead is expected to take by what the engine has shown; ``None`` while unknown."""
        policy = self._conversation.policy
        land = policy.limit_tokens(policy.land_at)
        return self._serving.work_s(expected_tokens(policy.transform, 0), land or 0)
