"""The options of a table at one level of loss, in the form in which searches combine them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv import _C
from torchrec_hkv.planner.packing import Parts


@dataclasses.dataclass(frozen=True)
class Sized:
    """An option with the needs of its shards."""

    option: ShardingOption
    parts: Parts


@dataclasses.dataclass(frozen=True)
class Choices:
    """Options from which one is chosen.

    Attributes:
        options: the options.
        are_placed: whether :func:`torchrec_hkv.planner.packing.pack` supports them all.
        needs: the options' needs, in the form that C++ takes.
    """

    options: Sequence[Sized]
    are_placed: bool
    needs: _C.PlannerChoices

    @classmethod
    def of(cls, options: Sequence[Sized]) -> Choices:
        """The options of a table."""
        needs = _C.PlannerChoices([sized.parts.needs for sized in options])
        return cls(options, all(sized.parts.is_placed for sized in options), needs)


def spares(other: Sized, sized: Sized) -> bool:
    """Whether ``other`` fits wherever ``sized`` fits."""
    if other.parts.needs.spread != sized.parts.needs.spread:
        return False
    return other.parts.needs.fits_where(sized.parts.needs)
