"""Speculate: candidates prepared side by side; which of them is used is decided at the commit."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from ..endpoints import caller
from ..errors import ConfigurationError, TransformError
from ..usage import Usage
from .base import Locality, Rewrite, Size, Transform, TransformRequest, fingerprint
from .isolate import Isolate
from .spending import most_tokens

#: sessions whose spending is remembered
MAX_SESSIONS = 4096
#: seconds between two looks whether a turn waits
LOOK_S = 0.1
#: what is kept of the time that the work has, to hand over what is ready: a part of it, and seconds at most
MARGIN, MAX_MARGIN_S = 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one candidate came to. Not ``ready``: it failed, was refused, or was not prepared for the budget's sake.

    ``transform`` is its name, ``messages`` stand for the rewritten run, ``tokens`` is their count.
    """

    transform: str
    ready: bool
    messages: tuple[Any, ...] = ()
    tokens: int = 0


Choose = Callable[[list[Any], list[Candidate]], int]


class _Purse:
    """The budget of one session: what was spent of it, and what is reserved for what is being prepared."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._reserved = 0
        self._lock = threading.Lock()

    def reserve(self, tokens: int) -> bool:
        """Set aside what something could cost; ``False`` where that is more than is left."""
        with self._lock:
            if tokens > max(0, self._left - self._reserved):
                return False
            self._reserved += tokens
            return True

    def release(self, tokens: int) -> None:
        """What was reserved has been spent, or is not needed."""
        with self._lock:
            self._reserved -= tokens

    def spend(self, tokens: int) -> bool:
        """Take out what something did cost. Is anything left?"""
        with self._lock:
            self._left -= tokens
            return self._left > 0


class Speculate:
    """Prepares several rewrites of the same run; the commit chooses by what has happened since.

    The choice may depend on the future, the candidates themselves are made without it. One that is not done when a
    turn waits at the hard limit, or when the policy's ``timeout`` is nearly over, is not waited for where another one
    is: it is not ready then. A candidate may be a transform
    of your own whose locality is ``FUTURE``: this is the only place for one.

    Args:
        candidates: two or more transforms that read the same ``source``. The first one is the default.
        choose: ``choose(messages_since, candidates) -> index``. Called at each boundary at which a result could be
            committed, with the messages appended since the work began and one :class:`Candidate` for each of
            ``candidates``. It runs on the turn's path: pure and fast. An error, or an index that is none, means the
            first candidate that is ready, with an event.
        keep: what stays raw at the end of the view; by default the first candidate's.
        budget_tokens: tokens that the candidates behind the first may cost one session in all, in this process.
            One of our transforms is not prepared where its calls, with a second try of each, could cost more than
            what is left, by estimate. Of one of your own nothing is known before: it is prepared as long as
            anything is left (with a ``max_tokens``, as much as one call would cost), and what it then reports counts.
            Once the calls that have ended have used the budget up, nothing further is prepared, and what is under
            way is ended. ``None``: no limit.

    Raises:
        ConfigurationError: naming option, value and what is allowed.
    """

    name = "speculate"
    locality = Locality.FUTURE

    def __init__(
        self,
        candidates: Sequence[Transform],
        choose: Choose,
        *,
        keep: Size | None = None,
        budget_tokens: int | None = None,
    ) -> None:
        if not isinstance(candidates, list | tuple) or len(candidates) < 2:
            raise ConfigurationError(f"candidates={candidates!r}: expected a list of two or more transforms")
        for k, member in enumerate(candidates):
            if not isinstance(member, Transform):
                raise ConfigurationError(
                    f"candidates[{k}]={member!r}: expected a transform (an object with name, locality, fingerprint "
                    "and an async apply)"
                )
            if isinstance(member, Isolate | Speculate):
                raise ConfigurationError(f"candidates[{k}]={member!r}: {member.name!r} cannot be a candidate")
        if not callable(choose):
            raise ConfigurationError(f"choose={choose!r}: expected a callable (messages_since, candidates) -> index")
        if budget_tokens is not None and (
            isinstance(budget_tokens, bool) or not isinstance(budget_tokens, int) or budget_tokens < 0
        ):
            raise ConfigurationError(f"budget_tokens={budget_tokens!r}: expected a number of tokens, or None")
        sources = {str(getattr(m, "source", "view")) for m in candidates}
        if len(sources) > 1:
            raise ConfigurationError(
                f"candidates: they read {' and '.join(sorted(sources))}; expected the same source= of all of them"
            )
        #: the candidates, in order
        self.transforms: tuple[Transform, ...] = tuple(candidates)
        self.choose = choose
        self.budget_tokens = budget_tokens
        first: Any = candidates[0]
        self.keep: Size = keep if keep is not None else getattr(first, "keep", ("messages", 20))
        self.source = sources.pop()
        self.max_tokens: int = max(int(getattr(m, "max_tokens", 0) or 0) for m in candidates)
        prints = [m.fingerprint for m in candidates]
        # Neither the choice nor the budget changes what any candidate is.
        self.fingerprint: str | None = (
            None if None in prints else fingerprint(self.name, {"candidates": prints, "keep": self.keep})
        )
        self._purses: OrderedDict[tuple[str, str], _Purse] = OrderedDict()
        self._lock = threading.Lock()

    async def apply(self, request: TransformRequest) -> Rewrite:
        """Prepare the candidates side by side.

        Raises:
            TransformError: or whatever the first candidate raised, when all of them failed.
        """
        made: list[Rewrite | None] = [None] * len(self.transforms)
        spent = [Usage()] * len(self.transforms)
        errors: dict[int, Exception] = {}

        async def prepare(k: int) -> None:
            def count(usage: Usage) -> None:
                spent[k] = spent[k] + usage
                if request.on_usage is not None:
                    request.on_usage(usage)

                if k and purse is not None and not purse.spend(usage.total_tokens):
                    scopes[k].cancel()

            try:
                with scopes[k]:
                    rewrite = made[k] = await self.transforms[k].apply(replace(request, on_usage=count))
                    told, spent[k] = spent[k], rewrite.usage
                    if k and purse is not None:  # what it had not told of
                        purse.spend(max(0, rewrite.usage.total_tokens - told.total_tokens))
                    some.set()
                    if asked is not None:
                        asked.usable = True
            except Exception as error:  # the others may do
                errors[k] = error

        async def look() -> None:
            """A turn does not wait for the rest once there is something that it can use."""
            await some.wait()
            while asked is not None:  # a turn begins to wait on any thread, and nobody tells
                if asked.urgent():
                    return group.cancel_scope.cancel()
                await anyio.sleep(LOOK_S)

        async def prepare_all() -> None:
            async with anyio.create_task_group() as members:
                for k in reserved:
                    members.start_soon(prepare, k)
            group.cancel_scope.cancel()

        purse = self._purse(request)
        reserved = self._within_budget(request, purse)
        scopes = {k: anyio.CancelScope() for k in reserved}
        asked, some = caller(), anyio.Event()
        try:
            with anyio.CancelScope(deadline=_last_moment()) as late:
                async with anyio.create_task_group() as group:
                    group.start_soon(prepare_all)
                    group.start_soon(look)
        finally:
            if purse is not None:
                purse.release(sum(reserved.values()))
        first = next((r for r in made if r is not None), None)
        if first is None and late.cancelled_caught:
            raise TimeoutError("speculate: no candidate was done in time")
        if first is None:
            raise errors.get(0) or TransformError("speculate: no candidate has a result")
        return replace(first, usage=sum(spent, Usage()), alternatives=tuple(made))

    def _within_budget(self, request: TransformRequest, purse: _Purse | None) -> dict[int, int]:
        """Which candidates are prepared, and what is reserved for each: the first, and the others as far as the
        budget goes."""
        if purse is None:
            return dict.fromkeys(range(len(self.transforms)), 0)
        reserved = {0: 0}
        for k, member in enumerate(self.transforms[1:], 1):
            cost = most_tokens(member, request)
            if cost is None:
                output = int(getattr(member, "max_tokens", 0) or 0)
                cost = sum(map(request.codec.estimate, [*request.before, *request.messages])) + output if output else 1
            if purse.reserve(cost):
                reserved[k] = cost
        return reserved

    def _purse(self, request: TransformRequest) -> _Purse | None:
        """What this session may spend; ``None`` where that is not limited."""
        if self.budget_tokens is None:
            return None
        who = (request.tenant, request.session_id)
        with self._lock:
            purse = self._purses.setdefault(who, _Purse(self.budget_tokens))
            self._purses.move_to_end(who)
            while len(self._purses) > MAX_SESSIONS:
                self._purses.popitem(last=False)
        return purse

    def pick(self, since: Sequence[Any], candidates: Sequence[Candidate]) -> tuple[int, str]:
        """The candidate to use, and why it is not the one that ``choose`` named (``""`` where it is)."""
        default = next(k for k, c in enumerate(candidates) if c.ready)
        if sum(c.ready for c in candidates) == 1:
            return default, ""
        try:
            index = self.choose(list(since), list(candidates))
        except Exception as error:
            return default, f"choose raised {type(error).__name__}: {error}"
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(candidates):
            return default, f"choose returned {index!r}: expected an index below {len(candidates)}"
        if not candidates[index].ready:
            return default, f"candidate {index} has no result"
        return index, ""

    def __repr__(self) -> str:
        return f"Speculate([{', '.join(map(repr, self.transforms))}])"


def _last_moment() -> float:
    """When the candidates end at the latest: so much before the work's own deadline that what is ready is kept."""
    who = caller()
    now, deadline = anyio.current_time(), anyio.current_effective_deadline()
    if who is not None:
        deadline = min(deadline, who.ends_at)
    return max(now, deadline - min(MAX_MARGIN_S, MARGIN * (deadline - now))) if deadline < math.inf else deadline


def check_future(option: str, transform: Transform) -> None:
    """What depends on later messages may only run as a candidate of a :class:`Speculate`.

    Raises:
        ConfigurationError: naming the option.
    """
    if transform.locality is Locality.FUTURE and not isinstance(transform, Speculate):
        raise ConfigurationError(
            f"{option}={transform!r}: its locality is 'future', so it may only run as a candidate: "
            "Speculate([...], choose)"
        )
