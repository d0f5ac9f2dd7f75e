"""Reorders a table's ids so that similar ids share slices of cores.

Row ``((i_1 p_2) + i_2) p_3 + i_3`` is a product of slice ``i_k`` of each core, so neighbouring rows
differ in the last core only. If neighbouring rows are similar, lower ranks suffice.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

_TYPES = (torch.int16, torch.int32, torch.int64)


class IdOrder:
    """The row of a Tensor-Train table for each id; a permutation of 0 to ``num_ids - 1``.

    Apply it where ids become row numbers. An order of all ids takes 2 to 8 bytes per id, as
    many as its largest number needs. An order that lists only the ids that come first
    (:meth:`first`, or :meth:`by_value` with ``max_bytes``) takes one byte per listed id and 2
    to 8 bytes per 256 ids. Count :attr:`num_bytes` among the bytes of the table.

    Args:
        rows: int64 ``[num_ids]``, the row of each id; a permutation of 0 to ``num_ids - 1``.

    Raises:
        TypeError: rows have another dtype.
        ValueError: rows are not a permutation.
    """

    def __init__(self, rows: Tensor) -> None:
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64:
            kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"rows must be a tensor of dtype torch.int64, but are of {kind}.")
        if rows.dim() != 1:
            raise ValueError(f"rows have shape {tuple(rows.shape)}, but must be 1-D.")
        if not torch.equal(rows.sort().values, torch.arange(rows.numel(), device=rows.device)):
            raise ValueError(
                f"rows must be a permutation of 0 to {rows.numel() - 1}, but some repeat or are "
                "missing."
            )
        self._map: _Table | _Listed = _Table(rows)

    @classmethod
    def first(cls, ids: Tensor, num_ids: int) -> IdOrder:
        """Creates an order with these ids first, then all others, both in ascending order.

        Only the first ids are stored, in about a byte each. The row of another id follows from the
        number of stored ids below it.

        Args:
            ids: int64 ``[n]``, distinct; for example the most frequent ids.
            num_ids: number of all ids, which are 0 to ``num_ids - 1``.

        Raises:
            TypeError: ``ids`` have the wrong dtype, or ``num_ids`` is not an integer.
            ValueError: an id occurs twice or is out of range.
        """
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"ids must be a tensor of dtype torch.int64, but are of {kind}.")
        _check_count("num_ids", num_ids)
        if ids.dim() != 1:
            raise ValueError(f"ids have shape {tuple(ids.shape)}, but must be 1-D.")
        ids = ids.sort().values
        if ids.numel():
            if ids[0] < 0 or ids[-1] >= num_ids:
                raise ValueError(
                    f"ids are from {int(ids[0])} to {int(ids[-1])}, but must be from 0 to "
                    f"{num_ids - 1}."
                )
            if twice := int((ids.diff() == 0).sum()):
                raise ValueError(f"ids must be distinct, but {twice} occur again.")
        order = cls.__new__(cls)
        order._map = _Listed(ids, num_ids)
        return order

    @classmethod
    def by_value(cls, values: Tensor, max_bytes: int | None = None) -> IdOrder:
        """Creates an order with ids of large values first. Among equal values the smaller id is
        first.

        Good values are those on which rows depend, such as the mean of a label
        (:func:`smoothed_means`) or the leading component of densely trained rows. With the number
        of occurrences as values, frequent ids share slices with each other and not with rare ids.

        Args:
            values: ``[num_ids]``, of any ordered dtype.
            max_bytes: largest size of the order in bytes. As many ids with the largest values as
                fit come first, in ascending order of ids (:meth:`first`). None: all ids are ordered
                by value.

        Raises:
            TypeError: ``values`` are not a tensor, or ``max_bytes`` is not an integer.
            ValueError: ``values`` have the wrong shape or contain NaN, or ``max_bytes`` is
                negative.
        """
        if not isinstance(values, Tensor):
            raise TypeError(f"values are {type(values).__name__}, but must be a tensor.")
        if values.dim() != 1:
            raise ValueError(f"values have shape {tuple(values.shape)}, but must be 1-D.")
        if values.isnan().any():
            raise ValueError(
                "values contain NaN, which has no place in an order: replace it first."
            )
        if max_bytes is not None:
            _check_count("max_bytes", max_bytes)
        ids = torch.argsort(values, descending=True, stable=True)
        if max_bytes is not None:
            return cls.first(ids[: _Listed.max_listed(max_bytes, ids.numel())], ids.numel())
        rows = torch.empty_like(ids)
        rows[ids] = torch.arange(ids.numel(), device=ids.device)
        return cls(rows)

    def __len__(self) -> int:
        return self._map.num_ids

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the order takes."""
        return sum(part.numel() * part.element_size() for part in self._map.parts)

    @property
    def num_listed(self) -> int:
        """Number of ids that are stored: the first ones, or all."""
        return self._map.num_listed

    @property
    def rows(self) -> Tensor:
        """The row of each id, int64 ``[num_ids]``."""
        return self._map.rows_of(self._all())

    @property
    def ids(self) -> Tensor:
        """The id of each row, int64 ``[num_ids]``."""
        return self._map.ids_of(self._all())

    def rows_of(self, ids: Tensor) -> Tensor:
        """The rows of ids, int64 with the ids' shape.

        Raises:
            ValueError: an id is out of range (on a CPU).
        """
        self._check_range(ids, "id")
        return self._map.rows_of(ids)

    def ids_of(self, rows: Tensor) -> Tensor:
        """The ids of rows: the inverse of :meth:`rows_of`."""
        self._check_range(rows, "row")
        return self._map.ids_of(rows)

    def reordered(self, table: Tensor) -> Tensor:
        """Returns the rows of a dense table ``[num_ids, ...]`` in this order, for example for
        :func:`torchrec_hkv.tensor_train.tt_svd`."""
        return table[self.ids.to(table.device)]

    def _all(self) -> Tensor:
        return torch.arange(len(self), device=self._map.parts[0].device)

    def _check_range(self, indices: Tensor, what: str) -> None:
        if indices.device.type == "cpu" and indices.numel():
            outside = (indices < 0) | (indices >= len(self))
            if outside.any():
                raise ValueError(
                    f"the order has no {what} {int(indices[outside].flatten()[0])}: it has 0 to "
                    f"{len(self) - 1}."
                )


