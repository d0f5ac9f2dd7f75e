"""The documented formula of initial rows, in Python numbers and float32 arithmetic."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import torch

from torchrec_hkv.hash_table import Constant, Initializer, Normal, TruncatedNormal, Uniform

MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def mixed_seed(table: str, seed: int) -> int:
    """Mixes a seed with a table's name."""
    name = int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little")
    return mix64(mix64(seed & MASK) ^ name)


def initial_bits(id_: int, column: int, table: str, seed: int) -> int:
    """Returns the 32 bits from which one value of an id's initial row is computed."""
    first = mix64(
        mix64(mixed_seed(table, seed) ^ (id_ & MASK) * 0x9E3779B97F4A7C15 & MASK)
        ^ (column >> 2) << 1
    )
    pair = mix64(first ^ 0xD1B54A32D192ED03) if column & 2 else first
    return (pair >> 32 if column & 1 else pair) & 0xFFFFFFFF


def scaled(bits: int, initializer: Initializer) -> float:
    """Returns the value for 32 random bits: exact if uniform or constant, otherwise approximate."""
    unit = (bits + 0.5) / 2**32
    match initializer:
        case Constant(value):
            return float(torch.tensor(value, dtype=torch.float32))
        case Uniform(low, high):
            unit = torch.tensor(bits >> 8, dtype=torch.float32) / 16777216
            low32, high32 = torch.tensor([low, high], dtype=torch.float32)
            return float(low32 + (high32 - low32) * unit)
        case Normal(mean, std):
            return NormalDist(mean, std).inv_cdf(unit)
        case TruncatedNormal(mean, std, low, high):
            # Uses the shorter of the two tails, which has a better resolution.
            sign = -1.0 if low > mean else 1.0
            ends = sorted((sign * (low - mean) / std, sign * (high - mean) / std))
            first, last = (0.5 * math.erfc(-end / math.sqrt(2)) for end in ends)
            z = sign * NormalDist().inv_cdf(first + (last - first) * unit)
            return min(max(mean + std * z, low), high)


def initial_value(id_: int, column: int, table: str, seed: int, initializer: Initializer) -> float:
    """Returns one value of an id's initial row."""
    return scaled(initial_bits(id_, column, table, seed), initializer)
