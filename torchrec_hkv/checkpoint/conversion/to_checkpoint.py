"""Writes a checkpoint of hash tables, in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.optimizers import layout_of
from torchrec_hkv.backends.protocol import Backend
from torchrec_hkv.backends.save_types import FileOptions
from torchrec_hkv.backends.specs import TableShard
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.conversion.dcp_tensors import DcpFolder, DcpWriter
from torchrec_hkv.checkpoint.conversion.source import Eviction, SourceTable, completed
from torchrec_hkv.checkpoint.conversion.spill import MAX_PARTS, Spill
from torchrec_hkv.checkpoint.record import (
    TABLES,
    TENSORS,
    FileRecord,
    Record,
    TableRecord,
    TableShardRecord,
    shard_folder,
)
from torchrec_hkv.checkpoint.tensors import file_record
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.files.manifest import OWNERS, new_save_id
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.progress import advance, unreported

_OWN_NAME = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.(.+)")
# Copies of a part's entries in memory: as they were read, sorted, and in the table to save.
_COPIES = 5
_SPILL = f"{TABLES}/.parts"


def write_checkpoint(
    path: Path,
    tables: Sequence[SourceTable],
    tensors: tuple[DcpFolder, Mapping[str, str]] | None,
    *,
    seeds: Mapping[str, int],
    eviction: Eviction | None,
    has_optimizer: bool,
    backend: str,
    options: FileOptions,
) -> dict[str, int]:
    """Writes a checkpoint. It replaces an earlier checkpoint when it is complete.

    Args:
        path: the folder of the checkpoint.
        tables: the tables to write as hash tables.
        tensors: a folder, and the new names of the entries to copy, by their names in the folder.
        seeds: seeds of initial rows, by table names; 0 by default.
        eviction: policy of all tables; None: that of each source.
        has_optimizer: whether the tensors include states of an optimizer.
        backend: name of the tables' backend.
        options: how to write the files.

    Returns:
        Numbers of ids by table.

    Raises:
        ValueError: the path holds something other than a checkpoint, or a table has an id twice.
        OSError: writing failed; what was written is removed.
    """
    place = AtomicFolder(path)
    place.remove_token(place.prepare())
    save = new_save_id()
    # Tables of a group count steps together.
    clock = max([1, *(table.clock for table in tables)])
    try:
        records, ids = {}, {}
        for table in tables:
            seed = seeds.get(table.name, 0)
            writer = _TableWriter(table, registry.get(backend), seed, eviction, clock)
            records[table.name] = writer.write(place.saving, save, options)
            ids[table.name] = writer.ids
        files = _write_tensors(place.saving, tensors)
        record = Record(save, 1, has_optimizer, {}, records, files)
        record.write(place.saving)
        sync_folder(place.saving)
    except BaseException:
        place.discard()
        raise
    place.commit()
    return ids


def _write_tensors(
    folder: Path, tensors: tuple[DcpFolder, Mapping[str, str]] | None
) -> dict[str, FileRecord]:
    with DcpWriter(folder / TENSORS) as writer:
        if tensors is not None:
            source, names = tensors
            for key, name in names.items():
                writer.copy(source, key, name)
        writer.finish()
    return {
        f"{TENSORS}/{path.name}": file_record(path) for path in sorted((folder / TENSORS).iterdir())
    }


class _TableWriter:
    """Writes a table: sorts its entries into parts by owner buckets, and saves each as a shard."""

    def __init__(
        self,
        table: SourceTable,
        backend: Backend,
        seed: int,
        eviction: Eviction | None,
        clock: int,
    ) -> None:
        self._table, self._backend, self._clock = table, backend, clock
        self._eviction = eviction or table.eviction
        scored = {"score_from": "weights"} if self._eviction == "customized" else {}
        self._options = backend.options_type(seed=seed, eviction=self._eviction, **scored)
        self.ids = 0

    def write(self, folder: Path, save: str, options: FileOptions) -> TableRecord:
        """Writes all shards of the table and returns its record."""
        batch_bytes = options.batch_bytes
        min_parts = -(-_COPIES * self._table.bytes // batch_bytes)
        parts = max(1, min(min_parts, MAX_PARTS))
        shards = []
        with self._spill(folder / _SPILL, parts) as spill:
            for batch in self._table.read(batch_bytes // 4):
                spill.put(batch)
                advance(len(batch["ids"]) * self._table.entry_bytes)
            shards = [
                self._write_shard(folder, index, parts, spill.take(index), save, options)
                for index in range(parts)
            ]
        identity = self._backend.identity(self._shard(1, 0), self._table.optimizer)
        return TableRecord(self._backend.name, identity, shards)

    @contextlib.contextmanager
    def _spill(self, folder: Path, parts: int) -> Iterator[Spill]:
        folder.parent.mkdir(exist_ok=True)
        spill = Spill(folder, lambda ids: owner_rank(ids, parts).long())
        try:
            yield spill
        finally:
            spill.close()

    def _shard(self, capacity: int, index: int) -> TableShard:
        match = _OWN_NAME.fullmatch(self._table.name)
        scale = max(1, self._table.entries) ** -0.5  # TorchRec's; the loading table uses its own
        return TableShard(
            name=self._table.name if match is None else match[1],
            capacity=capacity,
            dim=self._table.dim,
            num_embeddings=capacity,
            embedding_dim=self._table.dim,
            row_offset=index,
            column_offset=0,
            dtype=self._table.dtype,
            pooling="sum",
            init_range=(-scale, scale),
            options=self._options,
            full_name=self._table.name,
        )

    def _write_shard(
        self,
        folder: Path,
        index: int,
        parts: int,
        entries: dict[str, Tensor] | None,
        save: str,
        options: FileOptions,
    ) -> TableShardRecord:
        n = 0 if entries is None else len(entries["ids"])
        owners = (-(-index * OWNERS // parts), -(-(index + 1) * OWNERS // parts))
        # With so many slots, every id finds one.
        shard = self._shard(n + n // 4 + 128, index)
        lookup = self._backend.create_lookup(
            [shard], [0], self._table.optimizer, torch.device("cpu")
        )
        load = lookup.open_entries(shard.key, owners)
        head = torch.tensor([1, layout_of(self._table.optimizer), self._table.updates, self._clock])
        load.begin(head)
        if entries is not None:
            self._check_once(entries["ids"])
            has_given_scores = self._eviction == "customized"
            load.put(
                completed(
                    entries,
                    self._table,
                    self._table.optimizer,
                    self._clock,
                    given_scores=has_given_scores,
                )
            )
        load.finish()
        name = shard_folder(self._table.name, index)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with unreported():
            lookup.save_files(shard.key, folder / name, dataclasses.replace(options, save=save))
        saved = self._backend.saved_folder(folder / name)
        self.ids += saved.entries
        advance(n * self._table.entry_bytes)
        return TableShardRecord(name, owners, (0, self._table.dim), saved.entries, saved.crc32)

    def _check_once(self, ids: Tensor) -> None:
        ordered = ids.sort().values
        twice = (ordered[1:] == ordered[:-1]).nonzero().flatten()
        if len(twice):
            raise ValueError(
                f"Table {self._table.name!r} has id {int(ordered[twice[0]])} more than once."
            )
