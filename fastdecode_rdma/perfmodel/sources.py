"""Options that several commands share: which model, on what, measured or from the catalogue."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from fastdecode_rdma.config import kv_dtype_name
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.perfmodel.catalogue import EXAMPLE, Hardware, parse_hardware
from fastdecode_rdma.perfmodel.model import ServingModel
from fastdecode_rdma.perfmodel.profile_file import read_measured
from fastdecode_rdma.perfmodel.roles import serving_model
from fastdecode_rdma.perfmodel.shapes import SHAPES, WEIGHT_BYTES, shape_of

_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 1 << 10,
          "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A serving model and what it was made from: hardware, or a profile's file (then None)."""

    model: ServingModel
    hardware: Hardware | None
    weight_dtype: str
    text: str


def _quantity(text: str, flag: str, units: dict[str, float], example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units or float(match[1]) <= 0:
        raise ConfigError(f"{flag} takes a positive quantity like {example}, got {text!r}")
    return float(match[1]) * units[match[2].lower()]


def seconds_of(text: str, flag: str) -> float:
    """Returns the seconds in e.g. "60s", "500ms", "2min".

    Raises:
        ConfigError: it is none.
    """
    return _quantity(text, flag, _UNITS, "60s")


def bytes_of(text: str, flag: str) -> float:
    """Returns the bytes in e.g. "256GB", "64GiB".

    Raises:
        ConfigError: it is none.
    """
    return _quantity(text, flag, _BYTES, "256GB")


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which model runs on what."""
    parser.add_argument(
        "--model", metavar="CONFIG|DIR|NAME",
        help=f"a config.json, its directory, or one of {', '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", metavar="TEXT",
        help=f"the dense side, workers (a socket each), their link: {EXAMPLE!r}",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path, metavar="FILE",
        help="instead of --model and --hardware: what `fastdecode profile` has measured",
    )  # fmt: skip
    parser.add_argument("--num-workers", type=int, metavar="N", help="of a profile's kind")
    parser.add_argument("--kv-cache-dtype", default="fp16", help="(%(default)s)")
    parser.add_argument("--weight-dtype", default="fp16", help="of --hardware (%(default)s)")
    parser.add_argument("--worker-memory", metavar="SIZE", help="of each worker of --hardware")


def source_of(args: argparse.Namespace) -> Source:
    """Returns the model that the options name.

    Raises:
        ConfigError: they name none, or contradict each other.
    """
    kv_dtype = kv_dtype_name(args.kv_cache_dtype)
    if args.profile is not None:
        for flag in ("model", "hardware", "worker_memory"):
            if getattr(args, flag) is not None:
                name = flag.replace("_", "-")
                raise ConfigError(f"--profile says it all, so --{name} cannot")
        measured = read_measured(args.profile)
        model = measured.serving_model(kv_dtype, num_workers=args.num_workers)
        text = f"{len(model.workers)} workers as measured in {args.profile}"
        return Source(model, None, "fp32", text)
    if args.model is None or args.hardware is None:
        raise ConfigError("pass --model and --hardware, or --profile")
    if args.num_workers is not None:
        raise ConfigError("--num-workers goes with --profile; --hardware says how many")
    if args.weight_dtype not in WEIGHT_BYTES:
        raise ConfigError(
            f"--weight-dtype {args.weight_dtype!r} is unknown; expected {', '.join(WEIGHT_BYTES)}"
        )
    hardware = parse_hardware(args.hardware)
    memory = args.worker_memory and bytes_of(args.worker_memory, "--worker-memory")
    model = serving_model(
        shape_of(args.model), hardware, kv_dtype=kv_dtype, weight_dtype=args.weight_dtype,
        worker_memory_bytes=memory,
    )  # fmt: skip
    return Source(model, hardware, args.weight_dtype, hardware.text)
