"""Lines: which session a list of messages belongs to, where a framework names the conversation but not the branch.

A thread id says little about the messages: forks, time travel, parallel branches and sub-agents share it. So the
messages themselves choose: a list goes on with the session whose history it continues.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from .codec import check_codec
from .errors import ClosedError, ConfigurationError, MessageError, NoSession, PolicyConflict
from .states import Reason

if TYPE_CHECKING:
    from .codec import Codec
    from .policy import Policy
    from .runtime import Runtime
    from .session import Session

#: branches of one bucket that are followed at once; the one unused for longest makes room
MAX_LINES = 16


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
    2. else, after an edit, a deletion or time travel, to the one of the same owner that it shares most with.

    Where that session is in use, or another owner's, the list is a branch of its own: its session starts with what the
    other one holds. Lists that share nothing but system messages are strangers.

    Thread-safe; no call waits for anything.

    Raises:
        ConfigurationError: ``max_lines`` is not a number of at least 1, or ``codec`` is none.
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
        if isinstance(max_lines, bool) or not isinstance(max_lines, int) or max_lines < 1:
            raise ConfigurationError(f"max_lines={max_lines!r}: expected a whole number of at least 1")
        if codec is not None:
            check_codec(codec)
        self._runtime = runtime
        self._options = {"policy": policy, "codec": codec, "engine": engine, "request": request}
        self._tenant = tenant
        self._max_lines = max_lines
        self._buckets: OrderedDict[tuple[str, str], OrderedDict[str, _Line]] = OrderedDict()
        self._lock = threading.RLock()  # what a session says while we close it may lead back to us

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
            NoSession: it is, and no session could be had (the event ``error`` says why): the turn goes on with the
                messages that it has.
            MessageError: ``messages`` is not a list. A malformed message in it is nobody's business here.
        """
        with self._lock:
            return self._line_of(bucket, messages, owner, tenant or self._tenant, parent).session

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
            line = self._line_of(bucket, messages, owner, tenant or self._tenant, parent)
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

    def _line_of(self, bucket: str, messages: Sequence[Any], owner: str, tenant: str, parent: Session | None) -> _Line:
        try:
            return self._line(bucket, messages, owner, tenant, parent)
        except MessageError:
            raise
        except Exception as error:  # nothing of ours stops a turn
            if isinstance(error, ClosedError) and not self._runtime.is_open:
                raise
            self._runtime.events.error(error, where="lines", tenant=str(tenant))
            raise NoSession(f"no session for {bucket!r}: {type(error).__name__}: {error}") from error

    def _line(self, bucket: str, messages: Sequence[Any], owner: str, tenant: str, parent: Session | None) -> _Line:
        if not isinstance(messages, list | tuple):
            raise MessageError(f"messages: expected a list of messages, got {type(messages).__name__}")
        lines = self._buckets.get((tenant, bucket), OrderedDict())
        for name in [n for n, line in lines.items() if line.session.closed]:
            del lines[name]
        matches = sorted((_match(k, line, messages, owner) for k, line in enumerate(lines.values())), reverse=True)
        best = matches[0] if matches and matches[0].shared > 0 else None
        chosen = next((m for m in matches if m.free and m.may_go_on(best)), None)
        if chosen is not None:
            line = chosen.line
            line.owner = owner
            lines.move_to_end(line.session.id)
        else:
            line = _Line(self._open(bucket, lines, messages, tenant, parent), owner)
            lines[line.session.id] = line
            if (tenant, bucket) not in self._buckets:
                self._sweep()
                self._buckets[tenant, bucket] = lines
        if best is not None and best.line is not line:
            best.line.session.share_with(line.session)
        self._make_room(lines, line)
        return line

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
            # One that holds nothing is taken as it is: nothing is known of it that these messages could contradict.
            if not len(session.branch.history) or session.recognises(messages)[0]:
                return session
        raise AssertionError("there is always another name")

    def _make_room(self, lines: OrderedDict[str, _Line], needed: _Line) -> None:
        for name, line in list(lines.items()):
            if len(lines) <= self._max_lines:
                return
            if not line.users and line is not needed:
                del lines[name]
                line.session.close_now(Reason.EVICTED)

    def _sweep(self) -> None:
        """A new bucket makes room: the two longest unseen ones go if the runtime has closed all their sessions."""
        for _ in range(min(2, len(self._buckets))):
            key, lines = self._buckets.popitem(last=False)
            if not all(line.session.closed for line in lines.values()):
                self._buckets[key] = lines


@dataclass(frozen=True, slots=True, order=True)
class _Match:
    """How well a line fits a list of messages; the greatest fits best."""

    continues: bool
    shared: int  # messages behind the system ones
    free: bool
    own: bool
    position: int  # by last use
    blank: bool = field(compare=False)  # it holds nothing yet
    line: _Line = field(compare=False)

    def may_go_on(self, best: _Match | None) -> bool:
        """May the list go on with this line, where ``best`` is the one that shares most with it?"""
        if best is None:
            return self.blank and self.own
        return self.shared > 0 and (self.own or (self.continues and self.shared == best.shared))


def _match(position: int, line: _Line, messages: Sequence[Any], owner: str) -> _Match:
    continues, shared = line.session.recognises(messages)
    behind = max(0, shared - line.session.branch.history.segmenter.lead)
    return _Match(
        continues=continues and behind > 0,
        shared=behind,
        free=not line.users,
        own=line.owner == owner,
        position=position,
        blank=continues and not behind,
        line=line,
    )


def _names(bucket: str) -> Iterator[str]:
    yield bucket
    number = 2
    while True:
        yield f"{bucket}~{number}"
        number += 1
