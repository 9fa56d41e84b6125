"""Virtual machines that run one command each on the host's own file system, with Soft-RoCE."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from image import HERE, say

NO_GUEST = 125
TIMED_OUT = 124
_KVM_CREATE_VM = 0xAE01


@dataclass(frozen=True)
class Plan:
    """What the guests run and on what machine."""

    command: Sequence[str]
    environ: Mapping[str, str]
    cwd: str
    shared_dir: str | None  # read-write in the guests; all else is thrown away
    two: bool
    timeout_s: float
    memory_mib: int
    cpus: int
    mtu: int  # of eth0; 9000 gives an RDMA MTU of 4096, 1500 one of 1024
    accel: str  # auto, kvm or tcg
    verbose: bool


def kvm_works() -> bool:
    """True if KVM runs a stock kernel at speed. Without the processor's help (seen inside cloud
    machines) it creates guests but emulates their kernels, far slower than qemu itself does."""
    if not {"vmx", "svm"} & set(Path("/proc/cpuinfo").read_text().split()):
        return False
    try:
        fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(fcntl.ioctl(fd, _KVM_CREATE_VM, 0))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _die_with_parent() -> None:
    """Between fork and exec of qemu: it must not outlive this process."""
    os.setpgid(0, 0)  # the terminal's ^C is ours to handle
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Guest:
    """One machine: its qemu process and the threads that carry its output."""

    _output_lock = threading.Lock()

    def __init__(self, node: int, plan: Plan, image: Path, run: Path) -> None:
        self.node = node
        self.ready = False
        self.rc: int | None = None
        self.prefix = f"[{node}] ".encode() if plan.two else b""
        self.dir = run / f"guest{node}"
        self.dir.mkdir()
        self.console = self.dir / "console"
        control = self.dir / "ctl"
        control.mkdir()
        self._write_control(control, plan)
        pipes = {name: os.pipe() for name in ("out", "err", "ctl")}
        argv = self._machine(plan, image, run, control)
        for name, (_, write_end) in pipes.items():  # each a virtio-serial port into a pipe
            argv += ["-chardev", f"file,id={name},append=on,path=/proc/self/fd/{write_end}"]
            argv += ["-device", f"virtserialport,chardev={name},name={name}"]
        self.log = (self.dir / "qemu.log").open("w+b")
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[write_end for _, write_end in pipes.values()],
            preexec_fn=_die_with_parent,
        )
        self.threads = []
        for name, (read_end, write_end) in pipes.items():
            os.close(write_end)
            target = {"out": sys.stdout.buffer, "err": sys.stderr.buffer, "ctl": None}[name]
            thread = threading.Thread(target=self._carry, args=(read_end, target), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _write_control(self, control: Path, plan: Plan) -> None:
        address = f"192.0.2.{self.node + 1}"
        settings = {
            "node": self.node,
            "nodes": 2 if plan.two else 1,
            "ip": address,
            "mtu": plan.mtu,
            "peer": f"192.0.2.{2 - self.node}" if plan.two else address,
            "hostdir": plan.shared_dir or "",
            "cwd": plan.cwd,
        }
        lines = [f"{key}={shlex.quote(str(value))}\n" for key, value in settings.items()]
        (control / "settings").write_text("".join(lines))
        (control / "stage2").write_text((HERE / "stage2.sh").read_text())
        skipped = ("PWD", "OLDPWD", "SHLVL")
        lines = [
            f"export {key}={shlex.quote(value)}\n"
            for key, value in plan.environ.items()
            if key.isidentifier() and key not in skipped
        ]
        (control / "env").write_text("".join(lines))
        (control / "job").write_text("exec " + shlex.join(plan.command) + "\n")

    def _machine(self, plan: Plan, image: Path, run: Path, control: Path) -> list[str]:
        kvm = plan.accel == "kvm" or (plan.accel == "auto" and kvm_works())

        def share(tag: str, path: str, mode: str) -> list[str]:
            place = path.replace(",", ",,")
            common = f"local,id={tag},path={place},security_model=none,multidevs=remap{mode}"
            return ["-fsdev", common, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

        net = "hubport,id=net,hubid=0"  # a plug with nothing behind it
        if plan.two:  # a pair of Unix sockets: no packet reaches a network of this machine
            place = str(run).replace(",", ",,")
            net = (
                f"dgram,id=net,local.type=unix,local.path={place}/net{self.node},"
                f"remote.type=unix,remote.path={place}/net{1 - self.node}"
            )
        card = f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:0{self.node + 1}"
        argv = ["qemu-system-x86_64", "-name", f"rdma_vm{self.node}", "-nodefaults"]
        argv += ["-no-user-config", "-machine", "q35", "-display", "none", "-no-reboot"]
        argv += ["-accel", "kvm" if kvm else "tcg,thread=multi"]
        argv += ["-cpu", "host" if kvm else "max,la57=off"]
        argv += ["-smp", str(plan.cpus), "-m", f"{plan.memory_mib}M"]
        argv += ["-kernel", str(image / "vmlinux"), "-initrd", str(image / "initrd"), "-append"]
        argv += ["console=ttyS0 panic=-1 reboot=t mitigations=off tsc=reliable nokaslr"]
        argv += ["-serial", f"file:{self.console}", "-netdev", net]
        argv += ["-device", f"{card},host_mtu={plan.mtu},romfile="]
        argv += ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
        argv += share("root", "/", ",readonly=on") + share("ctl", str(control), ",readonly=on")
        if plan.shared_dir:
            argv += share("host", plan.shared_dir, "")
        return argv

    def _carry(self, source: int, target: BinaryIO | None) -> None:
        """Carries one port's bytes to ours until qemu is gone; by lines if there is a prefix."""
        held = b""
        while chunk := os.read(source, 65536):
            if target is None:  # the guest's word on itself
                held += chunk
                self.ready = b"ready\n" in held
                if b"rc " in held and held.endswith(b"\n"):
                    self.rc = int(held.split()[-1])
                continue
            if self.prefix:
                *lines, held = (held + chunk).split(b"\n")
                chunk = b"".join(self.prefix + line + b"\n" for line in lines)
            self._emit(target, chunk)
        if held and target:
            self._emit(target, self.prefix + held + b"\n")
        os.close(source)

    def _emit(self, target: BinaryIO, data: bytes) -> None:
        with self._output_lock, contextlib.suppress(BrokenPipeError):
            target.write(data)
            target.flush()

    def ended(self) -> bool:
        """True once qemu is gone."""
        return self.process.poll() is not None

    def go(self) -> None:
        """Lets the command start."""
        (self.dir / "ctl/go").touch()

    def stop(self) -> None:
        """Ends the machine; all its output is out on return. Idempotent."""
        if not self.ended():
            self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join(5)

    def explain(self) -> str:
        """What there is to see of a guest that did not report."""
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        if self.console.exists():
            text += self.console.read_text(errors="replace")[-3000:]
        return text.strip()


