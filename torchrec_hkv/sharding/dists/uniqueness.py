"""Tables whose ids the user declares to be unique."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: True for all tables, a collection of names, or a mapping from names to bools.
Tables = bool | Collection[str] | Mapping[str, bool]


@dataclasses.dataclass(frozen=True)
class Uniqueness:
    """A sharder's declarations of unique ids.

    Attributes:
        unique: tables whose ids do not repeat within a batch of a rank.
        shard_unique: tables whose ids do not repeat within a lookup of a shard, over all ranks.
        is_checked: whether ``unique`` is checked; ``shard_unique`` always is.

    Raises:
        ValueError: the value of a table is neither True nor False.
    """

    unique: Tables = False
    shard_unique: Tables = False
    is_checked: bool = False

    def __post_init__(self) -> None:
        for field in ("unique", "shard_unique"):
            object.__setattr__(self, field, _names(field, getattr(self, field)))

    def has_unique(self, table: str) -> bool:
        """Whether a table's ids are declared unique within a batch of a rank."""
        return _has(self.unique, table)

    def has_shard_unique(self, table: str) -> bool:
        """Whether a table's ids are declared unique within a lookup of a shard."""
        return _has(self.shard_unique, table)

    def check_tables(
        self, tables: Iterable[str], backend_tables: Iterable[str], dedups: bool
    ) -> None:
        """Checks that named tables exist, and that the declarations have an effect.

        Args:
            tables: tables of the collection.
            backend_tables: the tables on backends.
            dedups: whether the collection deduplicates ids.

        Raises:
            ValueError: a table does not exist, or ``unique`` has no effect.
        """
        for field, known_tables in (("unique", tables), ("shard_unique", backend_tables)):
            value = getattr(self, field)
            unknown = [] if isinstance(value, bool) else sorted(set(value) - set(known_tables))
            if unknown:
                which = "tables on backends" if field == "shard_unique" else "tables"
                raise ValueError(
                    f"{field} names {unknown}, but the collection has {which} "
                    f"{sorted(known_tables)}."
                )
        if self.unique and not (self.is_checked or dedups):
            raise ValueError(
                f"unique is {self.unique!r}, but only has an effect with use_index_dedup or "
                "check_unique: leave it out, or set one of them."
            )


def _names(field: str, given: Tables) -> bool | Collection[str]:
    if not isinstance(given, Mapping):
        return given
    for table, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{field} of table {table!r} is {value!r}: it must be True or False.")
    return tuple(table for table, value in given.items() if value)


def check_batch(
    features: KeyedJaggedTensor, table_features: Mapping[str, Sequence[str]], where: str
) -> None:
    """Checks that no id of a table repeats in a batch.

    On a GPU it is a device-side assertion, which does not synchronize.

    Args:
        features: the batch.
        table_features: features of each table to check.
        where: the place of the check, for the message.

    Raises:
        ValueError: an id repeats; the message names table and id.
    """
    for table, names in table_features.items():
        check_ids(torch.cat([features[name].values() for name in names]), table, where)


def check_ids(ids: torch.Tensor, table: str, where: str) -> None:
    """Checks that no id of one table repeats; see :func:`check_batch`."""
    ordered = ids.sort()[0]
    repeats = ordered[1:] == ordered[:-1]
    if ids.device.type == "cuda":
        torch._assert_async(~repeats.any(), f"Table {table!r} has an id twice {where}.")
    elif repeats.any():
        raise ValueError(
            f"Table {table!r} was declared to have no repeated id {where}, but has id "
            f"{int(ordered[1:][repeats][0])} more than once: leave the declaration out."
        )


def _has(tables: Tables, table: str) -> bool:
    return tables if isinstance(tables, bool) else table in tables
