"""`fastdecode bench NAME`: picks the microbenchmark and imports only that one."""

from __future__ import annotations

import argparse
from importlib import import_module

BENCHMARKS = {
    "attention": "the decode attention kernel beside memory, arithmetic and torch",
    "interconnect": "latency and bandwidth of the data planes, as perftest puts them",
    "layer": "the traffic of one decode layer, with and without the kernel",
    "tune": "sweeps what can be set of the data planes and writes a profile",
    "serve": "the peer of a benchmark over a network: no kernel, no KV-cache",
    "gemm": "the dense side's skinny GEMM beside memory, torch and numpy",
}
"""Name -> help; fastdecode_rdma/bench/NAME.py has add_arguments(parser) and run(args)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, text in BENCHMARKS.items():
        module = import_module(f"fastdecode_rdma.bench.{name}")
        module.add_arguments(names.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    module = import_module(f"fastdecode_rdma.bench.{args.name}")
    return int(module.run(args))
