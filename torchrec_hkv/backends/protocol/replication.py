"""Tables that several ranks hold: data-parallel tables, and those of a ``DMPCollection``."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist

from torchrec_hkv.backends.replicas import ReplicaSync
from torchrec_hkv.backends.specs import OptimizerSpec, TableShard


class ReplicatedLookup:
    """Keeps the tables of a group equal to those of other ranks."""

    def replicate(self, process_group: dist.ProcessGroup | None) -> None:
        """Makes the tables replicas of those of the other ranks, for data-parallel sharding. Called
        once, before the first forward.

        The gradient of an update is the mean of the ranks' gradients. All ranks make the same
        number of forwards and backwards in the same order; their batch sizes may differ.

        Raises:
            ValueError: the backend does not support replicas; the default.
        """
        raise ValueError(f"{type(self).__name__} does not support data-parallel sharding.")

    def replica_sync(self, process_group: dist.ProcessGroup) -> ReplicaSync:
        """Called once, before any forward, where other groups of ranks hold the same tables and
        train them by themselves, where :meth:`Backend.check_replicas` allows it.

        Args:
            process_group: the ranks that hold the same shards, one of each group.
        """
        raise NotImplementedError


class ReplicatedBackend:
    """Tells which tables may have replicas, and what they send."""

    #: Name of the backend in ``compute_kernels`` of the constraints.
    name: ClassVar[str]

    def check_replicas(self, shard: TableShard) -> None:
        """Refuses a table whose replicas in a ``DMPCollection`` can't be brought together
        (:meth:`GroupLookup.replica_sync`).

        Raises:
            ValueError: it can't; the default.
        """
        raise ValueError(
            f"Table {shard.name!r} can't be in a DMPCollection: backend {self.name!r} does not "
            "bring replicas together. Use DistributedModelParallel."
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
            shard: the table's part.
            optimizer: None if the table is not trained.
            touched: different ids of the shard that a replica looks up from one sync to the next.
            touched_anywhere: those that some replica looks up.
            replicas: how many.
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
