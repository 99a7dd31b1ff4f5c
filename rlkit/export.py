"""Export one member of a run: `python -m rlkit.export RUN --format onnx`.

python -m rlkit.export RUN                                       the best member as RUN/policy.onnx
python -m rlkit.export RUN --format torch --member 3             member 3 as RUN/policy.pt2
python -m rlkit.export RUN --checkpoint best --output a.onnx     as it was at its best evaluation

Inputs, in this order: observations `obs`, float32 [B, D], any B, flattened as in training: the numbers of a Box in a
row, those of Discrete and MultiDiscrete one-hot, the parts of a Tuple or Dict end to end (gymnasium.spaces.flatten).
Normalisation is inside. For a run with env.action_mask=true also `action_mask`, int8 [B, A], the info["action_mask"] of
each row (one head after another): 1 where legal, which in each head at least one action must be.

Outputs, by name: `action` [B, ...], the most likely action as the environment takes it, scaled, clipped and counted
from the space's start; and what it was chosen from: `logits` [B, A] (log-probabilities, one head after another; below
-5e8 where illegal) or `mean` and `std` [B, A] (before scaling and clipping).
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit import __version__
from rlkit.collect import Actor, action_noise
from rlkit.conf.schema import ConfigError
from rlkit.distributions import FORBIDDEN, forbidding
from rlkit.exported import ExportedPolicy
from rlkit.faults import Fault
from rlkit.files import check_place, make_folder, replacing
from rlkit.job import use_threads
from rlkit.policy import Policy
from rlkit.saved import SavedRun, add_options
from rlkit.train import EXIT_CONFIG, EXIT_FAULT, EXIT_INTERRUPTED, complain, fail, quiet_pipe

OBSERVATIONS = 1_000  # that an export is checked on
TOLERANCE = 1e-5  # of its numbers from the policy's; relative where a row has larger ones than 1
METADATA = "rlkit.json"  # name of the metadata within a .pt2 file
LANES = 10  # environments that the observations come from
FLOOR = FORBIDDEN / 2  # below it lie the log-probabilities of illegal actions alone

Arrays = Mapping[str, np.ndarray]  # inputs or outputs by name

EPILOG = """\
The file is checked before it is written: its numbers on 1,000 observations of the environment must be the policy's to
1e-5 (under random masks where it takes masks). Metadata in it: environment, checkpoint and its steps, member, seed,
version, inputs, outputs.

Exit status: 0 done, 1 the check failed or the file cannot be written, 2 there is no such run or member, its checkpoint
is damaged, its environment cannot be made, an option is wrong or needs a package; 130 Ctrl-C, 141 nobody reads the
output. Nothing is left of a file that fails."""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        ending: of the file's name.
        packages: what it takes beside torch.
        write: gives the file's content for a module, its inputs as an example, and metadata.
        read: gives the function from inputs to outputs that is in a file's content.
    """

    ending: str
    packages: tuple[str, ...]
    write: Callable[[ExportedPolicy, tuple[Tensor, ...], dict[str, Any]], bytes]
    read: Callable[[bytes], Callable[[Arrays], Arrays]]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's remarks on packages that are not needed here from the console."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own use of its own names
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", "# The axis name: batch")  # it is that of all inputs
            yield
    finally:
        logger.setLevel(level)


def _any_rows(module: ExportedPolicy) -> dict[str, dict[int, Any]]:
    """What says that the number of rows is open."""
    rows = {0: torch.export.Dim("batch")}
    return {name: rows for name in module.inputs}


def _write_onnx(module: ExportedPolicy, example: tuple[Tensor, ...], metadata: dict[str, Any]) -> bytes:
    program: Any = torch.onnx.export(
        module,
        example,
        dynamo=True,
        input_names=module.inputs,
        output_names=list(metadata["outputs"]),
        dynamic_shapes=_any_rows(module),
        verbose=False,
    )
    texts = {name: x if isinstance(x, str) else json.dumps(x) for name, x in metadata.items()}
    program.model.metadata_props.update(texts)
    data: bytes = program.model_proto.SerializeToString()
    return data


def _read_onnx(data: bytes) -> Callable[[Arrays], Arrays]:
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda given: dict(zip(names, session.run(names, dict(given)), strict=True))


