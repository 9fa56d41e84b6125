"""Arguments of the commands over files, and what they mean for a generator."""

from __future__ import annotations

import argparse
import os
from typing import Any

from fastdecode_rdma.batch.tables import is_table
from fastdecode_rdma.command_line import split_workers
from fastdecode_rdma.errors import ConfigError


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what concerns the files of a job, except --input."""
    parser.add_argument(
        "--output", "-o", metavar="FILE", help="where results go (default: -, standard output)"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--overwrite", action="store_true", help="replace an output file that holds something"
    )
    begin.add_argument(
        "--resume",
        action="store_true",
        help="go on with the job that began the output file; start it if there is none",
    )
    parser.add_argument(
        "--ordered", action="store_true", help="write results in the order of the input"
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="only the first N lines of the input"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check all lines, name the longest prompt and those that cannot fit; run nothing",
    )


def _positive(text: str) -> int:
    value = int(text) if text.strip().isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return value


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what concerns the model and its workers."""
    parser.add_argument(
        "--workers",
        metavar="A,B",
        help="attention workers, HOST[:PORT], comma-separated (default: one in this process)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the workers' token (default: FASTDECODE_TOKEN_FILE)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of one sequence")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences run at once")
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="auto, fp32, fp16, bf16, …")
    parser.add_argument(
        "--quantization", metavar="NAME", help="int8: weights rounded as they are loaded"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits in any batch, on any workers"
    )
    parser.add_argument(
        "--spill-dir", metavar="DIR", help="KV that workers have no memory for is copied there"
    )


def add_ray_arguments(parser: argparse.ArgumentParser, *, with_workers: bool = True) -> None:
    """Declares what concerns a Ray cluster; attention workers only for what needs them."""
    parser.add_argument(
        "--ray",
        action="store_true",
        help="run on a Ray cluster, whose nodes find the input, the model and the output's folder "
        "at the same paths (extra `ray`)",
    )
    parser.add_argument(
        "--ray-address", metavar="A", help="the cluster (default: RAY_ADDRESS, or one started here)"
    )
    parser.add_argument(
        "--ray-engines", type=_positive, default=1, metavar="N", help="engines (default: 1)"
    )
    if not with_workers:
        parser.set_defaults(ray_workers=1, ray_worker_memory=None)
        return
    parser.add_argument(
        "--ray-workers",
        type=_positive,
        default=1,
        metavar="M",
        help="attention workers that the engines share (default: 1)",
    )
    parser.add_argument(
        "--ray-worker-memory", metavar="SIZE", help="KV-cache of each, such as 4GiB"
    )


def check_ray(args: argparse.Namespace) -> None:
    """Refuses options that contradict --ray.

    Raises:
        ConfigError: there are some.
    """
    if not args.ray:
        if args.ray_address or args.ray_worker_memory or args.ray_engines + args.ray_workers > 2:
            raise ConfigError("--ray-address, --ray-engines, … are for --ray")
        return
    if args.workers is not None:
        raise ConfigError("--ray starts its own workers; leave out --workers")
    if args.input is None or not os.path.isfile(args.input) or is_table(args.input):
        raise ConfigError("--ray needs --input with a file of lines: its tasks read it themselves")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `Generator.from_pretrained`.

    Raises:
        ConfigError: they make no sense together.
    """
    workers = None
    if args.workers is not None:
        workers = split_workers(args.workers)
    elif args.token_file is not None:
        raise ConfigError("--token-file is for --workers")
    named = {
        **model_options(args),
        "max_num_seqs": args.max_num_seqs,
        "spill_dir": args.spill_dir,
    }
    return {
        "workers": workers,
        "token_file": args.token_file,
        "deterministic": args.deterministic,
        **{name: value for name, value in named.items() if value is not None},
    }


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that change what comes out, unlike workers and the size of the batch."""
    return {
        "max_model_len": args.max_model_len,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
    }
