"""Bindings, limits and what two ends tell each other, without a device."""

from __future__ import annotations

import builtins
import errno
import json
import resource
from dataclasses import replace
from enum import IntFlag
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdecode_rdma.errors import ConfigError, RemoteProtocolError, TransportError
from fastdecode_rdma.transport import (
    open_hosts,
    rdma,
    rdma_bindings,
    rdma_ibverbs,
    rdma_limits,
)
from fastdecode_rdma.transport.address import parse_url
from fastdecode_rdma.transport.rdma_bindings import Binding, find_binding, install_command
from fastdecode_rdma.transport.rdma_endpoint import Offer
from fastdecode_rdma.transport.rdma_ends import (
    MAX_OFFER_BYTES,
    EngineEnd,
    Machine,
    WorkerEnd,
    offer_ports,
)
from fastdecode_rdma.transport.rdma_facts import find_rdma, format_rdma
from fastdecode_rdma.transport.rdma_limits import (
    MEMORY_BYTES,
    check_limits,
    explain_failure,
    memlock_text,
)
from fastdecode_rdma.transport.rdma_ports import ROCE2, Gid, Port, decode_ports
from fastdecode_rdma.transport.rdma_transport import RdmaTransport
from fastdecode_rdma.transport.rdma_wish import Wish
from fastdecode_rdma.transport.same_host import SPIN_NS

LIMITS = {"max_mr_size": 1 << 40, "max_qp_wr": 1 << 14, "max_cqe": 1 << 14}
OFFER = Offer(qp_num=17, psn=5, mtu=5, address=1 << 40, rkey=77)
GID = Gid(3, "::ffff:10.0.0.1", ROCE2)
HERE = Machine("boot", b"\x03")


# ---- bindings ----


@pytest.fixture
def bindings(monkeypatch):
    """Sets which bindings load; the others say why they do not."""

    def choose(*working: str) -> None:
        def loader(name: str):
            def load() -> Binding:
                if name in working:
                    return Binding(name, "1", lambda device: None)
                raise TransportError(f"{name} is broken")

            return load

        monkeypatch.setattr(
            rdma_bindings, "_LOADERS", {name: loader(name) for name in ("native", "pyverbs")}
        )

    return choose


@pytest.mark.parametrize(
    ("working", "forced", "name"),
    [
        (("native", "pyverbs"), "", "native"),
        (("pyverbs",), "", "pyverbs"),
        (("native", "pyverbs"), "pyverbs", "pyverbs"),
    ],
)
def test_the_first_binding_that_works(bindings, working, forced, name):
    bindings(*working)
    assert find_binding({"FASTDECODE_VERBS": forced}).name == name


def test_without_a_binding_each_reason_and_a_command(bindings):
    bindings()
    with pytest.raises(TransportError, match="native is broken; pyverbs is broken; run `"):
        find_binding({})


def test_a_forced_binding_is_strict(bindings):
    bindings("native")
    with pytest.raises(TransportError, match="pyverbs is broken"):
        find_binding({"FASTDECODE_VERBS": "pyverbs"})
    with pytest.raises(ConfigError, match="must be one of native, pyverbs, got 'mine'"):
        find_binding({"FASTDECODE_VERBS": "mine"})


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=debian\n", "apt install libibverbs-dev"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "apt install"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install rdma-core-devel"),
        ("ID=alpine\n", "apk add"),
        ("ID=plan9\n", "install libibverbs with its headers"),
    ],
)
def test_the_command_is_this_systems(tmp_path: Path, release, command):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(release)
    assert install_command(tmp_path).startswith(command)
    assert install_command(tmp_path / "nowhere").startswith("install libibverbs")


