"""Embeddings for any int64 id, as modules by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table import EvictionPolicy, Initializer
from torchrec_hkv.nn.table_module import TableModule


class HierarchicalHashEmbedding(TableModule):
    """An embedding whose rows are in a hash table: any int64 is an id, and nothing is known ahead.

    In training (``train()`` mode, gradients enabled) an id that is not there is inserted, with an
    initial row that follows from the seed and the id. A full table throws out an id with its
    optimizer states: by default the one that was looked up longest ago. In ``eval()`` mode, under
    ``torch.no_grad()`` and after ``requires_grad_(False)`` a lookup changes nothing, its result
    needs no gradient, and an id that is not there has its initial row.

    Backwards hold their gradients in a buffer on the device; ``step()`` of an HKV optimizer over
    this module adds up those of equal ids, updates their rows once, and empties it. Rows that have
    a gradient held stay in the table until then. ``zero_grad()`` of the optimizer, this module or a
    parent drops what is held.

    The rows are no parameters. ``parameters()`` gives one with one value, ``anchor``, which stands
    for them: other optimizers may have it and don't train the rows. What is done to its gradient
    by ``GradScaler`` or ``clip_grad_norm_`` (whose norm the rows are not part of) is done to the
    gradients held. ``state_dict()`` has ids and rows; the states of an optimizer are in its own.

    Args:
        embedding_dim: columns of a row, 1 to 2048.
        max_capacity: most ids that it holds; fewer where the memory that is there, or allowed,
            holds fewer (a warning says so, :attr:`capacity` how many).
        init_capacity: rows that it has memory for at first; it doubles as it fills up. None:
            65,536, or ``max_capacity`` where that is less.
        max_hbm_gb: GiB of a GPU's memory for index and rows; rows that exceed it lie in host
            memory, the hottest in HBM too. None: no limit. On a CPU the table is in host memory
            whatever this says.
        learning_rate: of the built-in SGD (:meth:`apply_gradients`), and of :class:`HKVOptimizer`
            where it is not given one.
        weight_decay: L2 regularisation of the rows that an update touches, by the built-in SGD and
            by optimizers that are not given one of their own.
        grad_buffer_hbm_gb: GiB for the gradients held: 4 * ``embedding_dim`` + 24 bytes for each id
            looked up. Where it gets full, those of equal ids are added up first; if that is not
            enough, the backward raises.
        padding_idx: an id whose row is zeros and is not trained (in training it takes a slot).
        eviction: which id leaves a full table: ``"lru"``, the one looked up longest ago; ``"lfu"``,
            the one looked up least often; an :class:`torchrec_hkv.AgedLFU` or ``"adaptive"``,
            between the two; ``"epoch_lru"`` or ``"epoch_lfu"``, one of the earliest :attr:`epoch`;
            ``"customized"``, the one of the lowest score, which each lookup in training is given.
        initializer: of new rows: a ``Uniform``, ``Normal``, ``TruncatedNormal`` or ``Constant`` of
            :mod:`torchrec_hkv.hash_table`. None: uniform up to ``embedding_dim ** -0.5``.
        seed: of new rows, any int64. None: drawn by torch's generator.
        device: of the table. None: the current GPU where there is one, else the CPU.
        remember_evicted: how many evicted ids to remember at a time, in 2 bytes each, so that
            :meth:`counters` tells how many came back (``returned``). None: not counted.

    Raises:
        ValueError: an argument is impossible, or ``init_capacity`` rows find no room.
    """

    def __init__(
        self,
        embedding_dim: int,
        max_capacity: int,
        init_capacity: int | None = None,
        max_hbm_gb: float | None = None,
        learning_rate: float = 0.01,
        weight_decay: float = 0.0,
        grad_buffer_hbm_gb: float = 1,
        *,
        padding_idx: int | None = None,
        eviction: EvictionPolicy = "lru",
        initializer: Initializer | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        remember_evicted: int | None = None,
    ) -> None:
        super().__init__(
            names=["embedding"],
            prefixes=[""],
            embedding_dim=embedding_dim,
            max_capacity=max_capacity,
            init_capacity=init_capacity,
            max_hbm_gb=max_hbm_gb,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            grad_buffer_hbm_gb=grad_buffer_hbm_gb,
            padding_idx=padding_idx,
            eviction=eviction,
            initializer=initializer,
            seed=seed,
            device=device,
            remember_evicted=remember_evicted,
        )

    def forward(self, ids: Tensor, scores: Tensor | None = None) -> Tensor:
        """Rows of ids.

        Args:
            ids: int64 or int32 of any shape, on the table's device.
            scores: int64 of the same shape, under ``"customized"``; only training reads them, and
                needs them. A new id of a full table takes the place of the lowest score even where
                its own is lower, since it is to be trained.

        Returns:
            float32 ``[*ids.shape, embedding_dim]``.

        Raises:
            TypeError: ids or scores of another dtype.
            ValueError: ids on another device; scores of another shape, missing, or under a policy
                that takes none.
        """
        return self._lookup([ids], None if scores is None else [scores])[0]


class MultiTableHKVEmbedding(TableModule):
    """Several tables of :class:`HierarchicalHashEmbedding`'s kind, looked up in one call.

    One lookup and one update serve all tables. It is made for fields of equal numbers of ids: where
    they differ, memory is taken as if each had as many as the largest.

    Args:
        num_tables: how many.
        embedding_dim: as there, for all.
        max_capacity_per_table: as ``max_capacity`` there.
        max_hbm_gb_per_table: as ``max_hbm_gb`` there.
        init_capacity_per_table: as ``init_capacity`` there.
        learning_rate: as there.
        weight_decay: as there.
        grad_buffer_hbm_gb: as there, for all tables together.
        padding_idx: as there, for all.
        eviction: as there.
        initializer: as there.
        seed: as there; rows of equal ids in two tables differ.
        device: as there.
        remember_evicted: as there, of each table.
    """

    def __init__(
        self,
        num_tables: int,
        embedding_dim: int,
        max_capacity_per_table: int,
        max_hbm_gb_per_table: float | None = None,
        init_capacity_per_table: int | None = None,
        learning_rate: float = 0.01,
        weight_decay: float = 0.0,
        grad_buffer_hbm_gb: float = 1,
        *,
        padding_idx: int | None = None,
        eviction: EvictionPolicy = "lru",
        initializer: Initializer | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        remember_evicted: int | None = None,
    ) -> None:
        if not isinstance(num_tables, int) or isinstance(num_tables, bool) or num_tables < 1:
            raise ValueError(f"num_tables is {num_tables!r}, but must be an integer, at least 1.")
        super().__init__(
            names=[f"table_{table}" for table in range(num_tables)],
            prefixes=[f"tables.{table}." for table in range(num_tables)],
            embedding_dim=embedding_dim,
            max_capacity=max_capacity_per_table,
            init_capacity=init_capacity_per_table,
            max_hbm_gb=max_hbm_gb_per_table,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            grad_buffer_hbm_gb=grad_buffer_hbm_gb,
            padding_idx=padding_idx,
            eviction=eviction,
            initializer=initializer,
            seed=seed,
            device=device,
            remember_evicted=remember_evicted,
        )
        self.num_tables = num_tables

    def forward(
        self, ids: Sequence[Tensor], scores: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Rows of each field's ids.

        Args:
            ids: for each table a tensor as :class:`HierarchicalHashEmbedding` takes it; shapes may
                differ.
            scores: likewise.

        Returns:
            For each table float32 ``[*its shape, embedding_dim]``.

        Raises:
            TypeError: no list or tuple of tensors of ids.
            ValueError: another number of tensors, or another device.
        """
        if not isinstance(ids, (list, tuple)):
            raise TypeError(
                f"ids must be a list of one tensor a table, but are {type(ids).__name__}."
            )
        if len(ids) != self.num_tables:
            raise ValueError(
                f"ids have {len(ids)} tensors, but there are {self.num_tables} tables."
            )
        if scores is not None and len(scores) != self.num_tables:
            raise ValueError(
                f"scores have {len(scores)} tensors, but there are {self.num_tables} tables."
            )
        return self._lookup(ids, scores)
