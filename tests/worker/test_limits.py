from __future__ import annotations

import os

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.worker import limits

GIB = 1 << 30


@pytest.fixture
def make_root(tmp_path):
    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


MEMINFO = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {10 * GIB // 1024} kB\n"}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 * GIB), ("4g", 4 * GIB), ("4 GB", 4 * GIB), ("512M", GIB // 2),
     ("1.5GiB", 3 * GIB // 2),
     ("1048576", 1 << 20), ("2TiB", 2048 * GIB), ("1024KiB", 1 << 20)],
)  # fmt: skip
def test_memory_texts(text, nbytes):
    assert limits.parse_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "4XB", "0", "1023KiB", "nan", "99999999TiB"])
def test_what_is_no_memory(text):
    with pytest.raises(ConfigError, match="memory"):
        limits.parse_memory(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1 << 20, "1MiB"), (4 * GIB, "4GiB"), (3 * GIB // 2, "1.5GiB"),
     (2048 * GIB, "2TiB"), (1 << 60, "1048576TiB")],
)  # fmt: skip
def test_memory_for_people(nbytes, text):
    assert limits.format_memory(nbytes) == text


def test_memory_without_cgroups_is_a_share_of_what_is_available(make_root):
    default = limits.default_memory(make_root(MEMINFO))
    assert default.value == 8 * GIB
    assert default.reason == "80% of MemAvailable, 10GiB"


def test_memory_of_a_v2_cgroup_counts_its_ancestors_and_its_page_cache(make_root):
    base = "sys/fs/cgroup/"
    root = make_root(
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            base + "outer/inner/memory.max": "max\n",
            base + "outer/inner/memory.current": "123\n",
            base + "outer/memory.max": f"{6 * GIB}\n",
            base + "outer/memory.current": f"{3 * GIB}\n",
            base + "outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        }
    )
    assert limits.cgroup_memory(root) == (6 * GIB, 4 * GIB)
    default = limits.default_memory(root)
    assert default.value == int(4 * GIB * 0.8)
    assert default.reason == "80% of the cgroup's free memory, 4GiB"


def test_memory_of_a_v1_cgroup(make_root):
    base = "sys/fs/cgroup/memory/"
    root = make_root(
        {
            **MEMINFO,
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/box\n0::/\n",
            base + "memory.limit_in_bytes": "9223372036854771712\n",
            base + "box/memory.limit_in_bytes": f"{2 * GIB}\n",
            base + "box/memory.usage_in_bytes": f"{GIB}\n",
            base + "box/memory.stat": f"total_inactive_file {GIB // 2}\n",
        }
    )
    assert limits.cgroup_memory(root) == (2 * GIB, 3 * GIB // 2)


def test_a_container_sees_its_cgroup_as_the_root_of_the_mount(make_root):
    # /proc/self/cgroup still names the host's path, which is not mounted here
    root = make_root(
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/kubepods/pod1/box\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        }
    )
    assert limits.cgroup_memory(root) == (GIB, GIB)
    assert limits.cgroup_cpus(root) == 1.5


def test_a_full_cgroup_asks_for_the_option(make_root):
    root = make_root(
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        }
    )
    with pytest.raises(ConfigError, match="--memory"):
        limits.default_memory(root)


def test_a_system_that_tells_nothing_asks_for_the_option(tmp_path):
    with pytest.raises(ConfigError, match="--memory"):
        limits.default_memory(tmp_path)
    assert limits.default_threads(tmp_path, affinity={3, 5}).value == 2


def topology(siblings):
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
        for cpu, text in siblings.items()
    }


def test_threads_are_physical_cores_of_the_affinity_mask(make_root):
    root = make_root(topology({0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2,6", 6: "2,6"}))
    assert limits.default_threads(root, affinity={0, 4, 1, 5, 2, 6}).value == 3
    assert limits.default_threads(root, affinity={0, 1}).value == 2
    # half of a core each: three CPUs, two cores
    assert limits.default_threads(root, affinity={0, 4, 5}).value == 2


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)],
)  # fmt: skip
def test_threads_keep_to_a_v2_quota(make_root, quota, expected):
    root = make_root(
        {
            **topology({cpu: str(cpu) for cpu in range(4)}),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": quota,
        }
    )
    default = limits.default_threads(root, affinity=range(4))
    assert default.value == expected
    assert ("cgroup" in default.reason) == (expected < 4)


@pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("300000", 3)])
def test_threads_keep_to_a_v1_quota(make_root, quota, expected):
    root = make_root(
        {
            **topology({cpu: str(cpu) for cpu in range(4)}),
            "proc/self/cgroup": "3:cpu,cpuacct:/a/b\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        }
    )
    assert limits.default_threads(root, affinity=range(4)).value == expected


def test_this_machine_gives_usable_defaults():
    assert limits.default_memory().value >= 1 << 20
    assert 1 <= limits.default_threads().value <= len(os.sched_getaffinity(0))


HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB/"


def test_reserved_pages_less_those_promised(make_root):
    root = make_root({HUGE + "free_hugepages": "10\n", HUGE + "resv_hugepages": "3\n"})
    assert limits.free_huge_bytes(root) == 7 << 21
    assert limits.page_kind(7 << 21, root) == "reserved 2MiB"
    assert limits.page_kind(8 << 21, root) == limits.page_kind(4096, root) == "small"


def test_how_much_lies_on_transparent_pages(make_root):
    assert limits.transparent_bytes(make_root({})) is None
    root = make_root({"proc/self/smaps_rollup": "Rss: 9 kB\nAnonHugePages:   4096 kB\n"})
    assert limits.transparent_bytes(root) == 4 << 20


@pytest.mark.parametrize("version", [1, 2])
def test_reserved_pages_that_the_cgroup_allows(make_root, version):
    v2 = "sys/fs/cgroup/a/hugetlb.2MB."
    v1 = "sys/fs/cgroup/hugetlb/a/hugetlb.2MB."
    root = make_root(
        {HUGE + "free_hugepages": "100\n", "proc/self/cgroup": "7:hugetlb:/a\n0::/a\n"}
        | ({v1 + "limit_in_bytes": f"{9 << 21}\n", v1 + "usage_in_bytes": f"{4 << 21}\n"}
           if version == 1 else {v2 + "max": f"{9 << 21}\n", v2 + "current": f"{4 << 21}\n"})
    )  # fmt: skip
    assert limits.free_huge_bytes(root) == 5 << 21


@pytest.mark.parametrize("text", ["max", str((1 << 63) - 4096)])
def test_a_cgroup_may_not_limit_reserved_pages(make_root, text):
    root = make_root(
        {HUGE + "free_hugepages": "100\n", "proc/self/cgroup": "0::/\n",
         "sys/fs/cgroup/hugetlb.2MB.max": text + "\n"}
    )  # fmt: skip
    assert limits.free_huge_bytes(root) == 100 << 21


@pytest.mark.parametrize(
    ("mode", "status", "expected"),
    [("always [madvise] never", "", True), ("[always] madvise never", "THP_enabled:\t1\n", True),
     ("always madvise [never]", "", False), ("[always] madvise never", "THP_enabled:\t0\n", False)],
)  # fmt: skip
def test_transparent_pages(make_root, mode, status, expected):
    root = make_root(
        {"sys/kernel/mm/transparent_hugepage/enabled": mode, "proc/self/status": status}
    )
    assert limits.has_transparent_huge_pages(root) == expected
    assert limits.page_kind(1 << 30, root) == ("transparent 2MiB" if expected else "small")
