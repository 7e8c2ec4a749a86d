"""Parallel results one by one: the core pairs each result with its call, AutoGen keeps all of a turn in one message.

What goes to the core is *unpacked*: a ``FunctionExecutionResultMessage`` with several results as that many with one
each. What comes back is *packed* again: where all of them are there, it is the caller's own message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autogen_core.models import FunctionExecutionResultMessage, LLMMessage


@dataclass(frozen=True, slots=True)
class _Split:
    """One message of the caller's, and its results as messages of their own."""

    source: FunctionExecutionResultMessage
    parts: tuple[FunctionExecutionResultMessage, ...]

    def current(self) -> bool:
        """Does the message still hold exactly these results?"""
        held = self.source.content
        return len(held) == len(self.parts) and all(p.content[0] is r for p, r in zip(self.parts, held, strict=True))


class Unpacked:
    """The caller's messages with one result each, and the way back."""

    def __init__(self, messages: Sequence[LLMMessage], splits: dict[int, _Split]) -> None:
        self.messages: list[LLMMessage] = []
        self.splits: dict[int, _Split] = {}
        self._own: set[int] = set()
        self._of: dict[int, _Split] = {}
        for message in messages:
            if not isinstance(message, FunctionExecutionResultMessage):
                self.messages.append(message)
            elif not isinstance(message.content, list) or len(message.content) < 2:
                self.messages.append(message)
                self._own.add(id(message))
            else:
                split = splits.get(id(message))
                if split is None or split.source is not message or not split.current():
                    split = _split(message)
                self.splits[id(message)] = split
                self.messages += split.parts
                self._of.update((id(p), split) for p in split.parts)

    def pack(self, view: Sequence[Any]) -> list[LLMMessage]:
        """A view of the unpacked messages, in the caller's form."""
        packed: list[LLMMessage] = []
        run: list[FunctionExecutionResultMessage] = []
        owner: _Split | None = None

        def flush() -> None:
            nonlocal run, owner
            if run:
                packed.append(_join(run, owner))
            run, owner = [], None

        for message in view:
            if not isinstance(message, FunctionExecutionResultMessage) or id(message) in self._own:
                flush()
                packed.append(message)
                continue
            split = self._of.get(id(message))  # None: it stands for a result, such as a stub
            if split is not None and owner is not None and split is not owner:
                flush()
            owner = split or owner
            run.append(message)
            if owner is not None and len(run) == len(owner.parts):
                flush()
        flush()
        return packed


class Results:
    """Unpacks the messages of one context; each result keeps its message for as long as it stays the same."""

    def __init__(self) -> None:
        self._splits: dict[int, _Split] = {}

    def unpack(self, messages: Sequence[LLMMessage]) -> Unpacked:
        """One pass; only result messages that are new or changed are taken apart."""
        unpacked = Unpacked(messages, self._splits)
        self._splits = unpacked.splits
        return unpacked


def _split(message: FunctionExecutionResultMessage) -> _Split:
    return _Split(message, tuple(FunctionExecutionResultMessage(content=[r]) for r in message.content))


def _join(run: Sequence[FunctionExecutionResultMessage], owner: _Split | None) -> FunctionExecutionResultMessage:
    if owner is not None and len(run) == len(owner.parts):
        if all(a is b for a, b in zip(run, owner.parts, strict=True)):
            return owner.source
    if len(run) == 1:
        return run[0]
    return FunctionExecutionResultMessage(content=[r for message in run for r in message.content])
