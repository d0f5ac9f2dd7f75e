"""The benchmark of load imbalance counts ids correctly."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

from benchmarks import load_imbalance


def test_the_most_over_the_mean():
    assert load_imbalance.imbalance(torch.tensor([3, 5, 4])) == 0.25


def test_rows_of_a_real_log(tmp_path):
    """If all ids of a column are equal, it has one row, and that row's rank gets all ids."""
    hot = np.full((400, 1), 7)
    ids = np.concatenate([hot, np.arange(400)[:, None]], axis=1)
    np.savez(tmp_path / "clicks.npz", cat=ids)
    out = tmp_path / "out.csv"
    load_imbalance.main(
        [
            "--ids",
            "5000",
            "--batch",
            "100",
            "--data",
            str(tmp_path / "clicks.npz"),
            "--out",
            str(out),
        ]
    )
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == (3 + len(load_imbalance.STRIDES) + 1) * len(load_imbalance.RANKS)
    at_2 = next(row for row in rows if row["stream"] == "clicks" and row["ranks"] == "2")
    assert (at_2["tables"], at_2["ids"], at_2["rows"]) == ("2", "800", "401")
    assert float(at_2["hottest"]) == 0.5
    assert float(at_2["ids_imbalance"]) > 0.4 > float(at_2["rows_imbalance"])


def test_other_files_are_refused(tmp_path):
    np.savez(tmp_path / "no.npz", dog=np.zeros(1))
    with pytest.raises(ValueError, match=r"no.npz has \['dog'\]: it must have cat"):
        load_imbalance.read(tmp_path / "no.npz")
    with pytest.raises(ValueError, match=r"a.txt must be a .npz with cat, or a .dat of ratings"):
        load_imbalance.read(tmp_path / "a.txt")
