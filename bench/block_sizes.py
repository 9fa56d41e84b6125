"""What block and segment lengths cost: builds the attention kernel for each and measures them.

    python bench/block_sizes.py [--blocks 16,32,64,128] [--segments 512,1024,2048] [options of
                                `fastdecode bench attention`]

Both are constants of the build (cython/attention.h): a block is a division and a row offset in the
innermost loops. Segments are swept at the default block, blocks at the default segment.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCH = "import sys; from fastdecode_rdma.cli import main; sys.exit(main(sys.argv[1:]))"
DEFAULTS = {
    name: int(re.search(rf"#define FD_{name} (\d+)", (ROOT / "cython/attention.h").read_text())[1])
    for name in ("BLOCK", "SEG")
}


def build(target: Path, block: int, segment: int) -> None:
    """Builds the whole package for these constants into `target`/lib.

    Raises:
        SystemExit: the build failed.
    """
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.so"))
    flags = f"{os.environ.get('CFLAGS', '')} -DFD_BLOCK={block} -DFD_SEG={segment}"
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", "lib"],
        cwd=target,
        env=os.environ | {"CFLAGS": flags},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(
            f"block_sizes: building block {block}, segment {segment} failed:\n{done.stderr}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", default="16,32,64,128", help="tokens (16,32,64,128)")
    parser.add_argument("--segments", default="512,1024,2048", help="tokens (512,1024,2048)")
    args, rest = parser.parse_known_args()
    pairs = [(int(block), DEFAULTS["SEG"]) for block in args.blocks.split(",")]
    pairs += [(DEFAULTS["BLOCK"], int(segment)) for segment in args.segments.split(",")]
    for block, segment in dict.fromkeys(pairs):
        if block < 16 or block & block - 1 or segment & segment - 1 or segment % block:
            raise SystemExit(
                "block_sizes: blocks and segments are powers of two, blocks of at least 16 tokens, "
                f"segments of whole blocks; got {block} and {segment}"
            )
    with tempfile.TemporaryDirectory() as scratch:
        for block, segment in dict.fromkeys(pairs):
            target = Path(scratch, f"{block}-{segment}")
            build(target, block, segment)
            print(f"\nblock {block}, segment {segment}", flush=True)
            subprocess.run(
                [sys.executable, "-c", BENCH, "bench", "attention", *rest],
                cwd=scratch,
                env=os.environ | {"PYTHONPATH": str(target / "lib")},
                check=True,
            )


if __name__ == "__main__":
    main()
