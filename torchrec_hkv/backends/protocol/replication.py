"""Tables that several ranks hold: data-parallel tables, and those of a ``DMPCollection``."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist

from torchrec_hkv.backends.replicas import ReplicaSync
from torchrec_hkv.backends.specs import OptimizerSpec, TableShard


class ReplicatedLookup:
    """Keeps the tables of a group equal to those of other ranks."""

    def replicate(self, process_group: dist.ProcessGroup | None) -> None:
        """Makes the tables replicas of those on the other ranks, for data-parallel sharding. Called
        once, before the first forward.

        The gradient of an update is the mean of the ranks' gradients. All ranks make the same
        number of forwards and backwards in the same order; their batch sizes may differ.

        Raises:
            ValueError: the backend does not support replicas. The default raises.
        """
        raise ValueError(f"{type(self).__name__} does not support data-parallel sharding.")

    def replica_sync(self, process_group: dist.ProcessGroup) -> ReplicaSync:
        """Creates the sync with other groups of ranks that hold the same tables and train them by
        themselves. Called once, before any forward, if :meth:`Backend.check_replicas` allows it.

        Args:
            process_group: the ranks that hold the same shards, one of each group.
        """
        raise NotImplementedError


class ReplicatedBackend:
    """Tells which tables may have replicas, and how many bytes their syncs send."""

    #: Name of the backend in ``compute_kernels`` of the constraints.
    name: ClassVar[str]

    def check_replicas(self, shard: TableShard) -> None:
        """Checks that the replicas of a table in a ``DMPCollection`` can be merged
        (:meth:`GroupLookup.replica_sync`).

        Raises:
            ValueError: they can't. The default raises.
        """
        raise ValueError(
            f"Table {shard.name!r} can't be in a DMPCollection: backend {self.name!r} can't sync "
            "replicas. Use DistributedModelParallel."
        )

    def sync_bytes(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        touched: float,
        touched_anywhere: float,
        replicas: int,
        device_type: str,
    ) -> float:
        """Bytes that a rank sends for a shard in a sync of replicas; 0 by default. An all-reduce of
        n bytes counts as ``2 n (replicas - 1) / replicas``.

        Args:
            shard: the part of the table on one rank.
            optimizer: the fused optimizer; None if the table is not trained.
            touched: number of unique ids of the shard that a replica looks up between two syncs.
            touched_anywhere: number of unique ids that any replica looks up between two syncs.
            replicas: number of replicas.
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        return 0.0

    def gradient_bytes(self, shard: TableShard) -> float:
        """Bytes of the gradient that ranks average in a step of a data-parallel table; 0 by
        default.

        Args:
            shard: the whole table.
        """
        return 0.0
