"""Tables of which a user says that no id comes twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: ``True`` for all tables, their names, or by table whether it is one of them.
Tables = bool | Collection[str] | Mapping[str, bool]


@dataclasses.dataclass(frozen=True)
class Uniqueness:
    """What a sharder was told.

    Attributes:
        unique: tables whose ids are different in each batch of each rank.
        shard_unique: tables whose ids are different where they are looked up, over all ranks.
        is_checked: whether ``unique`` is checked; ``shard_unique`` always is.

    Raises:
        ValueError: a table has another value than True and False.
    """

    unique: Tables = False
    shard_unique: Tables = False
    is_checked: bool = False

    def __post_init__(self) -> None:
        for field in ("unique", "shard_unique"):
            object.__setattr__(self, field, _names(field, getattr(self, field)))

    def has_unique(self, table: str) -> bool:
        """Whether a table's ids are different in a rank's batch."""
        return _has(self.unique, table)

    def has_shard_unique(self, table: str) -> bool:
        """Whether a table's ids are different where they are looked up."""
        return _has(self.shard_unique, table)

    def check_tables(self, tables: Iterable[str], ours: Iterable[str], dedups: bool) -> None:
        """Refuses names of tables that are not there, and what would have no effect.

        Args:
            tables: of the collection.
            ours: those of them that backends serve.
            dedups: whether the collection sends ids once.

        Raises:
            ValueError: naming tables.
        """
        for field, known in (("unique", tables), ("shard_unique", ours)):
            told = getattr(self, field)
            unknown = [] if isinstance(told, bool) else sorted(set(told) - set(known))
            if unknown:
                which = "tables on backends" if field == "shard_unique" else "tables"
                raise ValueError(
                    f"{field} names {unknown}, but the collection has {which} {sorted(known)}."
                )
        if self.unique and not (self.is_checked or dedups):
            raise ValueError(
                f"unique is {self.unique!r}, which has an effect with use_index_dedup or "
                "check_unique only: leave it out, or set one of them."
            )


def _names(field: str, told: Tables) -> bool | Collection[str]:
    if not isinstance(told, Mapping):
        return told
    for table, value in told.items():
        if not isinstance(value, bool):
            raise ValueError(f"{field} of table {table!r} is {value!r}: it must be True or False.")
    return tuple(table for table, value in told.items() if value)


def check_batch(
    features: KeyedJaggedTensor, table_features: Mapping[str, Sequence[str]], where: str
) -> None:
    """Refuses a batch in which an id of a table comes twice.

    On a GPU the check is an assertion of the device's, which the host does not wait for.

    Args:
        features: of the batch.
        table_features: of each table that is checked.
        where: for the message.

    Raises:
        ValueError: naming a table and an id.
    """
    for table, names in table_features.items():
        check_ids(torch.cat([features[name].values() for name in names]), table, where)


def check_ids(ids: torch.Tensor, table: str, where: str) -> None:
    """As :func:`check_batch`, of the ids of one table."""
    ordered = ids.sort()[0]
    repeats = ordered[1:] == ordered[:-1]
    if ids.device.type == "cuda":
        torch._assert_async(~repeats.any(), f"Table {table!r} has an id twice {where}.")
    elif repeats.any():
        raise ValueError(
            f"Table {table!r} was said to have no id twice {where}, but has "
            f"{int(ordered[1:][repeats][0])} more than once."
        )


def _has(tables: Tables, table: str) -> bool:
    return tables if isinstance(tables, bool) else table in tables
