"""Training steps over many shapes: a ``TableGroup`` beside FBGEMM's static tables, as ratios.

    python -m benchmarks matrix --out benchmarks/results/matrix.csv --plot docs/matrix.svg
    python -m benchmarks matrix --sections dim dtype

Each cell is one shape: columns of the tables, how ids repeat, the rows' type, the eviction policy,
and the optimizer. Both sides run in one process on the same batches, eager, 20 steps back to back;
a step finds or inserts its ids, pools their rows, and updates them in the backward. The group gets
64-bit hashes as ids, FBGEMM's tables the row numbers. All ids are in the tables before, which have
a load factor of .8, but for the section ``evicting``, whose tables have room for 70 % of the ids.
``ratio`` is the group's time over FBGEMM's, ``find_ms`` that of the lookup of ids alone, and
``find_ratio`` that over the find of an LRU table for the same batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.environment import report
from benchmarks.ids import hashed, power_law
from benchmarks.matrix_plot import plot
from torchrec_hkv.hash_table import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
)

LEARNING_RATE = 0.01
LOAD = 0.8
STEPS = 20
ROUNDS = 3
#: By name: ours, and FBGEMM's where it has the optimizer.
OPTIMIZERS = {
    "sgd": (SGD(), EmbOptimType.EXACT_SGD),
    "rowwise_adagrad": (RowWiseAdagrad(eps=1e-8), EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    "adagrad": (Adagrad(eps=1e-8), EmbOptimType.EXACT_ADAGRAD),
    "adam": (Adam(eps=1e-8), EmbOptimType.ADAM),
    "adamw": (AdamW(eps=1e-8), EmbOptimType.ADAM),
    "lamb": (LAMB(eps=1e-8), EmbOptimType.LAMB),
    "ftrl": (FTRL(), None),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: What a row measures anew is replaced in a file.
KEYS = ("section", "dims", "skew", "batch", "bag", "dtype", "policy", "optimizer", "reduction")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape.

    Attributes:
        section: of the matrix.
        dims: columns, by table.
        skew: ``"uniform"``, a power law's exponent, or ``"hot"``: one id in 90 % of the positions.
        batch: samples.
        bag: ids of a bag.
        rows: of each table.
        dtype: of rows, a key of :data:`DTYPES`.
        policy: of eviction.
        optimizer: a key of :data:`OPTIMIZERS`.
        reduction: ``"sum"``, ``"mean"`` or ``"weighted"``.
        room: share of the ids that the group has room for; 1: all of them are in it.
    """

    section: str
    dims: tuple[int, ...]
    skew: str = "uniform"
    batch: int = 8192
    bag: int = 20
    rows: int = 500_000
    dtype: str = "fp32"
    policy: str = "lru"
    optimizer: str = "rowwise_adagrad"
    reduction: str = "sum"
    room: float = 1.0


SKEWS = ("uniform", "1.05", "1.2", "1.5", "hot")
DIMS = (4, 8, 16, 32, 64, 100, 128, 132, 160, 192, 256, 320, 384, 512, 768, 1024)


