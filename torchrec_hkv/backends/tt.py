"""The backend ``tt``: Tensor-Train tables, hundreds of times smaller than dense ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

import torch
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
from torchrec_hkv.backends.tt_cost import tt_cases, tt_work
from torchrec_hkv.backends.workload import Work, Workload
from torchrec_hkv.hash_table import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.tensor_train import (
    Precision,
    TTDistribution,
    TTGroup,
    TTShape,
    check_precision,
    initial_cores,
    make_shape,
)

_DTYPES = (torch.float32, torch.bfloat16)
_DEFAULT_RANK = 32
_MOST_RANK_ON_CUDA = 256
#: Of the state of a table: what the tensors are.
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TTOptions(BackendOptions):
    """Options of a ``tt`` table. Ids are row numbers, 0 to ``num_embeddings - 1``.

    Attributes:
        ranks: between neighbouring cores; one number for all is lowered where a table has no use
            for it. None, with neither ``compression_ratio`` nor ``max_bytes``: 32.
        compression_ratio: the cores are at least so many times smaller than the table in elements.
        max_bytes: the cores take at most so many bytes.
        p: row factors, of a product not below ``num_embeddings``; None: balanced ones.
        q: column factors, of the product ``embedding_dim``; None: balanced ones.
        num_cores: 2, 3 or 4; None: as factors or ranks say, else 3.
        weight_dist: distribution of the initial cores, see
            :func:`torchrec_hkv.tensor_train.initial_cores`. Entries of the table have the mean and
            variance of the uniform distribution between the config's ``weight_init_min`` and
            ``weight_init_max``.
        seed: of the initial cores, mixed with the table's name; any int64.
        precision: of products on a GPU, ``"fp32"`` or ``"tf32"``, see
            :class:`torchrec_hkv.tensor_train.TTGroup`. Tables that are looked up together are all
            in ``"fp32"`` where one of them asks for it.
    """

    ranks: int | tuple[int, ...] | None = None
    compression_ratio: float | None = None
    max_bytes: int | None = None
    p: tuple[int, ...] | None = None
    q: tuple[int, ...] | None = None
    num_cores: int | None = None
    weight_dist: TTDistribution = "approx-normal"
    seed: int = 0
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        for name in ("ranks", "p", "q"):
            value = getattr(self, name)
            if isinstance(value, list):  # TorchRec hashes options
                object.__setattr__(self, name, tuple(value))
        if self.weight_dist not in get_args(TTDistribution):
            raise ValueError(
                f"TTOptions: weight_dist is {self.weight_dist!r}, but must be one of "
                f"{', '.join(map(repr, get_args(TTDistribution)))}."
            )
        check_precision(self.precision)
        given = [name for name in _SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"TTOptions: {' and '.join(given)} were given, but at most one of them can be."
            )
        if not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(
                f"TTOptions: seed is {self.seed!r}, but must be an integer from -2^63 to 2^63 - 1."
            )

    def shape(self, num_embeddings: int, embedding_dim: int, element_size: int = 4) -> TTShape:
        """The shape of a table with these options.

        Raises:
            TypeError: a number is not an integer.
            ValueError: the options do not fit the table.
        """
        sizes = {name: getattr(self, name) for name in _SIZES}
        if all(value is None for value in sizes.values()):
            sizes["ranks"] = _DEFAULT_RANK
        return make_shape(
            num_embeddings,
            embedding_dim,
            num_cores=self.num_cores,
            p=self.p,
            q=self.q,
            element_size=element_size,
            **sizes,
        )


_SIZES = ("ranks", "compression_ratio", "max_bytes")


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
        )
        # No parameters: the sharded module exports them by table.
        self._cores = [core for shard in shards for core in _initial_cores(shard, device)]
        self._states = self._group.make_states(device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._lookups = torch.zeros(len(shards), dtype=torch.int64, device=device)
        self._feature_tables = torch.tensor(list(feature_tables), device=device)
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        learning_rate: Tensor,
    ) -> Tensor:
        kind = {"weights": weights, "mean": self._mean}
        if not self.training:
            return self._group.lookup(self._cores, ids, offsets, batch_size, **kind)
        index = self._group.sort(ids, offsets, batch_size, **kind)
        if batch_size > 0:
            self._lookups.index_add_(0, self._feature_tables, offsets[::batch_size].diff())
        if self._group.optimizer is None:
            out = self._group.lookup(self._cores, ids, offsets, batch_size, index=index, **kind)
            return out + self._anchor.sum()
        return self._group.lookup_fused(
            self._anchor,
            self._cores,
            self._states,
            self._step,
            ids,
            offsets,
            batch_size,
            learning_rate,
            index=index,
            **kind,
        )

    def export_table(self, name: str) -> dict[str, Tensor]:
        return {key: tensor.detach().clone() for key, tensor in self._tensors(name).items()}

    def load_table(self, name: str, state: Mapping[str, Tensor]) -> None:
        own = self._tensors(name)
        for key, tensor in own.items():
            if key not in state:
                raise ValueError(f"table '{name}': the state to load lacks {key!r}.")
            if state[key].shape != tensor.shape or state[key].dtype != tensor.dtype:
                raise ValueError(
                    f"table '{name}': in the state to load {key!r} has shape "
                    f"{tuple(state[key].shape)} and dtype {state[key].dtype}, but the table has "
                    f"{tuple(tensor.shape)} and {tensor.dtype}."
                )
        if state["tt_shape"].tolist() != own["tt_shape"].tolist():
            raise ValueError(
                f"table '{name}': the state to load has the shape {state['tt_shape'].tolist()} "
                "(format, rows, cores, factors of rows and columns, ranks), but the table has "
                f"{own['tt_shape'].tolist()}."
            )
        for key, tensor in own.items():
            tensor.copy_(state[key])

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """The state of a table, by the names of :meth:`TTBackend.state_of`; not copied."""
        table = self._index[name]
        shape, cores = self._group.shapes[table], self._group.cores_of(table)
        tensors = {f"tt_core_{k}": core for k, core in enumerate(self._cores[cores])}
        tensors |= {f"tt_state_{k}": state for k, state in enumerate(self._states[cores])}
        tensors["tt_shape"] = torch.tensor([_FORMAT, *shape.packed()])
        tensors["optimizer_step"] = self._step
        spec = TTBackend.state_of(self._shards[name], self._optimizer)
        return {key: tensors[key] for key in spec}

    def counters(self, name: str) -> dict[str, int]:
        """``lookups`` in training, and ``size`` and ``capacity``, the table's rows."""
        rows = self._shards[name].num_embeddings
        lookups = int(self._lookups[self._index[name]])
        return {"lookups": lookups, "size": rows, "capacity": rows}

    def memory(self, name: str) -> StorageBytes:
        """Bytes of cores, optimizer states, the float32 gradient of all cores, and on a GPU the
        products of the first two of four cores."""
        cores = self._group.cores_of(self._index[name])
        tensors = [*self._cores[cores], *self._states[cores]]
        count = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        on_gpu = tensors[0].device.type == "cuda"
        if on_gpu or self._group.optimizer is not None:
            count += 4 * sum(core.numel() for core in self._cores[cores])
        if on_gpu:
            count += _head_bytes(self._group.shapes[self._index[name]])
        return StorageBytes(count, 0) if on_gpu else StorageBytes(0, count)

    def cores(self, name: str) -> list[Tensor]:
        """The cores of a table, not copied."""
        return self._cores[self._group.cores_of(self._index[name])]


class TTBackend(Backend):
    """Tensor-Train tables as a backend."""

    name: ClassVar[str] = "tt"
    options_type: ClassVar[type[BackendOptions]] = TTOptions
    sharding_types: ClassVar[tuple[str, ...]] = (ShardingType.TABLE_WISE.value,)
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
        return StorageBytes(hbm=count if on_gpu else 0, host=0 if on_gpu else count)

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
