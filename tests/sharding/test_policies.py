"""Tables of all policies in one sharded collection agree with a dictionary."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.models import shard_model
from tests.support.scored_model import (
    DIM,
    Dictionary,
    ScoredCase,
    constraints,
    draw,
    to_kjt,
    unsharded,
)
from torchrec_hkv import get_default_sharders, get_epoch, set_epoch
from torchrec_hkv.sharding import BackendEmbeddingCollectionSharder, table_counters

ALL = ("c", "w", "el", "ef", "lru", "lf", "s")
STEPS = 12

pytestmark = pytest.mark.compat


def make(case, world_size, device):
    """A sharded model whose stock table holds ones."""
    sharders = get_default_sharders()
    if case.kind == "distinct":
        sharders = [BackendEmbeddingCollectionSharder(use_index_dedup=True)]
    model = shard_model(unsharded(case), constraints(case), world_size, device, sharders)
    for key, tensor in model.state_dict().items():
        if key.endswith(".s.weight"):
            for shard in tensor.local_shards():
                shard.tensor.fill_(1.0)
    return model


def held(model) -> dict[str, dict[int, list]]:
    """By table key: row value and score of each id. Later column shards have score None."""
    found = {}
    for key, lookup in model.module.over.group_lookups().items():
        state = lookup.export_table(key)
        if "ids" in state:
            there = state["occupied"]
            parts = [state["ids"], state["weight"][:, 0]]
            ids, rows = (part[there].tolist() for part in parts)
            scores = state["scores"][there].tolist() if "scores" in state else [None] * len(ids)
        else:
            ids = torch.cat(list(lookup.ids(key, 1000))).tolist()
            rows = lookup.rows_of(key, torch.tensor(ids))[:, 0].tolist()
            scores = [None] * len(ids)
        found[key] = {i: [row, s] for i, row, s in zip(ids, rows, scores, strict=True)}
    return found


def check_held(case, model, dictionary, rank):
    """Compares this rank's shards with the dictionary."""
    for key, entries in held(model).items():
        name = key.partition("/")[0]
        part = rank if dictionary.parts > 1 else 0
        expected = dictionary.shards[name][part].entries
        assert entries.keys() == expected.keys(), key
        for id_, (row, score) in entries.items():
            assert row == expected[id_][0], (key, id_)
            assert score in (None, expected[id_][1]), (key, id_)


def kept_ids(model, dictionary, rank):
    """By table and shard: the ids held on all ranks."""
    own = {}
    for key, lookup in model.module.over.group_lookups().items():
        part = rank if dictionary.parts > 1 else 0
        own[key.partition("/")[0], part] = set(torch.cat(list(lookup.ids(key, 1000))).tolist())
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {key: ids for found in of_ranks for key, ids in found.items()}


def train(model, case, dictionary, rank, world_size, device, steps):
    """Trains the model and the dictionary, and compares outputs."""
    for step in steps:
        epoch = step // 4
        if {"el", "ef"} & set(case.tables):
            set_epoch(model, epoch)
        batches = [draw(case, other, step) for other in range(world_size)]
        outputs = model(to_kjt(case, batches[rank], device))
        sum(out.sum() for key, out in outputs.items() if key != "s").backward()
        expected = dictionary.train(batches, epoch, kept_ids(model, dictionary, rank))[rank]
        assert outputs.keys() >= expected.keys()
        for key, values in expected.items():
            wanted = values.unsqueeze(1).expand(-1, DIM)
            assert torch.equal(outputs[key].detach().cpu(), wanted), (step, key)


def _run(rank, world_size, device, case):
    model = make(case, world_size, device)
    dictionary = Dictionary(case, world_size)
    train(model, case, dictionary, rank, world_size, device, range(STEPS))
    check_held(case, model, dictionary, rank)
    evicted = {name: sum(s.evicted for s in shards) for name, shards in dictionary.shards.items()}
    assert all(evicted.values()), evicted
    counted = table_counters(model)
    for key, counts in counted.items():
        name = key.rpartition(".")[2].partition("/")[0]
        part = rank if dictionary.parts > 1 else 0
        assert counts["evicted"] == dictionary.shards[name][part].evicted, key
    if {"el", "ef"} & set(case.tables) and counted:
        assert get_epoch(model) == (STEPS - 1) // 4


BAGS = ["row_wise", "table_wise", "column_wise", "table_column_wise"]
SEQUENCES = ["row_wise", "table_wise", "column_wise"]
CASES = [
    *[(ALL, kind, sharding) for kind in ("bags", "weighted") for sharding in BAGS],
    *[(ALL, kind, sharding) for kind in ("sequences", "distinct") for sharding in SEQUENCES],
    # All scores come from weights.
    *[(("w", "lru", "s"), "bags", "row_wise"), (("w", "s"), "sequences", "row_wise")],
    (("w", "ef"), "weighted", "table_wise"),
]


@pytest.mark.parametrize(("tables", "kind", "sharding_type"), CASES)
def test_as_a_dictionary(run_ranks, tables, kind, sharding_type):
    # Column shards on one rank; a row of shards has two buckets.
    run_ranks(
        2, _run, ScoredCase(tables, kind, sharding_type, 96 * (1 + (sharding_type == "row_wise")))
    )


@pytest.mark.parametrize("kind", ["bags", "weighted", "sequences", "distinct"])
def test_on_one_rank(run_ranks, kind):
    run_ranks(1, _run, ScoredCase(ALL, kind, "row_wise", 96))


@pytest.mark.parametrize("sharding_type", ["table_row_wise", "grid_shard"])
def test_on_hosts(run_ranks, sharding_type):
    run_ranks(2, _run, ScoredCase(ALL, "bags", sharding_type, 96), host_size=1)
