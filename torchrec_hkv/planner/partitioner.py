"""Assigns shards to ranks: optimally for a few shards, otherwise by TorchRec's greedy algorithm and
a search if that fails."""

from __future__ import annotations

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)

from torchrec_hkv.planner.packing import ShardNeeds, free_memory, is_placed, pack


class SearchingPartitioner(GreedyPerfPartitioner):
    """TorchRec's partitioner with a search, for options whose shards go to all ranks or to single
    ranks.

    A few shards are assigned so that the slowest rank is as fast as possible. Many shards are
    assigned as in TorchRec, the largest first, each to the rank with the least time so far. If
    memory keeps a shard from that rank, other assignments are tried, and shards are moved or
    swapped as long as the slowest rank becomes faster.
    """

    def partition(
        self,
        proposal: list[ShardingOption],
        storage_constraint: Topology,
        hbm_per_device: int | None = None,
    ) -> list[ShardingOption]:
        """Assigns a rank to each shard.

        Args:
            proposal: one option per table.
            storage_constraint: memory of the ranks.
            hbm_per_device: overrides the HBM of each rank, see TorchRec.

        Raises:
            PlannerError: no assignment was found.
        """
        if hbm_per_device is not None or not all(is_placed(option) for option in proposal):
            return super().partition(proposal, storage_constraint, hbm_per_device)
        packed = pack(list(map(ShardNeeds, proposal)), free_memory(storage_constraint))
        if packed is None:
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message="No assignment of shards to ranks fits in the memory of all ranks.",
            )
        devices = storage_constraint.devices
        for option, ranks in zip(proposal, packed, strict=True):
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = devices[rank].rank
        return proposal
