"""Policies: when to start, when to commit, what to do when the limit comes first, what to keep of dead branches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigurationError
from .judge import TrajectoryJudge
from .rules import KStepOff, Rule, check_rule
from .transforms.base import Size, Transform, check_size
from .transforms.isolate import Isolate
from .transforms.keep_recent import KeepRecent
from .transforms.speculate import check_future

OVERRUNS = ("promote", "fallback", "raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """Keep what still matches; keep the rest for ``ttl`` seconds, up to ``max_bytes``, in case the branch
    comes back. Running lookaheads of a dead branch are cancelled."""

    ttl: float = 1800
    max_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        _positive("Salvage(ttl)", self.ttl)
        _positive("Salvage(max_bytes)", self.max_bytes)


@dataclass(frozen=True, slots=True)
class Immediate:
    """Cancel and drop at once whatever does not match the history any more."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Let running lookaheads of a dead branch finish into the store; keep their artifacts as ``Salvage`` does."""


Discard = Salvage | Immediate | Finish


@dataclass(frozen=True, slots=True)
class Policy:
    """What a session does with its context.

    Args:
        transform: the rewrite to prepare, such as ``Summarize(model)``.
        trigger: a size, or a list of sizes (any of them): the latest moment to start preparing. The scheduler
            starts earlier when it expects the work to take longer than the idle time before the limit. A trigger at
            the hard limit itself asks for rewrites in line: nothing is prepared before.
        hard_limit: the view plus ``reserved_tokens`` never goes out larger than this.
        land_at: where a commit should bring the view, well under the trigger.
        context_window: the model's window in tokens; needed by every size given as a fraction.
        reserved_tokens: tokens that are not in the messages: tool schemas, the output.
        commit: ``"ready"`` (as soon as it is ready), ``"hard_limit"`` (raw as long as it fits), ``KStepOff(k)`` (the
            summary lags ``k`` turns behind) or ``BreakEven(...)`` (only when it pays).
        overrun: at the hard limit without a ready result: ``"promote"`` it and wait at most ``max_wait``
            seconds, then ``fallback``; ``"fallback"`` at once; ``"raw"`` sends what is there.
        timeout: seconds that the transform may take for one result, retries included; its preload gets as long again.
        fallback: a local transform that cannot fail.
        discard: what happens to work for a branch that is gone.
        idle: seconds without a turn after which the session rests: a view over ``land_at`` is prepared then, and
            what is ready is decided then, not at the next boundary (the caller's list is not touched before it).
            ``None``: the trigger alone says when.
        min_savings: fraction of the view that a commit must save.
        max_message_tokens: a single tool result above this is offloaded on entry.
        preload_kv: ``True``, ``False`` or ``"auto"``: on for servers of one's own, off for paid APIs.
        validators: more checks on a result before it may be used.
        token_counter: ``callable(list of messages) -> int``, additive; by default the usage that the provider reported
            with the reply to the last view, where the codec finds it, else an estimate that errs high.

    Sizes are ``("fraction" | "tokens" | "messages", n)``.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    transform: Transform
    trigger: Size | Sequence[Size] = ("fraction", 0.60)
    hard_limit: Size = ("fraction", 0.85)
    land_at: Size = ("fraction", 0.40)
    context_window: int | None = None
    reserved_tokens: int = 0
    commit: Rule = "ready"
    overrun: str = "promote"
    max_wait: float = 30.0
    timeout: float = 300.0
    fallback: Transform = field(default_factory=KeepRecent)
    discard: Discard = field(default_factory=Salvage)
    idle: float | None = None
    min_savings: float = 0.30
    max_message_tokens: int | None = None
    preload_kv: bool | str = "auto"
    validators: Sequence[Callable[..., Any]] = ()
    token_counter: Callable[[list[Any]], int] | None = None

    def __post_init__(self) -> None:
        for option in ("transform", "fallback"):
            value = getattr(self, option)
            if not isinstance(value, Transform):
                raise ConfigurationError(
                    f"{option}={value!r}: expected a transform (an object with name, locality, fingerprint and "
                    f"an async apply), such as Summarize(model)"
                )
            check_future(option, value)
            if isinstance(value, Isolate):
                raise ConfigurationError(
                    f"{option}=Isolate(...): it opens a sub-agent's context and cannot rewrite this one; "
                    "use session.schedule_transform(Isolate(...), messages)"
                )
        if not isinstance(self.fallback, KeepRecent):
            raise ConfigurationError(
                f"fallback={self.fallback!r}: expected KeepRecent(...), which is local and cannot fail"
            )
        window = self.context_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window <= 0):
            raise ConfigurationError(f"context_window={window!r}: expected a number of tokens above 0")
        object.__setattr__(self, "trigger", self._triggers())
        for option in ("hard_limit", "land_at"):
            object.__setattr__(self, option, self._size(option, getattr(self, option)))
        check_rule(self.commit)
        _one_of("overrun", self.overrun, OVERRUNS)
        if self.preload_kv not in (True, False, "auto"):
            raise ConfigurationError(f"preload_kv={self.preload_kv!r}: expected True, False or 'auto'")
        if not isinstance(self.discard, Salvage | Immediate | Finish):
            raise ConfigurationError(f"discard={self.discard!r}: expected Salvage(...), Immediate() or Finish()")
        _number("max_wait", self.max_wait, 0, float("inf"))
        _number("timeout", self.timeout, 0, float("inf"))
        _positive("timeout", self.timeout)
        _number("min_savings", self.min_savings, 0, 1)
        _number("reserved_tokens", self.reserved_tokens, 0, float("inf"))
        if self.reserved_tokens != int(self.reserved_tokens):
            raise ConfigurationError(f"reserved_tokens={self.reserved_tokens!r}: expected a whole number of tokens")
        if self.idle is not None:
            _number("idle", self.idle, 0, float("inf"))
        if self.max_message_tokens is not None:
            _positive("max_message_tokens", self.max_message_tokens)
        if self.token_counter is not None and not callable(self.token_counter):
            raise ConfigurationError(f"token_counter={self.token_counter!r}: expected a callable(list) -> int")
        if not isinstance(self.validators, list | tuple):
            raise ConfigurationError(f"validators={self.validators!r}: expected a list of callables (request, rewrite)")
        for validator in self.validators:
            if not callable(validator):
                raise ConfigurationError(f"validators={validator!r}: expected callables (request, rewrite)")
        if sum(isinstance(v, TrajectoryJudge) for v in self.validators) > 1:
            raise ConfigurationError("validators: expected at most one TrajectoryJudge")
        self._check_order()

    def _triggers(self) -> tuple[Size, ...]:
        given: Any = self.trigger
        several = isinstance(given, list) or (isinstance(given, tuple) and given and isinstance(given[0], list | tuple))
        sizes = given if several else [given]
        if not sizes:
            raise ConfigurationError("trigger=[]: expected at least one size")
        return tuple(self._size("trigger", size) for size in sizes)

    def _size(self, option: str, value: Any) -> Size:
        size = check_size(option, value)
        if size[0] == "fraction" and self.context_window is None:
            raise ConfigurationError(
                f"{option}={value!r}: a fraction needs context_window=<the model's window in tokens>; "
                f'or give {option} in ("tokens", n) or ("messages", n)'
            )
        return size

    def _check_order(self) -> None:
        hard, land = self.limit_tokens(self.hard_limit), self.limit_tokens(self.land_at)
        if hard is not None and land is not None and land >= hard:
            raise ConfigurationError(f"land_at={self.land_at!r}: must lie below hard_limit={self.hard_limit!r}")
        for trigger in self.triggers:
            start = self.limit_tokens(trigger)
            if start is not None and hard is not None and start > hard:
                raise ConfigurationError(f"trigger={trigger!r}: must not lie above hard_limit={self.hard_limit!r}")
        for option, size in (("land_at", self.land_at), *(("trigger", t) for t in self.triggers)):
            if size[0] == self.hard_limit[0] == "messages" and size[1] > self.hard_limit[1] - (option == "land_at"):
                where = "must lie below" if option == "land_at" else "must not lie above"
                raise ConfigurationError(f"{option}={size!r}: {where} hard_limit={self.hard_limit!r}")
        if hard is not None and self.reserved_tokens >= hard:
            raise ConfigurationError(
                f"reserved_tokens={self.reserved_tokens!r}: must leave room under hard_limit={self.hard_limit!r}"
            )

    def same_as(self, other: Policy) -> bool:
        """Do both say the same? Transforms are compared by their fingerprints; one without is only itself."""
        return all(_alike(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    @property
    def lag(self) -> int | None:
        """Turns that the summary lags behind under ``KStepOff``, ``None`` under every other rule."""
        return self.commit.k if isinstance(self.commit, KStepOff) else None

    @property
    def spaced(self) -> bool:
        """Do commits keep a distance of some turns? Sizes in messages say themselves how far apart they are, and so
        does ``KStepOff``."""
        return self.lag is None and not any(kind == "messages" for kind, _ in (*self.triggers, self.land_at))

    @property
    def least_savings(self) -> float:
        """The fraction of the view that a result must save. ``KStepOff`` goes by small steps."""
        return self.min_savings if self.lag is None else 0.0

    @property
    def triggers(self) -> tuple[Size, ...]:
        """The trigger as a tuple of sizes."""
        return self.trigger  # type: ignore[return-value]

    def limit_tokens(self, size: Size) -> int | None:
        """A size in tokens, ``None`` for one in messages."""
        kind, n = size
        if kind == "tokens":
            return int(n)
        if kind == "fraction" and self.context_window is not None:
            return int(n * self.context_window)
        return None

    @property
    def in_line(self) -> bool:
        """Does it ask for rewrites in line: with no trigger below the hard limit?"""
        limit = self.limit_tokens(self.hard_limit)
        return limit is not None and all(self.limit_tokens(size) == limit for size in self.triggers)

    def over(self, size: Size, tokens: int, messages: int) -> bool:
        """Is a view of this many tokens (reserved ones included) and messages larger than ``size``?"""
        limit = self.limit_tokens(size)
        return messages > size[1] if limit is None else tokens > limit

    def reached(self, tokens: int, messages: int) -> bool:
        """Has any trigger been reached?"""
        for size in self.triggers:
            limit = self.limit_tokens(size)
            if (messages >= size[1]) if limit is None else (tokens >= limit):
                return True
        return False


def _alike(left: Any, right: Any) -> bool:
    if left is right:
        return True
    prints = getattr(left, "fingerprint", None), getattr(right, "fingerprint", None)
    return prints[0] == prints[1] if None not in prints else bool(left == right)


def _positive(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"{option}={value!r}: expected a number above 0")


def _number(option: str, value: Any, low: float, high: float) -> None:
    finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not finite or not low <= value <= high:
        bound = f"between {low:g} and {high:g}" if high != float("inf") else f"of at least {low:g}"
        raise ConfigurationError(f"{option}={value!r}: expected a number {bound}")


def _one_of(option: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{option}={value!r}: expected one of {', '.join(map(repr, allowed))}")
