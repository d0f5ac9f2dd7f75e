"""If the disk is full during an export or while a base is read, the previous model stays and is
served."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.served_models import make_served, outputs_of, random_batch, train
from torchrec_hkv import checkpoint, serving

FULL = os.strerror(errno.ENOSPC)


def leave(disk: Path, free: int) -> None:
    """Fills a disk except for this many bytes."""
    (disk / "filler").unlink(missing_ok=True)
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096 - free))


class Scores(nn.Module):
    """One table, and a layer of a given size."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=16, num_embeddings=2000, feature_names=["f"]
        )
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.over = nn.Linear(16, 4000)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values())


@pytest.mark.slow
def test_export(disk):
    model = Scores()
    ones = torch.ones(6, dtype=torch.int64)
    batch = KeyedJaggedTensor(keys=["f"], values=torch.randint(0, 2000, (6,)), lengths=ones)
    serving.export(model, disk / "model", rows="fp32", inputs=(batch,))
    want = serving.load(disk / "model")(batch)
    taken = sum(path.stat().st_size for path in (disk / "model").iterdir())
    with torch.no_grad():
        model.over.bias.add_(1.0)
    # No room for a table, for the program, and for the manifest.
    table = (disk / "model" / "rows-0000.table").stat().st_size
    for free in (0, table // 2, table + 40_000, taken - 12_000):
        leave(disk, free)
        with pytest.raises(OSError, match=FULL):
            serving.export(model, disk / "model", rows="fp32", inputs=(batch,))
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "model"]
        assert torch.equal(serving.load(disk / "model", verify=True)(batch), want)
    leave(disk, taken + 100_000)
    serving.export(model, disk / "model", rows="fp32", inputs=(batch,))
    got = serving.load(disk / "model", verify=True)(batch)
    torch.testing.assert_close(got, want + 1.0)


def followed(rank, world_size, device, folder: Path, disk: Path) -> None:
    model = make_served(world_size, device)
    train(model, 2)
    serving.export(model, folder / "model", inputs=random_batch(0))
    before = outputs_of(model, 1, 4)
    train(model, 2, seed=500)
    checkpoint.DeltaWriter(model, folder / "chain").write()
    want = outputs_of(model, 1, 4)
    served = serving.load(folder / "model")
    leave(disk, 8192)
    with pytest.raises(ValueError, match=FULL):
        serving.follow(served, folder / "chain", every=None, scratch=disk)
    assert [path.name for path in disk.iterdir()] == ["filler"]
    got = served(*random_batch(1, 4))
    assert all(torch.equal(got[key], value) for key, value in before.items())
    (disk / "filler").unlink()
    serving.follow(served, folder / "chain", every=None, scratch=disk)
    got = served(*random_batch(1, 4))
    assert all(torch.equal(got[key], value) for key, value in want.items())


@pytest.mark.slow
def test_follow(disk, run_ranks, tmp_path):
    run_ranks(1, followed, tmp_path, disk)