def test_pyverbs_that_is_not_there_is_a_typed_error(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("pyverbs"):
            raise ModuleNotFoundError("No module named 'pyverbs'", name="pyverbs")
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("fastdecode_rdma.transport.rdma.import_module", lambda name: without(name))
    with pytest.raises(TransportError, match="pyverbs cannot be imported: No module"):
        find_binding({"FASTDECODE_VERBS": "pyverbs"})


@pytest.mark.parametrize(
    ("enums", "value"),
    [
        (("enums",), 1),  # rdma-core 44
        (("libibverbs_enums",), 2),  # 57, 59
        (("enums", "libibverbs_enums"), 2),  # the new place wins: the old one is a shim for it
        ((), None),
    ],
)
def test_pyverbs_constants_are_found_where_this_version_has_them(monkeypatch, enums, value):
    numbers = {"enums": 1, "libibverbs_enums": 2}

    def fake(name: str) -> SimpleNamespace:
        part = name.removeprefix("pyverbs.")
        if part in rdma.MODULES:
            return SimpleNamespace(**{f"From_{part}": part, "_hidden": 0})
        if part in enums:
            if part == "enums":
                return SimpleNamespace(IBV_QPT_RC=numbers[part], __file__="enums.so")
            return SimpleNamespace(
                ibv_qp_type=IntFlag("ibv_qp_type", {"IBV_QPT_RC": numbers[part]})
            )
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(rdma, "import_module", fake)
    if value is None:
        with pytest.raises(TransportError, match="neither libibverbs_enums nor enums"):
            rdma.load_pyverbs()
        return
    found = rdma.load_pyverbs()
    assert vars(found.e) == {"IBV_QPT_RC": value}
    assert {name for name in vars(found) if name != "e"} == {f"From_{it}" for it in rdma.MODULES}


def test_pyverbs_for_another_libibverbs_is_a_typed_error(monkeypatch):
    def fake(name: str):
        raise ImportError("libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found")

    monkeypatch.setattr(rdma, "import_module", fake)
    with pytest.raises(TransportError, match="pyverbs cannot be imported: libibverbs"):
        rdma.load_pyverbs()


@pytest.mark.parametrize(
    ("error", "number", "text"),
    [
        (
            type("RDMAError", (Exception,), {"error_code": errno.ENOMEM})("x"),
            errno.ENOMEM,
            "Cannot",
        ),
        (type("UserError", (Exception,), {})("no such attribute"), None, "no such attribute"),
        (PermissionError(errno.EACCES, "as it was"), errno.EACCES, "as it was"),
    ],
)
def test_errors_of_pyverbs_are_those_of_the_system(error, number, text):
    with pytest.raises(OSError, match=text) as caught, rdma._doing("registering memory"):
        raise error
    assert caught.value.errno == number


def test_ibverbs_that_is_not_there_or_finds_no_library_is_a_typed_error(monkeypatch):
    def fake(name: str):
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(rdma_ibverbs, "import_module", fake)
    with pytest.raises(TransportError, match="ibverbs cannot be imported: libibverbs"):
        find_binding({"FASTDECODE_VERBS": "ibverbs"})


# ---- limits ----


def status(root: Path, **fields: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    lines = [f"{name}:\t{value}\n" for name, value in fields.items()]
    (root / "proc/self/status").write_text("".join(lines))
    return root


@pytest.fixture
def limit(monkeypatch):
    def set_limit(soft: int, hard: int = -1) -> None:
        monkeypatch.setattr(rdma_limits.resource, "getrlimit", lambda what: (soft, hard))

    return set_limit


def test_memlock_gives_both_figures_and_the_fix(tmp_path, limit):
    root = status(tmp_path, CapEff="0000000000000000", VmPin="     512 kB", VmLck="0 kB")
    limit(65536, 1 << 20)
    text = memlock_text(MEMORY_BYTES, root)
    assert text == (
        "RDMA needs 4096 KiB of locked memory beside 512 KiB that are locked, RLIMIT_MEMLOCK "
        "allows 64 KiB (hard limit 1024 KiB): raise it with `ulimit -l unlimited`, in a service "
        "with LimitMEMLOCK=infinity, in a container with --ulimit memlock=-1"
    )
    with pytest.raises(TransportError) as caught:
        check_limits("mlx5_0:1", LIMITS, nbytes=MEMORY_BYTES, depth=64, receives=20, root=root)
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize(
    ("soft", "capabilities"),
    [(resource.RLIM_INFINITY, "0"), (8 << 20, "0"), (65536, "0000000000004000")],
)
def test_memlock_that_suffices_or_does_not_matter(tmp_path, limit, soft, capabilities):
    limit(soft)
    root = status(tmp_path, CapEff=capabilities)
    assert memlock_text(MEMORY_BYTES, root) is None
    check_limits("mlx5_0:1", LIMITS, nbytes=MEMORY_BYTES, depth=64, receives=20, root=root)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_mr_size": 1 << 20}, "allows 1048576 bytes in one registration, 4194304 are needed"),
        ({"max_qp_wr": 32}, "allows 32 requests in a queue, 64 are needed"),
        ({"max_cqe": 80}, "allows 80 completions in a queue, 84 are needed"),
    ],
)
def test_device_limits_are_another_error(tmp_path, limit, limits, words):
    limit(resource.RLIM_INFINITY)
    with pytest.raises(TransportError, match=f"mlx5_0:1 {words}"):
        check_limits(
            "mlx5_0:1",
            {**LIMITS, **limits},
            nbytes=MEMORY_BYTES,
            depth=64,
            receives=20,
            root=tmp_path,
        )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOMEM, "4096 KiB besides the queues, RLIMIT_MEMLOCK is"),
        (errno.EACCES, "may not open /dev/infiniband"),
        (errno.ENODEV, "pass /dev/infiniband through"),
        (errno.EINVAL, "mlx5_0:1: making a queue pair: Invalid argument"),
    ],
)
def test_what_a_device_refuses_is_explained(number, words):
    error = OSError(number, f"making a queue pair: {errno.errorcode[number]}")
    text = "Invalid argument" if number == errno.EINVAL else error.args[1]
    found = explain_failure(
        "mlx5_0:1", OSError(number, f"making a queue pair: {text}"), MEMORY_BYTES
    )
    assert words in str(found)
    assert "no device" not in str(found)
    assert found.errno == number


