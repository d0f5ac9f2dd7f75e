"""Costs of a table, which the planner adds up: memory, and work in a step."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torchrec_hkv.backends.calibration import CalibrationCase
from torchrec_hkv.backends.specs import OptimizerSpec, StorageBytes, TableShard
from torchrec_hkv.backends.workload import Work, Workload, row_work


class BackendCosts(abc.ABC):
    """Estimates the memory and the work of a table."""

    @abc.abstractmethod
    def storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        """Bytes of the shard: rows, optimizer states and index."""

    def scratch(
        self, shard: TableShard, load: Workload, device_type: str, replicated: bool
    ) -> StorageBytes:
        """Peak bytes of temporary memory in a step, without :meth:`storage`, ids and output; 0 by
        default.

        Args:
            shard: the part of the table on one rank.
            load: the step's ids in the shard.
            device_type: ``"cpu"`` or ``"cuda"``.
            replicated: whether the table is data-parallel, so that its gradient is averaged over
                ranks.
        """
        return StorageBytes(hbm=0, host=0)

    def far_share(
        self, shard: TableShard, optimizer: OptimizerSpec | None, load: Workload, device_type: str
    ) -> float:
        """Share of a step's rows that a GPU reads from host memory; 0 by default."""
        return 0.0

    @abc.abstractmethod
    def lookup_bandwidth(self, device_type: str, hbm_bw: float, host_bw: float) -> float:
        """Bytes of rows that a lookup reads in a millisecond, from the topology's bandwidths.

        The planner uses it for backends without calibration (:meth:`calibration_cases`).
        """

    def work(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        load: Workload,
        device_type: str,
    ) -> Work:
        """Amounts of work in a step on a shard; calibrated constants give the time of each unit.

        The default is the work of a table that reads and writes whole rows.

        Args:
            shard: the part of the table on one rank.
            optimizer: the fused optimizer; None if the table is not trained.
            load: the step's ids in the shard.
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        storage = self.storage(shard, optimizer, device_type)
        return row_work(load, shard.dim, (storage.hbm + storage.host) / shard.capacity)

    def calibration_cases(self, device_type: str) -> Sequence[CalibrationCase]:
        """Tables that ``torchrec-hkv calibrate`` times to fit the constants; none by default."""
        return ()
