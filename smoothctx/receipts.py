"""Receipts: one for each commit that rewrote the view; several blocks may go in at one boundary."""

from __future__ import annotations

from dataclasses import dataclass

from .economics import Expected
from .usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one commit did.

    ``how``: ``"ready"`` (it was waiting), ``"promoted"`` (the turn waited for it at the hard limit),
    ``"fallback"`` (local, without a model) or ``"salvaged"`` (an earlier result fits this branch).
    ``tokens_before`` and ``tokens_after`` are those of the view; ``waited_s`` is what the turn waited for us,
    in seconds; ``usage`` is what the background work cost; ``warm`` is true only where the engine reported
    the new view as cached. ``lag`` is how stale it was: turns whose replies stand behind what it covers.
    ``expected`` is what ``BreakEven`` expected, where it knew the rates: of blocks that went in together, of all of
    them (what came: ``session.outcomes()``).
    """

    how: str
    transform: str
    key: str
    tokens_before: int
    tokens_after: int
    messages_replaced: int
    waited_s: float
    usage: Usage
    warm: bool
    time: float
    lag: int = 0
    expected: Expected | None = None

    @property
    def saved_tokens(self) -> int:
        """Tokens that the view shrank by."""
        return self.tokens_before - self.tokens_after

    @property
    def cached_share(self) -> float | None:
        """Share of the background work's prompts that the server reported as cached; ``None`` where it said nothing."""
        return self.usage.cached_share
