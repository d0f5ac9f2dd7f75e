"""An unused model reads a checkpoint once, and stays unused if the checkpoint is damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.checkpoint_models import make_tables, model_contents, train
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency

ADMISSION = MinFrequency(2, entries=256)


def _made(world_size, device, sharding_type="row_wise"):
    return make_tables(world_size, device, sharding_type, admission=ADMISSION)


def _save(rank, world_size, device, folder):
    model = _made(world_size, device)
    train(model, rank, device, range(4))
    checkpoint.save(folder, model, model.fused_optimizer)
    return checkpoint.digest(model)


def _refusals(rank, world_size, device, folder, sharding_type):
    model = _made(world_size, device, sharding_type)
    choice = random.Random(9)
    messages = []
    for path in sorted(Path(folder).rglob("shard-*")):
        good = path.read_bytes()
        bit = choice.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        dist.barrier()
        if rank == 0:
            path.write_bytes(bad)
        dist.barrier()
        with pytest.raises(ValueError, match="damaged") as refusal:
            checkpoint.load(folder, model, model.fused_optimizer)
        messages.append((path.name, str(refusal.value)))
        assert model_contents(model, "adam") == []
        dist.barrier()
        if rank == 0:
            path.write_bytes(good)
        dist.barrier()
    # The model is still unused: it trains like a new one.
    other = _made(world_size, device, sharding_type)
    for trained in (model, other):
        train(trained, rank, device, range(3))
    assert model_contents(model, "adam") == model_contents(other, "adam")
    checkpoint.load(folder, other, other.fused_optimizer)
    return checkpoint.digest(other), messages


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise"])
def test_damaged_files(run_ranks, tmp_path, sharding_type):
    saved = run_ranks(2, _save, tmp_path / "c")
    results = run_ranks(2, _refusals, tmp_path / "c", sharding_type)
    assert results[0] == results[1]
    digest, messages = results[0]
    assert digest == saved[0]
    assert len(messages) >= 4
    for name, message in messages:
        assert f"{name} is damaged" in message


def _bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def _reads(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", rows=40_000)
    train(model, rank, device, range(2))
    checkpoint.save(folder, model, model.fused_optimizer)
    digest = checkpoint.digest(model)
    size = sum(path.stat().st_size for path in Path(folder).rglob("shard-*"))
    found = []
    for touched in (True, False, True):  # the first one also reads modules that it imports
        other = make_tables(world_size, device, "row_wise", rows=40_000)
        if touched:
            train(other, rank, device, range(1))
        before = _bytes_read()
        checkpoint.load(folder, other, other.fused_optimizer)
        found.append(_bytes_read() - before)
        assert checkpoint.digest(other) == digest
    return size, *found[1:]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_files_are_read_once(run_ranks, tmp_path):
    size, fresh, touched = run_ranks(1, _reads, tmp_path / "c")[0]
    # The unused model reads each entry one time less.
    assert touched - fresh > size
