"""What a table asks of the backend ``hkv``."""

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

#: Of rows, and of outputs.
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class HKVOptions(BackendOptions):
    """Options of an ``hkv`` table.

    Attributes:
        eviction: which id leaves a full bucket: ``"lru"``, the one looked up longest ago;
            ``"lfu"``, the one looked up least often (among equals, longest ago); or an
            :class:`torchrec_hkv.AgedLFU`, between the two: the one looked up least often where
            counts lose half their worth after each half-life in which the id is not looked up.
            ``"adaptive"`` chooses that half-life while the table runs, by the hit rates of small
            tables that see a sample of the ids. ``"epoch_lru"`` and ``"epoch_lfu"`` evict ids of
            the earliest epoch first (:func:`torchrec_hkv.set_epoch`), and among those of one epoch
            as ``"lru"`` and ``"lfu"`` do. ``"customized"`` evicts the id of the lowest score, which
            comes with each batch (``score_feature``, ``score_from``). Only lookups in training
            count.
        hbm_bytes: what the table may take of each GPU's memory, index included. A table whose rows
            and optimizer states don't all fit there has all of them in host memory, and those of
            the highest score in HBM too: lookups in training bring them there. None: all in the
            GPU's memory; where the table's constraint leaves the kernel open and has these options
            of ``hkv`` alone, the planner may put a number here. ``"index"``: the least, the index;
            all rows are read from host memory. On a CPU a table lies in host memory whatever this
            says.
        seed: of the initial rows, any int64. Equal seeds, table names and ids give equal rows, at
            any world size.
        initializer: distribution of the values of initial rows: a
            :class:`torchrec_hkv.hash_table.Uniform`, ``Normal``, ``TruncatedNormal`` or
            ``Constant``. None: uniform from the config's ``weight_init_min`` to its
            ``weight_init_max``.
        admission: which new ids get a slot: a :class:`torchrec_hkv.hash_table.MinFrequency`, whose
            ``entries`` or ``sketch_bytes`` each rank has for the ids it is asked for, or a
            ``Probability``. Other ids count with their initial row and are not trained. None: all
            are admitted.
        expire_after: an id that no training step has looked up for more than so many steps is
            forgotten, its optimizer state too, at the latest ``min(64, expire_after)`` steps later.
            None: never.
        strict: a training lookup that has no place for an id raises a ``RuntimeError`` that names
            the table, its load and what to change. The group of the table then waits for the device
            in every step. False: the id counts with its initial row, is not trained, and is counted
            as ``refused``.
        initial_capacity: rows that the table must hold at first, over all ranks, 1 to
            ``num_embeddings``. It doubles before it gets too full, until it has its whole capacity;
            the planner counts that. None: all from the start.
        dense: the table takes row numbers 0 to ``num_embeddings`` - 1, as stock tables do, and has
            all of them from the start; any other id is refused. Rows lie on ranks as those of
            stock tables do, ``state_dict`` shows them as theirs, and the optimizer's states are in
            the ``state_dict`` of the model's fused optimizer. So a checkpoint of stock tables loads
            into the table, and back. It takes a quarter more slots than rows, and one more copy of
            rows and states, which the planner counts. What is written into the tensors of a
            ``state_dict`` is in the table from its next lookup on.
        remember_evicted: how many evicted ids each rank remembers at a time, in 2 bytes each, so
            that the counters tell how many came back (``returned``); 1 to 2^32. None: not counted.
        capacity: rows of the table over all ranks, where that is not the config's
            ``num_embeddings``, 1 to 2^63 - 1. None: ``num_embeddings``; where the constraint leaves
            the kernel open and has frequencies of ids, the planner may say fewer.
        row_dtype: data type of the rows, where that is not the config's: ``torch.float32``,
            ``torch.float16`` or ``torch.bfloat16``. None: the config's.
        deterministic: on GPUs, too, equal batches give equal tables, bit for bit, and column shards
            keep and evict the same rows; a training step takes a little longer
            (``docs/concepts/ordering.md``). All tables of the same lookup then do so. False: only
            while ``torch.use_deterministic_algorithms(True)`` holds. CPUs are always deterministic.
        restore_counts: an id that comes back while its rank remembers it (``remember_evicted``)
            gets half of its count back, up to 65,535, under ``"lfu"``, ``"adaptive"``,
            ``"epoch_lfu"`` and an ``AgedLFU``. It takes 4 bytes for each id of
            ``remember_evicted`` in place of 2; on GPUs the tables of its lookups are deterministic
            then.
        score_feature: for ``"customized"``: a feature of the same KeyedJaggedTensor whose values
            are the scores, any int64; its bags must be as long as those of the table's feature. A
            tuple where the table has several features: one for each, in their order. In a weighted
            collection scores must be from -2^31 to 2^31 - 1. Training needs it in each batch.
        score_from: for ``"customized"``: ``"weights"`` takes the scores from the weights of the
            table's features, which are those of pooling, too, where the collection is weighted. The
            largest weight has the highest score. Training needs weights in each batch.
    """

    eviction: EvictionPolicy = "lru"
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
        never = ("admission", "expire_after", "initial_capacity", "remember_evicted", "capacity")
        for name in never:
            if self.dense and getattr(self, name) is not None:
                raise ValueError(
                    f"HKVOptions: {name} is {getattr(self, name)!r} and dense is True, but a table "
                    f"that always has all its rows takes {name}=None only."
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
                "HKVOptions: eviction is 'customized' and dense is True, but a table that always "
                "has all its rows evicts none: leave eviction out."
            )

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
