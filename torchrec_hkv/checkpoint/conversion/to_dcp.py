"""Writes a checkpoint's tables as a folder of :mod:`torch.distributed.checkpoint` for a model with
stock tables."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.checkpoint.conversion.dcp_tensors import DcpFolder, DcpWriter
from torchrec_hkv.checkpoint.conversion.spill import MAX_PARTS, Spill
from torchrec_hkv.checkpoint.saved_checkpoint import OpenedTable, initial_rows_of
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.files.state_columns import StateColumns
from torchrec_hkv.hash_table.stored_rows import number_dtype
from torchrec_hkv.progress import advance

_COPIES = 5
_SPILL = ".parts"
#: TorchRec's names of the states of stock tables, in their order.
_STATES = ("momentum1", "exp_avg_sq")


def write_dcp(
    path: Path,
    tables: Sequence[OpenedTable],
    rows: Mapping[str, int],
    names: Mapping[str, str],
    tensors: tuple[DcpFolder, Mapping[str, str]] | None,
    *,
    model: str,
    with_states: bool,
    batch_bytes: int,
) -> dict[str, int]:
    """Writes a folder. It appears when it is complete.

    Args:
        path: a folder that does not exist.
        tables: hash tables whose ids are row numbers.
        rows: numbers of rows (``num_embeddings``) by table names. Other tables have as many rows as
            their ids need.
        names: new names of tables, by their full names.
        tensors: a folder, and the new names of the entries to copy, by their names in the folder.
        model: prefix of the model's names, such as ``"model."``.
        with_states: whether to write optimizer states.
        batch_bytes: memory limit in bytes.

    Returns:
        Numbers of ids by table.

    Raises:
        ValueError: the path exists, or an id is not a row number.
        OSError: writing failed; what was written is removed.
    """
    if path.exists():
        raise ValueError(f"{path} exists already: name a folder that doesn't.")
    saving = path.with_name(f".{path.name}.saving")
    shutil.rmtree(saving, ignore_errors=True)
    try:
        saving.mkdir(parents=True)
        ids = {}
        with DcpWriter(saving) as writer:
            for table in tables:
                dcp_table = _DcpTable(table, rows.get(table.name), with_states, batch_bytes)
                ids[table.name] = dcp_table.write(writer, model, names[table.name], saving / _SPILL)
            if tensors is not None:
                source, new_names = tensors
                for key, name in new_names.items():
                    writer.copy(source, key, name)
            writer.finish()
        saving.rename(path)
        sync_folder(path.absolute().parent)
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise
    return ids


class _DcpTable:
    def __init__(
        self, table: OpenedTable, rows: int | None, with_states: bool, batch_bytes: int
    ) -> None:
        self._table, self._batch_bytes = table, batch_bytes
        part = table.first_columns[0]
        self._parts = StateColumns.of_layout(part.manifest.state_layout)
        fields = {field.name for field in part.fields}
        self._names = ["rows"]
        if with_states and "states" in fields:
            if part.columns.end != table.dim:
                raise ValueError(
                    f"Table {table.name!r} was saved in several columns, whose optimizer states "
                    "can't be joined: leave them out by --without states."
                )
            self._names.append("states")
        self._rows = self._num_rows(rows)

    def _num_rows(self, num_rows: int | None) -> int:
        lowest, highest = 0, -1
        for batch in self._table.batches([], self._batch_bytes):
            if len(batch["ids"]):
                lowest = min(lowest, int(batch["ids"].min()))
                highest = max(highest, int(batch["ids"].max()))
        rows = max(highest + 1, 1) if num_rows is None else num_rows
        if lowest < 0 or highest >= rows or rows > 1 << 40:
            rule = f"0 to {rows - 1}" if num_rows is not None else "from 0 on, below 2^40"
            raise ValueError(
                f"Table {self._table.name!r} has ids {lowest if lowest < 0 else 0} to {highest}, "
                f"but a stock table has rows {rule}: convert it to a file of ids and rows, such as "
                "NAME.parquet."
            )
        return rows

    def write(self, writer: DcpWriter, model: str, name: str, folder: Path) -> int:
        """Writes the table and returns its number of ids."""
        table = self._table
        width = 2 * table.entry_bytes()
        parts = min(max(1, -(-_COPIES * self._rows * width // self._batch_bytes)), MAX_PARTS)
        size = -(-self._rows // parts)
        spill = Spill(folder, lambda ids: ids // size)
        count = 0
        try:
            for batch in table.batches(self._names, self._batch_bytes // 4):
                spill.put({name: batch[name] for name in ("ids", *self._names)})
                count += len(batch["ids"])
                advance(len(batch["ids"]) * table.entry_bytes())
            for part in range(-(-self._rows // size)):
                n = min(size, self._rows - part * size)
                rows, states = self._part(part * size, n, spill.take(part))
                shape = (self._rows, table.dim)
                writer.add(f"{model}{name}.weight", part * size, rows, shape)
                begin = f"optimizer.state.{name}.weight.{name.rpartition('.')[2]}."
                for kind, values in zip(_STATES, states, strict=False):
                    shape = (self._rows, *values.shape[1:])
                    writer.add(begin + kind, part * size, values, shape)
                advance(n * table.entry_bytes())
        finally:
            spill.close()
        return count

    def _part(
        self, first: int, n: int, entries: dict[str, Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Rows and states of the row numbers from ``first`` up to ``first + n``, exclusive."""
        ids = torch.arange(first, first + n)
        dtype = number_dtype(getattr(torch, self._table.identity["dtype"]))
        rows = torch.empty(n, self._table.dim, dtype=dtype)
        # A row that the table lacks has its initial values.
        for shard in self._table.parts or ():
            if shard.owners == self._table.parts[0].owners:
                columns = slice(shard.columns.begin, shard.columns.end)
                rows[:, columns] = initial_rows_of(shard, ids).to(dtype)
        states = self._empty_states(n)
        if entries is not None:
            at = entries["ids"] - first
            rows[at] = entries["rows"].to(dtype)
            for k, (values, (begin, end)) in enumerate(
                zip(states, self._state_columns(), strict=True)
            ):
                part = entries["states"][:, begin:end]
                states[k][at] = part if values.dim() == 2 else part[:, 0]
        return rows, states

    def _state_columns(self) -> list[tuple[int, int]]:
        """Columns of each state of stock optimizers among the states of a row."""
        if "states" not in self._names:
            return []
        dim, parts = self._table.dim, self._parts
        begins = [k * dim for k in range(parts.of_columns)]
        found = [(begin, begin + dim) for begin in begins]
        end = parts.of_columns * dim
        return found + [(end + k, end + k + 1) for k in range(parts.of_rows)]

    def _empty_states(self, n: int) -> list[Tensor]:
        return [
            torch.zeros(n)
            if end - begin == 1 and k >= self._parts.of_columns
            else torch.zeros(n, self._table.dim)
            for k, (begin, end) in enumerate(self._state_columns())
        ]
