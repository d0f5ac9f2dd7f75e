"""Counts of ids that are not admitted go with their ids, to whatever ranks own them."""

from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.support.checkpointed import make_tables
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency
from torchrec_hkv.sharding import table_counters

IDS = torch.arange(96) * 0x9E3779B97F4A7C1
WHERE = {"cells": {"entries": 1024}, "sketch": {"sketch_bytes": 1 << 14}}


def _ask(model, rank, world_size, device, ids):
    """Once for each id over all ranks; ids for ``lru`` alone."""
    mine = ids[rank::world_size]
    lengths = torch.zeros(4, dtype=torch.int64)
    lengths[0] = len(mine)
    keys = ["lru", "lfu", "tt", "stock"]
    batch = KeyedJaggedTensor(keys=keys, values=mine.to(device), lengths=lengths.to(device))
    model(batch).sum().backward()
    return {key: counts["size"] for key, counts in table_counters(model).items()}


def _save(rank, world_size, device, sharding_type, where, folder):
    model = make_tables(
        world_size, device, sharding_type, admission=MinFrequency(4, **WHERE[where])
    )
    _ask(model, rank, world_size, device, IDS)
    _ask(model, rank, world_size, device, IDS)
    _ask(model, rank, world_size, device, IDS[:48])
    checkpoint.save(folder, model)


def _load(rank, world_size, device, sharding_type, where, folder):
    model = make_tables(
        world_size, device, sharding_type, admission=MinFrequency(4, **WHERE[where])
    )
    checkpoint.load(folder, model)
    sizes = []
    for _ in range(3):
        sizes.append(_ask(model, rank, world_size, device, IDS).get("lru", 0))
    return sizes


@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize(
    ("saver", "sharding_type", "loader", "other"),
    [
        (2, "row_wise", 3, "row_wise"),
        (3, "row_wise", 1, "row_wise"),
        (2, "column_wise", 2, "row_wise"),
    ],
)
def test_ids_are_admitted_when_they_have_been_asked_for(
    run_ranks, tmp_path, where, saver, sharding_type, loader, other
):
    run_ranks(saver, _save, sharding_type, where, tmp_path / "c")
    loaded = run_ranks(loader, _load, other, where, tmp_path / "c")
    # Half of them had been asked for three times, the others twice.
    assert [sum(sizes) for sizes in zip(*loaded, strict=True)] == [48, 96, 96]
