"""inspect prints a table's policy and states under the names of their options."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv import AgedLFU, HashTable
from torchrec_hkv.cli import main


@pytest.mark.parametrize(
    ("eviction", "shown"),
    [("lru", "lru"), ("adaptive", "adaptive or AgedLFU"), (AgedLFU(3.0), "adaptive or AgedLFU")],
)
@pytest.mark.parametrize("states", [0, 1, 16])
def test_rows(tmp_path, capsys, eviction, shown, states):
    table = HashTable(dim=8, capacity=100, eviction=eviction, state_dim=states, seed=3)
    table.find_or_insert(torch.arange(10))
    table.save(tmp_path / "table")
    assert main(["inspect", str(tmp_path / "table")]) == 0
    line = f"  rows     8 x float32, states {states} x float32, eviction {shown}, seed 3\n"
    assert line in capsys.readouterr().out
