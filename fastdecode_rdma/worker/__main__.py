"""`python -m fastdecode_rdma.worker`: the same as `fastdecode worker`."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    # By name: the command line stands above this room, and this file is only another door to it.
    sys.exit(import_module("fastdecode_rdma.cli").main(["worker", *sys.argv[1:]]))
