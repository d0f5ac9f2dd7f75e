"""Checkpoints keep scores and epochs: a loaded model evicts as a Python dictionary predicts."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.sharding.test_policies import check_held, held, make, train
from tests.support.scored_model import Dictionary, ScoredCase
from torchrec_hkv import checkpoint, get_epoch

BAGS = ScoredCase(("c", "w", "el", "ef"), "bags", "row_wise", 192)
SEQUENCES = ScoredCase(("c", "w", "el", "ef"), "sequences", "table_wise", 96)


def _save(model, folder, way):
    if way == "files":
        checkpoint.save(folder, model)
    else:
        dcp.save(model.state_dict(), checkpoint_id=str(folder))


def _load(model, folder, way):
    if way == "files":
        checkpoint.load(folder, model)
    else:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=str(folder))
        model.load_state_dict(state)


def _goes_on(rank, world_size, device, case, folder, way):
    dictionary = Dictionary(case, world_size)
    first, second = (make(case, world_size, device) for _ in range(2))
    train(first, case, dictionary, rank, world_size, device, range(6))
    _save(first, folder, way)
    saved = copy.deepcopy(dictionary)
    # Content of a later epoch, which the load replaces.
    train(second, case, Dictionary(case, world_size), rank, world_size, device, range(20, 22))
    _load(second, folder, way)
    if held(second):
        assert get_epoch(second) == get_epoch(first) == 1
    check_held(case, second, saved, rank)
    train(second, case, saved, rank, world_size, device, range(6, 10))
    check_held(case, second, saved, rank)


@pytest.mark.parametrize("way", ["files", "state_dict"])
@pytest.mark.parametrize("case", [BAGS, SEQUENCES], ids=["bags", "sequences"])
def test_goes_on(run_ranks, tmp_path, case, way):
    run_ranks(2, _goes_on, case, tmp_path / "saved", way)


def _saved_by_two(rank, world_size, device, folder, way):
    model = make(BAGS, world_size, device)
    train(model, BAGS, Dictionary(BAGS, world_size), rank, world_size, device, range(6))
    _save(model, folder, way)
    return held(model)


def _loaded_by_one(rank, world_size, device, folder, way):
    # Two full shards need a little more capacity in one table. A state_dict needs the same
    # capacity.
    case = dataclasses.replace(BAGS, rows=384 if way == "files" else BAGS.rows)
    model = make(case, world_size, device)
    _load(model, folder, way)
    return held(model), get_epoch(model)


@pytest.mark.parametrize("way", ["files", "state_dict"])
def test_other_ranks(run_ranks, tmp_path, way):
    saved = run_ranks(2, _saved_by_two, tmp_path / "saved", way)
    loaded, epoch = run_ranks(1, _loaded_by_one, tmp_path / "saved", way)[0]
    assert epoch == 1
    for key, entries in loaded.items():
        assert entries == saved[0][key] | saved[1][key]


def _deltas(rank, world_size, device, folder):
    model = make(BAGS, world_size, device)
    dictionary = Dictionary(BAGS, world_size)
    writer = checkpoint.DeltaWriter(model, folder)
    for first in (0, 4, 8):
        train(model, BAGS, dictionary, rank, world_size, device, range(first, first + 4))
        path = writer.write()
    loaded = make(BAGS, world_size, device)
    checkpoint.load(path, loaded)
    assert get_epoch(loaded) == 2
    check_held(BAGS, loaded, dictionary, rank)
    assert checkpoint.digest(loaded) == checkpoint.digest(model)


def test_deltas(run_ranks, tmp_path):
    run_ranks(2, _deltas, tmp_path / "chain")


def _rows(rank, world_size, device):
    """Rows that are imported get score 0, or one lookup in this epoch."""
    model = make(BAGS, world_size, device)
    lookups = model.module.over.group_lookups()
    for name in ("c", "ef", "el"):
        lookups[name].set_epoch(3)
        given = [(torch.arange(7, 11), torch.full((4, 8), 2.0))]
        assert lookups[name].put_rows(name, given, (0, 65536)) == 0
    found = held(model)
    assert [row for row, _ in found["c"].values()] == [2.0] * 4
    assert {score for _, score in found["c"].values()} == {0}
    assert {score for _, score in found["ef"].values()} == {3 << 32 | 1}
    assert {score for _, score in found["el"].values()} == {3 << 32}


def test_imported_rows(run_ranks):
    run_ranks(1, _rows)
