"""Doorbells: how a kernel tells the CPU that its rows are there, and waits for replies.

When all programs of a packing kernel have stored their rows, the last one rings: it adds one to a
counter in device memory and stores that number to the doorbell, which the CPU watches. Every
program's rows happen before the doorbell's number: each passes through a release and acquire of
system scope on the counter of arrivals, after a barrier among its own threads.

Replies are waited for by one program, which alone polls memory across the bus, until their counter
has reached the number last rung or is negative: poisoned, the step is aborted and what is gathered
means nothing. The other programs wait for that one in device memory; it is the grid's first, so it
runs whenever any of them does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdecode_rdma.errors import ConfigError


@dataclass(frozen=True)
class Doorbell:
    """Counters of one exchange, each an int64 [1] except `arrivals`, an int32 [1]; all start at 0.

    `arrivals`, `number` and `seen` are the device's own; `request` and `reply` lie in pinned memory
    that CPU and device map. A step rings at most 2^63 - 1 times in a process's life.
    """

    arrivals: Tensor
    number: Tensor
    seen: Tensor
    request: Tensor
    reply: Tensor

    def __post_init__(self) -> None:
        for name in ("arrivals", "number", "seen", "request", "reply"):
            tensor = getattr(self, name)
            dtype = torch.int32 if name == "arrivals" else torch.int64
            if tensor.shape != (1,) or tensor.dtype != dtype:
                raise ConfigError(
                    f"doorbell counter {name} must be {dtype} [1], got {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )


@triton.jit
def _store_release(ptr, value, ON_DEVICE: tl.constexpr):
    """One thread stores an int64 with release semantics of system scope."""
    if ON_DEVICE:  # a plain store: an atomic across the bus is not for every machine
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [ptr.to(tl.int64), value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(ptr, value, sem="release", scope="sys")


@triton.jit
def _load_acquire(ptr, ON_DEVICE: tl.constexpr):
    """Every thread loads an int64 with acquire semantics of system scope."""
    if ON_DEVICE:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u64 $0, [$1];",
            "=l,l",
            [ptr.to(tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        value = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
    return value


@triton.jit
def ring(arrivals_ptr, number_ptr, request_ptr, ON_DEVICE: tl.constexpr):
    """Counts this program in; the last of the grid rings."""
    tl.debug_barrier()  # this program's threads have all stored
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="sys") == programs - 1:
        tl.store(arrivals_ptr, 0)
        number = tl.load(number_ptr) + 1
        tl.debug_barrier()  # all threads have read the number before one writes it
        tl.store(number_ptr, number)
        _store_release(request_ptr, number, ON_DEVICE)


@triton.jit
def await_reply(number_ptr, reply_ptr, seen_ptr, ON_DEVICE: tl.constexpr):
    """Returns when the reply of the number last rung is there, or the counter is poisoned."""
    number = tl.load(number_ptr)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        reply = _load_acquire(reply_ptr, ON_DEVICE)
        while (reply >= 0) & (reply < number):
            reply = _load_acquire(reply_ptr, ON_DEVICE)
        tl.debug_barrier()  # all threads have seen it
        _store_release(seen_ptr, number, ON_DEVICE)
    else:
        seen = _load_acquire(seen_ptr, ON_DEVICE)
        while seen < number:
            seen = _load_acquire(seen_ptr, ON_DEVICE)
