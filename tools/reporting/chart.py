"""Drawings as inline SVG: lines, bars, stacked bars. Colours are CSS variables: light and dark are one drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from engine.telemetry.format import format_count

Point = tuple[float, float]

WIDTH, HEIGHT = 980, 270
HALF = 480
"""Width of a drawing that has another one beside it."""
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 34
_MOST_POINTS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line.

    Args:
        name: in the legend and on hovering.
        points: by rising x.
        colour: number of the palette.
        dotted: points with a dashed line, as of evaluations.
        joined: points with a line.
    """

    name: str
    points: Sequence[Point]
    colour: int
    dotted: bool = False
    joined: bool = True


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_title: str,
    show: Callable[[float], str] = format_count,
    from_zero: bool = False,
    width: int = WIDTH,
) -> str:
    """An SVG with axes; empty text where there is not a point.

    Args:
        series: lines; those without points are left out.
        title: read out by screen readers.
        x_title: under the axis.
        show: how values of y are written.
        from_zero: the axis begins at 0.
        width: of the drawing, in pixels where the page has room.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
    frame = _Frame(width=width, x_low=x_low, x_high=x_high, y_low=y_ticks[0], y_high=y_ticks[-1])
    parts = _axes(frame, y_ticks, x_title, show)
    for one in drawn:
        parts += _line(frame, one, show)
    return svg(parts, width, HEIGHT, title)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where in a drawing of `width` pixels which values lie."""

    width: int
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def place(self, point: Point) -> Point:
        across = (point[0] - self.x_low) / (self.x_high - self.x_low)
        up = (point[1] - self.y_low) / (self.y_high - self.y_low)
        return LEFT + across * (self.width - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def _axes(frame: _Frame, y_ticks: Sequence[float], x_title: str, show: Callable[[float], str]) -> list[str]:
    """Grid lines with the values of y, the values of x, and what x is."""
    parts = []
    right = frame.width - RIGHT
    for value in y_ticks:
        _, y = frame.place((frame.x_low, value))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(show(value))}</text>')
    for value in ticks(frame.x_low, frame.x_high, whole=True):
        if frame.x_low <= value <= frame.x_high:
            x, _ = frame.place((value, frame.y_low))
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle" class="axis">{escape(x_title)}</text>')
    return parts


def _line(frame: _Frame, one: Series, show: Callable[[float], str]) -> list[str]:
    """A line, and at its points what is shown on hovering."""
    parts = []
    thin = thinned(one.points)
    spots = [frame.place(point) for point in thin]
    if one.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        style = ' stroke-dasharray="2 4"' if one.dotted else ""
        parts.append(f'<polyline class="line s{one.colour}" points="{path}"{style}/>')
    seen = one.dotted or len(spots) <= 40
    radius, clear = (3.2, "") if seen else (5, " clear")
    for (x, y), (step, value) in zip(spots, thin, strict=True):
        tip = escape(f"{one.name}: {show(value)} at {step:g}")
        parts.append(
            f'<circle class="f{one.colour}{clear}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{tip}</title></circle>'
        )
    return parts


def bars(
    rows: Sequence[tuple[str, float, str]], *, title: str, colour: int, longest: float | None = None, width: int = WIDTH
) -> str:
    """Horizontal bars: a name, a value above 0 and its text each.

    Args:
        longest: value of a full bar, the same in drawings that are compared.
    """
    if not rows:
        return ""
    label = min(260, 14 + 7 * max(len(name) for name, *_ in rows))
    most = longest or max(value for _, value, _ in rows) or 1.0
    room = width - label - 104
    parts = []
    for place, (name, value, text) in enumerate(rows):
        y = 6 + 24 * place
        length = max(1.5, room * value / most)
        shown = name if len(name) <= 36 else name[:34] + "…"
        parts.append(
            f'<text x="{label - 8}" y="{y + 13}" text-anchor="end">{escape(shown)}<title>{escape(name)}</title></text>'
        )
        parts.append(f'<rect class="f{colour}" x="{label}" y="{y}" width="{length:.1f}" height="17" rx="2"/>')
        parts.append(f'<text x="{label + length + 6:.1f}" y="{y + 13}">{escape(text)}</text>')
    return svg(parts, width, 12 + 24 * len(rows), title)


def stacked_bar(
    parts_of: Sequence[tuple[str, float, int]], *, title: str, show: Callable[[float], str], width: int
) -> str:
    """One bar of several parts, which add up to its length."""
    total = sum(value for _, value, _ in parts_of)
    if total <= 0:
        return ""
    parts, x = [], 0.0
    for name, value, colour in parts_of:
        part = width * value / total
        tip = escape(f"{name}: {show(value)}, {value / total:.1%}")
        parts.append(
            f'<rect class="f{colour}" x="{x:.2f}" y="2" width="{max(part - 1.5, 0.6):.2f}" height="30" rx="2">'
            f"<title>{tip}</title></rect>"
        )
        if part > 40:
            parts.append(
                f'<text class="on" x="{x + part / 2:.1f}" y="22" text-anchor="middle">{value / total:.0%}</text>'
            )
        x += part
    return svg(parts, width, 36, title)


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round values from below `low` to above `high`, four to eight of them."""
    if high <= low:
        pad = abs(low) * 0.05 or 1.0
        low, high = low - pad, high + pad
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * factor) <= 6)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most a few hundred points: of each stretch of a longer line its mean."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / _MOST_POINTS)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def svg(parts: Sequence[str], width: float, height: float, title: str) -> str:
    """The parts, which scale with the page."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" '
        f'style="max-width:{width:g}px">{"".join(parts)}</svg>'
    )
