"""Local artifacts: rewrites without a model, which cannot fail. The fallback's removals, stubs of oversized results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from .cuts import Run
from .transforms.base import Transform, fingerprint
from .transforms.facts import message_pins
from .transforms.offload import Offload, offload_results
from .view import Artifact, Edit, Replacement

if TYPE_CHECKING:
    from .runtime import Runtime
    from .session import Session

#: tokens of an offloaded entry's preview
PREVIEW_TOKENS = 64


def offload_of(transform: Transform) -> Offload | None:
    """The ``Offload`` in a policy's transform, alone or in a chain."""
    members = getattr(transform, "transforms", (transform,))
    return next((m for m in members if isinstance(m, Offload)), None)


@final
class LocalRewrites:
    """Makes the local artifacts of one session. Called under the session's lock only."""

    def __init__(self, runtime: Runtime, session: Session) -> None:
        self._runtime = runtime
        self._session = session

    def removal(self, run: Run, messages: Sequence[Any]) -> Artifact:
        """A local artifact that removes a run (the fallback): it needs no model and cannot fail.

        Texts that were pinned with ``session.pin`` and would stand nowhere any more come as a note in its place.
        """
        session = self._session
        bare = self._removal(run, ())
        if not session.pins or session.branch.refusal(bare) is not None:
            return bare
        view = session.branch.preview(bare, messages[: len(session.branch.history)])
        carried = {*message_pins(view, session.codec)}
        texts = [session.codec.text(m) for m in view]
        lost = [p for p in session.pins if p not in carried and not any(p in t for t in texts)]
        return self._removal(run, lost) if lost else bare

    def _removal(self, run: Run, pins: Sequence[str]) -> Artifact:
        history = self._session.branch.history
        edits: list[Edit] = []
        if pins:
            note = (self._session.codec.user("\n".join(f"<pin>{p}</pin>" for p in pins)),)
            edits.append(Edit(start=run.start, end=run.start, messages=note, tokens=history.count(note)))
        position = run.start
        for index in [*sorted(run.kept), run.end]:
            if index > position:
                edits.append(Edit(start=position, end=index, messages=(), tokens=0))
            position = index + 1
        return self._local(
            "keep_recent", run.start, run.end, tuple(edits), history.chain[run.start], history.chain[run.end]
        )

    def entry(self, message: Any, index: int) -> Artifact | None:
        """What is oversized among a message's results as a local offload; its content goes to the store in the
        background."""
        session = self._session
        limit = session.policy.max_message_tokens or 0
        own = offload_of(session.policy.transform)
        made = offload_results(
            message,
            session.codec,
            max_tokens=limit,
            preview_tokens=min(PREVIEW_TOKENS, limit // 2),
            redact=own.redact if own is not None else None,
            pins=session.pins,
        )
        if made is None:
            return None
        stub, contents = made
        history = session.branch.history
        edit = Edit(start=index, end=index + 1, messages=(stub,), tokens=history.count([stub]))
        for content_id, content in contents:
            self._runtime.write(session.tenant, content_id, content)
            self._runtime.events.emit(
                "message.offloaded",
                session=session.id,
                tenant=session.tenant,
                index=index,
                id=content_id,
                bytes=len(content),
            )
        return self._local("offload", index, index + 1, (edit,), history.chain[index], history.chain[index + 1])

    def _local(
        self, name: str, start: int, end: int, edits: tuple[Edit, ...], start_digest: bytes, end_digest: bytes
    ) -> Artifact:
        codec = self._session.codec
        key = fingerprint(
            name,
            {
                "start": start_digest.hex(),
                "end": end_digest.hex(),
                "edits": [[e.start, e.end] for e in edits],
                "notes": [codec.text(m) for e in edits if e.start == e.end for m in e.messages],
            },
        )
        return Artifact(
            key=key,
            transform=name,
            replacement=Replacement(
                start=start, end=end, start_digest=start_digest, end_digest=end_digest, edits=edits
            ),
            created=self._runtime.now(),
            tokens=sum(e.tokens for e in edits),
        )
