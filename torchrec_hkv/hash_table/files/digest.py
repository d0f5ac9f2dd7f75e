"""A digest of the contents of tables that does not depend on their sharding.

Every value of an entry, as an integer, is multiplied by an odd number derived from its kind and
column, and by one derived from the id. The digest is the sum of these products modulo 2^64. The
digests of the shards of a table therefore add up to that of the table, and a change of a single
value changes the digest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.counts import mix64
from torchrec_hkv.hash_table.files.file_source import SAVED_PARTS, FileSource
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.files.state_columns import StateColumns
from torchrec_hkv.hash_table.groups.table_group import TableGroup

_MASK = (1 << 64) - 1
# Kinds of hashed values; further states follow.
_ENTRY, _LAST_STEP, _SCORE, _ROW, _STATE = range(5)
_SCALE = 63  # the last one
# Temporary bytes for each value of 4 bytes.
_WORK = 24
# Default memory limits on a CPU and on a GPU. A GPU needs large batches to be efficient.
_HOST_BYTES, _GPU_BYTES = 32 << 20, 256 << 20


def table_digest(group: TableGroup, table: int, batch_bytes: int | None = None) -> tuple[int, int]:
    """Digest of ids, rows, states, scores and last steps. Synchronizes with the device.

    The digest is consistent: calls of other threads that change the table wait. State values that
    exist once for each row, such as the sum of row-wise Adagrad, are hashed once for each column,
    because each column shard has its own.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        batch_bytes: memory limit in bytes on the table's device. None: 32 MiB on a CPU, 256 MiB on
            a GPU.

    Returns:
        Number of entries (0 for column shards without the first column), and the digest. Digests
        add up modulo 2^64.
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
    source = FileSource(group, table, max(1, batch_bytes * 4 // _WORK * SAVED_PARTS))
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
        if "scales" in batch:
            total += _sum(ids, _SCALE, _bits(batch["scales"]))
        if "states" not in batch:
            continue
        state_bits = _bits(batch["states"])
        if group.optimizer is None:  # states that belong to no optimizer and no column
            total += _sum(ids, _STATE, state_bits, torch.arange(state_bits.shape[1], device=device))
            continue
        for k in range(states.of_columns):
            part = state_bits[:, k * spec.dim : (k + 1) * spec.dim]
            total += _sum(ids, _STATE + k, part, columns)
        for k in range(states.of_rows):
            at = states.of_columns * spec.dim + k
            part = state_bits[:, at : at + 1].expand(-1, spec.dim)
            total += _sum(ids, _STATE + states.of_columns + k, part, columns)
    return entries, int(total) & _MASK


def _bits(values: Tensor) -> Tensor:
    """The bits of each value as int64."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return values.view(integers[values.dtype.itemsize]).long()


def _sum(ids: Tensor, what: int, values: Tensor, columns: Tensor | None = None) -> Tensor:
    """Hash of ``[n]`` values, or of ``[n, columns]``."""
    if columns is not None:
        values = (values * (mix64(columns * 64 + what) | 1)).sum(1)
    else:
        values = values * (mix64(torch.tensor(-1 - what)) | 1)
    return (values * ids).sum()
