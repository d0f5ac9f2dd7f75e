"""Tables for the quality benchmark: hash tables, TorchRec's managed collisions, static tables.

All have the same columns, distribution of initial rows, and row-wise Adagrad in the backward.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)

from torchrec_hkv import HKVOptions
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform
from torchrec_hkv.replay import evictions

DIM = 16
RATE = 0.1
_BOUND = 0.01
_CPU = torch.device("cpu")

_MCH = {
    "MCH, LRU": LRU_EvictionPolicy,
    "MCH, LFU": LFU_EvictionPolicy,
    "MCH, DistanceLFU": DistanceLFU_EvictionPolicy,
}
HASHED, UNLIMITED = "hashed", "unlimited"
INT8 = ", int8"


def methods() -> list[str]:
    """Returns the names of the methods: each policy of ``HKVOptions`` that only needs ids, one
    policy with int8 rows, TorchRec's MCH, ids modulo the rows, and a row per id."""
    hkv = [f"hkv, {name}" for name in evictions() if not name.startswith("epoch")]
    return [*hkv, f"hkv, lfu{INT8}", *_MCH, HASHED, UNLIMITED]


class Rows(nn.Module):
    """Looks up ids, ``[batch]`` for each feature, to ``[batch, features, DIM]``; trains the
    rows."""

    def forward(self, ids: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def hit_rate(self) -> float:
        """Returns the share of lookups whose id was in the hash table; NaN for other tables."""
        return float("nan")


class HashRows(Rows):
    """Hash tables that are trained like in the backend ``hkv``."""

    def __init__(self, rows: Mapping[str, int], options: HKVOptions, seed: int) -> None:
        super().__init__()
        specs = [
            TableSpec(
                name=name,
                capacity=count,
                dim=DIM,
                eviction=options.eviction,
                admission=options.admission,
                dtype=options.dtype_for(torch.float32),
                seed=seed,
                initializer=Uniform(-_BOUND, _BOUND),
            )
            for name, count in rows.items()
        ]
        self._group = TableGroup(specs, range(len(specs)), RowWiseAdagrad(eps=1e-8))
        self._anchor = torch.zeros(1, requires_grad=True)
        self._rate = torch.tensor(RATE)

    def forward(self, ids: Mapping[str, Tensor]) -> Tensor:
        values = torch.cat(list(ids.values()))
        batch = values.numel() // len(ids)
        offsets = torch.arange(values.numel() + 1)
        out = self._group.train_lookup(
            self._anchor, values, offsets, None, batch, False, self._rate
        )
        return out.view(batch, len(ids), DIM)

    def hit_rate(self) -> float:
        counters = self._group.counters()
        return sum(c["hits"] for c in counters) / sum(c["lookups"] for c in counters)


class StaticRows(Rows):
    """FBGEMM's fused tables, with a mapping of ids to rows.

    Args:
        rows: number of rows of each feature's table.
        mapped: maps a feature's ids to row numbers, and returns rows to reset.
        seed: seed of the initial rows.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        mapped: Callable[[str, Tensor], tuple[Tensor, Tensor | None]],
        seed: int,
    ) -> None:
        super().__init__()
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(count, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for count in rows.values()],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=RATE,
            eps=1e-8,
            pooling_mode=PoolingMode.SUM,
            device=_CPU,
        )
        self._mapped = mapped
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = self._tables.split_embedding_weights()
        self._sums = [state[0] for state in self._tables.split_optimizer_states()]
        for weight in self._weights:
            weight.data.uniform_(-_BOUND, _BOUND, generator=self._generator)

    def forward(self, ids: Mapping[str, Tensor]) -> Tensor:
        numbers = []
        for at, (name, values) in enumerate(ids.items()):
            mapped, remapped = self._mapped(name, values)
            if remapped is not None and remapped.numel():
                fresh = torch.empty(remapped.numel(), DIM)
                fresh.uniform_(-_BOUND, _BOUND, generator=self._generator)
                self._weights[at].data[remapped] = fresh
                self._sums[at].data[remapped] = 0
            numbers.append(mapped)
        values = torch.cat(numbers)
        out = self._tables(values, torch.arange(values.numel() + 1))
        return out.view(-1, len(ids), DIM)


def _managed(module: ManagedCollisionModule, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Maps ids to rows by one of TorchRec's modules, called like in its sharded collections."""
    lengths = torch.ones(values.numel(), dtype=torch.int64)
    features = module.preprocess({"feature": JaggedTensor(values=values, lengths=lengths)})
    features = module.remap(module.profile(features))
    return features["feature"].values(), module.evict()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def rows_of(method: str, rows: Mapping[str, int], ids: Mapping[str, Tensor], seed: int) -> Rows:
    """Creates the tables of a method.

    Args:
        method: one of :func:`methods`.
        rows: number of rows of each feature's table; a method with a row per id has more.
        ids: ids of the whole stream, by feature.
        seed: seed of the initial rows.
    """
    if method.startswith("hkv, "):
        policy = method.removeprefix("hkv, ").removesuffix(INT8)
        row_dtype = torch.int8 if method.endswith(INT8) else None
        return HashRows(rows, HKVOptions(eviction=policy, row_dtype=row_dtype), seed)
    if method == HASHED:
        return StaticRows(rows, lambda name, values: (values.abs() % rows[name], None), seed)
    if method == UNLIMITED:
        known = {name: values.unique() for name, values in ids.items()}
        count = {name: values.numel() for name, values in known.items()}
        return StaticRows(
            count, lambda name, values: (torch.searchsorted(known[name], values), None), seed
        )
    with _quiet():
        modules = {
            name: MCHManagedCollisionModule(
                zch_size=count,
                device=_CPU,
                eviction_policy=_MCH[method](),
                eviction_interval=1,
            )
            for name, count in rows.items()
        }
    return StaticRows(rows, lambda name, values: _managed(modules[name], values), seed)
