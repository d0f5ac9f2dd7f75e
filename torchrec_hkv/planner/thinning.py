"""Selects some of the tables' variants if all variants of many tables would be too many."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torchrec_hkv.backends.protocol import BackendOptions
from torchrec_hkv.planner.loss_bounds import Table
from torchrec_hkv.planner.options import BackendShardingOption

#: The first search tries every 8th variant of a table; with up to 32 tables every 2nd.
_EVERY, _FEW, _EVERY_OF_FEW = 8, 32, 2


@dataclasses.dataclass(frozen=True)
class Thinning:
    """A selection of variants.

    Variants that differ from a table's options in the same fields form a chain of sizes. The first
    and the last variant of a chain are always selected.

    Attributes:
        tables: tables whose variants are selected; None for all.
        stride: one of this many variants of a chain is selected; None for its ends only.
        around: chosen options by table. Their neighbours in the chain are selected, too.
        bounded: tables with a bound on their loss. All their variants are selected, because some
            may lose more than the bound.
    """

    tables: Collection[Table] | None = None
    stride: int | None = None
    around: Mapping[Table, BackendOptions] = dataclasses.field(default_factory=dict)
    bounded: Collection[Table] = ()

    @classmethod
    def coarse(cls, tables: Collection[Table] | None, bounded: Collection[Table]) -> Thinning:
        """Few variants of some tables."""
        are_few = tables is not None and len(tables) <= _FEW
        return cls(tables, _EVERY_OF_FEW if are_few else _EVERY, bounded=bounded)

    def refined(self, around: Mapping[Table, BackendOptions]) -> Thinning:
        """The same, with the neighbours of chosen options."""
        return dataclasses.replace(self, around=around)

    def selects(self, table: Table) -> bool:
        """Whether variants of a table are selected."""
        return self.tables is None or table in self.tables or table in self.bounded

    def selected(
        self, option: BackendShardingOption, chains: Sequence[Sequence[BackendOptions]]
    ) -> list[BackendOptions]:
        """Selects options.

        Args:
            option: an enumerated option.
            chains: options of its variants, see :func:`chains_of`.
        """
        table = (option.path, option.name)
        if table in self.bounded:
            return [variant for chain in chains for variant in chain]
        if not self.selects(table):
            return []
        chosen = self.around.get(table)
        found: list[BackendOptions] = []
        for chain in chains:
            last = len(chain) - 1
            places = {0, last, *(range(0, last, self.stride) if self.stride else ())}
            if chosen is not None and self.stride and chosen in chain:
                at = chain.index(chosen)
                places.update(range(max(at - self.stride + 1, 0), min(at + self.stride, last + 1)))
            found += [chain[place] for place in sorted(places)]
        return found


EVERY_VARIANT = Thinning(stride=1)


def chains_of(
    options: BackendOptions, listed: Sequence[BackendOptions]
) -> list[list[BackendOptions]]:
    """Divides variants by the fields in which they differ from the options of a table."""
    fields = vars(options)
    chains: dict[tuple[str, ...], list[BackendOptions]] = {}
    for variant in listed:
        changed = tuple(name for name, value in vars(variant).items() if value != fields[name])
        chains.setdefault(changed, []).append(variant)
    return list(chains.values())
