"""What `fastdecode bench attention` measured: a case, its medians, the table and the plot."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.worker.attention import BLOCK_TOKENS, SEGMENT_TOKENS
from fastdecode_rdma.worker.kv_dtypes import KV_DTYPES


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    dtype: str
    batch: int
    length: int
    group: int
    kv_heads: int
    head_dim: int
    threads: int
    isa: str

    @property
    def layer_bytes(self) -> int:
        """KV bytes that one attend reads."""
        row = KV_DTYPES[self.dtype].row_bytes(self.head_dim)
        return 2 * self.batch * self.length * self.kv_heads * row

    @property
    def bytes_per_fma(self) -> float:
        """KV bytes that one multiply-add may wait for: each element meets `group` heads."""
        return KV_DTYPES[self.dtype].row_bytes(self.head_dim) / (self.head_dim * self.group)


@dataclass(frozen=True)
class Row:
    """Medians of one case."""

    case: Case
    seconds: float
    read_bytes_per_s: float
    fmas_per_s: float
    both_bytes_per_s: float
    torch_seconds: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.case.layer_bytes / self.seconds

    @property
    def roofline(self) -> float:
        """KV bytes per second that memory and arithmetic allow."""
        return min(self.read_bytes_per_s, self.fmas_per_s * self.case.bytes_per_fma)


LEGEND = """\
us        median time of one layer's attention for the whole batch, one new token each
GB/s      KV bytes read per second; read: plain streaming reads, same run and threads; roof: the
          lower of read and what multiply-adds allow (their measured rate x KV bytes of one each);
          both: a loop that reads chunks of the same size at scattered places and multiplies as
          often, and does nothing else
tokens/s  tokens per second and layer; x torch: torch's attention takes so many times as long"""


def print_rows(rows: list[Row]) -> None:
    print(
        f"{'KV':<5} {'batch':>5} {'length':>6} {'group':>5} {'kv':>3} {'dim':>4} {'thr':>3} "
        f"{'isa':<8} {'us':>8} {'GB/s':>6} {'read':>6} {'roof':>6} {'both':>6} {'/ read':>6} "
        f"{'/ roof':>6} {'/ both':>6} {'tokens/s':>9} {'x torch':>7}"
    )
    for row in rows:
        case = row.case
        beside = "" if row.torch_seconds is None else f"{row.torch_seconds / row.seconds:7.2f}"
        print(
            f"{case.dtype:<5} {case.batch:>5} {case.length:>6} {case.group:>5} {case.kv_heads:>3} "
            f"{case.head_dim:>4} {case.threads:>3} {case.isa:<8} {row.seconds * 1e6:>8.0f} "
            f"{row.bytes_per_s / 1e9:>6.2f} {row.read_bytes_per_s / 1e9:>6.2f} "
            f"{row.roofline / 1e9:>6.2f} {row.both_bytes_per_s / 1e9:>6.2f} "
            f"{row.bytes_per_s / row.read_bytes_per_s:>6.2f} "
            f"{row.bytes_per_s / row.roofline:>6.2f} "
            f"{row.bytes_per_s / row.both_bytes_per_s:>6.2f} "
            f"{case.batch / row.seconds:>9.0f} {beside}"
        )
    print(LEGEND)
    print(
        f"blocks of {BLOCK_TOKENS} tokens at random places, segments of {SEGMENT_TOKENS}; "
        f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cpus"
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draws KV bytes per second over multiply-adds per byte: the roof and our points.

    Raises:
        ConfigError: matplotlib is not there.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'fastdecode_rdma[bench]'") from None
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    read, fmas = rows[0].read_bytes_per_s, rows[0].fmas_per_s
    intensity = np.geomspace(0.1, 64, 200)
    axes.loglog(intensity, np.minimum(read, fmas / intensity) / 1e9, label="roofline")
    for dtype in dict.fromkeys(row.case.dtype for row in rows):
        points = [row for row in rows if row.case.dtype == dtype]
        x = [1 / row.case.bytes_per_fma for row in points]
        axes.plot(x, [row.bytes_per_s / 1e9 for row in points], "o", label=dtype)
    axes.set_xlabel("multiply-adds per KV byte")
    axes.set_ylabel("GB/s of KV")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
