"""Changes of a table that take several batches to read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints, checkpoint
from torchrec_hkv.serving.checkpoints import Checkpoint

ENTRIES, DIM = 80_000, 128  # 41 MB
TABLE = "ebc.embedding_bags.t"


def written(rank, world_size, device, folder: Path) -> tuple[Tensor, Tensor]:
    """Writes a base and a delta. Returns the table's resulting content."""
    table = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=100_000, feature_names=["f"]
    )
    constraints = {"t": ParameterConstraints(compute_kernels=["hkv"])}
    model = shard_model(make_model([table]), constraints, world_size, device)
    writer = checkpoint.DeltaWriter(model, folder / "chain", states=False)
    writer.write()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(1 << 20, generator=generator)[:ENTRIES]
    rows = torch.rand(ENTRIES, DIM, generator=generator)
    checkpoint.import_rows(model, TABLE, [(ids, rows)])
    writer.write()
    return ids, rows


def test_delta(run_ranks, tmp_path):
    ids, rows = run_ranks(1, written, tmp_path)[0]
    (part,), left = Checkpoint(tmp_path / "chain" / "delta-000001").changes(TABLE)
    assert left.numel() == 0
    order, given = part.ids.argsort(), ids.argsort()
    assert torch.equal(part.ids[order], ids[given])
    assert torch.equal(part.rows[order], rows[given])
