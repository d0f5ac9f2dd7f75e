"""Loads folders that :mod:`torch.distributed.checkpoint` wrote, with a ``state_dict``, into a
sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_hkv.backends.optimizers import layout_of
from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.backends.save_types import FileOptions, LoadCounts
from torchrec_hkv.checkpoint.conversion.dcp_source import DcpKeys, dcp_tables, table_names
from torchrec_hkv.checkpoint.conversion.dcp_tensors import DcpFolder
from torchrec_hkv.checkpoint.conversion.source import SourceTable, completed, states_of
from torchrec_hkv.checkpoint.metadata import DCP_METADATA
from torchrec_hkv.checkpoint.optimizers import initialise, load_optimizer_state, optimizer_state
from torchrec_hkv.checkpoint.reader import CheckedPlanner, CheckedReader
from torchrec_hkv.checkpoint.record import RECORD, TENSORS
from torchrec_hkv.checkpoint.table_transfer import put_entries
from torchrec_hkv.checkpoint.tensors import check_match, flat
from torchrec_hkv.collective import on_every_rank, share_of_rank, this_rank
from torchrec_hkv.progress import advance, reported
from torchrec_hkv.sharding.modules.collection import ShardedTable, skip_file_tables
from torchrec_hkv.sharding.state.sharded_state import ShardedTableState
from torchrec_hkv.sharding.state.state_exchange import entries_may_be_lost
from torchrec_hkv.warn import warn


def is_dcp_folder(path: Path) -> bool:
    """Whether a folder holds a ``state_dict`` that :mod:`torch.distributed.checkpoint` saved.

    Raises:
        ValueError: the folder is the ``tensors`` folder of a checkpoint.
    """
    if not (path / DCP_METADATA).is_file():
        return False
    if path.name == TENSORS and (path.parent / RECORD).is_file():
        raise ValueError(f"{path} is a part of a checkpoint: name {path.parent}.")
    return True


def refuse_dcp_folder(path: Path) -> None:
    """Raises if :mod:`torch.distributed.checkpoint` wrote a folder.

    Raises:
        ValueError: it did; the message says how to load or convert the folder.
    """
    if is_dcp_folder(path):
        raise ValueError(
            f"{path} holds a state_dict that torch.distributed.checkpoint saved: load it by "
            "torchrec_hkv.checkpoint.load, or make a checkpoint of it by torchrec-hkv convert."
        )


def load_dcp_folder(
    path: Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    tables: Mapping[str, ShardedTable],
    options: FileOptions,
    *,
    strict: bool,
) -> dict[str, LoadCounts]:
    """Loads a folder of :mod:`torch.distributed.checkpoint` into a model; a collective call.

    Entries with the names and shapes of the model's ``state_dict`` are loaded by
    :mod:`torch.distributed.checkpoint`. A hash table takes the rows and states of a stock table
    with the same name. Its ids are row numbers, or the ids of a managed collision module.

    Args:
        path: the folder.
        model: the sharded model.
        optimizer: the optimizer, or None.
        tables: the tables of the model.
        options: how to load.
        strict: whether to refuse a folder that lacks tables or tensors of the model.

    Returns:
        Numbers of entries over all ranks that were inserted and lost, by full names of tables.

    Raises:
        ValueError: the folder is damaged or doesn't match the model; nothing has changed then. If
            entries find no slot in a hash table and may not be lost, the table is empty afterwards.
    """
    load = _DcpLoad(path, model, optimizer, tables, options, strict=strict)
    with contextlib.ExitStack() as undo:
        on_every_rank(lambda: load.check(undo))
        load.check_tensors()
        undo.pop_all()
    with reported(f"Loading {path.name}", load.bytes):
        return load.run()


class _DcpLoad:
    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        tables: Mapping[str, ShardedTable],
        options: FileOptions,
        *,
        strict: bool,
    ) -> None:
        self._path, self._model, self._optimizer = path, model, optimizer
        self._tables = {name: table for name, table in tables.items() if table.has_files}
        self._options, self._strict = options, strict
        self._state: dict[str, Any] = {}
        self._sources: dict[str, SourceTable] = {}
        self._placed: dict[str, LoadCounts] = {}  # of this rank
        self.bytes = 0

    def check(self, undo: contextlib.ExitStack) -> None:
        """Checks that the folder matches. Does not read values of tensors."""
        self._folder = DcpFolder(self._path)
        self._keys = DcpKeys.of(self._folder, self._prefix(), None)
        self._reader = CheckedReader(self._path, self._folder.metadata)
        # Hash tables that were saved as hash tables; the others come from stock tables.
        alike = [name for name in self._tables if self._has(f"{name}.occupied")]
        self._find_sources([name for name in self._tables if name not in alike])
        self._take_model(alike)
        if self._optimizer is not None:
            self._take_optimizer(self._optimizer, undo)
        expected = flat("", self._state)
        expected = {key.removeprefix("."): value for key, value in expected.items()}
        if not self._strict:
            expected = {
                key: value for key, value in expected.items() if key in self._folder.entries
            }
        check_match(self._path, self._folder.metadata, expected)
        for key, value in expected.items():
            if not isinstance(value, Tensor):
                self._reader.check_value(key, value)
        self._expected = [key for key, value in expected.items() if isinstance(value, Tensor)]
        self.bytes = sum(self._folder.bytes(key) for key in self._expected)
        self.bytes += sum(source.bytes for source in self._sources.values())

    def check_tensors(self) -> None:
        """Checks that entries are what the metadata describes. Each is checked by one rank."""
        expected = on_every_rank(lambda: self._expected)
        rank_keys = share_of_rank(sorted({key for keys in expected for key in keys}))
        on_every_rank(lambda: self._reader.check_tensors(rank_keys))

    def _prefix(self) -> str | None:
        """The prefix of the model's entries: the one under which the folder has more of them."""
        with skip_file_tables():
            names = list(self._model.state_dict())
        begins = tuple(f"{name}." for name in self._tables)

        def known(prefix: str) -> int:
            entries = self._folder.entries
            of_tables = [key.removeprefix(prefix) for key in entries if key.startswith(prefix)]
            return sum(prefix + name in entries for name in names) + sum(
                key.startswith(begins) for key in of_tables
            )

        counts = {prefix: known(prefix) for prefix in ("model.", "")}
        best = max(counts, key=counts.__getitem__)
        return best.removesuffix(".") if counts[best] else None

    def _has(self, name: str) -> bool:
        return self._folder.is_tensor(self._keys.model + name)

    def _find_sources(self, names: list[str]) -> None:
        tables = dcp_tables(self._folder, self._keys, None, (), names).tables
        found = {table.name: table for table in tables}
        missing = [name for name in names if name not in found]
        if missing and self._strict:
            raise ValueError(
                f"{self._path} has no table {missing[0]!r}: it has "
                f"{sorted(table_names(self._folder, self._keys))}. With strict=False, missing "
                "tables stay unchanged."
            )
        for name in names:
            if name in found:
                self._check_source(found[name], self._tables[name])
                self._sources[name] = found[name]

    def _check_source(self, source: SourceTable, table: ShardedTable) -> None:
        shard = table.state.shards[0]
        for what, saved, expected in (
            ("dim", source.dim, shard.embedding_dim),
            ("dtype", source.dtype, shard.dtype),
        ):
            if saved != expected:
                raise ValueError(
                    f"In {self._path}, table {source.name!r} has {what} {saved}, but "
                    f"in the model {expected}."
                )
        is_smaller = source.entries > shard.num_embeddings
        if source.is_exact and is_smaller and not self._options.allow_loss:
            raise ValueError(
                f"In {self._path}, table {source.name!r} has {source.entries} rows, but in the "
                f"model num_embeddings is {shard.num_embeddings}: give it a larger one, or pass "
                "allow_loss=True."
            )
        optimizer = table.planned.optimizer
        if source.optimizer is not None and layout_of(source.optimizer) != layout_of(optimizer):
            raise ValueError(
                f"In {self._path}, table {source.name!r} has the states of "
                f"{source.optimizer.kind}, but the model trains it by "
                f"{None if optimizer is None else optimizer.kind}: convert it by torchrec-hkv "
                "convert --without states."
            )

    def _take_model(self, alike: list[str]) -> None:
        # The state of a hash table is a copy of the table, which is made only if needed.
        aside = contextlib.nullcontext() if alike else skip_file_tables()
        with aside:
            state = self._model.state_dict()
        others = tuple(f"{name}." for name in self._tables if name not in alike)
        self._model_state = {key: v for key, v in state.items() if not key.startswith(others)}
        self._is_partial = not self._strict or bool(others)
        key = self._keys.model.removesuffix(".")
        self._state = {key: self._model_state} if key else dict(self._model_state)
        self._skips_file_tables = not alike

    def _take_optimizer(self, optimizer: KeyedOptimizer, undo: contextlib.ExitStack) -> None:
        if self._keys.optimizer is None:
            raise ValueError(f"{self._path} has no optimizer: load it without one.")
        undo.callback(initialise(optimizer, set(self._folder.entries)))
        self._state.update(optimizer_state(optimizer))

    def run(self) -> dict[str, LoadCounts]:
        """Loads; a collective call. Returns what :func:`load_dcp_folder` does."""
        planner = CheckedPlanner(allow_partial_load=not self._strict)
        if self._expected or self._strict:
            dcp.load(self._state, storage_reader=self._reader, planner=planner)
        with skip_file_tables() if self._skips_file_tables else contextlib.nullcontext():
            key = self._keys.model.removesuffix(".")
            state = self._state[key] if key else {k: self._state[k] for k in self._model_state}
            # The num_embeddings are the saved ones, so a loss is allowed by default.
            if self._options.allow_loss is False:
                self._model.load_state_dict(state, strict=not self._is_partial)
            else:
                with entries_may_be_lost() as losses:
                    self._model.load_state_dict(state, strict=not self._is_partial)
                for of_table, placed in losses:
                    self._placed[self._name_of(of_table)] = placed
        if self._optimizer is not None and "optimizer" in self._state:
            load_optimizer_state(self._optimizer, self._state["optimizer"])
        advance(sum(self._folder.bytes(key) for key in self._expected))
        self._run_sources()
        everywhere: dict[str, LoadCounts] = {}
        for of_rank in on_every_rank(lambda: self._placed):
            for name, counts in of_rank.items():
                lost = counts.lost + everywhere.get(name, LoadCounts()).lost
                everywhere[name] = LoadCounts(counts.entries, lost)  # each rank counts all entries
        return everywhere

    def _name_of(self, state: ShardedTableState) -> str:
        return next(name for name, table in self._tables.items() if table.state is state)

    def _run_sources(self) -> None:
        clock = max([1, *(source.clock for source in self._sources.values())])
        heads: dict[GroupLookup, dict[str, Tensor]] = {}
        on_every_rank(
            lambda: [self._fill(name, clock, heads) for name in self._sources],
        )
        for lookup, of_keys in heads.items():
            lookup.entries_loaded(of_keys)
        without = [
            name
            for name, source in self._sources.items()
            if layout_of(source.optimizer) != layout_of(self._tables[name].planned.optimizer)
            and states_of(self._tables[name].planned.optimizer) != states_of(None)
        ]
        if without and this_rank() == 0:
            warn(
                f"Tables {', '.join(map(repr, without))} were saved without optimizer states: "
                "they are reset."
            )

    def _fill(self, name: str, clock: int, heads: dict[GroupLookup, dict[str, Tensor]]) -> None:
        """Fills this rank's shards of a table."""
        source, table = self._sources[name], self._tables[name]
        lookups = table.collection.group_lookups()
        rank = this_rank()
        rank_shards = [
            shard
            for shard, holder in zip(table.state.shards, table.state.ranks, strict=True)
            if holder == rank
        ]
        if not rank_shards:
            return
        optimizer = table.planned.optimizer
        loads = {
            s.key: lookups[s.key].open_entries(s.key, table.state.owners(s)) for s in rank_shards
        }
        for shard in rank_shards:
            # The source has no epoch: that of the group stays, which other tables may have loaded.
            first = 1 | lookups[shard.key].epoch() << 8
            head = torch.tensor([first, layout_of(optimizer), source.updates, clock])
            heads.setdefault(lookups[shard.key], {})[shard.key] = head
            loads[shard.key].begin(head)
        has_given_scores = rank_shards[0].options.score_source is not None
        count = 0
        for batch in source.read(self._options.batch_bytes // 4):
            entries = completed(batch, source, optimizer, clock, given_scores=has_given_scores)
            for shard in rank_shards:
                put_entries(loads[shard.key], shard, entries)
            count += len(batch["ids"])
            advance(len(batch["ids"]) * source.entry_bytes)
        allow = self._options.allow_loss
        if allow is None:
            allow = source.entries <= rank_shards[0].num_embeddings
        lost = sum(load.finish(allow_loss=allow) for load in loads.values())
        shards = sum(s.row_offset == rank_shards[0].row_offset for s in table.state.shards)
        self._placed[name] = LoadCounts(count * shards, lost)
