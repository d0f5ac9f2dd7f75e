"""The benchmark of tables with rows in host memory runs, at a size too small for meaningful
figures."""

import csv

import pytest

from tests.support.gpu import NEEDS_GPU

pytest.importorskip("fbgemm_gpu")

from benchmarks import training_step_tiers

pytestmark = NEEDS_GPU


def figure(value, rounded):
    """Matches a figure of three digits that was computed from inputs with this relative
    rounding."""
    return pytest.approx(value, abs=1.01 * value * rounded + 0.00051)


def test_a_row_for_each_side(tmp_path, monkeypatch):
    for name, value in (("WARM_STEPS", 2), ("STEPS", 2), ("ROUNDS", 2)):
        monkeypatch.setattr(training_step_tiers, name, value)
    out = tmp_path / "out.csv"
    training_step_tiers.main(["--rows", "5200000", "--out", str(out)])
    with out.open() as file:
        rows = {row["side"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(training_step_tiers.SIDES)
    assert all(float(row["ms"]) > 0 for row in rows.values())
    for side in ("hkv", "hkv_prefetch"):
        row = rows[side]
        assert int(row["fetched"]) > 0
        assert int(row["written_back"]) > 0
        link, ms = float(row["link_gb_s"]), float(row["ms"])
        link_ms = int(row["fetched"]) * 128 * 4 / link / 1e6
        assert float(row["link_ms"]) == figure(link_ms, 0.05 / link)
        assert float(row["over_link"]) == figure(ms / link_ms, 0.05 / link + 0.0005 / ms)
    assert rows["hkv_prefetch"]["single_ms"] == ""
