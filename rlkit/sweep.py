"""A sweep: jobs that one of Hydra's launchers runs, here or in other processes, and the table of how they ended."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from io import TextIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlkit.conf.schema import ConfigError
from rlkit.faults import Fault
from rlkit.files import WriteError, check_place, make_folder, write_csv, write_text, writing
from rlkit.overrides import literal
from rlkit.train import EXIT_FAULT, EXIT_INTERRUPTED, complain, unread

if TYPE_CHECKING:
    from omegaconf import DictConfig

# hydra/launcher= -> the package that brings it
LAUNCHERS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
TERMINALS = ("joblib", "submitit_local")  # launchers whose jobs a Ctrl-C at the terminal reaches, all at once
RECORDS = ".jobs"  # folder of the sweep that holds a file for each job that began
UNFINISHED = "no result when the sweep ended: its process was killed, or runs on"


@dataclass(frozen=True)
class Outcome:
    """How a job of a sweep ended. It is a file, since that is what every launcher's jobs can leave behind."""

    job: int  # number in the sweep
    status: str  # ok, failed, interrupted, or unfinished
    env_steps: int | None  # of the mean member
    eval_return: float | None  # interquartile mean over members, deterministic policy
    folder: str  # from the sweep's folder
    overrides: list[str]
    fault: str  # what went wrong, in one line

    @property
    def command(self) -> str:
        """The overrides as a shell takes them."""
        return shlex.join(self.overrides)

    def save(self, sweep: Path) -> None:
        """Write the outcome into the sweep's folder, whole."""
        records = sweep / RECORDS
        make_folder(records)
        write_text(records / f"{self.job}.json", json.dumps(asdict(self)))


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the command line asks Hydra for a sweep."""
    return bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher whose package is not installed, or that a single run would not use.

    Raises:
        ConfigError: it is so; the message says what to do.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    for argument in arguments:
        key, _, name = argument.partition("=")
        if key == "hydra/launcher" and not is_sweep(arguments):
            raise ConfigError(f"hydra/launcher is {name}, which runs the jobs of a sweep; add -m")
        if key == "hydra/launcher" and name in LAUNCHERS:
            try:
                distribution(LAUNCHERS[name])
            except PackageNotFoundError:
                raise ConfigError(
                    f"hydra/launcher is {name}, which needs {LAUNCHERS[name]}: pip install 'rlkit[sweep]'"
                ) from None


def launch() -> int:
    """Run the sweep that the command line describes, print and write how it ended, and return the exit status.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: it cannot start; no job ran.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder, launcher = _plan(sys.argv[1:])
    # Named here, so that every process means the same folder; and a job itself keeps its settings in `.hydra`, once it
    # knows that the folder is new: Hydra would write them over those of a run.
    sys.argv += [f"hydra.sweep.dir={literal(str(folder))}", "hydra.output_subdir=null"]
    if launcher.startswith("submitit"):
        print(f"the jobs write to {folder / '.submitit'}; the table comes when all have ended", flush=True)
    logging.raiseExceptions = False  # a line of Hydra's whose reader has gone is no reason for a stack trace
    ended: BaseException | None = None
    try:
        # Ctrl-C is then the jobs' affair, which save what they have; it would kill a worker that waits for one.
        with _on_ctrl_c(signal.SIG_IGN) if launcher in TERMINALS else nullcontext():
            hydra.main(version_base="1.3", config_path="pkg://rlkit.conf", config_name="config")(job)()
    except (KeyboardInterrupt, Exception) as error:  # the launcher's: those of jobs are recorded
        ended = error
        begun = (folder / RECORDS).exists()
        told = launcher == "basic" or isinstance(error, (KeyboardInterrupt, HydraException, OmegaConfBaseException))
        if isinstance(error, OSError) and not isinstance(error, (HydraException, BrokenPipeError)) and not begun:
            raise WriteError(f"{folder} cannot be written: {error.strerror}") from error  # Hydra keeps settings there
        if told and not begun:
            raise
        if not isinstance(error, KeyboardInterrupt):
            complain(f"hydra/launcher={launcher} ended the sweep: {_one_line(error)}", EXIT_FAULT)
        if not begun:
            return EXIT_FAULT
    outcomes = _outcomes(folder)
    _print_table(outcomes, folder)  # first: it is all there is where the disk is full
    _write_table(outcomes, folder / "sweep.csv")
    if isinstance(ended, KeyboardInterrupt) or any(outcome.status == "interrupted" for outcome in outcomes):
        return EXIT_INTERRUPTED
    bad = sum(outcome.status != "ok" for outcome in outcomes)
    if bad:
        return complain(f"{bad} of {len(outcomes)} jobs failed; {folder / 'sweep.csv'} says why", EXIT_FAULT)
    return EXIT_FAULT if ended else 0


