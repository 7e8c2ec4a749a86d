"""The figures of benchmarks: rank correlation, spread, similarity of texts. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

_WORD = re.compile(r"\w+")


def mean(values: Sequence[float]) -> float | None:
    """The mean; ``None`` of no values."""
    return sum(values) / len(values) if values else None


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, ties at their mean rank; ``None`` where one side does not vary or there are no two pairs."""
    if len(left) != len(right):
        raise ValueError(f"spearman: {len(left)} and {len(right)} values")
    a, b = _ranks(left), _ranks(right)
    if len(a) < 2:
        return None
    middle = (len(a) + 1) / 2
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    below = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return top / below if below else None


def variation(values: Sequence[float]) -> float | None:
    """Coefficient of variation: the sample standard deviation over the mean; ``None`` for fewer than two values."""
    if len(values) < 2:
        return None
    middle = sum(values) / len(values)
    if not middle:
        return None
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1)) / middle


def similarity(texts: Sequence[str]) -> float | None:
    """Mean cosine of the texts' word counts over all pairs; ``None`` for fewer than two texts."""
    counts = [Counter(_WORD.findall(text.lower())) for text in texts]
    pairs = [_cosine(a, b) for a, b in combinations(counts, 2)]
    return sum(pairs) / len(pairs) if pairs else None


def _cosine(a: Counter[str], b: Counter[str]) -> float:
    length = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    return sum(n * b[word] for word, n in a.items()) / length if length else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda k: values[k])
    ranks = [0.0] * len(values)
    position = 0
    while position < len(order):
        same = [k for k in order[position:] if values[k] == values[order[position]]]
        for k in same:
            ranks[k] = position + (len(same) + 1) / 2
        position += len(same)
    return ranks
