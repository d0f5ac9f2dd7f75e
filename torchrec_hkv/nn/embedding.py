"""Standalone embeddings for any int64 id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.hash_table import EvictionPolicy, Initializer
from torchrec_hkv.nn.table_module import TableModule


class HierarchicalHashEmbedding(TableModule):
    """An embedding in a hash table: any int64 is a valid id, and no vocabulary is needed.

    A training lookup (``train()`` mode, gradients enabled) inserts missing ids. Their initial rows
    depend only on the seed and the id. A full table evicts an id together with its optimizer
    states, by default the least recently looked up one. In ``eval()`` mode, under
    ``torch.no_grad()`` and after ``requires_grad_(False)``, a lookup changes nothing, its output
    does not require grad, and a missing id has its initial row.

    The backward stores gradients in a buffer on the device. ``step()`` of an HKV optimizer over
    this module sums the gradients of equal ids, updates each row once, and empties the buffer. Rows
    with a stored gradient are not evicted before that. ``zero_grad()`` of the optimizer, of this
    module or of a parent module drops the stored gradients.

    Rows are not parameters. ``parameters()`` yields one parameter with one value, ``anchor``, that
    represents them. Other optimizers accept it but do not train the rows. Operations of
    ``GradScaler`` and ``clip_grad_norm_`` on its gradient apply to the stored gradients; the norm
    does not include them. ``state_dict()`` holds ids and rows; optimizer states are in the
    ``state_dict()`` of the optimizer.

    Args:
        embedding_dim: number of columns, 1 to 2048.
        max_capacity: maximal number of ids. If free memory or ``max_hbm_gb`` allow fewer, the
            module warns, and :attr:`capacity` is the actual number.
        init_capacity: number of rows to allocate memory for at first; the table doubles as it
            fills up. None: 65,536, or ``max_capacity`` if that is less.
        max_hbm_gb: limit of GPU memory for index and rows in GiB. If rows exceed it, all of them
            are in host memory, and HBM caches the hottest. None: no limit. Ignored on a CPU.
        learning_rate: learning rate of the built-in SGD (:meth:`apply_gradients`), and default of
            :class:`HKVOptimizer`.
        weight_decay: L2 regularization of the rows that an update touches; used by the built-in
            SGD, and the default of the optimizers.
        grad_buffer_hbm_gb: size of the gradient buffer in GiB. Each looked up id takes
            4 * ``embedding_dim`` + 24 bytes. If the buffer is full, gradients of equal ids are
            summed; if it is still full, the backward raises.
        padding_idx: an id whose row is zeros and is not trained. It takes a slot in training.
        eviction: which id leaves a full table: ``"lru"``, the least recently looked up id;
            ``"lfu"``, the least frequently looked up id; an :class:`torchrec_hkv.AgedLFU` or
            ``"adaptive"``, LFU with aging counts; ``"epoch_lru"`` or ``"epoch_lfu"``, an id of the
            earliest :attr:`epoch`; ``"customized"``, the id with the lowest score; each training
            lookup must then be given scores.
        initializer: initializer of new rows: a ``Uniform``, ``Normal``, ``TruncatedNormal`` or
            ``Constant`` of :mod:`torchrec_hkv.hash_table`. None: uniform between plus and minus
            ``embedding_dim ** -0.5``.
        seed: seed of new rows, any int64. None: drawn from torch's default generator.
        device: device of the table. None: the current GPU if there is one, else the CPU.
        remember_evicted: number of evicted ids to remember, 2 bytes each, so that
            :meth:`counters` includes how many of them returned. None: not counted.

    Raises:
        ValueError: an argument has an invalid value, or ``init_capacity`` rows don't fit in memory.
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
        """Looks up rows.

        Args:
            ids: int64 or int32 of any shape, on the table's device.
            scores: int64 of the same shape; required in training under ``"customized"``, not
                allowed under other policies. A new id is inserted into a full table even if its
                score is lower than all others, because it has to be trained.

        Returns:
            float32 ``[*ids.shape, embedding_dim]``.

        Raises:
            TypeError: ids or scores have another dtype.
            ValueError: ids are on another device; scores are missing, have another shape, or are
                given under another policy.
        """
        return self._lookup([ids], None if scores is None else [scores])[0]


class MultiTableHKVEmbedding(TableModule):
    """Several hash table embeddings of equal shape, looked up in one call.

    One lookup and one update serve all tables. It suits fields with equal numbers of ids: outputs
    take as much memory as if each field had as many ids as the largest field. See
    :class:`HierarchicalHashEmbedding` for the behaviour of each table.

    Args:
        num_tables: number of tables.
        embedding_dim: number of columns, 1 to 2048.
        max_capacity_per_table: maximal number of ids of each table.
        max_hbm_gb_per_table: limit of GPU memory of each table in GiB; None for no limit.
        init_capacity_per_table: number of rows that each table has memory for at first. None:
            65,536, or ``max_capacity_per_table`` if that is less.
        learning_rate: learning rate of the built-in SGD.
        weight_decay: L2 regularization of the rows that an update touches.
        grad_buffer_hbm_gb: size in GiB of the gradient buffer that all tables share.
        padding_idx: an id whose row is zeros and is not trained, in all tables.
        eviction: eviction policy of all tables.
        initializer: initializer of new rows; None for the default.
        seed: seed of new rows. Equal ids in different tables have different rows.
        device: device of the tables. None: the current GPU if there is one, else the CPU.
        remember_evicted: number of evicted ids that each table remembers; None for none.
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
        """Looks up rows in each table.

        Args:
            ids: list or tuple of one tensor per table, int64 or int32; shapes may differ.
            scores: list or tuple of one int64 tensor per table, of the shape of its ids;
                required in training under ``"customized"``, not allowed under other policies.

        Returns:
            For each table float32 ``[*shape of its ids, embedding_dim]``.

        Raises:
            TypeError: ids are not a list or tuple of integer tensors.
            ValueError: the number of tensors is not ``num_tables``, or a device differs.
        """
        if not isinstance(ids, (list, tuple)):
            raise TypeError(
                f"ids must be a list of one tensor for each table, but are {type(ids).__name__}."
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
