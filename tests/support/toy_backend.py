"""A third backend, registered from outside the package: a Python dictionary of rows.

It is slow and simple, so that it is a reliable reference for other backends.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import torch

from torchrec_hkv.backends import (
    Backend,
    BackendOptions,
    GroupLookup,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
    names,
    register,
)

_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class ToyOptions(BackendOptions):
    """Options of the toy backend.

    Attributes:
        seed: seed of the initial rows.
        max_capacity: largest number of rows of a table over all ranks.
    """

    seed: int = 0
    max_capacity: int = 1 << 20

    def __post_init__(self) -> None:
        if self.max_capacity < 1:
            raise ValueError(f"max_capacity is {self.max_capacity}: it must be at least 1.")


def initial_row(shard: TableShard, row_id: int) -> torch.Tensor:
    """Computes the initial row of an id from (seed, table, id, column).

    Returns:
        ``[dim]``, uniform in the shard's ``init_range``.
    """
    low, high = shard.init_range
    name = zlib.crc32(shard.name.encode())
    row = []
    for column in range(shard.column_offset, shard.column_offset + shard.dim):
        mixed = (row_id ^ (name << 20) ^ (shard.options.seed << 8)) & _MASK
        mixed = (mixed * 6364136223846793005 + column * 1442695040888963407 + 1) & _MASK
        mixed = ((mixed ^ (mixed >> 31)) * 0x9E3779B97F4A7C15) & _MASK
        row.append(low + (high - low) * (mixed >> 40) / (1 << 24))
    return torch.tensor(row, dtype=torch.float32)


class ToyTable:
    """Rows and their optimizer state, by id."""

    def __init__(self, shard: TableShard, optimizer: OptimizerSpec | None) -> None:
        self.shard = shard
        self.optimizer = optimizer
        self.rows: dict[int, torch.Tensor] = {}
        self.sums: dict[int, float] = {}
        self.lookups = 0

    def find(self, row_id: int, *, insert: bool) -> torch.Tensor:
        """Returns the row of an id, ``[dim]``; the initial row if the id is missing."""
        self.lookups += 1
        row = self.rows.get(row_id)
        if row is None:
            row = initial_row(self.shard, row_id)
            if insert:
                if len(self.rows) >= self.shard.capacity:
                    raise ValueError(f"Toy table {self.shard.name!r} is full.")
                self.rows[row_id] = row
                self.sums[row_id] = 0.0
        return row

    def update(self, row_id: int, gradient: torch.Tensor, learning_rate: float) -> None:
        """Trains one row with the sum of its gradients, ``[dim]``."""
        if self.optimizer is None:
            return
        if self.optimizer.name == "rowwise_adagrad":
            self.sums[row_id] += float(gradient.square().mean())
            learning_rate /= self.sums[row_id] ** 0.5 + self.optimizer.eps
        self.rows[row_id] = self.rows[row_id] - learning_rate * gradient


class _ToyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, lookup, is_training, ids, offsets, weights, batch_size, rate):
        ctx.lookup, ctx.learning_rate = lookup, rate
        ctx.is_training = is_training
        ctx.device, ctx.has_weights = ids.device, weights is not None
        ctx.weights = torch.ones(ids.numel()) if weights is None else weights.detach().cpu()
        ctx.ids, ctx.offsets, ctx.batch_size = ids.tolist(), offsets.tolist(), batch_size
        parts = []
        ctx.entries = []  # (feature, sample, position, scale)
        ctx.found = []
        for feature, table_index in enumerate(lookup.feature_tables):
            table = lookup.tables[table_index]
            pooled = torch.zeros(batch_size, table.shard.dim)
            for sample in range(batch_size):
                bag = feature * batch_size + sample
                begin, end = ctx.offsets[bag], ctx.offsets[bag + 1]
                is_mean = table.shard.pooling == "mean"
                scale = 1.0 / (end - begin) if is_mean and end > begin else 1.0
                for position in range(begin, end):
                    row = table.find(ctx.ids[position], insert=ctx.is_training)
                    pooled[sample] += row * (ctx.weights[position] * scale)
                    ctx.entries.append((feature, sample, position, scale))
                    ctx.found.append(row)
            parts.append(pooled)
        return torch.cat(parts, dim=1).to(ids.device)

    @staticmethod
    def backward(ctx, gradient):
        dims = [ctx.lookup.tables[i].shard.dim for i in ctx.lookup.feature_tables]
        parts = gradient.cpu().split(dims, dim=1)
        sums: dict[tuple[int, int], torch.Tensor] = {}
        weight_gradient = torch.zeros(len(ctx.ids))
        for (feature, sample, position, scale), row in zip(ctx.entries, ctx.found, strict=True):
            pooled = parts[feature][sample]
            weight_gradient[position] = (pooled * row).sum() * scale
            key = (ctx.lookup.feature_tables[feature], ctx.ids[position])
            update = pooled * (ctx.weights[position] * scale)
            sums[key] = sums[key] + update if key in sums else update
        for (table_index, row_id), total in sums.items():
            ctx.lookup.tables[table_index].update(row_id, total, float(ctx.learning_rate))
        weight_gradient = weight_gradient.to(ctx.device) if ctx.has_weights else None
        return None, None, None, None, None, weight_gradient, None, None


class ToyLookup(GroupLookup):
    """A group of toy tables."""

    def __init__(self, tables: list[ToyTable], feature_tables: Sequence[int]) -> None:
        super().__init__()
        self.tables = tables
        self.feature_tables = list(feature_tables)
        self.anchor = torch.zeros(1, requires_grad=True)

    def forward(self, ids, offsets, weights, batch_size, learning_rate):
        if ids.dtype != torch.int64:
            raise ValueError(f"ids have dtype {ids.dtype}: must be int64.")
        training = self.is_training_lookup  # autograd is off inside the function
        return _ToyFunction.apply(
            self.anchor, self, training, ids, offsets, weights, batch_size, learning_rate
        )

    def _table(self, key: str) -> ToyTable:
        return next(table for table in self.tables if table.shard.key == key)

    def export_table(self, key: str) -> dict[str, torch.Tensor]:
        table = self._table(key)
        spec = ToyBackend().state_spec(table.shard, table.optimizer)
        state = {name: torch.zeros(s.shape, dtype=s.dtype) for name, s in spec.items()}
        for position, (row_id, row) in enumerate(table.rows.items()):
            state["ids"][position] = row_id
            state["used"][position] = True
            state["weight"][position] = row
            if "sum" in state:
                state["sum"][position] = table.sums[row_id]
        return state

    def load_table(self, key: str, state: Mapping[str, torch.Tensor]) -> None:
        table = self._table(key)
        spec = ToyBackend().state_spec(table.shard, table.optimizer)
        for name, tensor_spec in spec.items():
            if name not in state or tuple(state[name].shape) != tensor_spec.shape:
                raise ValueError(f"The state of toy table {key!r} does not fit in {name!r}.")
        used = state["used"].nonzero().flatten().tolist()
        ids = state["ids"].tolist()
        table.rows = {ids[i]: state["weight"][i].cpu().clone() for i in used}
        sums = state["sum"].tolist() if "sum" in state else [0.0] * len(ids)
        table.sums = {ids[i]: sums[i] for i in used}

    def counters(self, key: str) -> dict[str, int]:
        table = self._table(key)
        return {
            "lookups": table.lookups,
            "size": len(table.rows),
            "capacity": table.shard.capacity,
        }


class ToyBackend(Backend):
    """Tables in Python dictionaries."""

    name = "toy"
    options_type = ToyOptions
    sharding_types = (
        "row_wise",
        "table_wise",
        "column_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    )
    routing = "hashed"

    def check(self, shard, optimizer, device_type):
        if shard.num_embeddings > shard.options.max_capacity:
            raise ValueError(
                f"Toy table {shard.name!r} has {shard.num_embeddings} rows: at most "
                f"{shard.options.max_capacity} are allowed."
            )
        if optimizer is not None and optimizer.name not in ("sgd", "rowwise_adagrad"):
            raise ValueError(f"Toy table {shard.name!r} can't be trained by {optimizer.name}.")
        if shard.capacity < 1:
            raise ValueError(f"Toy table {shard.name!r} has a shard without rows.")

    def storage(self, shard, optimizer, device_type):
        return StorageBytes(hbm=0, host=shard.capacity * (shard.dim * 4 + 16))

    def lookup_bandwidth(self, device_type, hbm_bw, host_bw):
        return host_bw / 100

    def state_spec(self, shard, optimizer):
        spec = {
            "weight": TensorSpec((shard.capacity, shard.dim), torch.float32),
            "ids": TensorSpec((shard.capacity,), torch.int64),
            "used": TensorSpec((shard.capacity,), torch.bool),
        }
        if optimizer is not None and optimizer.name == "rowwise_adagrad":
            spec["sum"] = TensorSpec((shard.capacity,), torch.float64)
        return spec

    def create_lookup(self, shards, feature_tables, optimizer, device):
        return ToyLookup([ToyTable(shard, optimizer) for shard in shards], feature_tables)


def install() -> None:
    """Registers the toy backend once per process."""
    if ToyBackend.name not in names():
        register(ToyBackend())
