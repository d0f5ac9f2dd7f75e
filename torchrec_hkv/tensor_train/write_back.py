"""Writes rows that were trained outside the cores back to the cores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.tensor_train.dense import rows_of
from torchrec_hkv.tensor_train.group import TTGroup
from torchrec_hkv.tensor_train.shapes import TTShape


def write_back(
    shape: TTShape,
    cores: Sequence[Tensor],
    ids: Tensor,
    rows: Tensor,
    counts: Tensor,
    other_ids: Tensor,
    other_counts: Tensor,
    iterations: int = 30,
) -> None:
    """Changes the cores so that some ids get the given rows and others keep theirs.

    Minimizes the sum over all these ids of count * |row - wanted row|^2 by L-BFGS, starting from
    the current cores. If counts are numbers of lookups, this is the expected squared error of a
    lookup. The cores are not changed if the error does not decrease.

    Args:
        shape: shape of the table.
        cores: cores of the table; all are updated.
        ids: int64 ``[n]``, unique.
        rows: float32 ``[n, embedding_dim]``, the wanted rows.
        counts: ``[n]``, weight of each id.
        other_ids: int64 ``[m]``, unique and not in ``ids``: ids whose rows should not change.
        other_counts: ``[m]``, weight of each of these ids.
        iterations: maximal number of iterations; each takes a few lookups and backwards of all
            these ids.
    """
    if ids.numel() == 0:
        return
    with torch.no_grad():
        everything = torch.cat([ids, other_ids])
        target_rows = torch.cat([rows, rows_of(shape, cores, other_ids)])
        weights = torch.cat([counts.float(), other_counts.float()]).to(target_rows.device)[:, None]
        weights = weights / weights.mean().clamp(min=1e-30)
    group = TTGroup([shape])
    offsets = torch.tensor([0, everything.numel()], device=everything.device)
    index = group.sort(everything, offsets, 1, pooled=False)
    # Float32 even for 16-bit cores, which would round small steps away.
    leaves = [core.detach().float().clone().requires_grad_() for core in cores]

    def error(of: Sequence[Tensor]) -> Tensor:
        now = group.lookup(of, everything, offsets, 1, pooled=False, index=index)
        return (weights * (now - target_rows).square()).sum()

    solver = torch.optim.LBFGS(leaves, max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = error(leaves)
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
    with torch.no_grad():
        found = [leaf.to(core.dtype) for leaf, core in zip(leaves, cores, strict=True)]
        if error(found) < error([core.detach() for core in cores]):  # False for NaN
            for core, new in zip(cores, found, strict=True):
                core.data.copy_(new)
