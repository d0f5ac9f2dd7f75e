"""The saved state of tables of ours: sharded tensors, described without asking other ranks.

Everything a rank must know of the others follows from the plan, so that one rank may call
``state_dict`` alone.
"""

from __future__ import annotations

import dataclasses
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

#: In the state of every table: the number of shards it was saved from, once for each shard. Its
#: global size is that number, so that loading at another world size fails before anything is read.
SHARDS_KEY = "shards"

_SHARDS_SPEC = TensorSpec(shape=(1,), dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class TableState:
    """How the state of one table lies over the ranks.

    Attributes:
        name: the table's.
        ranks: the rank of each shard.
        placements: where TorchRec placed each shard.
        specs: the tensors of each shard.
    """

    name: str
    ranks: tuple[int, ...]
    placements: tuple[_remote_device, ...]
    specs: tuple[Mapping[str, TensorSpec], ...]

    @classmethod
    def of(
        cls,
        backend: Backend,
        sharding: ParameterSharding,
        shards: list[TableShard],
        optimizer: OptimizerSpec | None,
    ) -> TableState:
        """The state of a table as planned.

        Raises:
            ValueError: the backend names a tensor as this module does.
        """
        specs = []
        for shard in shards:
            spec = dict(backend.state_spec(shard, optimizer))
            if SHARDS_KEY in spec:
                raise ValueError(
                    f"Backend {backend.name!r} calls a tensor of its state {SHARDS_KEY!r}: "
                    "that name is taken."
                )
            specs.append({**spec, SHARDS_KEY: _SHARDS_SPEC})
        placements = tuple(_placement(shard) for shard in sharding.sharding_spec.shards)
        return cls(
            name=shards[0].name,
            ranks=tuple(placement.rank() for placement in placements),
            placements=placements,
            specs=tuple(specs),
        )

    @property
    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self.specs[0])

    def sharded_tensors(
        self, rank: int, exported: Mapping[str, torch.Tensor] | None
    ) -> dict[str, ShardedTensor]:
        """This rank's part of the table as sharded tensors.

        Args:
            rank: this rank.
            exported: the backend's export of its shard, None where this rank holds none.
        """
        local: dict[str, torch.Tensor] = {}
        if exported is not None:
            local = dict(exported)
            local[SHARDS_KEY] = torch.tensor([len(self.specs)], dtype=torch.int64)
        return {key: self._sharded_tensor(key, rank, local.get(key)) for key in self.keys}

    def _sharded_tensor(self, key: str, rank: int, local: torch.Tensor | None) -> ShardedTensor:
        shards: list[ShardMetadata] = []
        local_shards: list[Shard] = []
        rows = 0
        for spec, placement in zip(self.specs, self.placements, strict=True):
            shape = spec[key].shape
            if local is not None and local.device.type != placement.device().type:
                # A backend may export what it keeps in host memory from there.
                placement = _remote_device(f"rank:{placement.rank()}/{local.device}")
            metadata = ShardMetadata(
                shard_offsets=[rows] + [0] * (len(shape) - 1),
                shard_sizes=list(shape),
                placement=placement,
            )
            shards.append(metadata)
            rows += shape[0]
            if placement.rank() == rank and local is not None:
                local_shards.append(Shard(tensor=local, metadata=metadata))
        metadata = ShardedTensorMetadata(
            shards_metadata=shards,
            size=torch.Size([rows, *self.specs[0][key].shape[1:]]),
            tensor_properties=TensorProperties(dtype=self.specs[0][key].dtype),
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local_shards=local_shards, sharded_tensor_metadata=metadata
        )

    def local_state(self, rank: int, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """This rank's part of sharded tensors, checked.

        Args:
            rank: this rank.
            tensors: by key, as :meth:`sharded_tensors` gives them; plain tensors where the table
                has a single shard.

        Returns:
            What the backend exported, None where this rank holds no shard.

        Raises:
            ValueError: a tensor is missing, or its shape, dtype or number of shards is another.
        """
        missing = [key for key in self.keys if key not in tensors]
        if missing:
            raise ValueError(
                f"The state of table {self.name!r} lacks {missing}: needed are {self.keys}."
            )
        for key in self.keys:
            self._check_sharding(key, tensors[key])
        if rank not in self.ranks:
            return None
        spec = self.specs[self.ranks.index(rank)]
        state = {key: self._local_tensor(key, tensors[key]) for key in self.keys}
        for key, tensor in state.items():
            if tuple(tensor.shape) != spec[key].shape or tensor.dtype != spec[key].dtype:
                raise ValueError(
                    f"In the state of table {self.name!r}, {key!r} has shape {tuple(tensor.shape)} "
                    f"and dtype {tensor.dtype} on rank {rank}: needed are {spec[key].shape} and "
                    f"{spec[key].dtype}."
                )
        saved_shards = int(state.pop(SHARDS_KEY))
        if saved_shards != len(self.specs):
            raise ValueError(self.other_world_size(saved_shards))
        return state

    def _check_sharding(self, key: str, tensor: Any) -> None:
        if not isinstance(tensor, ShardedTensor):
            if isinstance(tensor, torch.Tensor) and len(self.specs) == 1:
                return
            raise ValueError(
                f"In the state of table {self.name!r}, {key!r} is a {type(tensor).__name__}: "
                f"needed is a ShardedTensor of {len(self.specs)} shards."
            )
        count = len(tensor.metadata().shards_metadata)
        if count != len(self.specs):
            raise ValueError(self.other_world_size(count))

    def _local_tensor(self, key: str, tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, ShardedTensor):
            return tensor
        local = tensor.local_shards()
        if len(local) != 1:
            raise ValueError(
                f"In the state of table {self.name!r}, {key!r} has {len(local)} shards on this "
                "rank: needed is one."
            )
        return local[0].tensor

    def other_world_size(self, saved_shards: int) -> str:
        """The sentence that refuses a state of another number of shards."""
        return (
            f"The state of table {self.name!r} was saved from {saved_shards} shards and the table "
            f"has {len(self.specs)}: load it with the number of ranks and the sharding type it was "
            "saved with."
        )


def _placement(shard: ShardMetadata) -> _remote_device:
    placement = shard.placement
    return placement if isinstance(placement, _remote_device) else _remote_device(placement)
