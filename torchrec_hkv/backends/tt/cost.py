"""Arithmetic of a step of a ``tt`` table, and the tables that are timed to know how long it takes.

A row is made of products of slices of cores. Products of the cores before the last are made once
for each distinct prefix of a batch, and rows once for each distinct id
(docs/concepts/tensor_train.md).
"""

from __future__ import annotations

import math

from torchrec_hkv.backends.calibration import Batch, CalibrationCase
from torchrec_hkv.backends.protocol import BackendOptions, OptimizerSpec
from torchrec_hkv.backends.workload import Work, Workload
from torchrec_hkv.tensor_train import TTShape

#: Ranks up to each of these have constants of their own: kernels are made for them.
_RANKS = (16, 32, 64, 128, 256)
#: Shapes whose bounds a GPU's kernels have to look at take about so much longer.
_BOUNDS = 1.5
_TIMED_ROWS, _FEWER_ROWS = 11_000_000, 110_000
_TABLES = 4
_SGD, _ADAGRAD = OptimizerSpec("sgd"), OptimizerSpec("adagrad")


def tt_work(shape: TTShape, load: Workload, device_type: str) -> Work:
    """Work of a step: floating point operations, by the class of the ranks, and what is moved.

    Args:
        shape: of the table.
        load: what the step asks.
        device_type: of the tables.
    """
    kind = next((rank for rank in _RANKS if max(shape.ranks) <= rank), _RANKS[-1])
    ranks, q, factor = list(shape.full_ranks), list(shape.q), 1.0
    if device_type == "cuda":
        kind = max(kind, 32)
        if shape.num_cores == 3 and set(shape.ranks) == {kind} and q[-1] % 4 == 0:
            # Kernels take columns of prefixes by fours.
            q[:-1] = [-(-own // 4) * 4 for own in q[:-1]]
        else:
            factor = _BOUNDS
        # Kernels fill the ranks beside the last two cores up to the kind's.
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
        # Each prefix reads a slice of the core before the last, and the backward adds to one.
        f"prefix_bytes_rank_{kind}": prefixes * slice_bytes,
        "tables": 1.0,
    }
    rows = load.distinct * row
    # The backward makes the prefixes again; each product has two gradients.
    return Work(
        forward={**common, flop: factor * (once + rows)},
        backward={
            **common,
            flop: factor * (3 * once + 2 * rows),
            "core_bytes": 4.0 * shape.num_elements,
        },
    )


#: Ids that a GPU sorts in one launch, as ``kSmallBatch`` of csrc/tensor_train/index.cuh.
_SMALL_BATCH = 16384


def tt_scratch(
    shape: TTShape, load: Workload, device_type: str, scaled: bool, replicated: bool
) -> int:
    """Bytes that a step of a table takes for its time, beside ids and output.

    Args:
        shape: of the table.
        load: what the step asks.
        device_type: of the table.
        scaled: rows are multiplied, by weights or as means are.
        replicated: the gradient of all cores is a tensor that ranks average.
    """
    n, dim = math.ceil(load.ids), shape.embedding_dim
    flat = 4 * (shape.num_elements + sum(shape.p)) if replicated else 0
    if device_type != "cuda":
        distinct = math.ceil(min(load.distinct, n))
        # The index; numbers, bags and a directory of ids and prefixes, and the distinct rows.
        return 8 * n + max(16 * n + (4 * dim + 40) * distinct, flat)
    prefixes = math.prod(shape.p[:-1])
    index = 8 * (2 * min(n, prefixes) + (4 if scaled else 3) * n + 400)
    row, small = 4 * (-(-dim // 4) * 4), n <= _SMALL_BATCH
    slots = row * (n // 2 + 1)
    partial = (2 * row + 8) * -(-n // (128 if small else 512))
    lookup = row * n if small else slots
    # Sort, lookup and backward come one after the other.
    return index + max(0 if small else 28 * n, lookup, slots + partial + flat)


def _occupied(balls: float, boxes: float) -> float:
    """Boxes that are expected to have a ball, where balls come to all alike."""
    return boxes if boxes <= 1 else -boxes * math.expm1(balls * math.log1p(-1 / boxes))


def tt_cases(options: type[BackendOptions], device_type: str) -> list[CalibrationCase]:
    """The tables that are timed."""
    ranks = _RANKS[:4] if device_type == "cpu" else _RANKS[1:]
    # The ids of a batch that rank 32 does in some ten milliseconds on a CPU.
    base = 4096 if device_type == "cpu" else 65536
    timed = [(rank, 64, _TIMED_ROWS, _SGD, 1) for rank in ranks]
    timed += [(rank, 64, _FEWER_ROWS, _ADAGRAD, 1) for rank in ranks]
    timed += [(32, dim, _FEWER_ROWS, _SGD, 1) for dim in (16, 32, 128)]
    # All tables of a group run together, by kernels that go by the ids of all.
    timed += [(32, dim, _TIMED_ROWS, _ADAGRAD, _TABLES) for dim in (32, 64, 128)]
    cases = []
    for rank, dim, rows, optimizer, tables in timed:
        most = max(256, base * 32 // max(rank, 32))
        # A GPU sorts few ids in another way, which takes less than what is fitted to more of them.
        few = most // (2 if device_type == "cuda" and tables == 1 else 8)
        batches = (
            Batch(few, 1),
            Batch(most, 1),
            Batch(most // 8, 16 // tables),
            Batch(most // 8, 16, skew=4.0),
        )
        options_of_rank = options(ranks=rank)
        cases.append(
            CalibrationCase(options_of_rank, rows, rows, dim, optimizer, batches, 1.0, tables)
        )
    return cases
