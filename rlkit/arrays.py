"""Tensors as arrays: NumPy starts an operation in a quarter of the time, over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def array_library(device: torch.device) -> Any:
    """numpy for tensors in main memory, torch elsewhere."""
    return np if device.type == "cpu" else torch


def as_array(x: Tensor, xp: Any) -> Any:
    """A tensor as an array of `xp`: as it is for torch, over the same memory for numpy."""
    return x.numpy() if xp is np else x


def in_place(x: Tensor) -> Any:
    """A tensor as an array of the library that suits where it lies."""
    return as_array(x, array_library(x.device))
