"""The tables at the end of a run and of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap

import numpy as np

from rlkit.console import on_terminal, rich_console
from rlkit.decimals import decimals, number
from rlkit.interquartile import interquartile_mean

WIDTH = 80  # columns
LONG_TABLE = 20  # more members than this are listed several to a line
MARKS = {"finished": " ", "solved": "*", "stopped early": "=", "diverged": "!", "interrupted": "~", "stopped": "-"}
STYLES = {"solved": "green", "diverged": "red", "interrupted": "yellow", "stopped": "yellow"}


@dataclass(frozen=True)
class Result:
    """What a member ended with."""

    eval_return: float  # mean over the episodes of the final evaluation
    status: str  # finished, solved, stopped early, diverged, interrupted or stopped
    steps: int  # environment steps executed
    solved_at: int | None  # steps when it first held the environment's threshold; None: never
    why: str | None = None  # it stopped early


def final_table(
    results: Sequence[Result],
    *,
    title: str,
    folder: Path | str,
    findings: Sequence[str] = (),
    commands: Sequence[str] = (),
    show: str = "auto",
) -> None:
    """Print how a run ended: the members' returns, their interquartile mean, where it lies, how to see it.

    Args:
        results: one for each member.
        title: heading, e.g. what was trained and how it was evaluated.
        folder: the run directory.
        findings: what is wrong with the run, a sentence each (`rlkit.diagnose`).
        commands: shell commands that show the run, printed unbroken.
        show: "rich" for colours, "plain" for text without control codes, "auto", or "off": print nothing.
    """
    if show == "off":
        return
    lines = [("", ""), (title, "bold"), ("", "")]
    lines += _rows(results) if len(results) <= LONG_TABLE else _grid(results)
    if len(results) > 1:
        lines += [("", ""), (_summary(results), "bold")]
    if findings:
        lines.append(("", ""))
        lines += [(part, "yellow") for text in findings for part in wrap(text, WIDTH, subsequent_indent="    ")]
    lines += [("", ""), (f"run   {folder}", "")]
    lines += [(f"{'' if k else 'show':<6}{command}", "") for k, command in enumerate(commands)]
    _print(lines, show)


def evaluation_table(
    members: Sequence[int], returns: np.ndarray, lengths: np.ndarray, *, title: str, show: str = "auto"
) -> None:
    """Print the returns of an evaluation: a line for each member, and what the members have in common.

    Args:
        members: numbers of the members, [K].
        returns, lengths: of each episode, [K, episodes]; lengths in steps.
        title: heading, e.g. what was evaluated and how.
        show: as in `final_table`.
    """
    heading = f"{'member':>6}  {'mean':>9}  {'std':>8}  {'min':>9}  {'max':>9}  {'length':>9}"
    lines = [("", ""), (title, "bold"), ("", ""), (heading, "bold"), ("-" * len(heading), "dim")]
    form = partial(number, digits=decimals(returns.flat))
    for m, own, length in zip(members, returns, lengths.mean(1), strict=True):
        numbers = f"{form(own.mean()):>9}  {form(own.std()):>8}  {form(own.min()):>9}  {form(own.max()):>9}"
        lines.append((f"{m:>6}  {numbers}  {length:>9,.1f}", ""))
    if len(members) > 1:
        middle, means = float(interquartile_mean(returns.mean(1))), returns.mean(1)
        text = f"IQM {form(middle)}   min {form(means.min())}   max {form(means.max())}   of the members' means"
        lines += [("", ""), (text, "bold")]
    _print(lines, show)


def _print(lines: Sequence[tuple[str, str]], show: str) -> None:
    """Print lines, each with a style that only a terminal shows."""
    if show == "rich" or (show == "auto" and on_terminal()):
        output = rich_console()
        for line, style in lines:
            output.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    else:
        print("\n".join(line for line, _ in lines), flush=True)


def _form(results: Sequence[Result]) -> Callable[[float], str]:
    """What writes the members' returns, all with equally many decimals."""
    return partial(number, digits=decimals(result.eval_return for result in results))


def _rows(results: Sequence[Result]) -> list[tuple[str, str]]:
    """A line for each member, and its style."""
    heading = f"{'member':>6}  {'return':>9}  {'status':<13}  {'steps':>11}  {'solved at':>11}"
    lines = [(heading, "bold"), ("-" * len(heading), "dim")]
    form = _form(results)
    for m, result in enumerate(results):
        solved = "-" if result.solved_at is None else f"{result.solved_at:,}"
        cells = f"{m:>6}  {form(result.eval_return):>9}  {result.status:<13}  {result.steps:>11,}  {solved:>11}"
        lines.append((cells, STYLES.get(result.status, "")))
    reasons = [f"member {m} stopped early: {result.why}" for m, result in enumerate(results) if result.why]
    told = [part for text in reasons for part in wrap(text, WIDTH, subsequent_indent="    ")]
    return [*lines, *([("", "")] if told else []), *((text, "") for text in told)]


def _grid(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Members and their returns, several to a line, and what the marks mean."""
    form = _form(results)
    texts = [form(result.eval_return) for result in results]
    digits, longest = len(str(len(results) - 1)), max(map(len, texts))
    cells = [
        f"{m:>{digits}} {text:>{longest}}{MARKS.get(result.status, '?')}"
        for m, (text, result) in enumerate(zip(texts, results, strict=True))
    ]
    per_line = max((WIDTH + 2) // (len(cells[0]) + 2), 1)
    lines = ["  ".join(cells[i : i + per_line]).rstrip() for i in range(0, len(cells), per_line)]
    counts = {status: sum(result.status == status for result in results) for status in MARKS}
    kinds = [f"{count} {status} {MARKS[status]}".rstrip() for status, count in counts.items() if count]
    steps = sorted(result.steps for result in results)
    between = f"{steps[0]:,}" if steps[0] == steps[-1] else f"{steps[0]:,} to {steps[-1]:,}"
    return [(line, "") for line in (*lines, "", f"{', '.join(kinds)}; {between} steps each")]


def _summary(results: Sequence[Result]) -> str:
    """Interquartile mean and extremes of the members' returns, and how many solved the environment."""
    returns = np.array([result.eval_return for result in results], dtype=np.float64)
    known = returns[~np.isnan(returns)]
    solved = np.array([result.solved_at for result in results if result.solved_at is not None])
    parts = [f"solved {solved.size} of {len(results)}"]
    if solved.size:
        parts[0] += f", at {float(interquartile_mean(solved)):,.0f} steps (IQM)"
    if known.size:
        form = _form(results)
        middle = f"IQM {form(float(interquartile_mean(known)))}"
        parts = [middle, f"min {form(known.min())}", f"max {form(known.max())}", *parts]
    return "   ".join(parts)
