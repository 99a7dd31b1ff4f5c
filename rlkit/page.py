"""The report as one HTML page that needs nothing else: styles, tables and figures are in the file."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from itertools import count
from typing import TYPE_CHECKING

from rlkit import __version__, figures
from rlkit.comparison import Row
from rlkit.recorded import Group
from rlkit.tables import (
    DEFINITIONS,
    FEW,
    Parts,
    Table,
    across_table,
    improvement_table,
    records,
    remarks,
    results_table,
    runs_table,
    settings_table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE_TABLE = 7  # a table of more columns than this is as wide as the text
STYLE = """
:root { color-scheme: light; --ink: #1c1c1c; --soft: #5a5a5a; --rule: #1c1c1c; --hair: #d8d8d8;
  --sans: "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif;
  --mono: "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3.5rem 1.5rem 5rem; max-width: 62rem; color: var(--ink); background: #fff;
  font: 1.0625rem/1.5 Charter, "Bitstream Charter", "Sitka Text", Cambria, "Liberation Serif", Georgia, serif; }
h1 { font-size: 1.9rem; line-height: 1.2; font-weight: 600; margin: 0 0 .4rem; }
h2 { font-size: 1.35rem; font-weight: 600; margin: 3.2rem 0 1rem; }
p { margin: .6rem 0; max-width: 46rem; }
.lead { color: var(--soft); margin-bottom: 0; }
figure { margin: 2.2rem 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure.narrow svg { width: 66%; }
svg text { font-family: var(--sans) !important; }
figcaption { font-size: .92rem; line-height: 1.45; color: #333; max-width: 50rem; }
figure > svg + figcaption { margin-top: .6rem; }
figcaption b { font-weight: 600; color: var(--ink); }
.scroll { overflow-x: auto; margin-top: .6rem; }
table { border-collapse: collapse; font: .84rem/1.4 var(--sans); font-variant-numeric: tabular-nums lining-nums;
  border-top: 1.5px solid var(--rule); border-bottom: 1.5px solid var(--rule); }
table.wide { width: 100%; font-size: .8rem; }
table.wide th, table.wide td { padding-right: .7rem; }
table.wide th:last-child, table.wide td:last-child { padding-right: .2rem; }
th { text-align: left; vertical-align: bottom; font-weight: 600; border-bottom: .75px solid var(--rule);
  padding: .4rem .9rem .4rem 0; }
td { text-align: left; vertical-align: baseline; padding: .32rem .9rem .32rem 0; }
tbody tr + tr td { border-top: .5px solid var(--hair); }
th.number, td.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: .2rem; }
td small { color: var(--soft); font-size: .92em; }
pre { font: .8rem/1.55 var(--mono); margin: .8rem 0; padding: .7rem .9rem; background: #f6f6f4; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: 12rem 1fr; gap: .35rem 1rem; margin: 1rem 0;
  font-size: .95rem; line-height: 1.45; }
dt { font-weight: 600; }
dd { margin: 0; color: #333; max-width: 40rem; }
footer { margin-top: 3rem; padding-top: .8rem; border-top: .75px solid var(--hair); color: var(--soft);
  font-size: .88rem; }
@media (max-width: 40rem) { body { padding: 1.5rem 1rem 3rem; font-size: 1rem; } figure { overflow-x: auto; }
  figure svg, figure.narrow svg { width: 100%; min-width: 38rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } h2 { break-after: avoid; }
  .scroll { overflow: visible; } table { font-size: 7.5pt; } }
"""
DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Page:
    """Numbers tables and figures as they come."""

    def __init__(self) -> None:
        self._tables, self._figures = count(1), count(1)

    def table(self, table: Table, caption: str) -> str:
        """A table under its caption; columns of numbers stand at the right."""
        heading, *body = table
        numeric = [k > 0 and all(re.match(r"[-\d–n]", row[k]) for row in body if row[k]) for k in range(len(heading))]
        head = "".join(
            f"<th{_class(number)}>{escape(cell)}</th>" for cell, number in zip(heading, numeric, strict=True)
        )
        rows = "\n".join(
            "<tr>"
            + "".join(f"<td{_class(n)}>{_cell(cell)}</td>" for cell, n in zip(row, numeric, strict=True))
            + "</tr>"
            for row in body
        )
        wide = ' class="wide"' if len(heading) > WIDE_TABLE else ""
        return (
            f"<figure><figcaption><b>Table {next(self._tables)}.</b> {caption}</figcaption>\n"
            f'<div class="scroll"><table{wide}>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody></table></div></figure>"
        )

    def figure(self, figure: Figure, title: str, caption: str) -> str:
        """A figure over its caption; `title` is also what a screen reader says."""
        number = next(self._figures)
        narrow = ' class="narrow"' if figure.get_figwidth() < 0.9 * figures.WIDTH else ""
        return (
            f"<figure{narrow}>\n{svg(figure, f'f{number}', title)}\n"
            f"<figcaption><b>Figure {number}.</b> {escape(title)}. {caption}</figcaption></figure>"
        )


def _class(number: bool) -> str:
    return ' class="number"' if number else ""


def _cell(text: str) -> str:
    """A cell, its interval in smaller type and its minus signs of full width; a long key may break at its dots."""
    text = re.sub(r"(?<![\w.])-(?=\d)", "−", escape(text))
    text = re.sub(r"(?<=[a-z])([.=])(?=\w)", r"\1<wbr>", text)
    return re.sub(r"(\[[−\d].*\]|\(max .*\))", r"<small>\1</small>", text)


def svg(figure: Figure, prefix: str, title: str) -> str:
    """A figure as an SVG element whose ids start with `prefix`, so that several can stand in one page."""
    file = io.StringIO()
    with figures.style():
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.S).strip()
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def page(parts: Parts, notes: Sequence[str]) -> str:
    """The report as HTML."""
    groups = [group for own, _ in parts.values() for group in own]
    look, made = figures.looks(groups), Page()
    body = [_head(groups, list(parts))]
    with figures.style():
        for env, (own, results) in parts.items():
            body.append(f"<section>\n<h2>{escape(env) if len(parts) > 1 else 'Results'}</h2>")
            body += [*_tables(made, own, results), *_figures(made, own, results, look), "</section>"]
    across = across_table(parts)
    if across[1:]:
        caption = "Mean over environments of the probability of improvement; seeds are resampled in each by itself."
        body.append("<h2>All environments</h2>" + made.table(across, caption))
    body += [_methods(), _runs(made, parts, groups, notes)]
    return DOCUMENT.format(title=escape(f"Comparison on {', '.join(parts)}"), style=STYLE, body="\n".join(body))


def _head(groups: Sequence[Group], envs: Sequence[str]) -> str:
    runs = records(groups)
    seeds = sum(len(record.seeds) for record in runs)
    labels = ", ".join(dict.fromkeys(group.algo.upper() for group in groups))
    text = f"{labels}: {len(runs)} run{'s' * (len(runs) > 1)}, {seeds} trained seed{'s' * (seeds > 1)}"
    return f'<header>\n<h1>Comparison on {escape(", ".join(envs))}</h1>\n<p class="lead">{escape(text)}</p>\n</header>'


def _tables(made: Page, own: Sequence[Group], results: Sequence[Row]) -> list[str]:
    caption = (
        f"Results on {escape(own[0].env)}. Final return and area are interquartile means over seeds with 95&nbsp;% "
        "bootstrap intervals; worst drop is the interquartile mean, and the worst seed. Every training step is charged."
    )
    tables = [made.table(results_table(results), " ".join([caption, *map(escape, remarks(results))]))]
    if len(results) > 1:
        how = "with 95&nbsp;% bootstrap interval" if len(results) <= FEW else "whose interval is in report.csv"
        caption = f"Probability, {how}, that a seed of the row's algorithm ends above one of the column's."
        tables.append(made.table(improvement_table(results), caption))
    return tables


def _figures(made: Page, own: Sequence[Group], results: Sequence[Row], look: dict[str, figures.Look]) -> list[str]:
    env, lines = own[0].env, "Lines are interquartile means over seeds, bands their 95&nbsp;% bootstrap intervals."
    episodes = escape(" or ".join(sorted({str(group.settings.get("eval.episodes", "some")) for group in own})))
    drawn: list[tuple[Figure | None, str, str]] = [
        (
            figures.learning(own, results, look),
            f"Learning curves and final returns on {env}",
            f"Left: an evaluation is the mean of {episodes} episodes of the deterministic policy (100 at the end: the "
            f"diamond). {lines} Right: a dot is a seed, the diamond their interquartile mean, the bar its interval."
            + ("" if results[0].threshold is None else " The dashed line is the environment's reward threshold."),
        ),
        (
            figures.kl_heat_map(own),
            f"KL between the policy at collection and the policy in training on {env}",
            "A column is a logged iteration, a row an epoch of its update. Colour is the interquartile mean over seeds "
            "of the exact KL on the epoch's minibatches, each taken before its step: the first epoch begins at 0.",
        ),
        (
            figures.gradient_norms(own, look),
            f"Distribution of the gradient norm before clipping on {env}",
            "Line: median over seeds of an iteration's mean norm. Bands: the middle 50&nbsp;% and 90&nbsp;% of seeds; "
            "at the lower edge the gradient is 0. Dashed: the norm above which gradients are scaled down.",
        ),
        (figures.health(own, look), f"KL after the update, share of clipped ratios, and entropy on {env}", lines),
    ]
    return [made.figure(figure, title, caption) for figure, title, caption in drawn if figure is not None]


def _methods() -> str:
    source = (
        "Interquartile mean, stratified bootstrap and probability of improvement follow Agarwal et al., <i>Deep "
        "Reinforcement Learning at the Edge of the Statistical Precipice</i>, NeurIPS 2021."
    )
    terms = (
        f"<dt>{escape(name)}</dt><dd>{escape(text[0].upper() + text[1:])}.</dd>" for name, text in DEFINITIONS.items()
    )
    return f"<section>\n<h2>What the numbers are</h2>\n<p>{source}</p>\n<dl>\n{chr(10).join(terms)}\n</dl>\n</section>"


def _runs(made: Page, parts: Parts, groups: Sequence[Group], notes: Sequence[str]) -> str:
    body = ["<section>\n<h2>Runs</h2>", made.table(runs_table(groups), "Where each run lies, and what it took.")]
    commands = "\n".join(escape(record.command) for record in records(groups))
    body.append(f"<p>The commands that train them again:</p>\n<pre>{commands}</pre>")
    for env, (own, _) in parts.items():
        differing = settings_table(own)
        if differing[1:]:
            caption = f"Settings that differ on {escape(env)}; all others are equal. Blank: there is no such setting."
            body.append(made.table(differing, caption))
    body += [f"<p>Note: {escape(note)}.</p>" for note in notes]
    body.append(f"<footer>Written by rlkit {__version__}, python -m rlkit.report.</footer>\n</section>")
    return "\n".join(body)
