"""Reorders a table's ids so that similar ids share slices of cores.

Row ``((i_1 p_2) + i_2) p_3 + i_3`` is a product of slice ``i_k`` of each core, so neighbouring rows
differ in the last core only. If neighbouring rows are similar, lower ranks suffice.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor


class IdOrder:
    """A permutation that assigns a row of a Tensor-Train table to each id.

    Use it where ids become row numbers: in the vocabulary, which then needs no additional memory.
        If
    ids are row numbers already, it takes 8 bytes for each id.

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
        in_order = torch.arange(rows.numel(), device=rows.device)
        if not torch.equal(rows.sort().values, in_order):
            raise ValueError(
                f"rows must be a permutation of 0 to {rows.numel() - 1}, but some repeat or are "
                "missing."
            )
        self.rows = rows
        self.ids = torch.empty_like(rows)
        self.ids[rows] = in_order

    @classmethod
    def by_value(cls, values: Tensor) -> IdOrder:
        """Sorts ids by descending value; ties by the smaller id.

        Good values are those on which rows depend, such as the mean of a label
        (:func:`smoothed_means`) or the leading component of densely trained rows. With the number
        of
        occurrences as values, frequent ids share slices with each other and not with rare ids,
        which
        would disturb them.

        Args:
            values: ``[num_ids]``, of any dtype that can be compared.

        Raises:
            TypeError: values are not a tensor.
            ValueError: values have another shape, or hold NaN.
        """
        if not isinstance(values, Tensor):
            raise TypeError(f"values are {type(values).__name__}, but must be a tensor.")
        if values.dim() != 1:
            raise ValueError(f"values have shape {tuple(values.shape)}, but must be 1-D.")
        if values.isnan().any():
            raise ValueError("values hold NaN, but must be numbers that can be sorted.")
        ids = torch.argsort(values, descending=True, stable=True)
        rows = torch.empty_like(ids)
        rows[ids] = torch.arange(ids.numel(), device=ids.device)
        return cls(rows)

    def __len__(self) -> int:
        return self.rows.numel()

    def rows_of(self, ids: Tensor) -> Tensor:
        """The rows of ids, int64 with the ids' shape.

        Raises:
            ValueError: an id is out of range (on a CPU).
        """
        return _picked(self.rows, ids, "id")

    def ids_of(self, rows: Tensor) -> Tensor:
        """The ids of rows, the inverse of :meth:`rows_of`."""
        return _picked(self.ids, rows, "row")

    def reordered(self, table: Tensor) -> Tensor:
        """The rows of a dense table ``[num_ids, ...]`` in this order, for
        :func:`torchrec_hkv.tensor_train.tt_svd`."""
        return table[self.ids]


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
        TypeError: an argument has another type.
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


def _picked(of: Tensor, indices: Tensor, what: str) -> Tensor:
    if indices.device.type == "cpu" and indices.numel():
        outside = (indices < 0) | (indices >= of.numel())
        if outside.any():
            raise ValueError(
                f"the order has no {what} {int(indices[outside].flatten()[0])}: it has 0 to "
                f"{of.numel() - 1}."
            )
    return of[indices]
