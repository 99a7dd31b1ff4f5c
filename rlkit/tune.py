"""Search for settings with Optuna: `python -m rlkit.tune env=MountainCar algo=grpo --trials 30`."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.console import clock, on_terminal, rich_console
from rlkit.decimals import number
from rlkit.train import EXIT_CONFIG, EXIT_FAULT, EXIT_INTERRUPTED, complain, fail, quiet_pipe

if TYPE_CHECKING:
    from rlkit.study import Row, Study

GIVE_UP = 20  # failed trials in a row
METRICS = ("eval_return", "eval_return_stochastic")
STYLES = {"pruned": "dim", "failed": "red"}

DESCRIPTION = """Search for settings of one environment and one algorithm with Optuna.

  python -m rlkit.tune env=MountainCar algo=grpo --trials 30       the same command again goes on where it has stopped
  python -m rlkit.tune env=CartPole algo=ppo algo.gamma=0.98       a key that is given is not searched
  python -m rlkit.tune env=CartPole algo=ppo --space space.yaml --study runs/tune/mine

A trial trains `members` learners (8 unless given) and is judged by the interquartile mean of their final returns. Seeds
from 100 on are refused, since published results are measured there. After each evaluation (eval.every) a trial is
pruned whose best so far is below the median of the complete trials at that step; the first five trials, and the first
quarter of each, are spared.

The study's folder holds study.db (SQLite, for Optuna), trials.csv (a line for each trial) and best.yaml (the best
settings, in the form of conf/tuned/). Several processes with the same --study share the work."""
EPILOG = """A search space is a YAML file with a line for each key:

  algo.learning_rate: {low: 1e-4, high: 5e-3, log: true}
  algo.num_epochs: {low: 4, high: 20, step: 4}
  algo.gamma: {choices: [0.98, 0.99, 0.995]}

