"""Kernel tests (kernel_*.py) run on CPU tensors in Triton's interpreter, or on a GPU.

FASTDECODE_TEST_DEVICE=cuda puts every tensor that they make on the GPU; bench/gpu_suite.py does so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

DEVICE = os.environ.get("FASTDECODE_TEST_DEVICE", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DEVICE == "cuda" and item.path.name.startswith("kernel_"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors of kernel tests are made where the kernels run."""
    if DEVICE == "cpu" or not request.path.name.startswith("kernel_"):
        yield
        return
    with torch.device(DEVICE):
        yield