def job(config: DictConfig) -> None:
    """Train one job of a sweep. What goes wrong is recorded and told of, but not raised: the other jobs go on."""
    from hydra.core.hydra_config import HydraConfig

    context = HydraConfig.get()
    sweep, folder = Path(context.sweep.dir), Path(context.runtime.output_dir)
    number, overrides = int(context.job.num), list(context.overrides.task)
    launcher = context.runtime.choices["hydra/launcher"]
    if any(other.status == "interrupted" for other in _outcomes(sweep)):
        return  # Ctrl-C ended the jobs before this one
    outcome = Outcome(number, "unfinished", None, None, os.path.relpath(folder, sweep), overrides, UNFINISHED)
    outcome.save(sweep)
    label = nullcontext() if launcher == "basic" else _labelled(f"[{number}] ")
    try:
        with label, _on_ctrl_c(signal.default_int_handler) if launcher in TERMINALS else nullcontext():
            _train(config, folder, overrides)
        outcome = replace(_measured(outcome, folder), status="ok", fault="")
    except KeyboardInterrupt:
        outcome = replace(_measured(outcome, folder), status="interrupted", fault="")
        if launcher not in TERMINALS:
            raise
    except (Exception, SystemExit) as error:  # an environment may call sys.exit, which would end the sweep
        if isinstance(error, BrokenPipeError) and unread():  # no job can print any more
            outcome = replace(_measured(outcome, folder), status="interrupted", fault="")
            return
        outcome = replace(outcome, status="failed", fault=_fault(error, folder))
        complain(f"job {number} ({outcome.command}): {outcome.fault}", EXIT_FAULT)
    finally:
        outcome.save(sweep)


def _train(config: DictConfig, folder: Path, overrides: list[str]) -> None:
    """Train in a folder that must be new."""
    from rlkit.job import execute, holds_run, prepare
    from rlkit.resume import keep_settings

    with writing(folder):
        taken = holds_run(folder)
        try:
            (folder / ".hydra").mkdir(parents=True)  # fails for all but one of the jobs that want the folder at once
        except FileExistsError:
            taken = True
        if taken:
            raise ConfigError(f"{folder} holds a run already; hydra.sweep.subdir must be a new folder for each job")
    keep_settings(folder, config, overrides)
    execute(prepare(config), folder)


def _measured(outcome: Outcome, folder: Path) -> Outcome:
    """The outcome with the numbers of the run's summary, if it came to one."""
    from rlkit.interquartile import interquartile_mean

    file = folder / "summary.json"
    if not file.exists():
        return outcome
    summary = json.loads(file.read_text())
    steps = round(sum(summary["env_steps"]) / len(summary["env_steps"]))
    return replace(outcome, env_steps=steps, eval_return=float(interquartile_mean(summary["eval_return"])))


def _fault(error: BaseException, folder: Path) -> str:
    """Say in one line why a job failed; its folder gets the stack trace, where that says more."""
    import traceback

    known = isinstance(error, (ConfigError, Fault))
    said = "; ".join(str(error).split("\n")) if known else _one_line(error)
    trace = getattr(error, "trace", "") if known else "".join(traceback.format_exception(error))
    if not trace:
        return said
    try:
        write_text(folder / "traceback.txt", trace)
    except WriteError as lost:
        return f"{said} (where is not known: {lost})"
    return f"{said} (the folder's traceback.txt says where)"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


