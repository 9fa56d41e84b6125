"""Pages: alignment, what touching does, what cannot be had is an error and no signal."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdecode_rdma import pages
from fastdecode_rdma.pages import HUGE_BYTES, Mapping


def smaps(address: int, nbytes: int, key: str) -> int:
    """Bytes of that kind in the mappings that overlap a range."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) < address + nbytes and int(found[2], 16) > address
        elif inside and line.startswith(key + ":"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def map_pages() -> Iterator[Callable[[int], Mapping]]:
    made: list[Mapping] = []

    def make(nbytes: int) -> Mapping:
        made.append(pages.map_pages(nbytes, explicit=False))
        return made[-1]

    yield make
    for mapping in made:
        pages.unmap(mapping.address, mapping.nbytes)


@pytest.mark.parametrize("nbytes", [1, 5000, HUGE_BYTES - 1, HUGE_BYTES, 9 * HUGE_BYTES + 1])
def test_memory_is_whole_pages_and_zero(map_pages: Callable[[int], Mapping], nbytes: int) -> None:
    mapping = map_pages(nbytes)
    unit = HUGE_BYTES if nbytes >= HUGE_BYTES else pages.SMALL_BYTES
    assert mapping.nbytes % unit == 0 and 0 <= mapping.nbytes - nbytes < unit
    assert nbytes < HUGE_BYTES or mapping.address % HUGE_BYTES == 0
    for at in {0, nbytes - 1}:
        byte = ctypes.c_char.from_address(mapping.address + at)
        assert byte.value == b"\0"
        byte.value = b"x"


@pytest.mark.parametrize("touch", [pages.populate, pages._fill_with_zeros])
def test_touched_pages_are_there_and_untouched_ones_are_not(
    map_pages: Callable[[int], Mapping], touch: Callable[[int, int], None]
) -> None:
    mapping = map_pages(8 * HUGE_BYTES)
    assert smaps(mapping.address, mapping.nbytes, "Rss") == 0
    touch(mapping.address, 4 * HUGE_BYTES)
    assert smaps(mapping.address, mapping.nbytes, "Rss") == 4 * HUGE_BYTES


def test_transparent_pages_cover_all_of_it(map_pages: Callable[[int], Mapping]) -> None:
    """The last 2 MiB, too: a mapping of any other alignment ends on small pages."""
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    mapping = map_pages(4 * HUGE_BYTES - 7)
    pages.populate(mapping.address, mapping.nbytes)
    huge = smaps(mapping.address, mapping.nbytes, "AnonHugePages")
    assert huge == (0 if "[never]" in mode else mapping.nbytes)


def test_more_reserved_pages_than_there_are_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="mmap of"):
        pages.map_pages(1 << 46, explicit=True)
    with pytest.raises(OSError, match="mmap of"):
        pages.map_pages(1 << 60, explicit=False)


def test_what_cannot_be_touched_is_an_error(map_pages: Callable[[int], Mapping]) -> None:
    mapping = pages.map_pages(HUGE_BYTES, explicit=False)
    pages.unmap(mapping.address, mapping.nbytes)
    for touch in (pages.populate, pages._fill_with_zeros):
        with pytest.raises(OSError, match="touching 4096 bytes"):
            touch(mapping.address, 4096)


def test_a_node_that_is_not_there_is_refused(map_pages: Callable[[int], Mapping]) -> None:
    mapping = map_pages(HUGE_BYTES)
    with pytest.raises(OSError, match="mbind to NUMA node 1000"):
        pages.bind_to_node(mapping.address, mapping.nbytes, 1000)


def test_a_processor_without_a_known_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    with pytest.raises(OSError, match="not known on pdp11"):
        pages.bind_to_node(0, 4096, 0)


def test_masks_are_little_endian() -> None:
    assert pages.cpu_mask([0, 9, 9], 4) == bytes([1, 2, 0, 0])
