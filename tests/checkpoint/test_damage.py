"""A load refuses a checkpoint with a damaged or missing file, and names the file; nothing
changes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.checkpoint_models import make_tables, model_contents, train
from tests.support.damage import cut
from torchrec_hkv import checkpoint
from torchrec_hkv.hash_table import MinFrequency

ADMISSION = MinFrequency(2, entries=256)


def _save(rank, world_size, device, folder):
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    train(model, rank, device, range(4))
    checkpoint.save(folder, model, model.fused_optimizer)


def _damaged(path, way, choice):
    good = path.read_bytes()
    if way == "bit":
        bad = bytearray(good)
        bit = choice.randrange(8 * len(good) - 8)  # the last byte of JSON is a newline
        bad[bit // 8] ^= 1 << bit % 8
        return bytes(bad)
    return cut(good, choice) if way == "cut" else None


def _refusals(rank, world_size, device, folder):
    """Damages each file in turn, and tries to load the checkpoint."""
    model = make_tables(world_size, device, "row_wise", admission=ADMISSION)
    train(model, rank, device, range(2))
    before = model_contents(model, "adam")
    choice = random.Random(9)
    messages = []
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        for way in ("bit", "bit", "cut", "gone"):
            good = path.read_bytes()
            bad = _damaged(path, way, choice)
            dist.barrier()
            if rank == 0:
                path.unlink() if bad is None else path.write_bytes(bad)
            dist.barrier()
            with pytest.raises(ValueError, match=r"c/|checkpoint") as refusal:
                checkpoint.load(folder, model, model.fused_optimizer)
            messages.append((path.name, path.parent.name, way, str(refusal.value)))
            dist.barrier()
            if rank == 0:
                path.write_bytes(good)
            dist.barrier()
    assert model_contents(model, "adam") == before
    checkpoint.load(folder, model, model.fused_optimizer)
    return messages


@pytest.mark.slow
def test_every_file(run_ranks, tmp_path):
    run_ranks(2, _save, tmp_path / "c")
    messages = run_ranks(2, _refusals, tmp_path / "c")
    assert messages[0] == messages[1]
    names = {name for name, *_ in messages[0]}
    assert {"checkpoint.json", "manifest.json", ".metadata"} <= names
    assert len([name for name in names if re.match(r"shard-|counts-|__", name)]) >= 6
    for name, folder, way, message in messages[0]:
        if name == "checkpoint.json" and way == "gone":
            assert "There is no checkpoint at" in message
        elif name == "manifest.json" and way == "gone":
            assert f"{folder}: manifest.json can't be read" in message
        else:
            assert re.search(rf"{re.escape(name)} (is|has|can't|makes)", message), message
