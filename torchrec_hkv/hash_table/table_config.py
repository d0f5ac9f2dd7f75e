"""Converts a table's spec to the configuration that the C++ runtime takes."""

from __future__ import annotations

import torch

from torchrec_hkv import _C
from torchrec_hkv.hash_table.admission import admission_config
from torchrec_hkv.hash_table.eviction import (
    FIRST_C,
    KINDS,
    POLICIES,
    AgedLFU,
    check_eviction,
    name_of,
)
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.hash_table.initializers import op_arguments
from torchrec_hkv.hash_table.spec_checks import (
    check_expire_after,
    check_flag,
    check_integer,
    check_remember_evicted,
    check_restore_counts,
)
from torchrec_hkv.hash_table.table_memory import hbm_share_for, table_memory
from torchrec_hkv.hash_table.table_spec import TableSpec

_ROW_TYPES = {
    torch.float32: _C.RowType.FLOAT32,
    torch.float16: _C.RowType.FLOAT16,
    torch.bfloat16: _C.RowType.BFLOAT16,
    torch.int8: _C.RowType.INT8,
}


def check_types(spec: TableSpec) -> None:
    """Checks the types of a spec's name and numbers.

    Raises:
        ValueError: a type is wrong; the message names the table.
    """
    if not isinstance(spec.name, str):
        raise ValueError(f"A table's name is {spec.name!r}, but must be a string.")
    for name in ("capacity", "dim", "seed", "column_offset"):
        check_integer(f"table '{spec.name}'", name, getattr(spec, name))
    for name in ("hbm_bytes", "initial_capacity"):
        check_integer(f"table '{spec.name}'", name, getattr(spec, name), or_none=True)


def table_config(spec: TableSpec, state_dim: int, device: torch.device) -> _C.TableConfig:
    """The configuration of a table for the C++ runtime.

    Args:
        spec: the table.
        state_dim: number of float32 state values of a row.
        device: device of the table.

    Raises:
        ValueError: the spec is invalid; the message names the table.
    """
    check_eviction(f"table '{spec.name}'", spec.eviction, POLICIES)
    if not isinstance(spec.dtype, torch.dtype) or spec.dtype not in _ROW_TYPES:
        raise ValueError(
            f"table '{spec.name}': dtype is {spec.dtype}, but must be one of "
            f"{', '.join(map(str, _ROW_TYPES))}."
        )
    if spec.dtype == torch.int8 and spec.column_offset != 0:
        raise ValueError(
            f"table '{spec.name}': dtype is {spec.dtype} and column_offset {spec.column_offset}, "
            "but a row of int8 can't be split, because its columns share a scale."
        )
    check_expire_after(f"table '{spec.name}'", spec.expire_after)
    check_flag(f"table '{spec.name}'", "strict", spec.strict)
    check_flag(f"table '{spec.name}'", "deterministic", spec.deterministic)
    check_remember_evicted(f"table '{spec.name}'", spec.remember_evicted)
    check_restore_counts(
        f"table '{spec.name}'", spec.restore_counts, spec.remember_evicted, spec.eviction
    )
    try:
        admission = admission_config(spec.admission)
    except ValueError as error:
        raise ValueError(f"table '{spec.name}': {error}") from None
    memory = table_memory(
        spec.capacity,
        spec.dim,
        state_dim,
        spec.eviction,
        spec.dtype.itemsize,
        spec.admission,
        spec.initial_capacity,
        spec.remember_evicted,
        spec.restore_counts,
    )
    if spec.hbm_bytes is not None and spec.hbm_bytes < memory.least_hbm_bytes:
        raise ValueError(
            f"table '{spec.name}': hbm_bytes is {spec.hbm_bytes}, but {spec.capacity} rows "
            f"need at least {memory.least_hbm_bytes}: their index, and one bucket with its "
            "rows."
        )
    share = hbm_share_for(memory, spec.hbm_bytes if device.type == "cuda" else None)
    initial = spec.capacity if spec.initial_capacity is None else spec.initial_capacity
    return _C.TableConfig(
        name=spec.name,
        capacity=spec.capacity,
        initial_capacity=initial,
        dim=spec.dim,
        column_offset=spec.column_offset,
        eviction=KINDS[name_of(spec.eviction)],
        aging=spec.eviction.c if isinstance(spec.eviction, AgedLFU) else FIRST_C,
        adaptive=spec.eviction == "adaptive",
        row_type=_ROW_TYPES[spec.dtype],
        seed=table_seed(spec.seed, spec.name),
        hbm_slots=share.slots,
        all_states_in_hbm=share.all_states,
        admission=admission,
        expire_after=spec.expire_after or 0,
        remember_evicted=spec.remember_evicted or 0,
        restore_counts=spec.restore_counts,
        deterministic=spec.deterministic,
        **op_arguments(spec.initializer),
    )
