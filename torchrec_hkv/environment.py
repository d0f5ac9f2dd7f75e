"""Environment variables that replace arguments and constraints which are not given.

Their names begin with ``TORCHREC_HKV_``; docs/guide/hybridbackend.md lists them.
"""

from __future__ import annotations

import os

PREFIX = "TORCHREC_HKV_"


def text(name: str) -> str | None:
    """The value of a variable; None if it is unset or empty.

    Args:
        name: name without the prefix.
    """
    return os.environ.get(PREFIX + name, "").strip() or None


def number(name: str, default: int | None) -> int | None:
    """The value of a variable as a positive integer.

    Raises:
        ValueError: the variable has another value.
    """
    said = text(name)
    if said is None:
        return default
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"{PREFIX}{name} is {said!r}, but must be a whole number of at least 1.")
    return int(said)


def flag(name: str) -> bool:
    """Whether a variable is ``1`` or ``true``; False if it is unset.

    Raises:
        ValueError: the value is none of ``0``, ``1``, ``false`` and ``true``.
    """
    said = (text(name) or "0").lower()
    if said not in ("0", "1", "false", "true"):
        raise ValueError(f"{PREFIX}{name} is {said!r}, but must be 0, 1, false or true.")
    return said in ("1", "true")


def by_table(name: str) -> dict[str, str]:
    """A value for all tables, or values by table: ``fp16``, or ``user=fp16,page=bf16``.

    Returns:
        The values by table; the key ``""`` is for all other tables.

    Raises:
        ValueError: the variable has another form.
    """
    said = text(name)
    if said is None:
        return {}
    found: dict[str, str] = {}
    for part in said.split(","):
        table, equals, value = part.strip().rpartition("=")
        if not value or (equals and not table) or table in found:
            raise ValueError(
                f"{PREFIX}{name} is {said!r}, but must be a value, or values by table such as "
                "user=VALUE,page=VALUE."
            )
        found[table] = value
    return found
