"""Runs ``torchrec-hkv convert``, and reads its output files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert
from torchrec_hkv.checkpoint.saved_checkpoint import SavedCheckpoint

#: Small, so that tables are written in several parts.
MEMORY = 24 << 10


def converted(source: Path, into: Path, **options: Any) -> SavedCheckpoint:
    """Converts to a checkpoint with little memory; returns its contents."""
    convert(source, into, ConversionOptions(**{"batch_bytes": MEMORY, **options}))
    return SavedCheckpoint.open(into)


def entries_of(saved: SavedCheckpoint, table: str) -> dict[str, torch.Tensor]:
    """Returns all entries of a saved table, sorted by id."""
    names = ["rows", "states", "scores", "last_steps"]
    batches = [
        {name: tensor.clone() for name, tensor in batch.items()}
        for batch in saved.hash_table(table).batches(names, 1 << 20)
    ]
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    order = joined["ids"].argsort()
    return {name: tensor[order] for name, tensor in joined.items()}
