"""Scores from weights: int64 scores for ids that are ranked by a float32 number."""

from __future__ import annotations

import torch
from torch import Tensor


def scores_of_weights(weights: Tensor) -> Tensor:
    """Maps weights to scores in the same order, for tables under ``"customized"``.

    Equal weights have equal scores, and a larger weight has a larger score, also for negative and
    infinite weights. NaN is mapped like minus infinity, and -0.0 to just below 0.0.

    Args:
        weights: float tensor of any shape and device; float64 is rounded to float32.

    Returns:
        int64 of the same shape, from -2^31 to 2^31 - 1.
    """
    weights = weights.detach().float()
    weights = torch.where(weights.isnan(), -torch.inf, weights)
    bits = weights.view(torch.int32)
    # For negative numbers, larger bit patterns are smaller numbers.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
