"""The work of a step of a ``tt`` table, and the tables timed to calibrate it.

A row is a product of slices of cores. A step computes the product of all cores but the last once
for each unique prefix of a batch, and the row once for each unique id.
"""

from __future__ import annotations

import math

from torchrec_hkv.backends.calibration import CalibrationBatch, CalibrationCase
from torchrec_hkv.backends.protocol import BackendOptions, OptimizerSpec
from torchrec_hkv.backends.workload import Work, Workload
from torchrec_hkv.tensor_train import TTShape

#: Upper bounds of the classes of ranks. Each class has kernels and constants of its own.
_RANKS = (16, 32, 64, 128, 256)
#: Slowdown of GPU kernels that have to check bounds.
_BOUNDS = 1.5
_TIMED_ROWS, _FEWER_ROWS = 11_000_000, 110_000
_TABLES = 4
_SGD, _ADAGRAD = OptimizerSpec("sgd"), OptimizerSpec("adagrad")


def tt_work(shape: TTShape, load: Workload, device_type: str) -> Work:
    """The work of a step: floating point operations by class of ranks, and memory traffic.

    Args:
        shape: shape of the table.
        load: the step's ids in the table.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    kind = next((rank for rank in _RANKS if max(shape.ranks) <= rank), _RANKS[-1])
    ranks, q, factor = list(shape.full_ranks), list(shape.q), 1.0
    if device_type == "cuda":
        kind = max(kind, 32)
        if shape.num_cores == 3 and set(shape.ranks) == {kind} and q[-1] % 4 == 0:
            # The kernels process columns of prefixes in groups of four.
            q[:-1] = [-(-dim_factor // 4) * 4 for dim_factor in q[:-1]]
        else:
            factor = _BOUNDS
        # The kernels pad the ranks next to the last two cores to the bound of the class.
        ranks[-3:-1] = [1 if rank == 1 else max(kind, rank) for rank in ranks[-3:-1]]
    row = 2.0 * math.prod(q) * ranks[-2]
    heads, prefixes, prefix, slice_bytes = 0.0, 0.0, 0.0, 0.0
    if shape.num_cores >= 3:
        prefixes = _occupied(load.distinct, math.prod(shape.p[:-1]))
        prefix = 2.0 * math.prod(q[:-1]) * ranks[-3] * ranks[-2]
        slice_bytes = 4.0 * ranks[-3] * shape.q[-2] * ranks[-2]
    if shape.num_cores == 4:
        pairs = shape.p[0] * shape.p[1]
        head = 2.0 * math.prod(shape.q[:2]) * ranks[1] * ranks[2]
        heads = head * (pairs if device_type == "cuda" else _occupied(load.distinct, pairs))
    once = heads + prefixes * prefix
    flop = f"flop_rank_{kind}"
    common = {
        "ids": load.ids,
        "distinct": load.distinct,
        "id_bytes": 4.0 * load.ids * shape.embedding_dim,
        "bag_bytes": 4.0 * load.bags * shape.embedding_dim,
        # Each prefix reads a slice of the last core but one; its backward adds to a slice.
        f"prefix_bytes_rank_{kind}": prefixes * slice_bytes,
        "tables": 1.0,
    }
    rows = load.distinct * row
    # The backward recomputes the prefixes, and each product has two gradients.
    return Work(
        forward={**common, flop: factor * (once + rows)},
        backward={
            **common,
            flop: factor * (3 * once + 2 * rows),
            "core_bytes": 4.0 * shape.num_elements,
        },
    )


#: Number of ids that a GPU sorts in one launch: ``kSmallBatch`` of csrc/tensor_train.
_SMALL_BATCH = 16384


def tt_scratch(
    shape: TTShape, load: Workload, device_type: str, scaled: bool, replicated: bool
) -> int:
    """Temporary memory of a step in bytes, without ids and output.

    Args:
        shape: shape of the table.
        load: the step's ids in the table.
        device_type: ``"cpu"`` or ``"cuda"``.
        scaled: whether rows are multiplied, by weights or by the factors of a mean.
        replicated: whether the gradient of all cores is a tensor that is averaged over ranks.
    """
    n, dim = math.ceil(load.ids), shape.embedding_dim
    flat = 4 * (shape.num_elements + sum(shape.p)) if replicated else 0
    if device_type != "cuda":
        distinct = math.ceil(min(load.distinct, n))
        # The index: numbers, bags, and a directory of ids and prefixes; and the unique rows.
        return 8 * n + max(16 * n + (4 * dim + 40) * distinct, flat)
    prefixes = math.prod(shape.p[:-1])
    index = 8 * (2 * min(n, prefixes) + (4 if scaled else 3) * n + 400)
    row, small = 4 * (-(-dim // 4) * 4), n <= _SMALL_BATCH
    slots = row * (n // 2 + 1)
    partial = (2 * row + 8) * -(-n // (128 if small else 512))
    lookup = row * n if small else slots
    # Sort, lookup and backward run one after the other, so only the largest counts.
    return index + max(0 if small else 28 * n, lookup, slots + partial + flat)


def _occupied(balls: float, boxes: float) -> float:
    """Expected number of boxes with a ball when balls fall into boxes uniformly."""
    return boxes if boxes <= 1 else -boxes * math.expm1(balls * math.log1p(-1 / boxes))


def tt_cases(options: type[BackendOptions], device_type: str) -> list[CalibrationCase]:
    """The tables that calibration times."""
    ranks = _RANKS[:4] if device_type == "cpu" else _RANKS[1:]
    # Number of ids that a CPU processes in about ten milliseconds at rank 32.
    base = 4096 if device_type == "cpu" else 65536
    timed = [(rank, 64, _TIMED_ROWS, _SGD, 1) for rank in ranks]
    timed += [(rank, 64, _FEWER_ROWS, _ADAGRAD, 1) for rank in ranks]
    timed += [(32, dim, _FEWER_ROWS, _SGD, 1) for dim in (16, 32, 128)]
    # All tables of a group run in the same kernels, whose choice depends on all ids together.
    timed += [(32, dim, _TIMED_ROWS, _ADAGRAD, _TABLES) for dim in (32, 64, 128)]
    cases = []
    for rank, dim, rows, optimizer, tables in timed:
        maximum = max(256, base * 32 // max(rank, 32))
        # A GPU sorts small batches by another, faster method, which must not enter the fit.
        few = maximum // (2 if device_type == "cuda" and tables == 1 else 8)
        batches = (
            CalibrationBatch(few, 1),
            CalibrationBatch(maximum, 1),
            CalibrationBatch(maximum // 8, 16 // tables),
            CalibrationBatch(maximum // 8, 16, skew=4.0),
        )
        options_of_rank = options(ranks=rank)
        cases.append(
            CalibrationCase(options_of_rank, rows, rows, dim, optimizer, batches, 1.0, tables)
        )
    return cases
