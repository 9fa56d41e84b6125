"""The figures of the two papers that this library builds on, beside what its model predicts.

    python bench/reproduce_papers.py [--only fastdecode|fastserve] [--json FILE]

The performance model and the simulator of fastdecode_rdma.perfmodel are given the papers' hardware;
papers_fastdecode.py and papers_fastserve.py say what exactly. Errors are signed. Exits with 0 only
if every figure is within its tolerance, or it is said why it is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import papers_fastdecode
import papers_fastserve
from papers_table import render

PAPERS = {"fastdecode": papers_fastdecode.claims, "fastserve": papers_fastserve.claims}


def main() -> int:
    parser = argparse.ArgumentParser(description="the papers' figures beside ours")
    parser.add_argument("--only", choices=tuple(PAPERS), help="one of the papers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    claims = [
        claim for name, make in PAPERS.items() if args.only in (None, name) for claim in make()
    ]
    print(render(claims))
    failed = [claim for claim in claims if not claim.holds]
    within = sum(claim.is_within for claim in claims)
    print(f"{within} of {len(claims)} within tolerance, {len(failed)} neither that nor explained")
    if args.json is not None:
        rows = [asdict(c) | {"error": c.error, "verdict": c.verdict} for c in claims]
        args.json.write_text(json.dumps({"schema_version": 1, "claims": rows}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
