"""Scores: is an answer right, and is an action the same? Offline, without a model."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and double blanks: how answers are compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, expected: Sequence[str]) -> float:
    """1 if the answer is one of the expected ones, normalised; else 0."""
    return float(any(normalise(answer) == normalise(e) for e in expected))


def held(context: str, expected: Sequence[str]) -> float:
    """1 if one of the expected answers stands in the context, normalised, as whole words; else 0. No model is asked:
    what is not there can only be guessed."""
    words = f" {normalise(context)} "
    return float(any(f" {normalise(e)} " in words for e in expected if normalise(e)))


def f1(answer: str, expected: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall, by words, over the expected answers."""
    return max((_f1(normalise(answer).split(), normalise(e).split()) for e in expected), default=0.0)


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(given), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True, slots=True)
class Action:
    """What an agent does next: the tool that it calls (``None``: it only says something) and the arguments."""

    tool: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """How alike two actions are: the same tool, and the part of argument keys and of values that both have."""

    tool: bool
    keys: float
    values: float

    @property
    def score(self) -> float:
        """1 for the same action. A different tool is 0; of the same one, the tool, keys and values count a third
        each."""
        return (1 + self.keys + self.values) / 3 if self.tool else 0.0

    @property
    def same(self) -> bool:
        """Is it the same action?"""
        return self.tool and self.keys == self.values == 1.0


def equivalence(action: Action, reference: Action) -> Equivalence:
    """Compare the action with a summary to the one with the full context, by structure.

    Values are equal as JSON; texts without regard to case and surrounding blanks, a number as the text that spells it.
    """
    ours, theirs = action.arguments, reference.arguments
    keys = set(ours) | set(theirs)
    both = set(ours) & set(theirs)
    equal = sum(_value(ours[k]) == _value(theirs[k]) for k in both)
    return Equivalence(
        tool=action.tool == reference.tool,
        keys=len(both) / len(keys) if keys else 1.0,
        values=equal / len(keys) if keys else 1.0,
    )


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip().lower()
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _value(v) for k, v in value.items()}
    return [_value(v) for v in value] if isinstance(value, list | tuple) else str(value)


def action_of(reply: str | Mapping[str, Any]) -> Action:
    """The action in an assistant's message (OpenAI-style), or in a text that spells a call out as JSON.

    ``{"tool": name, "arguments": {...}}`` anywhere in the text, also under the names ``name`` and ``parameters``. The
    first call counts. A reply without one is no tool call.
    """
    if isinstance(reply, Mapping):
        for call in reply.get("tool_calls") or ():
            function = call.get("function") or {}
            return Action(str(function.get("name", "")), _arguments(function.get("arguments")))
        return action_of(str(reply.get("content") or ""))
    decoder = json.JSONDecoder()
    position = reply.find("{")
    while position >= 0:
        try:
            found, _ = decoder.raw_decode(reply, position)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            name = found.get("tool", found.get("name"))
            if isinstance(name, str) and name:
                return Action(name, _arguments(found.get("arguments", found.get("parameters"))))
        position = reply.find("{", position + 1)
    return Action(None)


def _arguments(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {"": value}
    return value if isinstance(value, dict) else {}