def _write_torch(module: ExportedPolicy, example: tuple[Tensor, ...], metadata: dict[str, Any]) -> bytes:
    program = torch.export.export(module, example, dynamic_shapes=_any_rows(module))
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})
    return file.getvalue()


def _read_torch(data: bytes) -> Callable[[Arrays], Arrays]:
    module = torch.export.load(io.BytesIO(data)).module()
    return lambda given: {name: x.numpy() for name, x in module(*map(torch.from_numpy, given.values())).items()}


FORMATS = {
    "onnx": Format(".onnx", ("onnx", "onnxscript", "onnxruntime"), _write_onnx, _read_onnx),
    "torch": Format(".pt2", (), _write_torch, _read_torch),
}


class ExportError(RuntimeError):
    """An exported file that does not do what the policy does; the message is one sentence."""


def observations(run: SavedRun, policy: Policy, actions: Any, member: int) -> np.ndarray:
    """Observations that the environment gives while the member samples its actions, float32 [`OBSERVATIONS`, D]."""
    from gymnasium.vector import AutoresetMode

    from rlkit.build import make_envs, time_limit

    envs = make_envs(run.share(range(member, member + 1)), LANES, AutoresetMode.SAME_STEP, time_limit(run.config))
    act = Actor(policy, envs, actions, action_noise(policy, [np.random.default_rng(0)], LANES))
    try:
        obs, _ = envs.reset(seed=list(range(LANES)))
        rows = [obs]
        while len(rows) * LANES < OBSERVATIONS:
            obs, *_ = envs.step(act(obs))
            rows.append(obs)
    finally:
        envs.close()
    return np.concatenate(rows).astype(np.float32)


def random_masks(sizes: Sequence[int], rows: int) -> np.ndarray:
    """Masks of legal actions, int8 [rows, A], in which each head has at least one."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 2, (rows, size), np.int8) for size in sizes]
    for head in heads:
        head[np.arange(rows), rng.integers(head.shape[1], size=rows)] = 1
    return np.concatenate(heads, 1)


@torch.no_grad()
def difference(outputs: Arrays, policy: Policy, actions: Any, given: Arrays) -> float:
    """Largest difference of a file's outputs from what a policy of one member gives for the same inputs.

    An index differs where it names another choice than one with the highest probability to within `TOLERANCE`.

    Raises:
        ExportError: a difference is above `TOLERANCE`, times the largest number of its row where that is above 1.
    """
    dist = policy.distribution(torch.from_numpy(given["obs"])[None])
    if "action_mask" in given:
        dist = dist.shifted(torch.from_numpy(forbidding(given["action_mask"] != 0)))
    params = {name: x[0].numpy() for name, x in dist.params.items()}
    if policy.discrete:
        numbers = params["logits"].clip(FLOOR)  # of illegal actions nothing counts but that they are
        index = actions.raw(outputs["action"])  # [B, heads]
        heads = np.split(numbers, np.cumsum(policy.sizes)[:-1], -1)
        chosen = [np.take_along_axis(head, index[:, [i]], 1)[:, 0] for i, head in enumerate(heads)]
        pairs = [(outputs["logits"].clip(FLOOR), numbers)]
        pairs += [(mine, head.max(1)) for mine, head in zip(chosen, heads, strict=True)]
    else:
        numbers = params["mean"]
        legal = actions.legal(dist.mode()[0].numpy(), policy.squash)
        pairs = [(outputs["action"], legal), (outputs["mean"], numbers), (outputs["std"], np.exp(params["log_std"]))]
    # float32 rounds a row's numbers in proportion to its largest
    scale = np.where(numbers > FLOOR, np.abs(numbers), 0).max(1).clip(1.0)  # [B]
    worst = 0.0
    for got, wanted in pairs:
        if np.shape(got) != np.shape(wanted):
            raise ExportError(f"an output has shape {np.shape(got)} where the policy has {np.shape(wanted)}")
        apart = np.abs(np.asarray(got, np.float64) - wanted)
        size = np.where(wanted > FLOOR, np.abs(wanted), 0)
        if not (apart <= TOLERANCE * np.maximum(scale.reshape(-1, *[1] * (apart.ndim - 1)), size)).all():
            raise ExportError(f"its numbers differ from the policy's by up to {apart.max():.2e}, above {TOLERANCE:g}")
        worst = max(worst, float(apart.max(initial=0.0)))
    return worst


@torch.no_grad()
def export(run: SavedRun, member: int, path: Path, format: str = "onnx") -> float:
    """Write one member's policy to a file that runs without rlkit, whole or not at all.

    Args:
        path: the file; its folder is made if need be.
        format: "onnx", or "torch" (a `torch.export` program).

    Returns:
        The largest difference of the file's numbers from the policy's on 1,000 observations.

    Raises:
        rlkit.conf.schema.ConfigError: the environment cannot be made, or the checkpoint is of another.
        ExportError: the file does not do what the policy does.
        rlkit.files.WriteError: it cannot be written.
    """
    policy, actions = run.policy(range(member, member + 1))
    module = ExportedPolicy(policy, actions, 0, run.config.env.action_mask)
    given = {"obs": observations(run, policy, actions, member)}
    if run.config.env.action_mask:
        given["action_mask"] = random_masks(policy.sizes, len(given["obs"]))
    kind = FORMATS[format]
    example = tuple(torch.from_numpy(x[:2]) for x in given.values())
    with _quiet(), torch.enable_grad():  # without gradients the networks leave torch, which cannot be traced
        data = kind.write(module, example, about(run, member, actions, example, module(*example)))
        program = kind.read(data)
        outputs, single = program(given), program({name: x[:1] for name, x in given.items()})
    if any(len(x) != 1 for x in single.values()):
        raise ExportError("it does not take another number of observations than it was made with")
    worst = difference(outputs, policy, actions, given)
    make_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    return worst


def about(
    run: SavedRun, member: int, actions: Any, given: Sequence[Tensor], outputs: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What the file says of itself; inputs in their order."""
    inputs = {"obs": f"{_form(given[0])}, flattened"}
    if len(given) > 1:
        inputs["action_mask"] = f"{_form(given[1])}, 1 where legal"
    return {
        "environment": run.config.env.id,
        "algorithm": run.config.algo.name,
        "rlkit_version": __version__,
        "run": run.folder.resolve().name,
        "checkpoint": run.checkpoint,
        "env_steps": run.steps(member),
        "member": member,
        "seed": run.config.seed + member,
        "inputs": inputs,
        "outputs": {name: _form(x) for name, x in outputs.items()},
        "action_space": str(actions.space),
    }


