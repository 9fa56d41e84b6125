"""Whole worker processes on loopback, with real sessions and data planes."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from fastdecode_rdma import cli
from fastdecode_rdma.attention.status_command import read_status
from fastdecode_rdma.config import DEFAULT_PORT
from fastdecode_rdma.errors import ConfigError, WorkerError
from fastdecode_rdma.wire.address import parse_address
from fastdecode_rdma.worker import command

# A whole engine: opens a session, lets a step of 200 tokens allocate memory, then beats for ever.
ENGINE = """
import os, socket, sys, time
import numpy as np
from fastdecode_rdma.config import ENTRY_DTYPE, AttentionGeometry, KVGroup
from fastdecode_rdma.transport.base import plan_slots
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.address import parse_address
from fastdecode_rdma.wire.connection import NEED_DATA, Connection, check_data_accepted, data_hello
from fastdecode_rdma.wire.frame import Frame, FrameKind
from fastdecode_rdma.wire.messages import Role
from fastdecode_rdma.wire.token_file import find_token

geometry = AttentionGeometry(
    (KVGroup((0, 1), 4, 2, 64),), scale=0.125, kv_dtype="fp32", max_rows=256, max_model_len=1024
)

class End:
    def __init__(self, token=None):
        self.sock = socket.create_connection(parse_address(sys.argv[1]), timeout=10)
        self.conn = Connection(Role.ENGINE, now_s=time.monotonic(), token=token)
    def send(self, message):
        for data in self.conn.send(message):
            self.sock.sendall(data)
    def receive(self, kind):
        while True:
            event = self.conn.next_event()
            if event is NEED_DATA:
                data = self.sock.recv(self.conn.bytes_needed())
                self.conn.receive_data(data, now_s=time.monotonic())
            elif not isinstance(event, m.Heartbeat):
                assert isinstance(event, kind), event
                return event

control = End(find_token(None))
control.send(control.conn.hello(os.urandom(32)))
control.receive(m.Hello)
control.send(control.conn.proof())
control.receive(m.Auth)
control.send(m.OpenSession(geometry, plan_slots(geometry)))
opened = control.receive(m.SessionOpened)
data = End()
data.send(data_hello(control.conn.session_key, opened, nonce=b"n" * 32))
accepted = data.receive(m.DataAccepted)
check_data_accepted(accepted, control.conn.session_key, opened, nonce=b"n" * 32)
entries = np.zeros(1, ENTRY_DTYPE)
entries["handle"], entries["q_len"] = 5, 200
payload = entries.tobytes()
frame = Frame(FrameKind.BEGIN_STEP, 0, opened.epoch, 0, step=1, nbytes=len(payload))
data.sock.sendall(frame.encode() + payload)
answer = b""
while len(answer) < 64:
    answer += data.sock.recv(64 - len(answer))
assert Frame.decode(answer).kind == FrameKind.STEP_READY, Frame.decode(answer)
print("holding", flush=True)
while True:
    for part in control.conn.heartbeat(time.monotonic(), progress=1):
        control.sock.sendall(part)
    time.sleep(0.1)
"""
SESSION_KV_BYTES = (4 * 64) * 2 * (2 * 2 * 64) * 4  # tokens in 4 blocks, layers, K and V rows, fp32


class Worker:
    """A worker process that is ready."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        while not self.lines or not self.lines[-1].startswith("ready "):
            line = process.stdout.readline()
            assert line, (self.lines, process.wait(10), process.stderr.read())
            self.lines.append(line.rstrip("\n"))
        self.address = self.lines[-1].split()[1]

    def status(self, token=None):
        return read_status(self.address, token)

    def wait_for_memory(self, nbytes, timeout_s):
        deadline_s = time.monotonic() + timeout_s
        while (status := self.status()).memory_used_bytes > nbytes or (
            nbytes == 0 and status.num_sessions
        ):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.02)

    def stop(self, number):
        """Returns (exit code, seconds it took)."""
        started_s = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(10)
        return code, time.monotonic() - started_s


