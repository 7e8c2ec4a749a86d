"""A view and the messages behind it: what stands for what, and the same written into a channel, message by message.

Pure functions. LangGraph's reducers know messages by their ids: a message with a known id takes that one's place, a
``RemoveMessage`` takes it out. So a rewritten run keeps its place when its first messages are replaced under their
own ids and the others removed: appends of parallel nodes stay, and the ids are known to the token stream, which
shows none of it. In a view our messages have ids of their own, so that a node may refer to them; what it then says of
one of ours is said of all that this one stands for.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from langchain_core.messages import BaseMessage, RemoveMessage

from .codec import MARK, mark_of

#: see :func:`raw`
Bare = Callable[[BaseMessage], BaseMessage]


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


def own(messages: Sequence[BaseMessage], where: Iterable[Gap]) -> tuple[Gap, ...]:
    """The same gaps with messages of their own: whoever edits those in place edits nothing that we keep.

    A message that stands for the one whose id it has gets a gap to itself. The others are marked, and get ids by the
    first messages that they stand for: every message in LangGraph has one, and ours keep theirs as they grow.
    """
    ids = any(m.id for m in messages)
    return tuple(_named(messages, part, ids) for gap in where for part in _parts(messages, gap))


def _parts(messages: Sequence[BaseMessage], gap: Gap) -> Iterator[Gap]:
    """A gap, cut at the messages in it that have the id of one that they stand for."""
    places = {m.id: i for i, m in enumerate(messages[gap.start : gap.end], gap.start) if m.id}
    put: list[BaseMessage] = []
    position = gap.start
    for message in gap.put:
        at = places.get(message.id, -1) if message.id else -1
        if at < position:
            put.append(message)
            continue
        if put or at > position:
            yield Gap(position, at, tuple(put))
        yield Gap(at, at + 1, (message,))
        put, position = [], at + 1
    if put or position < gap.end:
        yield Gap(position, gap.end, tuple(put))


def _named(messages: Sequence[BaseMessage], part: Gap, ids: bool) -> Gap:
    slots = [m.id for m in messages[part.start : part.end]]
    if [m.id for m in part.put] == slots and all(slots):
        return replace(part, put=tuple(map(copy.copy, part.put)))
    if ids:  # none of ours may go without, nor have that of a message: whoever removes one removes what it stands for
        before = messages[part.start - 1].id if part.start else ""
        slots = [slot and f"{MARK}:{slot}" for slot in slots]
        slots += [f"{MARK}:{before}:{k}" for k in range(len(slots), len(part.put))]
    put: list[BaseMessage] = []
    for k, message in enumerate(part.put):
        kwargs = message.additional_kwargs
        if mark_of(message) is None:
            kwargs = {**kwargs, MARK: {"kind": "other"}}
        found = (slots[k] if k < len(slots) else None) or message.id
        put.append(message.model_copy(update={"id": found, "additional_kwargs": kwargs}))
    return replace(part, put=tuple(put))


def _joined(where: Iterable[Gap]) -> list[Gap]:
    """Gaps side by side as one."""
    joined: list[Gap] = []
    for gap in where:
        if joined and joined[-1].end == gap.start:
            last = joined.pop()
            gap = Gap(last.start, gap.end, last.put + gap.put)
        joined.append(gap)
    return joined


def raw(
    returned: Sequence[object],
    messages: Sequence[BaseMessage],
    view: Sequence[BaseMessage],
    where: Sequence[Gap],
    bare: Bare | None = None,
) -> list[object]:
    """What a node returned, with the messages that it was given a view of in place of ours.

    A node that returns its whole list returns the view: that becomes the messages again. A single message of ours
    becomes those that it stands for, and its removal becomes theirs. To a reducer that knows ids the former is no
    change. A message of ours from an earlier view (a subgraph with a memory of its own has those) becomes what the
    state holds under its id.

    Args:
        returned: from the node.
        messages: those of the state.
        view: what the node was given.
        where: the gaps that make the one the other.
        bare: makes of a message what a view may show of it: the same without thinking.
    """
    found = list(returned)
    at = _run(found, view) if where else None
    if at is None:
        return _raw(found, messages, where, bare)
    behind = _raw(found[at + len(view) :], messages, where, bare)
    return [*_raw(found[:at], messages, where, bare), *messages, *behind]


def _raw(
    found: Sequence[object], messages: Sequence[BaseMessage], where: Sequence[Gap], bare: Bare | None
) -> list[object]:
    wholes = _joined(where)
    mine = _Mine(wholes)
    places = {m.id: i for i, m in enumerate(messages) if m.id} if wholes or any(map(mark_of, found)) else {}
    gone = {m.id for m in found if isinstance(m, RemoveMessage)}
    holders = {m.id: gap for gap in where for m in gap.put} if gone else {}
    done: list[object] = []
    seen: set[int] = set()
    for message in found:
        if isinstance(message, RemoveMessage):
            done += _removals(message, gone, messages, holders.get(message.id))
            continue
        at = mine.find(message)
        if at is None:
            place = places.get(_id(message) or "")
            held = None if place is None else messages[place]
            hidden = place is not None and any(g.start <= place < g.end for g in wholes)
            done += _other(message, held, hidden, bare)
            continue
        gap = mine.gaps[at]
        if gap.start not in seen:
            seen.add(gap.start)
            done += messages[gap.start : gap.end]
    return done


def _removals(
    removal: RemoveMessage, gone: set[str | None], messages: Sequence[BaseMessage], gap: Gap | None
) -> list[object]:
    """The removal of one of ours, as that of what it stands for. Several that share it have to go together."""
    if gap is None:
        return [removal]
    if removal.id != gap.put[0].id or not all(m.id in gone for m in gap.put):
        return []
    return [removal.model_copy(update={"id": m.id}) for m in messages[gap.start : gap.end] if m.id]


def _other(message: object, held: BaseMessage | None, hidden: bool, bare: Bare | None) -> list[object]:
    """A message that is none of ours in this view; where it is from another view, what the state holds in its place."""
    if mark_of(message) is not None and _id(message) is not None:
        if held is None:  # it stood for messages that the state no longer holds, or is an inner agent's own
            return [] if str(_id(message)).startswith(f"{MARK}:") else [message]
        return [message if mark_of(held) is not None else held]
    if held is not None and hidden and bare is not None and _alike(message, bare(held)):
        return [held]
    return [message]


def by_id(messages: Sequence[BaseMessage], where: Sequence[Gap]) -> list[BaseMessage] | None:
    """The writes that turn ``messages`` into the view in a channel that knows ids.

    ``None`` where ids cannot say it: a message without one or with another's, or more messages than they replace.
    """
    writes = _by_id(messages, where)
    return _by_id(messages, _joined(where)) if writes is None else writes


def _by_id(messages: Sequence[BaseMessage], where: Sequence[Gap]) -> list[BaseMessage] | None:
    writes: list[BaseMessage] = []
    taken = [m.id for m in messages]
    times = Counter(taken)
    for gap in where:
        slots = taken[gap.start : gap.end]
        if len(gap.put) > len(slots) or any(not slot or times[slot] > 1 for slot in slots):
            return None
        writes += [m.model_copy(update={"id": slot}) for m, slot in zip(gap.put, slots, strict=False)]
        writes += [RemoveMessage(id=str(slot)) for slot in slots[len(gap.put) :]]
    return writes


def rewritten(messages: Sequence[BaseMessage], view: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The writes that turn ``messages`` into ``view``; none where ids cannot say it."""
    return by_id(messages, gaps(messages, view)) or []


