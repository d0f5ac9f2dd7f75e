"""Counts of ids that are not admitted move with their ids to the ranks that own them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec import KeyedJaggedTensor

from tests.support.checkpoint_models import make_tables
from tests.support.models import local_tables
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency
from torchrec_hkv.hash_table.admission import admission_bytes
from torchrec_hkv.sharding import table_counters

IDS = torch.arange(96) * 0x9E3779B97F4A7C1
WHERE = {"cells": {"entries": 1024}, "sketch": {"sketch_bytes": 1 << 14}}


def _ask(model, rank, world_size, device, ids):
    """Looks each id up once over all ranks; only ``lru`` gets ids."""
    owned = ids[rank::world_size]
    lengths = torch.zeros(4, dtype=torch.int64)
    lengths[0] = len(owned)
    keys = ["lru", "lfu", "tt", "stock"]
    batch = KeyedJaggedTensor(keys=keys, values=owned.to(device), lengths=lengths.to(device))
    model(batch).sum().backward()
    return {key: counts["size"] for key, counts in table_counters(model).items()}


def _save(rank, world_size, device, sharding_type, where, folder, plain=False):
    model = make_tables(
        world_size, device, sharding_type, admission=MinFrequency(4, **WHERE[where])
    )
    _ask(model, rank, world_size, device, IDS)
    _ask(model, rank, world_size, device, IDS)
    _ask(model, rank, world_size, device, IDS[:48])
    if plain:
        dcp.save(model.state_dict(), checkpoint_id=folder)
    else:
        checkpoint.save(folder, model)


def _load(rank, world_size, device, sharding_type, where, folder, plain=False):
    model = make_tables(
        world_size, device, sharding_type, admission=MinFrequency(4, **WHERE[where])
    )
    _ask(model, rank, world_size, device, IDS + 1)  # the load must discard these counts
    if plain:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
    else:
        checkpoint.load(folder, model)
    sizes = []
    for _ in range(3):
        sizes.append(_ask(model, rank, world_size, device, IDS).get("ebc.embedding_bags.lru", 0))
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize(
    ("saver", "sharding_type", "loader", "other"),
    [
        (2, "row_wise", 2, "row_wise"),
        (2, "row_wise", 3, "row_wise"),
        (3, "row_wise", 1, "row_wise"),
        (3, "row_wise", 2, "column_wise"),
        (2, "column_wise", 2, "row_wise"),
    ],
)
def test_ids_are_admitted_when_they_have_been_asked_for(
    run_ranks, tmp_path, plain, where, saver, sharding_type, loader, other
):
    run_ranks(saver, _save, sharding_type, where, tmp_path / "c", plain)
    loaded = run_ranks(loader, _load, other, where, tmp_path / "c", plain)
    # Half of the ids had been looked up three times before the save, the others twice.
    assert [sum(sizes) for sizes in zip(*loaded, strict=True)] == [48, 96, 96]


def _counts(rank, world_size, device, where, folder):
    """Counts of this rank's table before a save, and after an empty table loads it."""
    admission = MinFrequency(4, **WHERE[where])
    model = make_tables(world_size, device, "row_wise", admission=admission)
    _ask(model, rank, world_size, device, IDS)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    fresh = make_tables(world_size, device, "row_wise", admission=admission)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state)
    size = admission_bytes(admission)
    groups = [local_tables(each)["lru"]._group for each in (model, fresh)]
    return [group.read_admission(0, 0, size).tolist() for group in groups]


@pytest.mark.parametrize("where", list(WHERE))
def test_where_nothing_moves_all_bytes_are_the_same(run_ranks, tmp_path, where):
    for before, after in run_ranks(2, _counts, where, tmp_path / "c"):
        assert any(before)
        assert after == before
