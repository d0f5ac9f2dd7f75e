"""Hot rows of data-parallel tables are chosen by the ids of all ranks, and equal on all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.sharding.test_data_parallel import batch_of, lookups_of, make
from torchrec_hkv.sharding import populate_caches

TABLES = ("t", "u")
OPTIONS = {"cache_size": 40, "cache_counted_ids": 300}


def _model(world_size, device, sharding_type, kind="sum", **options):
    options = {**OPTIONS, **options}
    return make(kind, "adagrad", sharding_type, world_size, device, TABLES, **options)


def _cache(model):
    lookup = lookups_of(model).get("t")
    if lookup is None:
        return None
    hot = lookup.hot_rows("t")
    tensors = [hot.ids, hot.rows, hot.states, *lookup.cores("t")]
    return [tensor.detach().cpu().clone() for tensor in tensors]


def _train(rank, world_size, device, sharding_type, kind, populates, sizes=(6, 6), options=None):
    model = _model(world_size, device, sharding_type, kind, **(options or {}))
    outputs, caches = [], 0
    for step in range(6):
        if step in populates:
            caches += populate_caches(model)
        out = model(batch_of(step, rank, device, TABLES, False, sizes))
        outputs.append(out.detach().cpu())
        out.square().sum().backward()
    everywhere = [None] * world_size
    dist.all_gather_object(everywhere, _cache(model))
    counters = lookups_of(model)["t"].counters("t") if "t" in lookups_of(model) else None
    return outputs, everywhere, caches, counters


@pytest.mark.parametrize("kind", ["sum", "mean", "sequences"])
def test_trains_as_a_table_wise_cache(run_ranks, kind):
    parallel = run_ranks(2, _train, "data_parallel", kind, [3])
    wise = run_ranks(2, _train, "table_wise", kind, [3])
    everywhere = parallel[0][1]
    assert all(map(torch.equal, *everywhere))
    (reference,) = [cache for cache in wise[0][1] if cache is not None]
    assert torch.equal(everywhere[0][0], reference[0])  # the same ids at the same positions
    assert int((everywhere[0][0] < 300).sum()) == 40
    for one, other in zip(everywhere[0][1:], reference[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for (ours, *_), (others, *_) in zip(parallel, wise, strict=True):
        for one, other in zip(ours, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert [caches for _, _, caches, _ in parallel] == [1, 1]
    assert sorted(caches for _, _, caches, _ in wise) == [0, 1]
    # The ranks' hits sum up to those of a single rank with the table.
    (counted,) = [counters for *_, counters in wise if counters is not None]
    assert sum(counters["hits"] for *_, counters in parallel) == counted["hits"] > 0


@pytest.mark.parametrize("sizes", [(6, 6), (6, 0)])
def test_stays_alike_when_rows_leave(run_ranks, sizes):
    options = {"cache_size": 8, "cache_populate_every": 1}
    results = run_ranks(2, _train, "data_parallel", "sum", [], sizes, options)
    everywhere = results[0][1]
    assert all(map(torch.equal, *everywhere))
    assert int((everywhere[0][0] < 300).sum()) == 8


def _nothing_to_populate(rank, world_size, device):
    try:
        populate_caches(torch.nn.Linear(1, 1))
    except ValueError as error:
        return str(error)


def test_a_model_without_tables_on_backends(run_ranks):
    for message in run_ranks(2, _nothing_to_populate):
        assert "no tables on backends" in message
