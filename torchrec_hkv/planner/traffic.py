"""Bytes that ranks send each other in a step, within and between hosts, and in a sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torchrec.distributed.types import ShardingType

_ID_BYTES, _LENGTH_BYTES, _VALUE_BYTES = 8, 4, 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step, on average over all ranks.

    Attributes:
        intra_host: to ranks of its own host.
        inter_host: to ranks of other hosts.
    """

    intra_host: float = 0.0
    inter_host: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.intra_host + other.intra_host, self.inter_host + other.inter_host)

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.intra_host * factor, self.inter_host * factor)


@dataclasses.dataclass(frozen=True)
class HostTopology:
    """Ranks on hosts of equal size.

    Attributes:
        ranks: number of all ranks.
        ranks_of_host: number of ranks of each host; it divides ``ranks``.
    """

    ranks: int
    ranks_of_host: int

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.ranks // self.ranks_of_host

    def to_all(self, size: float) -> Traffic:
        """The traffic if every rank sends ``size`` bytes to each other rank."""
        intra_host_peers = self.ranks_of_host - 1
        return Traffic(size * intra_host_peers, size * (self.ranks - 1 - intra_host_peers))

    def to_one(self, size: float) -> Traffic:
        """The traffic if every rank sends ``size`` bytes to one rank."""
        return self.to_all(size) * (1 / self.ranks)


@dataclasses.dataclass(frozen=True)
class TableLookups:
    """A rank's lookups in a table, and the table's sharding.

    Attributes:
        sharding_type: TorchRec's sharding type.
        dims: number of columns of each shard.
        ids: number of ids in a rank's batch.
        bags: number of bags in a rank's batch.
        is_pooled: whether pooled bags are returned.
        replicated_bytes: maximal bytes of the gradient of a data-parallel table.
    """

    sharding_type: str
    dims: Sequence[int]
    ids: float
    bags: float
    is_pooled: bool
    replicated_bytes: float = 0.0

    @property
    def outputs(self) -> float:
        """Rows that come back for a rank's batch."""
        return self.bags if self.is_pooled else self.ids


def step_traffic(table: TableLookups, hosts: HostTopology) -> Traffic:
    """The traffic of one table: ids and lengths of bags, outputs, and gradients.

    Ids take 8 bytes, lengths and values 4. Row-wise pooled outputs count as a reduce-scatter in
    which each rank sends its partial sums to each other rank; gradients take the same way back.
    """
    ids, lengths = _ID_BYTES * table.ids, _LENGTH_BYTES * table.bags
    outputs = [_VALUE_BYTES * table.outputs * dim for dim in table.dims]
    ranks, local, number = hosts.ranks, hosts.ranks_of_host, hosts.hosts
    total = Traffic()
    match table.sharding_type:
        case ShardingType.DATA_PARALLEL.value:
            # In a ring, each host sends to one other host only.
            sent = 2 * (ranks - 1) / ranks * table.replicated_bytes
            leaves = sent / local if number > 1 else 0.0
            return Traffic(sent - leaves, leaves)
        case ShardingType.ROW_WISE.value:
            # All shards have all columns. For a bag, each rank sends a partial sum; a row of a
            # sequence comes from one rank.
            part = outputs[0] if table.is_pooled else outputs[0] / ranks
            return hosts.to_all(ids / ranks + lengths + 2 * part)
        case ShardingType.TABLE_ROW_WISE.value | ShardingType.GRID_SHARD.value:
            for output in outputs:
                total += hosts.to_one(ids / local + lengths)
                # The ranks of a host first sum among themselves, then send each bag to one host.
                within, across = (local - 1) * number * output, (number - 1) * output
                total += Traffic(within, across) * (2 / ranks)
        case _:
            for output in outputs:
                total += hosts.to_one(ids + lengths + 2 * output)
    return total


def ring_bytes(size: float, replicas: int) -> float:
    """Bytes that a rank sends in an all-reduce of ``size`` bytes."""
    return 2 * size * (replicas - 1) / replicas
