"""Hardware by name, and from where each figure is; the words of `--hardware`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fastdecode_rdma.errors import ConfigError

GB = 1e9


@dataclass(frozen=True)
class Device:
    """One GPU, or one socket of CPUs.

    memory_bytes: of a socket, a DIMM of 32 GB on each channel (`--worker-memory` says otherwise).
    bytes_per_s: peak of its memory. flops_per_s: peak multiplications and additions, without
    sparsity: fp16 with fp32 sums of a GPU's tensor cores, fp32 FMA at the base clock of a CPU.
    host_bytes_per_s: between a GPU and its host, each way; None for a CPU.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float
    host_bytes_per_s: float | None
    source: str

    @property
    def is_gpu(self) -> bool:
        return self.host_bytes_per_s is not None


@dataclass(frozen=True)
class Link:
    """A network port. bytes_per_s: each way. round_trip_s: of a small message, there and back."""

    name: str
    bytes_per_s: float
    round_trip_s: float
    source: str


def _gpu(name: str, gb: float, gb_per_s: float, tflops: float, host: float, source: str) -> Device:
    return Device(name, gb * GB, gb_per_s * GB, tflops * 1e12, host * GB, source)


def _cpu(name: str, channels: int, mt_per_s: float, gflops: float, source: str) -> Device:
    return Device(
        name, channels * 32 * GB, channels * 8 * mt_per_s * 1e6, gflops * 1e9, None, source
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("a10", 24, 600, 125, 32, "NVIDIA A10 datasheet; PCIe 4.0 x16"),
        _gpu("l4", 24, 300, 121, 32, "NVIDIA L4 datasheet (242 TFLOPS sparse); PCIe 4.0 x16"),
        _gpu("l40s", 48, 864, 362, 32, "NVIDIA L40S datasheet (733 sparse); PCIe 4.0 x16"),
        _gpu("rtx-3090", 24, 936, 71, 32, "NVIDIA GA102 whitepaper, fp32 sums; PCIe 4.0 x16"),
        _gpu("rtx-4090", 24, 1008, 165.2, 32, "NVIDIA Ada whitepaper, fp32 sums; PCIe 4.0 x16"),
        _gpu("a100", 80, 2039, 312, 32, "NVIDIA A100 80GB SXM datasheet; PCIe 4.0 x16"),
        _gpu("h100", 80, 3350, 989, 64, "NVIDIA H100 SXM datasheet (1979 sparse); PCIe 5.0 x16"),
        _gpu("h200", 141, 4800, 989, 64, "NVIDIA H200 SXM datasheet (1979 sparse); PCIe 5.0 x16"),
        _cpu(
            "epyc-7452", 8, 3200, 32 * 2.35 * 32,
            "AMD specifications: 8 x DDR4-3200; 32 cores x 2.35 GHz x 2 AVX2 FMA",
        ),
        _cpu(
            "epyc-9554", 12, 4800, 64 * 3.1 * 32,
            "AMD specifications: 12 x DDR5-4800; 64 cores x 3.1 GHz x 2 FMA of 256 bits",
        ),
        _cpu(
            "xeon-5218", 6, 2666, 16 * 2.3 * 32,
            "Intel ARK: 6 x DDR4-2666; 16 cores x 2.3 GHz x 1 AVX-512 FMA",
        ),
        _cpu(
            "xeon-8480+", 8, 4800, 56 * 2.0 * 64,
            "Intel ARK: 8 x DDR5-4800; 56 cores x 2.0 GHz x 2 AVX-512 FMA",
        ),
    )
}  # fmt: skip

ROUND_TRIP_S = 6e-6
"""Of a small message and its reply between two hosts by RDMA, queue pairs and switch included: a
usual figure of perftest, 1.5 to 2 us one way, with a microsecond of our own at each end."""

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(f"{gbit}gbe", gbit * GB / 8, ROUND_TRIP_S, f"IEEE 802.3, {gbit} Gb/s, RoCE")
        for gbit in (25, 100, 200, 400)
    )
}

