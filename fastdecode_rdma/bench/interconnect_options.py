"""What is to be measured: the options of `fastdecode bench interconnect`, checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode_rdma.bench.interconnect_arguments import ALL_MAX_BYTES, RDMA_FLAGS
from fastdecode_rdma.bench.interconnect_peer import MAX_MESSAGE_BYTES
from fastdecode_rdma.command_line import split_workers
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport import planes_of
from fastdecode_rdma.transport.address import Address, parse_url, require_plane
from fastdecode_rdma.transport.rdma_wish import Wish

MAX_POST_LIST = 64
BARE_KINDS = {"write", "send", "read"}
DEFAULT_BYTES = {"latency": 2, "bandwidth": 65536}
DEFAULT_ITERS = {"latency": 1000, "bandwidth": 5000}
MOST_BYTES = 1 << 30
"""Where --iters is not given, a size moves at most so much."""

WARM_UP_BYTES = 64 << 20
FEWEST_ITERS, FEWEST_WARM_UP = 20, 5


@dataclass(frozen=True)
class PlaneKinds:
    """What can be measured over a plane. `kinds` -> (mode of latency, of bandwidth, of both ways);
    None: that does not exist."""

    kinds: dict[str, tuple[str, str, str | None]]


_THERE_AND_BACK = ("ping", "stream", "pingpong")
_ASKED_FOR = ("read", "reads", None)
_BARE = ("latency", "bandwidth", "both_ways")
PLANES: dict[str, PlaneKinds] = {
    "shm": PlaneKinds({"write": _THERE_AND_BACK, "read": _ASKED_FOR}),
    "rdma": PlaneKinds(
        {"write_imm": _THERE_AND_BACK, "write": _BARE, "send": _BARE, "read": (*_BARE[:2], None)}
    ),
    "tcp": PlaneKinds({"send": _THERE_AND_BACK, "read": _ASKED_FOR}),
}
"""Every transport is here (a test compares). shm and rdma's write_imm write into the peer's slots,
tcp sends; a read is a short request and what it asked for. write, send and read of rdma are the
verbs themselves, over a queue pair of their own, as perftest measures them."""

RDMA_OPTIONS = {flag[2:].replace("-", "_"): name for flag, (name, _) in RDMA_FLAGS.items()}


@dataclass(frozen=True)
class Case:
    """One table: a way to measure, over one plane, of all workers at once."""

    plane: str
    kind: str
    test: str
    mode: str
    urls: tuple[str, ...]

    @property
    def is_half(self) -> bool:
        """Whether latency is half the round trip: there and back is two messages."""
        return self.mode == "ping" or (self.mode == "latency" and self.kind != "read")

    @property
    def is_bare(self) -> bool:
        """Whether it is the verbs themselves that are measured, beside the plane."""
        return self.mode in _BARE


@dataclass(frozen=True)
class Settings:
    """What the options say, checked."""

    cases: tuple[Case, ...]
    sizes: dict[str, tuple[int, ...]]
    iters: int | None
    duration_s: float
    warm_up: int | None
    tx_depth: int
    num_qps: int
    bidirectional: bool
    check: bool
    compare: bool
    force: bool
    report: str
    timeout_s: float
    post_list: int = 1
    cq_mod: int = 16
    events: bool = False

    def num_iters(self, test: str, nbytes: int) -> int:
        """Returns messages of one size; 0: as many as there is time for."""
        if self.duration_s:
            return 0
        if self.iters is not None:
            return self.iters
        return max(FEWEST_ITERS, min(DEFAULT_ITERS[test], MOST_BYTES // nbytes))

    def num_warm_up(self, nbytes: int) -> int:
        """Returns messages of one size before it is measured."""
        if self.warm_up is not None:
            return self.warm_up
        return max(FEWEST_WARM_UP, min(100, WARM_UP_BYTES // nbytes))


def whole(value: int | None, flag: str, low: int, high: int) -> int | None:
    """Returns an option's number, None when it was not given.

    Raises:
        ConfigError: it is out of its range.
    """
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{flag} must be from {low} to {high}, got {value}")
    return value


def sizes_of(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Returns the message sizes of each test.

    Raises:
        ConfigError: they cannot be.
    """
    span = {"min": args.min, "max": args.max, "factor": args.factor}
    given = [f"--{name}" for name, value in span.items() if value is not None]
    if args.size is not None and (args.all or given):
        raise ConfigError(f"--size says which sizes, so {' '.join(given) or '--all'} cannot")
    if args.size is not None:
        sizes = tuple(_sizes(args.size))
        return dict.fromkeys(DEFAULT_BYTES, sizes)
    if not args.all:
        if given:
            raise ConfigError(f"{' '.join(given)} goes with --all")
        return {test: (nbytes,) for test, nbytes in DEFAULT_BYTES.items()}
    low = whole(args.min, "--min", 1, MAX_MESSAGE_BYTES) or 2
    high = whole(args.max, "--max", 1, MAX_MESSAGE_BYTES) or max(low, ALL_MAX_BYTES)
    factor = whole(args.factor, "--factor", 2, MAX_MESSAGE_BYTES) or 2
    if high < low:
        raise ConfigError(f"--max {high} is less than --min {low}")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return dict.fromkeys(DEFAULT_BYTES, tuple(sizes))


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--size takes numbers between commas, got {text!r}") from None
    for nbytes in sizes:
        whole(nbytes, "--size", 1, MAX_MESSAGE_BYTES)
    return sizes


