"""Reads and writes rows of hash tables by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.backends.hkv.counts import counts_spec, export_counts
from torchrec_hkv.backends.hkv.dense import DenseRows
from torchrec_hkv.backends.hkv.state import HEAD, head_of, split_rows, split_states
from torchrec_hkv.backends.hkv.table import options_of
from torchrec_hkv.backends.protocol import TableShard
from torchrec_hkv.backends.row_numbers import put_row_numbers
from torchrec_hkv.hash_table import TableGroup, initial_rows
from torchrec_hkv.hash_table.eviction import EPOCH_POLICIES
from torchrec_hkv.hash_table.files.file_target import FileTarget
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.hash_table.stored_rows import numbers_of, stored_as

_ops = torch.ops.torchrec_hkv


def table_ids(group: TableGroup, table: int, batch: int) -> Iterator[Tensor]:
    """The ids in a table at the time of the first batch, in batches of ``batch``."""
    with group.unchanged():
        ids = group.ids_at(group.select([table]))
    yield from ids.split(batch) if ids.numel() else ()


def _find(group: TableGroup, table: int, feature: int, ids: Tensor) -> Tensor:
    """Slots relative to the table's first slot; -1 for ids that are not in the table."""
    offsets = torch.zeros(group.num_features + 1, dtype=torch.int64, device=group.device)
    offsets[feature + 1 :] = ids.numel()
    slots = group.find(ids, offsets, 1)
    first = sum(group.full_slots(t) for t in range(table))
    return torch.where(slots >= 0, slots - first, slots)


def rows_of(group: TableGroup, table: int, feature: int, ids: Tensor) -> Tensor:
    """Rows of ids, float32 ``[n, dim]`` on the CPU; the initial row if an id is not in the
    table."""
    spec, on_device = group.tables[table], ids.to(group.device)
    rows = initial_rows(
        on_device,
        spec.dim,
        table=spec.name,
        seed=spec.seed,
        initializer=spec.initializer,
        column_offset=spec.column_offset,
    )
    with group.unchanged():
        slots = _find(group, table, feature, on_device)
        there = (slots >= 0).nonzero().flatten()
        stored = _ops.read_slots(group.handle, table, slots[there])[1]
        rows[there] = numbers_of(stored, spec.dim).float()
    return rows.cpu()


def entries_of(group: TableGroup, table: int, feature: int, ids: Tensor) -> dict[str, Tensor]:
    """The entries of ids, as tensors by the names of the table's state."""
    spec, on_device = group.tables[table], ids.to(group.device)
    rows = initial_rows(
        on_device,
        spec.dim,
        table=spec.name,
        seed=spec.seed,
        initializer=spec.initializer,
        column_offset=spec.column_offset,
    )
    rows = stored_as(rows, spec.dtype)
    *_, width, scored, _, _ = _C.table_layout(group.handle, table)
    n = len(ids)
    steps = torch.zeros(n, dtype=torch.int32, device=group.device)
    scores = torch.zeros(n if scored else 0, dtype=torch.int64, device=group.device)
    states = torch.zeros(n, width, device=group.device)
    with group.unchanged():
        slots = _find(group, table, feature, on_device)
        there = (slots >= 0).nonzero().flatten()
        read = _ops.read_slots(group.handle, table, slots[there])
    for result, part in zip((rows, steps, scores, states), read[1:], strict=True):
        if len(result):
            result[there] = part
    entries = {**split_rows(rows, spec.dim), "last_steps": steps}
    if scored:
        entries["scores"] = scores
    entries |= split_states(states, group.state_layout, spec.dim)
    return {name: tensor.cpu() for name, tensor in entries.items()}


def put_rows(
    group: TableGroup,
    table: int,
    feature: int,
    batches: Iterable[tuple[Tensor, Tensor]],
    owners: tuple[int, int],
) -> int:
    """Sets rows of ids. A new id counts as looked up once, in the last step; under ``"customized"``
    it gets the score 0.

    Returns:
        Number of ids that found no slot.
    """
    spec = group.tables[table]
    target = FileTarget(group, table, 1 << 20)
    lost = 0
    for batch_ids, rows in batches:
        owner = owner_rank(batch_ids, OWNERS)
        owned = ((owner >= owners[0]) & (owner < owners[1])).nonzero().flatten()
        ids, where = batch_ids[owned].unique(return_inverse=True)
        if ids.numel() == 0:
            continue
        # If an id occurs several times, its last row is used.
        last = torch.zeros_like(ids).scatter_reduce_(
            0, where, torch.arange(len(where)), "amax", include_self=False
        )
        columns = slice(spec.column_offset, spec.column_offset + spec.dim)
        own_rows = stored_as(rows[owned][last][:, columns], spec.dtype).contiguous()
        with group.alone():
            group.note_rewrite()
            lost += _put_batch(group, table, feature, ids, own_rows, target)
    group.fill_frames(table)
    return lost


