"""The benchmark of an id's cost by table size runs, and chooses sizes that fit."""

from __future__ import annotations

import csv

import pytest
import torch

pytest.importorskip("fbgemm_gpu")

from benchmarks import id_cost


def _run(tmp_path, *arguments):
    out = tmp_path / "out.csv"
    small = ["--dims", "8", "12", "--batch", "64", "--steps", "2", "--device", "cpu"]
    id_cost.main([*small, "--out", str(out), *arguments])
    return list(csv.DictReader(out.open()))


@pytest.mark.slow
def test_a_row_for_each_size(tmp_path):
    rows = _run(tmp_path, "--rows", "500", "3000")
    assert [(row["dim"], row["rows"]) for row in rows] == [
        ("8", "500"),
        ("8", "3000"),
        ("12", "500"),
        ("12", "3000"),
    ]
    for row in rows:
        ratio = float(row["hkv_ms"]) / float(row["fbgemm_ms"])
        assert float(row["ratio"]) == pytest.approx(ratio, rel=0.002)
        assert float(row["ordered_ms"]) > 0
        assert float(row["create_ms"]) > 0 < float(row["fill_mids"])
        # The rows of all slots: 4 bytes a column, and a state.
        assert float(row["hkv_gb"]) >= float(row["fbgemm_gb"])


@pytest.mark.slow
def test_a_size_that_does_not_fit_is_left_out(tmp_path, capsys):
    rows = _run(tmp_path, "--rows", "500", "100000000", "--memory-gb", "2.1")
    assert {row["rows"] for row in rows} == {"500"}
    assert "left out: 100000000 rows of 8 columns" in capsys.readouterr().out


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_sizes_end_with_the_largest_that_fits(dim):
    memory, batch = 80 * 10**9, 1 << 20
    rows = id_cost.fitting(dim, 0.85, batch, memory)
    assert rows == sorted(rows)
    assert rows[:3] == [10**6, 10**7, 10**8][: len(rows)]
    maximum = id_cost.Size(rows[-1], dim, 0.85)
    assert 0.4 * memory < maximum.bytes(batch) <= memory
    leading = int(str(rows[-1])[0])
    following = rows[-1] * (leading + 1) // leading
    assert id_cost.Size(following, dim, 0.85).bytes(batch) > memory
    assert id_cost.fitting(dim, 0.85, batch, 10**6) == []


def test_both_sides_train():
    """A step changes the rows of its ids, as it does in FBGEMM's table."""
    size, device = id_cost.Size(200, 8, 0.85), torch.device("cpu")
    ids, offsets = torch.arange(10), torch.arange(11)
    for side in (id_cost.HashSide(size, 10, device), id_cost.make_fbgemm(size, device)):
        before = side.forward(ids, offsets)
        assert before.shape == (10, 8)
        assert before.abs().max() <= 0.05
        before.backward(torch.ones_like(before))
        # The first step of row-wise Adagrad divides the gradient by its root mean square.
        after = side.forward(ids, offsets).detach()
        torch.testing.assert_close(before.detach() - after, torch.full_like(after, 0.01))


def test_order_of_slots():
    side = id_cost.HashSide(id_cost.Size(3000, 8, 0.85), 100, torch.device("cpu"))
    ids = torch.randint(3000, (100,))
    ordered = side.in_slot_order(ids)
    assert sorted(ordered.tolist()) == sorted(ids.tolist())
    slots = side.slots_of(ordered)
    assert slots[0] >= 0
    assert (slots.diff() >= 0).all()
    assert (side.slots_of(ids).diff() < 0).any()


@pytest.mark.slow
def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.svg"
    _run(tmp_path, "--rows", "500", "3000", "--plot", str(picture))
    assert picture.stat().st_size > 10_000
