"""The GEMM-only floor of decoding: a model's weight matrices times the batch, and nothing else."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from fastdecode_rdma.models import load_model
from fastdecode_rdma.ops import CpuOps, GemmChoice, Linear

MIN_SECONDS = 1.0
"""A measurement lasts at least this long."""


class RecordingOps(CpuOps):
    """Keeps every matrix in every form that is compared, in the order of the layers."""

    def __init__(self, backends: tuple[str, ...]) -> None:
        super().__init__()
        self.backends = backends
        self.matrices: list[dict[str, Linear]] = []

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        forms = {}
        for name in self.backends:
            dtype = "bf16" if weight.dtype == torch.bfloat16 else "fp32"
            self.gemm_choices[(*weight.shape, dtype)] = GemmChoice(name)
            forms[name] = super().pack(weight)
        self.matrices.append(forms)
        return forms[self.backends[0]]


class GemmFloor:
    """Times all matrices of a model, layer by layer as a decode step reads them."""

    def __init__(self, path: str, backends: tuple[str, ...]) -> None:
        self.ops = RecordingOps(backends)
        self.first = backends[0]
        model = load_model(path, self.ops, max_model_len=64)
        self.matrices = self.ops.matrices
        if model.head is not model.embed_tokens:  # an untied embedding is looked up, not multiplied
            looked_up = model.embed_tokens
            self.matrices = [m for m in self.matrices if m[self.first] is not looked_up]

    def tokens_per_s(self, batch: int) -> float:
        """Rows per second when every matrix is multiplied by `batch` rows, in the fastest form."""
        widths = {forms[self.first].in_features for forms in self.matrices}
        x = {width: torch.randn(batch, width) for width in widths}
        fastest = self._fastest(x)
        passes, started = 0, time.perf_counter()
        while passes < 3 or time.perf_counter() - started < MIN_SECONDS:
            for forms in self.matrices:
                linear = forms[fastest[self._shape(forms)]]
                self.ops.linear(x[linear.in_features], linear)
            passes += 1
        return batch * passes / (time.perf_counter() - started)

    def _shape(self, forms: dict[str, Linear]) -> tuple[int, int]:
        return forms[self.first].out_features, forms[self.first].in_features

    def _fastest(self, x: dict[int, Tensor]) -> dict[tuple[int, int], str]:
        """The form that is fastest for all matrices of a shape at this batch."""
        shapes: dict[tuple[int, int], list[dict[str, Linear]]] = {}
        for forms in self.matrices:
            shapes.setdefault(self._shape(forms), []).append(forms)
        fastest = {}
        for shape, matrices in shapes.items():
            times = {}
            for name in self.ops.backends:
                start = time.perf_counter()
                for forms in matrices:
                    self.ops.linear(x[shape[1]], forms[name])
                times[name] = time.perf_counter() - start
            fastest[shape] = min(times, key=lambda each: times[each])
        return fastest
