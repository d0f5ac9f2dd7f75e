"""The saved state of tables on backends: sharded tensors, created without communication.

A rank knows everything about the shards of other ranks from the plan, so a single rank may call
``state_dict``.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import TensorProperties
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.types import (
    ParameterSharding,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
)

from torchrec_hkv.backends.protocol import Backend, OptimizerSpec, TableShard, TensorSpec

#: Name of a tensor in the state of a table: the number of shards, once for each shard. Its global
#: size is this number, so loading at another world size fails before data is read.
SHARDS_KEY = "shards"

#: Number of owner buckets. Each rank owns a range of them in a table that is sharded by hash.
OWNER_BUCKETS = 1 << 16

#: Name of the tensor that replaces :data:`SHARDS_KEY` in tables with exchange: the layout over the
#: ranks.
LAYOUT_KEY = "layout"

_SHARDS_SPEC = TensorSpec(shape=(1,), dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class ShardedTableState:
    """The distribution of one table's state over the ranks.

    Tensors with two dimensions are distributed like the shards: row shards below each other, column
    shards side by side. Tensors with one dimension, such as ids, are stacked.

    Attributes:
        name: name of the table.
        shards: all shards of the table.
        ranks: rank of each shard.
        placements: TorchRec's placement of each shard.
        specs: tensors of each shard.
        is_dense: whether the state looks like that of a stock table: only the weight, by row
            number.
        layout: for tables with exchange (:meth:`Backend.exchanges`), a number that is equal for
            equal distributions over ranks; else None.
    """

    name: str
    shards: tuple[TableShard, ...]
    ranks: tuple[int, ...]
    placements: tuple[_remote_device, ...]
    specs: tuple[Mapping[str, TensorSpec], ...]
    is_dense: bool
    layout: int | None = None

    @classmethod
    def of(
        cls,
        backend: Backend,
        sharding: ParameterSharding,
        shards: list[TableShard],
        optimizer: OptimizerSpec | None,
    ) -> ShardedTableState:
        """The state of a planned table.

        Raises:
            ValueError: the backend uses a reserved name for a tensor.
        """
        is_dense = backend.is_dense(shards[0].options)
        exchanges = backend.exchanges(shards[0].options)
        specs = []
        for shard in shards:
            spec = dict(backend.state_spec(shard, optimizer))
            for name in (SHARDS_KEY, LAYOUT_KEY):
                if name in spec:
                    raise ValueError(
                        f"Backend {backend.name!r} has a state tensor {name!r}, but this name is "
                        "reserved: use another name."
                    )
            if exchanges and shard.row_offset == shard.column_offset == 0:
                spec[LAYOUT_KEY] = _SHARDS_SPEC
            if not is_dense and not exchanges:
                spec[SHARDS_KEY] = _SHARDS_SPEC
            specs.append(spec)
        placements = tuple(_placement(shard) for shard in sharding.sharding_spec.shards)
        return cls(
            name=shards[0].name,
            shards=tuple(shards),
            ranks=tuple(placement.rank() for placement in placements),
            placements=placements,
            specs=tuple(specs),
            is_dense=is_dense,
            layout=_layout_number(backend, shards, optimizer) if exchanges else None,
        )

    @property
    def keys(self) -> list[str]:
        """The names of all tensors; a shard may lack some of them."""
        return list({key: None for spec in self.specs for key in spec})

    def owners(self, shard: TableShard) -> tuple[int, int]:
        """Range ``[first, end)`` of owner buckets of a shard in a table that is sharded by hash.
        The row shards own contiguous ranges."""
        offsets = sorted({shard.row_offset for shard in self.shards})
        at, count = offsets.index(shard.row_offset), len(offsets)
        return -(-at * OWNER_BUCKETS // count), -(-(at + 1) * OWNER_BUCKETS // count)

    def keys_on(self, rank: int) -> list[str]:
        """The keys of the shards that a rank holds."""
        pairs = zip(self.shards, self.ranks, strict=True)
        return [shard.key for shard, holder in pairs if holder == rank]

    def sharded_tensors(
        self, rank: int, exported: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> dict[str, ShardedTensor]:
        """This rank's part of the table as sharded tensors.

        Args:
            rank: this rank.
            exported: the backend's export of each shard on this rank, by shard key.
        """
        rank_tensors = {
            SHARDS_KEY: torch.tensor([len(self.specs)], dtype=torch.int64),
            LAYOUT_KEY: torch.tensor([self.layout or 0], dtype=torch.int64),
        }
        return {
            key: self._sharded_tensor(
                key,
                rank,
                {
                    shard: rank_tensors[key] if key in rank_tensors else tensors[key]
                    for shard, tensors in exported.items()
                    if key in rank_tensors or key in tensors
                },
            )
            for key in self.keys
        }

    def _sharded_tensor(
        self, key: str, rank: int, local: Mapping[str, torch.Tensor]
    ) -> ShardedTensor:
        offsets, size = self._layout(key)
        metadata: list[ShardMetadata] = []
        local_shards: list[Shard] = []
        for index, shard in enumerate(self.shards):
            if key not in self.specs[index]:
                continue
            placement = self.placements[index]
            tensor = local.get(shard.key) if placement.rank() == rank else None
            if tensor is not None and tensor.device.type != placement.device().type:
                # A backend may export tensors in host memory.
                placement = _remote_device(f"rank:{placement.rank()}/{tensor.device}")
            metadata.append(
                ShardMetadata(
                    shard_offsets=list(offsets[index]),
                    shard_sizes=list(self.specs[index][key].shape),
                    placement=placement,
                )
            )
            if tensor is not None:
                local_shards.append(Shard(tensor=tensor, metadata=metadata[-1]))
        metadata_dtype = next(spec[key].dtype for spec in self.specs if key in spec)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local_shards=local_shards,
            sharded_tensor_metadata=ShardedTensorMetadata(
                shards_metadata=metadata,
                size=torch.Size(size),
                tensor_properties=TensorProperties(dtype=metadata_dtype),
            ),
        )

    def _layout(self, key: str) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
        """The offsets of each shard's tensor by shard index, and the size of the whole tensor."""
        having = sorted(
            (index for index, spec in enumerate(self.specs) if key in spec),
            key=lambda i: (self.shards[i].row_offset, self.shards[i].column_offset),
        )
        shapes = {index: self.specs[index][key].shape for index in having}
        first = shapes[having[0]]
        if len(first) == 1:
            bounds = _starts([shapes[index][0] for index in having])
            return {i: (start,) for i, start in zip(having, bounds[:-1], strict=True)}, (
                bounds[-1],
            )
        shards = {index: self.shards[index] for index in having}
        rows = _starts_by({shards[i].row_offset: shapes[i][0] for i in having})
        columns = _starts_by({shards[i].column_offset: shapes[i][1] for i in having})
        offsets = {
            i: (
                rows[0][shards[i].row_offset],
                columns[0][shards[i].column_offset],
                *[0] * (len(shapes[i]) - 2),
            )
            for i in having
        }
        return offsets, (rows[1], columns[1], *first[2:])

    def local_states(
        self, rank: int, tensors: Mapping[str, Any]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Checks sharded tensors and returns this rank's part of them.

        Args:
            rank: this rank.
            tensors: results of :meth:`sharded_tensors` by name; plain tensors if the table has a
                single shard.

        Returns:
            The backend's export of each shard on this rank, by shard key.

        Raises:
            ValueError: a tensor is missing, or has another shape, dtype or number of shards.
        """
        missing = [key for key in self.keys if key not in tensors]
        if missing:
            raise ValueError(
                f"The state of table {self.name!r} lacks {missing}: it needs {self.keys}."
            )
        for key in self.keys:
            self._check_sharding(key, tensors[key])
        shard_indices = [index for index, holder in enumerate(self.ranks) if holder == rank]
        states: dict[str, dict[str, torch.Tensor]] = {self.shards[i].key: {} for i in shard_indices}
        for key in self.keys:
            having = [index for index in shard_indices if key in self.specs[index]]
            local = self._local_tensors(key, tensors[key], having)
            for index, tensor in zip(having, local, strict=True):
                states[self.shards[index].key][key] = tensor
        for index in shard_indices:
            self._check_tensors(rank, self.specs[index], states[self.shards[index].key])
        return states

    def _check_tensors(
        self, rank: int, spec: Mapping[str, TensorSpec], state: dict[str, torch.Tensor]
    ) -> None:
        for key, tensor in state.items():
            if tuple(tensor.shape) != spec[key].shape or tensor.dtype != spec[key].dtype:
                raise ValueError(
                    f"In the state of table {self.name!r}, {key!r} has shape {tuple(tensor.shape)} "
                    f"and dtype {tensor.dtype} on rank {rank}, but must have {spec[key].shape} and "
                    f"{spec[key].dtype}."
                )
        if self.is_dense or self.layout is not None:
            return
        saved_shards = int(state.pop(SHARDS_KEY))
        if saved_shards != len(self.specs):
            raise ValueError(self.other_world_size(saved_shards))

    def _check_sharding(self, key: str, tensor: Any) -> None:
        if not isinstance(tensor, ShardedTensor):
            if isinstance(tensor, torch.Tensor) and (self.is_dense or len(self.specs) == 1):
                return
            raise ValueError(
                f"In the state of table {self.name!r}, {key!r} is a {type(tensor).__name__}, but "
                f"must be a ShardedTensor of {len(self.specs)} shards."
            )
        count = len(tensor.metadata().shards_metadata)
        if count != sum(key in spec for spec in self.specs):
            raise ValueError(self.other_world_size(count))

    def _local_tensors(self, key: str, tensor: Any, shard_indices: list[int]) -> list[torch.Tensor]:
        """The tensors of the shards on this rank, in the order of ``shard_indices``."""
        if not isinstance(tensor, ShardedTensor):
            return [self._part(key, tensor, index) for index in shard_indices]
        local = tensor.local_shards()
        if len(local) != len(shard_indices):
            raise ValueError(
                f"In the state of table {self.name!r}, {key!r} has {len(local)} shards on this "
                f"rank, but must have {len(shard_indices)}."
            )
        return [shard.tensor for shard in local]

    def _part(self, key: str, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """A shard's part of a plain tensor; the whole tensor unless the table is dense."""
        if not self.is_dense:
            return tensor
        offsets, size = self._layout(key)
        if tuple(tensor.shape) != size:
            return tensor  # the caller refuses its shape
        first, shape = offsets[index], self.specs[index][key].shape
        return tensor[first[0] : first[0] + shape[0], first[1] : first[1] + shape[1]]

    def other_world_size(self, saved_shards: int) -> str:
        """The error message for a state with another number of shards."""
        return (
            f"The state of table {self.name!r} was saved from {saved_shards} shards and the table "
            f"has {len(self.specs)}: load it with the number of ranks and the sharding type it was "
            "saved with."
        )


def _starts(sizes: list[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _starts_by(sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """The start of each part when parts are placed in the order of their keys, and the end."""
    order = sorted(sizes)
    starts = _starts([sizes[key] for key in order])
    return dict(zip(order, starts[:-1], strict=True)), starts[-1]


def _placement(shard: ShardMetadata) -> _remote_device:
    placement = shard.placement
    return placement if isinstance(placement, _remote_device) else _remote_device(placement)


def _layout_number(
    backend: Backend, shards: list[TableShard], optimizer: OptimizerSpec | None
) -> int:
    """A number that is equal if slots have the same meaning on the same rows and columns."""
    described = sorted(
        (
            shard.row_offset,
            shard.capacity,
            shard.column_offset,
            shard.dim,
            *backend.state_geometry(shard, optimizer),
        )
        for shard in shards
    )
    return zlib.crc32(repr(described).encode())
