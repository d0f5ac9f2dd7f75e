"""Shapes of Tensor-Train tables: the factors of rows and columns, and the ranks.

A table ``[N, D]`` of ``d`` cores has row factors ``p`` with ``prod(p) >= N``, column factors ``q``
with ``prod(q) == D``, and ranks ``r_1 .. r_{d-1}`` between the cores (``r_0 = r_d = 1``). Row
``id = ((i_1 * p_2) + i_2) * p_3 + i_3`` is the product of slice ``i_k`` of each core ``k``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torchrec_hkv.tensor_train.shape_arguments import (
    check_cores,
    check_positive,
    check_shape_arguments,
    is_sequence,
)


@dataclasses.dataclass(frozen=True)
class TTShape:
    """The shape of a Tensor-Train table.

    Attributes:
        num_embeddings: number of rows; ids are 0 to ``num_embeddings - 1``.
        embedding_dim: number of columns.
        p: row factors, one for each core; their product is at least ``num_embeddings``.
        q: column factors, one for each core; their product is ``embedding_dim``.
        ranks: ranks between neighbouring cores, one fewer than cores.

    Raises:
        TypeError: a number is not an integer.
        ValueError: the numbers do not fit together; the message names them.
    """

    num_embeddings: int
    embedding_dim: int
    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_sizes(self.num_embeddings, self.embedding_dim)
        for name in ("p", "q", "ranks"):
            values = getattr(self, name)
            if not is_sequence(values):
                raise TypeError(f"{name} is {values!r}, but must be a sequence of integers.")
            object.__setattr__(self, name, check_positive(name, values))
        _check_row_factors(self.p, self.num_embeddings)
        _check_dim_factors(self.q, self.embedding_dim, len(self.p))
        if len(self.ranks) != self.num_cores - 1:
            raise ValueError(
                f"ranks are {list(self.ranks)}, but {self.num_cores} cores need "
                f"{self.num_cores - 1} of them."
            )
        for k, (rank, maximum) in enumerate(
            zip(self.ranks, max_ranks(self.p, self.q), strict=True)
        ):
            if rank > maximum:
                raise ValueError(
                    f"ranks are {list(self.ranks)}, but rank {k + 1} can be at most {maximum} with "
                    f"p {list(self.p)} and q {list(self.q)}: a larger one adds nothing."
                )

    @property
    def num_cores(self) -> int:
        """Number of cores."""
        return len(self.p)

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """``(1, *ranks, 1)``: core ``k`` is between ranks ``k`` and ``k + 1``."""
        return (1, *self.ranks, 1)

    def core_shape(self, k: int) -> tuple[int, int, int, int]:
        """Shape of core ``k`` in memory: ``(p_k, r_k, q_k, r_{k+1})``; for the last core
        ``(p_k, q_k, r_k, 1)``."""
        r = self.full_ranks
        if k == self.num_cores - 1:
            return (self.p[k], self.q[k], r[k], 1)
        return (self.p[k], r[k], self.q[k], r[k + 1])

    @property
    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        """:meth:`core_shape` of every core."""
        return [self.core_shape(k) for k in range(self.num_cores)]

    def slice_size(self, k: int) -> int:
        """Number of elements of a slice of core ``k``."""
        return math.prod(self.core_shape(k)[1:])

    @property
    def num_elements(self) -> int:
        """Number of elements of all cores."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    @property
    def padding(self) -> int:
        """Number of rows that the cores represent beyond ``num_embeddings``; they have no ids."""
        return math.prod(self.p) - self.num_embeddings

    @property
    def compression_ratio(self) -> float:
        """Number of elements of the table over that of the cores."""
        return self.num_embeddings * self.embedding_dim / self.num_elements

    def packed(self) -> list[int]:
        """The shape as ops take it: ``[rows, cores, *p, *q, *ranks]``."""
        return [self.num_embeddings, self.num_cores, *self.p, *self.q, *self.ranks]

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> TTShape:
        """The inverse of :meth:`packed`.

        Raises:
            ValueError: the numbers are not a shape.
        """
        rows, cores, *rest = numbers
        if len(rest) != 3 * cores - 1:
            raise ValueError(f"{list(numbers)} is not a shape of {cores} cores.")
        p, q, ranks = rest[:cores], rest[cores : 2 * cores], rest[2 * cores :]
        return cls(rows, math.prod(q), tuple(p), tuple(q), tuple(ranks))


def factor_rows(num_embeddings: int, num_cores: int) -> tuple[int, ...]:
    """Balanced row factors, whose product is at least ``num_embeddings``.

    The first factor is the root of ``num_embeddings``, rounded up. The others are computed in the
    same way from the rest, so that the product exceeds ``num_embeddings`` only slightly.
    """
    _check_sizes(num_embeddings, 1)
    check_cores(num_cores)
    factors: list[int] = []
    remaining = num_embeddings
    for cores in range(num_cores, 1, -1):
        factors.append(_root_up(remaining, cores))
        remaining = -(-remaining // factors[-1])
    return (*factors, remaining)


def factor_dim(embedding_dim: int, num_cores: int) -> tuple[int, ...]:
    """Balanced column factors, whose product is ``embedding_dim``.

    Among all factorizations it is the one with the smallest sum. The smallest factors go to the
    inner cores, whose slices are larger by a rank. The factors of a prime dim are 1 and the dim.
    """
    _check_sizes(1, embedding_dim)
    check_cores(num_cores)
    small_first = sorted(_split(embedding_dim, num_cores))
    *inner, first, last = small_first
    return (first, *inner, last)


def max_ranks(p: Sequence[int], q: Sequence[int]) -> tuple[int, ...]:
    """The largest useful ranks: those of the unfoldings of a table."""
    sizes = [rows * columns for rows, columns in zip(p, q, strict=True)]
    return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))


