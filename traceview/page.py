"""Self-contained pages: tables and inline SVG, no script at all, and a policy that lets the browser fetch nothing.

Every text from a trace goes through ``text``; nothing else makes markup of foreign strings.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence

__all__ = ["bars", "colour", "page", "section", "shown", "table", "text"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root{--fg:#1c2330;--dim:#667085;--line:#e3e7ee;--soft:#f6f8fb;--bad:#b42318}
*{box-sizing:border-box}
body{font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--fg);margin:0 auto;
max-width:1200px;padding:28px 32px 64px}
h1{font-size:22px;margin:0 0 2px}
h2{font-size:16px;margin:34px 0 8px}
p{margin:4px 0 10px}
.dim{color:var(--dim)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:600;text-align:left;color:var(--dim);border-bottom:1px solid var(--line);padding:4px 10px 4px 0;
white-space:nowrap}
td{border-bottom:1px solid var(--line);padding:4px 10px 4px 0;vertical-align:top;overflow-wrap:anywhere}
td.n+td:not(.n),th.n+th:not(.n){padding-left:16px}
td.n,th.n{text-align:right;white-space:nowrap;overflow-wrap:normal}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.card{background:var(--soft);border:1px solid var(--line);border-radius:8px;padding:8px 14px;min-width:110px}
.card b{display:block;font-size:18px}
.bad{color:var(--bad)}
svg{display:block;width:100%;height:auto;font-family:system-ui,sans-serif;font-size:11px}
svg text{fill:#475467}
.key span{display:inline-block;margin-right:14px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px}
.more{color:var(--dim);font-size:12px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(320px,1fr));gap:14px 18px}
figure{margin:0}
"""
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6")
_FIXED = {"idle": "#d7dce4", "rpc": "#a9b4c4", "generate": "#4c78a8", "reward": "#f58518", "toolcall": "#54a24b"}
_FIXED |= {"encode": "#c9b8a0", "decode": "#aab8a0", "send": "#d0c4b4", "reply": "#b8a58f", "merge": "#98a898"}
_FIXED |= {"compute": "#4c78a8", "comm": "#f58518", "io": "#72b7b2", "sync": "#b279a2", "scheduler": "#eeca3b"}


def shown(value: object, width: int = 200) -> str:
    """Return a foreign text without control characters, cut at ``width``."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
    return safe if len(safe) <= width else safe[: width - 1] + "…"


def text(value: object, width: int = 200) -> str:
    """Return a value as HTML text, also fit for an attribute in quotes."""
    return html.escape(shown(value, width), quote=True)


def colour(name: str) -> str:
    """Return the colour of a category or phase, the same in every page."""
    return _FIXED.get(name) or _COLOURS[sum(name.encode("utf-8", "replace")) % len(_COLOURS)]


def page(title: str, subtitle: str, parts: Iterable[str]) -> str:
    """Return a whole document; ``parts`` are made by the other functions here."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{text(title)}</h1><p class="dim">{text(subtitle, 500)}</p>{"".join(parts)}</body></html>\n'
    )


