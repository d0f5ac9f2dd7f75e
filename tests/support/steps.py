"""One step of a table group: rows found or inserted, pooled, and updated."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv.hash_table import TableGroup


def pooled_step(
    group: TableGroup,
    ids: Tensor,
    offsets: Tensor,
    batch_size: int,
    grad: Tensor,
    weights: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Runs a forward and backward with a learning rate of 0.1; returns the output on a CPU.

    Args:
        ids: [ids] of all features, one after the other.
        offsets: [features x batch_size + 1] offsets of the bags.
        grad: [batch_size, columns of all features] gradient of the output, which gets its dtype.
        weights: [ids] weights of the ids.
    """
    device = group.device
    ids, offsets, grad = ids.to(device), offsets.to(device), grad.to(device)
    weights = None if weights is None else weights.to(device)
    anchor = torch.empty(0, device=device, requires_grad=True)
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, batch_size, pin)
    rate = torch.full((), 0.1, device=device)
    out = group.pooled_lookup(
        anchor, ids, offsets, weights, slots, batch_size, mean, pin, rate, dtype=grad.dtype
    )
    out.backward(grad)
    if device.type == "cuda":
        torch.cuda.synchronize()  # hints from the batch must arrive before the next begins
    return out.detach().cpu()


def contents(group: TableGroup, tables: int) -> list[Tensor]:
    """Returns rows and states of the first tables, in the order of ids, on a CPU."""
    parts = []
    for number in range(tables):
        table = group.export_table(number)
        order = table.ids[table.occupied].argsort()
        parts += [part[table.occupied][order].cpu() for part in (table.rows, table.states)]
    return parts
