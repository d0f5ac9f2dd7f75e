"""Parses numbers and sizes with units."""

from __future__ import annotations

import re

_ROWS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_BYTES = {"": 30, "kib": 10, "mib": 20, "gib": 30, "tib": 40}
# Far below the range of int64, so that sums do not overflow.
_LIMIT = 1 << 60
_PATTERN = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_count(what: str, text: str) -> int:
    """Parses a positive whole number: ``1000``, ``1_000``, ``1e9``, ``1.5B`` (units k, M and B).

    Raises:
        ValueError: the text is not such a number.
    """
    number = _scaled(text, {unit: float(factor) for unit, factor in _ROWS.items()})
    if number is None or number < 1 or not number.is_integer():
        raise ValueError(f"{what} is {text!r}, but must be a whole number such as 1000000 or 1B.")
    return _below_limit(what, text, number)


def parse_id(what: str, text: str) -> int:
    """Parses an int64: ``4711``, ``-1`` or ``0x7fff``.

    Raises:
        ValueError: the text is not an int64.
    """
    try:
        number = int(text, 0)
    except ValueError:
        number = 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{what} is {text!r}, but must be a whole number from -2^63 to 2^63 - 1.")
    return number


def parse_bytes(what: str, text: str) -> int:
    """Parses a size in bytes: ``141GiB``, ``512MiB``, ``2TiB``; without a unit in GiB.

    Raises:
        ValueError: the text is not a size, or less than a byte.
    """
    number = _scaled(text, {unit: float(1 << bits) for unit, bits in _BYTES.items()})
    if number is None or number < 1:
        raise ValueError(f"{what} is {text!r}, but must be a size such as 80GiB, 512MiB or 2TiB.")
    return _below_limit(what, text, number)


def _below_limit(what: str, text: str, number: float) -> int:
    if number >= _LIMIT:
        raise ValueError(f"{what} is {text!r}, but must be less than 2^60.")
    return int(number)


def _scaled(text: str, units: dict[str, float]) -> float | None:
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        return None
    return float(match[1].replace("_", "").replace(",", "")) * units[match[2].lower()]
