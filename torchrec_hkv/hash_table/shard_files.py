"""One shard of a saved table: a safetensors file, written and read in batches.

The safetensors package writes tensors that are whole in memory; a shard is larger than what a save
may take. The format is simple enough to be written in pieces: 8 bytes with the length of the
header, the header, then tensor after tensor. The package reads these files.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.manifest import Shard

# The format's names. Steps and scores are unsigned, but a table hands them over as signed.
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Field:
    """One tensor of a shard.

    Attributes:
        name: of the tensor.
        dtype: in memory.
        type: in the header.
        columns: of a matrix; None for a vector.
    """

    name: str
    dtype: torch.dtype
    type: str
    columns: int | None = None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return self.dtype.itemsize * (1 if self.columns is None else self.columns)

    def shape(self, entries: int) -> tuple[int, ...]:
        """Of the tensor of so many entries."""
        return (entries,) if self.columns is None else (entries, self.columns)


def fields_of(
    dim: int, dtype: torch.dtype, state_dim: int, keeps_scores: bool
) -> tuple[Field, ...]:
    """The tensors of a shard, wider elements first, so that each is aligned."""
    fields = [Field("ids", torch.int64, "I64"), Field("slots", torch.int64, "I64")]
    if keeps_scores:
        fields.append(Field("scores", torch.int64, "U64"))
    fields.append(Field("last_steps", torch.int32, "U32"))
    if state_dim:
        fields.append(Field("states", torch.float32, "F32", state_dim))
    fields.append(Field("rows", dtype, _TYPES[dtype], dim))
    return tuple(fields)


def entry_bytes(fields: Sequence[Field]) -> int:
    """Bytes of one entry in a shard."""
    return sum(field.entry_bytes for field in fields)


def _header(fields: Sequence[Field], shard: Shard) -> bytes:
    owners = f"{shard.owner_begin}-{shard.owner_end - 1}"
    tensors: dict[str, object] = {
        "__metadata__": {"format": "torchrec_hkv.hash_table", "owner_buckets": owners}
    }
    at = 0
    for field in fields:
        end = at + shard.entries * field.entry_bytes
        shape = list(field.shape(shard.entries))
        tensors[field.name] = {"dtype": field.type, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _starts(fields: Sequence[Field], shard: Shard, header: bytes) -> dict[str, int]:
    starts, at = {}, len(header)
    for field in fields:
        starts[field.name] = at
        at += shard.entries * field.entry_bytes
    return starts


def host_memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of host memory, which must outlive them."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))


class ShardWriter:
    """Writes a new shard, batch after batch; a context manager.

    Args:
        path: of the file.
        fields: of its entries.
        owners: first owner bucket of its ids, and the one past the last.
        entries: how many will come.
    """

    def __init__(
        self, path: Path, fields: Sequence[Field], owners: tuple[int, int], entries: int
    ) -> None:
        size = entries * entry_bytes(fields)
        shard = Shard(path.name, *owners, entries, size, {})
        header = _header(fields, shard)
        self._shard = dataclasses.replace(shard, bytes=len(header) + size)
        self._fields = fields
        self._at = _starts(fields, shard, header)
        self._crc32 = {field.name: 0 for field in fields}
        self._written = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(memoryview(header), 0)

    def _write(self, data: memoryview, at: int) -> None:
        while data.nbytes:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def append(self, batch: dict[str, Tensor]) -> None:
        """Writes entries: contiguous tensors in host memory, by name."""
        for field in self._fields:
            data = host_memory(batch[field.name])
            self._crc32[field.name] = zlib.crc32(data, self._crc32[field.name])
            self._write(data, self._at[field.name])
            self._at[field.name] += data.nbytes
        self._written += batch["ids"].numel()

    @property
    def room(self) -> int:
        """Entries still to come."""
        return self._shard.entries - self._written

    def finish(self) -> Shard:
        """Makes sure that the file is on the disk; returns what a manifest says of it."""
        os.fsync(self._file)
        return dataclasses.replace(self._shard, crc32=self._crc32)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


class ShardReader:
    """Reads a shard, batch after batch; a context manager.

    Args:
        path: of the file.
        fields: that its entries must have.
        shard: what the manifest says of it.

    Raises:
        ValueError: the file is missing, or not what the manifest says.
    """

    def __init__(self, path: Path, fields: Sequence[Field], shard: Shard) -> None:
        self._path = path
        self._fields = fields
        self._shard = shard
        header = _header(fields, shard)
        self._starts = _starts(fields, shard, header)
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        try:
            size = os.fstat(self._file).st_size
            if size != shard.bytes:
                what = "cut short" if size < shard.bytes else "too long"
                raise ValueError(f"{path} is {what}: it has {size} bytes instead of {shard.bytes}.")
            if len(header) + shard.entries * entry_bytes(fields) != size:
                raise ValueError(f"{path} has {size} bytes, which is not what its entries take.")
            if os.pread(self._file, len(header), 0) != header:
                raise ValueError(f"{path} is damaged: its header is not what its manifest implies.")
        except ValueError:
            os.close(self._file)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def batches(self, memory: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Entries in the order of the file.

        Args:
            memory: a tensor in host memory for each field, as long as a batch may be.

        Returns:
            Views of that memory, valid until the next ones.
        """
        longest = memory["ids"].shape[0]
        for first in range(0, self._shard.entries, longest):
            yield self.read(first, min(longest, self._shard.entries - first), memory)

    def read(self, first: int, n: int, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """``n`` entries from the one numbered ``first``: views of the memory of the fields that are
        in it."""
        batch = {name: tensor[:n] for name, tensor in memory.items()}
        for field in self._fields:
            if field.name in batch:
                at = self._starts[field.name] + first * field.entry_bytes
                self._read(host_memory(batch[field.name]), at)
        return batch

    def _read(self, data: memoryview, at: int) -> None:
        while data.nbytes:
            read = os.preadv(self._file, [data], at)
            if read == 0:
                raise ValueError(f"{self._path} is cut short: it ends at byte {at}.")
            data, at = data[read:], at + read

    def verified_batches(self, memory: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """As :meth:`batches`; after the last one the checksums are compared.

        Raises:
            ValueError: one is not what the manifest says.
        """
        crc32 = {field.name: 0 for field in self._fields}
        for batch in self.batches(memory):
            for name, tensor in batch.items():
                crc32[name] = zlib.crc32(host_memory(tensor), crc32[name])
            yield batch
        for name, value in crc32.items():
            expected = self._shard.crc32.get(name)
            if value != expected:
                raise ValueError(
                    f"{self._path} is damaged: the checksum of its {name} is {value}, but the "
                    f"manifest names {expected}."
                )
