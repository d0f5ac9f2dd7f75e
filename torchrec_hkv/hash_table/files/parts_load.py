"""Loads a table from saved shards with other rows or columns.

Each saved shard is a folder written by :mod:`torchrec_hkv.hash_table.files`. A table takes the ids
of its owner buckets, and its columns. Entries are inserted from the shards that hold the table's
first column; shards of other columns are then written into the same entries, id by id.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.files.counts_files import SavedCounts, load_counts
from torchrec_hkv.hash_table.files.file_table import FileTable
from torchrec_hkv.hash_table.files.file_target import FileTarget
from torchrec_hkv.hash_table.files.limits import BATCH_BYTES
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.parallel_files import can_read_in_parallel, rounds
from torchrec_hkv.hash_table.files.part_checks import check_covered, check_same_table
from torchrec_hkv.hash_table.files.part_reader import PartReader
from torchrec_hkv.hash_table.files.prefault import prefault_pages
from torchrec_hkv.hash_table.files.saved_part import SavedPart, saved_rows
from torchrec_hkv.hash_table.files.shard_checks import check_unique
from torchrec_hkv.hash_table.files.shard_files import dequantised, entry_bytes
from torchrec_hkv.hash_table.files.state_columns import ColumnRange, StateColumns, copy_columns
from torchrec_hkv.hash_table.files.table_load import SAFE_LOAD
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.initial_rows import initial_rows

_ops = torch.ops.torchrec_hkv

# Bytes per slot that the search for repeated ids takes.
_LOOKUP_BYTES = 64


class PartsLoad:
    """Replaces the contents of a table by entries from saved shards.

    Args:
        group: the group of the table.
        table: index of the table in the group.
        feature: index of a feature of the table.
        parts: shards of one saved table; not verified here
            (:func:`torchrec_hkv.hash_table.files.verify`).
        owners: range ``[first, end)`` of owner buckets whose ids the table holds.
        rows: number of rows of the table over all ranks; None if unknown.
        allow_loss: True: load even if there is too little room; the entries that rank lowest are
            left out. None: allow it only if ``rows`` is at least the saved table's number. A full
            table may not fit exactly, because another number of shards assigns ids to other
            buckets.
        batch_bytes: memory limit in bytes, on the host and on the device each.
        threads: number of threads that read files.
        verify: whether files of entries are verified while they are loaded, because they were not
            verified before.
    """

    def __init__(
        self,
        group: TableGroup,
        table: int,
        feature: int,
        parts: Sequence[SavedPart],
        owners: tuple[int, int],
        *,
        rows: int | None = None,
        allow_loss: bool | None = False,
        batch_bytes: int = BATCH_BYTES,
        threads: int = 1,
        verify: bool = False,
    ) -> None:
        if allow_loss is None:
            allow_loss = rows is not None and rows >= saved_rows(parts)
        self._group, self._table, self._feature = group, table, feature
        self._owners, self._allow_loss = owners, allow_loss
        self._batch_bytes, self._verify = batch_bytes, verify
        pin = group.device.type == "cuda"
        self._reader = PartReader(owners, batch_bytes, threads, verify, pin)
        self._spec = group.tables[table]
        self.name = group.labels[table]
        self._target = FileTarget(group, table, batch_bytes)
        self.columns = ColumnRange(
            self._spec.column_offset, self._spec.column_offset + self._spec.dim
        )
        self._parts = [
            part
            for part in parts
            if part.columns.intersection(self.columns).width > 0
            and max(part.owners[0], owners[0]) < min(part.owners[1], owners[1])
        ]
        # Sorted by first column.
        self._by_columns = [
            (columns, list(group))
            for columns, group in itertools.groupby(
                sorted(self._parts, key=lambda p: (p.columns.begin, p.columns.end, p.owners)),
                key=lambda p: p.columns,
            )
        ]
        self._states = StateColumns.of_layout(group.state_layout)

    # -- before anything changes ------------------------------------------------------------------

    def check(self) -> None:
        """Checks the shards before anything changes. Reads at most their ids.

        Raises:
            ValueError: the shards are of another table, do not make up this one, or hold more
                entries than certainly fit.
        """
        check_same_table(self._group, self._table, self._parts)
        check_covered(self.name, self.columns, self._owners, self._by_columns)
        entries = self.entries
        slots = self._target.capacity
        safe = slots if slots <= 2 * self._target.bucket_slots else int(SAFE_LOAD * slots)
        if entries > safe and not self._allow_loss and self._exact() is None:
            raise ValueError(
                f"table {self.name!r}: the checkpoint holds {entries} entries for a shard of "
                f"{slots} slots, which is sure to fit only {safe}: give the table a larger "
                "num_embeddings, or pass allow_loss=True to leave out those of the lowest scores."
            )

    @functools.cached_property
    def entries(self) -> int:
        """Number of entries in the saved shards that belong to the table."""
        return sum(self._reader.count(part) for part in self._by_columns[0][1])

    @property
    def bytes(self) -> int:
        """Bytes to load, assuming that shards of other columns hold as many entries."""
        widths = [entry_bytes(parts[0].fields) for _, parts in self._by_columns]
        return self.entries * sum(widths)

    def _exact(self) -> Manifest | None:
        """The manifest if every entry can be restored to its own slot, otherwise None."""
        parts = self._by_columns[0][1]
        if len(parts) != 1 or parts[0].owners != self._owners:
            return None
        manifest = parts[0].manifest
        fits = self._target.can_have(manifest.buckets, manifest.bucket_slots)
        return manifest if fits else None

    # -- the load ---------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """The last step of any saved shard. The group's clock must be set to it."""
        return max(part.manifest.clock for part in self._parts)

    @property
    def epoch(self) -> int:
        """The last epoch of any saved shard, for the epoch policies."""
        return max(part.manifest.epoch for part in self._parts)

    def run(self) -> int:
        """Loads the entries. Set the group's clock before.

        Returns:
            Number of entries that found no slot.

        Raises:
            ValueError: files are inconsistent although their checksums are right, or entries found
                no slot although the table is less than 95 % full. The table is empty afterwards.
        """
        group, table = self._group, self._table
        manifest = self._exact()
        if manifest is not None:
            group.reserve_buckets(table, manifest.buckets, manifest.bucket_slots)
        else:
            group.reserve(table, min(self.entries, self._target.capacity))
        group.clear_table(table)
        group.restart_aging(table, self._measured_aging())
        try:
            lost = self._fill(manifest is not None)
        except BaseException:
            group.clear_table(table)
            raise
        first = self._by_columns[0][1]
        counts = [
            SavedCounts(part.folder, part.manifest.counts, part.owners)
            for part in first
            if part.manifest.counts is not None
        ]
        load_counts(group, table, counts, self._owners, self._batch_bytes)
        group.fill_frames(table)
        group.optimizer_steps[table] = max(part.manifest.optimizer_step for part in self._parts)
        return lost

    def _measured_aging(self) -> tuple[float, float, float] | None:
        """Aging measurements from the saved shards, assuming an equal number of lookups in each
        owner bucket."""
        measured = [(part, part.manifest.aging) for part in self._by_columns[0][1]]
        if len(measured) == 1 and measured[0][0].owners == self._owners:
            return measured[0][1]
        lookups, owners, calls, c = 0.0, 0, 0.0, 0.0
        for part, aging in measured:
            if aging is not None and aging[1] > 0:
                lookups += aging[0] / aging[1]
                owners += part.owners[1] - part.owners[0]
                calls, c = max(calls, aging[1]), max(c, aging[2])
        if owners == 0:
            return None
        return lookups / owners * (self._owners[1] - self._owners[0]) * calls, calls, c

    def _fill(self, exact: bool) -> int:
        lost = filled = 0
        minimum = entry_bytes(self._target.fields)
        for columns, parts in self._by_columns:
            for part in parts:
                if exact and not filled and self._can_fill_in_parallel(part, columns):
                    lost += self._fill_in_parallel(part, minimum)
                    continue
                with contextlib.closing(self._reader.batches(part, minimum)) as batches:
                    for batch in batches:
                        if not self._target.is_int8:
                            batch = dequantised(batch)
                        if filled:
                            self._write_other_columns(batch, columns, filled)
                        else:
                            lost += self._target.restore(self._as_target(batch, columns), exact)
            filled += columns.intersection(self.columns).width
        if lost and exact:
            raise ValueError(
                f"{self._parts[0].folder} is inconsistent: {lost} of its slots occur twice."
            )
        if lost and not self._allow_loss:
            raise ValueError(
                f"table {self.name!r}: {lost} entries of the checkpoint found no slot: give "
                "it a larger num_embeddings, or pass allow_loss=True."
            )
        if self._verify:
            self._check_unique()
        return lost

    def _can_fill_in_parallel(self, part: SavedPart, columns: ColumnRange) -> bool:
        on_cpu = self._group.device.type == "cpu"
        return on_cpu and columns == self.columns and can_read_in_parallel(self._reader, part)

    def _fill_in_parallel(self, part: SavedPart, minimum: int) -> int:
        """Restores the entries of a shard's files to their own slots; returns the number of
        entries that found none."""
        lost = 0
        table = FileTable(self._group, self._table, self._batch_bytes)
        with (
            prefault_pages(table, self.entries),
            contextlib.closing(rounds(self._reader, part, minimum)) as found,
        ):
            for batches in found:
                if not self._target.is_int8:
                    batches = [dequantised(batch) for batch in batches]
                lost += self._target.restore_batches(batches)
        return lost

    def _check_unique(self) -> None:
        """Raises if an id occurs twice. In the table, looking up one of two equal ids finds the
        other. The ids of files of further columns are read again."""
        if self._has_repeated():
            raise ValueError(f"table {self.name!r}: the checkpoint holds an id more than once.")
        for _, parts in self._by_columns[1:]:
            for part in parts:
                for folder, manifest in part.layers:
                    for shard in manifest.shards:
                        check_unique(folder, manifest, shard, part.fields, self._batch_bytes)

    def _has_repeated(self) -> bool:
        group, table = self._group, self._table
        if group.device.type == "cpu":
            return _ops.find_repeated(group.counter_tensor, group.handle, table) >= 0
        at_a_time = max(1, self._batch_bytes // _LOOKUP_BYTES)
        for first in range(0, group.present_slots(table), at_a_time):
            n = min(at_a_time, group.present_slots(table) - first)
            place = (group.counter_tensor, group.handle, table)
            owners = _ops.slot_owners(*place, first, n)
            slots = (owners >= 0).nonzero().flatten() + first
            ids, _ = group.ids_and_steps(table, slots)
            if not torch.equal(self._find(ids), slots):
                return True
        return False

    def _find(self, ids: Tensor) -> Tensor:
        """Slots of ids, counted from the table's first; negative where an id is not there."""
        group = self._group
        offsets = torch.zeros(group.num_features + 1, dtype=torch.int64, device=ids.device)
        offsets[self._feature + 1 :] = ids.numel()
        first = sum(group.full_slots(t) for t in range(self._table))
        slots = group.find(ids, offsets, 1)
        return torch.where(slots >= 0, slots - first, slots)

    def _as_target(self, batch: dict[str, Tensor], columns: ColumnRange) -> dict[str, Tensor]:
        """Entries with the table's columns. Columns to be read later get initial values."""
        if columns == self.columns:
            return batch
        n, spec = batch["ids"].numel(), self._spec
        if columns.begin <= self.columns.begin and columns.end >= self.columns.end:
            rows = torch.empty(n, spec.dim, dtype=spec.dtype)
        else:
            rows = initial_rows(
                batch["ids"],
                spec.dim,
                table=spec.name,
                seed=spec.seed,
                initializer=spec.initializer,
                column_offset=spec.column_offset,
            ).to(spec.dtype)
        states = torch.zeros(n, self._state_dim)
        saved_states = self._states_of(batch, columns)
        copy_columns(
            batch["rows"], saved_states, columns, rows, states, self.columns, self._states, filled=0
        )
        names = {field.name for field in self._target.fields}
        converted = {**batch, "rows": rows, "states": states}
        return {name: tensor for name, tensor in converted.items() if name in names}

    def _states_of(self, batch: dict[str, Tensor], columns: ColumnRange) -> Tensor:
        """States of entries; zeros if the files have none."""
        width = self._states.of_columns * columns.width + self._states.of_rows
        return batch["states"] if "states" in batch else torch.zeros(len(batch["ids"]), width)

    @property
    def lacks_states(self) -> bool:
        """Whether the table has optimizer states but the shards were saved without them."""
        return self._state_dim > 0 and any(
            part.has_no_optimizer
            or (part.manifest.reduced is not None and not part.manifest.reduced.states)
            for part in self._parts
        )

    @property
    def _state_dim(self) -> int:
        return _C.table_layout(self._group.handle, self._table)[2]

    def _write_other_columns(
        self, batch: dict[str, Tensor], columns: ColumnRange, filled: int
    ) -> None:
        """Writes further columns into the entries of the same ids. Skips ids that are not in the
        table: they were left out, or the shard of the first column lacked them."""
        group, table, device = self._group, self._table, self._group.device
        ids = batch["ids"].to(device)
        slots = self._find(ids)
        there = (slots >= 0).nonzero().flatten()
        slots = slots[there]
        current = _ops.read_slots(group.handle, table, slots)
        own_ids, rows, last_steps, scores, states = current
        saved_states = self._states_of(batch, columns).to(device)
        copy_columns(
            batch["rows"].to(device)[there],
            saved_states[there],
            columns,
            rows,
            states,
            self.columns,
            self._states,
            filled=filled,
        )
        _ops.overwrite_slots(
            group.counter_tensor,
            group.handle,
            table,
            slots,
            own_ids,
            rows,
            last_steps,
            scores,
            states,
        )
