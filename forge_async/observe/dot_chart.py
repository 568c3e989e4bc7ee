"""A chart of named rows as inline SVG: each with a dot for every value, one for their mean, and a line between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from forge_async.observe.svg import COLOURS, FONT, WIDTH, nice_ticks

_ROW, _TOP, _BOTTOM, _RIGHT, _CHARACTER = 19, 12, 44, 20, 6.6
_INK, _FAINT, _GRID = "#333c44", "#56606b", "#e6e9ec"


@dataclass(frozen=True, slots=True, kw_only=True)
class DotRow:
    """One row."""

    label: str
    values: Sequence[float]
    """At least one."""
    colour: int = 0
    """Place in `svg.COLOURS`."""


def dot_chart(rows: Sequence[DotRow], *, x_label: str) -> str:
    """An SVG element with a row for each of `rows`, from top to bottom, over a common horizontal axis.

    The axis begins near the smallest value. Returns a paragraph instead when there is nothing to draw.
    """
    if not rows:
        return '<p class="none">Nothing was recorded.</p>'
    left = 16 + _CHARACTER * max(len(row.label) for row in rows)
    values = [value for row in rows for value in row.values]
    low, high = min(values), max(values)
    ticks = nice_ticks(low, high if high > low else low + 1.0)
    height = _TOP + _ROW * len(rows) + _BOTTOM

    def x(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - left - _RIGHT)

    parts = [_grid(x(tick), tick, height) for tick in ticks]
    parts += [_row(row, _TOP + _ROW * (number + 0.5), left, x) for number, row in enumerate(rows)]
    parts.append(_text((left + WIDTH) / 2, height - 10, x_label, "middle"))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(x_label, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="{FONT}" font-size="12" fill="{_INK}">{"".join(parts)}</svg>'
    )


def _grid(x: float, tick: float, height: float) -> str:
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}" stroke="{_GRID}"/>'
    return line + _text(x, height - _BOTTOM + 16, f"{tick:.4g}", "middle", f'fill="{_FAINT}"')


def _row(row: DotRow, y: float, left: float, x: Callable[[float], float]) -> str:
    low, high, mean = min(row.values), max(row.values), fmean(row.values)
    look = f'stroke="{COLOURS[row.colour]}"'
    parts = [_text(left - 8, y + 4, row.label, "end")]
    parts.append(f'<line x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y:.1f}" y2="{y:.1f}" {look} stroke-width="1.4"/>')
    if len(row.values) > 1:
        parts += [f'<circle cx="{x(value):.1f}" cy="{y:.1f}" r="2.2" {look} fill="#fff"/>' for value in row.values]
    tip = f"<title>{escape(row.label)}: {mean:.4g}</title>"
    parts.append(f'<circle cx="{x(mean):.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[row.colour]}">{tip}</circle>')
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