def run_guests(plan: Plan, image: Path) -> int:
    """Boots the guests, runs the command in all, and returns its exit status: the first that is not
    0, TIMED_OUT, or NO_GUEST when one did not boot or died."""
    if plan.accel == "tcg" or (plan.accel == "auto" and not kvm_works()):
        say("no hardware virtualisation: emulating the processor, ten or more times slower")
    run = Path(tempfile.mkdtemp(prefix="rdma_vm-"))
    guests: list[Guest] = []
    try:
        for node in range(2 if plan.two else 1):
            guests.append(Guest(node, plan, image, run))
        if not _wait(guests, time.monotonic() + plan.timeout_s):
            say(f"timed out after {plan.timeout_s:g} s")
            for guest in guests:
                if plan.verbose or not guest.ready:
                    say(f"guest {guest.node}:\n{guest.explain()}")
            return TIMED_OUT
        for guest in guests:
            guest.stop()
            if guest.rc is None or plan.verbose:
                say(f"guest {guest.node}: rc={guest.rc}\n{guest.explain()}")
        codes = [NO_GUEST if guest.rc is None else guest.rc for guest in guests]
        return next((code for code in codes if code), 0)
    finally:
        for guest in guests:
            guest.stop()
        shutil.rmtree(run, ignore_errors=True)


def _wait(guests: list[Guest], deadline_s: float) -> bool:
    """Waits until each has reported (none is stopped before: its peer may still need it) or one is
    dead; False at the deadline."""
    started = False
    while any(guest.rc is None for guest in guests) and not any(g.ended() for g in guests):
        if not started and all(guest.ready for guest in guests):
            started = True
            for guest in guests:
                guest.go()
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
