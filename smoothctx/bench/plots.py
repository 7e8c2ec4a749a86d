"""Plots as SVG text: lines with marked points, cumulative distributions, grouped bars. Pure, without dependencies."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 860, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 48, 44
_COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce")
_STEPS = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a line; marked ones get a dot."""

    x: float
    y: float
    marked: bool = False


class _Canvas:
    """A picture with axes from zero: ``x`` and ``y`` give the places of values."""

    def __init__(self, title: str, low: float, high_x: float, high_y: float) -> None:
        self._low, self._high_x, self._high_y = low, max(high_x, low + 1e-9), max(high_y, 1e-9)
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="18" font-size="14" fill="#111">{html.escape(title)}</text>',
        ]
        for value in ticks(self._high_y):
            y = self.y(value)
            self.parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
            self.parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>')

    def x(self, value: float) -> float:
        """The place of a value on the horizontal axis."""
        return _LEFT + (value - self._low) * (WIDTH - _LEFT - _RIGHT) / (self._high_x - self._low)

    def y(self, value: float) -> float:
        """The place of a value on the vertical axis."""
        return HEIGHT - _BOTTOM - value * (HEIGHT - _TOP - _BOTTOM) / self._high_y

    def below(self, x: float, said: str) -> None:
        """A label under the horizontal axis."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="#555">{html.escape(said)}</text>'
        )

    def axis(self, said: str) -> None:
        """The name of the horizontal axis."""
        self.parts.append(
            f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#555">{html.escape(said)}</text>'
        )

    def legend(self, names: Sequence[str], note: str = "") -> None:
        """What each colour is."""
        for k, name in enumerate(names):
            x = _LEFT + 6 + 190 * k
            self.parts.append(f'<circle cx="{x}" cy="34" r="4.5" fill="{colour(k)}"/>')
            self.parts.append(f'<text x="{x + 10}" y="38" fill="#111">{html.escape(name + note)}</text>')

    def done(self) -> str:
        """The whole picture."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def colour(k: int) -> str:
    """The colour of the k-th series."""
    return _COLOURS[k % len(_COLOURS)]


def ticks(high: float, most: int = 7) -> list[float]:
    """Round values from zero to ``high``, at most ``most`` steps."""
    size = 1e-9
    while True:
        for step in _STEPS:
            if high / (size * step) <= most:
                width = size * step
                return [round(k * width, 12) for k in range(int(high / width + 1e-9) + 1)]
        size *= 10


def lines(title: str, axis: str, series: Mapping[str, Sequence[Point]]) -> str:
    """Lines over a common axis; a dot where a point is marked."""
    points = [p for found in series.values() for p in found]
    low = min((p.x for p in points), default=0)
    picture = _Canvas(title, low, max((p.x for p in points), default=1), max((p.y for p in points), default=1) * 1.05)
    numbers = sorted({p.x for p in points})
    for value in numbers[:: max(1, len(numbers) // 14)]:
        picture.below(picture.x(value), f"{value:g}")
    for k, (name, found) in enumerate(series.items()):
        path = " ".join(f"{picture.x(p.x):.1f},{picture.y(p.y):.1f}" for p in found)
        picture.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour(k)}" stroke-width="2"/>')
        for p in found:
            if p.marked:
                said = html.escape(f"{name}, {axis} {p.x:g}: {p.y:.2f}")
                at = f'cx="{picture.x(p.x):.1f}" cy="{picture.y(p.y):.1f}"'
                picture.parts.append(f'<circle {at} r="4.5" fill="{colour(k)}"><title>{said}</title></circle>')
    picture.axis(axis)
    picture.legend(list(series), " (dot: rewrite)")
    return picture.done()


def cdf(title: str, series: Mapping[str, Sequence[float]]) -> str:
    """The share of values up to each value, as steps."""
    high = max((v for values in series.values() for v in values), default=1.0) * 1.05
    picture = _Canvas(title, 0.0, high, 1.0)
    for value in ticks(high):
        picture.below(picture.x(value), f"{value:g}")
    for k, values in enumerate(series.values()):
        path, share = [f"{picture.x(0):.1f},{picture.y(0):.1f}"], 0.0
        for rank, value in enumerate(sorted(values), 1):
            path.append(f"{picture.x(value):.1f},{picture.y(share):.1f}")
            share = rank / len(values)
            path.append(f"{picture.x(value):.1f},{picture.y(share):.1f}")
        picture.parts.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour(k)}" stroke-width="2"/>')
    picture.axis("at most")
    picture.legend(list(series))
    return picture.done()


def bars(title: str, groups: Mapping[str, Mapping[str, float | None]]) -> str:
    """Bars side by side in groups; a value that is missing leaves its place empty."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    high = max((v for group in groups.values() for v in group.values() if v is not None), default=1.0) * 1.1
    picture = _Canvas(title, 0.0, max(1, len(groups)), high)
    for place, (label, group) in enumerate(groups.items()):
        picture.below(picture.x(place + 0.5), label)
        width = (picture.x(1) - picture.x(0)) * 0.7 / max(1, len(names))
        for k, name in enumerate(names):
            value = group.get(name)
            if value is None:
                continue
            x, y = picture.x(place + 0.15) + k * width, picture.y(value)
            said = html.escape(f"{label}, {name}: {value:.2f}")
            picture.parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * 0.9:.1f}" height="{picture.y(0) - y:.1f}" '
                f'fill="{colour(k)}"><title>{said}</title></rect>'
            )
            picture.parts.append(
                f'<text x="{x + width * 0.45:.1f}" y="{y - 4:.1f}" text-anchor="middle" fill="#333">{value:.2f}</text>'
            )
    picture.legend(names)
    return picture.done()
