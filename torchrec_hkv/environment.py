"""Environment variables: what applies where an argument or a constraint says nothing.

Each is ``TORCHREC_HKV_`` and a name; docs/guide/hybridbackend.md lists them.
"""

from __future__ import annotations

import os

PREFIX = "TORCHREC_HKV_"


def text(name: str) -> str | None:
    """What a variable says; None where it is not set or empty.

    Args:
        name: without the prefix.
    """
    return os.environ.get(PREFIX + name, "").strip() or None


def number(name: str, default: int | None) -> int | None:
    """A whole number of at least 1.

    Raises:
        ValueError: the variable says something else.
    """
    said = text(name)
    if said is None:
        return default
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"{PREFIX}{name} is {said!r}, but must be a whole number of at least 1.")
    return int(said)


def flag(name: str) -> bool:
    """Whether a variable is ``1`` or ``true``; not where it is not set.

    Raises:
        ValueError: it is something else than those, ``0`` and ``false``.
    """
    said = (text(name) or "0").lower()
    if said not in ("0", "1", "false", "true"):
        raise ValueError(f"{PREFIX}{name} is {said!r}, but must be 0, 1, false or true.")
    return said in ("1", "true")


def by_table(name: str) -> dict[str, str]:
    """A value for all tables, or several by table: ``fp16``, or ``user=fp16,page=bf16``.

    Returns:
        By table; the key ``""`` is that of all others.

    Raises:
        ValueError: the variable says something else.
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
