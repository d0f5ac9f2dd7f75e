"""Erases and exports the entries of a hash table by score, age and a predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from torchrec_hkv.hash_table.entries import Entries
from torchrec_hkv.hash_table.groups.selection import Conditions, check_some_condition
from torchrec_hkv.hash_table.groups.table_group import TableGroup


class TableSelection:
    """Operations on entries that meet conditions; a base of ``HashTable``."""

    _group: TableGroup

    def erase_if(
        self,
        *,
        score_below: int | None = None,
        score_at_least: int | None = None,
        older_than: int | None = None,
        where: Callable[[Entries], Tensor] | None = None,
    ) -> int:
        """Removes all entries that meet all given conditions; returns how many.

        Args:
            score_below: the score is less than this: -2^63 to 2^63 - 1 under ``"customized"``, 0 to
                2^64 - 1 under other policies.
            score_at_least: the score is at least this.
            older_than: the entry was last touched more than this many calls ago.
            where: a predicate, called with batches of entries; returns which of them match, bool
                ``[n]``.

        Raises:
            TypeError: ``where`` returns something else than a bool tensor.
            ValueError: ``where`` returns another shape, a bound is out of range, an age is
                negative, or no condition is given; :meth:`clear` removes all entries.
        """
        conditions = Conditions(
            score_below=score_below, score_at_least=score_at_least, older_than=older_than
        )
        check_some_condition("clear()", where, conditions)
        return self._group.erase_if(where=where, **conditions)

    def export(self, batch_size: int = 1 << 20) -> Iterator[Entries]:
        """Yields all entries in batches of at most ``batch_size``, in bounded memory.

        The ids are those at the time of the first batch; row and score of an entry are those at the
        time of its batch. Entries that have been yielded may be erased.

        Raises:
            RuntimeError: an entry left the table before it was yielded, or the table has grown.
        """
        yield from self.export_if(batch_size=batch_size)

    def export_if(
        self,
        *,
        score_below: int | None = None,
        score_at_least: int | None = None,
        older_than: int | None = None,
        where: Callable[[Entries], Tensor] | None = None,
        batch_size: int = 1 << 20,
    ) -> Iterator[Entries]:
        """Yields entries that meet all conditions; see :meth:`erase_if` and :meth:`export`."""
        for part in self._group.export_if(
            score_below=score_below,
            score_at_least=score_at_least,
            older_than=older_than,
            where=where,
            batch_size=batch_size,
        ):
            yield Entries(part.ids, part.rows, part.scores, part.states)
