"""Export writes each row's number of lookups in training, as counted by a dictionary."""

from __future__ import annotations

import collections
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.served_models import ServedModel, make_served, random_batch, train
from torchrec_hkv import checkpoint, serving
from torchrec_hkv.serving.lookup_counts import CountsWriter, codes_of, counts_of, read_codes
from torchrec_hkv.serving.manifest import ServingFileRecord, ServingManifest
from torchrec_hkv.serving.placement import numbered_ids
from torchrec_hkv.serving.table_builder import build_table

STEPS, SEED = 4, 100
#: Features of hash tables.
FEATURES = {
    "ebc.embedding_bags.item": ["item", "country"],
    "sequence.embeddings.seen": ["seen"],
}


def test_codes():
    counts = torch.tensor([0, 1, 2, 3, 7, 100, 12345, 1 << 29, 1 << 40, (1 << 63) - 1])
    codes = codes_of(counts)
    assert codes.tolist() == sorted(set(codes.tolist()))
    back = counts_of(codes)
    assert back[:5].tolist() == [0, 1, 2, 3, 7]
    torch.testing.assert_close(back[:8].double(), counts[:8].double(), rtol=0.1, atol=0)
    assert back[8:].tolist() == [1 << 30, 1 << 30]
    assert bool((counts_of(torch.arange(256, dtype=torch.uint8)).diff() >= 0).all())


@pytest.mark.parametrize("n", [0, 1, 70_000])
def test_file(n, tmp_path):
    """Counts follow the order of the table's rows. Rows without a count get 0, and other ids are
    left out."""
    ids = torch.randperm(2 * n) - n
    table_file = build_table(lambda: [(ids[:n], torch.zeros(n, 2))], 2, "fp16", tmp_path / "table")
    counts = torch.randint(0, 1000, (2 * n,))
    with CountsWriter(tmp_path) as writer:
        assert writer.finish(tmp_path / "none", table_file) is None
        for part in (slice(n // 3, n), slice(n, 2 * n)):
            writer.add(ids[part], counts[part])
        record = writer.finish(tmp_path / "counts", table_file)
    if n == 0:
        assert record is None
        return
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts", "table"]
    codes = read_codes(tmp_path, record, n)
    known = dict(zip(ids[n // 3 : n].tolist(), codes_of(counts[n // 3 : n]).tolist(), strict=True))
    for batch, rows in numbered_ids(table_file.map(tmp_path)[0]):
        assert codes[rows].tolist() == [known.get(id_, 0) for id_ in batch.tolist()]


def test_damaged(tmp_path):
    (tmp_path / "counts").write_bytes(bytes(5))
    record = ServingFileRecord.of(tmp_path / "counts")
    with pytest.raises(ValueError, match="counts has 5 bytes, but its table has 6 rows"):
        read_codes(tmp_path, record, 6)
    (tmp_path / "counts").write_bytes(b"01234")
    with pytest.raises(ValueError, match="counts is damaged"):
        read_codes(tmp_path, record, 5)


def test_full_disk(disk):
    n = 50_000
    table_file = build_table(
        lambda: [(torch.arange(n), torch.zeros(n, 1))], 1, "fp16", disk / "table"
    )
    with CountsWriter(disk) as writer:
        writer.add(torch.arange(n), torch.ones(n, dtype=torch.int64))
        free = os.statvfs(disk).f_bavail * 4096 - n // 2
        (disk / "filler").write_bytes(bytes(free))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            writer.finish(disk / "counts", table_file)


def looked_up(keys: Sequence[str], world_size: int) -> collections.Counter[int]:
    """The number of training lookups of each id of some features, over all ranks."""
    counts: collections.Counter[int] = collections.Counter()
    for step in range(STEPS):
        features = random_batch(SEED + step)[1]
        for key in keys:
            counts.update(features[key].values().tolist() * world_size)
    return counts


def trained(rank, world_size, device, folder, sharding) -> None:
    model = make_served(world_size, device, sharding)
    train(model, STEPS, SEED)
    serving.export(model, folder / "model", inputs=random_batch(0), lookup_counts=True)
    serving.export(model, folder / "without", inputs=random_batch(0))
    checkpoint.save(folder / "checkpoint", model)


def codes_by_id(folder: Path, table: str) -> dict[int, int] | None:
    record = next(its for its in ServingManifest.read(folder).tables if its.name == table)
    if record.counts is None:
        return None
    codes = read_codes(folder, record.counts, record.rows.entries)
    found = {}
    for ids, rows in numbered_ids(record.rows.map(folder)[0]):
        found.update(zip(ids.tolist(), codes[rows].tolist(), strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sharding"), [(1, "table_wise"), (2, "row_wise"), (2, "column_wise")]
)
def test_export(run_ranks, tmp_path, ranks, sharding):
    """Exports a trained model, and its checkpoint."""
    run_ranks(ranks, trained, tmp_path, sharding)
    with torch.device("meta"):
        module = ServedModel()
    inputs = random_batch(0)
    for folder in ("model", "saved"):
        if folder == "saved":
            saved = tmp_path / "checkpoint"
            serving.export(
                module, tmp_path / folder, inputs=inputs, checkpoint=saved, lookup_counts=True
            )
        for name, keys in FEATURES.items():
            want = looked_up(keys, ranks)
            codes = codes_of(torch.tensor([*want.values()])).tolist()
            got = codes_by_id(tmp_path / folder, name)
            assert len(got) > 25  # a table of 50 rows may have evicted some
            assert got.items() <= dict(zip(want, codes, strict=True)).items()
        assert codes_by_id(tmp_path / folder, "ebc.embedding_bags.country") is None  # a stock table
        serving.load(tmp_path / folder, verify=True)
    assert codes_by_id(tmp_path / "without", "ebc.embedding_bags.item") is None
    assert not list((tmp_path / "without").glob("counts*"))
    (tmp_path / "model" / "counts-0001.bin").write_bytes(b"")
    serving.load(tmp_path / "model")  # not read
    with pytest.raises(ValueError, match=r"counts-0001\.bin is damaged"):
        serving.load(tmp_path / "model", verify=True)
