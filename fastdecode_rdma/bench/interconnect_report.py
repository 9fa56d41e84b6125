"""What `fastdecode bench interconnect` prints and writes."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastdecode_rdma.bench.interconnect_figures import (
    LATENCY_HEAD,
    Bandwidth,
    Latency,
    bandwidth_head,
    bandwidth_line,
    latency_line,
)
from fastdecode_rdma.bench.interconnect_options import Case
from fastdecode_rdma.errors import ConfigError

SCHEMA_VERSION = 1

Row = Latency | Bandwidth


@dataclass
class Table:
    """One case at one worker; `worker` "all" adds up several. `perftest`: its rows, beside ours."""

    case: Case
    worker: str
    detail: str = ""
    num_slots: int = 0
    rows: list[Row] = field(default_factory=list)
    client_link: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    client_moved: dict[str, int] = field(default_factory=dict)
    server_moved: dict[str, int] = field(default_factory=dict)
    perftest: list[dict[str, float]] = field(default_factory=list)

    def json(self, report: str) -> dict[str, Any]:
        """Returns the table as it stands in the JSON file."""
        return {
            "worker": self.worker,
            "plane": self.case.plane,
            "plane_detail": self.detail,
            "kind": self.case.kind,
            "test": self.case.test,
            "mode": self.case.mode,
            "latency_is_half_round_trip": self.case.is_half,
            "num_slots": self.num_slots,
            "client_link": self.client_link,
            "server_link": self.server.get("link", {}),
            "server_machine": self.server.get("machine", {}),
            "client_counters_moved": self.client_moved,
            "server_counters_moved": self.server_moved,
            "rows": [
                row.json() if isinstance(row, Latency) else row.json(report) for row in self.rows
            ],
            "perftest_rows": self.perftest,
        }


def head_of(table: Table, *, report: str, num_qps: int, depth: int, check: bool) -> str:
    """Returns the lines above a table: what its figures are, of what."""
    case = table.case
    if case.test == "latency":
        what = "half the round trip" if case.is_half else "the full round trip"
        columns = LATENCY_HEAD
    else:
        ways = (
            "both directions together"
            if case.mode in ("pingpong", "both_ways")
            else "one direction"
        )
        under_way = depth if case.is_bare else min(depth, table.num_slots)
        what = f"{ways}, {under_way} under way, {num_qps} connections"
        columns = bandwidth_head(report)
    link = table.client_link
    facts = [f"{key} {link[key]}" for key in ("interface", "mtu_bytes", "numa_node") if key in link]
    lines = [
        "-" * len(columns),
        f" {case.plane} {case.kind} {case.test}: {what}; {table.worker}"
        + (f" ({table.detail})" if table.detail else ""),
        f" {', '.join(facts)}{'; every byte is compared, which takes time' if check else ''}",
        columns,
    ]
    return "\n".join(line for line in lines if line.strip())


def line_of(row: Row, report: str) -> str:
    """Returns one row of a table."""
    return latency_line(row) if isinstance(row, Latency) else bandwidth_line(row, report)


def moved_lines(table: Table) -> list[str]:
    """Returns the counters that moved at either end, a line each end."""
    return [
        f" counters of {end} that moved: "
        + ", ".join(f"{k} +{v}" for k, v in sorted(moved.items()))
        for end, moved in (("this end", table.client_moved), (table.worker, table.server_moved))
        if moved
    ]


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null stands for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_json(path: Path, bench: str, content: Mapping[str, Any], error: str | None) -> None:
    """Writes a benchmark's result, whole or as far as it came: `error` says why it ended."""
    result = {
        "schema_version": SCHEMA_VERSION,
        "bench": bench,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": error is None,
        "error": error,
        **content,
    }
    text = json.dumps(_finite(result), indent=1, allow_nan=False) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe
        path.write_text(text)
        return
    # whoever looks, or kills this process, finds the old file or the new one, never half of it
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def check_files(*paths: Path | None) -> None:
    """Makes sure, before anything is measured, that results can be written.

    Raises:
        ConfigError: a path cannot be written.
    """
    for path in paths:
        if path is None:
            continue
        if str(path) == "-":
            raise ConfigError("results go to files, expected a path instead of -, as /dev/stdout")
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"cannot write {path}: permission denied")


def write_csv(path: Path, tables: Sequence[Table], report: str) -> None:
    """Writes all rows, one a line; columns that a row does not have are empty."""
    rows = []
    for table in tables:
        place = {"worker": table.worker, "plane": table.case.plane, "kind": table.case.kind}
        place["test"] = table.case.test
        rows += [place | row for row in table.json(report)["rows"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def check_plot(path: Path | None) -> None:
    """Makes sure, before anything is measured, that it can be drawn.

    Raises:
        ConfigError: matplotlib is not there, or does not know this kind of file.
    """
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'fastdecode_rdma[bench]'") from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"--plot {path}: expected a file that ends in .{', .'.join(kinds)}")


def plot(path: Path, tables: Sequence[Table]) -> None:
    """Draws latency and bandwidth over the message size, a line per table, into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="tight")
    FigureCanvasAgg(figure)  # draws without a screen, whatever the user has set
    draw(figure, tables)
    figure.savefig(path)


def draw(figure: Any, tables: Sequence[Table]) -> None:
    """Draws the two diagrams into a matplotlib figure."""
    axes = figure.subplots(1, 2)
    for table in tables:
        label = f"{table.case.plane} {table.case.kind} {table.worker}"
        sizes = [row.nbytes for row in table.rows]
        if table.case.test == "latency":
            times = [row.t_typical for row in table.rows if isinstance(row, Latency)]
            axes[0].plot(sizes, times, "o-", label=label)
        else:
            rates = [row.average_bytes_per_s for row in table.rows if isinstance(row, Bandwidth)]
            axes[1].plot(sizes, [rate * 8e-9 for rate in rates], "o-", label=label)
    for axis, text in zip(axes, ("t_typical [usec]", "BW average [Gb/s]"), strict=True):
        if axis.lines:  # logarithms of nothing are a warning
            axis.set(xscale="log", yscale="log", xlabel="message [bytes]", ylabel=text)
            axis.legend(fontsize="small")