ALIASES = {
    "3090": "rtx-3090", "4090": "rtx-4090", "rtx3090": "rtx-3090", "rtx4090": "rtx-4090",
    "7452": "epyc-7452", "9554": "epyc-9554", "5218": "xeon-5218", "8480+": "xeon-8480+",
    "xeon-8480": "xeon-8480+", "8480": "xeon-8480+", "h100-sxm": "h100", "a100-80gb": "a100",
}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """`num_dense` devices for the dense side, worker sockets in the order given, and a link."""

    dense: Device
    num_dense: int
    workers: tuple[Device, ...]
    link: Link

    @property
    def text(self) -> str:
        """In the words of `parse_hardware`."""
        counts: dict[str, int] = {}
        for worker in self.workers:
            counts[worker.name] = counts.get(worker.name, 0) + 1
        parts = [f"{self.num_dense}x {self.dense.name}"]
        parts += [f"{count}x {name}" for name, count in counts.items()]
        return f"{' + '.join(parts)} @ {self.link.name}"


EXAMPLE = "1x a10 + 8x epyc-7452 @ 100gbe"
MAX_WORKERS = 100_000
_PLUS = re.compile(r"\s+\+\s*|\+(?=\s*(?:\d+\s*[x*]|[a-z]))")
"""Between terms; not the last character of "8480+"."""
_TERM = re.compile(r"(?:(\d+)\s*[x*]\s*)?([a-z][a-z0-9+.-]*|\d{4}\+?)")


def parse_hardware(text: str) -> Hardware:
    """Returns what e.g. "1x a10 + 8x epyc-7452 @ 100gbe" describes: the dense side, then workers.

    Raises:
        ConfigError: it does not read like that, or names what is unknown; names the nearest.
    """
    devices, separator, link = text.lower().partition("@")
    terms = [term.strip() for term in _PLUS.split(devices)]
    if not separator or len(terms) < 2:
        raise ConfigError(f"--hardware {text!r} does not read like {EXAMPLE!r}")
    parsed = [_parse_term(term, text) for term in terms]
    num_dense, dense = parsed[0]
    workers: list[Device] = []
    for count, device in parsed[1:]:
        if device.is_gpu:
            raise ConfigError(f"{device.name} cannot be an attention worker: those are CPUs")
        if len(workers) + count > MAX_WORKERS:
            raise ConfigError(f"--hardware: at most {MAX_WORKERS} workers")
        workers += [device] * count
    name = re.sub(r"\s*(gb|gbe|gbps|gbit|gb/s|gbit/s)?\s*$", "gbe", link.strip(), count=1)
    if name not in LINKS:
        raise ConfigError(
            f"--hardware: unknown link {link.strip()!r}; {_nearest(link.strip(), LINKS)}"
        )
    return Hardware(dense, num_dense, tuple(workers), LINKS[name])


def _parse_term(term: str, text: str) -> tuple[int, Device]:
    match = _TERM.fullmatch(term)
    if match is None:
        raise ConfigError(f"--hardware {text!r}: {term!r} does not read like '8x epyc-7452'")
    count, name = int(match[1] or 1), match[2]
    if not 1 <= count <= MAX_WORKERS:
        raise ConfigError(f"--hardware: {term!r} must name 1 to {MAX_WORKERS} devices")
    name = ALIASES.get(name, name)
    if name not in DEVICES:
        raise ConfigError(f"--hardware: unknown device {match[2]!r}; {_nearest(name, DEVICES)}")
    return count, DEVICES[name]


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    names = ", ".join(known)
    return f"did you mean {near[0]!r}? (known: {names})" if near else f"known: {names}"


def listing() -> str:
    """Returns the catalogue as a table."""
    lines = [f"{'device':<12} {'memory':>8} {'bandwidth':>10} {'peak':>13}  source"]
    for device in DEVICES.values():
        lines.append(
            f"{device.name:<12} {device.memory_bytes / GB:>5.0f} GB "
            f"{device.bytes_per_s / GB:>5.0f} GB/s {device.flops_per_s / 1e12:>6.1f} TFLOPS"
            f"  {device.source}"
        )
    lines += ["", f"{'link':<12} {'each way':>10} {'round trip':>12}  source"]
    for link in LINKS.values():
        lines.append(
            f"{link.name:<12} {link.bytes_per_s / GB:>5.1f} GB/s {link.round_trip_s * 1e6:>9.0f} us"
            f"  {link.source}"
        )
    return "\n".join(lines)