# ---- what two ends tell each other ----


def engine_end(**changes: object) -> EngineEnd:
    end = EngineEnd("mlx5_0", 1, 3, GID, 9, OFFER, Wish(mtu=1024, tclass=8), HERE)
    return replace(end, **changes)


def test_ends_arrive_as_they_were_sent():
    assert EngineEnd.decode(engine_end().encode()) == engine_end()
    unset = engine_end(wish=Wish())
    assert EngineEnd.decode(unset.encode()) == unset
    worker = WorkerEnd(OFFER, HERE, "native")
    assert WorkerEnd.decode(worker.encode()) == worker


def test_ends_fit_into_their_messages():
    """DATA_HELLO and DATA_ACCEPTED take 768 bytes."""
    machine = Machine("0" * 36, b"\xff" * 128)
    offer = Offer((1 << 24) - 1, (1 << 24) - 1, 5, (1 << 64) - 1, (1 << 32) - 1)
    gid = Gid(65535, "2001:db8:1111:2222:3333:4444:5555:6666", ROCE2)
    longest = engine_end(device="x" * 63, gid=gid, offer=offer, machine=machine)
    assert len(longest.encode()) <= 768
    assert len(WorkerEnd(offer, machine, "pyverbs").encode()) <= 768


def broken(end: EngineEnd | WorkerEnd, **changes: object) -> bytes:
    return json.dumps({**json.loads(end.encode()), **changes}).encode()


WORKER_END = WorkerEnd(OFFER, HERE, "native")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 5000,
        b"[]",
        b'{"use":1}',
        broken(engine_end(), use=["a", 1]),
        broken(engine_end(), gid=[1, "nonsense", ROCE2]),
        broken(engine_end(), offer={}),
        broken(engine_end(), offer={**OFFER.encode(), "qp_num": 1 << 24}),
        broken(engine_end(), offer={**OFFER.encode(), "mtu": 9}),
        broken(engine_end(), offer={**OFFER.encode(), "surprise": 9}),
        broken(engine_end(), wish={"retry": 7}),
        broken(engine_end(), wish={"colour": 7}),
        broken(engine_end(), wish=7),
        broken(engine_end(), machine=["x", "zz"]),
    ],
)
def test_a_malformed_end_of_the_engine(data):
    with pytest.raises(RemoteProtocolError, match="malformed"):
        EngineEnd.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7",
        broken(WORKER_END, offer=7),
        broken(WORKER_END, binding="a\nb"),
        broken(WORKER_END, machine=None),
    ],
)
def test_a_malformed_end_of_the_worker(data):
    with pytest.raises(RemoteProtocolError, match="malformed"):
        WorkerEnd.decode(data)


