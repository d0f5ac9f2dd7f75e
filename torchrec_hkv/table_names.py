"""Names of tables in arguments: full names, or own names that only one table has."""

from __future__ import annotations

from collections.abc import Iterable


def find_name(table: str, full_names: Iterable[str]) -> str:
    """The full name of a table.

    Args:
        table: the full name, or the table's own name if only one table has it.
        full_names: full names of all tables.

    Raises:
        ValueError: there is no such table, or several have that name.
    """
    names = list(full_names)
    if table in names:
        return table
    found = [name for name in names if name.rpartition(".")[2] == table]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"The model has {len(found)} tables {table!r}: use one of their full names, "
            f"{', '.join(map(repr, sorted(found)))}."
        )
    raise ValueError(f"The model has no table {table!r}: name one of {sorted(names)}.")