def sections() -> dict[str, list[Cell]]:
    """The cells, by section."""
    mixed = {
        "8+192": (8, 192) * 4,
        "16+64": (16, 64) * 8,
        "64+128": (64, 128) * 4,
        "128+256": (128, 256) * 2,
        "8..1024": (8, 16, 32, 64, 128, 256, 512, 1024),
    }
    return {
        "dim": [Cell("dim", (dim,) * 4, skew) for dim in DIMS for skew in SKEWS],
        "dim_adam": [
            Cell("dim_adam", (dim,) * 4, skew, optimizer="adam")
            for dim in (4, 32, 64, 128, 192, 256, 512, 1024)
            for skew in ("uniform", "1.2", "hot")
        ],
        "mixed": [
            Cell("mixed", dims, skew, bag=10, optimizer=optimizer)
            for dims in mixed.values()
            for skew in ("uniform", "1.2")
            for optimizer in ("rowwise_adagrad", "adam")
        ],
        "apart": [
            Cell("apart", (dim,) * number, skew, bag=10)
            for dim, number in ((8, 4), (192, 4), (16, 8), (64, 8), (64, 4), (128, 4), (256, 2))
            for skew in ("uniform", "1.2")
        ],
        "dtype": [
            Cell("dtype", (dim,) * 26, skew, bag=10, dtype=dtype)
            for dtype in ("fp16", "bf16")
            for dim in (64, 128, 256)
            for skew in ("uniform", "1.2")
        ],
        "policy": [
            Cell("policy", (128,) * 26, skew, bag=10, policy=policy)
            for policy in ("lru", "lfu", "epoch_lru", "epoch_lfu")
            for skew in SKEWS
        ],
        "optimizer": [
            Cell("optimizer", (dim,) * 8, "1.05", optimizer=optimizer)
            for optimizer in OPTIMIZERS
            for dim in (64, 128, 256)
        ],
        "shape": [
            Cell("shape", (64,), batch=65536, bag=1),
            Cell("shape", (128,), batch=4096, bag=500),
            Cell("shape", (64,) * 4, "1.5", bag=200),
            Cell("shape", (64,) * 100, batch=1024, bag=3, rows=100_000),
            Cell("shape", (32,) * 500, batch=128, bag=2, rows=20_000),
            Cell("shape", (256,) * 26, batch=512, bag=1, rows=100_000),
            Cell("shape", (128,) * 8, "1.2", reduction="mean"),
            Cell("shape", (128,) * 8, "1.2", reduction="weighted"),
            Cell("shape", (256,) * 8, "1.2", reduction="mean"),
            Cell("shape", (256,) * 8, "1.2", reduction="weighted"),
        ],
        "evicting": [
            Cell("evicting", (128,) * 26, bag=10, policy=policy, room=0.7, rows=1_000_000)
            for policy in ("lru", "lfu")
        ],
    }


def draw(cell: Cell, table_rows: int, device: torch.device) -> Tensor:
    """Row numbers of one batch, feature-major."""
    n = len(cell.dims) * cell.batch * cell.bag
    if cell.skew in ("uniform", "hot"):
        ids = torch.randint(table_rows, (n,), device=device)
    else:
        ids = power_law(n, table_rows, float(cell.skew), device)
    if cell.skew == "hot":
        ids = ids.where(torch.rand(n, device=device) >= 0.9, 7)
    return ids


class HashTables:
    """The group's side.

    Args:
        cell: the shape.
        device: a GPU.
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        capacity = int(cell.rows * cell.room / (LOAD if cell.room == 1 else 1))
        specs = [
            TableSpec(
                f"t{t}",
                capacity,
                dim,
                eviction=cell.policy,
                initializer=Uniform(-0.05, 0.05),
                dtype=DTYPES[cell.dtype],
            )
            for t, dim in enumerate(cell.dims)
        ]
        tables = len(cell.dims)
        self.cell = cell
        self.group = TableGroup(
            specs, list(range(tables)), OPTIMIZERS[cell.optimizer][0], device=device
        )
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self.learning_rate = torch.full((), LEARNING_RATE, device=device)
        for part in hashed(torch.arange(cell.rows, device=device)).split(1 << 17):
            ends = torch.arange(tables + 1, device=device) * len(part)
            self.group.find_or_insert(part.repeat(tables), ends, 1)
        counted = self.group.counters()
        if cell.room == 1 and any(table["size"] != cell.rows for table in counted):
            raise RuntimeError("a table has no room for an id; LOAD must be lower.")

    def find(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Slots."""
        return self.group.find_or_insert(ids, offsets, self.cell.batch)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Pooled rows."""
        pin = self.group.pin()
        slots = self.group.find_or_insert(ids, offsets, self.cell.batch, pin)
        mean = self.cell.reduction == "mean"
        return self.group.pooled_lookup(
            self.anchor,
            ids,
            offsets,
            weights,
            slots,
            self.cell.batch,
            mean,
            pin,
            self.learning_rate,
        )


def make_fbgemm(cell: Cell, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    """FBGEMM's side; 16-bit rows are fp16, with fp32 outputs."""
    narrow = cell.dtype != "fp32"
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(cell.rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for dim in cell.dims],
        optimizer=OPTIMIZERS[cell.optimizer][1],
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        weights_precision=SparseType.FP16 if narrow else SparseType.FP32,
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.MEAN if cell.reduction == "mean" else PoolingMode.SUM,
        device=device,
    )
    tables.init_embedding_weights_uniform(-0.05, 0.05)
    return tables


