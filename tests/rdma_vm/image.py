"""What a guest boots from: packages of the host, a kernel and an initramfs out of Debian's own.

Nothing is installed but qemu and small tools; the kernel, pyverbs, ibverbs and perftest are
unpacked into a cache (`$RDMA_VM_CACHE`, by default ~/.cache/rdma_vm, 90 MB), where guests find
them.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent

# What has to be on the machine: a file that proves it -> the package that brings it.
PACKAGES = {
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/bin/busybox": "busybox-static",
    "/sbin/depmod": "kmod",
    "/sbin/ip": "iproute2",  # brings `rdma` too
    "/usr/bin/ibv_devinfo": "ibverbs-utils",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",  # the compiled queue pairs are built on it
}
UNPACKED = ("python3-pyverbs", "librdmacm1", "perftest", "libibumad3", "libpci3")
"""Taken along without an installation: python3-pyverbs would bring rdma-core and its services."""

WHEEL = "ibverbs==2026.10.22"
"""PyPI's binding, taken along too; it needs nothing but libibverbs."""

KERNEL = "linux-image-amd64"  # a metapackage; $RDMA_VM_KERNEL names another one

# Kernel modules put into the initramfs, in loading order; what they need comes along.
MODULES = (
    *("virtio_pci", "virtio_console", "virtio_net", "virtio_rng", "9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "crc32-pclmul", "crc32c-intel", "ib_uverbs", "rdma_ucm", "ib_umad"),
    "rdma_rxe",
)


class VmError(Exception):
    """The machine outside could not do its part; the command in the guest is not to blame."""


def say(text: str) -> None:
    """Tells the user, beside the guest's own output."""
    print(f"rdma_vm: {text}", file=sys.stderr, flush=True)


def sh(*argv: str, cwd: Path | None = None) -> str:
    """Runs a command quietly; its output is shown only if it fails.

    Raises:
        VmError: it failed.
    """
    done = subprocess.run(
        argv,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ, DEBIAN_FRONTEND="noninteractive"),
    )
    if done.returncode:
        raise VmError(f"{shlex.join(argv)} exited {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def apt(*argv: str, cwd: Path | None = None) -> None:
    """Runs apt-get, waiting for another one; if it fails, once more with fresh package lists.

    Raises:
        VmError: it failed again.
    """
    wait = ("apt-get", "-o", "DPkg::Lock::Timeout=300")
    try:
        sh(*wait, *argv, cwd=cwd)
    except VmError:
        sh(*wait, "update")
        sh(*wait, *argv, cwd=cwd)


def install_packages() -> None:
    """Installs what this machine lacks."""
    missing = [package for path, package in PACKAGES.items() if not os.path.exists(path)]
    if missing:
        say("installing " + " ".join(missing))
        apt("install", "-y", "--no-install-recommends", *missing)


def cache_dir() -> Path:
    """Returns the folder of the cache, which exists."""
    folder = Path(os.environ.get("RDMA_VM_CACHE") or "~/.cache/rdma_vm").expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build_once(name: str, recipe: object, build: Callable[[Path], None]) -> Path:
    """Returns the cached folder for a recipe; `build(folder)` fills it the first time."""
    cache = cache_dir()
    key = hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]
    target = cache / f"{name}-{key}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                build(made)
                made.rename(target)
    return target


def unpacked_tools() -> Path:
    """Returns a root folder that holds pyverbs, ibverbs and perftest for the guests."""

    def build(folder: Path) -> None:
        say("unpacking " + ", ".join((*UNPACKED, WHEEL)) + " (once)")
        with tempfile.TemporaryDirectory() as scratch:
            os.chmod(scratch, 0o777)  # apt's download runs as a user of its own
            apt("download", *UNPACKED, cwd=Path(scratch))
            for package in sorted(Path(scratch).glob("*.deb")):
                sh("dpkg-deb", "-x", str(package), str(folder))
        target = str(folder / "usr/lib/python3/dist-packages")
        sh(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, WHEEL)

    return build_once("tools", (UNPACKED, WHEEL), build)


def boot_image() -> Path:
    """Returns the folder with `vmlinux` and `initrd`."""
    init = (HERE / "init.sh").read_text()

    def build(folder: Path) -> None:
        package = _kernel_package()
        say(f"building the guest's image from {package} (once)")
        with tempfile.TemporaryDirectory() as scratch:
            os.chmod(scratch, 0o777)
            place = Path(scratch)
            apt("download", package, cwd=place)
            root = place / "root"
            sh("dpkg-deb", "-x", str(next(place.glob("*.deb"))), str(root))
            image = next((root / "boot").glob("vmlinuz-*")).read_bytes()
            (folder / "vmlinux").write_bytes(_unpack_kernel(image))
            _make_initrd(root, init, place / "initramfs", folder / "initrd")

    return build_once("image", (init, MODULES, os.environ.get("RDMA_VM_KERNEL")), build)


def _kernel_package() -> str:
    """The real kernel package behind the metapackage."""
    name = os.environ.get("RDMA_VM_KERNEL", KERNEL)
    for retry in (False, True):
        done = subprocess.run(["apt-cache", "depends", name], stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            if "Depends: linux-image-" in line:
                return line.split()[-1]
        if done.stdout:
            return name
        if not retry:
            sh("apt-get", "-o", "DPkg::Lock::Timeout=300", "update")
    raise VmError(f"apt knows no package {name}")


def _unpack_kernel(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage; qemu enters it directly (PVH), which spares an emulated
    machine the BIOS's copying and the kernel's own slow unpacking: 11 s."""
    setup_sectors = image[0x1F1]
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    kernel = lzma.LZMADecompressor().decompress(image[start : start + length])
    if kernel[:4] != b"\x7fELF":
        raise VmError("the kernel image holds no xz-packed ELF file")
    return kernel


def _make_initrd(root: Path, init: str, tree: Path, target: Path) -> None:
    """An initramfs with busybox, the first stage and the wanted modules out of `root`."""
    release = next((root / "lib/modules").iterdir()).name
    sh("/sbin/depmod", "-b", str(root), release)
    source = root / "lib/modules" / release
    needs = {}  # module name -> its files, itself first
    for line in (source / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        name = Path(path).name.split(".")[0].replace("-", "_")
        needs[name] = [path, *rest.split()]
    have = [module for module in MODULES if module.replace("-", "_") in needs]
    for module in have:
        for path in needs[module.replace("-", "_")]:
            copy = tree / "lib/modules" / release / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, copy)
    sh("/sbin/depmod", "-b", str(tree), release)
    (tree / "bin").mkdir()
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    (tree / "modules.load").write_text("\n".join(have) + "\n")
    (tree / "init").write_text(init)
    (tree / "init").chmod(0o755)
    pack = 'cd "$1" && find . | busybox cpio -o -H newc >"$2"'
    sh("sh", "-c", pack, "sh", str(tree), str(target))
