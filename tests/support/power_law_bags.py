"""Batches of drifting power-law ids: each batch has new ids, and some ids return."""

from __future__ import annotations

import torch

from tests.support.batches import Bags


def power_law_bags(
    step: int, features: int, batch_size: int, pool: int, longest: int = 6, drift: float = 0.05
) -> Bags:
    """Creates the batch of a step, on the CPU. Equal arguments give equal batches.

    Args:
        step: number of the batch.
        features: number of features.
        batch_size: number of bags per feature.
        pool: number of ids that a batch is drawn from; the first are the most frequent.
        longest: largest length of a bag; the shortest bags are empty.
        drift: share of the pool that changes in a step.
    """
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, longest + 1, (features * batch_size,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rank = float(pool) ** torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64)
    ids = rank.long() + int(step % 13 * drift * pool)  # returns to earlier ids after 13 steps
    return Bags(ids * -0x61C8864680B583EB, offsets, batch_size)
