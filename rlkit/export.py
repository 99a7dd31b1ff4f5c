"""Export one member of a run: `python -m rlkit.export RUN --format onnx`.

python -m rlkit.export RUN                                       the best member as RUN/policy.onnx
python -m rlkit.export RUN --format torch --member 3             member 3 as RUN/policy.pt2
python -m rlkit.export RUN --checkpoint best --output a.onnx     as it was at its best evaluation

Input: observations `obs`, float32 [B, D], any B, flattened as in training: the numbers of a Box in a row, those of
Discrete and MultiDiscrete one-hot, the parts of a Tuple or Dict end to end (gymnasium.spaces.flatten). Normalisation is
inside. Outputs: `action` [B, ...], the most likely action as the environment takes it, scaled, clipped and counted from
the space's start; and what it was chosen from: `logits` [B, sum of choices] (log-probabilities, one head after another)
or `mean` and `std` [B, A] (before scaling and clipping).
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit import __version__
from rlkit.conf.schema import ConfigError
from rlkit.exported import ExportedPolicy
from rlkit.faults import Fault
from rlkit.files import make_folder, replacing
from rlkit.job import use_threads
from rlkit.policy import Policy
from rlkit.saved import CHECKPOINTS, SavedRun
from rlkit.train import EXIT_CONFIG, EXIT_FAULT, EXIT_INTERRUPTED, complain, fail

OBSERVATIONS = 1_000  # that an export is checked on
TOLERANCE = 1e-5  # of its numbers from the policy's; relative where a row has larger ones than 1
METADATA = "rlkit.json"  # name of the metadata within a .pt2 file

EPILOG = """\
The file is checked before it is written: its numbers on 1,000 observations of the environment must be the policy's to
1e-5. Metadata in it: environment, version, member, spaces.

Exit status: 0 done, 1 the check failed or the file cannot be written, 2 there is no such run or member, its checkpoint
is damaged, its environment cannot be made, an option is wrong or needs a package; 130 Ctrl-C. Nothing is left of a file
that fails."""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        ending: of the file's name.
        packages: what it takes beside torch.
        write: gives the file's content for a module, observations as an example, and metadata.
        read: gives the function from observations to outputs that is in a file's content.
    """

    ending: str
    packages: tuple[str, ...]
    write: Callable[[ExportedPolicy, Tensor, dict[str, Any]], bytes]
    read: Callable[[bytes], Callable[[np.ndarray], list[np.ndarray]]]


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
            yield
    finally:
        logger.setLevel(level)


def _any_rows() -> tuple[dict[int, Any], ...]:
    """What says that the number of rows is open."""
    return ({0: torch.export.Dim("batch")},)


def _write_onnx(module: ExportedPolicy, example: Tensor, metadata: dict[str, Any]) -> bytes:
    program: Any = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        input_names=["obs"],
        output_names=module.outputs,
        dynamic_shapes=_any_rows(),
        verbose=False,
    )
    program.model.metadata_props.update({name: str(value) for name, value in metadata.items()})
    data: bytes = program.model_proto.SerializeToString()
    return data


def _read_onnx(data: bytes) -> Callable[[np.ndarray], list[np.ndarray]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return lambda obs: list(session.run(None, {"obs": obs}))


def _write_torch(module: ExportedPolicy, example: Tensor, metadata: dict[str, Any]) -> bytes:
    program = torch.export.export(module, (example,), dynamic_shapes=_any_rows())
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})
    return file.getvalue()


def _read_torch(data: bytes) -> Callable[[np.ndarray], list[np.ndarray]]:
    module = torch.export.load(io.BytesIO(data)).module()
    return lambda obs: [x.detach().numpy() for x in module(torch.from_numpy(obs))]


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

    rng = torch.Generator().manual_seed(0)
    envs = make_envs(run.share(range(member, member + 1)), 10, AutoresetMode.SAME_STEP, time_limit(run.config))
    try:
        obs, _ = envs.reset(seed=list(range(10)))
        rows = [obs]
        while len(rows) * 10 < OBSERVATIONS:
            dist = policy.distribution(torch.from_numpy(obs)[None])
            shape = (1, 10, policy.action_size)
            if policy.noise_kind == "gumbel":
                noise = -torch.empty(shape).exponential_(generator=rng).log()
            else:
                noise = torch.randn(shape, generator=rng)
            raw = dist.sample(noise)[0].numpy()
            obs, *_ = envs.step(actions.legal(raw, policy.squash))
            rows.append(obs)
    finally:
        envs.close()
    return np.concatenate(rows).astype(np.float32)


