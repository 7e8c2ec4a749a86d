"""The archive of rewrite mode: raw messages that the caller dropped, kept in the store for ``source="raw"``."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .cuts import Run
from .digest import chain
from .transforms.base import Transform, TransformRequest
from .view import project

if TYPE_CHECKING:
    from .runtime import Runtime
    from .session import Session

Loader = Callable[[TransformRequest], Awaitable[TransformRequest]]


class Archive:
    """The raw messages behind one session's rewritten head. Archives chain: each names the one before it."""

    def __init__(self, runtime: Runtime, session: Session) -> None:
        self._runtime = runtime
        self._session = session
        #: how many messages the rewritten head has, its digest, and the store key of its raw form
        self.head: tuple[int, bytes, str] | None = None
        self._last_raw: list[Any] = []

    def sent(self, messages: Sequence[Any], rewritten: bool) -> None:
        """Remember the raw messages behind a rewritten view, by reference."""
        self._last_raw = list(messages) if rewritten else []

    def keep(self) -> None:
        """The caller dropped the raw messages: put them into the store."""
        session = self._session
        branch = session.branch
        last = max((e.end for e in branch.edits), default=0)
        lead = branch.history.segmenter.lead
        if not self._last_raw or last <= lead:
            return
        head = project(self._last_raw[:last], [e for e in branch.edits if e.end <= last])
        raw = self._last_raw[lead:last]
        key = f"raw/{session.id}/{branch.history.chain[last].hex()}"
        # Earlier archives chain: the new one names the one before it.
        earlier = self._of_this_branch()
        record = json.dumps({"before": earlier[1] if earlier else None, "skip": earlier[0] - lead if earlier else 0})
        self._runtime.write(session.tenant, key, record.encode() + b"\n" + session.codec.dump(raw))
        self.head = (len(head), chain(session.codec, head)[-1], key)
        self._last_raw = []

    def _of_this_branch(self) -> tuple[int, str] | None:
        """Length and store key of the archived head, if the history still begins with it."""
        if self.head is None:
            return None
        length, digest, key = self.head
        digests = self._session.branch.history.chain
        return (length, key) if length < len(digests) and digests[length] == digest else None

    def loader(self, transform: Transform, run: Run) -> Loader | None:
        """For ``source="raw"`` behind an archived base: reads the raw messages back, or says that they are gone."""
        session, runtime = self._session, self._runtime
        archived = self._of_this_branch()
        if archived is None or getattr(transform, "source", "view") != "raw":
            return None
        length, key = archived
        if run.start != session.branch.history.segmenter.lead or run.end < length:
            return None  # it takes the rewritten head whole or not at all
        behind = length - run.start
        kept = sum(run.start <= i < length for i in run.kept)  # not in `request.messages`, but in `request.shown`

        async def load(request: TransformRequest) -> TransformRequest:
            raw = await self._read(key)
            if raw is None:
                runtime.events.emit(
                    "source.degraded",
                    session=session.id,
                    tenant=session.tenant,
                    why="the raw messages are not in the store any more",
                )
                return request
            shown = request.shown if request.shown is not None else request.messages
            return replace(
                request,
                messages=[*raw, *request.messages[behind - kept :]],
                shown=[*raw, *shown[behind:]],
                earlier_summary=None,
            )

        return load

    async def _read(self, key: str) -> list[Any] | None:
        session = self._session
        try:
            data = await self._runtime.store.get(session.tenant, key)
            if data is None:
                return None
            head, _, body = data.partition(b"\n")
            record = json.loads(head)
            messages = session.codec.load(body)
            if record["before"] is None:
                return messages
            before = await self._read(record["before"])
            return None if before is None else [*before, *messages[record["skip"] :]]
        except Exception as error:
            self._runtime.events.emit(
                "store.error", session=session.id, tenant=session.tenant, error=f"{type(error).__name__}: {error}"
            )
            return None

    def close(self) -> None:
        """Let go of the messages."""
        self._last_raw = []
