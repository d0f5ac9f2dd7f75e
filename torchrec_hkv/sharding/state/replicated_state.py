"""The saved state of data-parallel tables: plain tensors, like those of replicated parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from torchrec_hkv.backends.protocol import Backend, OptimizerSpec, TableShard, TensorSpec
from torchrec_hkv.sharding.state.sharded_state import SHARDS_KEY, ShardedTableState


class ReplicatedState(ShardedTableState):
    """A :class:`ShardedTableState` with a single shard, which every rank holds."""

    @classmethod
    def of_table(
        cls, backend: Backend, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> ReplicatedState:
        """The state of a table.

        Raises:
            ValueError: the backend uses a reserved name for a tensor.
        """
        spec = dict(backend.state_spec(shard, optimizer))
        if SHARDS_KEY in spec:
            raise ValueError(
                f"Backend {backend.name!r} has a state tensor {SHARDS_KEY!r}, but this name is "
                "reserved: use another name."
            )
        is_dense = backend.is_dense(shard.options)
        if not is_dense:
            spec[SHARDS_KEY] = TensorSpec(shape=(1,), dtype=torch.int64)
        return cls(
            name=shard.name,
            shards=(shard,),
            ranks=(dist.get_rank(),),
            placements=(),
            specs=(spec,),
            is_dense=is_dense,
        )

    def sharded_tensors(
        self, rank: int, exported: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """The table on this rank, as plain tensors.

        Args:
            rank: this rank.
            exported: the backend's export by shard key.
        """
        state = dict(exported[self.shards[0].key])
        if SHARDS_KEY in self.specs[0]:
            state[SHARDS_KEY] = torch.ones(1, dtype=torch.int64)
        return {key: state[key] for key in self.keys}
