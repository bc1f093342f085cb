"""Charts: lines in an SVG that stretches with the page, bars as boxes.

Labels are text of the page beside the charts, so that they keep their size on a narrow screen. Colours are CSS
variables: light and dark are one drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from engine.telemetry.format import format_count
from rankfold.reporting.markup import EMPTY, element

Point = tuple[float, float]

_SIZE = 1000
"""Width and height of the SVG's own coordinates."""
_MOST_POINTS = 400
_FEW_POINTS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line of a chart.

    Args:
        name: in the legend and on hovering.
        points: by ascending x.
        colour: number of the palette.
        dashed: a dashed line with visible points, as for evaluations.
        joined: points are connected by a line.
        faint: in the background, as for the raw data of a smoothed line.
    """

    name: str
    points: Sequence[Point]
    colour: int
    dashed: bool = False
    joined: bool = True
    faint: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """The mapping of values to coordinates in the SVG."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def across(self, x: float) -> float:
        return (x - self.x_low) / (self.x_high - self.x_low)

    def up(self, y: float) -> float:
        return (y - self.y_low) / (self.y_high - self.y_low)

    def place(self, point: Point) -> Point:
        return _SIZE * self.across(point[0]), _SIZE * (1 - self.up(point[1]))


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    unit: str,
    x_title: str = "step",
    show: Callable[[float], str] = format_count,
    from_zero: bool = False,
) -> Markup:
    """Returns a chart with axes; empty where there is not a point.

    Args:
        series: lines; those without points are skipped.
        title: read out by screen readers.
        unit: of y, above the axis.
        x_title: under the axis.
        show: formats values of y.
        from_zero: the axis begins at 0.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return EMPTY
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
    frame = _Frame(x_low=x_low, x_high=x_high, y_low=y_ticks[0], y_high=y_ticks[-1])
    grid = [frame.place((x_low, value))[1] for value in y_ticks]
    plot = element(
        "svg",
        [_across("grid", y) for y in grid],
        [_line(frame, one, show) for one in drawn],
        class_="plot",
        viewBox=f"0 0 {_SIZE} {_SIZE}",
        preserveAspectRatio="none",
    )
    texts = [show(value) for value in y_ticks]
    x_ticks = [value for value in ticks(x_low, x_high, whole=True) if x_low <= value <= x_high]
    return element(
        "figure",
        element("figcaption", unit),
        element(
            "div",
            # as wide as its widest label
            element("span", max(texts, key=len), class_="widest"),
            [_label(text, f"bottom:{_percent(frame.up(value))}") for text, value in zip(texts, y_ticks, strict=True)],
            class_="y",
        ),
        plot,
        element("div", [_label(f"{x:g}", f"left:{_percent(frame.across(x))}") for x in x_ticks], class_="x"),
        element("div", x_title, class_="x-title"),
        class_="chart",
        role="img",
        aria_label=title,
    )


def _label(text: str, style: str) -> Markup:
    return element("span", text, style=style)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _across(kind: str, y: float) -> Markup:
    return element("line", class_=kind, x1=0, x2=_SIZE, y1=f"{y:.1f}", y2=f"{y:.1f}")


def _line(frame: _Frame, one: Series, show: Callable[[float], str]) -> list[Markup]:
    """Returns a line, and at its points the texts that are shown on hovering."""
    parts = []
    thin = thinned(one.points)
    spots = [frame.place(point) for point in thin]
    faint = " faint" if one.faint else ""
    if one.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        dashes = "3 5" if one.dashed else None
        parts.append(element("polyline", class_=f"line s{one.colour}{faint}", points=path, stroke_dasharray=dashes))
    if one.faint:
        return parts
    seen = one.dashed or not one.joined or len(spots) <= _FEW_POINTS
    kind = f"point s{one.colour}" if seen else f"point clear s{one.colour}"
    for (x, y), (step, value) in zip(spots, thin, strict=True):
        tip = element("title", f"{one.name}: {show(value)} at {step:g}")
        # a zero-length stroke with round ends is a dot that stays round in a stretched drawing
        parts.append(element("path", tip, class_=kind, d=f"M{x:.1f} {y:.1f}h0"))
    return parts


def bars(rows: Sequence[tuple[str, float, str]], *, title: str, colour: int, longest: float | None = None) -> Markup:
    """Returns horizontal bars: a name, a value above 0 and its text each.

    Args:
        longest: value of a full bar, the same in drawings that are compared.
    """
    if not rows:
        return EMPTY
    most = longest or max(value for _, value, _ in rows) or 1.0
    drawn = [
        (
            element("span", name, class_="name", title=name),
            element(
                "span",
                element("span", class_=f"bar b{colour}", style=f"width:{_percent(0.8 * value / most)}"),
                element("span", text),
                class_="track",
            ),
        )
        for name, value, text in rows
    ]
    return element("div", drawn, class_="bars", role="img", aria_label=title)


def stacked_bar(parts: Sequence[tuple[str, float, int]], *, title: str, show: Callable[[float], str]) -> Markup:
    """Returns one bar of several parts, which add up to its length."""
    total = sum(value for _, value, _ in parts)
    if total <= 0:
        return EMPTY
    drawn = [
        element(
            "span",
            f"{value / total:.0%}" if value > 0.08 * total else "",
            class_=f"b{colour}",
            style=f"width:{_percent(value / total)}",
            title=f"{name}: {show(value)}, {value / total:.1%}",
        )
        for name, value, colour in parts
    ]
    return element("div", drawn, class_="stack", role="img", aria_label=title)


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Returns round values from below `low` to above `high`, four to eight of them."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) * 0.05 or 1.0
        low, high = low - pad, high + pad
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * factor) <= 6)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Returns at most a few hundred points: of each stretch of a longer line its mean."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / _MOST_POINTS)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Returns at each point from the `window`-th on the mean of the last `window` values."""
    total, found = 0.0, []
    for place, (x, y) in enumerate(points):
        total += y
        if place >= window:
            total -= points[place - window][1]
        if place >= window - 1:
            found.append((x, total / window))
    return found
