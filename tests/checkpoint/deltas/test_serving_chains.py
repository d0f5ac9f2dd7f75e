"""Chains for serving: without optimizer states, or with 16-bit rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_models import DIMS, joined, make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.comparison import compare
from torchrec_hkv.checkpoint.export_files import export_files
from torchrec_hkv.checkpoint.saved_checkpoint import SavedCheckpoint


def _write(rank, world_size, device, folder, sharding_type, options):
    model = make_tables(world_size, device, sharding_type, expire_after=3)
    writer = checkpoint.DeltaWriter(model, folder, **options)
    states = []
    for write in range(3):
        train(model, rank, device, range(2 * write, 2 * write + 2))
        writer.write()
        states.append(model_contents(model, "adam"))
    return states


def _load(rank, world_size, device, path, sharding_type):
    model = make_tables(world_size, device, sharding_type, expire_after=3)
    train(model, rank, device, range(50, 51))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(path, model)
    said = [str(w.message) for w in caught if "without optimizer states" in str(w.message)]
    return model_contents(model, "adam"), said


def _codes(values):
    """By table, id and column: the bits of values that were saved as 8-bit codes."""
    rows = {}
    for table, id_, at, what, *bits in values:
        if what == "row":
            rows.setdefault((table, id_), {})[at] = np.array(bits, np.int32).view(np.float32)[0]
    found = {}
    for (table, id_), row in rows.items():
        scale = max(map(abs, row.values())) / np.float32(127)
        for at, value in row.items():
            code = np.float32(np.int8(np.rint(value / scale) if scale else 0))  # no -0
            assert abs(code * scale - value) <= 0.501 * scale
            found[table, id_, at] = int((code * scale).astype(np.float32).view(np.int32))
    return found


def _expected(values, states, dtype):
    """All values as a load should give them."""
    expected = []
    codes = _codes(values) if dtype == torch.int8 else {}
    for value in values:
        table, id_, at, what, *bits = value
        if what == "row" and dtype == torch.int8:
            bits = [codes[table, id_, at]]
        elif what == "row" and dtype is not None:
            row = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
            bits = row.to(dtype).float().view(torch.int32).tolist()
        elif not states and what in (0, 1) and at != "entry" and id_ != "all":
            bits = [0]
        expected.append((table, id_, at, what, *bits))
    return expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [("row_wise", "row_wise"), ("row_wise", "column_wise")]
)
@pytest.mark.parametrize(
    ("states", "dtype"),
    [(False, None), (True, torch.float16), (False, torch.int8)],
)
def test_what_comes_back(run_ranks, tmp_path, saved_as, loaded_as, states, dtype):
    options = {"states": states, "row_dtype": dtype}
    written = run_ranks(2, _write, tmp_path / "chain", saved_as, options)
    for write, name in enumerate(["base-000000", "delta-000001", "delta-000002"]):
        expected = joined([_expected(rank[write], states, dtype) for rank in written])
        paths = [tmp_path / "chain" / name]
        if write == 2:
            checkpoint.compact(tmp_path / "chain", tmp_path / "merged")
            paths.append(tmp_path / "merged")
        for path in paths:
            loaded = run_ranks(2, _load, path, loaded_as)
            assert joined([result[0] for result in loaded]) == expected
            said = [message for result in loaded for message in result[1]]
            assert bool(said) == (not states)


def _overflow(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    writer = checkpoint.DeltaWriter(model, folder, row_dtype=torch.float16)
    train(model, rank, device, range(2))
    writer.write()
    ids = torch.tensor([5])
    rows = torch.full((1, DIMS["lru"]), 1e5)
    checkpoint.import_rows(model, "lru", [(ids, rows)])
    with pytest.raises(ValueError, match=r"beyond 65504, which torch\.float16 can't"):
        writer.write()
    dist.barrier()  # rank 0 deletes the files
    names = sorted(path.name for path in folder.iterdir())
    checkpoint.import_rows(model, "lru", [(ids, rows / 2)])
    return names, writer.write().name


def test_values_that_do_not_fit(run_ranks, tmp_path):
    for names, written in run_ranks(2, _overflow, tmp_path / "chain"):
        assert names == ["base-000000", "deltas.json"]
        assert written == "base-000001"


def _not_finite(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise")
    writer = checkpoint.DeltaWriter(model, folder, row_dtype=torch.int8)
    train(model, rank, device, range(2))
    writer.write()
    ids, rows = torch.tensor([5]), torch.full((1, DIMS["lru"]), 2.0)
    for value in (torch.inf, torch.nan):
        rows[0, 1] = value
        checkpoint.import_rows(model, "lru", [(ids, rows)])
        with pytest.raises(ValueError, match="'lru' has values that are infinite or NaN, which"):
            writer.write()
        dist.barrier()  # rank 0 deletes the files
    checkpoint.import_rows(model, "lru", [(ids, rows.nan_to_num())])
    return writer.write().name


def test_values_without_codes(run_ranks, tmp_path):
    assert run_ranks(1, _not_finite, tmp_path / "chain") == ["base-000001"]


def _bf16(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", hash_dtype="bf16")
    writer = checkpoint.DeltaWriter(model, folder / "chain", row_dtype=torch.int8, states=False)
    train(model, rank, device, range(2))
    writer.write()
    rows = dict(_rows(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(folder / "chain", model)
    loaded = dict(_rows(model))
    assert rows.keys() == loaded.keys()
    for id_, row in rows.items():
        assert loaded[id_] == pytest.approx(row, abs=max(map(abs, row)) * (1 / 253 + 1 / 250))
    # Commands and exports read the rows as floats.
    table = SavedCheckpoint.open(folder / "chain").table("lru")
    for batch in table.batches(["rows"], 1 << 20):
        assert "scales" not in batch
        for id_, row in zip(batch["ids"].tolist(), batch["rows"].bfloat16().tolist(), strict=True):
            assert loaded[id_] == row
    export_files(table, folder / "rows", batch_bytes=1 << 20)
    assert np.load(folder / "rows" / "row.npy").dtype == np.float32
    assert compare(table, table, 1 << 20).changed == 0


def _rows(model):
    for ids, rows in checkpoint.export_rows(model, "lru"):
        yield from zip(ids.tolist(), rows.float().tolist(), strict=True)


def test_rows_of_16_bits(run_ranks, tmp_path):
    run_ranks(1, _bf16, tmp_path)


def test_bad_arguments(tmp_path):
    for argument, value in [
        ("states", 1),
        ("row_dtype", torch.float32),
        ("every_steps", 0),
        ("every_seconds", -1.0),
        ("base_every", 1.5),
        ("keep_bases", True),
        ("batch_bytes", 0),
    ]:
        with pytest.raises(ValueError, match=f"{argument} is {value!r}, but must be"):
            checkpoint.DeltaWriter(torch.nn.Module(), tmp_path / "chain", **{argument: value})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        checkpoint.DeltaWriter(torch.nn.Module(), tmp_path / "file")
