"""The simulation of many ranks counts the ids of each owner and the bytes of a step correctly."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from benchmarks import scale


def _run(tmp_path, *arguments):
    out = tmp_path / "out.csv"
    small = ["--rows", "100000", "--batch", "64", "--bag", "2", "--tables", "3", "--out", str(out)]
    scale.main([*small, *arguments])
    return list(csv.DictReader(out.open()))


def test_most_over_mean():
    assert scale.imbalance(torch.tensor([3, 5, 4])) == 1.25


def test_a_hot_id_has_one_owner(tmp_path):
    rows = _run(tmp_path, "--ranks", "8", "64", "--power", "1.2")
    assert len(rows) == 2 * 3
    row_wise = {row["ranks"]: row for row in rows if row["plan"] == "row_wise"}
    assert float(row_wise["64"]["ids_imbalance"]) > 2 * float(row_wise["8"]["ids_imbalance"])
    assert float(row_wise["64"]["dedup_imbalance"]) < float(row_wise["64"]["ids_imbalance"])
    # Pooled rows of 64 bags of 64 columns, to and from each of the 56 ranks on other hosts.
    values = 3 * 56 * (2 * 4 * 64 * 64 + 4 * 64 + 8 * 128 / 64)
    assert float(row_wise["64"]["inter_mb"]) == pytest.approx(values / 1e6, abs=0.01)


def test_groups_send_nothing_to_other_hosts_but_syncs(tmp_path):
    rows = _run(tmp_path, "--ranks", "8", "16", "--power", "0.8", "--sync-every", "5")
    one, two = (row for row in rows if row["plan"] == "groups")
    assert float(one["sync_mb"]) == float(one["inter_mb"]) == float(two["inter_mb"]) == 0
    # 2 hosts of 8 ranks; each host looks up at most 1024 ids of 3 tables in each of 5 steps.
    maximum = 5 * 3 * (1024 / 8 * 8 + 2048 / 8 * (4 * 67 + 8))
    assert 0.8 * maximum < float(two["sync_mb"]) * 1e6 <= maximum


@pytest.mark.slow
def test_bandwidths_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "b.json").write_text(json.dumps({"hbm": 1.0}))
    arguments = ("--ranks", "8", "--power", "1.05", "--plot", str(tmp_path / "p.svg"))
    fast = _run(tmp_path, *arguments)
    slow = _run(tmp_path, *arguments, "--bandwidths", str(tmp_path / "b.json"))
    assert float(slow[0]["rows_ms"]) > 100 * float(fast[0]["rows_ms"])
    assert (tmp_path / "p.svg").stat().st_size > 10_000


def test_a_host_that_is_not_full_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        _run(tmp_path, "--ranks", "12")
    assert "--ranks 12 is no multiple of --ranks-of-host 8" in capsys.readouterr().err
