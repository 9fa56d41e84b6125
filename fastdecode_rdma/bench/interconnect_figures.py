"""Figures of one measurement, in perftest's terms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastdecode_rdma.errors import ConfigError

REPORTS = {"Gb": (8e-9, "Gb/sec"), "GB": (1e-9, "GB/sec"), "MiB": (2.0**-20, "MiB/sec")}
"""--report -> (units per byte, as perftest writes the unit)."""


def unit_key(report: str) -> str:
    """Returns a bandwidth unit as it stands in the keys of JSON and CSV."""
    return {"Gb": "gbit_per_s", "GB": "gb_per_s", "MiB": "mib_per_s"}[report]


@dataclass(frozen=True)
class Latency:
    """Times of one message size, in microseconds: half the round trip, of reads the full one."""

    nbytes: int
    iterations: int
    t_min: float
    t_max: float
    t_typical: float
    t_avg: float
    t_stdev: float
    p99: float
    p999: float

    @classmethod
    def of(cls, nbytes: int, iterations: int, times_ns: np.ndarray, *, is_half: bool) -> Latency:
        """Works out a row from round trips in nanoseconds; typical is the median.

        Raises:
            ConfigError: there is none.
        """
        if not len(times_ns):
            raise ConfigError("not one message came back in the time: raise --duration")
        times = np.sort(times_ns).astype(np.float64) / (2000 if is_half else 1000)

        def share(part: float) -> float:
            return float(times[min(len(times) - 1, int(np.ceil(len(times) * part)))])

        return cls(
            nbytes, iterations, float(times[0]), float(times[-1]), float(np.median(times)),
            float(times.mean()), float(times.std()), share(0.99), share(0.999),
        )  # fmt: skip

    def json(self) -> dict[str, float]:
        """Returns the row with units in its keys."""
        return {
            "message_bytes": self.nbytes,
            "iterations": self.iterations,
            "t_min_usec": self.t_min,
            "t_max_usec": self.t_max,
            "t_typical_usec": self.t_typical,
            "t_avg_usec": self.t_avg,
            "t_stdev_usec": self.t_stdev,
            "percentile_99_usec": self.p99,
            "percentile_99_9_usec": self.p999,
        }


@dataclass(frozen=True)
class Bandwidth:
    """Rates of one message size; both directions together where it went both ways."""

    nbytes: int
    iterations: int
    peak_bytes_per_s: float
    average_bytes_per_s: float
    messages_per_s: float

    @classmethod
    def of(
        cls, nbytes: int, iterations: int, elapsed_s: float, *, peak: float, directions: int
    ) -> Bandwidth:
        """Works out a row; `peak` is in bytes per second and one direction, 0 where the run was too
        short for one."""
        rate = directions * iterations / elapsed_s
        average = rate * nbytes
        return cls(nbytes, iterations, max(directions * peak, average), average, rate)

    @classmethod
    def total(cls, rows: list[Bandwidth]) -> Bandwidth:
        """Adds up what ran at the same time."""
        return cls(
            rows[0].nbytes,
            sum(row.iterations for row in rows),
            sum(row.peak_bytes_per_s for row in rows),
            sum(row.average_bytes_per_s for row in rows),
            sum(row.messages_per_s for row in rows),
        )

    def json(self, report: str) -> dict[str, float]:
        """Returns the row with units in its keys."""
        factor, key = REPORTS[report][0], unit_key(report)
        return {
            "message_bytes": self.nbytes,
            "iterations": self.iterations,
            f"bw_peak_{key}": self.peak_bytes_per_s * factor,
            f"bw_average_{key}": self.average_bytes_per_s * factor,
            "msg_rate_mpps": self.messages_per_s / 1e6,
        }


LATENCY_HEAD = (
    f" {'#bytes':<10} {'#iterations':<12} {'t_min[usec]':>12} {'t_max[usec]':>12} "
    f"{'t_typical[usec]':>16} {'t_avg[usec]':>12} {'t_stdev[usec]':>14} {'99%[usec]':>10} "
    f"{'99.9%[usec]':>12}"
)


def latency_line(row: Latency) -> str:
    """Returns a row under LATENCY_HEAD."""
    return (
        f" {row.nbytes:<10} {row.iterations:<12} {row.t_min:>12.2f} {row.t_max:>12.2f} "
        f"{row.t_typical:>16.2f} {row.t_avg:>12.2f} {row.t_stdev:>14.2f} {row.p99:>10.2f} "
        f"{row.p999:>12.2f}"
    )


def bandwidth_head(report: str) -> str:
    """Returns the columns of a bandwidth table."""
    unit = REPORTS[report][1]
    return (
        f" {'#bytes':<10} {'#iterations':<12} {f'BW peak[{unit}]':>18} "
        f"{f'BW average[{unit}]':>21} {'MsgRate[Mpps]':>14}"
    )


def bandwidth_line(row: Bandwidth, report: str) -> str:
    """Returns a row under bandwidth_head()."""
    factor = REPORTS[report][0]
    return (
        f" {row.nbytes:<10} {row.iterations:<12} {row.peak_bytes_per_s * factor:>18.3f} "
        f"{row.average_bytes_per_s * factor:>21.3f} {row.messages_per_s / 1e6:>14.6f}"
    )
