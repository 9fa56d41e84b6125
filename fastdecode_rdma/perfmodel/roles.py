"""From hardware to rates: what of a device's peaks is reached."""

from __future__ import annotations

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.catalogue import Hardware
from fastdecode_rdma.perfmodel.model import Network, Roofline, ServingModel, WorkerRate
from fastdecode_rdma.perfmodel.shapes import WEIGHT_BYTES, ModelShape

GPU_BANDWIDTH_SHARE = 0.8
"""Of the peak that weights are read at by skinny matrix products."""
GPU_FLOPS_SHARE = 0.5
"""Of the tensor cores' peak. FastDecode's block of 7B at batch 1024 reaches 0.47 of an A10's."""
CPU_BANDWIDTH_SHARE = 0.64
"""Of a socket's peak that the KV-cache is read at: FastDecode's 124 ns a token and layer of 7B."""
CPU_FLOPS_SHARE = 0.5
GPU_LAYER_S = 20e-6
"""Fixed per layer: launches within a graph, and copies of rows to and from the host."""
WORKER_EXCHANGE_S = 5e-6
"""Fixed per mini-batch and layer on a worker: waking its threads and joining them."""
GPU_MEMORY_SHARE = 0.9
"""Of the GPU's memory for weights and KV-cache; the rest is activations and the runtime."""
WORKER_MEMORY_SHARE = 0.9
KV_FLOPS_PER_ELEMENT = 2
"""Multiplications and additions per cached element and query head of its group."""


def worker_rate(
    shape: ModelShape, kv_dtype: str, bytes_per_s: float, flops_per_s: float, memory_bytes: float
) -> WorkerRate:
    """Returns a worker that reads its KV-cache or multiplies, whichever takes longer. Rates are
    what is reached."""
    reading = shape.kv_token_bytes(kv_dtype) / bytes_per_s
    multiplying = 2 * KV_FLOPS_PER_ELEMENT * shape.num_q_heads * shape.head_dim / flops_per_s
    return WorkerRate(
        token_s=max(reading, multiplying), capacity_bytes=memory_bytes,
        exchange_s=WORKER_EXCHANGE_S,
    )  # fmt: skip


def serving_model(
    shape: ModelShape,
    hardware: Hardware,
    *,
    kv_dtype: str,
    weight_dtype: str,
    worker_memory_bytes: float | None = None,
) -> ServingModel:
    """Returns a model of what the hardware's peaks let expect. Several dense devices share every
    layer, their own exchange for free.

    Raises:
        ConfigError: the weights do not fit.
    """
    dense, count = hardware.dense, hardware.num_dense
    weights = shape.params * WEIGHT_BYTES[weight_dtype]
    room = GPU_MEMORY_SHARE * dense.memory_bytes * count
    if weights > room:
        raise ConfigError(
            f"{shape.name} has {weights / 1e9:.1f} GB of {weight_dtype} weights and {count}x "
            f"{dense.name} room for {room / 1e9:.1f} GB: take more or larger ones, or "
            "--weight-dtype int8"
        )
    bandwidth_share = GPU_BANDWIDTH_SHARE if dense.is_gpu else CPU_BANDWIDTH_SHARE
    flops_share = GPU_FLOPS_SHARE if dense.is_gpu else CPU_FLOPS_SHARE
    link_rate = hardware.link.bytes_per_s
    port_rate = min(link_rate, (dense.host_bytes_per_s or link_rate) * count)
    workers = {
        device: worker_rate(
            shape, kv_dtype, CPU_BANDWIDTH_SHARE * device.bytes_per_s,
            CPU_FLOPS_SHARE * device.flops_per_s,
            WORKER_MEMORY_SHARE * (worker_memory_bytes or device.memory_bytes),
        )
        for device in set(hardware.workers)
    }  # fmt: skip
    return ServingModel(
        shape=shape,
        dense=Roofline(
            shape, WEIGHT_BYTES[weight_dtype], bandwidth_share * dense.bytes_per_s * count,
            flops_share * dense.flops_per_s * count, GPU_LAYER_S,
        ),
        workers=tuple(workers[device] for device in hardware.workers),
        network=Network(port_rate, link_rate, hardware.link.round_trip_s),
        kv_dtype=kv_dtype,
        wire_bytes=2.0 if dense.is_gpu else 4.0,
    )  # fmt: skip