@pytest.fixture
def spawn(tmp_path):
    processes = []

    def make(arguments, **environ):
        environ = os.environ | {"FASTDECODE_TOKEN_FILE": ""} | environ
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=tmp_path, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.kill()
        process.wait(10)
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def start_worker(spawn):
    def make(*options, **environ):
        defaults = ["--listen", "127.0.0.1:0", "--memory", "64MiB", "--threads", "1"]
        return Worker(
            spawn(["-m", "fastdecode_rdma.cli", "worker", *defaults, *options], **environ)
        )

    return make


@pytest.fixture
def start_engine(spawn):
    def make(worker, **environ):
        engine = spawn(["-c", ENGINE, worker.address], **environ)
        assert engine.stdout.readline() == "holding\n", engine.stderr.read()
        return engine

    return make


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("5a" * 32 + "\n")
    path.chmod(0o600)
    return path


def test_the_ready_line_and_file_and_the_defaults(start_worker, tmp_path):
    ready_file = tmp_path / "ready"
    ready_file.write_text("ready tcp://127.0.0.1:1 of a worker long gone\n")
    worker = start_worker("--ready-file", str(ready_file), FASTDECODE_ISA="baseline")
    _, port = parse_address(worker.address)
    assert port not in (0, DEFAULT_PORT)
    expected = f"ready tcp://127.0.0.1:{port} memory=64MiB threads=1 isa=baseline"
    touched, ready = worker.lines
    assert re.fullmatch(r"pages (small|\w+ 2MiB): 64MiB touched in \d+\.\d s(; the .*)?", touched)
    assert ready == expected
    assert ready_file.read_text() == expected + "\n"
    assert list(tmp_path.iterdir()) == [ready_file]
    assert worker.status().isa == "baseline"


def test_the_defaults_are_printed_before_the_ready_line(spawn):
    worker = Worker(spawn(["-m", "fastdecode_rdma.worker", "--listen", "127.0.0.1:0"]))
    memory, threads, pages, ready = worker.lines
    assert pages.endswith(": taken when needed; pass --memory or --touch to take all now")
    assert memory.startswith("memory ") and ": 80% of " in memory
    assert threads.startswith("threads ") and ": " in threads
    status = worker.status()
    assert f"threads={status.num_threads} " in ready
    assert status.memory_limit_bytes > 1 << 20