class _Table:
    """A permutation as a table."""

    def __init__(self, rows: Tensor) -> None:
        self.num_ids = self.num_listed = rows.numel()
        self.parts = (rows.to(_smallest_type(self.num_ids)),)

    def rows_of(self, ids: Tensor) -> Tensor:
        return self.parts[0][ids].long()

    def ids_of(self, rows: Tensor) -> Tensor:
        return self.parts[0].argsort()[rows]


class _Listed:
    """An order that stores only the first ids: their low bits, ascending, and the beginning of each
    block of ids with the same high bits."""

    #: Number of an id's low bits.
    BITS = 8

    def __init__(self, ids: Tensor, num_ids: int) -> None:
        self.num_ids, self.num_listed = num_ids, ids.numel()
        firsts = torch.arange(self._blocks(num_ids) + 1, device=ids.device) << self.BITS
        starts = torch.searchsorted(ids, firsts).to(_smallest_type(self.num_listed))
        self.parts = (starts, (ids % (1 << self.BITS)).to(torch.uint8))

    @classmethod
    def _blocks(cls, num_ids: int) -> int:
        return (num_ids + (1 << cls.BITS) - 1) >> cls.BITS

    @classmethod
    def max_listed(cls, max_bytes: int, num_ids: int) -> int:
        """Largest number of ids that can be stored in this many bytes."""
        starts = cls._blocks(num_ids) + 1
        fits = (
            min(max_bytes - starts * dtype.itemsize, torch.iinfo(dtype).max, num_ids)
            for dtype in _TYPES
        )
        return max(0, *fits)

    def rows_of(self, ids: Tensor) -> Tensor:
        before, listed = self._find(ids)
        return torch.where(listed, before, self.num_listed + ids - before)

    def ids_of(self, rows: Tensor) -> Tensor:
        starts, low = self.parts
        blocks = torch.arange(starts.numel() - 1, device=starts.device)
        of_block = torch.repeat_interleave(
            blocks, starts.long().diff(), output_size=self.num_listed
        )
        listed = (of_block << self.BITS) + low
        # Number of other ids below each listed id.
        others = listed - torch.arange(self.num_listed, device=listed.device)
        beyond = rows - self.num_listed
        if not self.num_listed:
            return rows.clone()
        other = beyond + torch.searchsorted(others, beyond, right=True)
        return torch.where(beyond < 0, listed[rows.clamp(max=self.num_listed - 1)], other)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how many listed ids are below each id, and whether the id is listed."""
        starts, low = self.parts
        block, low_bits = ids >> self.BITS, ids % (1 << self.BITS)
        begin, end = starts[block].long(), starts[block + 1].long()
        if not self.num_listed:
            return begin, torch.zeros_like(ids, dtype=torch.bool)
        stop = end
        for _ in range(self.BITS + 1):  # a block lists at most 2^BITS ids
            middle = (begin + end) >> 1
            below = (middle < end) & (low[middle.clamp(max=self.num_listed - 1)] < low_bits)
            begin, end = torch.where(below, middle + 1, begin), torch.where(below, end, middle)
        at = begin.clamp(max=self.num_listed - 1)
        return begin, (begin < stop) & (low[at] == low_bits)


def _smallest_type(maximum: int) -> torch.dtype:
    """The smallest dtype for numbers from 0 to ``maximum``."""
    return next(dtype for dtype in _TYPES if maximum <= torch.iinfo(dtype).max)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, but must be an integer.")
    if value < 0:
        raise ValueError(f"{name} is {value}, but must not be negative.")


def smoothed_means(
    ids: Tensor, labels: Tensor, num_ids: int, prior: float = 5.0
) -> tuple[Tensor, Tensor]:
    """The mean label of each id, shrunk towards the overall mean.

    Args:
        ids: int64 ``[n]``, of the training set only, because test labels would leak.
        labels: ``[n]``.
        num_ids: number of ids. Ids without an occurrence get the overall mean.
        prior: number of occurrences that the overall mean counts for.

    Returns:
        float64 ``[num_ids]`` means, and int64 ``[num_ids]`` numbers of occurrences.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: lengths differ, there are no labels, ``prior`` is negative, or an id is out of
            range.
    """
    for name, tensor in (("ids", ids), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} are {type(tensor).__name__}, but must be a tensor.")
    if not isinstance(num_ids, int) or isinstance(num_ids, bool):
        raise TypeError(f"num_ids is {num_ids!r}, but must be an integer.")
    if isinstance(prior, bool) or not isinstance(prior, numbers.Real):
        raise TypeError(f"prior is {prior!r}, but must be a number.")
    if ids.shape != labels.shape or ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(
            f"ids have shape {tuple(ids.shape)} and labels {tuple(labels.shape)}, but both must "
            "have one dimension of the same length, at least 1."
        )
    if not 0 <= prior < math.inf:
        raise ValueError(f"prior is {prior}, but must be finite and not negative.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_ids:
        raise ValueError(f"ids are from {low} to {high}, but must be from 0 to {num_ids - 1}.")
    counts = torch.bincount(ids, minlength=num_ids)
    sums = torch.zeros(num_ids, dtype=torch.float64, device=ids.device)
    sums.index_add_(0, ids, labels.double())
    mean = labels.double().mean()
    return (sums + prior * mean) / (counts + prior).clamp(min=1e-300), counts
