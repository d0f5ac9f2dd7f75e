"""Compressed chains hold the same as others; an error names a missing package."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch

from tests.support.checkpoint_models import joined, make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table.files.zstd_files import ZstdFile, compress


@pytest.fixture
def zstandard():
    """The package; skips tests where it is not installed."""
    return pytest.importorskip("zstandard")


def _write(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", expire_after=3)
    writer = checkpoint.DeltaWriter(model, folder, compression="zstd")
    states = []
    for write in range(3):
        train(model, rank, device, range(2 * write, 2 * write + 2))
        writer.write()
        states.append(model_contents(model, "adam"))
    return states


def _load(rank, world_size, device, path):
    model = make_tables(world_size, device, "row_wise", expire_after=3)
    checkpoint.load(path, model)
    return model_contents(model, "adam")


def test_what_comes_back(run_ranks, tmp_path, zstandard):
    folder = tmp_path / "chain"
    written = run_ranks(2, _write, folder)
    files = {name for _, _, names in os.walk(folder) for name in names if "shard" in name}
    assert files
    assert all(name.endswith(".safetensors.zst") for name in files)
    merged = checkpoint.compact(folder, tmp_path / "merged")
    for write, path in enumerate(["base-000000", "delta-000001", "delta-000002", merged]):
        loaded = run_ranks(3 if write == 1 else 2, _load, folder / path)
        assert joined(loaded) == joined([rank[min(write, 2)] for rank in written])


def test_any_place(tmp_path, zstandard):
    path = tmp_path / "shard.zst"
    for size in (0, 1, 1 << 20, (1 << 20) + 1, 2_500_000):
        data = os.urandom(size // 2) + bytes(size - size // 2)
        (tmp_path / "raw").write_bytes(data)
        path.unlink(missing_ok=True)
        compress(tmp_path / "raw", path)
        file = ZstdFile(path)
        assert file.size() == size
        for _ in range(20):
            at, n = random.randrange(size + 2), random.randrange(size + 2)
            assert file.read(n, at) == data[at : at + n]
            memory = memoryview(bytearray(n))
            got = file.read_blocks(memory, at, n)
            assert bytes(memory[:got]) == data[at : at + n]
        file.close()
        with open(path, "rb") as compressed:
            reader = zstandard.ZstdDecompressor().stream_reader(compressed, read_across_frames=True)
            assert reader.read() == data


def test_damage(run_ranks, tmp_path, zstandard):
    folder = tmp_path / "chain"
    run_ranks(1, _write, folder)
    paths = sorted(folder.rglob("*.zst"))
    choice = random.Random(5)
    for path in paths:
        good = path.read_bytes()
        bad = bytearray(good)
        bad[choice.randrange(len(bad))] ^= 1 << choice.randrange(8)
        for damaged in (bytes(bad), good[: choice.randrange(len(good))], b""):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=path.name):
                checkpoint.compact(folder, tmp_path / "merged")
        path.write_bytes(good)
    checkpoint.compact(folder, tmp_path / "merged")


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match="'zstd' needs the package zstandard, which is not inst"):
        checkpoint.DeltaWriter(torch.nn.Module(), tmp_path, compression="zstd")
    (tmp_path / "shard.zst").touch()
    with pytest.raises(ValueError, match=r"shard.zst needs the package zstandard"):
        ZstdFile(tmp_path / "shard.zst")


def test_another_compression(tmp_path):
    with pytest.raises(ValueError, match="compression is 'gzip', but must be 'zstd' or None"):
        checkpoint.DeltaWriter(torch.nn.Module(), tmp_path, compression="gzip")
