"""Saves and loads the tensors of a checkpoint with :mod:`torch.distributed.checkpoint`: everything
but tables that have files of their own."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_hkv import checksums
from torchrec_hkv.checkpoint.metadata import read_metadata
from torchrec_hkv.checkpoint.optimizers import (
    initialise,
    load_optimizer_state,
    optimizer_state,
)
from torchrec_hkv.checkpoint.reader import CheckedPlanner, CheckedReader, load_value
from torchrec_hkv.checkpoint.record import TENSORS, FileRecord
from torchrec_hkv.collective import on_every_rank
from torchrec_hkv.progress import advance
from torchrec_hkv.sharding.state.sharded_state import SHARDS_KEY
from torchrec_hkv.write_behind import SaveHandle
from torchrec_hkv.write_behind_file import WriteBehindFile

_SHARDS_PATTERN = re.compile(rf"\.(?:embedding_bags|embeddings)\.(?P<table>.+)\.{SHARDS_KEY}$")
_PIECE = 16 << 20


class _WriteBehindFiles(FileSystem):
    """Files that the threads of a non-blocking save write."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise ValueError(f"{path} can't be opened with mode {mode!r} while it is saved.")
        with WriteBehindFile(Path(path), self._handle) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._handle.defer(lambda: Path(path).rename(new_path))


def save_tensors(folder: Path, state: dict[str, Any], handle: SaveHandle | None = None) -> None:
    """Saves a state; a collective call.

    Args:
        folder: the folder to write to.
        state: a state for :mod:`torch.distributed.checkpoint`.
        handle: handle of a non-blocking save. Everything has been copied when the call returns.

    Raises:
        CheckpointException: a rank could not write.
    """
    if handle is None:
        dcp.save(state, checkpoint_id=folder)
        return
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = _WriteBehindFiles(handle)
    dcp.save(state, storage_writer=writer)


def local_bytes(state: Mapping[str, Any]) -> int:
    """Size of this rank's parts of the tensors in a state, in bytes."""
    return sum(
        part.numel() * part.element_size()
        for value in flat("", state).values()
        if isinstance(value, torch.Tensor)
        for part in _local_parts(value)
    )


