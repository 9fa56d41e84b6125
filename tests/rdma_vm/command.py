"""Runs the RDMA tests, or any command, on real verbs (Soft-RoCE) in a throw-away virtual machine.

    tests/rdma_vm/run                        the RDMA tests in one guest
    tests/rdma_vm/run --two                  the tests between two guests
    tests/rdma_vm/run -k fault -x            options after our own go to pytest
    tests/rdma_vm/run --command COMMAND ...  any command instead

A guest boots Debian's stock kernel under qemu on this machine's own root file system (read-only
below a tmpfs), so the same interpreter, packages and paths are there; what it writes is thrown
away. The RDMA device rxe0 lies on eth0; with --two, two guests share one virtual Ethernet. The
command's environment has
    RDMA_VM_NODE   0 or 1          RDMA_VM_IP    this guest's address
    RDMA_VM_NODES  1 or 2          RDMA_VM_PEER  the other's (alone: its own)
    RDMA_VM_DEV    rxe0            RDMA_VM_GID   GID index of RDMA_VM_IP
Exit status: the command's (with --two the first that is not 0); 124 timed out; 125 a guest did not
boot or died; 2 bad usage. Needs root, Debian or a relative, x86_64; missing packages are installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

from guest import NO_GUEST, Plan, run_guests
from image import HERE, VmError, boot_image, install_packages, say, unpacked_tools

CHECKOUT = HERE.parents[1]
TESTS = "tests/rdma"
TWO_GUESTS = "tests/rdma/test_two_guests.py"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests/rdma_vm/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--two", action="store_true", help="two guests on one Ethernet, both run the command")
    add("--timeout", type=float, default=840, metavar="S", help="hard limit in seconds (840)")
    add("--mem", type=int, default=4096, metavar="MIB", help="memory of each guest (4096)")
    add("--cpus", type=int, default=1, help="of each guest (1: the fastest where emulated)")
    add("--mtu", type=int, default=9000, help="of eth0; 9000: RDMA MTU 4096; 1500: 1024")
    add("--accel", choices=("auto", "kvm", "tcg"), default="auto", help="auto: kvm if it works")
    add("--dir", metavar="DIR", help="share this folder read-write; what guests write there stays")
    add("--verbose", action="store_true", help="show the guests' consoles at the end")
    add("--prepare", action="store_true", help="only install and build; run nothing")
    add("--command", nargs=argparse.REMAINDER, metavar="COMMAND", help="run this, not the tests")
    return parser


def _environ(tools: Path) -> dict[str, str]:
    """The caller's environment with the unpacked tools in front."""
    environ = dict(os.environ)
    for name, folder in (
        ("PYTHONPATH", "usr/lib/python3/dist-packages"),
        ("LD_LIBRARY_PATH", "usr/lib/x86_64-linux-gnu"),
        ("PATH", "usr/bin"),
    ):
        places = [str(tools / folder), environ.get(name, "")]
        environ[name] = os.pathsep.join(place for place in places if place)
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    return environ


def _build_extension() -> None:
    """Builds the package again if it was built before libibverbs' headers were there.

    Raises:
        VmError: the build left the compiled queue pairs out.
    """
    probe = [sys.executable, "-c", "import fastdecode_rdma.transport._verbs"]
    if subprocess.run(probe, cwd="/", capture_output=True).returncode == 0:
        return
    say("building the package with libibverbs' headers")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--force-reinstall", "-e", str(CHECKOUT)], check=False)
    done = subprocess.run(probe, cwd="/", capture_output=True, text=True)
    if done.returncode:
        raise VmError(f"the package does not build its queue pairs: {done.stderr.strip()}")


def _test_command(pytest_args: list[str], *, two: bool) -> list[str]:
    # The tests' common fixtures import what takes minutes in an emulated guest: conftest.py of the
    # RDMA tests is all they get.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers"]
    command += [f"--rootdir={CHECKOUT}", "--confcutdir", TESTS, "-v"]
    return [*command, *pytest_args, TWO_GUESTS if two else TESTS]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args, rest = parser.parse_known_args()
    if args.command is not None and (rest or not args.command):
        parser.error("--command takes the rest of the line")
    if platform.machine() != "x86_64" or os.geteuid():
        parser.error("needs root on x86_64")
    if args.dir and (not os.path.isdir(args.dir) or os.path.realpath(args.dir) == "/"):
        parser.error(f"--dir: {args.dir} is no folder to share")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    try:
        install_packages()
        image, tools = boot_image(), unpacked_tools()
        if args.command is None:
            _build_extension()
        if args.prepare:
            return 0
        plan = Plan(
            command=args.command or _test_command(rest, two=args.two),
            environ=_environ(tools),
            cwd=str(CHECKOUT) if args.command is None else os.getcwd(),
            shared_dir=os.path.realpath(args.dir) if args.dir else None,
            two=args.two,
            timeout_s=args.timeout,
            memory_mib=args.mem,
            cpus=args.cpus,
            mtu=args.mtu,
            accel=args.accel,
            verbose=args.verbose,
        )
        return run_guests(plan, image)
    except VmError as problem:
        say(str(problem))
        return NO_GUEST
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
