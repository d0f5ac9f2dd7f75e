"""Scores from weights: the int64 scores of ids that are ranked by a float32 number."""

from __future__ import annotations

import torch
from torch import Tensor


def scores_of_weights(weights: Tensor) -> Tensor:
    """Scores in the order of weights, for tables under ``"customized"``.

    Equal weights have equal scores, and a larger weight has a larger score: negative and infinite
    ones too. NaN scores as minus infinity, and -0.0 is just below 0.0.

    Args:
        weights: float, any shape and device; those of 64 bits are rounded to float32.

    Returns:
        int64 of the same shape, from -2^31 to 2^31 - 1.
    """
    weights = weights.detach().float()
    weights = torch.where(weights.isnan(), -torch.inf, weights)
    bits = weights.view(torch.int32)
    # The bits of negative numbers count the wrong way round.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
