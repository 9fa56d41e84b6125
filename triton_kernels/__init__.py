"""Fused Triton kernels of the dense side; installed as `fastdecode_rdma.triton_kernels`.

Every file holds kernels and, below each, its launcher, which checks, allocates and picks a tile
configuration (configs.py). Importing this needs Triton; fastdecode_rdma itself does without.
"""

from __future__ import annotations

if __name__ == "triton_kernels":  # imported from the checkout root: never the intended module
    raise ImportError(
        "import fastdecode_rdma.triton_kernels, not triton_kernels (see pyproject.toml)"
    )

try:
    import triton  # noqa: F401
except ImportError as exc:
    raise ImportError(
        "the GPU kernels need Triton, which is not installed: `pip install 'fastdecode_rdma[gpu]'`"
    ) from exc