def _names(text: str, flag: str, known: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{flag} {unknown[0]!r} is unknown; expected {', '.join(known)}")
    if not names:
        raise ConfigError(f"{flag} names nothing; expected {', '.join(known)}")
    return names


def _url(url: str, plane: str, args: argparse.Namespace) -> str:
    """An address of a worker over a plane, with what the options say of it."""
    address: Address = parse_url(url)
    said: dict[str, object] = {}
    if plane == "rdma":
        values = {name: getattr(args, ours) for ours, name in RDMA_OPTIONS.items()}
        said = {name: value for name, value in values.items() if value is not None}
    elif plane == "shm" and args.events:
        said = {"spin_us": 0}
    said = {name: value for name, value in said.items() if name not in address.options}
    plain = require_plane(url, plane)
    if not said:
        return plain
    options = "&".join(f"{name}={value}" for name, value in said.items())
    whole_url = f"{plain}{'&' if '?' in plain else '?'}{options}"
    parse_url(whole_url)  # complains about values
    return whole_url


def _check_planes(args: argparse.Namespace, planes: Sequence[str]) -> None:
    """Makes sure that every option means something to some plane.

    Raises:
        ConfigError: one does not.
    """
    if "rdma" in planes:
        return
    names = [name for name in (*RDMA_OPTIONS, "post_list", "compare") if getattr(args, name)]
    if names:
        flag = "--" + names[0].replace("_", "-")
        raise ConfigError(f"{flag} concerns rdma alone, and {', '.join(planes)} is to be measured")
    if args.events and "shm" not in planes:
        raise ConfigError("--events concerns shm and rdma: tcp sleeps in the system in any case")


def settings_of(args: argparse.Namespace) -> Settings:
    """Checks the options.

    Raises:
        ConfigError: they cannot be used.
    """
    workers = split_workers(args.workers)
    tests = _names(args.test, "--test", list(DEFAULT_BYTES))
    allowed = {plane for url in workers for plane in planes_of(parse_url(url))}
    planes = [plane for plane in PLANES if plane in allowed]
    if args.plane is not None:
        planes = _names(args.plane, "--plane", list(PLANES))
    _check_planes(args, planes)
    post_list = _post_list(args)
    if args.iters is not None and args.duration is not None:
        raise ConfigError("--iters and --duration exclude each other")
    if args.duration is not None and not 0 < args.duration <= 86400:
        raise ConfigError(f"--duration must be above 0, at most 86400 s, got {args.duration:g}")
    if not 0 < args.timeout <= 3600:
        raise ConfigError(f"--timeout must be above 0, at most 3600 s, got {args.timeout:g}")
    return Settings(
        cases=_cases(args, workers, planes, tests),
        sizes=sizes_of(args),
        iters=whole(args.iters, "--iters", 1, 1 << 40),
        duration_s=args.duration or 0.0,
        warm_up=whole(args.warm_up, "--warm-up", 0, 1 << 30),
        tx_depth=whole(args.tx_depth, "--tx-depth", 1, 256) or 1,
        num_qps=whole(args.qp, "--qp", 1, 64) or 1,
        bidirectional=args.bidirectional,
        check=args.check,
        compare=args.compare,
        force=args.force,
        report=args.report,
        timeout_s=args.timeout,
        post_list=post_list,
        cq_mod=int(args.cq_mod or Wish.cq_mod),  # _url has checked it
        events=args.events,
    )


def _post_list(args: argparse.Namespace) -> int:
    """How many requests are posted at once."""
    most = min(MAX_POST_LIST, args.tx_depth)
    count = whole(args.post_list, "--post-list", 1, most) or 1
    if count > 1 and args.kind is not None and not set(args.kind.split(",")) & BARE_KINDS:
        raise ConfigError(
            "--post-list must be 1 for write_imm: a frame carries the credits of the moment it is "
            f"posted at, got {count}"
        )
    return count


def _cases(
    args: argparse.Namespace, workers: Sequence[str], planes: Sequence[str], tests: Sequence[str]
) -> tuple[Case, ...]:
    known = list(dict.fromkeys(kind for plane in planes for kind in PLANES[plane].kinds))
    kinds = known if args.kind is None else _names(args.kind, "--kind", known)
    cases = []
    for plane in planes:
        urls = tuple(_url(url, plane, args) for url in workers)
        for kind in (kind for kind in PLANES[plane].kinds if kind in kinds):
            ping, stream, both_ways = PLANES[plane].kinds[kind]
            if args.bidirectional and both_ways is None and args.kind is not None:
                raise ConfigError(f"--bidirectional: a {kind} over {plane} goes one way")
            modes = {"latency": ping, "bandwidth": both_ways if args.bidirectional else stream}
            if args.events and kind == "write" and plane == "rdma":
                modes["latency"] = None  # a written message has no event, only memory that changes
            cases += [
                Case(plane, kind, test, mode, urls)
                for test in tests
                if (mode := modes[test]) is not None
            ]
    return tuple(cases)