def _form(x: Tensor) -> str:
    """Type and shape of an input or output of any number of rows."""
    return f"{str(x.dtype).removeprefix('torch.')} [{', '.join(['batch', *map(str, x.shape[1:])])}]"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m rlkit.export",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(made, member="best")
    made.add_argument("--format", choices=tuple(FORMATS), default="onnx", help="ONNX, or torch.export (onnx)")
    made.add_argument("--output", type=Path, metavar="FILE", help="the file (RUN/policy.onnx or RUN/policy.pt2)")
    return made


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m rlkit.export`; returns the exit status."""
    options = parser().parse_args(arguments)
    use_threads()
    kind = FORMATS[options.format]
    output = options.output or options.run / f"policy{kind.ending}"
    missing = [package for package in kind.packages if find_spec(package) is None]
    if missing:
        hint = f"--format is {options.format}, which needs {' and '.join(missing)}: pip install 'rlkit[export]'"
        return complain(hint, EXIT_CONFIG)
    if output.suffix != kind.ending:
        hint = f"--output is {output}; with --format {options.format} it must end in {kind.ending}"
        return complain(hint, EXIT_CONFIG)
    try:
        run = SavedRun.open(options.run, options.checkpoint)
        member = run.member(options.member)
        check_place(output, "--output")
    except (ValueError, FileNotFoundError) as error:
        return complain(str(error), EXIT_CONFIG)
    try:
        worst = export(run, member, output, options.format)
    except ConfigError as error:
        return complain(str(error), EXIT_CONFIG)
    except ExportError as error:
        return complain(f"{output} was not written: {error}", EXIT_FAULT)
    except Fault as fault:  # of the environment, or the disk
        return fail(fault)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    masked = " with random action masks, which it takes as action_mask" if run.config.env.action_mask else ""
    checked = f"within {worst:.1e} of the policy on {OBSERVATIONS:,} observations{masked}"
    print(f"{output}: {run.state_of(member)}; {checked}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
