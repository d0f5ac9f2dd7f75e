"""Builds the next version of a served model from a checkpoint of a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.checkpoint.record import LINK
from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.checkpoints import Checkpoint
from torchrec_hkv.serving.model import ModelVersion
from torchrec_hkv.serving.page_cache import warm
from torchrec_hkv.serving.placement import Placement
from torchrec_hkv.serving.served_program import ServedProgram
from torchrec_hkv.serving.table_builder import build_table
from torchrec_hkv.serving.table_file import CHANGES_LOAD, TableFile, place_layer
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables, RowChanges, ServingHotRows
from torchrec_hkv.tensor_train import TTGroup

_PIECE = 1 << 16


class NextVersion:
    """Builds the next version of a model from a checkpoint."""

    def __init__(
        self, before: ModelVersion, folder: Path, digest: str, placement: Placement
    ) -> None:
        self._before, self._folder, self._digest = before, folder, digest
        self._placement, self._device = placement, placement.device
        self._checkpoint = Checkpoint(folder)
        self._is_delta = folder.name.startswith("delta")
        #: Files of the tables, if the checkpoint is a base.
        self.files: list[TableFile] = []

    def version(self, folder: Path) -> ModelVersion:
        """Builds the version.

        Args:
            folder: folder for the files of the tables of a base.

        Raises:
            ValueError: the checkpoint is damaged, or of another model.
            OSError: the disk has no room for the tables.
        """
        before, number = self._before, int(self._folder.name.rpartition("-")[2])
        if self._is_delta:
            tables = [self._changed(n, table) for n, table in enumerate(before.tables.tables)]
        else:
            tables = [
                self._build_table(table, folder, f"{n}.table")
                for n, table in enumerate(before.tables.tables)
            ]
            tables = self._placement.place(tables, before.tables.tables)
        cores = [(group, self._cores(group, group_cores)) for group, group_cores in before.cores]
        opened = ReadOnlyTables(tables, before.tables.counters, cores)
        return ModelVersion(
            opened,
            cores,
            self._program(before.program),
            self._digest,
            number,
            (self._folder / LINK).stat().st_mtime,
            before.base if self._is_delta else self._digest,
        )

    def _build_table(self, table: ReadOnlyTable, folder: Path, name: str) -> ReadOnlyTable:
        """Builds a table from a base, in host memory."""
        has_files = self._checkpoint.has_files(table.name)
        written = build_table(
            lambda: self._entries(table),
            table.dim,
            table.row_format,
            folder / name,
            order=self._checkpoint.order(table.name) if has_files else (),
        )
        self.files.append(written)
        index, rows = written.map(folder, self._placement.resident)
        if self._device.type == "cpu" and not self._placement.resident:
            warm(folder, [(written, index)])
        return dataclasses.replace(
            table,
            index=index,
            rows=rows,
            unit=written.unit,
            changed_index=None,
            changed_rows=None,
            changes=None,
        )

    def _entries(self, table: ReadOnlyTable) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and rows of a table in a base."""
        if self._checkpoint.has_files(table.name):
            for ids, rows in self._checkpoint.entries(table.name):
                self._check_dim(table, rows)
                yield ids, rows
            return
        weight = self._weight(table)
        for ids in torch.arange(weight.shape[0]).split(_PIECE):
            yield ids, weight[ids].float()

    def _changed(self, number: int, table: ReadOnlyTable) -> ReadOnlyTable:
        """Adds the changes of a delta to a table."""
        erased = torch.empty(0, dtype=torch.int64)
        if self._checkpoint.has_files(table.name):
            parts, erased = self._checkpoint.changes(table.name)
            ids, rows = parts[0].ids, parts[0].rows
            if len(parts) > 1:
                rows = self._stored_rows(number, ids)
                ascending, order = ids.sort()
                for part in parts:  # skips ids that the shard of the first columns lacks
                    is_changed = torch.isin(part.ids, ids)
                    places = order[torch.searchsorted(ascending, part.ids[is_changed])]
                    columns = slice(part.begin, part.begin + part.rows.shape[1])
                    rows[places, columns] = part.rows[is_changed]
            self._check_dim(table, rows)
        else:
            ids, rows = self._changed_rows(number, table)
        if ids.numel() == 0 and erased.numel() == 0:
            return table
        self._check_range(table, rows)
        data = row_formats.to_bytes(rows, table.row_format, table.unit)
        merged = _merged(table.changes, ids, data, erased)
        index, order = place_layer(merged.ids, merged.is_erased, CHANGES_LOAD)
        changes = RowChanges(
            merged.ids[order], merged.data.index_select(0, order), merged.is_erased[order]
        )
        return dataclasses.replace(
            table,
            changed_index=index.to(self._device),
            changed_rows=changes.data.to(self._device),
            changes=changes,
        )

    def _stored_rows(self, number: int, ids: Tensor) -> Tensor:
        """Rows of ids in the previous version, in host memory."""
        table = self._before.tables.tables[number]
        if table.hot is not None:
            table = dataclasses.replace(table, hot=ServingHotRows(table.hot.words, table.hot.rows))
        uncounted = ReadOnlyTables([table], _uncounted(self._device))
        return uncounted.rows(0, ids.to(self._device)).cpu()

    def _changed_rows(self, number: int, table: ReadOnlyTable) -> tuple[Tensor, Tensor]:
        """The changed rows of a table that deltas store completely."""
        weight = self._weight(table)
        changed_ids, changed_rows = [], []
        for ids in torch.arange(weight.shape[0]).split(_PIECE):
            rows = weight[ids].float()
            self._check_range(table, rows)
            data = row_formats.to_bytes(rows, table.row_format, table.unit)
            now = row_formats.from_bytes(data, table.row_format, table.dim, table.unit)
            differs = (
                now.view(torch.int32) != self._stored_rows(number, ids).view(torch.int32)
            ).any(1)
            changed_ids.append(ids[differs])
            changed_rows.append(rows[differs])
        return torch.cat(changed_ids), torch.cat(changed_rows)

    def _weight(self, table: ReadOnlyTable) -> Tensor:
        name = f"{table.name}.weight"
        weight = self._checkpoint.tensors([name])[name]
        self._check_dim(table, weight)
        return weight

    def _check_dim(self, table: ReadOnlyTable, rows: Tensor) -> None:
        if rows.dim() != 2 or rows.shape[1] != table.dim:
            raise ValueError(
                f"{self._folder} has rows of shape {tuple(rows.shape[1:])} for table "
                f"{table.name!r}, but the model has {table.dim} columns: it is of another model."
            )

    def _check_range(self, table: ReadOnlyTable, rows: Tensor) -> None:
        if table.row_format not in ("int8", "int4") or rows.numel() == 0:
            return
        largest, maximum = float(rows.abs().max()), row_formats.max_for(table.unit)
        if not largest <= maximum:
            raise ValueError(
                f"{self._folder} has a value of {largest} for table {table.name!r}, whose "
                f"{table.row_format} rows take at most {maximum}: export the model again."
            )

    def _cores(self, group: TTGroup, before: Sequence[Tensor]) -> list[Tensor]:
        names = [
            f"{name}.tt_core_{k}"
            for name, shape in zip(group.names, group.shapes, strict=True)
            for k in range(shape.num_cores)
        ]
        tensors = self._checkpoint.tensors(names)
        cores = []
        for name, old_core in zip(names, before, strict=True):
            core = tensors[name]
            if core.dtype != old_core.dtype or core.numel() != old_core.numel():
                raise ValueError(
                    f"{self._folder} has {name!r} of dtype {core.dtype} and {core.numel()} "
                    f"elements, but the model has {old_core.dtype} and {old_core.numel()}: it is "
                    "of another model."
                )
            cores.append(core.view(old_core.shape).to(self._device))
        return cores

    def _program(self, before: ServedProgram) -> ServedProgram:
        """The program with the checkpoint's dense tensors."""
        old_state = before.state
        names = {key: key.removeprefix("model.") for key in old_state}
        tensors = self._checkpoint.tensors(list(names.values()))
        state = {key: tensors[name] for key, name in names.items()}
        for key, value in state.items():
            if value.shape != old_state[key].shape:
                raise ValueError(
                    f"{self._folder} has {names[key]!r} of shape {tuple(value.shape)}, but the "
                    f"model has {tuple(old_state[key].shape)}: it is of another model."
                )
        if all(torch.equal(value, old_state[key].cpu()) for key, value in state.items()):
            return before
        return before.with_state(state)


def _merged(before: RowChanges | None, ids: Tensor, data: Tensor, erased: Tensor) -> RowChanges:
    """Merges changes; later ones take precedence."""
    if before is None:
        before = RowChanges(ids[:0], data[:0], torch.empty(0, dtype=torch.bool))
    changed_ids = torch.cat([ids, erased])
    unchanged = (~torch.isin(before.ids, changed_ids)).nonzero().flatten()
    no_rows = data.new_zeros(erased.numel(), data.shape[1])
    is_erased = torch.zeros(changed_ids.numel(), dtype=torch.bool)
    is_erased[ids.numel() :] = True
    return RowChanges(
        torch.cat([before.ids[unchanged], changed_ids]),
        torch.cat([before.data.index_select(0, unchanged), data, no_rows]),
        torch.cat([before.is_erased[unchanged], is_erased]),
    )


def _uncounted(device: torch.device) -> Tensor:
    return torch.zeros(1, 2, dtype=torch.int64, device=device)