def _plan(arguments: list[str]) -> tuple[Path, str]:
    """The folder and the launcher that Hydra makes of the overrides that all jobs share.

    Raises:
        ConfigError: the folder holds a sweep already, or cannot be written to.
    """
    from hydra import compose, initialize_config_module
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser

    options = get_args_parser().parse_args(arguments)
    parsed = zip(options.overrides, OverridesParser.create().parse_overrides(options.overrides), strict=True)
    shared = [text for text, override in parsed if not override.is_sweep_override()]
    if options.config_dir:
        shared.append(f"hydra.searchpath=[{literal(f'file://{Path(options.config_dir).absolute()}')}]")
    with initialize_config_module("rlkit.conf", version_base="1.3"):
        config = compose(options.config_name or "config", shared, return_hydra_config=True)
        folder = Path(config.hydra.sweep.dir).absolute()
    if (folder / RECORDS).exists() or (folder / "sweep.csv").exists():
        raise ConfigError(f"hydra.sweep.dir is {folder}, which already holds a sweep; it must be a new folder")
    check_place(folder, "hydra.sweep.dir", file=False)
    return folder, config.hydra.runtime.choices["hydra/launcher"]


def _outcomes(folder: Path) -> list[Outcome]:
    """The outcomes of the jobs that began, in their order."""
    found = [Outcome(**json.loads(path.read_text())) for path in (folder / RECORDS).glob("*.json")]
    return sorted(found, key=lambda outcome: outcome.job)


def _write_table(outcomes: list[Outcome], path: Path) -> None:
    """Write a row for each job."""
    heading = [field.name for field in fields(Outcome)]
    write_csv(path, [heading, *((asdict(outcome) | {"overrides": outcome.command}).values() for outcome in outcomes)])


def _print_table(outcomes: list[Outcome], folder: Path) -> None:
    """Print a line for each job, with the overrides that are not those of all jobs, and a sentence for each failure."""
    from rlkit.decimals import number

    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes)) if len(outcomes) > 1 else set()
    width = max((len(outcome.folder) for outcome in outcomes), default=0)
    ok = sum(outcome.status == "ok" for outcome in outcomes)
    begun = "jobs that began" if any(outcome.status == "interrupted" for outcome in outcomes) else "jobs"
    heading = f"{'job':>4}  {'status':<11}  {'return':>9}  {'steps':>11}  {'folder':<{width}}  overrides"
    lines = ["", f"{ok} of {len(outcomes)} {begun} ok", "", heading, "-" * len(heading)]
    for outcome in outcomes:
        value = "-" if outcome.eval_return is None else number(outcome.eval_return)
        steps = "-" if outcome.env_steps is None else f"{outcome.env_steps:,}"
        own = shlex.join(override for override in outcome.overrides if override not in common)
        lines.append(
            f"{outcome.job:>4}  {outcome.status:<11}  {value:>9}  {steps:>11}  {outcome.folder:<{width}}  {own}"
        )
    lines += ["", *(f"job {outcome.job}: {outcome.fault}" for outcome in outcomes if outcome.fault)]
    print("\n".join([*lines, f"sweep {folder}"]), flush=True)


class Labelled(TextIOBase):
    """Writes what one `print` gives in one piece and each line with a label: several processes share the stream."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream, self._label, self._rest = stream, label, ""

    def write(self, text: str) -> int:
        self._rest += text
        if self._rest.endswith("\n"):  # `print` writes the end of its last line apart
            lines = self._rest[:-1].split("\n")
            self._rest = ""
            self._stream.write("".join(f"{self._label}{line}".rstrip() + "\n" for line in lines))
            self._stream.flush()
        return len(text)


@contextmanager
def _labelled(label: str) -> Iterator[None]:
    """Put a label before the lines of standard output, which then counts as no terminal."""
    with redirect_stdout(Labelled(sys.stdout, label)):
        yield


@contextmanager
def _on_ctrl_c(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C in this way for a while; processes started meanwhile ignore it if this one does."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
