"""Our RDMA plane beside perftest, on the same device, in turn.

    tests/rdma_vm/run --cpus 2 --command python bench/compare_rdma.py [--repeats 3] [--iters 300]

For a machine with an RDMA device, or the virtual machine, whose emulated processor makes only the
ratio mean something. Both ends run here. Per repetition `fastdecode bench interconnect --compare`
measures our frames (write_imm) and bare writes at 64 KiB and 1 MiB, perftest right after each. Bar,
on the median of ratios: bandwidth of bare writes at 1 MiB at least 0.5 of ib_write_bw's. Exit code
1 if it is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from fastdecode_rdma import cli
from fastdecode_rdma.bench import serve
from fastdecode_rdma.wire.connection import Connection

BAR, BAR_BYTES = 0.5, 1 << 20
PATIENCE_S = 60.0


def measure(url: str, iters: int, folder: str) -> list[dict]:
    """Runs the benchmark once; returns its tables."""
    place = Path(folder) / "o.json"
    code = cli.main(
        ["bench", "interconnect", "--workers", url, "--plane", "rdma", "--kind", "write_imm,write",
         "--size", "65536,1048576", "--iters", str(iters), "--warm-up", "10", "--compare",
         "--qp-timeout", "18", "--tx-depth", "16", "--timeout", str(PATIENCE_S),
         "--json", str(place)]
    )  # fmt: skip
    if code:
        raise SystemExit(code)
    return json.loads(place.read_text())["tables"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iters", type=int, default=300, help="messages of each size")
    args = parser.parse_args()
    # perftest takes an emulated processor for seconds: silence does not mean that a side is dead
    Connection.is_lost = lambda self, now_s: self.silence_s(now_s) > PATIENCE_S
    server = serve.make_server(
        argparse.Namespace(listen="127.0.0.1:0", token_file=None, insecure=False)
    )
    server.config = replace(server.config, handshake_timeout_s=PATIENCE_S)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    gid = os.environ.get("RDMA_VM_GID")
    url = f"rdma://127.0.0.1:{server.address[1]}?connect_timeout_s={PATIENCE_S:g}"
    url += "" if gid is None else f"&gid={gid}"
    ratios: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(args.repeats):
                for table in measure(url, args.iters, folder):
                    is_latency = table["test"] == "latency"
                    figure = "t_typical_usec" if is_latency else "bw_average_gbit_per_s"
                    pairs = zip(table["rows"], table["perftest_rows"], strict=True)
                    for ours, theirs in pairs:
                        key = (table["kind"], table["test"], ours["message_bytes"])
                        ratios.setdefault(key, []).append((ours[figure], theirs[figure]))
    finally:
        server.stop()
        thread.join()
        server.close(PATIENCE_S)
    print(f"\n{'':<32} {'ours':>10} {'perftest':>10} {'ratio':>7}")
    for (kind, test, nbytes), pairs in ratios.items():
        ours, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio = statistics.median(one / two for one, two in pairs)
        unit = "usec" if test == "latency" else "Gb/s"
        name = f"{kind} {test} {nbytes} [{unit}]"
        print(f"{name:<32} {ours:>10.3f} {theirs:>10.3f} {ratio:>7.2f}")
    bar = statistics.median(o / t for o, t in ratios["write", "bandwidth", BAR_BYTES])
    print(f"{'ok' if bar >= BAR else 'MISSED'} write bandwidth at 1 MiB: {bar:.2f} >= {BAR}")
    return 0 if bar >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
