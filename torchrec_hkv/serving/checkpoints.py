"""Reads rows by id and dense tensors from checkpoints and deltas, without TorchRec."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_hkv import checksums
from torchrec_hkv.checkpoint.chain import Link
from torchrec_hkv.checkpoint.metadata import read_metadata
from torchrec_hkv.checkpoint.reader import CheckedReader
from torchrec_hkv.checkpoint.record import LINK, TENSORS, Record, TableShardRecord
from torchrec_hkv.hash_table.eviction import counts_in, sums_scores
from torchrec_hkv.hash_table.files.changes import read_removed_ids, verify_removed_ids
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.manifest_parts import ShardFile
from torchrec_hkv.hash_table.files.shard_files import (
    ShardReader,
    Staging,
    dequantised,
    entry_bytes,
    manifest_fields,
)
from torchrec_hkv.serving.background_file import read_ahead
from torchrec_hkv.serving.table_builder import Order

_BATCH_BYTES = 32 << 20
_PIECE = 1 << 22


@dataclasses.dataclass(frozen=True)
class ColumnEntries:
    """Entries of a range of columns of a table.

    Attributes:
        begin: first column.
        ids: int64 ``[n]``.
        rows: float32 ``[n, columns]``.
        removed: ids whose slots now hold other ids.
    """

    begin: int
    ids: Tensor
    rows: Tensor
    removed: Tensor


class Checkpoint:
    """A checkpoint or a delta, and its description of tables.

    Args:
        folder: folder of one checkpoint.

    Raises:
        ValueError: the checkpoint is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.record = Record.read(folder)
        for name, file in self.record.files.items():
            _check_file(folder / name, file.bytes, file.crc32)
        self._metadata = read_metadata(folder, self.record.files)
        self._reader = CheckedReader(folder / TENSORS, self._metadata)
        #: Whether it is a delta.
        self.is_delta = (folder / LINK).is_file() and Link.read(folder).kind == "delta"

    def has_files(self, table: str) -> bool:
        """Whether a table has files of its own; in a delta, they hold only changes."""
        record = self.record.tables.get(table)
        return record is not None and record.shards is not None

    def manifest(self, table: str) -> Manifest:
        """Spec of a table with files of its own, from its first shard."""
        return self._manifest(self.record.tables[table].shards[0])

    def width(self, table: str) -> int:
        """Columns of a table with files of its own."""
        return max(shard.columns[1] for shard in self.record.tables[table].shards)

    def order(self, table: str) -> Order:
        """The order of :meth:`entries`."""
        shards = self._by_owner(table)
        if len({shard.columns for shard in shards}) > 1:
            return ()
        count, order = 0, []
        for shard in shards:
            for file in self._manifest(shard).shards:
                count += file.entries
                # If a rank has one file, the file is marked as one for all owners.
                order.append((count, min(file.owner_end, shard.owners[1])))
        owners = [owner for _, owner in order]
        return order if owners == sorted(owners) else ()

    def _by_owner(self, table: str) -> list[TableShardRecord]:
        return sorted(self.record.tables[table].shards, key=lambda shard: shard.owners)

    def entries(self, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields ids and float32 rows of a whole table with files of its own. Rows are valid until
        the next batch.

        Raises:
            ValueError: a file is damaged or missing, or column shards of a table hold different
                ids. Discard the batches that were yielded before.
        """
        shards = self._by_owner(table)
        begins = sorted({shard.columns[0] for shard in shards})
        if len(begins) == 1:
            for shard in shards:
                yield from self._batches(shard)
            return
        # Column shards hold the same ids in different orders, so they are joined in memory.
        first, *others = [_joined(part) for part in self.columns(table)]
        rows = torch.zeros(first.ids.numel(), max(shard.columns[1] for shard in shards))
        for part in (first, *others):
            at, found = _places(part.ids, first.ids)
            if not bool(found.all()):
                raise ValueError(
                    f"{self._folder}: shards of columns of table {table!r} hold different ids, as "
                    "a GPU may evict them: save it with deterministic=True to serve it."
                )
            rows[:, part.begin : part.begin + part.rows.shape[1]] = part.rows[at]
        yield first.ids, rows

    def counts(self, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields ids of a whole table with files of its own, and the number of lookups of each in
        training; nothing if the table did not count lookups. Arguments and errors are those of
        :meth:`entries`."""
        shards = self._by_owner(table)
        for shard in shards:
            name = self._manifest(shard).table["eviction"]
            if shard.columns[0] == min(other.columns[0] for other in shards) and sums_scores(name):
                for batch in self._read(shard):
                    yield batch["ids"].clone(), counts_in(batch["scores"], name).clone()

    def columns(self, table: str) -> list[list[ColumnEntries]]:
        """Entries of a table in memory, for each range of columns."""
        by_begin: dict[int, list[ColumnEntries]] = {}
        for shard in sorted(self.record.tables[table].shards, key=lambda its: its.columns[0]):
            manifest = self._manifest(shard)
            batches = [(ids, rows.clone()) for ids, rows in self._batches(shard)]
            width = shard.columns[1] - shard.columns[0]
            removed = [torch.empty(0, dtype=torch.int64)]
            if manifest.changes is not None:
                folder = self._folder / shard.folder
                slots = manifest.buckets * manifest.bucket_slots
                verify_removed_ids(folder, manifest.changes, slots, _BATCH_BYTES)
                removed += [ids for _, ids in read_removed_ids(folder, manifest.changes, 1 << 16)]
            by_begin.setdefault(shard.columns[0], []).append(
                ColumnEntries(
                    shard.columns[0],
                    torch.cat([removed[0], *(ids for ids, _ in batches)]),
                    torch.cat([torch.empty(0, width), *(rows for _, rows in batches)]),
                    torch.cat(removed),
                )
            )
        return list(by_begin.values())

    def changes(self, table: str) -> tuple[list[ColumnEntries], Tensor]:
        """Changes of a table with files of its own.

        Returns:
            Changed entries of each range of columns, and the ids that left the table.
        """
        parts = [_joined(part) for part in self.columns(table)]
        first = parts[0]
        _, found = _places(first.ids, first.removed)
        return parts, first.removed[~found].unique()

    def _manifest(self, shard: TableShardRecord) -> Manifest:
        manifest = Manifest.read(self._folder / shard.folder)
        if manifest.crc32 != shard.crc32:
            raise ValueError(
                f"{self._folder / shard.folder} was not saved with {self._folder}: its manifest "
                "has another checksum."
            )
        return manifest

    def _batches(self, shard: TableShardRecord) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and rows of a shard; rows are valid until the next batch."""
        for batch in self._read(shard):
            yield batch["ids"].clone(), dequantised(batch)["rows"].float()

    def _read(self, shard: TableShardRecord) -> Iterator[dict[str, Tensor]]:
        """Entries of a shard; they are valid until the next batch."""
        manifest = self._manifest(shard)
        folder, fields = self._folder / shard.folder, manifest_fields(manifest)
        size = max([_batch(file, fields) for file in manifest.shards], default=1)
        # While one batch is used, the second is verified and the third is read.
        stagings = deque(Staging(fields, size) for _ in range(3))

        def verified() -> Iterator[dict[str, Tensor]]:
            for file in manifest.shards:
                with ShardReader(folder / file.file, fields, file) as reader:
                    yield from reader.verified(read_ahead(reader.batches(*stagings)))
                stagings.rotate(file.entries // -size)  # the last batch may still be used

        yield from read_ahead(verified())

    # -- tensors ----------------------------------------------------------------------------------

    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of the model's ``state_dict``."""
        entry = self._metadata.state_dict_metadata.get(f"model.{name}")
        return isinstance(entry, TensorStorageMetadata)

    def entry(self, name: str) -> TensorStorageMetadata:
        """Size and dtype of a tensor of the model's ``state_dict``.

        Raises:
            ValueError: there is no tensor of that name.
        """
        if not self.has_tensor(name):
            raise ValueError(f"{self._folder} has no tensor {name!r}: it is of another model.")
        return self._metadata.state_dict_metadata[f"model.{name}"]

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Reads tensors of the model's ``state_dict`` to host memory.

        Raises:
            ValueError: a tensor is missing.
        """
        for name in names:
            self.entry(name)
        return {name: self._reader.read_tensor(f"model.{name}") for name in names}


def _batch(file: ShardFile, fields: Sequence) -> int:
    return max(1, min(_BATCH_BYTES // entry_bytes(fields), file.entries))


def _joined(parts: Sequence[ColumnEntries]) -> ColumnEntries:
    return ColumnEntries(
        parts[0].begin,
        torch.cat([part.ids for part in parts]),
        torch.cat([part.rows for part in parts]),
        torch.cat([part.removed for part in parts]),
    )


def _places(ids: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of wanted ids in ``ids``, and whether each was found."""
    if ids.numel() == 0:
        return torch.zeros_like(queries), torch.zeros_like(queries, dtype=torch.bool)
    ascending, order = ids.sort()
    at = torch.searchsorted(ascending, queries).clamp_(max=ids.numel() - 1)
    return order[at], ascending[at] == queries


def _check_file(path: Path, size: int, crc32: int) -> None:
    total = found = 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                total += len(piece)
                found = checksums.crc32(piece, found)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    if total != size:
        raise ValueError(f"{path} has {total} bytes instead of {size}.")
    if found != crc32:
        raise ValueError(
            f"{path} is damaged: its checksum is {found}, but the checkpoint names {crc32}."
        )
