"""Sampling by id: all lookups of some ids, chosen by a hash of the id.

A table with the same share of the rows then has about the hit rate of the whole table, because ids
compete for slots in the same way (SHARDS: Waldspurger, Park, Garthwaite and Ahmad, FAST 2015).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

_BLOCK = 1 << 16
#: Number of groups of sampled ids. The spread over groups shows how much an estimate depends on the
#: drawn ids.
GROUPS = 128
# Odd constants, different from those of the tables' hash, so that the sample is spread over
# buckets.
_FIRST, _SECOND = -6884282663029611473, -2545237284413741335


@dataclasses.dataclass(frozen=True)
class Sample:
    """A share of all ids. A larger sample contains each smaller one.

    Attributes:
        rate: the share, greater than 0 and at most 1.
    """

    rate: float = 1.0

    @property
    def is_all(self) -> bool:
        """Whether the sample contains all ids."""
        return self.rate >= 1.0

    def taken(self, bits: Tensor) -> Tensor:
        """Positions of the ids in the sample, int64 ``[m]``, ascending.

        Args:
            bits: int64 ``[n]``, hashes of ids by :func:`mixed`.
        """
        most = min(int(self.rate * 2.0**64) - (1 << 63), (1 << 63) - 1)
        return (bits <= most).nonzero().squeeze(1)


def mixed(ids: Tensor) -> Tensor:
    """A 64-bit hash of each id, all of whose bits are evenly distributed.

    Args:
        ids: int64 ``[n]``.
    """
    bits = ids * _FIRST
    shifted = torch.empty(min(ids.numel(), _BLOCK), dtype=torch.int64)
    for block in bits.split(_BLOCK):  # chunks that fit into caches
        high = shifted[: block.numel()]
        block ^= torch.bitwise_right_shift(block, 32, out=high)
        block *= _SECOND
        block ^= torch.bitwise_right_shift(block, 29, out=high)
        block *= _FIRST
    return bits


def groups_of(bits: Tensor) -> Tensor:
    """The group of each id, 0 to :data:`GROUPS` - 1.

    Args:
        bits: int64 ``[n]``, hashes by :func:`mixed`.
    """
    return (bits >> 24) & (GROUPS - 1)
