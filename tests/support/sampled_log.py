"""Samples of ids in NumPy, as an independent reference."""

from __future__ import annotations

import numpy as np

FIRST, SECOND = np.uint64(0xA0761D6478BD642F), np.uint64(0xDCAD802CD17066E9)


def hashes(ids: np.ndarray) -> np.ndarray:
    """Hashes each id, with unsigned products and arithmetic shifts."""
    bits = ids.astype(np.int64).view(np.uint64) * FIRST
    for shift, factor in ((32, SECOND), (29, FIRST)):
        signed = bits.view(np.int64)
        bits = (signed ^ (signed >> shift)).view(np.uint64) * factor
    return bits.view(np.int64)


def places(ids: np.ndarray, rate: float) -> np.ndarray:
    """Returns positions of the ids in the sample with this share of all ids."""
    shares = (hashes(ids).astype(np.float64) + 2.0**63) / 2.0**64
    return np.flatnonzero(shares <= rate)


def groups(ids: np.ndarray) -> np.ndarray:
    """Returns the group of each id, from 0 to 127."""
    return (hashes(ids) >> 24) % 128
