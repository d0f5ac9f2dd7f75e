"""Options of an ``hkv`` table."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from torchrec_hkv.backends.specs import BackendOptions, ScoreSource
from torchrec_hkv.hash_table import Admission, EvictionPolicy, Initializer
from torchrec_hkv.hash_table.eviction import EPOCH_POLICIES, POLICIES, check_eviction
from torchrec_hkv.hash_table.spec_checks import (
    check_expire_after,
    check_flag,
    check_remember_evicted,
    check_restore_counts,
)

#: Allowed data types of outputs, and of rows.
OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROW_DTYPES = (*OUTPUT_DTYPES, torch.int8)


@dataclasses.dataclass(frozen=True)
class HKVOptions(BackendOptions):
    """Options of an ``hkv`` table.

    Attributes:
        eviction: the policy that chooses which id leaves a full bucket. Only training lookups
            count.

            - ``"lru"``: the least recently looked up id.
            - ``"lfu"``: the least frequently looked up id; among equals, the least recent.
            - An :class:`torchrec_hkv.AgedLFU`: LFU with aging counts. The count of an id halves
              in each half-life in which the id is not looked up.
            - ``"adaptive"`` (default): LFU with aging counts whose half-life is chosen while the
              table runs, by the hit rates of small tables that see a sample of the ids. With
              ``dense`` it is ``"lru"``: nothing is evicted, and LRU takes 8 bytes a slot less.
            - ``"epoch_lru"`` and ``"epoch_lfu"``: an id of the earliest epoch
              (:func:`torchrec_hkv.set_epoch`); within an epoch by ``"lru"`` or ``"lfu"``.
            - ``"customized"``: the id with the lowest score. Scores come with each batch
              (``score_feature`` or ``score_from``).
        hbm_bytes: maximal bytes of each GPU's memory that the table takes, including its index. If
            rows and optimizer states do not all fit, all of them are in host memory, and HBM
            caches those with the highest scores; training lookups bring rows into HBM. None: all
            in HBM; the planner may set a number if the table's constraint leaves the kernel open
            and gives only these options for ``hkv``. ``"index"``: only the index is in HBM, and
            all rows are read from host memory. Ignored on a CPU.
        seed: seed of the initial rows, any int64. Equal seeds, table names and ids give equal rows
            at any world size.
        initializer: distribution of the initial values: a
            :class:`torchrec_hkv.hash_table.Uniform`, ``Normal``, ``TruncatedNormal`` or
            ``Constant``. None: uniform from the config's ``weight_init_min`` to its
            ``weight_init_max``.
        admission: which new ids get a slot: a :class:`torchrec_hkv.hash_table.MinFrequency`, whose
            ``entries`` or ``sketch_bytes`` count per rank, or a ``Probability``. A lookup of
            an id that is not admitted returns its initial row, which is not trained. None: all ids
            are admitted.
        expire_after: number of training steps without a lookup after which an id and its optimizer
            state are removed; removal may take up to ``min(64, expire_after)`` further steps.
            None: ids do not expire.
        strict: True: a training lookup raises a ``RuntimeError`` if it finds no slot for an id.
            The message names the table, its load and what to change. The group of the table then
            waits for the device in every step. False: the lookup returns the initial row, which is
            not trained, and counts the id as ``refused``.
        initial_capacity: number of rows over all ranks that the table has memory for at first, 1
            to ``num_embeddings``. The table doubles before it gets too full, up to its capacity;
            the planner counts the memory that this needs. None: the full capacity.
        dense: True: the table takes row numbers 0 to ``num_embeddings`` - 1, like a stock table,
            and always holds all of them; other ids raise. Rows are sharded as those of stock
            tables, ``state_dict`` has the same keys, and optimizer states are in the
            ``state_dict`` of the model's fused optimizer, so checkpoints of stock tables load into
            the table and vice versa. The table has 25 % more slots than rows, and one more copy of
            rows and states; the planner counts both. Values written into tensors of a
            ``state_dict`` take effect at the next lookup, unless they were written through
            ``.data`` or NumPy.
        remember_evicted: number of evicted ids that each rank remembers, 1 to 2^32, 2 bytes each,
            to count how many of them return (the counter ``returned``). None: not counted.
        capacity: number of rows of the table over all ranks, if it differs from the config's
            ``num_embeddings``, 1 to 2^63 - 1. None: ``num_embeddings``; the planner may choose
            fewer if the constraint leaves the kernel open and has frequencies of ids.
        row_dtype: data type of the rows, if it differs from the config's: ``torch.float32``,
            ``torch.float16``, ``torch.bfloat16`` or ``torch.int8``. Rows of int8 are integers
            with a float32 scale per row; updates round them stochastically, and their columns
            can't be sharded. None: the config's.
        deterministic: True: on GPUs, equal batches give bitwise equal tables, and column shards
            keep and evict the same rows. Training steps are slightly slower
            (``docs/concepts/ordering.md``). Applies to all tables of the same lookup. False: only
            while ``torch.use_deterministic_algorithms(True)`` is set. CPUs are always
            deterministic.
        restore_counts: True: an id that returns while its rank remembers it
            (``remember_evicted``) gets half of its count back, up to 65,535, under ``"lfu"``,
            ``"adaptive"``, ``"epoch_lfu"`` and an ``AgedLFU``. Each remembered id then takes 4
            bytes instead of 2, and on GPUs the tables of its lookups are deterministic.
        score_feature: for ``"customized"``: a feature of the same KeyedJaggedTensor whose values
            are the scores, any int64. Its bags must be as long as those of the table's feature. A
            tuple for a table with several features: one for each, in the same order. In a weighted
            collection scores must be from -2^31 to 2^31 - 1. Every training batch needs it.
        score_from: for ``"customized"``: ``"weights"`` takes the scores from the weights of the
            table's features; the largest weight has the highest score. In a weighted collection
            the same weights also weight the pooling. Every training batch needs weights.
    """

    eviction: EvictionPolicy = "adaptive"
    hbm_bytes: int | Literal["index"] | None = None
    seed: int = 0
    initializer: Initializer | None = None
    admission: Admission | None = None
    expire_after: int | None = None
    strict: bool = False
    initial_capacity: int | None = None
    dense: bool = False
    remember_evicted: int | None = None
    capacity: int | None = None
    row_dtype: torch.dtype | None = None
    deterministic: bool = False
    restore_counts: bool = False
    score_feature: str | tuple[str, ...] | None = None
    score_from: Literal["weights"] | None = None

    def __post_init__(self) -> None:
        check_eviction("HKVOptions", self.eviction, POLICIES)
        self._check_scores()
        if self.hbm_bytes not in (None, "index") and not (
            _is_int(self.hbm_bytes) and 0 < self.hbm_bytes < 1 << 63
        ):
            raise ValueError(
                f"HKVOptions: hbm_bytes is {self.hbm_bytes!r}, but must be None, 'index' or a "
                "number of bytes from 1 to 2^63 - 1."
            )
        if not (_is_int(self.seed) and -(1 << 63) <= self.seed < 1 << 63):
            raise ValueError(
                f"HKVOptions: seed is {self.seed!r}, but must be an integer from -2^63 to 2^63 - 1."
            )
        if self.initializer is not None and not isinstance(self.initializer, Initializer):
            raise ValueError(
                f"HKVOptions: initializer is {self.initializer!r}, but must be a Uniform, Normal, "
                "TruncatedNormal or Constant, or None."
            )
        if self.admission is not None and not isinstance(self.admission, Admission):
            raise ValueError(
                f"HKVOptions: admission is {self.admission!r}, but must be a MinFrequency or a "
                "Probability, or None."
            )
        check_expire_after("HKVOptions", self.expire_after)
        check_flag("HKVOptions", "strict", self.strict)
        check_flag("HKVOptions", "deterministic", self.deterministic)
        check_remember_evicted("HKVOptions", self.remember_evicted)
        check_restore_counts(
            "HKVOptions", self.restore_counts, self.remember_evicted, self.eviction
        )
        initial = self.initial_capacity
        if initial is not None and not (_is_int(initial) and 0 < initial < 1 << 63):
            raise ValueError(
                f"HKVOptions: initial_capacity is {initial!r}, but must be None or a number "
                "of rows from 1 to 2^63 - 1."
            )
        capacity = self.capacity
        if capacity is not None and not (_is_int(capacity) and 0 < capacity < 1 << 63):
            raise ValueError(
                f"HKVOptions: capacity is {capacity!r}, but must be None or a number of rows "
                "from 1 to 2^63 - 1."
            )
        if self.row_dtype not in (None, *ROW_DTYPES):
            raise ValueError(
                f"HKVOptions: row_dtype is {self.row_dtype!r}, but must be None or one of "
                f"{', '.join(map(str, ROW_DTYPES))}."
            )
        if not isinstance(self.dense, bool):
            raise ValueError(f"HKVOptions: dense is {self.dense!r}, but must be True or False.")
        if self.dense and self.row_dtype == torch.int8:
            raise ValueError(
                "HKVOptions: row_dtype is torch.int8 and dense is True, but checkpoints of a dense "
                "table hold rows of floats: take torch.bfloat16, or leave dense out."
            )
        never = ("admission", "expire_after", "initial_capacity", "remember_evicted", "capacity")
        for name in never:
            if self.dense and getattr(self, name) is not None:
                raise ValueError(
                    f"HKVOptions: {name} is {getattr(self, name)!r} and dense is True, but a dense "
                    f"table always holds all its rows: leave {name} at None."
                )

    def _check_scores(self) -> None:
        feature, origin = self.score_feature, self.score_from
        names = (feature,) if isinstance(feature, str) else feature
        if names is not None and not (
            isinstance(names, tuple) and names and all(isinstance(n, str) and n for n in names)
        ):
            raise ValueError(
                f"HKVOptions: score_feature is {feature!r}, but must be the name of a feature, a "
                "tuple of names, or None."
            )
        if origin not in (None, "weights"):
            raise ValueError(
                f"HKVOptions: score_from is {origin!r}, but must be 'weights' or None."
            )
        if (self.eviction == "customized") != ((feature is None) != (origin is None)):
            raise ValueError(
                f"HKVOptions: eviction is {self.eviction!r}, score_feature {feature!r} and "
                f"score_from {origin!r}, but 'customized' takes one of score_feature and "
                "score_from, and other policies take neither."
            )
        if self.eviction == "customized" and self.dense:
            raise ValueError(
                "HKVOptions: eviction is 'customized' and dense is True, but a dense table always "
                "holds all its rows and evicts none: leave eviction out."
            )

    @property
    def table_eviction(self) -> EvictionPolicy:
        """The policy of the hash table."""
        return "lru" if self.dense and self.eviction == "adaptive" else self.eviction

    @property
    def score_source(self) -> ScoreSource | None:
        if self.eviction != "customized":
            return None
        names = self.score_feature
        return ScoreSource((names,) if isinstance(names, str) else names or ())

    @property
    def has_epochs(self) -> bool:
        return self.eviction in EPOCH_POLICIES

    def rows_for(self, num_embeddings: int) -> int:
        return num_embeddings if self.capacity is None else self.capacity

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.row_dtype is None else self.row_dtype


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
