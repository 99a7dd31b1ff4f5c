"""Checkpoints: the state of a run on disk, whole or not at all.

`checkpoint.pt` is the newest. Those before it, where more than one is kept, are `checkpoint_<steps>.pt`, steps as
`checkpoint.every` counts them.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from rlkit.files import replacing, writing

FORMAT = 2  # raised when the state's layout changes
NEWEST = "checkpoint.pt"


class DamagedError(ValueError):
    """A file is no checkpoint, or no longer one."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors, numbers and strings, whole or not at all: a crash leaves the old file.

    Raises:
        rlkit.files.WriteError: the disk is full, or the folder read-only.
    """
    data = io.BytesIO()  # torch would hide what the operating system says of a file
    torch.save({"format": FORMAT, **state}, data)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def load(path: Path, **expected: Any) -> dict[str, Any]:
    """Read a state; only tensors, numbers and strings are accepted, so that a hostile file cannot run code.

    Args:
        expected: what the file must say of the run it is of, such as `env="CartPole-v1"`.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it cannot be read.
        ValueError: another version wrote it, or it is of another run.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch does not look at checksums
        if broken is not None:
            raise ValueError(f"the checksum of {broken} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        reason = str(error).split("\n")[0]
        raise DamagedError(f"{path} is not a checkpoint that can be read: {reason}") from error
    version = state.get("format") if isinstance(state, dict) else None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}; this version reads format {FORMAT}")
    for name, wanted in expected.items():
        found = state.get("about", {}).get(name)
        if found != wanted:
            raise ValueError(f"{path} is of a run with {name}={found}, and this one has {name}={wanted}")
    return dict(state)


def older(folder: Path) -> list[Path]:
    """The checkpoints of a run before its newest, the youngest first."""
    numbered = {path: re.fullmatch(r"checkpoint_(\d+)\.pt", path.name) for path in folder.glob("checkpoint_*.pt")}
    steps = {path: int(match[1]) for path, match in numbered.items() if match}
    return sorted(steps, key=lambda path: -steps[path])


def newest(folder: Path, **expected: Any) -> tuple[Path, dict[str, Any], list[DamagedError]] | None:
    """Read the newest checkpoint of a run that is not damaged; also say what is wrong with younger ones.

    Returns:
        None where the run has none yet.

    Raises:
        ValueError: all are damaged, or one is not of this run; see `load`.
    """
    faults: list[DamagedError] = []
    for path in (folder / NEWEST, *older(folder)):
        try:
            return path, load(path, **expected), faults
        except FileNotFoundError:
            pass  # the process was killed before the first save
        except DamagedError as fault:
            faults.append(fault)
    if faults:
        raise faults[0]
    return None


def put_by(folder: Path, steps: int, keep: int) -> None:
    """Keep the newest checkpoint, made at `steps`, under a name of its own, and of such files the last `keep` - 1."""
    path, numbered = folder / NEWEST, folder / f"checkpoint_{steps}.pt"
    with writing(numbered):
        if keep > 1 and path.exists():
            numbered.unlink(missing_ok=True)
            try:
                os.link(path, numbered)  # the newest is there at every moment
            except OSError:  # a file system without links
                path.replace(numbered)
        for old in older(folder)[keep - 1 :]:
            old.unlink()
