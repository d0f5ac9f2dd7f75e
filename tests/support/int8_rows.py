"""A NumPy reference for converting float rows to int8 rows. Shares no code with the tables."""

import numpy as np
import torch
from torch import Tensor

_ONES = (1 << 64) - 1


def _mix64(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _ONES
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _ONES
    return x ^ x >> 31


def draws(table_seed: int, id: int, step: int, dim: int, seed: int = 0) -> np.ndarray:
    """Returns the 16 random bits of each column for one update of a row."""
    of_table = _mix64(_mix64((seed ^ 0x3C6EF372FE94F82B) & _ONES) ^ (table_seed & _ONES))
    of_step = (of_table + step * 0x9E3779B97F4A7C15) & _ONES
    key = _mix64(_mix64(of_step) ^ (id & _ONES))
    bits = [_mix64((key + (quad + 1) * 0xD1B54A32D192ED03) & _ONES) for quad in range(-(-dim // 4))]
    return np.array([bits[c // 4] >> c % 4 * 16 & 0xFFFF for c in range(dim)])


def rounded(rows: Tensor, of_rows: np.ndarray | None = None) -> Tensor:
    """Rounds float32 rows ``[n, dim]`` to int8 and back.

    Args:
        rows: the rows.
        of_rows: draws ``[n, dim]`` for stochastic rounding; None to round to nearest.
    """
    values = rows.cpu().numpy().astype(np.float32)
    stored = np.zeros_like(values)
    for i, row in enumerate(values):
        largest = np.abs(row).max() if row.size else np.float32(0)
        if not np.isfinite(row).all():
            stored[i] = np.nan
            continue
        if largest < np.float32(2.0**-100):
            continue
        scale = min(largest, np.float32(2.0**127)) / np.float32(127)
        units = row * (np.float32(127) / largest)
        if of_rows is None:
            codes = np.rint(units)
        else:
            # Adds a draw in [0, 1) to a number with 15 fractional bits.
            codes = np.floor(np.rint(units.astype(np.float64) * 2**15) / 2**15 + of_rows[i] / 2**16)
        stored[i] = scale * codes.astype(np.float32)
    return torch.from_numpy(stored)
