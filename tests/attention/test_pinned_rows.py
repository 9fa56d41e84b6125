"""Row buffers that a GPU maps, with a CUDA runtime that only writes down what it was asked."""

from __future__ import annotations

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.transport.pinned import MAPPED, PORTABLE, Pins

FAR = 1 << 40  # the device sees host memory elsewhere


class FakeCuda:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.registered: dict[int, tuple[int, int]] = {}

    def register(self, address: int, nbytes: int, flags: int) -> None:
        assert address % 4096 == 0
        self.registered[address] = (nbytes, flags)

    def unregister(self, address: int) -> None:
        self.log.append("unregister")
        del self.registered[address]

    def device_address(self, address: int) -> int:
        return address + FAR

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_row_buffers_are_pinned_mapped_and_let_go_after_the_pump_has_stopped(connect, monkeypatch):
    driver = connect()
    links, geometry = driver.backend._workers, driver.geometry
    cuda = FakeCuda()
    backend = AttentionBackend(links, geometry, pins=Pins(cuda))
    buffers = [*backend.send_rows, *backend.recv_rows, *backend.row_status]
    assert cuda.registered == {
        each.ctypes.data: (each.nbytes, PORTABLE | MAPPED) for each in buffers
    }
    assert backend.pins.device_address(buffers[0].ctypes.data) == buffers[0].ctypes.data + FAR
    assert backend.info(0).pinned == "yes"
    closing = type(links[0]).close
    monkeypatch.setattr(
        type(links[0]), "close", lambda self: (cuda.log.append("link closed"), closing(self))
    )
    backend.close()
    assert cuda.log == ["link closed", "synchronize", *["unregister"] * len(buffers)]
    assert not cuda.registered
    backend.close()
    assert len(cuda.log) == 2 + len(buffers)


def test_an_engine_on_the_cpu_pins_nothing_and_says_so(connect):
    info = connect().backend.info(0)
    assert info.pinned == "no: the dense layers run on the CPU"
    assert info.gpudirect == "no: loopback moves host memory"
