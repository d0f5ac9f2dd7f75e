"""The options of a table at one level of loss, in the form in which searches combine them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torchrec.distributed.planner.types import ShardingOption

from torchrec_hkv import _C
from torchrec_hkv.planner.packing import ShardNeeds


@dataclasses.dataclass(frozen=True)
class SizedOption:
    """An option with the needs of its shards."""

    option: ShardingOption
    needs: ShardNeeds


@dataclasses.dataclass(frozen=True)
class OptionSet:
    """Options from which one is chosen.

    Attributes:
        options: the options.
        are_placed: whether :func:`torchrec_hkv.planner.packing.pack` supports them all.
        needs: the options' needs, in the form that C++ takes.
    """

    options: Sequence[SizedOption]
    are_placed: bool
    needs: _C.PlannerChoices

    @classmethod
    def of(cls, options: Sequence[SizedOption]) -> OptionSet:
        """The options of a table."""
        needs = _C.PlannerChoices([sized.needs.native for sized in options])
        return cls(options, all(sized.needs.is_placed for sized in options), needs)


def fits_wherever(other: SizedOption, sized: SizedOption) -> bool:
    """Whether ``other`` fits wherever ``sized`` fits."""
    if other.needs.native.spread != sized.needs.native.spread:
        return False
    return other.needs.native.fits_where(sized.needs.native)
