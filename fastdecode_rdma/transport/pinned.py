"""Row buffers pinned for a GPU: page-locked and mapped, so that its kernels reach them directly.

`cudaHostRegister` (portable, mapped) on memory that the engine owns and whose addresses stay. Where
that fails the rows go through a staging copy of the device's own, which is slower and works: one
warning, and the stats say so. Only this process registers; it must not fork afterwards.

Release goes in one order: the pump has stopped and its queue pairs are gone, then `Pins.release`
waits for the device, then unpins; the pages are unmapped by their owner, later.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

PORTABLE, MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED

_RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
ON_CPU = "the dense layers run on the CPU"


class CudaError(Exception):
    """A call of CUDA failed; its number is `code`."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


class CudaRuntime(Protocol):
    """What is needed of CUDA. Each call raises CudaError."""

    def register(self, address: int, nbytes: int, flags: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def device_address(self, address: int) -> int: ...

    def synchronize(self) -> None: ...

    def attribute(self, number: int) -> int: ...


class Libcudart:
    """CUDA's runtime library, and the driver's for attributes that the runtime does not know."""

    def __init__(self, library: Any, driver: Any) -> None:
        self._library, self._driver = library, driver
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            self._library.cudaGetLastError()  # or torch's next call would report it as its own
            text = self._library.cudaGetErrorString(code) or b"?"
            raise CudaError(name, code, text.decode(errors="replace"))

    def register(self, address: int, nbytes: int, flags: int) -> None:
        """Page-locks memory of this process."""
        pointer, length = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        self._call("cudaHostRegister", pointer, length, ctypes.c_uint(flags))

    def unregister(self, address: int) -> None:
        """Undoes `register`."""
        self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def device_address(self, address: int) -> int:
        """Returns where the device sees registered memory."""
        found = ctypes.c_void_p()
        pointer = ctypes.c_void_p(address)
        self._call("cudaHostGetDevicePointer", ctypes.byref(found), pointer, ctypes.c_uint(0))
        return found.value or 0

    def synchronize(self) -> None:
        """Waits for everything queued on the current device."""
        self._call("cudaDeviceSynchronize")

    def attribute(self, number: int) -> int:
        """Returns an attribute of the current device, by the driver's numbers."""
        device, value = ctypes.c_int(), ctypes.c_int()
        self._call("cudaGetDevice", ctypes.byref(device))
        code = self._driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        if code:
            raise CudaError("cuDeviceGetAttribute", code, f"attribute {number}")
        return value.value


def find_runtime(load: Callable[..., Any] = ctypes.CDLL) -> tuple[CudaRuntime | None, str]:
    """Returns CUDA's runtime, of the versions the one that this process (torch) has loaded already
    if there is one; or None and why there is none."""
    driver, reason = _load(("libcuda.so.1",), load, ctypes.DEFAULT_MODE)
    if driver is None:
        return None, f"no CUDA driver: {reason}"
    for mode in (ctypes.DEFAULT_MODE | os.RTLD_NOLOAD, ctypes.DEFAULT_MODE):
        library, reason = _load(_RUNTIMES, load, mode)
        if library is not None:
            return Libcudart(library, driver), ""
    return None, f"no CUDA runtime: {reason}"


def _load(names: Iterable[str], load: Callable[..., Any], mode: int) -> tuple[Any, str]:
    reason = ""
    for name in names:
        try:
            return load(name, mode=mode), ""
        except OSError as error:
            reason = str(error)
    return None, reason


class Pins:
    """The memory of one engine that its GPU maps. `runtime` None: there is none, `why_not` says why
    that is; nothing is pinned then, and nothing is wrong."""

    def __init__(self, runtime: CudaRuntime | None = None, why_not: str = ON_CPU) -> None:
        self._runtime = runtime
        self._why_not = why_not
        self._ours: list[int] = []  # registered by us, in this order
        self._seen: dict[int, int] = {}  # address -> the device's
        self._staging = ""
        self._gpudirect: dict[str, str] = {}  # by transport; looked up once

    @property
    def state(self) -> str:
        """Whether rows lie in pinned memory, for stats: yes, or no and why."""
        if self._runtime is None:
            return f"no: {self._why_not}"
        if self._staging:
            return f"no, staging copy: {self._staging}"
        return "yes" if self._seen else "no: nothing is registered"

    def pin(self, address: int, nbytes: int) -> None:
        """Page-locks whole pages and maps them for the device. A failure is a warning, once, and
        `device_address` is None for this memory."""
        if self._runtime is None:
            return
        try:
            try:
                self._runtime.register(address, nbytes, PORTABLE | MAPPED)
                self._ours.append(address)
            except CudaError as error:
                if error.code != ALREADY_REGISTERED:
                    raise
            self._seen[address] = self._runtime.device_address(address)
        except CudaError as error:
            if not self._staging:
                logger.warning(
                    "row buffers are not pinned, their rows are copied once more: %s; a limit of "
                    "locked memory (`ulimit -l`) or a container may stand in the way",
                    error,
                )
            self._staging = self._staging or str(error)

    def device_address(self, address: int) -> int | None:
        """Returns where the device sees pinned memory; None: it does not, copy the rows."""
        return self._seen.get(address)

    def gpudirect(self, transport: str) -> str:
        """Whether an adapter could read rows out of the GPU's memory, for stats."""
        if transport not in self._gpudirect:
            self._gpudirect[transport] = probe_gpudirect(transport, self._runtime, self._why_not)
        return self._gpudirect[transport]

    def release(self) -> None:
        """Waits for the device and unpins, the last first. The pump has stopped. Idempotent, never
        raises: a device that has failed has let go of everything."""
        ours, self._ours = self._ours[::-1], []
        self._seen.clear()
        if self._runtime is None or not ours:
            return
        try:
            self._runtime.synchronize()
        except CudaError as error:
            logger.warning("before unpinning row buffers: %s", error)
        for address in ours:
            try:
                self._runtime.unregister(address)
            except CudaError as error:
                logger.warning("unpinning row buffers: %s", error)


def try_pinning() -> dict[str, str]:
    """Returns whether one page can be pinned here and what GPUDirect would need, for `doctor`."""
    runtime, why_not = find_runtime()
    pins = Pins(runtime, why_not)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    pins.pin(address, mmap.PAGESIZE)
    found = {"pinned": pins.state, "gpudirect": pins.gpudirect("rdma")}
    pins.release()
    return found


def probe_gpudirect(
    transport: str,
    runtime: CudaRuntime | None,
    why_not: str = ON_CPU,
    load: Callable[..., Any] = ctypes.CDLL,
) -> str:
    """Returns, for stats, whether an adapter could read rows out of the GPU's memory (dmabuf), or
    why it could not."""
    if transport != "rdma":
        return f"no: {transport} moves host memory"
    if runtime is None:
        return f"no: {why_not}"
    try:
        if not runtime.attribute(DMA_BUF_SUPPORTED):
            return "no: the GPU's driver exports no dmabuf: its open kernel modules do"
    except CudaError as error:
        return f"no: {error}"
    verbs, reason = _load(("libibverbs.so.1",), load, ctypes.DEFAULT_MODE)
    if verbs is None:
        return f"no: {reason}"
    if not hasattr(verbs, "ibv_reg_dmabuf_mr"):
        return "no: libibverbs is older than 34 and registers no dmabuf"
    return "possible, not used: rows go through pinned host memory"
