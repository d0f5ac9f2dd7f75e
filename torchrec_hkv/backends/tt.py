"""The backend ``tt``: Tensor-Train tables, hundreds of times smaller than dense ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardingType

from torchrec_hkv.backends.calibration import CalibrationCase
from torchrec_hkv.backends.protocol import (
    Backend,
    BackendOptions,
    GroupLookup,
    OptimizerSpec,
    StorageBytes,
    TableShard,
    TensorSpec,
)
from torchrec_hkv.backends.row_numbers import collect_rows
from torchrec_hkv.backends.tt_caches import PREFIX, TTCaches
from torchrec_hkv.backends.tt_cost import tt_cases, tt_scratch, tt_work
from torchrec_hkv.backends.tt_options import TTOptions
from torchrec_hkv.backends.workload import Work, Workload
from torchrec_hkv.hash_table import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.tensor_train import (
    TTGroup,
    TTShape,
    initial_cores,
    rows_of,
    tt_svd,
)
from torchrec_hkv.tensor_train.fused_rows import check_hot_row_optimizer
from torchrec_hkv.tensor_train.hot_rows import HotRows
from torchrec_hkv.tensor_train.replicas import Replicas, replicated_lookup

_DTYPES = (torch.float32, torch.bfloat16)
_MOST_RANK_ON_CUDA = 256
#: Of the state of a table: what the tensors are.
_FORMAT = 1


def _options(shard: TableShard) -> TTOptions:
    if not isinstance(shard.options, TTOptions):
        raise ValueError(
            f"table '{shard.name}': options of type {type(shard.options).__name__} were given to "
            "backend 'tt', which takes TTOptions."
        )
    return shard.options


def _shape(shard: TableShard) -> TTShape:
    try:
        return _options(shard).shape(
            shard.num_embeddings, shard.embedding_dim, shard.dtype.itemsize
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"table '{shard.name}': {error}") from None


def _head_bytes(shape: TTShape) -> int:
    """What a GPU keeps of a table of four cores: the products of the first two, and gradients."""
    if shape.num_cores != 4:
        return 0
    return 8 * math.prod(shape.p[:2]) * math.prod(shape.q[:2]) * shape.ranks[1]


def _optimizer(spec: OptimizerSpec | None) -> Optimizer | None:
    """The optimizer of slices of cores.

    Raises:
        ValueError: an optimizer that the backend has not, or an impossible attribute.
    """
    if spec is None:
        return None
    common = {
        "clip_value": spec.clip_value,
        "clip_norm": spec.clip_norm,
        "clip_output": spec.clip_output,
        "stochastic_rounding": spec.stochastic_rounding,
        "rounding_seed": spec.rounding_seed,
        "weight_decay": spec.weight_decay,
        "weight_decay_mode": spec.weight_decay_mode,
    }
    sums = {"eps": spec.eps, "initial_accumulator": spec.initial_accumulator}
    match spec.name:
        case "sgd":
            return SGD(momentum=spec.momentum, nesterov=spec.nesterov, **common)
        case "adagrad":
            return Adagrad(**sums, **common)
        case "rowwise_adagrad":
            return RowWiseAdagrad(**sums, **common)
        case "adam":
            return Adam(
                betas=(spec.beta1, spec.beta2), eps=spec.eps, step_mode=spec.step_mode, **common
            )
    raise ValueError(
        f"optimizer is {spec.name!r}, but backend 'tt' takes 'sgd', 'adagrad', 'rowwise_adagrad' "
        "or 'adam'."
    )


def _initial_cores(shard: TableShard, device: torch.device) -> list[Tensor]:
    low, high = shard.init_range
    options = _options(shard)
    generator = torch.Generator().manual_seed(table_seed(options.seed, shard.name))
    return initial_cores(
        _shape(shard),
        options.weight_dist,
        mean=(low + high) / 2,
        std=(high - low) / math.sqrt(12),
        generator=generator,
        device=device,
        dtype=shard.dtype,
    )


class TTLookup(GroupLookup):
    """A group of Tensor-Train tables on one rank."""

    def __init__(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._shards = {shard.name: shard for shard in shards}
        self._index = {shard.name: table for table, shard in enumerate(shards)}
        self._optimizer = optimizer
        self._mean = shards[0].pooling == "mean"
        self._group = TTGroup(
            [_shape(shard) for shard in shards],
            feature_tables,
            _optimizer(optimizer),
            [shard.name for shard in shards],
            "tf32" if all(_options(s).precision == "tf32" for s in shards) else "fp32",
            any(_options(s).strict for s in shards),
        )
        # No parameters: the sharded module exports them by table.
        self._cores = [core for shard in shards for core in _initial_cores(shard, device)]
        self._states = self._group.make_states(device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._lookups = torch.zeros(len(shards), dtype=torch.int64, device=device)
        self._feature_tables = torch.tensor(list(feature_tables), device=device)
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._replicas: Replicas | None = None
        caches = {table: _options(shard).cache for table, shard in enumerate(shards)}
        sizes = {table: cache for table, cache in caches.items() if cache is not None}
        self._caches = TTCaches(self._group, sizes, device) if sizes else None

    def replicate(self, process_group: dist.ProcessGroup | None) -> None:
        self._replicas = Replicas(process_group)
        if self._caches is not None:
            self._caches.replicate(self._replicas)

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        learning_rate: Tensor,
    ) -> Tensor:
        if self.training and batch_size > 0:
            self._lookups.index_add_(0, self._feature_tables, offsets[::batch_size].diff())
        if self._caches is None:
            return self._by_cores(ids, offsets, weights, batch_size, self._mean, learning_rate)
        if ids.device.type == "cpu":
            # Refuses bad ids before the caches see them.
            self._group.sort(ids, offsets, batch_size)
        elif self._group.strict:
            self._group.refuse_outside(ids, offsets, batch_size)
        if self.training:
            self._caches.before_training(self._cores, ids, offsets, batch_size)
        return self._caches.lookup(
            ids,
            offsets,
            batch_size,
            weights,
            self._mean,
            learning_rate,
            lambda ids, offsets, weights: self._by_cores(
                ids, offsets, weights, batch_size, False, learning_rate
            ),
        )

    def _by_cores(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        mean: bool,
        learning_rate: Tensor,
    ) -> Tensor:
        """The lookup of ids that have no row of their own."""
        kind = {"weights": weights, "mean": mean}
        if not self.training:
            return self._group.lookup(self._cores, ids, offsets, batch_size, **kind)
        kind["index"] = self._group.sort(ids, offsets, batch_size, **kind)
        if self._group.optimizer is None:
            out = self._group.lookup(self._cores, ids, offsets, batch_size, **kind)
            return out + self._anchor.sum()
        tables = (self._anchor, self._cores, self._states, self._step)
        batch = (ids, offsets, batch_size, learning_rate)
        if self._replicas is None:
            return self._group.lookup_fused(*tables, *batch, **kind)
        return replicated_lookup(self._group, *tables, *batch, self._replicas, **kind)

    def populate_caches(self) -> int:
        if self._caches is None:
            return 0
        self._caches.populate(self._cores)
        return len(self._caches.by_table)

    def export_table(self, name: str) -> dict[str, Tensor]:
        tensors = self._tensors(name)
        return {key: tensors[key].detach().clone() for key in self._spec(name)}

    def load_table(self, name: str, state: Mapping[str, Tensor]) -> None:
        own = self._tensors(name)
        for key, spec in self._spec(name).items():
            if key not in state:
                raise ValueError(f"table '{name}': the state to load lacks {key!r}.")
            if tuple(state[key].shape) != spec.shape or state[key].dtype != spec.dtype:
                raise ValueError(
                    f"table '{name}': in the state to load {key!r} has shape "
                    f"{tuple(state[key].shape)} and dtype {state[key].dtype}, but the table has "
                    f"{spec.shape} and {spec.dtype}."
                )
        if state["tt_shape"].tolist() != own["tt_shape"].tolist():
            raise ValueError(
                f"table '{name}': the state to load has the shape {state['tt_shape'].tolist()} "
                "(format, rows, cores, factors of rows and columns, ranks), but the table has "
                f"{own['tt_shape'].tolist()}."
            )
        for key in self._spec(name):
            if not key.startswith(PREFIX):
                own[key].copy_(state[key])
        if self._caches is not None:
            self._caches.load(self._index[name], state)

    def _spec(self, name: str) -> dict[str, TensorSpec]:
        return TTBackend.state_of(self._shards[name], self._optimizer)

    def ids(self, name: str, batch: int) -> Iterator[Tensor]:
        return iter(torch.arange(self._shards[name].num_embeddings).split(batch))

    def rows_of(self, name: str, ids: Tensor) -> Tensor:
        shape, cores = self._group.shapes[self._index[name]], self.cores(name)
        ids = ids.to(cores[0].device)
        rows = rows_of(shape, cores, ids)
        if (hot := self._hot_rows_of(name)) is not None:
            places, found = hot.look_up(ids)
            rows[found] = hot.rows.detach()[places[found]].to(rows.dtype)
        return rows.cpu()

    def put_rows(
        self, name: str, batches: Iterable[tuple[Tensor, Tensor]], owners: tuple[int, int]
    ) -> int:
        """The cores of the same ranks that are nearest to the rows; all rows must come."""
        shape, cores = self._group.shapes[self._index[name]], self.cores(name)
        dense = collect_rows(name, shape.num_embeddings, shape.embedding_dim, batches)
        made = tt_svd(dense.to(cores[0].device), ranks=shape.ranks, p=shape.p, q=shape.q)
        for own, core in zip(cores, made.cores, strict=True):
            own.copy_(core)
        for state in self._states[self._group.cores_of(self._index[name])]:
            state.zero_()
        if (hot := self._hot_rows_of(name)) is not None:
            hot.clear()  # its rows are those of before
        return 0

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """What the state of a table is copied from, and more; caches as a copy."""
        table = self._index[name]
        shape, cores = self._group.shapes[table], self._group.cores_of(table)
        tensors = {f"tt_core_{k}": core for k, core in enumerate(self._cores[cores])}
        tensors |= {f"tt_state_{k}": state for k, state in enumerate(self._states[cores])}
        tensors["tt_shape"] = torch.tensor([_FORMAT, *shape.packed()])
        tensors["optimizer_step"] = self._step
        return tensors if self._caches is None else {**tensors, **self._caches.state(table)}

    def counters(self, name: str) -> dict[str, int]:
        """``lookups`` in training, and ``size`` and ``capacity``, the table's rows; of a table with
        a cache also ``hits``, lookups that found their row there."""
        rows, table = self._shards[name].num_embeddings, self._index[name]
        counts = {"lookups": int(self._lookups[table]), "size": rows, "capacity": rows}
        if self._caches is not None and table in self._caches.by_table:
            counts["hits"] = int(self._caches.by_table[table].training_hits)
        return counts

    def hot_rows(self, name: str) -> HotRows:
        """The cache of a table.

        Raises:
            ValueError: it has none.
        """
        hot = self._hot_rows_of(name)
        if hot is None:
            raise ValueError(f"table '{name}' has no cache: give its TTOptions a cache_size.")
        return hot

    def _hot_rows_of(self, name: str) -> HotRows | None:
        return None if self._caches is None else self._caches.by_table.get(self._index[name])

    def memory(self, name: str) -> StorageBytes:
        """Bytes of cores, optimizer states, the float32 gradient of all cores, the cache, and on a
        GPU the products of the first two of four cores."""
        cores = self._group.cores_of(self._index[name])
        tensors = [*self._cores[cores], *self._states[cores]]
        count = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        on_gpu = tensors[0].device.type == "cuda"
        if on_gpu or self._group.optimizer is not None:
            count += 4 * sum(core.numel() for core in self._cores[cores])
        if on_gpu:
            count += _head_bytes(self._group.shapes[self._index[name]])
        if (cache := _options(self._shards[name]).cache) is not None:
            count += cache.num_bytes(self._group.shapes[self._index[name]], self._group.optimizer)
        return StorageBytes(count, 0) if on_gpu else StorageBytes(0, count)

    def cores(self, name: str) -> list[Tensor]:
        """The cores of a table, not copied."""
        return self._cores[self._group.cores_of(self._index[name])]


class TTBackend(Backend):
    """Tensor-Train tables as a backend."""

    name: ClassVar[str] = "tt"
    options_type: ClassVar[type[BackendOptions]] = TTOptions
    sharding_types: ClassVar[tuple[str, ...]] = (
        ShardingType.TABLE_WISE.value,
        ShardingType.DATA_PARALLEL.value,
    )
    routing: ClassVar[Literal["hashed", "block"]] = "block"

    def check(self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str) -> None:
        shape = _shape(shard)
        if shard.capacity != shard.num_embeddings or shard.dim != shard.embedding_dim:
            raise ValueError(
                f"table '{shard.name}': a shard has {shard.capacity} of {shard.num_embeddings} "
                f"rows and {shard.dim} of {shard.embedding_dim} columns, but backend 'tt' takes "
                "whole tables."
            )
        if shard.dtype not in _DTYPES:
            raise ValueError(
                f"table '{shard.name}': data type is {shard.dtype}, but backend 'tt' takes "
                "torch.float32 and torch.bfloat16."
            )
        low, high = shard.init_range
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(
                f"table '{shard.name}': weight_init_min is {low} and weight_init_max is {high}, "
                "but both must be finite and the first must not be larger."
            )
        if low + high != 0 and min(shape.ranks) < 2:
            raise ValueError(
                f"table '{shard.name}': weight_init_min is {low} and weight_init_max is {high}, "
                f"whose mean is not 0, but ranks are {list(shape.ranks)}: a mean takes ranks of at "
                "least 2."
            )
        if _options(shard).precision != "fp32" and device_type != "cuda":
            raise ValueError(
                f"table '{shard.name}': precision is {_options(shard).precision!r}, but on "
                f"{device_type!r} it must be 'fp32'."
            )
        if device_type == "cuda" and max(shape.ranks[-2:]) > _MOST_RANK_ON_CUDA:
            raise ValueError(
                f"table '{shard.name}': ranks are {list(shape.ranks)}, but on a GPU those beside "
                f"the last two cores must be at most {_MOST_RANK_ON_CUDA}."
            )
        try:
            made = _optimizer(optimizer)
        except ValueError as error:
            raise ValueError(f"table '{shard.name}': {error}") from None
        TTGroup([shape], None, made, [shard.name])  # refuses slices that are too large
        cache = _options(shard).cache
        if cache is None:
            return
        if cache.rows > shard.num_embeddings:
            raise ValueError(
                f"table '{shard.name}': cache_size is {cache.rows}, but the table has "
                f"{shard.num_embeddings} rows."
            )
        try:
            check_hot_row_optimizer(made)
        except ValueError as error:
            raise ValueError(f"table '{shard.name}': {error}") from None

    def storage(
        self, shard: TableShard, optimizer: OptimizerSpec | None, device_type: str
    ) -> StorageBytes:
        shape, made = _shape(shard), _optimizer(optimizer)
        on_gpu = device_type == "cuda"
        count = shape.num_elements * shard.dtype.itemsize
        if made is not None or on_gpu:
            count += 4 * shape.num_elements  # the gradient of all cores
        if made is not None:
            for k in range(shape.num_cores):
                count += 4 * shape.p[k] * made.state_width(shape.slice_size(k))
        if on_gpu:
            count += _head_bytes(shape)
        if (cache := _options(shard).cache) is not None:
            count += cache.num_bytes(shape, made)
        return StorageBytes(hbm=count if on_gpu else 0, host=0 if on_gpu else count)

    def scratch(
        self, shard: TableShard, load: Workload, device_type: str, replicated: bool
    ) -> StorageBytes:
        scaled = shard.pooling == "mean"
        count = tt_scratch(_shape(shard), load, device_type, scaled, replicated)
        return StorageBytes(hbm=count, host=0) if device_type == "cuda" else StorageBytes(0, count)

    def lookup_bandwidth(self, device_type: str, hbm_bw: float, host_bw: float) -> float:
        # A row costs arithmetic, not traffic: on a GPU about six times a row's bytes, on a CPU,
        # where some thousand operations make a value of a row, a hundred times.
        return hbm_bw / 6 if device_type == "cuda" else host_bw / 100

    def work(
        self,
        shard: TableShard,
        optimizer: OptimizerSpec | None,
        load: Workload,
        device_type: str,
    ) -> Work:
        return tt_work(_shape(shard), load, device_type)

    def calibration_cases(self, device_type: str) -> list[CalibrationCase]:
        return tt_cases(TTOptions, device_type)

    @staticmethod
    def state_of(shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, TensorSpec]:
        """As :meth:`state_spec`."""
        shape, made = _shape(shard), _optimizer(optimizer)
        spec = {
            f"tt_core_{k}": TensorSpec(shape.core_shape(k), shard.dtype)
            for k in range(shape.num_cores)
        }
        spec["tt_shape"] = TensorSpec((1 + len(shape.packed()),), torch.int64)
        if (cache := _options(shard).cache) is not None:
            sizes = cache.state_shapes(shape, made)
            spec |= {key: TensorSpec(*size) for key, size in sizes.items()}
        if made is None:
            return spec
        for k in range(shape.num_cores):
            if width := made.state_width(shape.slice_size(k)):
                spec[f"tt_state_{k}"] = TensorSpec((shape.p[k], width), torch.float32)
        spec["optimizer_step"] = TensorSpec((1,), torch.int64)
        return spec

    def state_spec(
        self, shard: TableShard, optimizer: OptimizerSpec | None
    ) -> dict[str, TensorSpec]:
        return self.state_of(shard, optimizer)

    def create_lookup(
        self,
        shards: Sequence[TableShard],
        feature_tables: Sequence[int],
        optimizer: OptimizerSpec | None,
        device: torch.device,
    ) -> TTLookup:
        for shard in shards:
            self.check(shard, optimizer, device.type)
        return TTLookup(shards, feature_tables, optimizer, device)
