"""Rows can be exported from any kind of table and imported into any other, under any sharding."""

from __future__ import annotations

import pytest
import torch

from tests.support.checkpoint_models import evaluate, make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.tensor_train import make_shape, to_dense

ROWS, DIM = 64, 8


def _all(model, table, batch=1 << 16):
    parts = list(checkpoint.export_rows(model, table, batch=batch))
    assert all(0 < len(ids) <= batch for ids, _ in parts)
    ids = torch.cat([ids for ids, _ in parts])
    rows = torch.cat([rows for _, rows in parts])
    order = ids.argsort()
    assert len(ids.unique()) == len(ids)
    return ids[order], rows[order]


def _between_hash_tables(rank, world_size, device, types):
    models = [make_tables(world_size, device, kind) for kind in types]
    train(models[0], rank, device, range(6))
    for table in ("lru", "lfu"):
        ids, rows = _all(models[0], table, batch=7)
        assert len(ids) > 50
        lost = checkpoint.import_rows(
            models[1], table, checkpoint.export_rows(models[0], table, batch=20)
        )
        assert lost == 0
        found = _all(models[1], f"ebc.embedding_bags.{table}")
        assert found[0].equal(ids)
        assert found[1].equal(rows)
    return evaluate(models[0], device), evaluate(models[1], device)


@pytest.mark.parametrize(
    "types", [("row_wise", "column_wise"), ("column_wise", "row_wise"), ("table_wise", "row_wise")]
)
def test_between_shardings(run_ranks, types):
    for before, after in run_ranks(2, _between_hash_tables, types):
        columns = slice(0, 20)  # columns of lfu and lru; other tables were not moved
        torch.testing.assert_close(after[:, columns], before[:, columns], rtol=1e-6, atol=1e-6)


def _dense():
    """A table that cores of rank 4 can represent exactly."""
    generator = torch.Generator().manual_seed(6)
    shape = make_shape(ROWS, DIM, ranks=4)
    cores = [torch.randn(shape.core_shape(k), generator=generator) for k in range(shape.num_cores)]
    return to_dense(shape, cores)


def _around(rank, world_size, device, sharding_type):
    """Dense to Tensor-Train to hash table to stock."""
    dense = _dense()
    model = make_tables(world_size, device, sharding_type)
    hashed = make_tables(world_size, device, sharding_type, kinds={"tt": "hkv"})
    given = [(torch.arange(ROWS)[part], dense[part]) for part in (slice(0, 40), slice(40, ROWS))]
    train(model, rank, device, range(2))
    assert checkpoint.import_rows(model, "tt", given) == 0
    assert checkpoint.import_rows(hashed, "tt", checkpoint.export_rows(model, "tt")) == 0
    assert checkpoint.import_rows(model, "stock", checkpoint.export_rows(hashed, "tt")) == 0
    train(model, rank, device, range(1))
    return [_all(m, t) for m, t in ((model, "tt"), (hashed, "tt"), (model, "stock"))][1:2]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise"])
def test_dense_tt_hash_and_stock(run_ranks, sharding_type, world_size):
    dense = _dense()
    for ((ids, rows),) in run_ranks(world_size, _around, sharding_type):
        assert ids.equal(torch.arange(ROWS))
        torch.testing.assert_close(rows, dense, rtol=1e-4, atol=1e-4 * float(dense.abs().max()))


def _stock(rank, world_size, device, sharding_type):
    dense = _dense()
    model = make_tables(world_size, device, sharding_type)
    checkpoint.import_rows(model, "stock", [(torch.arange(ROWS), dense)])
    return _all(model, "stock", batch=5)


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise", "table_wise"])
def test_stock_tables(run_ranks, sharding_type):
    for ids, rows in run_ranks(2, _stock, sharding_type):
        assert ids.equal(torch.arange(ROWS))
        assert rows.equal(_dense())


def _again(rank, world_size, device):
    """Imported rows replace existing ones; if an id repeats, its last row stays."""
    model = make_tables(world_size, device, "row_wise")
    ids = torch.tensor([5, -1, 5, 2**62])
    rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    checkpoint.import_rows(model, "lru", [(ids, rows)])
    first = _all(model, "lru")
    checkpoint.import_rows(model, "lru", [(ids[:1], rows[3:]), (ids[1:2], rows[:1])])
    return rows, first, _all(model, "lru")


def test_rows_are_replaced(run_ranks):
    for rows, first, second in run_ranks(2, _again):
        assert first[0].tolist() == second[0].tolist() == [-1, 5, 2**62]
        assert first[1].equal(rows[[1, 2, 3]])
        assert second[1].equal(rows[[0, 3, 3]])


def _refusals(rank, world_size, device):
    model = make_tables(world_size, device, "row_wise", rows=128)
    rows, ids = torch.randn(3, 12), torch.arange(3)
    bad = [
        ("none", ids, rows),
        ("lru", ids.int(), rows),
        ("lru", ids, rows[:, :4]),
        ("tt", ids, rows[:, :8]),
        ("tt", ids + 63, rows[:, :8]),
        ("stock", ids - 1, rows[:, :8]),
        ("lru", torch.arange(1000), torch.randn(1000, 12)),
    ]
    messages = []
    for table, given, its in bad:
        with pytest.raises(ValueError, match=r"table") as refusal:
            checkpoint.import_rows(model, table, [(given, its)])
        messages.append(str(refusal.value))
    return messages


def test_what_does_not_fit_is_refused_on_every_rank(run_ranks):
    expected = [
        "The model has no table 'none'",
        "ids have dtype torch.int32",
        "shape (3, 4)",
        "61 of 64 rows were not given",
        "has no row 64",
        "has no row -1",
        "ids found no place",
    ]
    for messages in run_ranks(2, _refusals):
        for message, part in zip(messages, expected, strict=True):
            assert part in message
