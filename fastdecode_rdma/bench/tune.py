"""`fastdecode bench tune`: sweeps what can be set of each worker's data plane, for the messages of
a model, and writes the profile that `Generator.from_pretrained(..., profile=...)` reads.

Workers are tuned one by one, without their kernel. A value is taken only if it beats what holds
without it clearly, and in nearly every repetition.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode_rdma import host_facts
from fastdecode_rdma.bench.attention import numbers_of
from fastdecode_rdma.bench.interconnect_arguments import add_workers
from fastdecode_rdma.bench.layer_models import add_model_arguments, shape_of
from fastdecode_rdma.bench.layer_session import LayerSession, warm_up
from fastdecode_rdma.command_line import messages_on_stderr, split_workers
from fastdecode_rdma.config import AttentionGeometry
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport.address import parse_url
from fastdecode_rdma.transport.base import FrameSizes
from fastdecode_rdma.transport.profile import Profile, write_profile
from fastdecode_rdma.wire.token_file import find_token

MARGIN = 0.05
"""By how much a value must beat the default, on the median of the repetitions' ratios."""

WINS = 0.8
"""Part of the repetitions in which it must be the faster."""

UPLOAD_BYTES = 64 << 20
WARM_UP_S = 0.05

LATENCY_OPTIONS: Mapping[str, tuple[tuple[str, tuple[float, ...]], ...]] = {
    "shm": (("spin_us", (0, 5, 20, 50, 200)),),
    "tcp": (("buffer_bytes", (1 << 20, 2 << 20, 8 << 20)),),
    "rdma": (("inline", (0, 64, 512)), ("cq_mod", (1, 4))),
}
"""Plane -> what is swept for exchanges of rows, one after the other."""

BULK_BYTES = (1 << 16, 1 << 18, 1 << 20, 4 << 20, 16 << 20)
"""Swept on every plane, for K/V rows: slot size and length of the chunks at once."""


@dataclass(frozen=True)
class Trial:
    """One value of an option; None: as without it. `figure`: microseconds, less is better."""

    option: str
    value: float | None
    figure: float


@dataclass(frozen=True)
class Tuner:
    """What is the same for all workers."""

    geometry: AttentionGeometry
    batches: tuple[int, ...]
    iters: int
    repeats: int
    upload_bytes: int
    token: bytes | None
    force: bool
    timeout_s: float

    def tune(self, url: str) -> tuple[str, dict[str, float | str], list[Trial]]:
        """Returns a worker's plane, the options to set, and all trials.

        Raises:
            FastDecodeError: the worker cannot be reached or was lost.
        """
        plane = self._plane_of(url)
        trials: list[Trial] = []
        chosen: dict[str, float | str] = {}
        usual = FrameSizes.of(self.geometry).max_bulk_bytes
        bulk = ("bulk_bytes", tuple(n for n in BULK_BYTES if n != usual))
        sweeps = (*LATENCY_OPTIONS[plane], bulk)
        given = parse_url(url).options
        for option, values in sweeps:
            if option in given:
                continue
            best, tried = self._sweep(with_options(url, plane, chosen), option, values)
            trials += tried
            if best is not None:
                chosen[option] = best
        return plane, chosen, trials

    def _plane_of(self, url: str) -> str:
        session = self._session(url)
        session.close()
        return session.workers[0].info.transport

    def _session(self, url: str) -> LayerSession:
        return LayerSession(
            [url], self.geometry, with_kernel=False, token=self.token, force=self.force,
            timeout_s=self.timeout_s,
        )  # fmt: skip

    def _sweep(
        self, url: str, option: str, values: Sequence[float]
    ) -> tuple[float | None, list[Trial]]:
        """Measures all values in turn, so often; returns the one to set, None for none."""
        choices: list[float | None] = [None, *values]
        figures: list[list[float]] = [[] for _ in choices]
        with ExitStack() as stack:
            sessions = []
            for value in choices:
                options = {} if value is None else {option: value}
                session = self._session(with_options(url, None, options))
                stack.callback(session.close)
                sessions.append(session)
            for _ in range(self.repeats):
                for session, kept in zip(sessions, figures, strict=True):
                    is_bulk = option == "bulk_bytes"
                    kept.append(self._upload(session) if is_bulk else self._exchange(session))
        trials = [
            Trial(option, value, statistics.median(kept))
            for value, kept in zip(choices, figures, strict=True)
        ]
        return best_of(choices, figures), trials

    def _exchange(self, session: LayerSession) -> float:
        """Microseconds of one exchange of each batch."""
        total = 0.0
        for batch in self.batches:
            rows = session.begin(batch, 1)
            warm_up(session, rows, WARM_UP_S)
            total += float(statistics.median(session.exchange(self.iters, rows).total)) / 1000
        return total

    def _upload(self, session: LayerSession) -> float:
        session.upload_seconds(self.upload_bytes // 8)
        return session.upload_seconds(self.upload_bytes) * 1e6


def best_of(choices: Sequence[float | None], figures: Sequence[Sequence[float]]) -> float | None:
    """Returns the choice that clearly beats the first, None if none does. `figures` [choices,
    repetitions], measured in turn: what disturbs one repetition disturbs all of its figures."""
    best, best_ratio = None, 1 - MARGIN
    for value, kept in zip(choices, figures, strict=True):
        ratios = [one / other for one, other in zip(kept, figures[0], strict=True)]
        wins = sum(ratio < 1 for ratio in ratios) / len(ratios)
        if wins >= WINS and statistics.median(ratios) < best_ratio:
            best, best_ratio = value, statistics.median(ratios)
    return best


def with_options(url: str, plane: str | None, options: Mapping[str, float | str]) -> str:
    """Returns a URL with options added, over one plane if it is named."""
    text = url.strip()
    if plane is not None and parse_url(text).scheme == "auto":
        text = f"{plane}://{text.removeprefix('auto://')}"
    if not options:
        return text
    added = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{text}{'&' if '?' in text else '?'}{added}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_workers(parser)
    add_model_arguments(parser)
    parser.add_argument("--batch", default="16,64", help="rows per worker (%(default)s)")
    for flag, number, text in (
        ("--iters", 200, "exchanges of each batch"),
        ("--repeats", 5, "interleaved repetitions"),
        ("--upload-mib", UPLOAD_BYTES >> 20, "K/V rows of one upload"),
    ):
        parser.add_argument(flag, type=int, default=number, help=f"{text} (%(default)s)")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="(10)")
    parser.add_argument("--force", action="store_true", help="also at workers that engines use")
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("fastdecode-profile.json"),
        metavar="FILE",
        help="the profile (%(default)s)",
    )