def _local_parts(value: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


def check_savable(state: Mapping[str, Any]) -> None:
    """Checks that a load will accept all values: it refuses values of unknown classes.

    Raises:
        ValueError: the load would refuse a value; the message names the value's place and class.
    """
    for key, value in flat("", state).items():
        if isinstance(value, torch.Tensor):
            continue
        data = io.BytesIO()
        torch.save(value, data)
        key = key.removeprefix(".")
        load_value(data, f"the value {key!r} can't be saved", type(value))


class TensorsLoad:
    """Loads tensors into a model and an optimizer.

    Args:
        folder: the folder of the checkpoint.
        model: the sharded model.
        optimizer: the optimizer, or None.
        strict: whether to refuse a checkpoint that lacks tensors of the model; if not, these stay
            unchanged.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        *,
        strict: bool = True,
    ) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._strict = strict
        self._state = {"model": model.state_dict()}
        self._reader: CheckedReader | None = None

    def check(self, files: Mapping[str, FileRecord]) -> None:
        """Checks that the tensors match, before anything changes; a collective call.

        Args:
            files: the files in the checkpoint's record.

        Raises:
            ValueError: they don't match, or a file is damaged. The message names the tensor, what
                is saved and what is needed, or the file and the impossible value in it.
        """
        with contextlib.ExitStack() as undo:
            names = on_every_rank(lambda: self._check_rank(files, undo))
            # Each entry is checked by one rank.
            everybody = sorted({key for keys in names for key in keys})
            rank, ranks = 0, 1
            if dist.is_initialized():
                rank, ranks = dist.get_rank(), dist.get_world_size()
            on_every_rank(lambda: self._reader.check_tensors(everybody[rank::ranks]))
            undo.pop_all()

    def _check_rank(self, files: Mapping[str, FileRecord], undo: contextlib.ExitStack) -> list[str]:
        """Checks what this rank loads. Returns the names of its tensors."""
        metadata = read_metadata(self._folder, files)
        self._reader = CheckedReader(self._folder / TENSORS, metadata)
        expected = self._expected(metadata, "model", self._state["model"])
        check_match(self._folder, metadata, expected)
        if self._optimizer is not None:
            undo.callback(initialise(self._optimizer, set(metadata.state_dict_metadata)))
            self._state.update(optimizer_state(self._optimizer))
            of_optimizer = self._expected(metadata, "optimizer", self._state.get("optimizer", {}))
            check_match(self._folder, metadata, of_optimizer)
            expected |= of_optimizer
        tensors = []
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                tensors.append(key)
            else:
                self._reader.check_value(key, value)
        return tensors

    def _expected(
        self, metadata: Metadata, prefix: str, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The values to load, by their names in the checkpoint."""
        leaves = flat(prefix, state)
        if self._strict:
            return leaves
        saved = metadata.state_dict_metadata
        return {key: value for key, value in leaves.items() if key in saved}

    @property
    def bytes(self) -> int:
        """Size of the tensors that this rank loads."""
        return local_bytes(self._state)

    def run(self) -> None:
        """Loads the tensors; a collective call."""
        planner = CheckedPlanner(allow_partial_load=not self._strict)
        dcp.load(self._state, storage_reader=self._reader, planner=planner)
        advance(self.bytes)
        self._model.load_state_dict(self._state["model"])
        if self._optimizer is not None and "optimizer" in self._state:
            load_optimizer_state(self._optimizer, self._state["optimizer"])


def file_record(path: Path) -> FileRecord:
    """Computes size and checksum of a file, which is read in pieces."""
    crc32 = size = 0
    buffer = bytearray(_PIECE)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            crc32 = checksums.crc32(memoryview(buffer)[:n], crc32)
            size += n
    return FileRecord(size, crc32)


def file_size(path: Path) -> int:
    """Size of a file in bytes; 0 if there is no such file."""
    return path.stat().st_size if path.is_file() else 0


def verify_file(path: Path, record: FileRecord) -> None:
    """Reads a file and compares its size and checksum with the record.

    Raises:
        ValueError: they differ, or the file can't be read.
    """
    try:
        size = os.stat(path).st_size
        if size != record.bytes:
            what = "cut short" if size < record.bytes else "too long"
            raise ValueError(f"{path} is {what}: it has {size} bytes instead of {record.bytes}.")
        found = file_record(path)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    if found.crc32 != record.crc32:
        raise ValueError(
            f"{path} is damaged: its checksum is {found.crc32}, but the checkpoint's record names "
            f"{record.crc32}."
        )


def check_match(folder: Path, metadata: Metadata, expected: Mapping[str, Any]) -> None:
    """Checks that a folder has all tensors to load, with the same shapes and dtypes.

    Raises:
        ValueError: it does not; the message names the tensor, what is saved and what is needed.
    """
    saved = metadata.state_dict_metadata
    missing = [key for key in expected if key not in saved]
    if missing:
        raise ValueError(
            f"The checkpoint {folder} lacks {len(missing)} of the tensors to load, the first being "
            f"{missing[0]!r}: load it into the model that it was saved from."
        )
    # World sizes are compared first: if they differ, most shapes differ, too.
    for key in sorted(expected, key=lambda key: _SHARDS_PATTERN.search(key) is None):
        entry, value = saved[key], expected[key]
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if is_tensor != isinstance(value, torch.Tensor):
            saved_as = "a tensor" if is_tensor else "no tensor"
            raise ValueError(
                f"In the checkpoint {folder}, {key!r} is {saved_as}, but in the model a "
                f"{type(value).__name__}: load it into the model that it was saved from."
            )
        if not is_tensor:
            continue
        if entry.size == value.size():
            if entry.properties.dtype != value.dtype:
                raise ValueError(
                    f"In the checkpoint {folder}, {key!r} has dtype {entry.properties.dtype}, but "
                    f"in the model {value.dtype}: load it into the model that it was saved from."
                )
            continue
        table = _SHARDS_PATTERN.search(key)
        if table is not None:
            raise ValueError(
                f"The checkpoint {folder} holds table {table['table']!r} in {entry.size[0]} shards "
                f"and the model has {value.size()[0]}: load it with the number of ranks and the "
                "sharding type it was saved with."
            )
        raise ValueError(
            f"In the checkpoint {folder}, {key!r} has shape {tuple(entry.size)}, but in the model "
            f"{tuple(value.size())}: load it into the model that it was saved from."
        )


def flat(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested mappings, by their paths."""
    leaves: dict[str, Any] = {}
    for key, value in state.items():
        path = f"{prefix}.{key}"
        leaves.update(flat(path, value) if isinstance(value, Mapping) else {path: value})
    return leaves
