"""What a ``before_model`` hook would have done to the state, read as a rewrite of a finished run of messages.

Pure functions. The hook gets copies: whatever it edits in place, the history stays as it is.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.graph.message import add_messages
from langgraph.types import Overwrite

from smoothctx.codec import Codec
from smoothctx.errors import TransformError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of ``originals`` under ids of their own, as a hook may have them."""

    originals: tuple[BaseMessage, ...]
    copies: tuple[BaseMessage, ...]


def snapshot(messages: Sequence[BaseMessage]) -> Snapshot:
    """Copies of these messages; one without an id gets one, as in a state."""
    copies = [m.model_copy(deep=True) for m in messages]
    named = [m if m.id else m.model_copy(update={"id": str(uuid.uuid4())}) for m in copies]
    return Snapshot(tuple(messages), tuple(named))


def folded(update: Any, given: Snapshot) -> list[BaseMessage]:
    """The messages after the hook's update.

    Raises:
        TransformError: the update does more than change messages: a lookahead can do nothing else.
    """
    if not isinstance(update, Mapping):
        raise TransformError(f"the hook returned {type(update).__name__}; expected a dict with 'messages', or None")
    other = [key for key, value in update.items() if key != "messages" and value is not None]
    if other:
        raise TransformError(f"the hook also wrote {', '.join(map(repr, other))}: only messages can be prepared ahead")
    written = update.get("messages")
    if written is None:
        return list(given.copies)
    if isinstance(written, Overwrite):
        return list(written.value)
    held: Any = list(given.copies)
    result: Any = add_messages(held, written)
    return list(result)


def rewritten(after: Sequence[BaseMessage], given: Snapshot, run: Sequence[BaseMessage], codec: Codec) -> list[Any]:
    """What stands for ``run`` after the hook: its own objects for what the hook left alone.

    ``run`` may lack some of the snapshot's messages: those stay as they are whatever the hook did to them.
    """
    by_id = dict(zip((m.id for m in given.copies), given.originals, strict=True))
    in_run = {id(m) for m in run}
    result: list[Any] = []
    for message in after:
        original = by_id.get(message.id) if isinstance(message, BaseMessage) else None
        if original is None:
            result.append(message)
        elif id(original) in in_run:
            same = type(original) is type(message) and codec.visible(original) == codec.visible(message)
            result.append(original if same else message)
    return _anchored(result, run)


def _anchored(result: Sequence[Any], run: Sequence[BaseMessage]) -> list[Any]:
    """A message that was added where none was taken away needs one to stand for: its neighbour, as a copy."""
    place = {id(m): i for i, m in enumerate(run)}
    out: list[Any] = []
    new: list[Any] = []
    last = -1
    for message in [*result, None]:
        at = len(run) if message is None else place.get(id(message))
        if at is None or at <= last:
            new.append(
                message.model_copy() if message is not None and at is not None else message
            )  # moved: new in its new place
            continue
        if new and at == last + 1:
            if out and out[-1] is run[last]:
                out[-1] = out[-1].model_copy()
            elif message is not None:
                message = message.model_copy()
        out += new
        new, last = [], at
        if message is not None:
            out.append(message)
    return out
