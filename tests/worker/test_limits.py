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
