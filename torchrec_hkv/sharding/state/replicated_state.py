"""The saved state of tables that every rank holds: plain tensors, as of replicated parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from torchrec_hkv.backends.protocol import Backend, OptimizerSpec, TableShard, TensorSpec
from torchrec_hkv.sharding.state.sharded_state import SHARDS_KEY, TableState


class ReplicatedState(TableState):
    """As :class:`TableState` of a table with one shard, which every rank takes for its own."""

    @classmethod
    def of_table(
        cls, backend: Backend, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> ReplicatedState:
        """The state of a table.

        Raises:
            ValueError: the backend names a tensor as TableState does.
        """
        spec = dict(backend.state_spec(shard, optimizer))
        if SHARDS_KEY in spec:
            raise ValueError(
                f"Backend {backend.name!r} calls a tensor of its state {SHARDS_KEY!r}: "
                "that name is taken."
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
        """The table as it is on this rank.

        Args:
            rank: this rank.
            exported: the backend's export, by the shard's key.
        """
        state = dict(exported[self.shards[0].key])
        if SHARDS_KEY in self.specs[0]:
            state[SHARDS_KEY] = torch.ones(1, dtype=torch.int64)
        return {key: state[key] for key in self.keys}
