"""Strict tables of a group: they raise where an id finds no place."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_hkv import _C
from torchrec_hkv.hash_table.groups.counters import COUNTERS
from torchrec_hkv.hash_table.groups.holds import GroupHolds
from torchrec_hkv.hash_table.spec_checks import crowded_message
from torchrec_hkv.hash_table.table_spec import TableSpec

_CROWDED = COUNTERS.index("crowded")


class GroupStrictness(GroupHolds):
    """What a group refuses in its strict tables. Part of ``TableGroup``, which has the rest."""

    tables: tuple[TableSpec, ...]
    _group: _C.TableGroup

    def _watch(self, tables: Sequence[TableSpec], labels: Sequence[str] | None) -> None:
        #: What messages call the tables.
        self.labels = tuple(labels or (spec.name for spec in tables))
        self._strict = [table for table, spec in enumerate(tables) if spec.strict]
        self._crowded = [0] * len(tables)

    def check_strict(self) -> None:
        """Raises if a strict table has refused an id for lack of a place since the last check.

        Waits for the device where the group has a strict table, so that such a group can't be
        captured in a CUDA graph. The other ids of the call have been placed then.

        Raises:
            RuntimeError: it names the tables, their load, and what to change.
        """
        if crowded := self.take_crowded():
            sizes = self._group.sizes().tolist()
            sentences = (
                crowded_message(
                    self.labels[table],
                    number,
                    sizes[table],
                    self._group.present_slots(table),
                )
                for table, number in crowded.items()
            )
            raise RuntimeError(" ".join(sentences))

    def take_crowded(self) -> dict[int, int]:
        """How many ids each strict table has refused for lack of a place since this was last asked.

        An id that repeats within a call counts at least once. Waits for the device where the group
        has a strict table.

        Returns:
            Numbers above 0 by table.
        """
        if not self._strict:
            return {}
        before, self._crowded = self._crowded, self._group.counters[:, _CROWDED].tolist()
        numbers = {table: self._crowded[table] - before[table] for table in self._strict}
        return {table: number for table, number in numbers.items() if number > 0}
