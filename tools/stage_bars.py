"""What each stage takes before and after, as bars: a picture in SVG, which needs nothing to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _COLUMNS = 420, 190, 2
_LEFT, _TOP, _BOTTOM, _GAP = 40, 34, 24, 0.2
_BEFORE, _AFTER = "#b8c4cc", "#0b6e99"


@dataclass(frozen=True)
class Panel:
    """before, after: by stage, in `unit`."""

    title: str
    before: Sequence[float]
    after: Sequence[float]
    unit: str = "ms"


def picture(title: str, panels: Sequence[Panel], before: str, after: str) -> str:
    """Panels two by two. before, after: what the pale and the dark bars are."""
    rows = -(-len(panels) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, 44 + rows * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11" fill="#333333">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 18, title, "font-weight='bold'"),
    ]
    for place, (color, words) in enumerate(((_BEFORE, before), (_AFTER, after))):
        parts += [
            f'<rect x="{12 + 300 * place}" y="27" width="10" height="10" fill="{color}"/>',
            _text(27 + 300 * place, 36, words),
        ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, _COLUMNS)
        parts.append(f'<g transform="translate({column * _WIDTH},{44 + row * _HEIGHT})">')
        parts += [*_bars(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _bars(panel: Panel) -> list[str]:
    most, inner = max(*panel.before, *panel.after), _HEIGHT - _TOP - _BOTTOM
    pitch = (_WIDTH - _LEFT - 12) / len(panel.before)
    parts = [_text(_LEFT, 20, panel.title)]
    for value in (max(panel.before), max(panel.after)):
        y = _TOP + inner * (1 - value / most)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 12}" stroke="#999999" stroke-dasharray="3 3"/>')
        parts.append(_text(_LEFT - 4, y + 4, f"{value:.0f}", "text-anchor='end'"))
    for stage, pair in enumerate(zip(panel.before, panel.after, strict=True)):
        for which, value in enumerate(pair):
            tall, wide = inner * value / most, pitch * (1 - _GAP) / 2
            x = _LEFT + pitch * (stage + _GAP / 2) + which * wide
            color = _AFTER if which else _BEFORE
            parts.append(
                f'<rect x="{x:.1f}" y="{_TOP + inner - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
                f'fill="{color}"/>'
            )
        middle = _LEFT + pitch * (stage + 0.5)
        parts.append(_text(middle, _HEIGHT - 10, str(stage), "text-anchor='middle'"))
    return [*parts, _text(4, _HEIGHT - 10, panel.unit)]


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