SLOW_TOUCH = """
import sys, time
from fastdecode_rdma import pages
pages.populate = lambda address, nbytes: time.sleep(0.2)
from fastdecode_rdma.cli import main
sys.exit(main(["worker", "--listen", "127.0.0.1:0", "--memory", "1GiB", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_while_it_touches_its_memory(spawn, tmp_path, number, code):
    process = spawn(["-c", SLOW_TOUCH, "--touch", "--threads", "1", "--ready-file", "ready"])
    line = process.stderr.readline()  # after a second
    assert re.match(r"touching KV memory: \d+MiB of 1GiB, \d+ s left$", line), line
    started_s = time.monotonic()
    process.send_signal(number)
    assert process.wait(10) == code
    assert time.monotonic() - started_s < 1.0
    assert process.stdout.read() == "" and not (tmp_path / "ready").exists()


def test_memory_is_touched_or_not_as_asked(start_worker):
    [state, _] = start_worker("--no-touch").lines
    assert state.endswith(": taken when needed")
    assert start_worker("--touch").lines[0] != state


def test_starting_takes_no_memory_for_what_is_only_allowed(start_worker):
    def peak_kib(memory):
        worker = start_worker("--memory", memory, "--no-touch")
        with open(f"/proc/{worker.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

    assert peak_kib("4GiB") - peak_kib("64MiB") < 16 << 10


def test_numa_nodes_are_named(start_worker, spawn):
    lists = ";".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    lines = start_worker(FASTDECODE_NUMA_NODES=lists).lines
    named = [line for line in lines if line.startswith("nodes ")]
    # one thread cannot be a team on each
    assert named == (["nodes 1: 2 NUMA nodes are too many for 1 threads"] if ";" in lists else [])
    refused = spawn(
        ["-m", "fastdecode_rdma.worker", "--listen", "127.0.0.1:0"], FASTDECODE_NUMA_NODES="9;9"
    )
    assert refused.wait(10) == 2
    assert "FASTDECODE_NUMA_NODES='9;9': expected `off` or lists" in refused.stderr.read()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_within_a_second_with_a_session_open(
    start_worker, start_engine, number, code
):
    worker = start_worker()
    engine = start_engine(worker)
    assert worker.status().num_sequences == 1
    exit_code, took_s = worker.stop(number)
    assert exit_code == code
    assert took_s < 1.0
    assert worker.process.stderr.read() == ""
    assert engine.wait(5) != 0  # its control connection ended


def test_engines_share_a_worker_and_one_that_is_killed_leaves_its_memory(
    start_worker, start_engine
):
    worker = start_worker()
    first, second = start_engine(worker), start_engine(worker)
    both = worker.status()
    assert both.num_sessions == both.num_sequences == 2
    assert both.memory_used_bytes >= 2 * SESSION_KV_BYTES
    assert both.num_messages == 2
    first.kill()
    worker.wait_for_memory(both.memory_used_bytes // 2, timeout_s=1.0)
    one = worker.status()
    assert (one.num_sessions, one.num_sequences) == (1, 1)
    assert one.memory_used_bytes == both.memory_used_bytes // 2
    second.send_signal(signal.SIGKILL)
    worker.wait_for_memory(0, timeout_s=1.0)
    start_engine(worker)


def test_an_engine_killed_while_the_kernel_works_for_it(start_worker, spawn):
    busy = ENGINE.replace(
        "    time.sleep(0.1)\n",
        """
    sent = globals().get("sent", 0) + 1
    rows = bytes(200 * geometry.row_width(0) * 4)
    attend = Frame(FrameKind.ATTEND, 0, opened.epoch, sent, step=1, rows=200, nbytes=len(rows))
    data.sock.sendall(attend.encode() + rows)
    left = 64 + 200 * (geometry.out_width(0) * 4 + 1)
    while left:
        left -= len(data.sock.recv(left))
