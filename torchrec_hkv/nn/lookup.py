"""Rows of ids as a tensor of autograd's, whose backward holds the gradient."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrec_hkv.once_differentiable import once_differentiable

if TYPE_CHECKING:
    from torchrec_hkv.nn.tables import Tables


@dataclasses.dataclass
class Interval:
    """The lookups from one step of the optimizer to the next.

    They share one pin, that of their first lookup: rows that were touched since stay where they
    are, as long as a graph or a held gradient refers to this.

    Attributes:
        pin: a :class:`torchrec_hkv.hash_table.groups.table_group.Pin`; None once its rows may go.
    """

    pin: Any


@dataclasses.dataclass(frozen=True)
class Found:
    """Where the rows of a lookup are. One id a bag: bag ``b`` of a table is its ``b``-th id, and
    the bags past its last id are empty.

    Attributes:
        ids: int64 ``[n]``, those of the first table, then of the second, ...
        offsets: int64 ``[tables * batch_size + 1]``.
        weights: float32 ``[n]``, 0 for padding; None where no id is.
        slots: int64 ``[n]``, -1 where an id has none or is padding.
        sizes: ids of each table.
        batch_size: the largest of them.
        growths: of the group, when the slots were found.
        interval: None in evaluation.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    slots: Tensor
    sizes: tuple[int, ...]
    batch_size: int
    growths: int
    interval: Interval | None


class Lookup(torch.autograd.Function):
    """Rows of ids; its backward gives them to the tables, which hold them until a step."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: Tables, found: Found) -> Tensor:
        """Rows, ``[batch_size, tables * dim]``."""
        ctx.tables, ctx.handle, ctx.found = tables, tables.group.handle, found
        return tables.rows(found)

    @staticmethod
    @once_differentiable(
        "The gradients of hash tables can't be differentiated: leave the anchors of these modules "
        "out of what is derived twice.",
        linear=True,
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the anchor, see :mod:`torchrec_hkv.nn.marker`."""
        tables: Tables = ctx.tables
        if ctx.handle != tables.group.handle:
            raise RuntimeError(
                "The backward of a lookup came after its table was moved, loaded, or given to "
                "another optimizer: look up again."
            )
        found, ctx.found = ctx.found, dataclasses.replace(ctx.found, interval=None)
        tables.hold(grad, found)
        return tables.marker.gradient(grad), None, None
