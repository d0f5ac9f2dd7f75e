"""Pooled rows equal torch's EmbeddingBag in float64."""

import pytest
import torch

from tests.support.batches import Bags, find, insert, lookup, random_ids, rate
from tests.support.gpu import needs_gpu
from torchrec_hkv.hash_table import TableGroup, TableSpec, Uniform, initial_rows

DIMS = [(16, 16), (1, 3), (64, 130, 7), (300, 4), (129,), (2048, 1)]


def expected(group, bags, feature_tables, weights, mean):
    """EmbeddingBag over initial rows, as float64 [batch, columns]."""
    outs = []
    for feature, table in enumerate(feature_tables):
        spec = group.tables[table]
        ids, offsets = bags.feature(feature)
        rows = initial_rows(ids, spec.dim, table=spec.name, initializer=spec.initializer).double()
        scale = torch.ones(len(ids), dtype=torch.double)
        if weights is not None:
            first = int(bags.offsets[feature * bags.batch_size])
            scale = weights[first : first + len(ids)].double()
        pooled = torch.nn.functional.embedding_bag(
            torch.arange(len(ids)),
            rows if len(ids) else rows.new_zeros(1, spec.dim),
            offsets,
            mode="sum",
            per_sample_weights=scale,
            include_last_offset=True,
        )
        if mean:
            pooled /= offsets.diff().clamp(min=1).unsqueeze(1)
        outs.append(pooled)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_to_embedding_bag(device_type, dims, mean, weighted):
    specs = [TableSpec(f"t{i}", 500, dim, initializer=Uniform(-1, 1)) for i, dim in enumerate(dims)]
    features = [*range(len(dims)), 0]
    group = TableGroup(specs, features, device=device_type)
    bags = Bags.random(len(features), 50, random_ids(200))
    weights = torch.rand(len(bags.ids)) if weighted else None
    reference = expected(group, bags, features, weights, mean)
    on_device = None if weights is None else weights.to(device_type)
    out = lookup(group, bags.to(device_type), on_device, mean)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.detach().cpu().double(), reference, rtol=1e-5, atol=1e-6)


def test_evaluation_gives_missing_ids_their_initial_rows_and_changes_nothing(device_type):
    group = TableGroup(
        [TableSpec("t", 100, 8, "lfu", initializer=Uniform(-1, 1))], [0], device=device_type
    )
    known, unknown = random_ids(50), random_ids(50)
    insert(group, Bags.flat(known.to(device_type)))
    before = group.export_table(0)
    bags = Bags(torch.cat([known, unknown]), torch.arange(101), 100).to(device_type)
    slots = find(group, bags)
    assert (slots[:50] >= 0).all()
    assert (slots[50:] == -1).all()
    anchor = torch.empty(0, device=device_type)
    out = group.pooled_lookup(
        anchor, bags.ids, bags.offsets, None, slots, 100, False, None, rate(0.1, group)
    )
    rows = initial_rows(bags.ids, 8, table="t", initializer=Uniform(-1, 1))
    assert torch.equal(out, rows)
    assert not out.requires_grad
    after = group.export_table(0)
    assert all(
        torch.equal(a, b) for a, b in zip(vars(before).values(), vars(after).values(), strict=True)
    )
    assert group.counters()[0]["lookups"] == 50


def test_long_and_empty_bags(device_type):
    group = TableGroup(
        [TableSpec("t", 5000, 12, initializer=Uniform(-1, 1))], [0], device=device_type
    )
    lengths = torch.tensor([0, 4000, 0, 1, 0])
    bags = Bags(random_ids(4001), torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]), 5)
    out = lookup(group, bags.to(device_type)).detach().cpu()
    reference = expected(group, bags, [0], None, False)
    assert (out[[0, 2, 4]] == 0).all()
    torch.testing.assert_close(out.double(), reference, rtol=1e-4, atol=1e-4)


@needs_gpu
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dims", [(128, 36), (64, 8), (32,)], ids=str)
def test_a_large_batch(dims, weighted, mean):
    """Tiles of lanes process several bags in several chunks; some ids have no row."""
    known, unknown = random_ids(1000).cuda(), random_ids(20).cuda()
    specs = [
        TableSpec(f"t{i}", 5000, dim, initializer=Uniform(-1, 1)) for i, dim in enumerate(dims)
    ]
    group = TableGroup(specs, [*range(len(dims))], device="cuda")
    for table in range(len(dims)):
        offsets = torch.tensor([0] * (table + 1) + [1000] * (len(dims) - table), device="cuda")
        group.find_or_insert(known, offsets, 1)
    batch_size = 400_000
    lengths = torch.randint(12, (batch_size * len(dims),), device="cuda")
    lengths[torch.randint(len(lengths), (1000,), device="cuda")] = 100
    lengths[5000:5300] = 0
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.cat([known, unknown])
    which = torch.randint(1000, (int(offsets[-1]),), device="cuda")
    which[::997] = torch.randint(1000, 1020, which[::997].shape, device="cuda")
    bags = Bags(ids[which], offsets, batch_size)
    weights = torch.rand(len(which), device="cuda") if weighted else None
    anchor = torch.empty(0, device="cuda")
    out = group.pooled_lookup(
        anchor,
        bags.ids,
        offsets,
        weights,
        find(group, bags),
        batch_size,
        mean,
        None,
        rate(0.1, group),
    )
    column = 0
    for feature, spec in enumerate(group.tables):
        rows = initial_rows(ids, spec.dim, table=spec.name, initializer=spec.initializer).double()
        bounds = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        mine = slice(int(bounds[0]), int(bounds[-1]))
        scale = torch.ones(mine.stop - mine.start, dtype=torch.double, device="cuda")
        if weights is not None:
            scale = weights[mine].double()
        expected = torch.nn.functional.embedding_bag(
            which[mine],
            rows,
            bounds - bounds[0],
            mode="sum",
            per_sample_weights=scale,
            include_last_offset=True,
        )
        if mean:
            expected /= bounds.diff().clamp(min=1).unsqueeze(1)
        got = out[:, column : column + spec.dim]
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
        column += spec.dim
