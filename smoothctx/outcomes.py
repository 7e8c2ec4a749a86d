"""Outcomes: what came of the commits of one session, as far as its foreground calls showed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .receipts import Receipt
from .usage import Usage

#: calls kept before a commit, and after it
CALLS_BEFORE, CALLS_AFTER = 8, 32
#: commits whose outcome is kept
MAX_OUTCOMES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ForegroundSeen:
    """One model call of the agent, on the runtime's clock, in seconds.

    ``ttft_s`` is ``None`` where nobody told of the first token; ``usage`` where nobody reported it.
    """

    ttft_s: float | None
    total_s: float
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOutcome:
    """The commits of one boundary, and the foreground calls around them: what was expected of them stands in
    ``receipt.expected``.

    ``receipts`` are theirs, in order: several where several blocks went in. ``before`` are the last calls that began
    before the commit (8 at most), ``after`` the first ones that began after it and before the next (32 at most), oldest
    first. Only calls inside ``session.foreground()`` are seen; what the difference is owed to besides the commit (load,
    longer answers) is not told apart.
    """

    receipts: tuple[Receipt, ...]
    before: tuple[ForegroundSeen, ...]
    after: tuple[ForegroundSeen, ...]

    @property
    def receipt(self) -> Receipt:
        """The last one of ``receipts``."""
        return self.receipts[-1]

    @property
    def ttft_before_s(self) -> float | None:
        """Mean seconds to the first token before the commit."""
        return _mean([c.ttft_s for c in self.before])

    @property
    def ttft_first_s(self) -> float | None:
        """Seconds to the first token of the first call after it: the one that prefills what is not cached."""
        return self.after[0].ttft_s if self.after else None

    @property
    def ttft_after_s(self) -> float | None:
        """Mean seconds to the first token of the calls after that one."""
        return _mean([c.ttft_s for c in self.after[1:]])

    @property
    def uncached_first_tokens(self) -> int | None:
        """Prompt tokens of the first call after it that the server did not find in its cache, where reported."""
        usage = self.after[0].usage if self.after else None
        if usage is None or usage.cached_tokens is None:
            return None
        return usage.input_tokens - usage.cached_tokens


@dataclass(slots=True)
class _Commit:
    receipts: list[Receipt]
    before: tuple[ForegroundSeen, ...]
    after: list[ForegroundSeen] = field(default_factory=list)


class Outcomes:
    """Pairs commits with the calls around them. Changed under the session's lock only."""

    def __init__(self) -> None:
        self._recent: deque[ForegroundSeen] = deque(maxlen=CALLS_BEFORE)
        self._commits: deque[_Commit] = deque(maxlen=MAX_OUTCOMES)
        self._unsent: _Commit | None = None

    def committed(self, receipt: Receipt) -> None:
        """The view was rewritten. What is sent together is one commit here."""
        if self._unsent is not None:
            self._unsent.receipts.append(receipt)
            return
        self._unsent = _Commit([receipt], tuple(self._recent))
        self._commits.append(self._unsent)
        self._recent.clear()

    def sent(self) -> None:
        """The view is handed out: what is committed from now on is another commit."""
        self._unsent = None

    def began(self) -> object:
        """A call begins; what is returned is given back with it."""
        self._unsent = None
        return self._commits[-1] if self._commits else None

    @staticmethod
    def rewrite(mark: object) -> Receipt | None:
        """The commit behind the call with this mark, if the call is the first one since."""
        return mark.receipts[-1] if isinstance(mark, _Commit) and not mark.after else None

    def ended(self, mark: object, call: ForegroundSeen) -> None:
        """A call has ended that began when :meth:`began` gave this mark."""
        newest = self._commits[-1] if self._commits else None
        if isinstance(mark, _Commit) and len(mark.after) < CALLS_AFTER:
            mark.after.append(call)
        if mark is newest:
            self._recent.append(call)

    def listed(self) -> list[CommitOutcome]:
        """Newest last."""
        return [CommitOutcome(receipts=tuple(c.receipts), before=c.before, after=tuple(c.after)) for c in self._commits]


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
