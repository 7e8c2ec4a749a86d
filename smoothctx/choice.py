"""The choice among the candidates of a result, by what has happened since the work began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .conversation import Conversation
from .handle import LookaheadHandle
from .transforms.speculate import Candidate, Speculate
from .usage import Usage
from .view import Artifact


def choose(
    conversation: Conversation,
    artifact: Artifact,
    handle: LookaheadHandle,
    messages: Sequence[Any],
    *,
    quiet: bool = False,
) -> Artifact:
    """The candidate to use of this artifact; the artifact itself where it has none."""
    transform = handle.transform
    if not artifact.alternatives or not isinstance(transform, Speculate):
        return artifact
    since = messages[handle.snapshot : len(conversation.branch.history)]
    index, why = transform.pick(since, [_candidate(transform, k, artifact) for k in range(len(transform.transforms))])
    if why and not quiet:
        conversation.say("speculation.default", f"{handle.id}", handle=handle.id, index=index, why=why)
    found = artifact.alternatives[index]
    assert found is not None
    # Its cost is in the receipt of the whole; what is kept of it elsewhere is its own.
    return replace(found, created=artifact.created, durable=artifact.durable)


def losers(artifact: Artifact, chosen: Artifact, spent: Usage) -> Usage:
    """What was spent on the candidates that were not chosen, failed ones included."""
    if chosen is artifact or not artifact.alternatives:
        return Usage()
    return Usage(
        input_tokens=max(0, spent.input_tokens - chosen.usage.input_tokens),
        output_tokens=max(0, spent.output_tokens - chosen.usage.output_tokens),
    )


def _candidate(transform: Speculate, index: int, artifact: Artifact) -> Candidate:
    name = transform.transforms[index].name
    found = artifact.alternatives[index] if index < len(artifact.alternatives) else None
    if found is None:
        return Candidate(transform=name, ready=False)
    messages = tuple(m for e in found.replacement.edits for m in e.messages)
    return Candidate(transform=name, ready=True, messages=messages, tokens=found.tokens)
