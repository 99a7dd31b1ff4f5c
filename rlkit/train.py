"""Train from the command line: `python -m rlkit.train env=CartPole algo=grpo`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from rlkit.interrupt import Terminated
from rlkit.job import Prepared, Run, check_folder, execute, machine, out_of_memory, prepare
from rlkit.usage import help_page

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlkit.faults import Fault

__all__ = ["Prepared", "Run", "check_folder", "compose", "execute", "help_page", "machine", "main", "prepare", "run"]

Parameters = ParamSpec("Parameters")

EXIT_FAULT = 1  # an environment or a job failed
EXIT_CONFIG = 2  # the configuration cannot run, or an option is wrong or needs a package
EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_PIPE = 141  # nobody reads the output any more, as with `| head`
EXIT_TERMINATED = 143  # SIGTERM


def compose(overrides: list[str]) -> tuple[DictConfig, Path]:
    """Compose a configuration from overrides such as `algo=ppo`; return it and the run directory it names.

    Raises:
        rlkit.build.ConfigError: a name or a value is wrong; one sentence says which.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.conf import schema
    from rlkit.conf.schema import ConfigError
    from rlkit.faults import check_arguments, missing, sentence
    from rlkit.overrides import for_hydra

    schema.register()
    overrides = for_hydra(overrides)
    check_arguments(overrides)
    try:
        with initialize_config_module("rlkit.conf", version_base="1.3"):
            config = hydra_compose("config", overrides, return_hydra_config=True)
            if OmegaConf.is_missing(config.env, "id"):  # before the folder, which is named after it
                raise ConfigError(missing("env.id"))
            if not config.hydra.run.dir:
                raise ConfigError("hydra.run.dir is empty; it must be a new folder")
            folder = Path(config.hydra.run.dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(sentence(error)) from error
    with open_dict(config):
        del config["hydra"]
    return config, folder


def run(
    *, folder: str | Path | None = None, resume: str | Path | None = None, show: str = "off", **settings: Any
) -> Run:
    """Train from Python: `run(env="CartPole", algo="grpo", total_steps=50_000)`.

    Args:
        folder: the run directory; None makes one under `runs/`, as the command line does.
        resume: the directory of a run that is to go on from its last checkpoint (`rlkit.resume`), in the same place.
        show: console output, "auto", "rich", "plain" or "off".
        settings: configuration keys; a dotted one is written with double underscores (`algo__clip=0.1`), or the whole
            dictionary is unpacked: `**{"algo.clip": 0.1}`. A list selects stabilisers: `stabilizer=["ref_kl"]`. A
            dictionary holds arguments: `env__kwargs={"map_name": "8x8"}`.

    Raises:
        rlkit.build.ConfigError: a name or a value is wrong; one sentence says which.
        rlkit.faults.Fault: something ended the run.
    """
    from rlkit.overrides import literal
    from rlkit.resume import keep_settings
    from rlkit.resume import resume as go_on

    overrides = [f"{name.replace('__', '.')}={literal(value)}" for name, value in settings.items()]
    if resume is not None:
        if folder is not None:
            raise ValueError(f"folder is {folder} and resume {resume}; a run goes on in its own folder")
        return go_on(resume, overrides, show)
    config, named = compose(overrides)
    target = Path(folder) if folder is not None else named
    check_folder(target)
    prepared = prepare(config)
    try:
        keep_settings(target, config, overrides)
    except BaseException:
        prepared.close()
        raise
    return execute(prepared, target, show)


def quiet_pipe(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Let an entry point end without a word, with `EXIT_PIPE`, once the reader of its output has gone."""

    @wraps(main)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()  # what is still held back; at Python's own end it would be too late
        except BrokenPipeError:
            gone = unread()
            if not gone:
                raise  # another pipe, such as one to a worker
            for number in gone:  # Python flushes both once more when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            return EXIT_PIPE

    return guarded


def unread() -> list[int]:
    """File numbers of standard output and error where they are pipes that nobody reads any more.

    Where the system does not tell, both are taken to be.
    """
    import select

    numbers = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
    if not hasattr(select, "poll"):
        return numbers
    poll = select.poll()
    for number in numbers:
        poll.register(number, 0)  # errors are told of in any case
    return [number for number, _ in poll.poll(0)]


@quiet_pipe
def main() -> int:
    """Entry point of `python -m rlkit.train`; returns the exit status."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(help_page())
        return 0
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.conf.schema import ConfigError
    from rlkit.faults import Fault, check_arguments, sentence
    from rlkit.overrides import for_hydra

    arguments = for_hydra(arguments)
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises, and the sentences below are ours
    resumed = [argument for argument in arguments if argument.startswith("resume=")]
    sys.argv[1:] = sorted(arguments, key=lambda a: a not in ("-m", "--multirun"))  # argparse wants overrides together
    try:
        if resumed:
            return _resume(*resumed, others=[argument for argument in arguments if argument not in resumed])
        check_arguments(arguments)
        return _run_hydra(arguments)
    except KeyboardInterrupt as interrupt:
        return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
    except ConfigError as error:
        return complain(str(error), EXIT_CONFIG)
    except (HydraException, OmegaConfBaseException) as error:
        return complain(sentence(error), EXIT_CONFIG)
    except Fault as fault:  # of a sweep, whose jobs' own are told of and recorded
        return fail(fault)


def _run_hydra(arguments: list[str]) -> int:
    """Train one run, or, with an option of Hydra's such as -m, do what it asks for.

    Hydra makes the run directory before it calls the job, so a single run is checked and built before that.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from rlkit import sweep
    from rlkit.conf import schema
    from rlkit.files import WriteError, writing

    schema.register()
    sweep.check_launcher(arguments)
    asks = any(argument in ("-c", "-i") or argument.startswith(("--cfg", "--info")) for argument in arguments)
    if sweep.is_sweep(arguments) and not asks:
        return sweep.launch()

    failures: list[Exception] = []
    prepared: Prepared | None = None
    folder = Path()
    if not any(argument.startswith("-") for argument in arguments):
        config, folder = compose(arguments)
        check_folder(folder)
        try:
            prepared = prepare(config)
        except Exception as error:
            return _end(error, folder)

    @hydra.main(version_base="1.3", config_path="pkg://rlkit.conf", config_name="config")
    def job(config: DictConfig) -> None:
        nonlocal folder, prepared
        folder = Path(HydraConfig.get().runtime.output_dir)
        try:
            ready, prepared = prepared or prepare(config), None
            execute(ready, folder)
        except Exception as error:  # told of below: Hydra would print a line of its own
            failures.append(error)

    try:
        with writing(folder):  # Hydra keeps the settings there
            job()
    except WriteError as error:
        failures.append(error)
    finally:
        if prepared is not None:
            prepared.close()
    return _end(failures[0], folder) if failures else 0


def _resume(first: str, *more: str, others: list[str]) -> int:
    """Go on with a run, as `resume=DIR` asks for."""
    from rlkit.conf.schema import ConfigError
    from rlkit.resume import resume

    options = [*more, *(other for other in others if other.startswith("-"))]
    if options:
        raise ConfigError(f"{first} goes on with one run; {options[0]} cannot be given with it")
    named = first.removeprefix("resume=")
    folder = Path(named)
    try:
        resume(named, others)
    except Exception as error:
        return _end(error, folder)
    return 0


def _end(error: Exception, folder: Path) -> int:
    """Tell what ended a run in one sentence, after the stack trace where that is needed; return the exit status."""
    import traceback

    from rlkit.conf.schema import ConfigError
    from rlkit.faults import Fault

    if isinstance(error, (ConfigError, BrokenPipeError)):
        raise error
    more = f"; resume={folder} goes on from its last checkpoint"
    if not (folder / "checkpoint.pt").exists() or (folder / "summary.json").exists():
        more = ""
    if isinstance(error, Fault):
        return fail(error, more)
    text = out_of_memory(error)
    if not text:
        traceback.print_exception(error)
        text = f"the run ended with {type(error).__name__}: {error}".split("\n")[0]
    return complain(text + more, EXIT_FAULT)


def fail(fault: Fault, more: str = "") -> int:
    """Print a fault, after the stack trace of a user's own code if it has one; return the exit status."""
    if fault.trace:
        print(fault.trace, file=sys.stderr)
    return complain(f"{fault}{more}", EXIT_FAULT)


def complain(faults: str, status: int) -> int:
    """Print faults, one on a line, to standard error; return the exit status."""
    print("\n".join(f"rlkit: {line}" for line in faults.split("\n")), file=sys.stderr)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything has begun
        sys.exit(EXIT_INTERRUPTED)
