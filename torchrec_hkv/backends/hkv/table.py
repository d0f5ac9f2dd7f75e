"""The hash table that a shard asks for: its options, its memory, its state."""

from __future__ import annotations

from torchrec_hkv.backends.hkv.dense import dense_capacity
from torchrec_hkv.backends.hkv.options import HKVOptions
from torchrec_hkv.backends.hkv.state import state_spec
from torchrec_hkv.backends.optimizers import state_width
from torchrec_hkv.backends.protocol import OptimizerSpec, TableShard, TensorSpec
from torchrec_hkv.hash_table import Initializer, TableMemory, TableSpec, Uniform, table_memory
from torchrec_hkv.hash_table.eviction import keeps_scores


def options_of(shard: TableShard) -> HKVOptions:
    """The options of a table.

    Raises:
        ValueError: they are those of another backend.
    """
    return shard.options_as(HKVOptions, "hkv")


def initializer_of(shard: TableShard) -> Initializer:
    """What rows start from: as the options say, or uniform between the config's bounds.

    Raises:
        ValueError: the bounds are impossible.
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
    """What the shard's table takes."""
    options = options_of(shard)
    return table_memory(
        _slots_wanted(shard),
        shard.dim,
        state_width(optimizer, shard.dim),
        options.eviction,
        element_bytes=shard.dtype.itemsize,
        admission=options.admission,
        initial_capacity=_initial_capacity(shard),
        remember_evicted=options.remember_evicted,
        restore_counts=options.restore_counts,
    )


def hbm_bytes_of(shard: TableShard, optimizer: OptimizerSpec | None) -> int | None:
    """The bytes that the table may take of a GPU; None for all of it."""
    told = options_of(shard).hbm_bytes
    return memory_of(shard, optimizer).least_hbm_bytes if told == "index" else told


def _slots_wanted(shard: TableShard) -> int:
    """Slots asked for: a table that must hold every row has some more than rows."""
    return dense_capacity(shard.capacity) if options_of(shard).dense else shard.capacity


def _initial_capacity(shard: TableShard) -> int | None:
    """The shard's part, rounded up."""
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
    """The hash table that holds the shard."""
    options = options_of(shard)
    return TableSpec(
        name=shard.name,
        capacity=_slots_wanted(shard),
        dim=shard.dim,
        dtype=shard.dtype,
        eviction=options.eviction,
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
    """The tensors of the shard's state, as :meth:`Backend.state_spec` says."""
    options = options_of(shard)
    if options.dense:
        return {"weight": TensorSpec((shard.capacity, shard.dim), shard.dtype)}
    slots, scored = memory_of(shard, optimizer).num_slots, keeps_scores(options.eviction)
    return state_spec(shard, optimizer, slots, scored, options.admission)
