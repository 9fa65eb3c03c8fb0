"""Files of tensors, and whether what they hold can be weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. OSError, with the file's name, where it cannot be written: the library has an error of
    its own for a full disk, which is no OSError."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as e:
        code = re.search(r"code: (\d+)", str(e))
        if code is None:
            raise OSError(f"{path} could not be written: {e}") from e
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from e


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are numbers. 8-bit kinds are widened: torch does not ask it of all of them."""
    return bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())
