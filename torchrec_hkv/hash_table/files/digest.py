"""A digest of what tables hold, whichever ranks and columns they are spread over.

Every value of an entry, as a number, is multiplied by an odd number that follows from what it is
and its column, and by one that follows from the id; the digest is the sum of all, modulo 2^64. So
the digests of the shards of a table add up to that of the table, in any order, and one value that
differs makes another digest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.counts import mix64
from torchrec_hkv.hash_table.files.file_tables import SAVED_PARTS, Source
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.files.state_columns import StateColumns
from torchrec_hkv.hash_table.groups.table_group import TableGroup

_MASK = (1 << 64) - 1
# What a hashed value is; numbers of states follow.
_ENTRY, _LAST_STEP, _SCORE, _ROW, _STATE = range(5)
# Bytes that a value of 4 takes while it counts.
_WORK = 24
# Memory it may take of a host and of a GPU, whose work begins anew with each batch.
_HOST_BYTES, _GPU_BYTES = 32 << 20, 256 << 20


def table_digest(group: TableGroup, table: int, batch_bytes: int | None = None) -> tuple[int, int]:
    """The digest of ids, rows, states, scores and last steps; it waits for the device.

    All of one moment: calls of other threads that change the table wait.

    What rows have once, such as the sum of row-wise Adagrad, counts with every column: shards of
    columns each have their own.

    Args:
        group: the table's.
        table: its index there.
        batch_bytes: memory it may take, of the device that the table is on. None: 32 MiB of the
            host's, 256 MiB of a GPU's.

    Returns:
        Entries and digest; both 0 for those that the shard of the first column counts. Sums of
        digests are modulo 2^64.
    """
    if batch_bytes is None:
        batch_bytes = _GPU_BYTES if group.device.type == "cuda" else _HOST_BYTES
    with group.unchanged():
        return _digest(group, table, batch_bytes)


def _digest(group: TableGroup, table: int, batch_bytes: int) -> tuple[int, int]:
    spec = group.tables[table]
    is_first = spec.column_offset == 0
    device = group.device
    columns = torch.arange(spec.column_offset, spec.column_offset + spec.dim, device=device)
    states = StateColumns.of_layout(group.state_layout)
    source = Source(group, table, max(1, batch_bytes * 4 // _WORK * SAVED_PARTS))
    entries = 0
    total = torch.zeros((), dtype=torch.int64, device=device)
    for batch in source.batches(0, OWNERS):
        ids = mix64(batch["ids"] + 1) | 1
        if is_first:
            entries += len(ids)
            total += _sum(ids, _ENTRY, mix64(batch["ids"]))
            total += _sum(ids, _LAST_STEP, batch["last_steps"].long())
            if "scores" in batch:
                total += _sum(ids, _SCORE, batch["scores"])
        total += _sum(ids, _ROW, _bits(batch["rows"]), columns)
        if "states" not in batch:
            continue
        own = _bits(batch["states"])
        if group.optimizer is None:  # no state of an optimizer's, and of no column
            total += _sum(ids, _STATE, own, torch.arange(own.shape[1], device=device))
            continue
        for k in range(states.of_columns):
            part = own[:, k * spec.dim : (k + 1) * spec.dim]
            total += _sum(ids, _STATE + k, part, columns)
        for k in range(states.of_rows):
            at = states.of_columns * spec.dim + k
            part = own[:, at : at + 1].expand(-1, spec.dim)
            total += _sum(ids, _STATE + states.of_columns + k, part, columns)
    return entries, int(total) & _MASK


def _bits(values: Tensor) -> Tensor:
    """Of each value, int64."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16).long()


def _sum(ids: Tensor, what: int, values: Tensor, columns: Tensor | None = None) -> Tensor:
    """Of ``[n]`` values, or of ``[n, columns]``."""
    if columns is not None:
        values = (values * (mix64(columns * 64 + what) | 1)).sum(1)
    else:
        values = values * (mix64(torch.tensor(-1 - what)) | 1)
    return (values * ids).sum()
