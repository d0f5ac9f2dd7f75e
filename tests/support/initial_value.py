"""The documented formula of initial rows, in Python integers and float32 arithmetic."""

from __future__ import annotations

import hashlib

import torch

MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def initial_value(id_: int, column: int, table: str, seed: int, low: float, high: float) -> float:
    """One value of an id's initial row."""
    name = int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little")
    seed = mix64(mix64(seed & MASK) ^ name)
    first = mix64(mix64(seed ^ (id_ & MASK) * 0x9E3779B97F4A7C15 & MASK) ^ (column >> 2) << 1)
    pair = mix64(first ^ 0xD1B54A32D192ED03) if column & 2 else first
    bits = (pair >> 32 if column & 1 else pair) & 0xFFFFFFFF
    unit = torch.tensor(bits >> 8, dtype=torch.float32) / 16777216
    low32, high32 = torch.tensor([low, high], dtype=torch.float32)
    return float(low32 + (high32 - low32) * unit)
