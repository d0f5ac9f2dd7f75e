"""Rows of data-parallel tables, of which every rank has a copy, are exported and imported."""

from __future__ import annotations

import torch

from tests.sharding.test_data_parallel import DIM, ROWS, batch_of, lookups_of, make
from torchrec_hkv import checkpoint
from torchrec_hkv.tensor_train import make_shape, to_dense

TABLES = ("t", "s")


def _all(model, table):
    parts = list(checkpoint.export_rows(model, table, batch=40))
    assert all(len(ids) <= 40 for ids, _ in parts)
    return torch.cat([ids for ids, _ in parts]), torch.cat([rows for _, rows in parts])


def _exported(rank, world_size, device):
    model = make("sum", "sgd", "data_parallel", world_size, device, TABLES)
    model(batch_of(0, rank, device, TABLES, False, [6, 6])).square().sum().backward()
    shape = make_shape(ROWS["t"], DIM, ranks=(5, 4))
    held = {
        "t": to_dense(shape, [core.cpu() for core in lookups_of(model)["t"].cores("t")]),
        "s": model.state_dict()["embeddings.embedding_bags.s.weight"].detach().cpu(),
    }
    return {table: (*_all(model, table), rows) for table, rows in held.items()}


def test_exported(run_ranks):
    for tables in run_ranks(2, _exported):
        for table, (ids, rows, held) in tables.items():
            assert ids.equal(torch.arange(ROWS[table]))
            torch.testing.assert_close(rows, held, rtol=1e-5, atol=1e-6)


def _imported(rank, world_size, device, given):
    model = make("sum", "sgd", "data_parallel", world_size, device, TABLES)
    ids = torch.arange(ROWS["s"])
    assert checkpoint.import_rows(model, "s", [(ids[:20], given[:20]), (ids[20:], given[20:])]) == 0
    return _all(model, "s")[1]


def test_imported(run_ranks):
    given = torch.randn(ROWS["s"], DIM)
    for rows in run_ranks(2, _imported, given):
        assert rows.equal(given)