def section(title: str, note: str, *parts: str) -> str:
    """Return a headed section; ``note`` is plain text, ``parts`` are markup."""
    said = f'<p class="dim">{text(note, 600)}</p>' if note else ""
    return f"<section><h2>{text(title)}</h2>{said}{''.join(parts)}</section>"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], *, limit: int = 50) -> str:
    """Return a table; numbers (already formatted: texts that begin with a digit) are set right."""
    if not rows:
        return '<p class="dim">none</p>'
    numeric = [all(_is_number(row[at]) for row in rows) for at in range(len(heads))]
    mark = ['class="n"' if one else "" for one in numeric]
    top = "".join(f"<th {m}>{text(h)}</th>" for h, m in zip(heads, mark, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {m}>{text(cell)}</td>" for cell, m in zip(row, mark, strict=True)) + "</tr>"
        for row in rows[:limit]
    )
    more = f'<p class="more">… {len(rows) - limit} more rows</p>' if len(rows) > limit else ""
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{more}"


def _is_number(cell: object) -> bool:
    if isinstance(cell, int | float):
        return True
    return isinstance(cell, str) and cell[:1].isdigit() and len(cell) <= 12


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str, float]]]],
    first: float,
    last: float,
    *,
    unit: str = "s",
    height: int = 16,
) -> str:
    """Return a timeline as SVG.

    Args:
        rows: (label, bars); a bar is (start, end, colour, what the pointer shows, opacity).
        first: Begin of the window.
        last: Its end.
        unit: Of both, shown on the axis.
        height: Of a row, in pixels.
    """
    left, width = 150, 1000
    scale = width / max(last - first, 1e-12)
    out = [f'<svg viewBox="0 0 {left + width + 10} {len(rows) * (height + 4) + 26}" role="img">']
    for at, (label, own) in enumerate(rows):
        y = at * (height + 4) + 2
        size = min(11, height)
        base = y + (height + size) / 2 - 1
        out.append(f'<text x="{left - 8}" y="{base:.1f}" font-size="{size}" text-anchor="end">{text(label, 22)}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{width}" height="{height}" fill="#f1f4f8"/>')
        for start, end, fill, said, opacity in own:
            x, w = left + (start - first) * scale, max(0.6, (end - start) * scale)
            out.append(f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{height}" fill="{fill}" ')
            out.append(f'fill-opacity="{opacity:.2f}"><title>{text(said, 300)}</title></rect>')
    y = len(rows) * (height + 4) + 2
    for tick in range(6):
        x = left + tick * width / 5
        value = first + tick * (last - first) / 5
        anchor = "start" if tick == 0 else "end" if tick == 5 else "middle"
        out.append(f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{anchor}">{value:.4g} {text(unit)}</text>')
    return "".join(out) + "</svg>"


def legend(names: Iterable[str]) -> str:
    """Return the key of colours."""
    items = "".join(f'<span><i style="background:{colour(n)}"></i>{text(n, 40)}</span>' for n in names)
    return f'<p class="key dim">{items}</p>'


def histogram(
    values: Sequence[float], fill: str, say: Callable[[float], str], marks: Sequence[tuple[str, float]] = ()
) -> str:
    """Return a histogram as SVG; ``say`` makes a value readable, ``marks`` are values with a name of their own."""
    if not values:
        return '<p class="dim">nothing</p>'
    low, high = min(values), max(values)
    if high - low < 0.02 * abs(high):  # as good as equal: one bar in the middle
        low, high = low - 0.1 * abs(low), high + 0.1 * abs(high)
    span = (high - low) or 1.0
    count = min(60, max(9, len(values) // 4))
    boxes = [0] * count
    for value in values:
        boxes[min(count - 1, int((value - low) / span * count))] += 1
    top = max(boxes)
    out = ['<svg viewBox="0 0 1000 156" role="img">']
    for at, number in enumerate(boxes):
        h = 110 * number / top
        a, b = low + at * span / count, low + (at + 1) * span / count
        out.append(f'<rect x="{at * 1000 / count + 1:.1f}" y="{130 - h:.1f}" width="{1000 / count - 2:.1f}" ')
        out.append(f'height="{h:.1f}" fill="{fill}"><title>{number} in {text(say(a))} – {text(say(b))}</title></rect>')
    out.append('<line x1="0" y1="130.5" x2="1000" y2="130.5" stroke="#e3e7ee"/>')
    for name, value in marks:
        x = (value - low) / span * 1000
        side, anchor = (x + 4, "start") if x < 850 else (x - 4, "end")
        out.append(f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="130" stroke="#b42318" stroke-dasharray="4 3"/>')
        out.append(f'<text x="{side:.1f}" y="12" text-anchor="{anchor}">{text(name)} {text(say(value))}</text>')
    out.append(f'<text x="0" y="148">{text(say(low))}</text>')
    out.append(f'<text x="500" y="148" text-anchor="middle">highest bar: {top} of {len(values)}</text>')
    out.append(f'<text x="1000" y="148" text-anchor="end">{text(say(high))}</text></svg>')
    return "".join(out)


def cards(facts: Iterable[tuple[str, object, bool]]) -> str:
    """Return a row of cards: (label, value, whether it is bad)."""
    items = (f'<div class="card"><b{" class=bad" if bad else ""}>{text(v)}</b>{text(k)}</div>' for k, v, bad in facts)
    return f'<div class="cards">{"".join(items)}</div>'
