"""What every data plane owes the pump, on real queue pairs: the tests of tests/transport/planes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PATH = Path(__file__).resolve().parents[2] / "transport/planes/test_contract.py"
_spec = importlib.util.spec_from_file_location("rdma_planes_contract", _PATH)
_contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_contract)

globals().update({name: it for name, it in vars(_contract).items() if name.startswith("test_")})
