"""Local artifacts: rewrites without a model, which cannot fail. The fallback's removals, stubs of oversized results,
notes of pinned texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from .codec import Codec
from .cuts import Run
from .tokens import count_text
from .transforms.base import Transform, fingerprint
from .transforms.facts import message_pins
from .transforms.offload import Offload, offload_results
from .view import Artifact, Edit, Replacement

if TYPE_CHECKING:
    from .runtime import Runtime
    from .session import Session

#: tokens of an offloaded entry's preview
PREVIEW_TOKENS = 64
#: the part of a block, as one in so many, that pins may take of its summary which stand nowhere in it
PINS_PART = 4


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
        lost = _without(session.pins, view, session.codec)
        return self._removal(run, lost) if lost else bare

    def with_pins(self, artifact: Artifact, messages: Sequence[Any], known: Sequence[str] = ()) -> Artifact | None:
        """A result with what was pinned since it was made: texts that stand in what it replaces, or that a summary has
        to carry, and that would stand nowhere any more, come as a note before it.

        ``known``: pins that it was made with. The artifact itself where nothing is missing; ``None`` where something is
        and no note can stand: what stands for a tool result has to follow its call.
        """
        session = self._session
        codec, branch, r = session.codec, session.branch, artifact.replacement
        pins = [p for p in session.pins if p not in known]
        if not pins or branch.refusal(artifact) is not None:
            return artifact
        own = messages[: len(branch.history)]
        lost = _without(pins, branch.preview(artifact, own), codec)
        if lost and not any(codec.summary_text(m) is not None for e in r.edits for m in e.messages):
            missing = {*_without(lost, [*own[r.start : r.end], *branch.project(own)], codec)}
            lost = [p for p in lost if p not in missing]
        if not lost:
            return artifact
        if codec.role(messages[r.start]) == "tool":
            return None
        note = self._note(r.start, lost)
        return replace(
            artifact,
            key=fingerprint("pinned", {"of": artifact.key, "pins": lost}),
            replacement=replace(r, edits=(note, *r.edits)),
            tokens=artifact.tokens + note.tokens,
            warm=False,
            alternatives=(),
        )

    def block_pins(self, run: Run, messages: Sequence[Any], tokens: int) -> tuple[str, ...]:
        """The pins that the summary of this block has to carry: those that stand in it; the first block's also those
        that stand nowhere, as far as they are no more than a part of its ``tokens``. What else is lost comes as a
        note."""
        session = self._session
        history, codec = session.branch.history, session.codec
        others = _without(session.pins, messages[run.start : run.end], codec)
        carried = {p for p in session.pins if p not in others}
        if run.start <= history.segmenter.lead:
            room = tokens // PINS_PART
            for text in _without(others, messages[: len(history)], codec):
                room -= count_text(text)
                if room >= 0:
                    carried.add(text)
        return tuple(p for p in session.pins if p in carried)

    def _note(self, index: int, pins: Sequence[str]) -> Edit:
        """Pinned texts as a message before message ``index`` of the history."""
        note = (self._session.codec.user("\n".join(f"<pin>{p}</pin>" for p in pins)),)
        return Edit(start=index, end=index, messages=note, tokens=self._session.branch.history.count(note))

    def _removal(self, run: Run, pins: Sequence[str]) -> Artifact:
        history = self._session.branch.history
        edits = [self._note(run.start, pins)] if pins else []
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


def _without(pins: Sequence[str], messages: Sequence[Any], codec: Codec) -> list[str]:
    """The pins that stand in none of these messages."""
    carried = {*message_pins(messages, codec)}
    texts = [codec.text(m) for m in messages]
    return [p for p in pins if p not in carried and not any(p in t for t in texts)]
