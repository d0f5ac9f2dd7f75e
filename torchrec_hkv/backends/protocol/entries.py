"""The entries of a table by id: rows, optimizer states and scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from torchrec_hkv.backends.save_types import EntriesLoad
from torchrec_hkv.backends.specs import BackendOptions, OptimizerSpec, TableShard


class EntriesLookup:
    """Reads and writes the entries of each table of a group."""

    def ids(self, key: str, batch: int) -> Iterator[torch.Tensor]:
        """The ids in a shard: int64 CPU tensors of at most ``batch`` ids."""
        raise ValueError(f"{type(self).__name__} does not support reading rows by id.")

    def rows_of(self, key: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ids as an evaluation lookup returns them: float32 ``[n, dim]`` on the CPU.

        Args:
            key: the shard.
            ids: int64 ``[n]`` on the CPU.
        """
        raise ValueError(f"{type(self).__name__} does not support reading rows by id.")

    def put_rows(
        self,
        key: str,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        owners: tuple[int, int],
    ) -> int:
        """Sets the rows of ids and resets their optimizer states.

        Args:
            key: the shard.
            batches: pairs of ids, int64 ``[n]``, and whole rows, ``[n, embedding_dim]``, on the
                CPU. The shard takes its own ids and columns and skips the rest.
            owners: range ``[first, end)`` of owner buckets whose ids the shard holds.

        Returns:
            Number of the shard's ids that found no slot.

        Raises:
            ValueError: the backend can't store the rows.
        """
        raise ValueError(f"{type(self).__name__} does not support writing rows by id.")

    def entries(self, key: str, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """All entries of a shard that holds the first column. Called if :meth:`Backend.exchanges`.

        Yields:
            ``ids`` and the result of :meth:`entries_of` for them, at most ``batch`` entries at a
            time, in host memory.
        """
        raise NotImplementedError

    def entries_of(self, key: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows, states, scores and last steps of ids by the names of the table's state, in host
        memory. An id that the shard lacks has its initial row and states of 0.

        Args:
            key: the shard.
            ids: int64 ``[n]``, in host memory.
        """
        raise NotImplementedError

    def without_entries(self, key: str) -> dict[str, torch.Tensor]:
        """The other tensors in the state of a shard that holds the first column: ``table_state``,
        and counts (:data:`torchrec_hkv.backends.save_types.COUNTS`)."""
        raise NotImplementedError

    def open_entries(self, key: str, owners: tuple[int, int]) -> EntriesLoad:
        """Starts a load of a shard from the state tensors of all shards, if
        :meth:`Backend.exchanges`.

        Args:
            key: the shard.
            owners: range ``[first, end)`` of owner buckets whose ids the shard holds.
        """
        raise NotImplementedError

    def entries_loaded(self, table_states: Mapping[str, torch.Tensor]) -> None:
        """Called after all loads by :meth:`open_entries` are complete.

        Args:
            table_states: the tensor ``"table_state"`` of each loaded shard, by shard key.
        """


class EntriesBackend:
    """Tells which tables exchange entries between ranks."""

    def exchanges(self, options: BackendOptions) -> bool:
        """Whether the sizes of a table's state tensors do not depend on the number of ranks, so
        that a rank may load entries that belong to other ranks. If so, one-dimensional tensors are
        on the shards of the first column, ``"occupied"`` marks the slots in use, and
        ``"table_state"`` is on the first shard."""
        return False

    def state_geometry(self, shard: TableShard, optimizer: OptimizerSpec | None) -> tuple[int, ...]:
        """Numbers that are equal for two shards with the same slot layout. Used if
        :meth:`exchanges`."""
        return ()
