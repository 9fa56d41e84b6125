"""What all launchers share: the launch itself, and checks of what comes in."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdecode_rdma.errors import ConfigError

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _nothing_kernel():
    # grid: [1]
    pass


INTERPRETED = not isinstance(_nothing_kernel, triton.JITFunction)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this was imported)."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Starts a kernel; an empty grid starts none. Every launcher of this package comes here."""
    if 0 not in grid:
        kernel[grid](*args, **options)


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_float(name: str, tensor: Tensor, *, columns: int | None = None) -> None:
    """Checks a tensor [rows, columns] of a dtype that we compute in, rows contiguous."""
    if tensor.dtype not in TRITON_DTYPES:
        raise ConfigError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
    if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        raise ConfigError(
            f"{name} must be a matrix with contiguous rows, got shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}"
        )
    if columns is not None and tensor.shape[1] != columns:
        raise ConfigError(f"{name} must have {columns} columns, got {tensor.shape[1]}")


def require_vector(name: str, tensor: Tensor | None, length: int) -> None:
    """Checks a contiguous floating-point vector of that length, or None."""
    if tensor is None:
        return
    if tensor.shape != (length,) or not tensor.is_contiguous():
        raise ConfigError(
            f"{name} must be a contiguous vector of {length}, got shape {tuple(tensor.shape)}"
        )
    if tensor.dtype not in TRITON_DTYPES:
        raise ConfigError(f"{name} must be fp32, fp16 or bf16, got {tensor.dtype}")
