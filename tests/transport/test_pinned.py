"""Pinning memory for a GPU, with a CUDA runtime that only writes down what it was asked."""

from __future__ import annotations

import ctypes
import logging
from types import SimpleNamespace

import pytest

from fastdecode_rdma.transport import pinned
from fastdecode_rdma.transport.pinned import (
    MAPPED,
    PORTABLE,
    CudaError,
    Libcudart,
    Pins,
    find_runtime,
    probe_gpudirect,
)

FAR = 1 << 40  # the device sees host memory elsewhere


class FakeCuda:
    """`fails`: call -> the number of its error."""

    def __init__(self, log: list[str] | None = None, **fails: int) -> None:
        self.log: list[str] = [] if log is None else log
        self.fails = fails
        self.registered: dict[int, tuple[int, int]] = {}
        self.supported = 1

    def _do(self, call: str) -> None:
        self.log.append(call)
        if call in self.fails:
            raise CudaError(call, self.fails[call], "operation not supported")

    def register(self, address: int, nbytes: int, flags: int) -> None:
        self._do("register")
        assert address % 4096 == 0 and address not in self.registered
        self.registered[address] = (nbytes, flags)

    def unregister(self, address: int) -> None:
        self._do("unregister")
        del self.registered[address]

    def device_address(self, address: int) -> int:
        self._do("device_address")
        return address + FAR

    def synchronize(self) -> None:
        self._do("synchronize")

    def attribute(self, number: int) -> int:
        self._do("attribute")
        assert number == 124
        return self.supported


def test_a_failing_registration_is_one_warning_and_a_staging_copy(caplog):
    cuda = FakeCuda(register=801)
    pins = Pins(cuda)
    with caplog.at_level(logging.WARNING):
        for address in (4096, 8192, 12288):
            pins.pin(address, 4096)
    (record,) = caplog.records
    assert "copied once more: register: operation not supported (801)" in record.getMessage()
    assert pins.state == "no, staging copy: register: operation not supported (801)"
    assert pins.device_address(4096) is None
    pins.release()
    assert "synchronize" not in cuda.log and "unregister" not in cuda.log


def test_one_buffer_that_cannot_be_mapped_leaves_the_others_pinned():
    cuda = FakeCuda()
    pins = Pins(cuda)
    pins.pin(4096, 4096)
    cuda.fails["device_address"] = 1
    pins.pin(8192, 4096)
    assert pins.device_address(4096) == 4096 + FAR and pins.device_address(8192) is None
    assert pins.state.startswith("no, staging copy: device_address")
    pins.release()
    assert not cuda.registered  # the one that is not mapped too


def test_memory_that_somebody_else_registered_is_not_unregistered():
    cuda = FakeCuda(register=pinned.ALREADY_REGISTERED)
    pins = Pins(cuda)
    pins.pin(4096, 4096)
    assert pins.state == "yes" and pins.device_address(4096) == 4096 + FAR
    pins.release()
    assert "unregister" not in cuda.log


@pytest.mark.parametrize("call", ["synchronize", "unregister"])
def test_a_device_that_has_failed_does_not_stop_closing(call, caplog):
    cuda = FakeCuda()
    pins = Pins(cuda)
    pins.pin(4096, 4096)
    pins.pin(8192, 4096)
    cuda.fails[call] = 719
    with caplog.at_level(logging.WARNING):
        pins.release()
    assert cuda.log.count("unregister") == 2 and "(719)" in caplog.text


@pytest.mark.parametrize(
    ("transport", "supported", "fails", "library", "words"),
    [
        ("shm", 1, {}, None, "no: shm moves host memory"),
        ("rdma", 0, {}, None, "no: the GPU's driver exports no dmabuf"),
        ("rdma", 1, {"attribute": 3}, None, "no: attribute: operation not supported (3)"),
        ("rdma", 1, {}, None, "no: not here"),
        ("rdma", 1, {}, SimpleNamespace(), "no: libibverbs is older than 34"),
        ("rdma", 1, {}, SimpleNamespace(ibv_reg_dmabuf_mr=1), "possible, not used"),
    ],
)
def test_gpudirect_says_why_not(transport, supported, fails, library, words):
    def load(name, mode):
        if library is None:
            raise OSError("not here")
        return library

    cuda = FakeCuda(**fails)
    cuda.supported = supported
    assert probe_gpudirect(transport, cuda, load=load).startswith(words)
    if transport == "rdma":
        assert probe_gpudirect(transport, None, "no GPU", load) == "no: no GPU"


# ---- the library itself, faked one floor below ----


class FakeLibrary:
    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple] = []
        self.code = code

        def get_error_string(code):
            return b"out of memory"

        self.cudaGetErrorString = get_error_string

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *(getattr(arg, "value", "&") for arg in args)))
            return 0 if name == "cudaGetLastError" else self.code

        return call


def test_calls_of_the_library_are_typed():
    library = FakeLibrary()
    cuda = Libcudart(library, FakeLibrary())
    cuda.register(FAR, 1 << 33, PORTABLE | MAPPED)
    cuda.unregister(FAR)
    cuda.synchronize()
    assert library.calls == [
        ("cudaHostRegister", FAR, 1 << 33, 3),
        ("cudaHostUnregister", FAR),
        ("cudaDeviceSynchronize",),
    ]
    assert cuda.device_address(FAR) == 0 and cuda.attribute(124) == 0


def test_errors_of_the_library_are_taken_so_that_torch_does_not_report_them():
    library = FakeLibrary(code=2)
    with pytest.raises(CudaError, match=r"cudaHostRegister: out of memory \(2\)"):
        Libcudart(library, FakeLibrary()).register(4096, 4096, 3)
    assert library.calls[-1] == ("cudaGetLastError",)
    with pytest.raises(CudaError, match=r"cuDeviceGetAttribute: attribute 124 \(2\)"):
        Libcudart(FakeLibrary(), FakeLibrary(code=2)).attribute(124)


@pytest.mark.parametrize(
    ("present", "loaded", "expected"),
    [
        ({"libcuda.so.1", "libcudart.so.13", "libcudart.so.12"}, "libcudart.so.12", 12),
        ({"libcuda.so.1", "libcudart.so.13", "libcudart.so.12"}, None, 13),
        ({"libcuda.so.1"}, None, "no CUDA runtime: libcudart.so: absent"),
        ({"libcudart.so.12"}, None, "no CUDA driver: libcuda.so.1: absent"),
    ],
)
def test_the_runtime_is_the_one_that_torch_has_loaded(present, loaded, expected):
    def load(name, mode):
        if name not in present or (mode != ctypes.DEFAULT_MODE and name != loaded):
            raise OSError(f"{name}: absent")
        library = FakeLibrary()
        library.name = name
        return library

    runtime, reason = find_runtime(load)
    if isinstance(expected, int):
        assert runtime._library.name == f"libcudart.so.{expected}" and not reason
    else:
        assert runtime is None and reason == expected


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        (FakeCuda(), "yes"),
        (FakeCuda(register=801), "no, staging copy: register: operation not supported (801)"),
        (None, "no: no GPU here"),
    ],
)
def test_doctor_tries_one_page(monkeypatch, cuda, expected):
    monkeypatch.setattr(pinned, "find_runtime", lambda: (cuda, "no GPU here"))
    assert pinned.try_pinning()["pinned"] == expected
    assert cuda is None or not cuda.registered
