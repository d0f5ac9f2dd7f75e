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
    """The output of one forward and backward, on a CPU. The learning rate is 0.1.

    Args:
        ids: [ids] of all features, one after the other.
        offsets: [features x batch_size + 1] where their bags begin.
        grad: [batch_size, columns of all features] the output's, whose dtype that takes.
        weights: [ids] of each.
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
        torch.cuda.synchronize()  # what the batch was like is known when the next begins
    return out.detach().cpu()


def contents(group: TableGroup, tables: int) -> list[Tensor]:
    """Rows and states of the first tables, in the order of ids, on a CPU."""
    parts = []
    for number in range(tables):
        table = group.export_table(number)
        order = table.ids[table.occupied].argsort()
        parts += [part[table.occupied][order].cpu() for part in (table.rows, table.states)]
    return parts
