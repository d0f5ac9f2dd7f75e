"""Sampling by id: all lookups of some ids, chosen by a hash of the id.

A table with the same share of the rows then has about the hit rate of the whole table, because ids
compete for slots in the same way (SHARDS: Waldspurger, Park, Garthwaite and Ahmad, FAST 2015).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv import _C

#: Number of groups of sampled ids. The spread over groups shows how much an estimate depends on the
#: drawn ids.
GROUPS: int = _C.REPLAY_GROUPS


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

    @property
    def max_hash(self) -> int:
        """The highest hash, as int64, of an id in the sample."""
        return min(int(self.rate * 2.0**64) - (1 << 63), (1 << 63) - 1)


@dataclasses.dataclass(frozen=True)
class SampledIds:
    """Ids of a part of a log that two samples contain.

    Attributes:
        hashes: int64 ``[n]``, hashes of the ids in the larger sample.
        positions: int64 ``[n]``, ascending positions of these ids in the part.
        smaller: int64 ``[m]``, ascending indices in ``positions`` of the ids in the smaller sample.
        bounds: int64 ``[2]``, lowest and highest id of the part; ``[0]`` if it has no ids.
    """

    hashes: Tensor
    positions: Tensor
    smaller: Tensor
    bounds: Tensor


def sample_ids(ids: Tensor, larger: Sample, smaller: Sample) -> SampledIds:
    """Finds the ids in two samples.

    Args:
        ids: int64 ``[n]`` on the CPU.
        larger: a sample that contains the smaller one.
        smaller: a sample.
    """
    return SampledIds(*torch.ops.torchrec_hkv.sample_ids(ids, larger.max_hash, smaller.max_hash))


@torch.library.register_fake("torchrec_hkv::sample_ids")
def _(ids: Tensor, most_counted: int, max_sampled: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    counted, sampled = context.new_dynamic_size(), context.new_dynamic_size()
    bounds = context.new_dynamic_size()
    return (
        ids.new_empty(counted),
        ids.new_empty(counted),
        ids.new_empty(sampled),
        ids.new_empty(bounds),
    )


def groups_of(bits: Tensor) -> Tensor:
    """The group of each id, 0 to :data:`GROUPS` - 1.

    Args:
        bits: int64 ``[n]``, hashes of ids.
    """
    return (bits >> 24) & (GROUPS - 1)
