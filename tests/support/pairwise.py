"""Cases for ``pytest.mark.parametrize`` that cover every pair of values, not every combination.

Faults mostly depend on one or two options, so these cases find nearly as many faults as the full
product, in far less time. TORCHREC_HKV_ALL_CASES=1 runs the full product.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any


def pairwise(
    *axes: Iterable[Any], allowed: Callable[..., bool] = lambda *_: True
) -> list[tuple[Any, ...]]:
    """Returns cases in which any two values of different axes occur together at least once.

    They are chosen greedily from the full product. Equal axes give equal cases.

    Args:
        axes: values of each argument; at least two axes.
        allowed: returns whether a combination is allowed.
    """
    values = [list(axis) for axis in axes]

    def arguments(case: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(axis[at] for axis, at in zip(values, case, strict=True))

    product = itertools.product(*map(range, map(len, values)))
    cases = [case for case in product if allowed(*arguments(case))]
    if os.environ.get("TORCHREC_HKV_ALL_CASES") != "1":
        cases = _covering(cases)
    return [arguments(case) for case in cases]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(case), 2))


def _covering(product: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    left = set().union(*map(_pairs, product))
    chosen = []
    while left:
        best = max(product, key=lambda case: len(_pairs(case) & left))
        chosen.append(best)
        left -= _pairs(best)
    return chosen
