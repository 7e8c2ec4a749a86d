"""The trigger: when a lookahead is started, and on which run of the history."""

from __future__ import annotations

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
from .states import FINAL
from .transforms.base import Size, Transform
from .transforms.isolate import Isolate
from .turns import lagging

#: a run that did not shrink is not tried again before it has grown by this factor
BARREN_GROWTH = 1.25
#: part of the hard limit from which on whatever can be prepared is
NEAR = 0.85


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
        self._blockwise = blockwise
        self._predicts = predicts
        self._barren: tuple[str | None, int] | None = None
        self._in_vain = False  # a result has waited until it was too old, as its commit re-billed more than it saved
        self._spared = 0  # tokens of the last run whose result was not worth a commit

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
        if self._blockwise is not None:
            if change is not None and change.error is not None:
                return self._blockwise.first
            return self._blockwise.consider(messages, self._handles.drop, self._following.sync, due=due)
        live = self._handles.lookahead
        if live is not None:
            self._serving.grew(live, messages)
            return live
        if change is not None and change.error is not None:
            return None  # what stands behind an unreadable message is unknown: nothing is started for it
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
        if not branch.history.unchanged(messages):
            self._following.sync(messages)  # an edit in place further up: what we snapshot must be what we digested
            return self.consider(messages, change, due=due, resting=resting, again=False) if again else None
        live = self._handles.live = self.launch(messages, transform, run, explicit=False, preload_kv=None)
        return live if live.state not in FINAL else None

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
        if not self._in_vain or policy.lag is not None or policy.commit == "hard_limit" or self._serving.preloads(None):
            return False
        tokens, messages = branch.tokens + policy.reserved_tokens, branch.messages
        if policy.over(policy.hard_limit, int(tokens / NEAR), int(messages / NEAR)):
            return False
        return not self.pays(run, expected)

    def launch(
        self, messages: Sequence[Any], transform: Transform, run: Run, *, explicit: bool, preload_kv: bool | None
    ) -> LookaheadHandle:
        """Start a lookahead on this run."""
        due = self._conversation.due()
        handle = self._launcher.launch(messages, transform, run, explicit=explicit, preload_kv=preload_kv, due=due)
        self._conversation.over("nothing_to_rewrite")
        return handle

    def not_smaller(self, handle: LookaheadHandle) -> None:
        """Its result saved too little: nothing is tried again before there is more to rewrite."""
        self._barren = (handle.transform.fingerprint, handle.flight.plan.source_tokens)

    def unprofitable(self, handle: LookaheadHandle) -> None:
        """Its commit does not pay: nothing is tried again before there is more to rewrite, or the limit is reached."""
        self._spared = handle.flight.plan.source_tokens

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
