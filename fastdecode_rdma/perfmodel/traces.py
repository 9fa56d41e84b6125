"""Requests to simulate: lengths from a file, fixed, or drawn; arrivals at once, or drawn."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode_rdma.errors import ConfigError

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 24

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt_len": ("prompt_len", "prompt_tokens", "input_tokens", "num_prefill_tokens"),
    "output_len": ("output_len", "output_tokens", "completion_tokens", "num_decode_tokens"),
    "arrival_s": ("arrival_s", "arrival", "timestamp", "arrived_at"),
}
"""What a trace's columns may be called."""

SHAREGPT = ((161.0, 1.2), (338.0, 1.1))
"""Prompts and outputs of a conversation: mean tokens (as vLLM's paper gives them for ShareGPT) and
sigma of the log-normal distribution, by which the longest are some ten times the mean."""


@dataclass(frozen=True)
class Request:
    """One sequence: when it arrives, and its tokens."""

    arrival_s: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """Distribution of tokens: all `mean` when sigma is 0, else log-normal, from 1 to `most`."""

    mean: float
    sigma: float = 0.0
    most: int = 2048

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Returns so many lengths, int64."""
        if self.sigma == 0:
            return np.full(count, round(self.mean), np.int64)
        mu = math.log(self.mean) - self.sigma**2 / 2
        return np.clip(np.rint(rng.lognormal(mu, self.sigma, count)), 1, self.most).astype(np.int64)


def arrivals(
    count: int, rng: np.random.Generator, *, rate_per_s: float | None, cv: float = 1.0
) -> np.ndarray:
    """Returns ascending seconds [count]: all 0 without a rate, else gaps of a Gamma distribution
    with coefficient of variation `cv`; 1 is a Poisson process, 0 is regular.

    Raises:
        ConfigError: the rate or cv cannot be.
    """
    if rate_per_s is None:
        return np.zeros(count)
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise ConfigError(f"--rate must be above 0, got {rate_per_s:g}")
    if not (math.isfinite(cv) and 0 <= cv <= 100):
        raise ConfigError(f"--cv must be 0 to 100, got {cv:g}")
    if cv == 0:
        return np.arange(count) / rate_per_s
    shape = 1 / cv**2
    return np.cumsum(rng.gamma(shape, 1 / (rate_per_s * shape), count))


def make_trace(
    count: int,
    prompts: Lengths,
    outputs: Lengths,
    *,
    rate_per_s: float | None = None,
    cv: float = 1.0,
    seed: int = 0,
) -> list[Request]:
    """Returns drawn requests in order of arrival.

    Raises:
        ConfigError: a number cannot be.
    """
    if not 1 <= count <= MAX_REQUESTS:
        raise ConfigError(f"--num must be 1 to {MAX_REQUESTS}, got {count}")
    rng = np.random.default_rng(seed)
    columns = prompts.draw(count, rng), outputs.draw(count, rng)
    times = arrivals(count, rng, rate_per_s=rate_per_s, cv=cv)
    return [
        Request(float(t), int(p), int(o))
        for t, p, o in zip(times, columns[0], columns[1], strict=True)
    ]


def read_trace(
    path: Path, *, rate_per_s: float | None = None, cv: float = 1.0, seed: int = 0
) -> list[Request]:
    """Returns the requests of a CSV file with a header, or of JSON lines, in order of arrival. With
    a rate, arrivals are drawn; without one, those of the file count, 0 where it has none.

    Raises:
        ConfigError: it cannot be read; names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file) if path.suffix == ".csv" else _json_lines(file, path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not 1 <= len(rows) <= MAX_REQUESTS:
        raise ConfigError(f"{path} must hold 1 to {MAX_REQUESTS} requests, got {len(rows)}")
    first = 2 if path.suffix == ".csv" else 1
    requests = [_request(row, f"{path}, line {first + i}") for i, row in enumerate(rows)]
    if rate_per_s is not None:
        times = arrivals(len(rows), np.random.default_rng(seed), rate_per_s=rate_per_s, cv=cv)
        requests = [
            Request(float(t), r.prompt_len, r.output_len)
            for t, r in zip(times, requests, strict=True)
        ]
    return sorted(requests, key=lambda request: request.arrival_s)


def _json_lines(lines: Iterable[str], path: Path) -> Iterable[Mapping[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: no JSON object")
        yield row


def _request(row: Mapping[str, Any], place: str) -> Request:
    values: dict[str, float] = {}
    for name, spellings in COLUMNS.items():
        given = next((row[key] for key in spellings if row.get(key) not in (None, "")), None)
        if given is None and name == "arrival_s":
            given = 0.0
        if given is None:
            raise ConfigError(f"{place} has no {name} (or {', '.join(spellings[1:])})")
        try:
            value = float(given)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        low = 0 if name == "arrival_s" else 1
        if isinstance(given, bool) or not low <= value <= MAX_TOKENS:
            raise ConfigError(f"{place}: {name} must be {low} to {MAX_TOKENS}, got {given!r}")
        if name != "arrival_s" and value != int(value):
            raise ConfigError(f"{place}: {name} must be a whole number, got {given!r}")
        values[name] = value
    return Request(values["arrival_s"], int(values["prompt_len"]), int(values["output_len"]))
