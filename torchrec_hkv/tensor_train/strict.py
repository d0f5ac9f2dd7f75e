"""Ids outside of their tables, refused where a device's kernels count them instead."""

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
    """Refuses a batch with an id that its table has not (waits for the device).

    Args:
        names: of the tables.
        rows: of the tables.
        feature_tables: of each feature, its table.
        ids: int64 ``[n]``, feature-major.
        offsets: int64 ``[features * batch_size + 1]``.
        batch_size: bags a feature.

    Raises:
        RuntimeError: a CUDA graph is captured, in which nothing can be waited for.
        ValueError: an id is outside of its table.
    """
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is captured, but strict Tensor-Train tables look at ids on the host in "
            "every step: leave strict off."
        )
    if ids.numel() == 0:
        return
    limits = torch.tensor([rows[table] for table in feature_tables], device=ids.device)
    ends = offsets[::batch_size]
    own = limits.repeat_interleave(ends.diff(), output_size=ids.numel())
    outside = (ids < 0) | (ids >= own)
    if not bool(outside.any()):
        return
    at = int(outside.nonzero()[0])
    table = feature_tables[int(torch.searchsorted(ends, at, right=True)) - 1]
    raise ValueError(
        f"table '{names[table]}' was asked for id {int(ids[at])}, but has the ids 0 to "
        f"{rows[table] - 1}."
    )
