"""Strict tables: they raise if an id finds no slot."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_hkv import _C
from torchrec_hkv.hash_table.groups.counters import COUNTERS
from torchrec_hkv.hash_table.groups.locks import GroupLocks
from torchrec_hkv.hash_table.spec_checks import crowded_message
from torchrec_hkv.hash_table.table_spec import TableSpec

_CROWDED = COUNTERS.index("crowded")


class GroupStrictness(GroupLocks):
    """Checks of strict tables; a base of ``TableGroup``."""

    tables: tuple[TableSpec, ...]
    _group: _C.TableGroup

    def _watch(self, tables: Sequence[TableSpec], labels: Sequence[str] | None) -> None:
        #: Names of the tables in messages.
        self.labels = tuple(labels or (spec.name for spec in tables))
        self._strict = [table for table, spec in enumerate(tables) if spec.strict]
        self._crowded = [0] * len(tables)

    def check_strict(self) -> None:
        """Raises if a strict table found no slot for an id since the last check.

        Synchronizes with the device if the group has a strict table; such a group can't be captured
        in a CUDA graph. The other ids of the call have been inserted then.

        Raises:
            RuntimeError: the message names the tables, their load, and what to change.
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
        """Number of ids for which each strict table found no slot since the previous call.

        An id that occurs several times in a call counts at least once. Synchronizes with the device
        if the group has a strict table.

        Returns:
            Positive numbers by table index.
        """
        if not self._strict:
            return {}
        before, self._crowded = self._crowded, self._group.counters[:, _CROWDED].tolist()
        numbers = {table: self._crowded[table] - before[table] for table in self._strict}
        return {table: number for table, number in numbers.items() if number > 0}
