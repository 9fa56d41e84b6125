from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from fastdecode_rdma import __version__, cli, doctor, numa
from fastdecode_rdma.worker import machinery


@pytest.fixture
def make_root(tmp_path):
    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def test_it_tells_what_will_be_used_here(capsys):
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    for word in (__version__, "torch", "kernel", "memlock", "NUMA", "RDMA", "use: attention"):
        assert word in output
    assert "use: transport     shm" in output


def test_json_has_the_same_facts(capsys, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", "baseline")
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kernel"]["isa"] == facts["kernel"]["forced"] == "baseline"
    assert "baseline" in facts["kernel"]["available"]
    assert facts["python"]["fastdecode_rdma"] == __version__
    assert 1 <= facts["threads"]["default"] <= len(os.sched_getaffinity(0))
    assert facts["used"]["attention"].startswith("baseline kernel")


def with_kernels(monkeypatch, chosen, available):
    """A build with a kernel that nobody has tried, on a CPU that can run `available`."""
    facts = machinery.KernelFacts(chosen, ("neon", "baseline"), available, 64, 1024)
    monkeypatch.setattr(machinery, "kernel_facts", lambda: facts)
    facts = doctor.find_all()
    return facts["kernel"], doctor.format_lines(facts)


def test_kernels_that_nobody_has_tried_are_off_and_said_so(monkeypatch):
    monkeypatch.delenv("FASTDECODE_ISA", raising=False)
    kernel, lines = with_kernels(monkeypatch, "baseline", ("neon", "baseline"))
    assert kernel["built"] == kernel["available"] == ["neon", "baseline"]
    assert kernel["off"] == ["neon"]
    assert "built for neon, baseline" in lines and "chosen baseline\n" in lines
    assert "its tests on such a processor; FASTDECODE_ISA=neon turns it on" in lines
    _, lines = with_kernels(monkeypatch, "baseline", ("baseline",))
    assert "this CPU runs baseline; chosen baseline\n" in lines
    assert "its tests on such a processor; this CPU cannot run it" in lines
    monkeypatch.setenv("FASTDECODE_ISA", "neon")
    kernel, lines = with_kernels(monkeypatch, "neon", ("neon", "baseline"))
    assert kernel["off"] == [] and "chosen neon (FASTDECODE_ISA=neon)\n" in lines


def test_an_isa_that_cannot_run_is_reported_not_raised(capsys, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", "mmx")
    assert cli.main(["doctor"]) == 0
    assert "FASTDECODE_ISA='mmx'" in capsys.readouterr().out


def test_without_torch_it_works_and_says_who_needs_it(tmp_path):
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Hidden())
from fastdecode_rdma.cli import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "missing (No module named 'torch'; fine for a worker" in done.stdout
    assert "use: dense layers  none: torch is missing" in done.stdout


def test_a_missing_kernel_is_reported_not_raised(monkeypatch):
    def missing(name):
        raise ImportError("compiled kernels not found: run `pip install -e .`")

    monkeypatch.setattr(doctor, "import_module", missing)
    facts = doctor.find_kernel()
    assert facts["isa"] is None and "pip install" in facts["note"]
    facts = doctor.find_all()  # torch is missing by the same trick
    assert "pip install -e ." in doctor.format_lines(facts)
    assert facts["used"]["attention"] == "none: the compiled kernel is missing"


def test_a_machine_with_everything(make_root):
    root = make_root(
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "9\n",
            "proc/meminfo": "MemAvailable: 1048576 kB\nHugePages_Total:      12\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "536870912\n",
            "sys/fs/cgroup/memory.current": "0\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
            "sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
            "dev/infiniband/uverbs0": "",
        }
    )
    huge = {"transparent": "madvise", "reserved": 12, "free_bytes": 9 << 21}
    assert doctor.find_huge_pages(root) == huge | {"used": "transparent 2MiB"}
    nodes = {"node0": "0-3", "node1": "4-7"}
    assert doctor.find_numa(root) == {"nodes": nodes, "used": [], "note": None}
    assert doctor.find_verbs(root) == {"devices": ["mlx5_0"], "openable": True}
    assert doctor.find_threads(root)["cgroup_cpus"] == 1.5
    memory = doctor.find_memory(root)
    assert memory["cgroup_limit"] == memory["cgroup_left"] == 1 << 29
    assert memory["default"] == int(0.8 * (1 << 29))


def test_a_machine_with_nothing(tmp_path):
    huge = {"transparent": None, "reserved": 0, "free_bytes": 0, "used": "small"}
    assert doctor.find_huge_pages(tmp_path) == huge
    assert doctor.find_numa(tmp_path) == {"nodes": {}, "used": [], "note": None}
    assert doctor.find_verbs(tmp_path) == {"devices": [], "openable": False}
    assert doctor.find_memory(tmp_path)["default"] is None
    assert doctor.find_threads(tmp_path)["default"] >= 1


def test_numa_nodes_that_are_used(make_root, monkeypatch):
    one = min(os.sched_getaffinity(0))
    files = {"sys/devices/system/node/node0/cpulist": f"{one}\n"}
    root = make_root(files | {"sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 9 kB\n"})
    assert doctor.find_numa(root)["used"][0].startswith(str(one))
    monkeypatch.setenv("FASTDECODE_NUMA_NODES", "none")
    facts = doctor.find_numa(root)
    assert facts["used"] == [] and "FASTDECODE_NUMA_NODES" not in facts["nodes"]
    assert "'none'" in facts["note"]
    nodes = (numa.Node(0, (0,)), numa.Node(1000, (1,)))
    monkeypatch.setattr(numa, "find_nodes", lambda root: nodes)
    facts = doctor.find_numa(root)
    assert facts["used"] == ["0", "1"] and "mbind to NUMA node 1000" in facts["note"]
    line = doctor._numa_line(facts)
    assert "a pool and a team each for CPUs 0, 1; mbind" in line


def test_an_unlimited_memlock_is_told_from_a_number(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8192, resource.RLIM_INFINITY))
    assert doctor.find_memlock() == {"soft": 8192, "hard": None}


def test_the_way_to_workers_is_measured_in_both_directions(start_workers, capsys):
    (worker,) = start_workers(1, memory="64MiB")
    assert cli.main(["doctor", "--json", "--workers", worker.address]) == 0
    (path,) = json.loads(capsys.readouterr().out)["paths"]
    assert (path["worker"], path["plane"], path["error"]) == (worker.address, "tcp", "")
    assert path["latency_usec"] > 0 and path["to_gbit_per_s"] > 0 and path["from_gbit_per_s"] > 0
    nobody = "tcp://127.0.0.1:9"
    assert cli.main(["doctor", "--workers", f"{nobody},{worker.address}"]) == 1
    out = capsys.readouterr().out
    assert "cannot connect: Connection refused" in out and "Gb/s there, " in out
