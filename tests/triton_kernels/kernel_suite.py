"""What bench/gpu_suite.py times is the same in Triton and in torch; run by test_interpreted.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastdecode_rdma.triton_kernels.head import HeadStatistics

SUITE = Path(__file__).resolve().parents[2] / "bench" / "gpu_suite.py"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark with a tiny model."""
    spec = importlib.util.spec_from_file_location("gpu_suite", SUITE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_suite", module)
    spec.loader.exec_module(module)
    tiny = {"HIDDEN": 128, "WIDTH": 256, "VOCAB": 70, "NUM_Q": 2, "NUM_KV": 1, "HEAD_DIM": 64}
    for name, value in tiny.items():
        setattr(module, name, value)
    module.COLD_BYTES, module.DEVICE = 1, str(torch.empty(0).device)
    return module


def test_every_case_runs_and_agrees(suite) -> None:
    torch.manual_seed(0)
    for case in suite.cases(2, torch.float16):
        want = case.eager(case.eager_weights[0])
        got = case.ours(case.weights[0])
        if isinstance(got, HeadStatistics):
            got, want = got.log_sum, want[1]
        if case.name in ("add + RMSNorm", "rotary + pack rows"):
            continue  # in place: a second call has other inputs, or there is no result
        # 16-bit floats in other orders; int4 keeps 4 bits of a weight
        rtol = 0.25 if "int4" in case.name else 0.02
        assert (got - want).abs().max() <= rtol * want.abs().max(), case.name


def test_arguments(suite, capsys) -> None:
    assert suite.parse_args(["--rows", "1,64"]).rows == [1, 64]
    for bad in ("1,x", "0"):
        with pytest.raises(SystemExit) as stopped:
            suite.main(["--rows", bad])
        assert stopped.value.code == 2
    assert "--rows" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(suite, capsys) -> None:
    assert suite.main([]) == 2
    assert capsys.readouterr().err.startswith("gpu_suite: no CUDA device here")