def make_shape(
    num_embeddings: int,
    embedding_dim: int,
    *,
    num_cores: int | None = None,
    p: Sequence[int] | None = None,
    q: Sequence[int] | None = None,
    ranks: int | Sequence[int] | None = None,
    compression_ratio: float | None = None,
    max_bytes: int | None = None,
    element_size: int = 4,
) -> TTShape:
    """Makes a shape. Give exactly one of ``ranks``, ``compression_ratio`` and ``max_bytes``.

    Args:
        num_embeddings: number of rows.
        embedding_dim: number of columns.
        num_cores: 2, 3 or 4; by default the number that ``p``, ``q`` or ``ranks`` imply, else 3.
        p: row factors; by default :func:`factor_rows`.
        q: column factors; by default :func:`factor_dim`.
        ranks: one for each pair of neighbouring cores, or one number for all, which is reduced
            where a larger rank is useless (:func:`max_ranks`).
        compression_ratio: minimal ratio of the table's elements to those of the cores; at least 1.
        max_bytes: maximal bytes of the cores.
        element_size: bytes of an element, for ``max_bytes``.

    Raises:
        TypeError: a number is not an integer.
        ValueError: the arguments do not fit; the message names the one that does not.
    """
    _check_sizes(num_embeddings, embedding_dim)
    size_arguments = {
        "ranks": ranks,
        "compression_ratio": compression_ratio,
        "max_bytes": max_bytes,
    }
    if all(value is None for value in size_arguments.values()):
        raise ValueError(
            "No size was given: give exactly one of ranks, compression_ratio and max_bytes."
        )
    cores = check_shape_arguments(num_cores=num_cores, p=p, q=q, **size_arguments)
    p = factor_rows(num_embeddings, cores) if p is None else tuple(p)
    q = factor_dim(embedding_dim, cores) if q is None else tuple(q)
    _check_row_factors(p, num_embeddings)
    _check_dim_factors(q, embedding_dim, len(p))
    if ranks is not None:
        if not is_sequence(ranks):
            ranks = [min(ranks, maximum) for maximum in max_ranks(p, q)]
        return TTShape(num_embeddings, embedding_dim, p, q, tuple(ranks))
    if compression_ratio is not None:
        maximum, what = int(num_embeddings * embedding_dim / compression_ratio), "compression_ratio"
    else:
        check_positive("element_size", [element_size])
        maximum, what = max_bytes // element_size, "max_bytes"
    return _largest_within(num_embeddings, embedding_dim, p, q, maximum, what, size_arguments[what])


def _largest_within(
    num_embeddings: int,
    embedding_dim: int,
    p: tuple[int, ...],
    q: tuple[int, ...],
    maximum: int,
    what: str,
    value: object,
) -> TTShape:
    """The shape with the largest equal ranks whose cores have at most ``maximum`` elements."""
    limits = max_ranks(p, q)

    def shape(rank: int) -> TTShape:
        ranks = tuple(min(rank, limit) for limit in limits)
        return TTShape(num_embeddings, embedding_dim, p, q, ranks)

    minimum = shape(1)
    if minimum.num_elements > maximum:
        raise ValueError(
            f"{what} is {value!r}, but the cores of p {list(p)} and q {list(q)} have at least "
            f"{minimum.num_elements} elements, a ratio of {minimum.compression_ratio:.4g}, at rank "
            "1."
        )
    low, high = 1, max(limits)
    while low < high:
        middle = (low + high + 1) // 2
        if shape(middle).num_elements <= maximum:
            low = middle
        else:
            high = middle - 1
    return shape(low)


def _check_sizes(num_embeddings: int, embedding_dim: int) -> None:
    check_positive("num_embeddings", [num_embeddings])
    check_positive("embedding_dim", [embedding_dim])


def _check_row_factors(p: tuple[int, ...], num_embeddings: int) -> None:
    check_cores(len(p))
    if math.prod(p) < num_embeddings:
        raise ValueError(
            f"p is {list(p)} with product {math.prod(p)}, but it must be at least num_embeddings, "
            f"{num_embeddings}."
        )
    if math.prod(p) >= 1 << 63:
        raise ValueError(f"p is {list(p)} with product {math.prod(p)}, but it must be below 2^63.")


def _check_dim_factors(q: tuple[int, ...], embedding_dim: int, num_cores: int) -> None:
    if len(q) != num_cores:
        raise ValueError(f"q is {list(q)}, but {num_cores} cores need {num_cores} factors.")
    if math.prod(q) != embedding_dim:
        raise ValueError(
            f"q is {list(q)} with product {math.prod(q)}, but it must be embedding_dim, "
            f"{embedding_dim}."
        )


def _root_up(n: int, degree: int) -> int:
    """The smallest integer whose ``degree``-th power is at least n."""
    root = max(1, round(n ** (1.0 / degree)))
    while root**degree >= n and root > 1:
        root -= 1
    while root**degree < n:
        root += 1
    return root


def _split(n: int, count: int) -> tuple[int, ...]:
    """The factorization of n into ``count`` factors with the smallest sum."""
    if count == 1:
        return (n,)
    best: tuple[int, ...] | None = None
    for divisor in range(1, math.isqrt(n) + 1):
        if n % divisor or divisor**count > n:
            continue
        # The smallest factor is at most the root.
        rest = _split(n // divisor, count - 1)
        if best is None or divisor + sum(rest) < sum(best):
            best = (divisor, *rest)
    assert best is not None  # 1 divides
    return best
