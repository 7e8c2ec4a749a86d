"""What a file of a benchmark has to hold, so that figures can be made of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: a check; ``{name: shape}``: an object that has these (``"*"``: for each of its values); ``[shape]``: a list of such
Shape = Callable[[Any], bool] | Mapping[str, Any] | Sequence[Any]


def number(value: Any) -> bool:
    """A finite number?"""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def perhaps(value: Any) -> bool:
    """A finite number, or nothing?"""
    return value is None or number(value)


def text(value: Any) -> bool:
    """A string?"""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """True or false?"""
    return isinstance(value, bool)


def wrong(value: Any, shape: Shape, where: str = "") -> str | None:
    """The first place where ``value`` is not as ``shape`` says, in words; ``None`` where all of it is."""
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return f"{where or 'it'} is no object"
        if missing := [name for name in shape if name != "*" and name not in value]:
            return f"{where}{'.' if where else ''}{missing[0]} is missing"
        parts = [(f"{where}{'.' if where else ''}{n}", value[n], shape.get(n, shape.get("*"))) for n in value]
    elif isinstance(shape, Sequence):
        if not isinstance(value, list):
            return f"{where} is no list"
        parts = [(f"{where}[{k}]", item, shape[0]) for k, item in enumerate(value)]
    else:
        return None if shape(value) else f"{where} is {str(value)[:40]!r}"
    found = (wrong(item, inner, place) for place, item, inner in parts if inner is not None)
    return next((what for what in found if what is not None), None)