def milliseconds(step: Callable[[int], object]) -> float:
    """Time of a step in milliseconds; the steps run back to back."""

    def timed(steps: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for at in range(steps):
            step(at)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / steps

    timed(4)  # hints of how ids repeat follow those of the last steps
    return statistics.median(timed(STEPS) for _ in range(ROUNDS))


def measure_cell(
    cell: Cell, device: torch.device, with_stock: bool = True
) -> dict[str, float | None]:
    """Milliseconds of both sides."""
    numbers = [draw(cell, cell.rows, device) for _ in range(4)]
    ids = [hashed(batch) for batch in numbers]
    bags = len(cell.dims) * cell.batch
    offsets = torch.arange(bags + 1, device=device) * cell.bag
    grad = torch.randn(cell.batch, sum(cell.dims), device=device)
    weights = None
    if cell.reduction == "weighted":
        weights = torch.rand(len(numbers[0]), device=device)
    times: dict[str, float | None] = {"fbgemm_ms": None}
    if with_stock and OPTIMIZERS[cell.optimizer][1] is not None:
        stock = make_fbgemm(cell, device)
        times["fbgemm_ms"] = milliseconds(
            lambda at: stock(numbers[at % 4], offsets, weights).backward(grad)
        )
        del stock
    tables = HashTables(cell, device)
    times["hkv_ms"] = milliseconds(
        lambda at: tables.forward(ids[at % 4], offsets, weights).backward(grad)
    )
    times["find_ms"] = milliseconds(lambda at: tables.find(ids[at % 4], offsets))
    times["ratio"] = times["hkv_ms"] / times["fbgemm_ms"] if times["fbgemm_ms"] else None
    times["find_ratio"] = None
    if cell.policy != "lru":
        times["find_ratio"] = times["find_ms"] / _lru_find(cell, ids, offsets, device)
    return times


def _lru_find(cell: Cell, ids: Sequence[Tensor], offsets: Tensor, device: torch.device) -> float:
    tables = HashTables(dataclasses.replace(cell, policy="lru"), device)
    return milliseconds(lambda at: tables.find(ids[at % 4], offsets))


def _shown(dims: Sequence[int]) -> str:
    if len(set(dims)) == 1:
        return f"{len(dims)}x{dims[0]}"
    return "+".join(map(str, dims))


def measure(chosen: Sequence[str], skip_stock: Sequence[str]) -> Iterator[dict[str, object]]:
    """One row a cell, and, of each section, the geometric mean of its ratios."""
    device = torch.device("cuda")
    for name in chosen:
        for cell in sections()[name]:
            times = measure_cell(cell, device, cell.optimizer not in skip_stock)
            torch.cuda.empty_cache()
            row: dict[str, object] = dataclasses.asdict(cell) | {"dims": _shown(cell.dims)}
            row |= {key: value and round(value, 4) for key, value in times.items()}
            yield row | {"fbgemm_gpu": fbgemm_gpu.__version__}


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Geometric mean and highest of the ratios, by section."""
    lines = []
    for name in dict.fromkeys(row["section"] for row in rows):
        own = [row for row in rows if row["section"] == name and row["ratio"]]
        ratios = [float(row["ratio"]) for row in own]
        if not ratios:
            continue
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        worst = max(own, key=lambda row: float(row["ratio"]))
        line = f"{name:10} cells {len(own):3}  mean {mean:.3f}  highest {worst['ratio']:.3f}"
        lines.append(f"{line} ({worst['dims']}, {worst['skew']}, {worst['optimizer']})")
    return "\n".join(lines)


def main() -> None:
    """Parses arguments, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=list(sections()), default=list(sections()))
    parser.add_argument(
        "--skip-stock",
        nargs="*",
        choices=list(OPTIMIZERS),
        default=[],
        help="optimizers that FBGEMM is not measured with, where its build lacks them",
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--plot", type=Path, help="SVG file of heat maps; needs matplotlib")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []

    def kept() -> Iterator[dict[str, object]]:
        for row in measure(args.sections, args.skip_stock):
            rows.append(row)
            yield row

    report(kept(), args.out, KEYS)
    print(summary(rows))
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