""",
    )
    worker = start_worker()
    for delay_s in (0.05, 0.11, 0.17):
        engine = spawn(["-c", busy, worker.address])
        assert engine.stdout.readline() == "holding\n", engine.stderr.read()
        before = worker.status().num_messages
        time.sleep(delay_s)
        assert engine.poll() is None, engine.stderr.read()
        assert worker.status().num_messages > before
        engine.kill()
        worker.wait_for_memory(0, timeout_s=1.0)


def test_an_engine_that_is_frozen_is_given_up(start_worker, start_engine):
    worker = start_worker()
    engine = start_engine(worker)
    engine.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    assert worker.status().num_sessions == 1
    worker.wait_for_memory(0, timeout_s=2.5)


def test_random_bytes_on_its_port(start_worker, start_engine):
    worker = start_worker()
    engine = start_engine(worker)
    dice = random.Random(3)
    address = parse_address(worker.address)
    for _ in range(100):
        with socket.create_connection(address, timeout=5) as sock:
            sock.sendall(dice.choice((b"", b"FD", b"FD\1\0\x2b\0\0\0")) + dice.randbytes(99))
    slow = [socket.create_connection(address, timeout=5) for _ in range(80)]
    status = worker.status()
    assert (status.num_sessions, status.num_sequences) == (1, 1)
    for sock in slow:
        sock.close()
    assert engine.poll() is None
    assert worker.stop(signal.SIGTERM)[0] == 0
    assert worker.process.stderr.read() == ""


def test_random_frames_on_a_data_socket_end_that_session_only(start_worker, start_engine, spawn):
    worker = start_worker()
    start_engine(worker)
    wild = ENGINE.replace('print("holding"', 'data.sock.sendall(os.urandom(640)); print("holding"')
    engine = spawn(["-c", wild, worker.address])
    assert engine.stdout.readline() == "holding\n", engine.stderr.read()
    deadline_s = time.monotonic() + 2.0
    while worker.status().num_sessions != 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert worker.status().num_sequences == 1


def test_tokens_of_a_real_worker(start_worker, start_engine, spawn, token_file, tmp_path):
    worker = start_worker("--token-file", str(token_file))
    start_engine(worker, FASTDECODE_TOKEN_FILE=str(token_file))
    stranger = spawn(["-c", ENGINE, worker.address])
    _, errors = stranger.communicate(timeout=20)
    assert "demands a token and none was given" in errors
    other = tmp_path / "other"
    other.write_text("00" * 32)
    other.chmod(0o600)
    status = ["-m", "fastdecode_rdma.cli", "status", "--workers", worker.address]
    process = spawn([*status, "--token-file", str(other)])
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "tokens of engine and worker differ" in output
    assert "5a5a" not in output + errors and "0000" not in output + errors
    process = spawn(status, FASTDECODE_TOKEN_FILE=str(token_file))
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    header, row = output.splitlines()
    assert header.split()[0] == "worker" and row.split()[0] == worker.address
    with pytest.raises(WorkerError, match="demands a token"):
        worker.status()


def test_status_of_several_workers(start_worker, spawn):
    worker = start_worker()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        arguments = ["-m", "fastdecode_rdma.cli", "status", "--workers"]
        process = spawn([*arguments, f"{worker.address},{nobody}", "--json"])
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 1 and errors == ""
        good, bad = json.loads(output)
        assert good["error"] is None and good["memory_limit_bytes"] == 64 << 20
        assert bad["address"] == nobody and "Connection refused" in bad["error"]
        process = spawn([*arguments, f"{worker.address},{nobody}"])
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert output.splitlines()[2].startswith(nobody) and "unreachable" in output


def test_it_runs_with_numpy_alone(spawn, start_engine):
    # what an engine needs is hidden, and whatever else was loaded is reported at the end
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "transformers", "tokenizers", "gguf",
                                      "safetensors", "jinja2", "tqdm", "Cython", "psutil"}:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Hidden())
from fastdecode_rdma.cli import main
code = main(["worker", "--listen", "127.0.0.1:0", "--memory", "64MiB", "--threads", "1"])
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
sys.exit(code)
"""
    worker = Worker(spawn(["-c", code]))
    start_engine(worker)
    assert worker.status().num_sequences == 1
    code, _ = worker.stop(signal.SIGTERM)
    loaded = set(worker.process.stdout.read().split())
    assert code == 0
    assert {"numpy", "fastdecode_rdma"} <= loaded
    assert not loaded & {"torch", "triton", "transformers", "tokenizers", "safetensors"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0"], "can be reached from other machines: pass --token-file"),
        (["--listen", ":0"], "0.0.0.0 can be reached from other machines"),
        (["--listen", "[::]:0"], ":: can be reached from other machines: pass --token-file"),
        (["--listen", "[::ffff:0.0.0.0]:0"], "::ffff:0.0.0.0 can be reached from other machines"),
        (["--listen", "127.0.0.1:0", "--token-file", ""], "name of the token file is empty"),
        (["--listen", "127.0.0.1:http"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--memory", "lots"], "cannot read 'lots' as memory"),
        (["--listen", "127.0.0.1:0", "--threads", "0"], "--threads must be from 1 to 1024, got 0"),
        (["--listen", "127.0.0.1:0", "--threads", "two"], "invalid int value: 'two'"),
        (["--listen", "127.0.0.1:0", "--token-file", "/nowhere"], "cannot read token file"),
        (["--listen", "127.0.0.1:0", "--token-file", "x", "--insecure"], "not allowed with"),
        (["--listen", "203.0.113.7:0", "--insecure"], "cannot listen on 203.0.113.7:0"),
        (["--listen", "127.0.0.1:0", "--ready-file", "/nowhere/ready"], "cannot write ready file"),
        (["--lisen", "127.0.0.1:0"], "unrecognized arguments: --lisen"),
    ],
)
def test_bad_arguments_are_one_clear_line(options, words, capsys, monkeypatch):
    monkeypatch.delenv("FASTDECODE_TOKEN_FILE", raising=False)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(command, "prepare_environment", lambda environ: None)
    assert cli.main(["worker", *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("fastdecode: error: ") and captured.err.count("\n") == 1
    assert "ready " not in captured.out


def test_an_unknown_isa_is_one_clear_line(capsys, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", "mmx")
    monkeypatch.setattr(command, "prepare_environment", lambda environ: None)
    assert cli.main(["worker", "--listen", "127.0.0.1:0"]) == 2
    assert "FASTDECODE_ISA='mmx'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("127.1", True),
        ("::ffff:127.0.0.1", True),  # IPv4's loopback, to an IPv6 socket
        ("0.0.0.0", False),
        ("0", False),
        ("::", False),
        ("::ffff:0.0.0.0", False),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("2001:db8::1", False),
    ],
)
def test_loopback(host, expected):
    addresses = command.resolve(host)
    assert addresses and all(command.is_loopback(each) for each in addresses) is expected


def test_a_link_local_address_keeps_its_interface():
    assert command.resolve("fe80::1%lo") == ("fe80::1%lo",)
    assert not command.is_loopback("fe80::1%lo")


@pytest.fixture
def names(monkeypatch):
    """Makes host names resolve to given addresses; numbers resolve as ever."""
    table = {}
    real = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        return [real(a, port, *args, **kwargs)[0] for a in table.get(host, [host])]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return table


def access(host, **options):
    options = {"token_file": None, "insecure": False} | options
    return command.find_access(argparse.Namespace(**options), host, command.resolve(host))


def test_a_name_is_what_it_resolves_to(names, monkeypatch):
    monkeypatch.delenv("FASTDECODE_TOKEN_FILE", raising=False)
    names["here"] = ["127.0.0.1", "::1"]
    names["there"] = ["10.0.0.1"]
    names["both"] = ["127.0.0.1", "10.0.0.1"]
    assert access("here") is None
    for host in ("there", "both"):
        with pytest.raises(ConfigError, match=f"{host} can be reached from other machines"):
            access(host)


def test_a_name_is_resolved_once(names, monkeypatch, capsys):
    # else a name that changes between the check and the bind would open the worker to everybody
    monkeypatch.delenv("FASTDECODE_TOKEN_FILE", raising=False)
    asked = []
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: asked.append(host) or real(host, *a, **k)
    )
    names["moving"] = ["127.0.0.1"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--listen", "moving:0", "--memory", "1MiB", "--threads", "1"])
    server = command.make_server(args)
    try:
        assert asked.count("moving") == 1 and server.address[0] == "127.0.0.1"
    finally:
        server.close(1.0)


def test_access(token_file, monkeypatch):
    monkeypatch.delenv("FASTDECODE_TOKEN_FILE", raising=False)
    assert access("127.0.0.1") is None
    assert access("0.0.0.0", insecure=True) is None
    assert access("0.0.0.0", token_file=str(token_file)) == b"\x5a" * 32
    with pytest.raises(ConfigError, match="--insecure"):
        access("0.0.0.0")
    for host in ("127.0.0.1", "0.0.0.0"):  # `--token-file "$UNSET"` must not mean: without one
        with pytest.raises(ConfigError, match="name of the token file is empty"):
            access(host, token_file="")
    monkeypatch.setenv("FASTDECODE_TOKEN_FILE", str(token_file))
    assert access("127.0.0.1") == access("0.0.0.0") == b"\x5a" * 32
    assert access("0.0.0.0", insecure=True) is None  # an explicit word wins
    monkeypatch.setenv("FASTDECODE_TOKEN_FILE", "/nowhere")
    assert access("0.0.0.0", token_file=str(token_file)) == b"\x5a" * 32  # and so does this one
    with pytest.raises(ConfigError, match="FASTDECODE_TOKEN_FILE"):
        access("127.0.0.1")


def test_numpys_blas_starts_no_threads_unless_the_user_says_otherwise():
    environ = {}
    command.prepare_environment(environ)
    assert environ == {"OPENBLAS_NUM_THREADS": "1"}
    command.prepare_environment(chosen := {"OPENBLAS_NUM_THREADS": "4"})
    assert chosen == {"OPENBLAS_NUM_THREADS": "4"}


def test_the_documented_default_address():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parse_address(parser.parse_args([]).listen) == ("127.0.0.1", DEFAULT_PORT)
