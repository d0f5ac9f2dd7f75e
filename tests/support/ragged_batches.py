"""Batches whose features differ in their numbers of bags, and a reference by EmbeddingBag in
float64."""

from __future__ import annotations

import torch

from tests.support.batches import rate


class RaggedBatch:
    """Bags of 0 to 4 ids, drawn from a small pool so that ids repeat."""

    def __init__(self, bags, pool, device):
        self.bags = list(bags)
        lengths = torch.randint(0, 5, (sum(bags),))
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
        self.ids = pool[torch.randint(0, len(pool), (int(lengths.sum()),))].to(device)
        self.weights = torch.rand(len(self.ids), device=device)

    def of_feature(self, index):
        """Returns ids, offsets from 0, and weights of a feature."""
        first = sum(self.bags[:index])
        bounds = self.offsets[first : first + self.bags[index] + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        return self.ids[begin:end], bounds - bounds[0], self.weights[begin:end]


def look_up(group, ids, offsets, weights, mean, bags=None, batch_size=0, dtype=None):
    anchor = torch.empty(0, device=ids.device, requires_grad=True)
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, batch_size, pin, bags)
    where = (ids, offsets, weights, slots, batch_size, mean, pin, rate(0.1, group))
    return group.pooled_lookup(anchor, *where, bags, dtype)


def reference_step(rows, batch, features, weights, mean, learn):
    """Computes output, gradient of rows and gradient of weights in float64 by EmbeddingBag.
    ``learn(output)`` returns the output's gradient."""
    tables = [table.clone().requires_grad_() for table in rows]
    weights = weights.double().cpu().requires_grad_()
    parts, position = [], 0
    for index, table in enumerate(features):
        ids, offsets, _ = batch.of_feature(index)
        ids, offsets = ids.cpu(), offsets.cpu()
        scale = weights[position : position + len(ids)]
        position += len(ids)
        if mean:
            lengths = offsets.diff()
            scale = scale / lengths.repeat_interleave(lengths)
        pooled = torch.nn.functional.embedding_bag(
            ids, tables[table], offsets, mode="sum", per_sample_weights=scale,
            include_last_offset=True,
        )  # fmt: skip
        parts.append(pooled.flatten())
    out = torch.cat(parts)
    grads = torch.autograd.grad(out, [*tables, weights], learn(out), allow_unused=True)
    return out.detach(), grads[:-1], grads[-1]
