"""On any number of threads, a CPU's backward sums gradients in batch order: in pieces of 64, which
end at multiples of 64, and then the pieces in double."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.batches import Bags, lookup, rows_by_id
from tests.support.piece_sums import sums_in_pieces
from torchrec_hkv.hash_table import (
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
)

BATCH, IDS, LENGTH = 700, 40_000, 100
#: Two features share a table; a table's positions are cut in several parts or in one.
DIMS, FEATURES = (64, 132, 3), [0, 0, 1, 2]


def draw(seed: int) -> tuple[Bags, Tensor, Tensor]:
    """Bags with frequent ids and unique ones, weights, and gradients of the output."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LENGTH, (BATCH * len(FEATURES),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    unit = torch.rand(int(offsets[-1]), generator=generator)
    ids = (IDS * unit**3).long()
    columns = sum(DIMS[table] for table in FEATURES)
    grad = torch.randn(BATCH, columns, generator=generator)
    # Most ids of a bag have equal weights.
    weights = torch.rand(len(ids), generator=generator).mul_(4).round_().add_(0.3)
    return Bags(ids, offsets, BATCH), weights, grad


def make(optimizer: Optimizer, **options: Any) -> TableGroup:
    """Tables that hold all ids."""
    specs = [
        TableSpec(f"t{dim}", 2 * IDS, dim, initializer=Uniform(-1, 1), **options) for dim in DIMS
    ]
    return TableGroup(specs, FEATURES, optimizer, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_to_the_last_bit(set_threads, threads, weighted, mean):
    bags, weights, grad = draw(threads)
    group = make(SGD())
    set_threads(threads)
    out = lookup(group, bags, weights if weighted else None, mean, learning_rate=1.0)
    before = [rows_by_id(group, table) for table in range(len(DIMS))]
    out.backward(grad)
    set_threads(1)  # with one thread, index_add_ adds in index order
    lengths = bags.offsets.diff()
    scale = weights if weighted else torch.ones(len(bags.ids))
    if mean:
        scale = scale * (1.0 / lengths.repeat_interleave(lengths))
    # By table: the ids of its positions, and their gradients.
    positions: list[list[Tensor]] = [[] for _ in DIMS]
    terms: list[list[Tensor]] = [[] for _ in DIMS]
    first = 0
    for feature, table in enumerate(FEATURES):
        dim, bag = DIMS[table], feature * BATCH
        own = slice(int(bags.offsets[bag]), int(bags.offsets[bag + BATCH]))
        bag_of = torch.arange(BATCH).repeat_interleave(lengths[bag : bag + BATCH])
        positions[table].append(bags.ids[own])
        terms[table].append(grad[:, first : first + dim][bag_of] * scale[own, None])
        first += dim
    sums = [
        sums_in_pieces(torch.cat(ids), torch.cat(of), IDS)
        for ids, of in zip(positions, terms, strict=True)
    ]
    for table, summed in enumerate(sums):
        after = rows_by_id(group, table)
        ids = sorted(after)
        assert len(ids) > 5000
        expected = torch.stack([before[table][id_] for id_ in ids]) - summed[ids]
        assert torch.equal(torch.stack([after[id_] for id_ in ids]), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [RowWiseAdagrad(), Adagrad(), Adam(), Adam(clip_norm=0.5)],
    ids=["row-wise adagrad", "adagrad", "adam", "clipped adam"],
)
def test_threads_change_no_bit(set_threads, optimizer):
    def trained(threads: int) -> list[Tensor]:
        set_threads(threads)
        group = make(optimizer)
        for seed in range(2):
            bags, weights, grad = draw(seed)
            lookup(group, bags, weights, learning_rate=0.1).backward(grad)
        states = [group.export_table(table) for table in range(len(DIMS))]
        return [part for state in states for part in (state.ids, state.rows, state.states)]

    alone, together = trained(1), trained(4)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert all(bool(part.isfinite().all()) for part in alone)


@pytest.mark.parametrize("policy", ["lfu", "epoch_lfu", "epoch_lru"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_threads_change_no_16_bit_row_and_no_score(set_threads, dtype, policy):
    def trained(threads: int) -> list[Tensor]:
        set_threads(threads)
        group = make(RowWiseAdagrad(), dtype=dtype, eviction=policy)
        for seed in range(3):
            bags, _, grad = draw(seed)
            lookup(group, bags, learning_rate=0.1).backward(grad)
        states = [group.export_table(table) for table in range(len(DIMS))]
        return [part for of in states for part in (of.ids, of.rows, of.states, of.scores)]

    alone, together = trained(1), trained(4)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    counted = set(torch.cat([draw(seed)[0].ids for seed in range(3)]).tolist())
    assert len(counted) > 10_000
    if policy == "lfu":
        lookups = sum(int(part.sum()) for part in alone[3::4])
        assert lookups == sum(len(draw(seed)[0].ids) for seed in range(3))