def _put_batch(
    group: TableGroup, table: int, feature: int, ids: Tensor, own_rows: Tensor, target: FileTarget
) -> int:
    """Sets rows of unique ids. Returns the number of ids that found no slot."""
    *_, width, scored, _, _ = _C.table_layout(group.handle, table)
    slots = _find(group, table, feature, ids.to(group.device)).cpu()
    there, new = (slots >= 0).nonzero().flatten(), (slots < 0).nonzero().flatten()
    current = _ops.read_slots(group.handle, table, slots[there].to(group.device))
    _ops.overwrite_slots(
        group.counter_tensor,
        group.handle,
        table,
        slots[there].to(group.device),
        current[0],
        own_rows[there].to(group.device),
        current[2],
        current[3],
        torch.zeros_like(current[4]),
    )
    batch = {
        "ids": ids[new],
        "rows": own_rows[new],
        "last_steps": torch.full((len(new),), group.clock, dtype=torch.int32),
        "states": torch.zeros(len(new), width),
    }
    if scored:
        batch["scores"] = torch.full((len(new),), _first_score(group, table))
    group.reserve(table, min(group.sizes()[table] + len(new), target.capacity))
    return target.restore(batch, exact=False)


def _first_score(group: TableGroup, table: int) -> int:
    """Score of an id that is inserted without a lookup: the score after one lookup in the last
    step, or 0 under ``"customized"``."""
    eviction = group.tables[table].eviction
    if eviction == "customized":
        return 0
    if eviction not in EPOCH_POLICIES:
        return 1
    bits = group.epoch << 32 | (group.clock if eviction == "epoch_lru" else 1)
    return bits - (1 << 64) if bits >> 63 else bits


class RowsById:
    """Access to the rows of a group of hash tables by id; a mixin of its lookup."""

    _group: TableGroup
    _shards: dict[str, TableShard]
    _index: dict[str, int]
    _dense: dict[str, DenseRows]
    _feature_tables: tuple[int, ...]

    def ids(self, key: str, batch: int) -> Iterator[Tensor]:
        if key in self._dense:
            shard = self._shards[key]
            rows = torch.arange(shard.row_offset, shard.row_offset + shard.capacity)
            return iter(rows.split(batch))
        return table_ids(self._group, self._index[key], batch)

    def rows_of(self, key: str, ids: Tensor) -> Tensor:
        if key in self._dense:
            weight = self._dense[key].read(states=False)["weight"]
            return weight[(ids - self._shards[key].row_offset).to(weight.device)].cpu()
        feature = self._feature_tables.index(self._index[key])
        return rows_of(self._group, self._index[key], feature, ids)

    def entries(self, key: str, batch: int) -> Iterator[dict[str, Tensor]]:
        for ids in table_ids(self._group, self._index[key], batch):
            yield {"ids": ids.cpu(), **self.entries_of(key, ids)}

    def entries_of(self, key: str, ids: Tensor) -> dict[str, Tensor]:
        feature = self._feature_tables.index(self._index[key])
        return entries_of(self._group, self._index[key], feature, ids)

    def without_entries(self, key: str) -> dict[str, Tensor]:
        index, shard = self._index[key], self._shards[key]
        spec = counts_spec(shard, options_of(shard).admission)
        counts = {name: export_counts(self._group, index, spec[name]).cpu() for name in spec}
        return {HEAD: head_of(self._group, index), **counts}

    def put_rows(
        self, key: str, batches: Iterable[tuple[Tensor, Tensor]], owners: tuple[int, int]
    ) -> int:
        shard = self._shards[key]
        if key in self._dense:
            weight = self._dense[key].read(states=False)["weight"]
            put_row_numbers(weight, batches, shard.row_offset, shard.column_offset)
            return 0
        feature = self._feature_tables.index(self._index[key])
        return put_rows(self._group, self._index[key], feature, batches, owners)