def tuner_of(args: argparse.Namespace) -> Tuner:
    """Checks the options.

    Raises:
        ConfigError: they cannot be used.
    """
    for flag, high in (("iters", 1 << 24), ("repeats", 1 << 10), ("upload_mib", 1 << 14)):
        if not 1 <= getattr(args, flag) <= high:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} must be 1 to {high}, got {getattr(args, flag)}")
    if not 0 < args.timeout <= 3600:
        raise ConfigError(f"--timeout must be above 0, at most 3600 s, got {args.timeout:g}")
    batches = tuple(numbers_of(args.batch, "--batch"))
    geometry = shape_of(args).geometry(
        kv_dtype=args.kv_dtype,
        wire_dtype=args.wire_dtype,
        max_rows=max(batches),
        max_model_len=64,
        num_layers=1,
    )
    return Tuner(
        geometry, batches, args.iters, args.repeats, args.upload_mib << 20,
        find_token(args.token_file), args.force, args.timeout,
    )  # fmt: skip


def print_trials(url: str, plane: str, chosen: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """Prints what was tried at one worker."""
    print("-" * 56)
    print(f" {url} over {plane}")
    print(f" {'option':<14} {'value':>12} {'usec':>12}")
    for trial in trials:
        value = "default" if trial.value is None else f"{trial.value:.12g}"
        mark = "  <- set" if chosen.get(trial.option) == trial.value is not None else ""
        print(f" {trial.option:<14} {value:>12} {trial.figure:>12.1f}{mark}")


def run(args: argparse.Namespace) -> int:
    """Tunes all workers, prints and writes the profile.

    Raises:
        FastDecodeError: an option cannot be used, or a worker cannot.
    """
    tuner = tuner_of(args)
    shape = shape_of(args)
    options: dict[str, Mapping[str, float | str]] = {}
    measured: list[dict[str, Any]] = []
    with messages_on_stderr():
        for url in split_workers(args.workers):
            plane, chosen, trials = tuner.tune(url)
            place = parse_url(url).place
            options[place] = chosen
            measured += [
                {"worker": place, "plane": plane, "option": t.option, "value": t.value,
                 "usec": t.figure} for t in trials
            ]  # fmt: skip
            print_trials(url, plane, chosen, trials)
    found = {
        "model": vars(shape) | {"kv_dtype": args.kv_dtype, "wire_dtype": args.wire_dtype},
        "batch_rows": tuner.batches,
        "client_machine": host_facts.machine_facts(),
        "trials": measured,
    }
    write_profile(args.output, Profile(options), found)
    print(f" wrote {args.output}: Generator.from_pretrained(..., profile={str(args.output)!r})")
    return 0
