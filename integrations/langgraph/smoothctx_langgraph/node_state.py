"""The state a node is given and the updates it returns, in every form that LangGraph knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.types import Command, Overwrite, Send
from pydantic import BaseModel

#: how an ``Overwrite`` reads that came as JSON
_OVERWRITE = "__overwrite__"
#: rewrites a list of messages
Map = Callable[[list[Any]], list[Any]]


def messages_of(state: Any, key: str) -> list[Any] | None:
    """The messages in a state; ``None`` where there are none to speak of (such as in what a ``Send`` carries)."""
    if isinstance(state, list):
        found: Any = state  # a graph whose whole state is the list
    elif isinstance(state, dict):
        found = state.get(key)
    else:
        found = getattr(state, key, None) if _is_object(state) else None
    return list(found) if isinstance(found, list | tuple) and found else None


def keys_of(state: Any) -> list[str]:
    """The names in a state; none where it is no state of several channels."""
    if isinstance(state, dict):
        return [key for key in state if isinstance(key, str)]
    if isinstance(state, BaseModel):
        return list(type(state).model_fields)
    return [field.name for field in dataclasses.fields(state)] if _is_object(state) else []


def with_messages(state: Any, key: str, messages: list[Any]) -> Any:
    """A copy of the state with other messages."""
    if isinstance(state, list):
        return messages
    if isinstance(state, dict):
        return {**state, key: messages}
    if isinstance(state, BaseModel):
        return state.model_copy(update={key: messages})
    other = copy.copy(state)
    object.__setattr__(other, key, messages)  # a frozen dataclass too
    return other


def map_messages(result: Any, key: str, change: Map) -> Any:
    """What a node returned, with ``change`` applied to the messages in it. The same object where nothing changed."""
    if isinstance(result, Command):
        update, goto = _mapped_update(result.update, key, change), _mapped_goto(result.goto, key, change)
        if update is result.update and goto is result.goto:
            return result
        return dataclasses.replace(result, update=update, goto=goto)
    if _is_updates(result):
        mapped = [map_messages(part, key, change) for part in result]
        return result if all(a is b for a, b in zip(mapped, result, strict=True)) else mapped
    if isinstance(result, list | tuple | BaseMessage):
        return _mapped(result, change)  # the whole state is the list
    return _mapped_update(result, key, change)


def add_update(result: Any, more: Mapping[str, Any], key: str, *, root: bool = False) -> Any:
    """What a node returned, and ``more`` updates before it. ``None`` where it goes to another graph."""
    if root:
        told = [] if result is None else result if isinstance(result, list | tuple) else [result]
        return [*more[key], *told]
    if result is None:
        return dict(more)
    if isinstance(result, dict):
        return _merged(more, result, key)
    if isinstance(result, Command):
        if result.graph is not None:
            return None
        if result.update is None or isinstance(result.update, dict):
            return dataclasses.replace(result, update=_merged(more, result.update or {}, key))
        return [Command(update=dict(more)), result]
    if _is_updates(result):
        if all(isinstance(part, Command) and part.graph is not None for part in result):
            return None
        return [Command(update=dict(more)), *result]
    return [Command(update=dict(more)), result] if _is_object(result) else None


def returned(result: Any, key: str) -> list[Any]:
    """Every message in what a node returned to its own graph."""
    found: list[Any] = []

    def collect(messages: list[Any]) -> list[Any]:
        found.extend(messages)
        return messages

    for part in result if _is_updates(result) else [result]:
        if isinstance(part, Command):
            part = None if part.graph is not None else part.update
        _mapped(part, collect) if isinstance(part, BaseMessage) else map_messages(part, key, collect)
    return found


def overwrites(result: Any, key: str) -> bool:
    """Does a node set the whole channel, past its reducer?"""
    parts = result if _is_updates(result) else [result]
    updates = [part.update if isinstance(part, Command) else part for part in parts]
    return any(
        isinstance(value, Overwrite) or _is_overwrite(value) for update in updates for _, value in _pairs(update, key)
    )


def added(result: Any, key: str, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The messages that a node appends to those that it was given; none where it does anything else with them."""
    known = {m.id for m in messages if m.id}
    held = set(map(id, messages))
    new: list[BaseMessage] = []
    for message in returned(result, key):
        if id(message) in held:
            continue
        if not isinstance(message, BaseMessage) or isinstance(message, RemoveMessage) or message.id in known:
            return []
        new.append(message)
    return new


def _merged(more: Mapping[str, Any], update: Mapping[str, Any], key: str) -> dict[str, Any]:
    merged = {**more, **update}
    if key in more and key in update:
        value = update[key]
        merged[key] = [*more[key], *(value if isinstance(value, list | tuple) else [value])]
    return merged


def _mapped(value: Any, change: Map) -> Any:
    if isinstance(value, Overwrite):
        inner = _mapped(value.value, change)
        return value if inner is value.value else Overwrite(inner)
    if _is_overwrite(value):
        inner = _mapped(value[_OVERWRITE], change)
        return value if inner is value[_OVERWRITE] else {_OVERWRITE: inner}
    if isinstance(value, BaseMessage):
        done = change([value])
        return value if len(done) == 1 and done[0] is value else done
    if not isinstance(value, list | tuple):
        return value
    done = change(list(value))
    return value if len(done) == len(value) and all(a is b for a, b in zip(done, value, strict=True)) else done


def _mapped_update(update: Any, key: str, change: Map) -> Any:
    if isinstance(update, list | tuple):  # pairs of key and value
        pairs = [(k, _mapped(v, change)) if k == key else (k, v) for k, v in update]
        return update if all(a[1] is b[1] for a, b in zip(pairs, update, strict=True)) else pairs
    found = _pairs(update, key)
    if not found:
        return update
    value = _mapped(found[0][1], change)
    if value is found[0][1]:
        return update
    return {**update, key: value} if isinstance(update, dict) else with_messages(update, key, value)


def _mapped_goto(goto: Any, key: str, change: Map) -> Any:
    """A node may send on the state that it was given."""
    if isinstance(goto, Send):
        arg = _mapped_update(goto.arg, key, change) if isinstance(goto.arg, dict) or _is_object(goto.arg) else goto.arg
        return goto if arg is goto.arg else Send(goto.node, arg)
    if not isinstance(goto, list | tuple):
        return goto
    mapped = [_mapped_goto(part, key, change) for part in goto]
    return goto if all(a is b for a, b in zip(mapped, goto, strict=True)) else mapped


def _pairs(update: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(update, dict):
        return [(key, update[key])] if key in update else []
    if isinstance(update, list | tuple):
        return [(k, v) for k, v in (pair for pair in update if isinstance(pair, tuple) and len(pair) == 2) if k == key]
    if _is_object(update) and getattr(update, key, None) is not None:
        return [(key, getattr(update, key))]
    return []


def _is_overwrite(value: Any) -> bool:
    return isinstance(value, Overwrite) or (isinstance(value, dict) and value.keys() == {_OVERWRITE})


def _is_updates(result: Any) -> bool:
    """Several updates in one: a list with at least one ``Command`` in it."""
    return isinstance(result, list | tuple) and any(isinstance(part, Command) for part in result)


def _is_object(state: Any) -> bool:
    return isinstance(state, BaseModel) or (dataclasses.is_dataclass(state) and not isinstance(state, type))
