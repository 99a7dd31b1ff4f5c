"""Checkpoints: a learner's state on disk, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rlkit.files import replacing

FORMAT = 1  # raised when the state's layout changes


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors, numbers and strings, whole or not at all: a crash leaves the old file."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> dict[str, Any]:
    """Read a state; only tensors, numbers and strings are accepted, so that a hostile file cannot run code.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is damaged, or another version wrote it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path} is not a checkpoint that can be read: {reason}") from error
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has format {state.get('format')}; this version reads format {FORMAT}")
    return state
