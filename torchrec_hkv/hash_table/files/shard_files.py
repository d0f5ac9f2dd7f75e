"""One shard of a saved table: a safetensors file, written and read in batches.

The safetensors package only writes tensors that are completely in memory, and a shard exceeds the
memory limit of a save. This module therefore writes the format itself: 8 bytes with the length of
the header, the header, then one tensor after the other. The package can read these files.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import checksums
from torchrec_hkv.hash_table import eviction
from torchrec_hkv.hash_table.files.block_files import (
    BLOCK,
    BlockFile,
    block_memory,
    host_memory,
)
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.manifest_parts import ShardFile
from torchrec_hkv.hash_table.files.zstd_files import SUFFIX, ZstdFile, compress

# The format's names. Steps and scores are unsigned, but tables exchange them as signed integers.
_TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
}
_LENGTH_BYTES = 8
# Shorter files use the page cache, because small direct writes are slow.
_DIRECT_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Field:
    """One tensor of a shard.

    Attributes:
        name: name of the tensor.
        dtype: dtype in memory.
        type: name of the dtype in the header.
        columns: number of columns of a matrix; None for a vector.
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
        """Shape of the tensor for this number of entries."""
        return (entries,) if self.columns is None else (entries, self.columns)


def fields_of(
    dim: int, dtype: torch.dtype, state_dim: int, keeps_scores: bool
) -> tuple[Field, ...]:
    """The tensors of a shard. Those with wider elements come first, so that each is aligned."""
    fields = [Field("ids", torch.int64, "I64"), Field("slots", torch.int64, "I64")]
    if keeps_scores:
        fields.append(Field("scores", torch.int64, "U64"))
    fields.append(Field("last_steps", torch.int32, "U32"))
    if state_dim:
        fields.append(Field("states", torch.float32, "F32", state_dim))
    if dtype == torch.int8:
        fields.append(Field("scales", torch.float32, "F32"))
    fields.append(Field("rows", dtype, _TYPES[dtype], dim))
    return tuple(fields)


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows to 8 bits: returns codes, int8 ``[n, dim]``, and the scale of each row,
    float32 ``[n]``. A value is its code times the scale, with an error of at most half the
    scale."""
    rows = rows.float()
    largest = rows.abs().amax(1)
    # On GPUs torch multiplies by the reciprocal of a number, which may be off by a bit.
    scales = largest / torch.full_like(largest, 127)
    codes = rows / torch.where(scales == 0, 1, scales)[:, None]
    return codes.round_().to(torch.int8), scales


def dequantised(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts entries with quantised rows to entries with float rows."""
    if "scales" not in batch or "rows" not in batch:
        return batch
    rows = batch["rows"].float().mul_(batch["scales"][:, None])
    return {name: tensor for name, tensor in batch.items() if name != "scales"} | {"rows": rows}


