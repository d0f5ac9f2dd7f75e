"""One kind of table."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from torchrec_hkv.backends.protocol.choices import BackendChoices
from torchrec_hkv.backends.protocol.costs import BackendCosts
from torchrec_hkv.backends.protocol.entries import EntriesBackend
from torchrec_hkv.backends.protocol.files import FilesBackend
from torchrec_hkv.backends.protocol.group_lookup import GroupLookup
from torchrec_hkv.backends.protocol.replication import ReplicatedBackend
from torchrec_hkv.backends.protocol.state_dict import StateDictBackend
from torchrec_hkv.backends.specs import BackendOptions, OptimizerSpec, TableShard


class Backend(
    BackendCosts,
    BackendChoices,
    StateDictBackend,
    EntriesBackend,
    FilesBackend,
    ReplicatedBackend,
    abc.ABC,
):
    """One kind of table: its options, its limits, its storage and how to create it."""

    #: Name of the backend in ``compute_kernels`` of the constraints.
    name: ClassVar[str]
    #: The options class; its default instance is used if the user gives no options.
    options_type: ClassVar[type[BackendOptions]]
    #: TorchRec sharding types (``ShardingType.….value``) that pooled tables support.
    sharding_types: ClassVar[tuple[str, ...]]
    #: How row-wise sharding maps ids to ranks. ``"hashed"`` takes any int64 and routes by
    #: :func:`torchrec_hkv.hash_table.owner_rank`. ``"block"`` takes row numbers, in contiguous
    #: blocks.
    routing: ClassVar[Literal["hashed", "block"]]

    #: Allowed arguments of :meth:`GroupLookup.set_output_dtype`.
    output_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    #: Whether lookups support :meth:`GroupLookup.accumulate`.
    accumulates: ClassVar[bool] = False

    def routes_by_hash(self, options: BackendOptions) -> bool:
        """Whether ids of a table with these options are mapped to ranks by hash. The default
        follows :attr:`routing`."""
        return self.routing == "hashed"

    @abc.abstractmethod
    def check(self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str) -> None:
        """Checks whether the backend can serve a table.

        Raises:
            ValueError: the backend can't. The message names the table, the value and what is
                allowed.
        """

    @abc.abstractmethod
    def create_lookup(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> GroupLookup:
        """Creates the tables of a group.

        Args:
            shards: this rank's part of each table; all have the same dtype and pooling.
            feature_tables: index of the table of each feature of the group.
            optimizer: the fused optimizer; None if no optimizer was applied, so that the tables
                are not trained.
            device: device of the tables.
        """
