"""Batches of power-law ids that move on, so that each has new ones and some come back."""

from __future__ import annotations

import torch

from tests.support.batches import Bags


def power_law_bags(
    step: int, features: int, batch_size: int, pool: int, longest: int = 6, drift: float = 0.05
) -> Bags:
    """The batch of a step, on the CPU: the same for the same arguments.

    Args:
        step: number of the batch.
        features: of a lookup.
        batch_size: bags a feature.
        pool: ids that a batch is drawn from, the first the most often.
        longest: of a bag; the shortest are empty.
        drift: share of the pool that a step moves on by.
    """
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, longest + 1, (features * batch_size,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rank = float(pool) ** torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64)
    ids = rank.long() + int(step % 13 * drift * pool)  # it goes back now and then
    return Bags(ids * -0x61C8864680B583EB, offsets, batch_size)
