"""Line charts as inline SVG: axes with units, a legend, a tip on each point; no script and nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 640, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 34, 42
_MAX_POINTS, _MAX_TIPS = 600, 160

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8b4f9f", "#56606b")
"""Told apart by people with any common colour blindness (after Okabe and Ito), the more so with the dashes."""
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4")
_INK, _FAINT, _GRID, _AXIS = "#333c44", "#56606b", "#e6e9ec", "#8a939c"
_TICK = f'fill="{_FAINT}"'
FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    label: str
    values: Sequence[float | None]
    """One value for each x; None leaves a gap."""
    sparse: bool = False
    """Measured now and then: marked by dots, joined over the gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """From data to pixels."""

    x_low: float
    x_high: float
    y_ticks: Sequence[float]
    """Ascending round numbers; the axis goes from the first to the last."""

    def x(self, value: float) -> float:
        """Pixel column of an x."""
        return _LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixel row of a y."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(
    x: Sequence[float],
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str = "learner step",
    y_top: float | None = None,
    bound: tuple[str, float] | None = None,
) -> str:
    """An SVG element with lines over `x`.

    Args:
        x: ascending positions, one for each value of the series.
        series: at most five; those without any value are left out.
        y_label: what the vertical axis shows, with its unit.
        y_top: least upper end of the vertical axis; it always holds 0.
        bound: label and height of a horizontal limit.

    Returns a paragraph instead when there is nothing to draw.
    """
    series = [line for line in series if any(value is not None for value in line.values)]
    if not series or not x:
        return '<p class="none">Nothing was recorded.</p>'
    x, series = _thin(x, series)
    axes = _axes(x, series, y_top, bound)
    parts = [_grid(axes, x_label, y_label), _legend(series)]
    parts += [_bound_line(axes, *bound)] if bound else []
    parts += [_line(axes, x, line, number) for number, line in enumerate(series)]
    parts += [_tips(axes, x, line, number) for number, line in enumerate(series) if len(x) <= _MAX_TIPS]
    label = escape(f"{y_label} over {x_label}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="{FONT}" font-size="12" fill="{_INK}">' + "".join(parts) + "</svg>"
    )


def _thin(x: Sequence[float], series: Sequence[Series]) -> tuple[Sequence[float], Sequence[Series]]:
    """Average neighbours so that a long run stays a small page."""
    every = math.ceil(len(x) / _MAX_POINTS)
    if every == 1:
        return x, series
    starts = range(0, len(x), every)
    thin = [replace(s, values=[_mean(s.values[at : at + every]) for at in starts]) for s in series]
    return [x[min(at + every, len(x)) - 1] for at in starts], thin


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _axes(x: Sequence[float], series: Sequence[Series], y_top: float | None, bound: tuple[str, float] | None) -> Axes:
    values = [value for line in series for value in line.values if value is not None]
    limits = [0.0, *([y_top] if y_top is not None else []), *([bound[1]] if bound else [])]
    low, high = min(*values, *limits), max(*values, *limits)
    return Axes(x_low=x[0], x_high=x[-1], y_ticks=nice_ticks(low, high if high > low else low + 1.0))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers about `count` steps apart that enclose [low, high]."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _grid(axes: Axes, x_label: str, y_label: str) -> str:
    left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for tick in axes.y_ticks:
        y = axes.y(tick)
        parts.append(_level(y, f'stroke="{_GRID}"'))
        parts.append(_text(left - 8, y + 4, f"{tick:.4g}", "end", _TICK))
    for tick in _x_ticks(axes):
        parts.append(_text(axes.x(tick), bottom + 16, f"{tick:.6g}", "middle", _TICK))
    parts.append(_level(bottom, f'stroke="{_AXIS}"'))
    parts.append(_text((left + right) / 2, HEIGHT - 8, x_label, "middle"))
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    parts.append(_text(14, middle, y_label, "middle", turned))
    return "".join(parts)


def _x_ticks(axes: Axes) -> list[float]:
    if axes.x_high <= axes.x_low:
        return [axes.x_low]
    whole = [tick for tick in nice_ticks(axes.x_low, axes.x_high, 8) if tick == int(tick)]
    return [tick for tick in whole if axes.x_low <= tick <= axes.x_high]


def _legend(series: Sequence[Series]) -> str:
    parts, x = [], float(_LEFT)
    for number, line in enumerate(series):
        parts.append(f'<line x1="{x:.1f}" x2="{x + 22:.1f}" y1="15" y2="15" {_stroke(number)}/>')
        parts.append(_text(x + 28, 19, line.label, "start"))
        x += 28 + 6.8 * len(line.label) + 20
    return "".join(parts)


def _bound_line(axes: Axes, label: str, value: float) -> str:
    y = axes.y(value)
    return _level(y, f'stroke="{_INK}" stroke-dasharray="3 3"') + _text(WIDTH - _RIGHT - 4, y - 5, label, "end")


def _line(axes: Axes, x: Sequence[float], line: Series, number: int) -> str:
    """A path with gaps; a point without neighbours is drawn as a dot."""
    path, dots, previous = [], [], None
    for at, (column, value) in enumerate(zip(x, line.values, strict=True)):
        if value is None:
            previous = previous if line.sparse else None
            continue
        point = f"{axes.x(column):.1f} {axes.y(value):.1f}"
        path.append(f"{'M' if previous is None else 'L'}{point}")
        following = line.values[at + 1] if at + 1 < len(line.values) else None
        if line.sparse or (previous is None and following is None):
            dots.append(_dot(axes.x(column), axes.y(value), f'r="3" fill="{COLOURS[number]}"'))
        previous = value
    return f'<path d="{" ".join(path)}" fill="none" {_stroke(number)}/>' + "".join(dots)


def _tips(axes: Axes, x: Sequence[float], line: Series, number: int) -> str:
    """Invisible dots that show their value under the pointer."""
    dots = []
    for column, value in zip(x, line.values, strict=True):
        if value is not None:
            tip = f"<title>{escape(line.label)} at {column:.6g}: {value:.4g}</title>"
            look = f'class="tip" r="5" fill="{COLOURS[number]}" opacity="0"'
            dots.append(_dot(axes.x(column), axes.y(value), look, tip))
    return "".join(dots)


def _level(y: float, look: str) -> str:
    """A horizontal line over the whole width."""
    return f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {look}/>'


def _dot(x: float, y: float, look: str, inside: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}>{inside}</circle>'


def _stroke(number: int) -> str:
    dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
    return f'stroke="{COLOURS[number]}" stroke-width="1.8"{dash}'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
