"""A digest changes if and only if a value changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.checkpoint_models import make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import Adam, TableGroup, TableSpec, Uniform
from torchrec_hkv.hash_table.files.digest import table_digest


def _group(device, eviction="lfu"):
    spec = TableSpec("t", 200, 6, eviction=eviction, initializer=Uniform(-1, 1))
    return TableGroup([spec], [0], Adam(), device)


def _filled(device, eviction="lfu"):
    group = _group(device, eviction)
    ids = torch.randint(-(2**63), 2**63 - 1, (90,), device=device)
    group.find_or_insert(ids, torch.tensor([0, 90], device=device), 1)
    state = group.export_table(0)
    states = torch.randn(state.states.shape, device=device)
    states[~state.occupied] = 0
    group.load_table(0, dataclasses.replace(state, states=states))
    return group


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_every_value_counts(device_type, eviction):
    group = _filled(device_type, eviction)
    state, digest = group.export_table(0), table_digest(group, 0)
    assert digest[0] == 90
    slot = int(state.occupied.nonzero()[17])
    fields = ["ids", "rows", "states", "last_steps", "scores"]
    found = {digest}
    for field in fields[: 5 if eviction == "lfu" else 4]:
        width = getattr(state, field).shape[1] if field in ("rows", "states") else 1
        for column in range(width):
            changed = getattr(state, field).clone()
            flat = changed.view(changed.shape[0], -1).view(
                torch.int32 if changed.dtype != torch.int64 else torch.int64
            )
            flat[slot, column] ^= 1
            other = _group(device_type, eviction)
            replaced = dataclasses.replace(state, **{field: changed})
            if field == "ids":  # the id belongs to other buckets
                other.find_or_insert(
                    changed[state.occupied], torch.tensor([0, 90], device=device_type), 1
                )
            else:
                other.load_table(0, replaced)
            found.add(table_digest(other, 0))
    # 6 columns of rows and 12 of states; all digests differ.
    assert len(found) == 1 + 1 + 6 + 12 + 1 + (eviction == "lfu")


def test_batches_make_no_difference(device_type):
    group = _filled(device_type)
    assert len({table_digest(group, 0, size) for size in (1, 1000, 5000, 1 << 24)}) == 1


def _changed(rank, world_size, device):
    model = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(3))
    before = checkpoint.digest(model)
    again = checkpoint.digest(model)
    train(model, rank, device, range(1))
    return before, again, checkpoint.digest(model)


def test_of_a_model(run_ranks):
    results = run_ranks(2, _changed)
    assert results[0] == results[1]
    before, again, after = results[0]
    assert set(before) == {"ebc.embedding_bags.lru", "ebc.embedding_bags.lfu"}
    assert before == again
    assert all(before[table] != after[table] for table in before)
