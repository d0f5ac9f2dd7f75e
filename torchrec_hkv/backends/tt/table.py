"""Derives the Tensor-Train table of a shard: its options, cores and state."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrec_hkv.backends.optimizers import hash_table_optimizer
from torchrec_hkv.backends.protocol import OptimizerSpec, TableShard, TensorSpec
from torchrec_hkv.backends.tt.options import TTOptions
from torchrec_hkv.hash_table import Optimizer
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.tensor_train import TTShape, initial_cores

_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def options_of(shard: TableShard) -> TTOptions:
    """The options of a shard.

    Raises:
        ValueError: the options are those of another backend.
    """
    return shard.options_as(TTOptions, "tt")


def shape_of(shard: TableShard) -> TTShape:
    """The shape of a table's cores.

    Raises:
        ValueError: no shape satisfies the options.
    """
    try:
        return options_of(shard).shape(
            shard.num_embeddings, shard.embedding_dim, shard.dtype.itemsize
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"table '{shard.name}': {error}") from None


def head_bytes(shape: TTShape) -> int:
    """Bytes of GPU memory for a table with four cores: the products of its first two cores, and
    their gradients."""
    if shape.num_cores != 4:
        return 0
    return 8 * math.prod(shape.p[:2]) * math.prod(shape.q[:2]) * shape.ranks[1]


def optimizer_of(spec: OptimizerSpec | None) -> Optimizer | None:
    """The optimizer of slices of cores.

    Raises:
        ValueError: the backend lacks this optimizer, or an attribute has an invalid value.
    """
    if spec is not None and spec.name not in _OPTIMIZERS:
        raise ValueError(
            f"optimizer is {spec.name!r}, but backend 'tt' takes 'sgd', 'adagrad', "
            "'rowwise_adagrad' or 'adam'."
        )
    if spec is not None and spec.max_norm is not None:
        raise ValueError(
            f"max_norm is {spec.max_norm}, but backend 'tt' stores no rows whose norm could be "
            "limited: leave it out, or limit gradients by gradient_clipping=True and max_gradient."
        )
    return hash_table_optimizer(spec)


def initial_cores_of(shard: TableShard, device: torch.device) -> list[Tensor]:
    """Cores whose rows have the mean and variance of the config's uniform distribution."""
    low, high = shard.init_range
    options = options_of(shard)
    generator = torch.Generator().manual_seed(table_seed(options.seed, shard.name))
    return initial_cores(
        shape_of(shard),
        options.weight_dist,
        mean=(low + high) / 2,
        std=(high - low) / math.sqrt(12),
        generator=generator,
        device=device,
        dtype=shard.dtype,
    )


def state_of(shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, TensorSpec]:
    """The tensors of the shard's state, see :meth:`Backend.state_spec`."""
    shape, tt_optimizer = shape_of(shard), optimizer_of(optimizer)
    spec = {
        f"tt_core_{k}": TensorSpec(shape.core_shape(k), shard.dtype) for k in range(shape.num_cores)
    }
    spec["tt_shape"] = TensorSpec((1 + len(shape.packed()),), torch.int64)
    if (cache := options_of(shard).cache) is not None:
        sizes = cache.state_shapes(shape, tt_optimizer)
        spec |= {key: TensorSpec(*size) for key, size in sizes.items()}
    if tt_optimizer is None:
        return spec
    for k in range(shape.num_cores):
        if width := tt_optimizer.state_width(shape.slice_size(k)):
            spec[f"tt_state_{k}"] = TensorSpec((shape.p[k], width), torch.float32)
    spec["optimizer_step"] = TensorSpec((1,), torch.int64)
    return spec
