"""bench/reproduce_papers.py: the quick ones of its figures, and its verdicts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def papers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import papers_fastdecode
    import papers_fastserve
    import papers_table

    yield papers_fastdecode, papers_fastserve, papers_table
    for name in ("papers_fastdecode", "papers_fastserve", "papers_table"):
        sys.modules.pop(name)


def test_the_worked_example_of_fastserve_is_exact(papers) -> None:
    _, serve, _ = papers
    found = {policy: round(serve.example_mean_s(policy), 2) for policy in serve.EXAMPLE}
    assert found == serve.EXAMPLE


def test_fastdecodes_smallest_batches(papers) -> None:
    decode, _, _ = papers
    for shape in (decode.SEVEN, decode.THIRTEEN):
        ours = decode.together(decode.paper_model(shape), 128).tokens_per_s
        assert ours == pytest.approx(decode.THROUGHPUT[shape.name][128], rel=decode.TOLERANCE)


def test_the_inputs_are_the_papers(papers) -> None:
    decode, _, _ = papers
    assert pytest.approx(124e-9, rel=2e-3) == decode.R_7B_S
    dense = decode.dense_of(decode.SEVEN)
    assert dense.block_s(1) == pytest.approx(1.46e-3)
    assert dense.block_s(1024) == pytest.approx(7.08e-3)
    calibrated, predicted = decode.scaling()
    assert calibrated.ours == pytest.approx(1.17, rel=1e-3) and predicted.is_within


def test_load_control_alone_locks_into_a_sawtooth(papers) -> None:
    decode, _, _ = papers
    assert decode.pure_algorithm_1(256, 512, 16) == pytest.approx(0.53, abs=0.005)


def test_verdicts(papers) -> None:
    table = papers[2]
    rows = [
        table.Claim("P", "near", 100, 114, 0.15),
        table.Claim("P", "far", 100, 116, 0.15),
        table.Claim("P", "known", 100, 50, 0.15, note="because"),
        table.Claim("P", "more", 0.97, 0.99, 0.0, absolute=True, at_least=True),
        table.Claim("P", "less", 0.97, 0.96, 0.0, absolute=True, at_least=True),
    ]
    assert [row.verdict for row in rows] == ["holds", "FAILS", "explained", "holds", "FAILS"]
    assert [row.holds for row in rows] == [True, False, True, True, False]
    assert rows[0].error == pytest.approx(0.14) and rows[4].error == pytest.approx(-0.01)
    text = table.render(rows)
    assert "[1] because" in text and "+14.0%" in text