python -m rlkit.train --help lists the keys. A configuration that cannot run is a failed trial, which is not counted. A
member whose return is not finite counts with its last finite one. Ctrl-C ends the search after the current iteration;
the same command runs that trial again. Exit status: 0 done, 1 a fault, 2 a wrong configuration or a missing
package, 130 Ctrl-C, 141 nobody reads the output."""


class Show:
    """The console: a line for each trial and, on a terminal, one that says where the running trial stands."""

    HEADING = f"{'trial':>5}  {'state':<8}  {'value':>9}  {'best':>9}  {'time':>7}  "

    def __init__(self) -> None:
        self.terminal = on_terminal()
        self.console = rich_console(self.terminal)

    def line(self, text: str, style: str = "") -> None:
        """Print a line as it is."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """A line that goes away in the end; what is given changes its text."""
        if self.terminal:
            with self.console.status(text) as status:
                yield status.update
        else:
            yield lambda _: None

    def start(self, study: Study, trials: int) -> None:
        """What is searched, and what is known already."""
        from rlkit.build import evaluation_limit, time_limit, to_config

        plan, best = study.plan, study.best()
        self.line(f"{plan.config.env.name} {plan.config.algo.name}: {trials} trials in {study.folder}", "bold")
        self.line(f"{plan.seeds}, {plan.config.total_steps:,} steps each, {len(plan.space)} keys searched")
        config = to_config(plan.config)
        limit = evaluation_limit(config)
        if limit != time_limit(config):
            self.line(f"evaluation episodes are cut at {limit:,} steps (eval.max_episode_steps)")
        if study.done():
            self.line(f"{study.done()} of the trials are there" + (f", the best is {_named(best)}" if best else ""))
        self.line(f"\n{self.HEADING}parameters", "bold")

    def trial(self, row: Row, best: Row | None) -> None:
        """How a trial ended; on a terminal its parameters are wrapped under their heading."""
        cells = f"{row.number:>5}  {row.state:<8}  {_amount(row):>9}  {_amount(best):>9}  {clock(row.seconds):>7}  "
        parameters = (f"{key.removeprefix('algo.')}={_shown(value)}" for key, value in row.parameters.items())
        text = row.reason or "  ".join(parameters)
        width = max(self.console.width - len(cells), 30) if self.terminal else len(text) + 1
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
        style = "green" if best is not None and best.number == row.number else STYLES.get(row.state, "")
        self.line(cells + ("\n" + " " * len(cells)).join(lines), style)

    def end(self, study: Study, trials: int) -> None:
        """The best parameters and how much each matters."""
        from rich import box
        from rich.table import Table

        best, done = study.best(), study.done()
        self.line("")
        if done < trials:
            self.line(f"{done} of {trials} trials are done; time is up, or another process is at the last of them")
        if best is None:
            self.line("no trial is complete, so there is no best one")
            return
        importance = study.importance()
        table = Table(title=f"best: {_named(best)}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for name in ("parameter", "value", *(["importance"] if importance else [])):
            table.add_column(name, justify="left" if name == "parameter" else "right")
        for key, value in best.parameters.items():
            table.add_row(key, _shown(value), *([f"{importance.get(key, 0.0):.0%}"] if importance else []))
        self.console.print(table)
        self.line(f"settings  {study.folder / 'best.yaml'}\ntrials    {study.folder / 'trials.csv'}")


def _amount(row: Row | None) -> str:
    return "-" if row is None or row.value is None else number(row.value)


def _named(row: Row) -> str:
    return f"{_amount(row)} (trial {row.number})"


def _shown(value: Any) -> str:
    """A parameter as YAML writes it, with three digits."""
    from rlkit.study import as_yaml

    return f"{value:.3g}" if isinstance(value, float) else as_yaml(value)


def search(study: Study, trials: int, timeout: float, show: Show) -> int:
    """Run what is missing of `trials` trials, none after `timeout` seconds, and return the exit status."""
    from rlkit.interrupt import Interrupt

    deadline, failed = time.monotonic() + timeout, 0
    show.start(study, trials)
    with Interrupt(
        lambda _: show.line("Ctrl-C: the search ends after this iteration; once more ends it at once")
    ) as stop:
        try:
            while not stop.requested and time.monotonic() < deadline and failed < GIVE_UP:
                trial = study.ask(trials)
                if trial is None:
                    break
                with show.status(f"trial {trial.number}") as tell:
                    row = study.conduct(trial, tell, lambda: stop.requested)
                show.trial(row, study.best())
                failed = failed + 1 if row.state == "failed" else 0
        except KeyboardInterrupt:
            stop.requested = True
    if stop.requested:
        show.line(f"stopped with {study.done()} of {trials} trials done; the same command goes on")
        return EXIT_INTERRUPTED
    if failed == GIVE_UP:
        return complain(f"{GIVE_UP} trials in a row have failed, the last one thus: {row.reason}", EXIT_FAULT)
    show.end(study, trials)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m rlkit.tune",
        usage="%(prog)s [KEY=VALUE ...] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "overrides", nargs="*", metavar="KEY=VALUE", help="settings of every trial, as python -m rlkit.train takes them"
    )
    add("--trials", type=_at_least(1), default=30, metavar="N", help="trials in all, earlier calls included (30)")
    add("--study", type=Path, metavar="DIR", help="the study's folder (runs/tune/ENV_ALGO)")
    add("--space", type=Path, metavar="FILE", help="the search space (conf/search/ALGO.yaml)")
    add("--metric", choices=METRICS, default=METRICS[0], help="the final return that counts (eval_return)")
    add(
        "--timeout",
        type=_at_least(0, float),
        default=math.inf,
        metavar="SECONDS",
        help="begin no trial after this time",
    )
    add("--sampler-seed", type=_at_least(0), metavar="N", help="make the search of a single process reproducible")
    return made


def _at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], int | float]:
    """A reader of numbers that argparse can use."""

    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least - 1)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} must be a {'whole ' if kind is int else ''}number >= {least}")
        return value

    return read


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m rlkit.tune`; returns the exit status."""
    options = parser().parse_intermixed_args(arguments)
    if find_spec("optuna") is None:
        return complain("rlkit.tune searches with Optuna, which is missing: pip install 'rlkit[sweep]'", EXIT_CONFIG)
    import optuna

    from rlkit.conf.schema import ConfigError
    from rlkit.faults import Fault
    from rlkit.search_space import make_plan
    from rlkit.study import STORAGE, Study

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for override in options.overrides:
        key, _, value = override.partition("=")
        if key in ("env", "algo") and "," in value:
            return complain(f"{key} is {value}; a search is of one environment and one algorithm", EXIT_CONFIG)
    try:
        plan = make_plan(options.overrides, options.space, options.metric)
        folder = options.study or Path("runs", "tune", f"{plan.config.env.name}_{plan.config.algo.name}")
        return search(Study(folder, plan, options.sampler_seed), options.trials, options.timeout, Show())
    except ConfigError as error:
        return complain(str(error), EXIT_CONFIG)
    except Fault as fault:  # of the disk: those of trials are in trials.csv
        return fail(fault)
    except STORAGE as error:
        return complain(f"{folder / 'study.db'} cannot be written: {error.__cause__ or error}", EXIT_FAULT)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
