"""Lines: which session a list of messages belongs to, where a framework names the conversation but not the branch.

A thread id says little about the messages: forks, time travel, parallel branches and sub-agents share it. So the
messages themselves choose: a list goes on with the session whose history it continues.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from .errors import PolicyConflict
from .states import Reason

if TYPE_CHECKING:
    from .codec import Codec
    from .policy import Policy
    from .runtime import Runtime
    from .session import Session

#: branches of one bucket that are followed at once; the one unused for longest makes room
MAX_LINES = 16
#: buckets held before those whose sessions were all closed are swept for the first time
SWEEP_AT = 1024


@dataclass(slots=True)
class _Line:
    session: Session
    owner: str
    users: int = 0


@final
class Lines:
    """The sessions of one policy and codec, grouped by *bucket*: what the framework calls one conversation.

    A list of messages belongs to the session of its bucket

    1. whose history (or last view, where the caller keeps that) it continues, the longest one first;
    2. else, after an edit, a deletion or time travel, to the one that it shares most with, if that has the same owner.

    Where that session is in use, or another owner's, the list is a branch of its own: it gets a new session that
    starts with what the other one holds.

    Thread-safe; no call waits for anything.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        policy: Policy,
        codec: Codec | None = None,
        tenant: str = "default",
        engine: Any = None,
        request: Mapping[str, Any] | None = None,
        max_lines: int = MAX_LINES,
    ) -> None:
        self._runtime = runtime
        self._options = {"policy": policy, "codec": codec, "engine": engine, "request": request}
        self._tenant = tenant
        self._max_lines = max_lines
        self._buckets: dict[tuple[str, str], OrderedDict[str, _Line]] = {}
        self._sweep_at = SWEEP_AT
        self._lock = threading.Lock()

    def find(
        self,
        bucket: str,
        messages: Sequence[Any],
        *,
        owner: str = "",
        tenant: str | None = None,
        parent: Session | None = None,
    ) -> Session:
        """The session that these messages belong to; a new one if none fits.

        Args:
            bucket: names the conversation, alike in every process and across restarts.
            messages: the history as it is now.
            owner: tells apart who goes on in parallel inside one bucket, such as two sub-agents. It only decides who
                may take a session to another branch; whoever continues a history gets its session.
            tenant: whose conversation it is, where it is not the one that all of these belong to.
            parent: the session whose sub-agent this is.

        Raises:
            ClosedError: the runtime is not open.
        """
        with self._lock:
            return self._line(bucket, messages, owner, tenant or self._tenant, parent).session

    @contextmanager
    def using(
        self,
        bucket: str,
        messages: Sequence[Any],
        *,
        owner: str = "",
        tenant: str | None = None,
        parent: Session | None = None,
    ) -> Iterator[Session]:
        """:meth:`find`, for the length of a turn: until it ends nobody else takes the session to another branch."""
        with self._lock:
            line = self._line(bucket, messages, owner, tenant or self._tenant, parent)
            line.users += 1
        try:
            yield line.session
        finally:
            with self._lock:
                line.users -= 1

    async def close(self, bucket: str, *, tenant: str | None = None) -> None:
        """End the sessions of one bucket: what they held is forgotten."""
        with self._lock:
            lines = self._buckets.pop((tenant or self._tenant, bucket), None)
        for line in (lines or {}).values():
            await line.session.close()

    def sessions(self, bucket: str, *, tenant: str | None = None) -> list[Session]:
        """The open sessions of one bucket, the one used last at the end."""
        with self._lock:
            lines = self._buckets.get((tenant or self._tenant, bucket))
            return [line.session for line in (lines or {}).values() if not line.session.closed]

    def _line(self, bucket: str, messages: Sequence[Any], owner: str, tenant: str, parent: Session | None) -> _Line:
        lines = self._buckets.get((tenant, bucket))
        if lines is None:
            self._sweep()
            lines = self._buckets[tenant, bucket] = OrderedDict()
        for name in [n for n, line in lines.items() if line.session.closed]:
            del lines[name]
        best: tuple[bool, int, str] | None = None
        for name, line in lines.items():
            continues, shared = line.session.recognises(messages)
            if continues or shared > line.session.branch.history.segmenter.lead:
                best = max(best or (False, 0, ""), (continues, shared, name))
        if best is not None:
            continues, _, name = best
            line = lines[name]
            if not line.users and (continues or line.owner == owner):
                line.owner = owner
                lines.move_to_end(name)
                return line
        made = _Line(self._open(bucket, lines, messages, tenant, parent), owner)
        if best is not None:
            lines[best[2]].session.share_with(made.session)
        lines[made.session.id] = made
        self._make_room(lines)
        return made

    def _open(
        self,
        bucket: str,
        lines: Mapping[str, _Line],
        messages: Sequence[Any],
        tenant: str,
        parent: Session | None,
    ) -> Session:
        """A session under the first name that is free, or that somebody else opened for these very messages."""
        for name in _names(bucket):
            if name in lines:
                continue
            try:
                session = self._runtime.session(name, tenant=tenant, parent=parent, **self._options)
            except PolicyConflict:
                continue  # another policy's conversation of this name
            if session.recognises(messages)[0]:
                return session
        raise AssertionError("there is always another name")

    def _make_room(self, lines: OrderedDict[str, _Line]) -> None:
        for name in list(lines):
            if len(lines) <= self._max_lines:
                return
            if not lines[name].users:
                lines.pop(name).session.close_now(Reason.EVICTED)

    def _sweep(self) -> None:
        """Forget the buckets whose sessions the runtime has closed: rarely, so that it costs nothing per call."""
        if len(self._buckets) < self._sweep_at:
            return
        for key, lines in list(self._buckets.items()):
            if all(line.session.closed for line in lines.values()):
                del self._buckets[key]
        self._sweep_at = max(SWEEP_AT, 2 * len(self._buckets))


def _names(bucket: str) -> Iterator[str]:
    yield bucket
    number = 2
    while True:
        yield f"{bucket}~{number}"
        number += 1
