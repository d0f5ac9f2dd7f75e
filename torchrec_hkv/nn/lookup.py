"""The autograd function of a lookup. Its backward stores the gradient for the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrec_hkv.once_differentiable import once_differentiable

if TYPE_CHECKING:
    from torchrec_hkv.nn.tables import Tables


@dataclasses.dataclass
class PinScope:
    """The lookups between two steps of the optimizer.

    They share the pin of their first lookup: rows touched since then stay in their slots while a
    graph or a stored gradient refers to this object.

    Attributes:
        pin: a :class:`torchrec_hkv.hash_table.groups.table_group.Pin`; None after its release.
    """

    pin: Any


@dataclasses.dataclass(frozen=True)
class SlotLookup:
    """Slots of the ids of a lookup. Each bag holds one id: bag ``b`` of a table holds its ``b``-th
    id, and bags after its last id are empty.

    Attributes:
        ids: int64 ``[n]``, the ids of the first table, then of the second, and so on.
        offsets: int64 ``[tables * batch_size + 1]``.
        weights: float32 ``[n]``, 0 for padding and 1 for other ids; None without padding.
        slots: int64 ``[n]``, -1 for padding and for ids without a slot.
        sizes: number of ids of each table.
        batch_size: the largest of ``sizes``.
        growths: number of growths of the group when the slots were found.
        interval: the interval between two steps that the lookup belongs to; None in evaluation.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    slots: Tensor
    sizes: tuple[int, ...]
    batch_size: int
    growths: int
    interval: PinScope | None

    def without(self, tables: Sequence[int]) -> SlotLookup:
        """The lookup without the slots of some tables, whose rows get no gradient."""
        slots = self.slots.clone()
        parts = slots.split(self.sizes)
        for table in tables:
            parts[table].fill_(-1)
        return dataclasses.replace(self, slots=slots)


class LookupFunction(torch.autograd.Function):
    """Looks up rows. The backward passes the gradients to the tables, which store them until a
    step. A table whose rows are not used gets no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: Tables, found: SlotLookup) -> tuple[Tensor, ...]:
        """Returns rows of each table, ``[batch_size, dim]``."""
        ctx.tables, ctx.handle, ctx.found = tables, tables.group.handle, found
        ctx.set_materialize_grads(False)
        return tables.rows_by_table(found)

    @staticmethod
    @once_differentiable(
        "Gradients of hash tables can't be differentiated again: remove the anchors of these "
        "modules from the tensors to differentiate twice.",
        linear=True,
    )
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the anchor, see :mod:`torchrec_hkv.nn.marker`."""
        tables: Tables = ctx.tables
        if ctx.handle != tables.group.handle:
            raise RuntimeError(
                "The backward of a lookup ran after its table was moved, loaded, or attached to "
                "another optimizer: repeat the lookup."
            )
        found, ctx.found = ctx.found, dataclasses.replace(ctx.found, interval=None)
        used = next((grad for grad in grads if grad is not None), None)
        if used is None:
            return None, None, None
        unused = [table for table, grad in enumerate(grads) if grad is None]
        if unused:
            found = found.without(unused)
            grads = tuple(torch.zeros_like(used) if grad is None else grad for grad in grads)
        # A copy, because autograd may reuse the memory of a gradient.
        if len(grads) == 1:
            grad = used.clone(memory_format=torch.contiguous_format)
        else:
            grad = torch.stack(grads, dim=1).flatten(1)
        tables.hold(grad, found)
        return tables.marker.gradient(grad), None, None
