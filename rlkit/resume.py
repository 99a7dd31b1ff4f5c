"""Resume: a run goes on in its own folder, from its last checkpoint, as if it had never ended.

Weights, optimiser, schedules, statistics, links, keepers, random streams and native environments go on bit for bit, and
the log has neither gaps nor repetitions. Environments that are not native cannot be saved and begin new episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlkit.conf.schema import Config, ConfigError, keys
from rlkit.conf.typed import typed
from rlkit.faults import no_such_key, wrong_type
from rlkit.files import locked, make_folder, write_text, writing
from rlkit.job import Prepared, Run, conduct, machine, prepare
from rlkit.metrics import check_metrics
from rlkit.saved import OVERRIDES, SETTINGS, read_config, read_overrides, read_settings

if TYPE_CHECKING:
    from rlkit.session import Session

OPEN = ("total_steps", "stop_at", "device", "eval.", "checkpoint.")  # keys, and beginnings of keys, that may change
EXPORTED = ("policy.onnx", "policy.pt2")  # what `rlkit.export` writes unless told otherwise
WRITTEN = ("checkpoint.pt", "best.pt", "summary.json", "metrics.csv", SETTINGS, OVERRIDES)


@dataclass
class Resumed:
    """What a run goes on from.

    Attributes:
        state: of its last good checkpoint; {} where it has none, and begins again.
        newest: whether that is `checkpoint.pt`.
        notes: lines to tell of.
    """

    state: dict[str, Any]
    newest: bool = True
    notes: list[str] = field(default_factory=list)

    def tell(self, session: Session) -> None:
        """Bring a session to where the checkpoint was made, and tell of it."""
        if self.state:
            session.load_state_dict(self.state["session"], self.newest)
        for note in self.notes:
            session.logger.message(note)


def resume(folder: str | Path, overrides: Sequence[str] = (), show: str = "auto") -> Run:
    """Go on with a run in its folder, to its end.

    Args:
        folder: the run directory.
        overrides: `key=value` of keys that may change: total_steps, stop_at, device, those of eval and of checkpoint.
        show: console output, "auto", "rich", "plain" or "off".

    Raises:
        ConfigError: there is nothing to go on with, or not in this way; one sentence says why, and nothing has changed.
        rlkit.faults.Fault: something ended the run.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once checkpoint and summary are written.
    """
    if not str(folder):
        raise ConfigError("resume is empty; it must be the folder of a run, as in resume=runs/CartPole/grpo/TIME")
    folder = Path(folder)
    config = settings(folder, overrides)
    with locked(folder):
        check_metrics(folder / "metrics.csv", config.members)
        resumed = find(folder, config)
        before = resumed.state.get("about", {})
        prepared = prepare(config, before.get("processes"), before.get("threads", 1))
        try:
            restore(prepared, resumed, folder)
            keep_settings(folder, config, recorded(folder, overrides))
            for path in (folder / "summary.json", *(folder / f"{name}.tmp" for name in WRITTEN)):
                with writing(path):
                    path.unlink(missing_ok=True)  # of before, or of a process that was killed
            return conduct(prepared, folder.absolute(), show, resumed)
        finally:
            prepared.close()


def settings(folder: Path, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a run, with what may change changed; `stop_at` counts for one call only.

    Raises:
        ConfigError: there is no run, its file cannot be used, or an override is of another key or of another type.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from rlkit.faults import sentence

    try:
        read_config(folder)  # so that what is wrong with the file is not put down to the overrides
        config = read_settings(folder)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    config.stop_at = None
    known = {name for name, _, _ in keys(Config())}
    for text in overrides:
        name, _, value = text.partition("=")
        if not name.startswith(OPEN):
            raise ConfigError(
                f"{name} cannot change when a run is resumed; only total_steps, stop_at, eval.*, checkpoint.* and "
                "device can"
            )
        if name not in known:
            raise ConfigError(no_such_key(name))
        try:
            [parsed] = OverridesParser.create().parse_overrides([text])
            held = typed(Config())
            OmegaConf.update(held, name, parsed.value())
            OmegaConf.update(config, name, OmegaConf.select(held, name))
        except HydraException as error:
            raise ConfigError(sentence(error)) from error
        except OmegaConfBaseException as error:
            raise ConfigError(wrong_type(name, value)) from error
    return config


def recorded(folder: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides that make the run as it now is: those it was begun with, and the new ones in their place."""
    changed = {text.partition("=")[0] for text in (*overrides, "stop_at=")}
    kept = [text for text in read_overrides(folder) if text.partition("=")[0].lstrip("+") not in changed]
    return [*kept, *(text for text in overrides if not text.startswith("stop_at="))]


