"""A self-contained HTML report of one or several jobs: tables, curves and sample responses.

Everything is inside the one file (inline SVG and CSS, no scripts), so it can be mailed or archived.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nemo_style_aligner.telemetry.metrics import read_metrics, read_tables

T = TypeVar("T")
Point = tuple[int, float]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; margin: 2em auto; max-width: 1100px; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: 1em 0; } th, td { border: 1px solid #ccc; padding: .3em .6em; }
th { background: #f3f3f3; text-align: left; } td { vertical-align: top; white-space: pre-wrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font-size: .9em; font-weight: 600; }
svg { width: 100%; height: auto; background: #fafafa; }
svg text { font-size: 11px; fill: #555; } .note { color: #555; }
"""

# Size of one curve's drawing, and the margins that hold the numbers at its axes.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 190, 56, 10, 10, 24
_MAX_POINTS = 600  # a drawing of this size does not show more
_TABLES = 3  # shown of each table that was logged in many steps: first, last and between


def write_report(
    output: str | Path,
    title: str,
    runs: Mapping[str, str | Path],
    summary: Sequence[tuple[str, Any]] = (),
    note: str = "",
) -> Path:
    """Write the report and return its path.

    Args:
        output: the HTML file to write; its directory is made.
        title: heading of the page.
        runs: name of each job -> its log directory (with ``metrics.jsonl`` and ``tables.jsonl``).
        summary: rows (what, value) of the table at the top.
        note: a paragraph below the heading.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if note:
        parts.append(f'<p class="note">{html.escape(note)}</p>')
    if summary:
        parts.append(_table(["", "value"], [list(row) for row in summary]))
    for name, log_dir in runs.items():
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts.extend(_run_section(Path(log_dir)))
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def curve_svg(points: Sequence[Point]) -> str:
    """One curve as an SVG drawing. Values that are not finite leave a gap in the line."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return '<svg viewBox="0 0 360 40"><text x="10" y="24">no finite values</text></svg>'
    first, last = points[0][0], points[-1][0]
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    span = max(last - first, 1)

    def place(step: int, value: float) -> tuple[float, float]:
        x = _LEFT + (step - first) / span * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return x, y

    drawing = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for value in (low, (low + high) / 2, high):
        _, y = place(first, value)
        drawing.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        drawing.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    drawing.append(f'<text x="{_LEFT}" y="{_HEIGHT - 7}">{first}</text>')
    drawing.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 7}" text-anchor="end">step {last}</text>')
    for segment in _finite_segments(_spread(points, _MAX_POINTS)):
        places = [place(step, value) for step, value in segment]
        if len(places) == 1:
            drawing.append(f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5" fill="#2563b8"/>')
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            drawing.append(f'<polyline points="{path}" fill="none" stroke="#2563b8" stroke-width="1.6"/>')
    drawing.append(f"<title>{len(points)} points, last value {points[-1][1]:.6g}</title></svg>")
    return "".join(drawing)


def _run_section(log_dir: Path) -> list[str]:
    curves = read_metrics(log_dir)
    tables = read_tables(log_dir)
    if not curves and not tables:
        return [f'<p class="note">nothing was logged in {html.escape(str(log_dir))}</p>']
    parts = ['<div class="curves">']
    for name, points in curves.items():
        parts.append(f"<figure><figcaption>{html.escape(name)}</figcaption>{curve_svg(points)}</figure>")
    parts.append("</div>")
    by_key: dict[str, list[dict[str, Any]]] = {}
    for table in tables:
        by_key.setdefault(table["key"], []).append(table)
    for key, same_key in by_key.items():
        for table in _spread(same_key, _TABLES):
            parts.append(f"<h3>{html.escape(key)}, step {table['step']}</h3>")
            parts.append(_table(table["columns"], table["rows"]))
    return parts


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f'<td class="number">{value:.6g}</td>'
        return f"<td>{html.escape('' if value is None else str(value))}</td>"

    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(cell(value) for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _spread(items: Sequence[T], count: int) -> Sequence[T]:
    """At most ``count`` (2 or more) of ``items``, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _finite_segments(points: Sequence[Point]) -> list[list[Point]]:
    segments: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            segments[-1].append(point)
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]
