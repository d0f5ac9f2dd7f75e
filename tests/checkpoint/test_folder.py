"""A shard's folder in a checkpoint is a saved hash table."""

from __future__ import annotations

import json

import torch

from tests.support.checkpoint_models import make_tables, train
from torchrec_hkv import HashTable, checkpoint


def _save(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    train(model, rank, device, range(4))
    checkpoint.save(folder, model)
    parts = list(checkpoint.export_rows(model, "lfu"))
    return torch.cat([ids for ids, _ in parts]), torch.cat([rows for _, rows in parts])


def test_hash_tables_open_it(run_ranks, tmp_path):
    ids, rows = run_ranks(2, _save, tmp_path / "c")[0]
    record = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    assert set(record["tables"]) == {f"ebc.embedding_bags.{name}" for name in ("lru", "lfu", "tt")}
    shards = record["tables"]["ebc.embedding_bags.lfu"]["shards"]
    assert [shard["owners"] for shard in shards] == [[0, 32768], [32768, 65536]]
    tables = [HashTable.from_file(tmp_path / "c" / shard["folder"]) for shard in shards]
    assert sum(table.size for table in tables) == len(ids) > 50
    for row, id_ in zip(rows, ids, strict=True):
        found = [table.find(id_.view(1)) for table in tables]
        assert sum(int(there) for _, there in found) == 1
        assert any(there and values[0].equal(row) for values, there in found)