def keep_settings(folder: Path, config: DictConfig, overrides: Sequence[str]) -> None:
    """Write what a run is made of to where Hydra does."""
    make_folder(folder / ".hydra")
    write_text(folder / SETTINGS, OmegaConf.to_yaml(config))
    write_text(folder / OVERRIDES, OmegaConf.to_yaml(OmegaConf.create(list(overrides))))


def find(folder: Path, config: DictConfig) -> Resumed:
    """Read the last good checkpoint of a run.

    Raises:
        ConfigError: it has checkpoints, but none that is whole and of this run.
    """
    from rlkit.keepers import checkpoint

    wanted = {"env": config.env.id, "algo": config.algo.name, "seed": config.seed, "members": config.members}
    try:
        found = checkpoint.newest(folder, **wanted)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if found is None:
        if (folder / "summary.json").exists():  # written after a checkpoint
            raise ConfigError(
                f"{folder / checkpoint.NEWEST} is gone, without which the run cannot go on; begin a new one"
            )
        return Resumed({}, notes=["there is no checkpoint yet: the run begins again"])
    path, state, faults = found
    made = round(state["learner"]["collector"]["env_steps"].double().mean().item())  # as the console shows it
    notes = [*map(str, faults), f"the run goes on at {made:,} steps, from {path.name}"]
    total = state["about"]["total_steps"]
    if total != config.total_steps:
        notes.append(f"total_steps was {total:,} and is {config.total_steps:,}: schedules follow the new total")
    if config.env.backend != "native":
        notes.append(f"environments of {config.env.id} cannot be saved, only native ones can: they begin new episodes")
    if state["about"]["machine"] != machine():
        notes.append(f"it began on another machine ({state['about']['machine']}): equal up to rounding")
    for name in EXPORTED:
        if (folder / name).exists():
            notes.append(f"{name} stays the policy that was exported before; python -m rlkit.export {folder} renews it")
    return Resumed(state, path.name == checkpoint.NEWEST, notes)


def restore(prepared: Prepared, resumed: Resumed, folder: Path) -> None:
    """Bring the learner to where the checkpoint was made.

    Raises:
        ConfigError: the checkpoint does not fit the configuration, or there is nothing left to do.
    """
    state, learner, config = resumed.state, prepared.learner, prepared.config
    if not state:
        return
    try:
        learner.load_state_dict(state["learner"])
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"the checkpoint in {folder} does not fit its configuration: {reason}") from error
    if prepared.processes != state["about"]["processes"]:
        resumed.notes.append(f"processes={prepared.processes}, not {state['about']['processes']}: equal up to rounding")
    made, before = int(learner.env_steps.max()), state["about"]["total_steps"]
    if made >= config.total_steps != before:
        raise ConfigError(f"total_steps is {config.total_steps}, but {made:,} steps are made; it must be more")
    if not bool(learner.running.any()) and (folder / "summary.json").exists():
        why, remedy = "no member would learn any more", ""
        if made >= config.total_steps:
            why, remedy = f"{made:,} of {before:,} steps", "; to go on give a larger total_steps"
        raise ConfigError(f"the run in {folder} is finished: {why}{remedy}")
    if config.stop_at is not None and config.stop_at <= made:
        raise ConfigError(f"stop_at is {config.stop_at}, but {made:,} steps are made; it must be more, or left out")
