"""Checks of the arguments that determine a Tensor-Train shape, before the table is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

CORE_COUNTS = (2, 3, 4)
#: Arguments that determine the ranks; at most one of them may be given.
SIZES = ("ranks", "compression_ratio", "max_bytes")


def check_shape_arguments(
    *,
    num_cores: object = None,
    p: object = None,
    q: object = None,
    ranks: object = None,
    compression_ratio: object = None,
    max_bytes: object = None,
) -> int:
    """Checks that values are valid for some table, and consistent.

    Args:
        num_cores: see :func:`torchrec_hkv.tensor_train.make_shape`.
        p: row factors.
        q: column factors.
        ranks: one number, or one per pair of neighbouring cores.
        compression_ratio: minimal compression ratio, instead of ranks.
        max_bytes: maximal bytes of the cores, instead of ranks.

    Returns:
        The number of cores that the arguments imply; 3 if they imply none.

    Raises:
        TypeError: a number is not an integer, or factors are not a sequence.
        ValueError: a number is invalid; the message names it.
    """
    sizes = {"ranks": ranks, "compression_ratio": compression_ratio, "max_bytes": max_bytes}
    given_sizes = [name for name in SIZES if sizes[name] is not None]
    if len(given_sizes) > 1:
        raise ValueError(
            f"{' and '.join(given_sizes)} were given, but at most one of them is allowed."
        )
    for name, factors in (("p", p), ("q", q)):
        if factors is not None:
            if not is_sequence(factors):
                raise TypeError(f"{name} is {factors!r}, but must be a sequence of integers.")
            check_positive(name, factors)
    if is_sequence(ranks):
        check_positive("ranks", ranks)
    elif ranks is not None:
        check_positive("ranks", [ranks])
    if max_bytes is not None:
        check_positive("max_bytes", [max_bytes])
    if compression_ratio is not None:
        is_number = isinstance(compression_ratio, (int, float))
        if isinstance(compression_ratio, bool) or not is_number:
            raise TypeError(f"compression_ratio is {compression_ratio!r}, but must be a number.")
        if not 1 <= compression_ratio < math.inf:
            raise ValueError(
                f"compression_ratio is {compression_ratio!r}, but must be a finite number of at "
                "least 1."
            )
    return _num_cores(num_cores, p, q, ranks)


def _num_cores(num_cores: object, p: object, q: object, ranks: object) -> int:
    said = num_cores
    if said is None and p is not None:
        said = len(p)
    if said is None and q is not None:
        said = len(q)
    if said is None and is_sequence(ranks):
        said = len(ranks) + 1
    said = 3 if said is None else said
    check_cores(said)
    for name, factors in (("p", p), ("q", q)):
        if factors is not None and len(factors) != said:
            raise ValueError(f"{name} is {list(factors)}, but {said} cores need {said} factors.")
    if is_sequence(ranks) and len(ranks) != said - 1:
        raise ValueError(f"ranks are {list(ranks)}, but {said} cores need {said - 1} of them.")
    return said


def check_cores(num_cores: object) -> None:
    """Checks that a number of cores is supported.

    Raises:
        ValueError: it is not 2, 3 or 4.
    """
    is_int = isinstance(num_cores, int) and not isinstance(num_cores, bool)
    if not is_int or num_cores not in CORE_COUNTS:
        raise ValueError(f"The number of cores is {num_cores!r}, but must be 2, 3 or 4.")


def check_positive(name: str, values: Sequence[object]) -> tuple[int, ...]:
    """Checks that values are positive int64 numbers.

    Raises:
        TypeError: a value is not an integer.
        ValueError: a value is out of range.
    """
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} has {value!r}, but must be integers.")
        if not 1 <= value < 1 << 63:
            raise ValueError(f"{name} has {value}, but must be from 1 to 2^63 - 1.")
    return tuple(values)


def is_sequence(value: object) -> bool:
    """Whether ``value`` is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
