"""The dense side's operations on the CPU: packed GEMM and fused row kernels.

`reference.ReferenceOps` has the same methods in plain torch: it is the oracle. Models call no
other operations.

Which GEMM runs is measured at load for every weight shape: the packed kernel of this package,
torch's library or numpy's. The packed kernel sums in one fixed order, so its row bits do not depend
on the batch; deterministic mode therefore uses it alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_rdma.config import KVGroup, quantization_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.huge_pages import HugePageArena
from fastdecode_rdma.isa import choose_isa
from fastdecode_rdma.reference import RopeTable

try:
    from fastdecode_rdma import _dense, _team
except ImportError as exc:
    raise ImportError(
        "compiled kernels not found: run `pip install -e .`, or leave the checkout directory"
    ) from exc

PROBE_ROWS = (1, 8, 32, 128)
"""Batch sizes at which the GEMM libraries are compared."""
PROBE_COLUMNS = 8192
"""Wider weights (the head) are compared on their first columns, at the same rate in less time."""
PROBE_REPEATS = 7
"""The fastest of these counts: whatever else the machine does can only make a run slower."""
PROBE_RECHECKS = 3
"""So often the packed kernel is measured again before a library is chosen: a time slice taken by
another process is longer than all repeats of a small shape, and a wrong library halves whole steps.
"""
PACKED_BONUS = 1.5
"""A library must win by more than this. Its threads spin for some 100 ms after every call, against
the team that runs all other operations: one shape given to numpy halved the speed of whole steps.
And the packed kernel keeps bf16 weights in half the memory."""
IDLE_WAIT_S = 1.0
IDLE_POLL_S = 0.02
ACTIVATIONS = {"silu": _dense.SILU, "gelu_tanh": _dense.GELU_TANH, "relu": _dense.RELU}


@dataclass(slots=True, eq=False)
class Linear:
    """One weight [N, K], packed for the kernel or row-major for a library; a bias [N] or none."""

    in_features: int
    out_features: int
    weight: np.ndarray | Tensor
    backend: str  # "packed", "torch" or "numpy"
    weight_type: int = 0
    address: int = 0
    bias: Tensor | None = None
    bias_address: int = 0


@dataclass(slots=True)
class GemmChoice:
    """What the measurement at load said of one shape: seconds by backend, one per PROBE_ROWS."""

    backend: str
    seconds: dict[str, list[float]] = field(default_factory=dict)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class CpuOps:
    """Dense operations in fp32 on the CPU. All tensors are contiguous and row-major.

    Results without `out` live in a workspace: valid until the same method is called again.
    Not thread-safe: one engine thread uses one instance.
    """

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        deterministic: bool = False,
        quantization: str | None = None,
    ) -> None:
        self.num_threads = torch.get_num_threads() if num_threads is None else num_threads
        if self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        self.deterministic = deterministic
        self.quantization = quantization_name(quantization)
        self.isa = choose_isa(_dense.cpu_has, built=_dense.ISA_NAMES)
        _dense.set_isa(_dense.ISA_NAMES.index(self.isa))
        self.compute_dtype = torch.float32
        self.gemm_choices: dict[tuple[int, int, str], GemmChoice] = {}
        self._arena = HugePageArena()
        self._flat: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, int], Tensor] = {}
        _dense.bind_team(_team.address())

    # -- weights

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Takes a weight [N, K] in its checkpoint's dtype (bf16 stays, else fp32), a bias [N].

        With quantization the weight is rounded to int8, symmetric, with a scale for each output and
        256 inputs. Arithmetic is fp32 all the same.
        """
        num_out, num_in = weight.shape
        if weight.dtype not in (torch.bfloat16, torch.float32):
            weight = weight.float()
        if bias is not None:
            bias = bias.float().contiguous()
        dtype = self.quantization or ("bf16" if weight.dtype == torch.bfloat16 else "fp32")
        key = (num_out, num_in, dtype)
        if key not in self.gemm_choices:
            self.gemm_choices[key] = (
                GemmChoice("packed")
                if self.deterministic or self.quantization  # no library has such weights
                else measure_gemm(*key, num_threads=self.num_threads, isa=self.isa)
            )
        backend = self.gemm_choices[key].backend
        if backend == "packed":
            linear = self._packed(weight, dtype)
        else:
            linear = self._row_major(weight, backend)
        linear.bias, linear.bias_address = bias, _address(bias)
        return linear

    def _packed(self, weight: Tensor, dtype: str) -> Linear:
        num_out, num_in = weight.shape
        row_type = _dense.BF16 if weight.dtype == torch.bfloat16 else _dense.FP32
        weight_type = _dense.INT8 if dtype == "int8" else row_type
        panel_bytes = _dense.panel_bytes(weight_type, num_in)
        packed = self._arena.empty(-(-num_out // 16) * panel_bytes, np.uint8)
        if num_out % 16:
            packed[-panel_bytes:] = 0
        address, rows = packed.ctypes.data, weight.contiguous()
        _dense.pack(rows.data_ptr(), row_type, num_out, num_in, 0, weight_type, address)
        return Linear(num_in, num_out, packed, "packed", weight_type, address)

    def _row_major(self, weight: Tensor, backend: str) -> Linear:
        rows = weight.float().contiguous()
        num_out, num_in = rows.shape
        return Linear(num_in, num_out, rows.numpy() if backend == "numpy" else rows, backend)

    # -- operations

    def buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """Returns a reusable fp32 tensor [rows, columns]: valid until the next of that name."""
        view = self._views.get((name, rows, columns))
        if view is not None:
            return view
        flat = self._flat.get(name)
        if flat is None or flat.numel() < rows * columns:
            flat = self._flat[name] = torch.empty(max(rows * columns, 1))
            self._views = {key: val for key, val in self._views.items() if key[0] != name}
        if len(self._views) > 4096:
            self._views.clear()
        view = self._views[(name, rows, columns)] = flat[: rows * columns].view(rows, columns)
        return view

    def linear(self, x: Tensor, linear: Linear, *, out: Tensor | None = None) -> Tensor:
        """x [T, K] @ weight.T + bias -> [T, N]."""
        rows, num_in = x.shape
        if num_in != linear.in_features:
            raise ConfigError(f"linear: got {num_in} features, the weight has {linear.in_features}")
        if out is None:
            out = self.buffer("linear", rows, linear.out_features)
        self._gemm(x, linear, out, rows, accumulate=False)
        return out

    def linear_add_(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        """residual [T, N] += x [T, K] @ weight.T + bias, in place; the product is summed first."""
        self._gemm(x, linear, residual, x.shape[0], accumulate=True)
        return residual

    def _gemm(self, x: Tensor, linear: Linear, out: Tensor, rows: int, *, accumulate: bool) -> None:
        if linear.backend == "packed":
            num_out, num_in = linear.out_features, linear.in_features
            _dense.gemm(
                x.data_ptr(), num_in, rows, linear.address, linear.weight_type, num_out, num_in,
                linear.bias_address, out.data_ptr(), num_out, accumulate, self.num_threads,
            )  # fmt: skip
            return
        target = self.buffer("library", rows, linear.out_features) if accumulate else out
        if linear.backend == "numpy":
            np.dot(x.numpy(), linear.weight.T, out=target.numpy())
        else:
            torch.mm(x, linear.weight.t(), out=target)
        if linear.bias is not None:
            target += linear.bias
        if accumulate:
            out += target

    def embedding(self, linear: Linear, token_ids: Tensor) -> Tensor:
        """Rows token_ids (int64 [T]) of the weight -> a new tensor [T, K]."""
        if linear.backend != "packed":
            rows = torch.as_tensor(linear.weight)
            return F.embedding(token_ids, rows)
        token_ids = token_ids.contiguous()
        out = torch.empty(token_ids.numel(), linear.in_features)
        bad = _dense.gather(
            linear.address, linear.weight_type, linear.out_features, linear.in_features,
            token_ids.data_ptr(), token_ids.numel(), out.data_ptr(),
        )  # fmt: skip
        if bad >= 0:
            raise ConfigError(
                f"token id {int(token_ids[bad])} is outside the vocabulary of {linear.out_features}"
            )
        return out

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        unit_offset: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight; `unit_offset`: * (1 + weight). [T, H] -> [T, H].

        Rows of x and `out` may be strided: a range of columns of longer rows.
        """
        return self._norm(x, None, weight, None, eps, float(unit_offset), False, out)

    def add_rms_norm(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        eps: float,
        *,
        unit_offset: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """x += y in place, then the RMS norm of x."""
        return self._norm(x, y, weight, None, eps, float(unit_offset), False, out)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """LayerNorm over the last axis. [T, H] -> [T, H]."""
        return self._norm(x, None, weight, bias, eps, 0.0, True, out)

    def _norm(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        offset: float,
        is_layer_norm: bool,
        out: Tensor | None,
    ) -> Tensor:
        rows, width = x.shape
        if out is None:
            out = self.buffer("norm", rows, width)
        _dense.norm(
            x.data_ptr(), _address(y), _address(weight), _address(bias), out.data_ptr(), rows,
            width,
            eps, offset, is_layer_norm, self.num_threads, x.stride(0), out.stride(0),
        )  # fmt: skip
        return out

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        """x += y, in place. By numpy: torch would wake threads that then spin beside ours."""
        total = x.numpy()
        np.add(total, y.numpy(), out=total)
        return x

    def scale_(self, x: Tensor, factor: float) -> Tensor:
        """x *= factor, in place; by numpy, as add_."""
        total = x.numpy()
        np.multiply(total, np.float32(factor), out=total)
        return x

    def softcap_(self, x: Tensor, cap: float) -> Tensor:
        """x = cap * tanh(x / cap), in place; x is contiguous, of any shape."""
        _dense.softcap(x.data_ptr(), x.numel(), cap, self.num_threads)
        return x

    def qkv_rows(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope: RopeTable | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        *,
        unit_offset: bool = False,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        out: Tensor,
    ) -> Tensor:
        """Per-head RMS norm and rotary of q and k, v untouched: rows [q | k | v] to `out`.

        `qkv` [T, (Hq + 2 Hkv) * D] and `out` (which may be `qkv`) are contiguous; positions are
        int64 [T], all inside the rope table.
        """
        _dense.qkv_rows(
            qkv.data_ptr(), out.data_ptr(), positions.data_ptr(),
            0 if rope is None else rope.cos.data_ptr(), 0 if rope is None else rope.sin.data_ptr(),
            _address(q_norm), _address(k_norm), qkv.shape[0], num_q_heads, num_kv_heads, head_dim,
            0 if rope is None else rope.cos.shape[1], eps, float(unit_offset), self.num_threads,
        )  # fmt: skip
        return out

    def attend(
        self,
        q: Tensor,  # [T, Hq * D], the last T tokens of the context; rows may be strided
        keys: Tensor,  # [L, Hkv * D]
        values: Tensor,  # [L, Hkv * D]
        group: KVGroup,
        *,
        layer: int,
        scale: float,
        softcap: float | None,
        out: Tensor,  # [T, Hq * D]
    ) -> Tensor:
        """Causal attention of a prompt's chunk over its own context, in a layer of the group.

        A row's bits do not depend on the chunk it comes in. This is the prefill's attention; decode
        attends in the workers.
        """
        sinks = slopes = 0
        if group.sinks is not None:
            sinks = group.sink_table[group.layers.index(layer)].ctypes.data
        if group.slopes is not None:
            slopes = group.slope_table.ctypes.data
        _dense.attend(
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(), keys.stride(0),
            out.data_ptr(), out.stride(0), q.shape[0], keys.shape[0], group.num_q_heads,
            group.num_kv_heads, group.head_dim, group.window or 0, scale, softcap or 0.0,
            sinks, slopes, self.num_threads,
        )  # fmt: skip
        return out

    def act_mul(self, gate_up: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
        """act(gate) * up over [gate | up] rows: [T, 2I] -> [T, I]."""
        rows, width = gate_up.shape
        if out is None:
            out = self.buffer("act", rows, width // 2)
        if activation in ACTIVATIONS:
            _dense.activate(
                gate_up.data_ptr(), width, out.data_ptr(), rows, width // 2,
                ACTIVATIONS[activation], True, self.num_threads,
            )  # fmt: skip
            return out
        gate, up = gate_up[:, : width // 2], gate_up[:, width // 2 :]
        return torch.mul(_library_activation(gate, activation), up, out=out)

    def act(self, x: Tensor, activation: str) -> Tensor:
        """act(x), in place. [T, I]."""
        if activation in ACTIVATIONS:
            rows, width = x.shape
            _dense.activate(
                x.data_ptr(), width, x.data_ptr(), rows, width, ACTIVATIONS[activation], False,
                self.num_threads,
            )  # fmt: skip
            return x
        return x.copy_(_library_activation(x, activation))


def _library_activation(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return F.gelu(x)
    raise ConfigError(f"activation {activation!r} is unknown; expected {(*ACTIVATIONS, 'gelu')}")


@cache
def measure_gemm(
    num_out: int, num_in: int, dtype: str, *, num_threads: int, isa: str
) -> GemmChoice:
    """Compares the GEMM backends on a weight of that shape; once per process."""
    ops = CpuOps(num_threads=num_threads, deterministic=True)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    weight = torch.ones(min(num_out, PROBE_COLUMNS), num_in, dtype=kind)
    choice = GemmChoice("packed")
    for backend in ("packed", "torch", "numpy"):
        choice.seconds[backend] = _probe(ops, weight, dtype, backend)
    for _ in range(PROBE_RECHECKS):
        if _winner(choice.seconds) == "packed":
            break
        again = _probe(ops, weight, dtype, "packed")
        choice.seconds["packed"] = list(map(min, choice.seconds["packed"], again))
    choice.backend = _winner(choice.seconds)
    return choice


def _probe(ops: CpuOps, weight: Tensor, dtype: str, backend: str) -> list[float]:
    """Returns seconds of one backend by number of rows."""
    _await_idle_pools()
    packed = backend == "packed"
    linear = ops._packed(weight, dtype) if packed else ops._row_major(weight, backend)
    seconds = []
    for num_rows in PROBE_ROWS:
        x, out = torch.ones(num_rows, weight.shape[1]), torch.empty(num_rows, weight.shape[0])
        times = []
        for _ in range(PROBE_REPEATS):
            start = time.perf_counter()
            ops.linear(x, linear, out=out)
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return seconds


def _await_idle_pools() -> None:
    """Waits until this process burns no time: the threads of a library that has just run (for the
    shape before, even) spin on, and would slow down whatever is measured next."""
    deadline = time.monotonic() + IDLE_WAIT_S
    while time.monotonic() < deadline:
        used = time.process_time()
        time.sleep(IDLE_POLL_S)
        if time.process_time() - used < IDLE_POLL_S / 10:
            return


def _winner(seconds: dict[str, list[float]]) -> str:
    """The backend with the lowest sum of relative times; the packed one, unless clearly beaten."""
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    score = {
        name: sum(t / best for t, best in zip(times, fastest, strict=True))
        for name, times in seconds.items()
    }
    score["packed"] /= PACKED_BONUS
    return min(score, key=lambda name: score[name])
