"""The work of a step of an ``hkv`` table, and the tables timed to calibrate it."""

from __future__ import annotations

import dataclasses

from torchrec_hkv.backends.calibration import (
    ROW_TABLES,
    CalibrationCase,
    row_batches,
    row_tables,
    rows_in,
)
from torchrec_hkv.backends.protocol import BackendOptions, OptimizerSpec
from torchrec_hkv.backends.workload import Work, Workload, row_work
from torchrec_hkv.hash_table import TableMemory, gpu_table_bytes
from torchrec_hkv.hash_table.table_memory import hbm_share_for

#: Load factor of the timed tables.
_LOAD = 0.8
#: Bytes of the timed table with rows in host memory, and the share of its slots in HBM.
_TIERED_BYTES, _TIERED_SHARE = 2 << 30, 0.25


def hkv_work(
    memory: TableMemory, dim: int, load: Workload, hbm_bytes: int | None, device_type: str
) -> Work:
    """The work of a step.

    Args:
        memory: memory of the shard.
        dim: number of columns of the shard.
        load: the step's ids in the shard.
        hbm_bytes: limit of HBM in bytes; None for no limit.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    work = row_work(load, dim, memory.row_bytes)
    # Ids that don't fit in the table are inserted each time they occur, and evict another id.
    new = load.distinct_beyond(memory.num_slots, memory.num_slots)
    work = dataclasses.replace(work, forward={**work.forward, "new": new})
    if device_type != "cuda" or gpu_table_bytes(memory, hbm_bytes)[1] == 0:
        return work
    near = hbm_share_for(memory, hbm_bytes)
    moving = memory.row_bytes - (memory.state_bytes if near.all_states else 0)
    moved = load.distinct_beyond(near.slots, memory.num_slots) * moving
    return dataclasses.replace(work, forward={**work.forward, "moved_bytes": moved})


def far_share(memory: TableMemory, load: Workload, hbm_bytes: int | None) -> float:
    """Share of a step's unique ids whose rows a GPU fetches from host memory.

    Args:
        memory: memory of the shard.
        load: the step's ids in the shard.
        hbm_bytes: limit of HBM in bytes; None for no limit.
    """
    if gpu_table_bytes(memory, hbm_bytes)[1] == 0 or load.distinct <= 0:
        return 0.0
    near = hbm_share_for(memory, hbm_bytes).slots
    return min(load.distinct_beyond(near, memory.num_slots) / load.distinct, 1.0)


def hkv_cases(options: type[BackendOptions], device_type: str) -> list[CalibrationCase]:
    """The tables that calibration times."""
    cases = [_case(options(), *table, device_type) for table in row_tables(device_type)]
    for size in ROW_TABLES[device_type]:
        full = _case(options(), size, 64, "rowwise_adagrad", device_type)
        alike = tuple(batch for batch in full.batches if batch.skew == 1.0)
        cases.append(dataclasses.replace(full, rows=2 * full.capacity, batches=alike))
    if device_type == "cuda":
        tiered = _case(options(), _TIERED_BYTES, 64, "rowwise_adagrad", device_type)
        # The index takes less than 32 bytes a slot.
        near = round(tiered.capacity * (32 + _TIERED_SHARE * 4 * (64 + 1)))
        cases.append(
            dataclasses.replace(
                tiered,
                options=options(hbm_bytes=near),
                batches=tuple(batch for batch in tiered.batches if batch.skew == 1.0),
                size=float(ROW_TABLES[device_type][-1]),
            )
        )
    return cases


def _case(
    options: BackendOptions, size: int, dim: int, optimizer: str, device_type: str
) -> CalibrationCase:
    rows = rows_in(size, dim, optimizer)
    return CalibrationCase(
        options=options,
        rows=rows,
        capacity=round(rows / _LOAD),
        dim=dim,
        optimizer=OptimizerSpec(optimizer),
        batches=row_batches(device_type),
        size=float(size),
    )
