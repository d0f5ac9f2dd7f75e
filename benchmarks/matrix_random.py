"""Random cells for the matrix (``benchmarks/matrix.py``).

The random shapes with the highest ratios show what the hand-picked sections miss.
"""

from __future__ import annotations

import random

from benchmarks.matrix_cells import CPU_OPTIMIZERS, SKEWS, Cell

_DIMS = (4, 8, 12, 16, 20, 32, 48, 64, 80, 96, 100, 128, 132, 160, 192, 256, 320, 512, 768, 1024)
_MIXED = (8, 16, 32, 64, 128, 256)
_POLICIES = ("lru", "lru", "lfu", "adaptive", "epoch_lfu")
_OPTIMIZERS = ("rowwise_adagrad", "rowwise_adagrad", "rowwise_adagrad", "adam", "sgd", "adagrad")
_MIN_IDS = 2000


def random_cells(device: str, number: int, seed: int) -> list[Cell]:
    """Draws distinct cells. Equal arguments give equal cells.

    Args:
        device: ``"cuda"`` or ``"cpu"``. Cells for a CPU are smaller.
        number: number of cells.
        seed: seed of the draws.
    """
    draws = random.Random(seed)
    cells: dict[Cell, None] = {}
    while len(cells) < number:
        cell = _draw(draws, device)
        if _fits(cell, device):
            cells.setdefault(cell)
    return list(cells)


def _draw(draws: random.Random, device: str) -> Cell:
    on_gpu = device != "cpu"
    tables = draws.choice((1, 1, 2, 4, 8, 16, 26, 60, 100, 300))
    mixed = draws.random() < 0.2
    optimizer = draws.choice(_OPTIMIZERS)
    # FBGEMM's Adam has no rows of 16 bits; its CPU tables have neither Adam nor bf16.
    dtypes = ("fp32",) if optimizer == "adam" else ("fp32", "fp32", "fp16", "bf16")
    if not on_gpu and optimizer not in CPU_OPTIMIZERS:
        optimizer = "rowwise_adagrad"
    width = draws.choice(_DIMS)
    return Cell(
        "random",
        tuple(draws.choice(_MIXED) if mixed else width for _ in range(tables)),
        draws.choice(SKEWS),
        batch=draws.choice((128, 512, 2048, 8192, 16384, 65536)),
        bag=draws.choice((1, 1, 2, 5, 10, 20, 50, 100, 200, 500)),
        rows=draws.choice((20_000, 100_000, 500_000, 2_000_000)),
        dtype=draws.choice(dtypes),
        policy=draws.choice(_POLICIES),
        optimizer=optimizer,
        reduction=draws.choice(("sum", "sum", "mean", "weighted")),
    )


def _fits(cell: Cell, device: str) -> bool:
    """Returns whether a cell is neither too slow, nor too large, nor too small to be timed."""
    on_gpu = device != "cpu"
    columns = sum(cell.dims)
    ids = len(cell.dims) * cell.batch * cell.bag
    table_bytes = 12 * columns * cell.rows
    output_bytes = 4 * columns * cell.batch
    max_ids, max_table, max_output = (8_000_000, 40e9, 4e9) if on_gpu else (200_000, 2e9, 200e6)
    return _MIN_IDS <= ids <= max_ids and table_bytes <= max_table and output_bytes <= max_output
