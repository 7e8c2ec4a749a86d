"""A view and the messages behind it: what stands for what, and the same written into a channel, message by message.

Pure functions. LangGraph's reducers know messages by their ids: a message with a known id takes that one's place, a
``RemoveMessage`` takes it out. So a rewritten run keeps its place when its first messages are replaced under their
own ids and the others removed: appends of parallel nodes stay, and the ids are known to the token stream, which
shows none of it.
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from langchain_core.messages import BaseMessage, RemoveMessage


@dataclass(frozen=True, slots=True)
class Gap:
    """``put`` stands in the view for the messages ``[start, end)``."""

    start: int
    end: int
    put: tuple[BaseMessage, ...]


def gaps(messages: Sequence[BaseMessage], view: Sequence[BaseMessage]) -> tuple[Gap, ...]:
    """Where the view differs. What it passes on is known by identity."""
    if len(messages) == len(view) and all(map(operator.is_, messages, view)):
        return ()
    places: defaultdict[int, list[int]] = defaultdict(list)
    for i, message in enumerate(messages):
        places[id(message)].append(i)
    found: list[Gap] = []
    put: list[BaseMessage] = []
    position = 0
    for message in view:
        at = next((i for i in places.get(id(message), ()) if i >= position), None)
        if at is None:
            put.append(message)
            continue
        if put or at > position:
            found.append(Gap(position, at, tuple(put)))
        put, position = [], at + 1
    if put or position < len(messages):
        found.append(Gap(position, len(messages), tuple(put)))
    return tuple(found)


def fill(messages: Sequence[BaseMessage], where: Iterable[Gap]) -> list[BaseMessage]:
    """The view: ``messages`` with every gap filled."""
    view: list[BaseMessage] = []
    position = 0
    for gap in where:
        view += messages[position : gap.start]
        view += gap.put
        position = gap.end
    view += messages[position:]
    return view


def own(where: Iterable[Gap]) -> tuple[Gap, ...]:
    """The same gaps with messages of their own: whoever edits those in place edits nothing that we keep."""
    return tuple(replace(gap, put=tuple(map(copy.copy, gap.put))) for gap in where)


def raw(
    returned: Sequence[object], messages: Sequence[BaseMessage], view: Sequence[BaseMessage], where: Sequence[Gap]
) -> list[object]:
    """What a node returned, with the messages that it was given a view of in place of ours.

    A node that returns its whole list returns the view: that becomes the messages again. A single message of ours
    becomes those that it stands for. To a reducer that knows ids these are no change.
    """
    found = list(returned)
    if not where:
        return found
    at = _run(found, view)
    if at is not None:
        return [*found[:at], *messages, *found[at + len(view) :]]
    done: list[object] = []
    seen: set[int] = set()
    for message in found:
        gap = next((g for g in where if any(_same(message, m) for m in g.put)), None)
        if gap is None:
            done.append(message)
        elif gap.start not in seen:
            seen.add(gap.start)
            done += messages[gap.start : gap.end]
    return done


def by_id(messages: Sequence[BaseMessage], where: Sequence[Gap]) -> list[BaseMessage] | None:
    """The writes that turn ``messages`` into the view in a channel that knows ids.

    ``None`` where ids cannot say it: a message without one or with another's, or more messages than they replace.
    """
    writes: list[BaseMessage] = []
    taken = [m.id for m in messages]
    for gap in where:
        slots = taken[gap.start : gap.end]
        if len(gap.put) > len(slots) or any(not slot or taken.count(slot) > 1 for slot in slots):
            return None
        writes += [m.model_copy(update={"id": slot}) for m, slot in zip(gap.put, slots, strict=False)]
        writes += [RemoveMessage(id=str(slot)) for slot in slots[len(gap.put) :]]
    return writes


def rewritten(messages: Sequence[BaseMessage], view: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The writes that turn ``messages`` into ``view``; none where ids cannot say it."""
    return by_id(messages, gaps(messages, view)) or []


def touches(returned: Iterable[object], messages: Sequence[BaseMessage], where: Sequence[Gap]) -> bool:
    """Does a node itself change a message that the view replaced?"""
    slots = {m.id for gap in where for m in messages[gap.start : gap.end]}
    return any(_id(message) in slots for message in returned)


def ours(returned: Sequence[object], where: Sequence[Gap], writes: Sequence[BaseMessage]) -> list[object]:
    """What a node returned, with the messages of ours as they are written: under the ids that they take over."""
    put = [m for gap in where for m in gap.put]
    written = [m for m in writes if not isinstance(m, RemoveMessage)]
    done: list[object] = []
    for message in returned:
        twin = next((w for m, w in zip(put, written, strict=True) if _same(message, m)), message)
        done.append(twin)
    return done


def shrunk(value: object, view: Sequence[BaseMessage]) -> bool:
    """Does a channel hold what the view shows? Ids may differ."""
    return (
        isinstance(value, list | tuple)
        and len(value) == len(view)
        and all(_alike(a, b) for a, b in zip(value, view, strict=True))
    )


def _run(found: Sequence[object], view: Sequence[BaseMessage]) -> int | None:
    """Where the whole view stands in a list."""
    for at in range(len(found) - len(view) + 1):
        if all(_same(found[at + k], m) for k, m in enumerate(view)):
            return at
    return None


def _same(one: object, other: BaseMessage) -> bool:
    return one is other or _alike(one, other)


def _alike(one: object, other: BaseMessage) -> bool:
    """The same message, or a copy of it, whatever its id (reducers give ids to copies that have none)."""
    return one is other or (
        isinstance(one, BaseMessage)
        and one.type == other.type
        and one.content == other.content
        and one.name == other.name
        and one.additional_kwargs == other.additional_kwargs
        and getattr(one, "tool_calls", None) == getattr(other, "tool_calls", None)
        and getattr(one, "tool_call_id", None) == getattr(other, "tool_call_id", None)
    )


def _id(message: object) -> str | None:
    found = message.get("id") if isinstance(message, dict) else getattr(message, "id", None)
    return found if isinstance(found, str) else None
