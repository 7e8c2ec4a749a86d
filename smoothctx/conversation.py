"""The conversation: what the parts of one session share. Who it is, what it holds of the history, how it speaks."""

from __future__ import annotations

import inspect
import math
import numbers
from collections import deque
from typing import TYPE_CHECKING, Any, final

from .branch import Branch
from .codec import Codec
from .cuts import shown_tokens
from .economics import Expected
from .errors import MessageError
from .forecast import Forecast
from .outcomes import Outcomes
from .pace import Pace
from .policy import Policy
from .receipts import Receipt
from .turns import turns_behind
from .usage import Usage
from .view import Artifact

if TYPE_CHECKING:
    from .runtime import Runtime

#: receipts kept per session
MAX_RECEIPTS = 1000


@final
class Conversation:
    """One conversation of one tenant. Changed under its session's lock only."""

    def __init__(
        self, runtime: Runtime, session_id: str, tenant: str, policy: Policy, codec: Codec, rates: Any = None
    ) -> None:
        self.runtime = runtime
        self.id = session_id
        self.tenant = tenant
        self.policy = policy
        self.codec = codec
        #: the history and what replaces it now; another one where the caller took the view for its history
        self.counter = None if policy.token_counter is None else self._count
        self.branch = Branch(codec, self.counter)
        self.forecast = Forecast()
        self.pace = Pace(spaced=policy.spaced)
        self.outcomes = Outcomes()
        #: what the agent's engine has shown of itself
        self.rates = rates
        self.receipts: deque[Receipt] = deque(maxlen=MAX_RECEIPTS)
        self._said: dict[str, str] = {}  # by the event's name
        self._counter_failed = False

    def _count(self, messages: list[Any]) -> int:
        """By the caller's counter; where that fails, the codec's estimate (which errs high), with one event."""
        counter = self.policy.token_counter
        try:
            counted: object = counter(messages) if counter is not None else None
            if inspect.iscoroutine(counted):
                counted.close()
            size = float(counted) if isinstance(counted, numbers.Real) and not isinstance(counted, bool) else math.nan
            if not 0 <= size < math.inf:
                raise TypeError(f"token_counter returned {counted!r}: expected a number of tokens")
            return math.ceil(size)
        except Exception as error:
            if not self._counter_failed:
                self._counter_failed = True
                self.error(error, "token_counter")
            return sum(map(self.codec.estimate, messages))

    def due(self) -> float | None:
        """When the hard limit is expected, on the runtime's clock; ``None`` while unknown."""
        policy = self.policy
        tokens = self.branch.tokens + policy.reserved_tokens
        return self.forecast.due(self.runtime.now(), tokens, policy.limit_tokens(policy.hard_limit))

    def hurried(self, rate: float | None, artifact: Artifact, cold: float) -> bool:
        """Is idle time alone too little to preload what is ``cold`` (a share) of the view of ``artifact`` at ``rate``
        tokens per second?"""
        history, policy = self.branch.history, self.policy
        behind = shown_tokens(history, self.branch.edits, min(artifact.replacement.end, len(history)))
        remaining = round(cold * (artifact.tokens + behind))
        limit = policy.limit_tokens(policy.hard_limit)
        return self.forecast.hurried(rate, remaining, self.branch.tokens + policy.reserved_tokens, limit)

    def receipt(
        self,
        artifact: Artifact,
        how: str,
        before: int,
        waited: float = 0.0,
        usage: Usage | None = None,
        expected: Expected | None = None,
    ) -> Receipt:
        """Write down that this boundary rewrote the view, which had ``before`` tokens."""
        receipt = Receipt(
            how=how,
            transform=artifact.transform,
            key=artifact.key,
            tokens_before=before,
            tokens_after=self.branch.tokens,
            messages_replaced=sum(e.end - e.start for e in artifact.replacement.edits),
            waited_s=waited,
            usage=usage or Usage(),
            warm=artifact.warm,
            time=self.runtime.now(),
            lag=turns_behind(self.branch.history, artifact.replacement.end),
            expected=expected,
        )
        self.receipts.append(receipt)
        self.outcomes.committed(receipt)
        self.emit("view.committed", how=how, tokens_before=before, tokens_after=receipt.tokens_after, lag=receipt.lag)
        return receipt

    def emit(self, name: str, **data: Any) -> None:
        """An event of this session."""
        self.runtime.events.emit(name, session=self.id, tenant=self.tenant, **data)

    def say(self, name: str, what: str, **data: Any) -> None:
        """An event about a condition that lasts: said once until it changes."""
        mark = f"{name}:{what}:{data.get('why', '')}"
        if mark != self._said.get(name):
            self._said[name] = mark
            self.emit(name, **data)

    def over(self, name: str) -> None:
        """The condition is over: it is said anew when it comes back."""
        self._said.pop(name, None)

    def error(self, error: Exception, where: str) -> None:
        """What went wrong inside, as an event."""
        if isinstance(error, MessageError):
            self.say("message.unreadable", str(error), error=str(error))
        else:
            self.runtime.events.error(error, where=where, session=self.id, tenant=self.tenant)