def dequantised_fields(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The tensors that :func:`dequantised` returns."""
    return tuple(
        dataclasses.replace(field, dtype=torch.float32) if field.dtype == torch.int8 else field
        for field in fields
        if field.name != "scales"
    )


def manifest_fields(manifest: Manifest) -> tuple[Field, ...]:
    """The tensors of the shards of a manifest."""
    table, reduced = manifest.table, manifest.reduced
    dtype = table["dtype"] if reduced is None else reduced.dtype
    has_states = reduced is None or reduced.states
    return fields_of(
        table["dim"],
        getattr(torch, dtype),
        table["state_dim"] if has_states else 0,
        eviction.keeps_scores(table["eviction"]),
    )


def entry_bytes(fields: Sequence[Field]) -> int:
    """Bytes of one entry in a shard."""
    return sum(field.entry_bytes for field in fields)


def _header(fields: Sequence[Field], shard: ShardFile) -> bytes:
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


def _starts(fields: Sequence[Field], shard: ShardFile, header: bytes) -> dict[str, int]:
    starts, at = {}, len(header)
    for field in fields:
        starts[field.name] = at
        at += shard.entries * field.entry_bytes
    return starts


class Staging:
    """Host memory for batches of entries on their way between a table and a file.

    Args:
        fields: tensors of the entries.
        entries: maximal number of entries in a batch.
        pin: whether to allocate pinned memory, for copies from and to a GPU.
    """

    def __init__(self, fields: Sequence[Field], entries: int, pin: bool = False) -> None:
        self.fields = tuple(fields)
        self.entries = entries
        # A batch may begin and end within a block of the file.
        sizes = [-(-entries * field.entry_bytes // BLOCK) * BLOCK + 2 * BLOCK for field in fields]
        memory = block_memory(sum(sizes), pin)
        self._memory = {
            field.name: part for field, part in zip(fields, memory.split(sizes), strict=True)
        }

    def view(self, field: Field, lead: int, n: int) -> Tensor:
        """A tensor of ``n`` entries that begins ``lead`` bytes into the first block."""
        part = self._memory[field.name][lead : lead + n * field.entry_bytes]
        return part.view(field.dtype).view(field.shape(n))

    def blocks(self, field: Field) -> memoryview:
        """The whole memory of a field."""
        return host_memory(self._memory[field.name])

    def keep(self, field: Field, begin: int, end: int) -> None:
        """Moves the bytes of an incomplete block to the beginning."""
        memory = self._memory[field.name]
        memory[: end - begin] = memory[begin:end]


class ShardWriter:
    """A context manager that writes a new shard in batches.

    Whole blocks are written as they are complete. Blocks that two tensors share, or a tensor and
    the header, are written at the end.

    Args:
        path: path of the file.
        staging: memory for batches, used by this shard only.
        owners: range ``[first, end)`` of owner buckets of the ids.
        entries: number of entries that will be written.
    """

    def __init__(
        self,
        path: Path,
        staging: Staging,
        owners: tuple[int, int],
        entries: int,
    ) -> None:
        fields = staging.fields
        size = entries * entry_bytes(fields)
        shard = ShardFile(path.name, *owners, entries, size, {})
        header = _header(fields, shard)
        self._shard = dataclasses.replace(shard, bytes=len(header) + size)
        self._staging = staging
        self._starts = _starts(fields, shard, header)
        self._at = dict(self._starts)
        self._crc32 = {field.name: 0 for field in fields}
        self._written = 0
        self._edges: list[tuple[int, bytes]] = [(0, header)]
        self._file = BlockFile(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct=self._shard.bytes >= _DIRECT_BYTES
        )

    def memory(self, n: int) -> dict[str, Tensor]:
        """Memory for the next ``n`` entries, by name; ``n`` is limited by the staging."""
        return {
            field.name: self._staging.view(field, self._at[field.name] % BLOCK, n)
            for field in self._staging.fields
        }

    def write(self, n: int) -> None:
        """Writes ``n`` entries that were put into :meth:`memory`."""
        for field in self._staging.fields:
            self._write(field, n * field.entry_bytes)
        self._written += n

    def append(self, batch: dict[str, Tensor]) -> None:
        """Writes entries from other memory."""
        for first in range(0, len(batch["ids"]), self._staging.entries):
            part = {name: tensor[first:][: self._staging.entries] for name, tensor in batch.items()}
            n = len(part["ids"])
            for name, to in self.memory(n).items():
                to.copy_(part[name])
            self.write(n)

    def _write(self, field: Field, size: int) -> None:
        name = field.name
        start, at = self._starts[name], self._at[name]
        first = at - at % BLOCK  # offset in the file of the beginning of the memory
        blocks = self._staging.blocks(field)
        end = at + size
        self._crc32[name] = checksums.crc32(blocks[at - first : end - first], self._crc32[name])
        self._at[name] = end
        last = end - end % BLOCK
        if last == first:
            return  # the block is not complete yet
        begin = first
        if start > first:
            begin = first + BLOCK
            self._edges.append((start, bytes(blocks[start - first : BLOCK])))
        self._file.write_blocks(blocks[begin - first : last - first], begin)
        self._staging.keep(field, last - first, end - first)

    @property
    def remaining_entries(self) -> int:
        """Number of entries that are still to be written."""
        return self._shard.entries - self._written

    def finish(self) -> ShardFile:
        """Flushes the file to the disk; returns its description for the manifest."""
        for field in self._staging.fields:
            start, at = self._starts[field.name], self._at[field.name]
            first = at - at % BLOCK
            begin = max(start, first)
            rest = self._staging.blocks(field)[begin - first : at - first]
            self._edges.append((begin, bytes(rest)))
        for at, data in self._edges:
            self._file.write(data, at)
        self._file.sync()
        return dataclasses.replace(self._shard, crc32=self._crc32)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def compressed(path: Path, shard: ShardFile) -> ShardFile:
    """Replaces a shard's file by a compressed one; returns its description for the manifest."""
    into = path.with_name(path.name + SUFFIX)
    compress(path, into)
    path.unlink()
    return dataclasses.replace(shard, file=into.name)


class ShardReader:
    """A context manager that reads a shard in batches.

    Args:
        path: path of the file.
        fields: the tensors that it must have.
        shard: its description in the manifest.

    Raises:
        ValueError: the file is missing, or does not match the manifest.
    """

    def __init__(self, path: Path, fields: Sequence[Field], shard: ShardFile) -> None:
        self._path = path
        self._fields = fields
        self._shard = shard
        header = _header(fields, shard)
        self._starts = _starts(fields, shard, header)
        try:
            self._file: BlockFile | ZstdFile
            if path.suffix == SUFFIX:
                self._file = ZstdFile(path)
            else:
                self._file = BlockFile(path, os.O_RDONLY, direct=shard.bytes >= _DIRECT_BYTES)
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        try:
            size = self._file.size()
            if size != shard.bytes:
                what = "cut short" if size < shard.bytes else "too long"
                raise ValueError(f"{path} is {what}: it has {size} bytes instead of {shard.bytes}.")
            if len(header) + shard.entries * entry_bytes(fields) != size:
                raise ValueError(f"{path} has {size} bytes, which does not match its entries.")
            if self._file.read(len(header), 0) != header:
                raise ValueError(f"{path} is damaged: its header is not what its manifest implies.")
        except ValueError:
            self._file.close()
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batches(self, *stagings: Staging) -> Iterator[dict[str, Tensor]]:
        """Entries in the order of the file.

        Args:
            stagings: memory for batches of one size, used in turn; only its fields are read.

        Returns:
            Batches as views of this memory, each valid until another batch uses its memory.
        """
        size = stagings[0].entries
        for number, first in enumerate(range(0, self._shard.entries, size)):
            staging = stagings[number % len(stagings)]
            yield self.read(first, min(size, self._shard.entries - first), staging)

    def read(self, first: int, n: int, staging: Staging) -> dict[str, Tensor]:
        """Reads ``n`` entries from number ``first`` on: views of the staging memory, for the fields
        in it."""
        return {field.name: self._read(field, first, n, staging) for field in staging.fields}

    def _read(self, field: Field, first: int, n: int, staging: Staging) -> Tensor:
        at = self._starts[field.name] + first * field.entry_bytes
        lead = at % BLOCK
        needed = lead + n * field.entry_bytes
        blocks = staging.blocks(field)[: needed + -needed % BLOCK]
        got = self._file.read_blocks(blocks, at - lead, needed)
        if got < needed:
            raise ValueError(f"{self._path} is cut short: it ends at byte {at - lead + got}.")
        return staging.view(field, lead, n)

    def verified_batches(self, *stagings: Staging) -> Iterator[dict[str, Tensor]]:
        """Like :meth:`batches`, but verifies the checksums after the last batch.

        Raises:
            ValueError: a checksum differs from the manifest's.
        """
        return self.verified(self.batches(*stagings))

    def verified(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yields the batches of the file, and verifies their checksums after the last one.

        Raises:
            ValueError: a checksum differs from the manifest's.
        """
        crc32 = {field.name: 0 for field in self._fields}
        for batch in batches:
            for name, tensor in batch.items():
                crc32[name] = checksums.crc32(host_memory(tensor), crc32[name])
            yield batch
        for name, value in crc32.items():
            expected = self._shard.crc32.get(name)
            if value != expected:
                raise ValueError(
                    f"{self._path} is damaged: the checksum of its {name} is {value}, but the "
                    f"manifest has {expected}."
                )
