"""The saved state of tables that every rank holds: plain tensors, as of replicated parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from torchrec_hkv.backends.protocol import Backend, OptimizerSpec, TableShard
from torchrec_hkv.sharding.state import SHARDS_KEY, TableState, shard_spec


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
        spec = shard_spec(backend, shard, optimizer)
        is_dense = backend.is_dense(shard.options)
        return cls(shard.name, (shard,), (dist.get_rank(),), (), (spec,), is_dense)

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
