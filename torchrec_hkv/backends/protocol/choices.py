"""Choices of the planner for a table: other options, or another kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from torchrec_hkv.backends.specs import BackendOptions, Kept, OptimizerSpec, TableShard
from torchrec_hkv.backends.workload import IdFrequencies


class BackendChoices:
    """Tells the planner which options a table may have and how much quality they lose."""

    #: Name of the backend in ``compute_kernels`` of the constraints.
    name: ClassVar[str]

    def disadvantage(self, shard: TableShard) -> str | None:
        """The reason why a stock kernel would serve the table better; None, the default, if there
        is no such reason. The planner then skips the backend if the table's constraint allows
        other kernels, and warns if it does not."""
        return None

    def kept(
        self,
        table: TableShard,
        num_embeddings: int,
        dtype: torch.dtype,
        frequencies: IdFrequencies | None,
    ) -> Sequence[Kept]:
        """Estimates how much quality a table keeps, compared with a dense row per id.

        The planner uses options that lose quality only if memory requires it. The default is an
        empty sequence: nothing is lost.

        Args:
            table: the whole table with its options.
            num_embeddings: ``num_embeddings`` of the table's config.
            dtype: data type of the table's config.
            frequencies: frequencies of the table's ids; None if all are equally frequent.
        """
        return ()

    def variants(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        device_type: str,
        frequencies: IdFrequencies | None,
    ) -> Sequence[BackendOptions]:
        """Options that the planner may use instead of the shard's options, if these leave sizes
        open, such as ranks or bytes in HBM. The planner chooses among them if the table's
        constraint leaves the kernel open. The default is an empty sequence.

        Args:
            shard: the part of the table on one rank.
            optimizer: the fused optimizer; None if the table is not trained.
            device_type: ``"cpu"`` or ``"cuda"``.
            frequencies: frequencies of the table's ids; None if unknown.
        """
        return ()

    def leaves_sizes_open(self, options: BackendOptions) -> bool:
        """Whether the planner must replace these options by one of :meth:`variants`."""
        return False

    def on_host(self, options: BackendOptions) -> BackendOptions:
        """The same options with all rows in host memory and none in HBM.

        Raises:
            ValueError: the backend does not support it. The default raises.
        """
        raise ValueError(
            f"Backend {self.name!r} can't keep tables in host memory: place them in HBM."
        )

    def describe(self, options: BackendOptions) -> str:
        """The options that differ from their defaults, for the printed plan."""
        changed: list[str] = []
        for field in dataclasses.fields(options):
            value: Any = getattr(options, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                changed.append(f"{field.name}={value}")
        return ", ".join(changed)
