"""`python -m fastdecode_rdma.worker`: the same as `fastdecode worker`."""

from __future__ import annotations

import sys

from fastdecode_rdma.cli import main

if __name__ == "__main__":
    sys.exit(main(["worker", *sys.argv[1:]]))
