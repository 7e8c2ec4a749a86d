"""Pace: the turns of one session, and how long ago it last committed. Commits stay rare. Pure.

A turn is one model call of the agent. It shows as a boundary, and as a reply in the history; callers that skip one
(or keep several boundaries for one call) show it by the other, so the larger count is taken.
"""

from __future__ import annotations

#: two automatic commits fewer turns apart than this are one too many (but at the hard limit)
CROWDED_TURNS = 3


class Pace:
    """Counts one session's turns. Changed under the session's lock only.

    ``spaced``: commits keep a distance of some turns.
    """

    __slots__ = ("_boundaries", "_cold", "_committed", "_replies", "_spaced")

    def __init__(self, *, spaced: bool = True) -> None:
        self._spaced = spaced
        self._boundaries = 0
        self._replies = 0
        self._committed: tuple[int, int] | None = None
        self._cold: tuple[int, int] | None = None

    def begin(self) -> None:
        """A turn begins."""
        self._boundaries += 1

    def replied(self, replies: int) -> None:
        """So many replies were added to the history."""
        self._replies += replies

    def committed(self) -> None:
        """Something was committed by itself in this turn."""
        self._committed = (self._boundaries, self._replies)

    @property
    def made(self) -> int:
        """Model calls before that of the present turn."""
        return max(self._boundaries - 1, self._replies)

    @property
    def since_commit(self) -> int | None:
        """Turns since the last commit; 0 in the turn of one, ``None`` without any."""
        if self._committed is None:
            return None
        boundaries, replies = self._committed
        return max(self._boundaries - boundaries, self._replies - replies)

    @property
    def crowded(self) -> bool:
        """Was the last commit so few turns ago that another one should wait? (Those of one turn are one commit.)"""
        since = self.since_commit
        return self._spaced and since is not None and 0 < since < CROWDED_TURNS

    def committed_within(self, turns: int) -> bool:
        """Was there a commit within the last ``turns`` turns?"""
        since = self.since_commit
        return since is not None and since < turns

    def cold(self, handle: int) -> int:
        """Turns for which the result of this handle has been asked for, and was there but not warm."""
        if self._cold is None or self._cold[0] != handle:
            self._cold = (handle, self._boundaries)
        return self._boundaries - self._cold[1]