def test_slots_of_another_version_are_named():
    data = broken(WORKER_END, offer={**OFFER.encode(), "num_slots": 32})
    with pytest.raises(RemoteProtocolError, match=r"32 slots of .* run the same version on both"):
        WorkerEnd.decode(data)


def test_spinning_only_with_cores_of_ones_own():
    assert HERE.spin_ns(Machine("boot", b"\x0c")) == SPIN_NS
    assert HERE.spin_ns(Machine("boot", b"\x02")) == 0
    assert HERE.spin_ns(Machine("elsewhere", b"\x02")) == SPIN_NS


def test_long_gid_tables_are_cut_to_fit():
    gids = tuple(Gid(i, f"::ffff:10.0.{i}.1", ROCE2, "eth0") for i in range(128))
    ports = [Port(f"mlx5_{i}", 1, "Ethernet", "ACTIVE", 100, gids=gids) for i in range(8)]
    data = offer_ports(ports)
    assert len(data) <= MAX_OFFER_BYTES
    found = decode_ports(data)
    assert len(found) == 8
    assert all(port.gids == gids[: len(port.gids)] and len(port.gids) > 8 for port in found)
    assert offer_ports(ports[:1]) == offer_ports(ports[:1])
    assert decode_ports(offer_ports(ports[:1]))[0].gids == gids


# ---- a machine without a device ----


@pytest.fixture
def no_device(monkeypatch):
    for room in ("rdma_transport", "rdma_host", "rdma_facts"):
        monkeypatch.setattr(f"fastdecode_rdma.transport.{room}.read_ports", lambda *_, **__: [])


def test_no_device_is_a_reason_not_a_crash(no_device):
    address = parse_url("rdma://host")
    reason = RdmaTransport.why_not(address, b"[]")
    assert reason == "this machine has no usable RDMA port: no RDMA device"
    assert "rdma" not in [host.name for host in open_hosts()]


def test_a_named_device_is_strict_without_one(no_device):
    with pytest.raises(ConfigError, match=r"dev=mlx5_0: no device 'mlx5_0'; .* no RDMA device"):
        RdmaTransport.why_not(parse_url("rdma://host?dev=mlx5_0"), None)


def test_doctor_names_ports_bindings_and_the_command(bindings, monkeypatch):
    bindings("pyverbs")
    ports = [
        Port("mlx5_0", 1, "Ethernet", "ACTIVE", 100, numa_node=1, gids=(GID,)),
        Port("mlx5_1", 1, "Ethernet", "DOWN", 100),
    ]
    monkeypatch.setattr("fastdecode_rdma.transport.rdma_facts.read_ports", lambda *_, **__: ports)
    facts = find_rdma()
    assert facts["usable"] and facts["binding"] == "pyverbs"
    line = format_rdma({**facts, "memlock": None})
    assert line == (
        "mlx5_0:1 (RoCE, ACTIVE, 100 Gb/s, NUMA 1), mlx5_1:1: the port is DOWN, not ACTIVE: check "
        "the cable and `ip link`; native: native is broken; pyverbs: 1 (used)"
    )
    bindings()
    facts = find_rdma()
    assert not facts["usable"]
    assert f"; `{install_command()}`" in format_rdma(facts)


def test_doctor_tells_a_machine_without_a_device_what_is_there(bindings, no_device):
    bindings()
    line = format_rdma({**find_rdma(), "memlock": None})
    assert line == (
        "no device; native: native is broken; pyverbs: pyverbs is broken; for a machine with a "
        f"device: `{install_command()}`"
    )
    bindings("native")
    assert format_rdma(find_rdma()).startswith("no device; native: 1 (used); pyverbs: ")
