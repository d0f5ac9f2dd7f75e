"""The state of a table as tensors, which a ``state_dict`` holds."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch

from torchrec_hkv.backends.specs import BackendOptions, OptimizerSpec, TableShard, TensorSpec


class StateDictLookup(abc.ABC):
    """Exports and loads the state of each table of a group."""

    @abc.abstractmethod
    def export_table(self, key: str) -> dict[str, torch.Tensor]:
        """A copy of one shard's state, with the tensors of :meth:`Backend.state_spec`.

        Args:
            key: the shard, :attr:`TableShard.key`.
        """

    @abc.abstractmethod
    def load_table(self, key: str, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the contents of one shard by an exported state.

        Args:
            key: the shard.
            state: a result of :meth:`export_table`.

        Raises:
            ValueError: a tensor is missing or has another shape or dtype. Nothing has changed then.
        """

    def dense_states(self, key: str) -> dict[str, torch.Tensor]:
        """The optimizer states of a dense-compatible shard (:meth:`Backend.is_dense`) by FBGEMM's
        names: float32 ``[rows]`` or ``[rows, width]``, and int64 ``[1]`` for a count.

        Every call returns the same tensors, with current values. Values written into them, or into
        the tensor that :meth:`export_table` returns, take effect at the table's next lookup.
        """
        return {}


class StateDictBackend(abc.ABC):
    """Describes the state of a table."""

    @abc.abstractmethod
    def state_spec(
        self, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> dict[str, TensorSpec]:
        """The tensors that hold one shard's state. ``"weight"`` holds the rows.

        A ``state_dict`` concatenates them over ranks along the first dimension, so their shapes
        must depend on the shard only.
        """

    def is_dense(self, options: BackendOptions) -> bool:
        """Whether a table with these options takes row numbers and exposes its rows like a stock
        table. Its state then is only ``"weight"``, indexed by row number;
        :meth:`GroupLookup.dense_states` returns its optimizer states."""
        return False

    def identity(self, shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, Any]:
        """The properties in which a saved table and the table that loads it must agree: JSON values
        by user-visible names, equal on all shards of a table."""
        return {
            "dim": shard.embedding_dim,
            "dtype": str(shard.dtype).removeprefix("torch."),
            "optimizer": None if optimizer is None else optimizer.kind,
        }

    def loads(self, what: str, saved: Any, own: Any) -> bool:
        """Whether a table can load a saved one when the item ``what`` of :meth:`identity` is
        ``saved`` there and ``own`` here."""
        return bool(saved == own)