@torch.no_grad()
def difference(outputs: Sequence[np.ndarray], policy: Policy, actions: Any, obs: np.ndarray) -> float:
    """Largest difference of a file's outputs from what a policy of one member gives for observations [B, D].

    An index differs where it names another choice than one with the highest probability to within `TOLERANCE`.

    Raises:
        ExportError: a difference is above `TOLERANCE`, times the largest number of its row where that is above 1.
    """
    action, *rest = outputs
    dist = policy.distribution(torch.from_numpy(obs)[None])
    params = {name: x[0].numpy() for name, x in dist.params.items()}
    if policy.discrete:
        index = actions.raw(action)  # [B, heads]
        heads = np.split(params["logits"], np.cumsum(policy.sizes)[:-1], -1)
        chosen = [np.take_along_axis(head, index[:, [i]], 1)[:, 0] for i, head in enumerate(heads)]
        pairs = [(rest[0], params["logits"])]
        pairs += [(mine, head.max(1)) for mine, head in zip(chosen, heads, strict=True)]
    else:
        legal = actions.legal(dist.mode()[0].numpy(), policy.squash)
        pairs = [(action, legal), (rest[0], params["mean"]), (rest[1], np.exp(params["log_std"]))]
    # float32 rounds a row's numbers in proportion to its largest
    scale = np.abs(params["logits" if policy.discrete else "mean"]).max(1).clip(1.0)  # [B]
    worst = 0.0
    for got, wanted in pairs:
        if np.shape(got) != np.shape(wanted):
            raise ExportError(f"an output has shape {np.shape(got)} where the policy has {np.shape(wanted)}")
        apart = np.abs(np.asarray(got, np.float64) - wanted)
        if not (apart <= TOLERANCE * np.maximum(scale.reshape(-1, *[1] * (apart.ndim - 1)), np.abs(wanted))).all():
            raise ExportError(f"its numbers differ from the policy's by up to {apart.max():.2e}, above {TOLERANCE:g}")
        worst = max(worst, float(apart.max(initial=0.0)))
    return worst


@torch.no_grad()
def export(run: SavedRun, member: int, path: Path, format: str = "onnx") -> float:
    """Write one member's policy to a file that runs without rlkit, whole or not at all.

    Args:
        path: the file.
        format: "onnx", or "torch" (a `torch.export` program).

    Returns:
        The largest difference of the file's numbers from the policy's on 1,000 observations.

    Raises:
        rlkit.conf.schema.ConfigError: the environment cannot be made, or the checkpoint is of another.
        ExportError: the file does not do what the policy does.
        rlkit.files.WriteError: it cannot be written.
    """
    policy, actions = run.policy(range(member, member + 1))
    module = ExportedPolicy(policy, actions, 0).eval()
    obs = observations(run, policy, actions, member)
    kind = FORMATS[format]
    with _quiet(), torch.enable_grad():  # without gradients the networks leave torch, which cannot be traced
        data = kind.write(module, torch.from_numpy(obs[:2]), about(run, member, actions, obs.shape[1]))
        outputs = kind.read(data)(obs)
        single = kind.read(data)(obs[:1])
    if any(len(x) != 1 for x in single):
        raise ExportError("it does not take another number of observations than it was made with")
    worst = difference(outputs, policy, actions, obs)
    make_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    return worst


def about(run: SavedRun, member: int, actions: Any, obs_size: int) -> dict[str, Any]:
    """What the file says of itself."""
    return {
        "environment": run.config.env.id,
        "algorithm": run.config.algo.name,
        "rlkit_version": __version__,
        "run": run.folder.resolve().name,
        "checkpoint": run.checkpoint,
        "member": member,
        "seed": run.config.seed + member,
        "observation": f"float32 [batch, {obs_size}], flattened",
        "action_space": str(actions.space),
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m rlkit.export",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("--format", choices=tuple(FORMATS), default="onnx", help="ONNX, or torch.export (onnx)")
    made.add_argument("--member", default="best", help="a number, or best (best)")
    made.add_argument("--checkpoint", choices=tuple(CHECKPOINTS), default="last", help="which state of the run (last)")
    made.add_argument("--output", type=Path, metavar="FILE", help="the file (RUN/policy.onnx or RUN/policy.pt2)")
    return made


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
        member = run.member(int(options.member) if options.member.lstrip("-").isdigit() else options.member)
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
    print(f"{output}: member {member}, within {worst:.1e} of the policy on {OBSERVATIONS:,} observations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