def touches(returned: Iterable[object], messages: Sequence[BaseMessage], where: Sequence[Gap]) -> bool:
    """Does a node itself change a message that the view replaced? Not by what it returns of ours."""
    slots = {m.id for gap in where for m in (*messages[gap.start : gap.end], *gap.put)}
    mine = _Mine(where)
    return any(_id(message) in slots and mine.find(message) is None for message in returned)


def ours(returned: Sequence[object], where: Sequence[Gap], writes: Sequence[BaseMessage]) -> list[object]:
    """What a node returned, with the messages of ours as they are written: under the ids that they take over."""
    mine = _Mine(where)
    written = [m for m in writes if not isinstance(m, RemoveMessage)]
    done: list[object] = []
    for message in returned:
        at = mine.find(message)
        if at is None:
            done.append(message)
        elif isinstance(message, BaseMessage) and not _alike(message, mine.put[at]):  # the node's edit of it
            done.append(message.model_copy(update={"id": written[at].id}))
        else:
            done.append(written[at])
    return done


class _Mine:
    """Which of our messages in a view is this: it itself, a copy of it or an edit of that?

    Text alone tells nothing: a model may say the same twice. A message under the id of one of ours is that one if it
    has our mark or our text; without, it may be the node's word on the message of the state that has this id.
    """

    def __init__(self, where: Sequence[Gap]) -> None:
        self.put = [m for gap in where for m in gap.put]
        self.gaps = [gap for gap in where for _ in gap.put]
        self._objects = {id(m): k for k, m in enumerate(self.put)}
        self._ids = {m.id: k for k, m in enumerate(self.put) if m.id}
        self._marked = [k for k, m in enumerate(self.put) if mark_of(m) is not None]

    def find(self, message: object) -> int | None:
        """Its place in ``put``; ``None`` for any other message, and for a removal."""
        at = self._objects.get(id(message))
        if at is not None or isinstance(message, RemoveMessage):
            return at
        found = _id(message)
        if found is not None and found in self._ids:
            at = self._ids[found]
            mine = self.put[at]
            rebuilt = mark_of(mine) is not None and _content(message) == mine.content
            return at if rebuilt or mark_of(message) is not None or _alike(message, mine) else None
        nameless = (k for k in self._marked if found is None or self.put[k].id is None)
        return next((k for k in nameless if _alike(message, self.put[k])), None)


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
    """Is this a message of the view, or a copy of it?"""
    return one is other or (_alike(one, other) and (_id(one) == other.id or mark_of(other) is not None))


def _alike(one: object, other: BaseMessage) -> bool:
    """Do they say the same, whatever their ids?"""
    return one is other or (
        isinstance(one, BaseMessage)
        and one.type == other.type
        and one.content == other.content
        and one.name == other.name
        and one.additional_kwargs == other.additional_kwargs
        and getattr(one, "tool_calls", None) == getattr(other, "tool_calls", None)
        and getattr(one, "tool_call_id", None) == getattr(other, "tool_call_id", None)
    )


def _content(message: object) -> object:
    return message.get("content") if isinstance(message, dict) else getattr(message, "content", None)


def _id(message: object) -> str | None:
    found = message.get("id") if isinstance(message, dict) else getattr(message, "id", None)
    return found if isinstance(found, str) else None
