"""Checks of a table's options, and the message of a strict table."""

from __future__ import annotations

import operator

from torchrec_hkv.hash_table.eviction import EvictionPolicy, sums_scores


def check_expire_after(where: str, expire_after: object) -> None:
    """Checks that ``expire_after`` is a number of calls or None.

    Raises:
        ValueError: it is not; the message starts with ``where``.
    """
    if expire_after is None:
        return
    is_int = isinstance(expire_after, int) and not isinstance(expire_after, bool)
    if not is_int or not 1 <= expire_after < 1 << 32:
        raise ValueError(
            f"{where}: expire_after is {expire_after!r}, but must be a number of calls from 1 to "
            "2^32 - 1, or None."
        )


def check_remember_evicted(where: str, remember_evicted: object) -> None:
    """Checks that ``remember_evicted`` is a number of ids or None.

    Raises:
        ValueError: it is not; the message starts with ``where``.
    """
    if remember_evicted is None:
        return
    is_int = isinstance(remember_evicted, int) and not isinstance(remember_evicted, bool)
    if not is_int or not 1 <= remember_evicted <= 1 << 32:
        raise ValueError(
            f"{where}: remember_evicted is {remember_evicted!r}, but must be a number of ids from "
            "1 to 2^32, or None."
        )


def check_restore_counts(
    where: str, restore_counts: object, remember_evicted: int | None, eviction: EvictionPolicy
) -> None:
    """Checks that ``restore_counts`` can have an effect if it is set.

    Raises:
        ValueError: it can't; the message starts with ``where``.
    """
    check_flag(where, "restore_counts", restore_counts)
    if restore_counts and remember_evicted is None:
        raise ValueError(
            f"{where}: restore_counts is True and remember_evicted is None, but only counts of "
            "remembered ids are restored: set remember_evicted to a number of ids."
        )
    if restore_counts and not sums_scores(eviction):
        raise ValueError(
            f"{where}: restore_counts is True and eviction is {eviction!r}, but only 'lfu', "
            "'adaptive', 'epoch_lfu' and an AgedLFU count lookups."
        )


def check_flag(where: str, name: str, value: object) -> None:
    """Checks that ``value`` is a bool.

    Raises:
        ValueError: it is not; the message starts with ``where``.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {name} is {value!r}, but must be True or False.")


def check_integer(where: str, name: str, value: object, *, or_none: bool = False) -> None:
    """Checks that ``value`` is an integer of 64 bits.

    Raises:
        ValueError: it is not; the message starts with ``where``.
    """
    check_int64(f"{where}: {name}", value, or_none=or_none)


def check_range(
    where: str, name: str, value: object, minimum: int, maximum: int, *, or_none: bool = False
) -> None:
    """Checks that ``value`` is an integer from ``minimum`` to ``maximum``.

    Raises:
        ValueError: it is not; the message starts with ``where``.
    """
    if value is None and or_none:
        return
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not minimum <= value <= maximum:
        allowed = f"an integer from {bound(minimum)} to {bound(maximum)}"
        allowed += ", or None" if or_none else ""
        raise ValueError(f"{where}: {name} is {value!r}, but must be {allowed}.")


def bound(number: int) -> str:
    """A bound as text; bounds of int64 as powers of two."""
    return {-(1 << 63): "-2^63", (1 << 63) - 1: "2^63 - 1"}.get(number, str(number))


def check_number(what: str, value: object, *, or_none: bool = False) -> None:
    """Checks that ``value`` is an integer.

    Raises:
        ValueError: it is not; the message starts with ``what``.
    """
    if value is None and or_none:
        return
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        allowed = "an integer or None" if or_none else "an integer"
        raise ValueError(f"{what} is {value!r}, but must be {allowed}.")


def check_int64(what: str, value: object, *, or_none: bool = False) -> None:
    """Checks that ``value`` is an integer of 64 bits, as the kernels take.

    Raises:
        ValueError: it is not; the message starts with ``what``.
    """
    check_number(what, value, or_none=or_none)
    if value is not None and not -(1 << 63) <= operator.index(value) < 1 << 63:
        raise ValueError(f"{what} is {value}, but must be an integer from -2^63 to 2^63 - 1.")


def crowded_message(name: str, number: int, size: int, slots: int) -> str:
    """The message of a strict table that found no slot for some ids.

    Args:
        name: name of the table.
        number: number of ids without a slot.
        size: number of entries in the table.
        slots: number of slots of the table.
    """
    return (
        f"Table {name!r} is strict and had no place for {number} of this call's new ids: both "
        "buckets of each are full of ids of this call or of calls whose backward has not run. "
        f"Its load is {size / slots:.3f} ({size} of {slots} slots): give it a larger capacity, use "
        "smaller batches, or keep fewer of them in flight."
    )
