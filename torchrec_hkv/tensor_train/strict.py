"""Refuses ids outside their tables on GPUs, where kernels only count them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def refuse_ids_outside(
    names: Sequence[str],
    rows: Sequence[int],
    feature_tables: Sequence[int],
    ids: Tensor,
    offsets: Tensor,
    batch_size: int,
) -> None:
    """Raises if a batch has an id outside its table. Synchronizes with the device.

    Args:
        names: names of the tables.
        rows: number of rows of each table.
        feature_tables: index of the table of each feature.
        ids: int64 ``[n]``, feature-major.
        offsets: int64 ``[features * batch_size + 1]``.
        batch_size: number of bags of each feature.

    Raises:
        RuntimeError: a CUDA graph is being captured, which does not allow synchronization.
        ValueError: an id is outside its table.
    """
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "Strict Tensor-Train tables check ids on the host in every step, which is not possible "
            "while a CUDA graph is captured: leave strict off."
        )
    if ids.numel() == 0:
        return
    limits = torch.tensor([rows[table] for table in feature_tables], device=ids.device)
    ends = offsets[::batch_size]
    id_limits = limits.repeat_interleave(ends.diff(), output_size=ids.numel())
    outside = (ids < 0) | (ids >= id_limits)
    if not bool(outside.any()):
        return
    at = int(outside.nonzero()[0])
    table = feature_tables[int(torch.searchsorted(ends, at, right=True)) - 1]
    raise ValueError(
        f"table '{names[table]}' was asked for id {int(ids[at])}, but has the ids 0 to "
        f"{rows[table] - 1}."
    )
