"""What a model asks of its surroundings: arithmetic and tensors."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fastdecode_rdma.reference import RopeTable


class Linear(Protocol):
    """A weight matrix [N, K] with an optional bias [N], in whatever layout its ops like."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class Ops(Protocol):
    """All the arithmetic that a model needs; `reference.ReferenceOps` says what each op does.

    An `out` tensor is contiguous, of the compute dtype, and may be the input itself for the norms
    and for `qkv_rows`; for `rms_norm` both may be a range of columns of longer rows. With
    `out=None` an op may return a workspace that the next call of the same op overwrites;
    `embedding` returns memory of its own, and `linear_add_` reads x and the residual from anywhere,
    the workspace of `linear` included.
    """

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear: ...

    def linear(self, x: Tensor, linear: Linear, *, out: Tensor | None = None) -> Tensor: ...

    def linear_add_(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor: ...

    def embedding(self, linear: Linear, token_ids: Tensor) -> Tensor: ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        unit_offset: bool = False,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, out: Tensor | None = None
    ) -> Tensor: ...

    def add_(self, x: Tensor, y: Tensor) -> Tensor: ...

    def scale_(self, x: Tensor, factor: float) -> Tensor: ...

    def softcap_(self, x: Tensor, cap: float) -> Tensor: ...

    def add_rms_norm(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        eps: float,
        *,
        unit_offset: bool = False,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def qkv_rows(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope: RopeTable | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        *,
        unit_offset: bool,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        out: Tensor,
    ) -> Tensor: ...

    def act_mul(self, gate_up: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor: ...

    def act(self, x: Tensor, activation: str) -> Tensor: ...


class TensorSource(Protocol):
    """Hands out every tensor of a model once, by name and expected shape."""

    def take(self, name: str, *shape: int) -> Tensor: ...
