"""Report on finished runs: `python -m rlkit.report runs/...` prints a comparison as Markdown.

python -m rlkit.report runs/CartPole                     compare all finished runs under a folder
python -m rlkit.report runs/A runs/B --out report        also write report.md, report.csv and report.html
python -m rlkit.report runs/A runs/B --picture row.png   return, KL, clipped share and entropy in one row
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlkit.comparison import Estimate, Row
from rlkit.conf.schema import ConfigError
from rlkit.files import WriteError, check_place, make_folder, replacing, write_text
from rlkit.recorded import ReportError, find
from rlkit.tables import (
    DEFINITIONS,
    Parts,
    Table,
    across_table,
    by_environment,
    improvement_table,
    records,
    remarks,
    results_table,
    runs_table,
)
from rlkit.train import EXIT_CONFIG, EXIT_FAULT, complain, quiet_pipe


def markdown(parts: Parts, notes: Sequence[str]) -> str:
    """The report as Markdown."""
    lines = ["# Comparison of runs", ""]
    for env, (own, results) in parts.items():
        lines += [f"## {env}", "", *_pipes(results_table(results)), ""]
        lines += [*remarks(results), ""] if remarks(results) else []
        if len(results) > 1:
            lines += ["Probability that the row's algorithm ends above the column's:", ""]
            lines += [*_pipes(improvement_table(results)), ""]
        lines += [*_pipes(runs_table(own)), "", *(f"    {record.command}" for record in records(own)), ""]
    across = across_table(parts)
    if across[1:]:
        lines += ["## All environments", "", *_pipes(across), ""]
    lines += ["## What the numbers are", "", *(f"- {name}: {text}." for name, text in DEFINITIONS.items()), ""]
    return "\n".join([*lines, *(f"Note: {note}." for note in notes)]).rstrip() + "\n"


def _pipes(table: Table) -> list[str]:
    """A table as Markdown."""
    heading, *body = [[cell.replace("|", r"\|") for cell in row] for row in table]
    return ["| " + " | ".join(row) + " |" for row in (heading, ["---"] * len(heading), *body)]


def comma_separated(results: Iterable[Row]) -> str:
    """The rows as CSV: an estimate is three columns, and each other label has its columns of improvement."""
    flat: list[dict[str, Any]] = []
    for row in results:
        cells: dict[str, Any] = {}
        for field in dataclasses.fields(Row)[:-1]:
            value = getattr(row, field.name)
            cells |= _columns(field.name, value) if isinstance(value, Estimate) else {field.name: value}
        for label, estimate in row.improvement.items():
            cells |= _columns(f"improvement_over {label}", estimate)
        flat.append(cells)
    file = io.StringIO()
    names = list(dict.fromkeys(name for cells in flat for name in cells))
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v != v or v is None else v for k, v in cells.items()} for cells in flat)  # nan is empty
    return file.getvalue()


def _columns(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def write(parts: Parts, notes: Sequence[str], folder: Path) -> None:
    """Write report.md, report.csv and report.html, each whole or not at all, into a folder, which is made if need be.

    Raises:
        rlkit.files.WriteError: one cannot be written.
    """
    from rlkit.page import page

    make_folder(folder)
    table = comma_separated(row for _, results in parts.values() for row in results)
    for ending, text in {"md": markdown(parts, notes), "csv": table, "html": page(parts, notes)}.items():
        write_text(folder / f"report.{ending}", text)


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m rlkit.report`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlkit.report",
        description=__doc__,
        epilog="Exit status: 0 done, 1 a file cannot be written, 2 no run is found, one is damaged, an option is\n"
        "wrong or needs a package; 141 nobody reads the output.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="a run directory, or a folder above several")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.md, report.csv and report.html there")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="write the main curves as one picture, a PNG")
    options = parser.parse_args(arguments)
    if (options.out or options.picture) and find_spec("matplotlib") is None:
        return complain("--out and --picture draw with matplotlib: pip install 'rlkit[report]'", EXIT_CONFIG)
    if options.picture and options.picture.suffix.lower() != ".png":
        return complain(f"--picture is {options.picture}; its name must end in .png", EXIT_CONFIG)
    try:
        if options.out:
            check_place(options.out, "--out", file=False)
        if options.picture:
            check_place(options.picture, "--picture")
        groups, notes = find(options.paths)
    except (ConfigError, ReportError) as error:
        return complain(str(error), EXIT_CONFIG)
    if notes:
        complain("\n".join(notes), 0)
    parts = by_environment(groups)
    print(markdown(parts, notes), end="")
    try:
        if options.out:
            write(parts, notes, options.out)
        if options.picture:
            from rlkit.figures import overview

            with replacing(options.picture) as temporary:
                overview(groups).savefig(temporary, format="png", dpi=110)
    except WriteError as error:
        return complain(str(error), EXIT_FAULT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
