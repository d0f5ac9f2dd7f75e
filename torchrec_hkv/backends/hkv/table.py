"""Derives the hash table of a shard: its options, memory and state."""

from __future__ import annotations

from torchrec_hkv.backends.hkv.dense import dense_capacity
from torchrec_hkv.backends.hkv.options import HKVOptions
from torchrec_hkv.backends.hkv.state import state_spec
from torchrec_hkv.backends.optimizers import state_width
from torchrec_hkv.backends.protocol import OptimizerSpec, TableShard, TensorSpec
from torchrec_hkv.hash_table import Initializer, TableMemory, TableSpec, Uniform, table_memory
from torchrec_hkv.hash_table.eviction import keeps_scores


def options_of(shard: TableShard) -> HKVOptions:
    """The options of a shard.

    Raises:
        ValueError: the options are those of another backend.
    """
    return shard.options_as(HKVOptions, "hkv")


def initializer_of(shard: TableShard) -> Initializer:
    """The initializer of the options; by default uniform between the config's bounds.

    Raises:
        ValueError: the bounds are invalid.
    """
    if (chosen := options_of(shard).initializer) is not None:
        return chosen
    low, high = shard.init_range
    try:
        return Uniform(low, high)
    except ValueError:
        raise ValueError(
            f"table '{shard.name}': weight_init_min is {low} and weight_init_max is {high}, but "
            "both must be finite in float32 and the first must not be larger."
        ) from None


def memory_of(shard: TableShard, optimizer: OptimizerSpec | None) -> TableMemory:
    """Memory of the shard's table."""
    options = options_of(shard)
    return table_memory(
        _hbm_slots(shard),
        shard.dim,
        state_width(optimizer, shard.dim),
        options.table_eviction,
        element_bytes=shard.dtype.itemsize,
        admission=options.admission,
        initial_capacity=_initial_capacity(shard),
        remember_evicted=options.remember_evicted,
        restore_counts=options.restore_counts,
    )


def hbm_bytes_of(shard: TableShard, optimizer: OptimizerSpec | None) -> int | None:
    """Limit of the table's HBM in bytes; None for no limit."""
    hbm_bytes = options_of(shard).hbm_bytes
    return memory_of(shard, optimizer).least_hbm_bytes if hbm_bytes == "index" else hbm_bytes


def _hbm_slots(shard: TableShard) -> int:
    """Number of slots to ask for. A dense-compatible table has more slots than rows."""
    return dense_capacity(shard.capacity) if options_of(shard).dense else shard.capacity


def _initial_capacity(shard: TableShard) -> int | None:
    """The shard's part of the initial capacity, rounded up."""
    initial = options_of(shard).initial_capacity
    if initial is None:
        return None
    if initial > shard.num_embeddings:
        raise ValueError(
            f"table '{shard.name}': initial_capacity is {initial}, but must not exceed "
            f"num_embeddings, {shard.num_embeddings}."
        )
    return -(-initial * shard.capacity // shard.num_embeddings)


def table_spec(shard: TableShard, optimizer: OptimizerSpec | None) -> TableSpec:
    """The hash table of the shard."""
    options = options_of(shard)
    return TableSpec(
        name=shard.name,
        capacity=_hbm_slots(shard),
        dim=shard.dim,
        dtype=shard.dtype,
        eviction=options.table_eviction,
        hbm_bytes=hbm_bytes_of(shard, optimizer),
        seed=options.seed,
        initializer=initializer_of(shard),
        column_offset=shard.column_offset,
        admission=options.admission,
        expire_after=options.expire_after,
        strict=options.strict,
        initial_capacity=_initial_capacity(shard),
        remember_evicted=options.remember_evicted,
        restore_counts=options.restore_counts,
        deterministic=options.deterministic,
    )


def state_of(shard: TableShard, optimizer: OptimizerSpec | None) -> dict[str, TensorSpec]:
    """The tensors of the shard's state, see :meth:`Backend.state_spec`."""
    options = options_of(shard)
    if options.dense:
        return {"weight": TensorSpec((shard.capacity, shard.dim), shard.dtype)}
    slots, scored = memory_of(shard, optimizer).num_slots, keeps_scores(options.table_eviction)
    return state_spec(shard, optimizer, slots, scored, options.admission)
