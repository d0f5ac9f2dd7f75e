"""Sampling by id: all lookups of some ids, chosen by a hash of the id.

A table with the same share of the rows then sees what the whole table sees, since ids compete with
each other alike (SHARDS: Waldspurger, Park, Garthwaite and Ahmad, FAST 2015).
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

#: Parts that sampled ids fall into, to see how much an estimate depends on which ids were drawn.
GROUPS = 32
# Odd, and others than those of the tables' own hash, so that the sample is spread over buckets.
_FIRST, _SECOND = -6884282663029611473, -2545237284413741335


@dataclasses.dataclass(frozen=True)
class Sample:
    """A share of all ids.

    Attributes:
        rate: the share, above 0 and at most 1.
    """

    rate: float = 1.0

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self.rate >= 1.0

    def taken(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the ids in the sample, and the group of each.

        Args:
            ids: int64 ``[n]``.

        Returns:
            int64 ``[m]``, ascending, and int64 ``[m]``, 0 to :data:`GROUPS` - 1.
        """
        mixed = ids * _FIRST
        mixed ^= mixed >> 32
        mixed *= _SECOND
        mixed ^= mixed >> 29
        mixed *= _FIRST
        at = (mixed < int(self.rate * 2.0**64) - (1 << 63)).nonzero().squeeze(1)
        return at, (mixed[at] >> 24) & (GROUPS - 1)
