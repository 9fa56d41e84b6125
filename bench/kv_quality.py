"""Perplexity of a model by KV-cache dtype and by weights, decoded with an embedded worker.

    python bench/kv_quality.py --model DIR [--text FILE ...] [--tokens 50000] [--dtypes fp32,int8]
                               [--quantization none,int8]

The text is cut into windows; in each, every token but the first is scored with all before it in
the cache, rounded to the KV dtype (also the keys and values of its own step). Without --text, two
books are taken from the source distribution of PyPI's brotli 1.2.1, which pip fetches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fastdecode_rdma.attention.backend import AttentionBackend
from fastdecode_rdma.attention.local import LocalWorker
from fastdecode_rdma.config import ENTRY_DTYPE, KV_ROW_BYTES, AttentionGeometry, kv_dtype_name
from fastdecode_rdma.engine.decode import MAX_ROWS_PER_SEQUENCE, DecodeBatch, DecodeRunner
from fastdecode_rdma.models import load_model
from fastdecode_rdma.ops import CpuOps
from fastdecode_rdma.tokenizer import Tokenizer
from fastdecode_rdma.worker.kvcache import MemoryBudget

BROTLI = "brotli==1.2.1"
BOOKS = {
    "plrabn12.txt": (
        "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c",
        "Book I",
    ),
    "alice29.txt": (
        "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0",
        "CHAPTER I",
    ),
}
"""File of the distribution -> sha256, and where the book begins behind its preamble."""
WINDOWS_AT_ONCE = 8


def fetch_books() -> list[str]:
    """The two books, from the source distribution, checked by hash."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-build-isolation", "--no-binary", ":all:", "--dest", folder, BROTLI),
            ],
            check=True,
        )
        (archive,) = Path(folder).glob("*.tar.gz")
        texts = []
        with tarfile.open(archive) as tar:
            for name, (digest, beginning) in BOOKS.items():
                member = next(m for m in tar.getmembers() if m.name.endswith(f"testdata/{name}"))
                source = tar.extractfile(member)
                assert source is not None
                data = source.read()
                if hashlib.sha256(data).hexdigest() != digest:
                    raise SystemExit(f"{name} of {BROTLI} is not the file that was measured")
                text = data.decode("latin-1")
                texts.append(text[text.index(beginning) :])
    return texts


class Scorer:
    """Negative log-likelihoods of token windows under one KV dtype and kind of weights."""

    def __init__(self, path: Path, kv_dtype: str, window: int, quantization: str | None) -> None:
        ops = CpuOps(deterministic=True, quantization=quantization)
        self.model = load_model(path, ops, max_model_len=window)
        config = self.model.config
        rows = WINDOWS_AT_ONCE * MAX_ROWS_PER_SEQUENCE
        geometry = AttentionGeometry(
            groups=config.kv_groups, scale=config.scale, softcap=config.attn_softcap,
            kv_dtype=kv_dtype, max_rows=rows, max_model_len=window,
        )  # fmt: skip
        worker = LocalWorker(geometry, MemoryBudget(8 << 30), num_threads=torch.get_num_threads())
        self.backend = AttentionBackend([worker], geometry)
        self.runner = DecodeRunner(self.model, self.backend)
        self.step = 0

    def score(self, windows: np.ndarray) -> float:
        """Sum of -log p of all tokens but the first of each window [W, L]."""
        total = 0.0
        handles = list(range(len(windows)))
        for start in range(0, windows.shape[1] - 1, MAX_ROWS_PER_SEQUENCE):
            stop = min(start + MAX_ROWS_PER_SEQUENCE, windows.shape[1] - 1)
            logits = self._logits(windows, handles, start, stop)
            targets = torch.from_numpy(windows[:, start + 1 : stop + 1].reshape(-1, 1).copy())
            chosen = logits.gather(1, targets).double().squeeze(1)
            total += float((torch.logsumexp(logits.double(), 1) - chosen).sum())
        self.backend.free(0, handles)
        return total

    def _logits(
        self, windows: np.ndarray, handles: Sequence[int], start: int, stop: int
    ) -> torch.Tensor:
        """Logits after each of the tokens [start, stop) of all windows."""
        count = stop - start
        self.step += 1
        batch = DecodeBatch(
            [],
            [],
            [(0, np.array([(handle, start, count, 0) for handle in handles], ENTRY_DTYPE))],
            torch.from_numpy(windows[:, start:stop].reshape(-1).copy()),
            torch.arange(start, stop).repeat(len(handles)),
            list(range(count * len(handles))),
        )
        return self.runner.run(batch, 0, self.step)[0]

    def close(self) -> None:
        self.backend.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a model directory")
    parser.add_argument("--text", type=Path, nargs="*", help="files to score instead of the books")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens at least (50000)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window (1024)")
    parser.add_argument("--dtypes", default=",".join(KV_ROW_BYTES), help="KV dtypes")
    parser.add_argument(
        "--quantization", default="none", help="of weights: none, int8, comma-separated (none)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    texts = [path.read_text() for path in args.text] if args.text else fetch_books()
    tokenizer = Tokenizer.from_directory(args.model)
    ids = np.concatenate([np.asarray(tokenizer.encode(text), np.int64) for text in texts])
    count = -(-args.tokens // (args.window - 1))
    count = -(-count // WINDOWS_AT_ONCE) * WINDOWS_AT_ONCE
    if len(ids) < args.window * WINDOWS_AT_ONCE:
        raise SystemExit(f"the text has {len(ids)} tokens, too few for windows of {args.window}")
    count = min(count, len(ids) // args.window // WINDOWS_AT_ONCE * WINDOWS_AT_ONCE)
    places = np.linspace(0, len(ids) - args.window, count).astype(int)  # spread over the text
    windows = np.stack([ids[at : at + args.window] for at in places])
    scored = count * (args.window - 1)
    figures: dict[str, float] = {}
    scorers = {
        name if kind is None else f"{name}, {kind} weights": Scorer(
            args.model, name, args.window, kind
        )
        for kind in (None if kind == "none" else kind for kind in args.quantization.split(","))
        for name in map(kv_dtype_name, args.dtypes.split(","))
    }
    sums = dict.fromkeys(scorers, 0.0)
    started = time.monotonic()
    for at in range(0, count, WINDOWS_AT_ONCE):  # in turn: a partial run compares all dtypes
        for name, scorer in scorers.items():
            sums[name] += scorer.score(windows[at : at + WINDOWS_AT_ONCE])
        done = (at + WINDOWS_AT_ONCE) * (args.window - 1)
        interim = "  ".join(f"{n} {math.exp(s / done):.4f}" for n, s in sums.items())
        print(f"{done:>7} tokens, {time.monotonic() - started:.0f} s: {interim}", flush=True)
    for name, scorer in scorers.items():
        scorer.close()
        figures[name] = math.exp(sums[name] / scored)
    head_dim = scorers[next(iter(scorers))].model.config.head_dim
    base = figures.get("fp32", next(iter(figures.values())))
    print(f"\n{'KV dtype':<18} {'bytes/value':>11} {'perplexity':>10} {'difference':>10}")
    for name, value in figures.items():
        size = KV_ROW_BYTES[name.partition(",")[0]](head_dim) / head_dim
        print(f"{name:<18} {size:>11.3f} {value:>10.4f} {value / base - 1:>+10.3%}")
    print(f"{scored} tokens, windows of {args.window}; load average {os.getloadavg()[0]:.2f}")
    if args.json:
        args.json.write_text(json.dumps({"tokens": scored, "perplexity": figures}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
