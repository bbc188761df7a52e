"""The look of the report: one HTML document that needs nothing from outside, and the pieces it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from toolkit.common import bytes_text
from toolkit.report.load import number

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b1f27; --soft: #5b6472; --rule: #e3e6eb; --grid: #edeff3;
  --blue: #0072b2; --orange: #d55e00; --good: #00795a; --bad: #b3261e; --warn: #8a5a00;
  --bad-fill: #fdf0ee; --warn-fill: #fdf6e7; --code: #f3f4f7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #111419; --card: #191d24; --ink: #e7eaef; --soft: #99a2b0; --rule: #2b313b; --grid: #242a33;
    --blue: #56b4e9; --orange: #f0a04b; --good: #4cc9a0; --bad: #ff8a80; --warn: #f2c46d;
    --bad-fill: #2c1b1b; --warn-fill: #2a2417; --code: #13171d;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -.015em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; letter-spacing: -.005em; margin: 44px 0 14px; }
h3 { font-size: 13px; font-weight: 600; color: var(--soft); margin: 0 0 8px; }
h3::first-letter { text-transform: uppercase; }
.head { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 14px; }
.lead { margin: 8px 0 0; color: var(--soft); max-width: 75ch; }
.status { font-size: 13px; font-weight: 600; padding: 2px 11px; border-radius: 99px; border: 1px solid currentColor;
  color: var(--soft); }
.status.finished { color: var(--good); } .status.running { color: var(--blue); }
.status.failed { color: var(--bad); } .status.interrupted { color: var(--warn); }
.card, .chart, details, .tile {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
}
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 12px; margin: 26px 0 0; }
.tile { padding: 14px 16px; min-width: 0; }
.tile.main { grid-column: span 2; }
.tile dt { font-size: 13px; color: var(--soft); }
.tile dd { margin: 2px 0 0; font-size: 23px; font-weight: 600; letter-spacing: -.015em; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tile dd small { display: block; font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--soft); }
.tile .good { color: var(--good); } .tile .bad { color: var(--bad); }
.notice { margin: 12px 0; padding: 10px 16px; border-radius: 10px; background: var(--bad-fill); color: var(--bad);
  overflow-wrap: anywhere; }
.notice ul { margin: 0; padding-left: 18px; }
.notice.mild { background: var(--warn-fill); color: var(--warn); }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
.charts .chart:first-child { grid-column: 1 / -1; }
.chart { margin: 0; padding: 16px 20px 8px; min-width: 0; break-inside: avoid; }
.chart figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; margin-bottom: 16px; font-size: 13px;
  min-height: 21px; }
.chart .title { font-weight: 600; }
.chart .legend { display: contents; }
.chart .key { color: var(--soft); }
.chart .key.line::before, .chart .key.faint::before, .chart .key.points::before {
  content: ""; display: inline-block; width: 16px; height: 0; border-top: 2.5px solid var(--blue);
  margin-right: 6px; vertical-align: 4px; border-radius: 2px;
}
.chart .key.faint::before { opacity: .4; }
.chart .key.points::before { width: 9px; height: 9px; border: 0; border-radius: 9px; background: var(--orange);
  vertical-align: 0; }
.chart .key.broken { color: var(--bad); }
.chart .key.broken::before { content: "\\d7  "; font-weight: 700; }
.chart output { display: none; font-variant-numeric: tabular-nums; }
.chart.reading output { display: inline; } .chart.reading .legend { display: none; }
.chart .empty { color: var(--soft); margin: 0 0 12px; }
.chart > svg { display: block; overflow: visible; margin-left: 46px; width: calc(100% - 56px); touch-action: pan-y; }
.chart path { fill: none; stroke: var(--blue); stroke-width: 2; stroke-linecap: round; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.chart path.faint { stroke-width: 1.2; opacity: .35; }
.chart path.points { stroke: var(--orange); stroke-width: 1.5; stroke-dasharray: 1 5; }
.chart circle { fill: var(--blue); } .chart circle.faint { opacity: .55; }
.chart circle.points { fill: var(--orange); stroke: var(--card); stroke-width: 1.5; }
.chart line.grid { stroke: var(--grid); } .chart line.tick { stroke: var(--soft); }
.chart line.cursor { stroke: var(--soft); visibility: hidden; } .chart.reading line.cursor { visibility: visible; }
.chart text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart text.y { text-anchor: end; } .chart text.x { text-anchor: middle; }
.chart text.broken { text-anchor: middle; fill: var(--bad); font-size: 14px; font-weight: 700; }
.sample .answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 16px 24px;
  margin-top: 14px; padding-top: 14px; border-top: 1px solid var(--rule); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.after h3 { color: var(--blue); }
.reference .text, .before .text { color: var(--soft); }
.columns { columns: 3 300px; column-gap: 12px; }
.card { padding: 16px 20px; margin-bottom: 12px; min-width: 0; break-inside: avoid; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 0; vertical-align: top; border-top: 1px solid var(--grid);
  overflow-wrap: anywhere; }
tr:first-child > * { border-top: 0; }
th { font-weight: 400; color: var(--soft); padding-right: 16px; width: 50%; }
td { font-variant-numeric: tabular-nums; }
table + .bars { margin-top: 14px; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 4px 12px; font-size: 13px;
  align-items: center; font-variant-numeric: tabular-nums; }
.bars span { text-align: right; color: var(--soft); }
.bars i { display: block; height: 11px; background: var(--blue); border-radius: 2px; min-width: 1px; opacity: .85;
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
pre { margin: 0; padding: 14px 18px; background: var(--code); border-radius: 8px; overflow-x: auto;
  font: 13px/1.6 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
pre b { font-weight: 400; color: var(--blue); }
details { padding: 0; overflow: hidden; }
summary { cursor: pointer; padding: 12px 20px; font-weight: 600; }
details pre { border-radius: 0; border-top: 1px solid var(--rule); }
footer { margin-top: 40px; font-size: 13px; color: var(--soft); }
@media (max-width: 640px) {
  main { padding: 24px 14px 40px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: 1fr 1fr; }
  .chart, .card, .sample { padding-left: 14px; padding-right: 14px; }
}
@media print {
  :root { --page: #fff; --card: #fff; --ink: #000; --soft: #444; --rule: #ccc; --grid: #e5e5e5; --code: #f6f6f6;
    --blue: #0072b2; --orange: #d55e00; --bad: #b3261e; --good: #00795a; color-scheme: light; }
  body { font-size: 11pt; } main { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
  pre { white-space: pre-wrap; }
}
"""

SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor"), output = figure.querySelector("output");
  const nearest = (steps, x) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; steps[middle] > x ? high = middle : low = middle; }
    return x - steps[low] <= steps[high] - x ? low : high;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), span = chart.high - chart.low;
    const x = chart.low + Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * span;
    const hits = chart.lines.map(line => {
      const index = nearest(line.x, x);
      return {step: line.x[index], text: (line.label + " " + line.text[index]).trim()};
    });
    const step = hits.reduce((a, b) => Math.abs(b.step - x) < Math.abs(a.step - x) ? b : a).step;
    const shown = hits.filter(hit => Math.abs(hit.step - step) <= span / 50);
    const at = (step - chart.low) / span * 100 + "%";
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
    output.textContent = "step " + step.toLocaleString("en") + " · " + shown.map(hit => hit.text).join(" · ");
    figure.classList.add("reading");
  });
  svg.addEventListener("pointerleave", () => figure.classList.remove("reading"));
}
"""


def document(title: str, body: str, style: str = "") -> str:
    """A complete HTML page; the policy in its head keeps it from ever asking for anything outside itself.

    Args:
        title: Of the window.
        body: HTML of the page.
        style: CSS of the page's own, beside that of all pages.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def title(key: Any) -> str:
    """A key as words: `ram_bytes` to `ram`, `world_size` to `world size`."""
    return str(key).removesuffix("_bytes").replace("_", " ")


def notice(items: Sequence[Any], mild: bool = False) -> str:
    """A highlighted list of problems: texts, or mappings with `what` and `change`."""
    if not items:
        return ""
    texts = []
    for item in items:
        if isinstance(item, Mapping) and "what" in item:
            change = f" — {escape(str(item['change']))}" if item.get("change") else ""
            texts.append(escape(str(item["what"])) + change)
        else:
            texts.append(escape(plain(item)))
    inner = texts[0] if len(texts) == 1 else f"<ul>{''.join(f'<li>{text}</li>' for text in texts)}</ul>"
    return f'<div class="notice{" mild" if mild else ""}">{inner}</div>'


def cards(mapping: Mapping[str, Any], heading: str = "") -> str:
    """Nested data as cards: flat values in one table, histograms as bars, each deeper mapping in a card of its own."""
    flat: dict[str, Any] = {}
    bars, deeper = "", ""
    for key, value in mapping.items():
        name = f"{heading} · {title(key)}" if heading else title(key)
        if "histogram" in str(key) and (histogram := _bars(value)):
            bars += histogram
        elif isinstance(value, Mapping) and (not _is_flat(value) or not heading):
            deeper += cards(value, name)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            deeper += "".join(cards(item, f"{name} {index}") for index, item in enumerate(value, start=1))
        else:
            flat[key] = value
    own = _table(flat) + bars
    if not own:
        return deeper
    return f'<div class="card">{f"<h3>{escape(heading)}</h3>" if heading else ""}{own}</div>{deeper}'


def plain(value: Any, key: Any = "") -> str:
    """A value as text; the key tells bytes and shares from other numbers."""
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return str(value)
        if str(key).endswith("_bytes"):
            return bytes_text(value)
        if isinstance(value, int):
            return f"{value:,}"
        if str(key).startswith(("share", "efficiency")):
            return f"{value:.1%}"
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{title(name)} {plain(item, name)}" for name, item in value.items())
    return str(value)


def _is_flat(mapping: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, Mapping | list) and value for value in mapping.values())


def _table(mapping: Mapping[str, Any]) -> str:
    if not mapping:
        return ""
    rows = (
        f"<tr><th>{escape(title(key))}</th><td>{escape(plain(value, key))}</td></tr>" for key, value in mapping.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _bars(value: Any) -> str:
    """A histogram: a mapping of label to count, or buckets with `from`, `to` and a count. Empty for anything else."""
    pairs: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        pairs = [(str(label), count) for label, count in value.items()]
    elif isinstance(value, list):
        for bucket in value:
            if not isinstance(bucket, Mapping) or not {"from", "to"} < bucket.keys():
                return ""
            count = next(amount for name, amount in bucket.items() if name not in ("from", "to"))
            pairs.append((f"{plain(bucket['from'])}\u2013{plain(bucket['to'])}", count))
    counts = [(label, amount) for label, count in pairs if (amount := number(count)) is not None and amount >= 0]
    most = max((amount for _, amount in counts), default=0.0)
    if not 0 < most < math.inf:
        return ""
    rows = (
        f'<span>{escape(label)}</span><i style="width:{amount / most * 100:.1f}%"></i><span>{amount:,.0f}</span>'
        for label, amount in counts
    )
    return f'<div class="bars">{"".join(rows)}</div>'
