"""The cells of the matrix (``benchmarks/matrix.py``): the shapes to measure on each device."""

from __future__ import annotations

import dataclasses

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

from benchmarks.ids import power_law
from torchrec_hkv.hash_table import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad

#: By name: this package's optimizer, and FBGEMM's if it has the optimizer.
OPTIMIZERS = {
    "sgd": (SGD(), EmbOptimType.EXACT_SGD),
    "rowwise_adagrad": (RowWiseAdagrad(eps=1e-8), EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    "adagrad": (Adagrad(eps=1e-8), EmbOptimType.EXACT_ADAGRAD),
    "adam": (Adam(eps=1e-8), EmbOptimType.ADAM),
    "adamw": (AdamW(eps=1e-8), EmbOptimType.ADAM),
    "lamb": (LAMB(eps=1e-8), EmbOptimType.LAMB),
    "ftrl": (FTRL(), None),
}
#: The optimizers that FBGEMM has on a CPU.
CPU_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape.

    Attributes:
        section: section of the matrix.
        dims: number of columns, by table.
        skew: ``"uniform"``, a power law's exponent, or ``"hot"``: one id in 90 % of the positions.
        batch: number of samples.
        bag: pooling factor.
        rows: rows of each table.
        dtype: dtype of rows, a key of :data:`DTYPES`.
        policy: eviction policy.
        optimizer: a key of :data:`OPTIMIZERS`.
        reduction: ``"sum"``, ``"mean"`` or ``"weighted"``.
        room: share of the ids that the group has room for; 1 if it holds all ids.
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


def sections(device: str) -> dict[str, list[Cell]]:
    """Returns the cells for a device, ``"cuda"`` or ``"cpu"``, by section."""
    return _cpu_sections() if device == "cpu" else _gpu_sections()


def _gpu_sections() -> dict[str, list[Cell]]:
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
            for dtype in ("fp16", "bf16", "int8")
            for dim in (64, 128, 256)
            for skew in ("uniform", "1.2")
        ],
        "policy": [
            Cell("policy", (128,) * 26, skew, bag=10, policy=policy)
            for policy in ("lru", "lfu", "epoch_lru", "epoch_lfu", "adaptive")
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
            for policy in ("lru", "lfu", "adaptive")
        ],
    }


def _cpu_sections() -> dict[str, list[Cell]]:
    """Returns cells for two cores: a step takes milliseconds, and the largest tables 2 GB."""
    shape = {"batch": 2048, "bag": 10, "rows": 200_000}
    skews = ("uniform", "1.05", "1.2", "1.5")

    def four(section: str, dim: int, skew: str, **more: str) -> Cell:
        return Cell(section, (dim,) * 4, skew, **shape, **more)

    def other(dims: tuple[int, ...], skew: str = "1.2", **more: int | str) -> Cell:
        return Cell("shape", dims, skew, **{**shape, **more})

    return {
        "dim": [
            four("dim", dim, skew)
            for dim in (4, 8, 16, 32, 64, 100, 128, 192, 256, 512)
            for skew in (*skews, "hot")
        ],
        "lfu": [
            four("lfu", dim, skew, policy="lfu")
            for dim in (8, 32, 64, 128, 512)
            for skew in (*skews, "hot")
        ],
        "adaptive": [
            four("adaptive", dim, skew, policy="adaptive")
            for dim in (8, 32, 128)
            for skew in (*skews, "hot")
        ],
        "dtype": [
            four("dtype", dim, skew, dtype=dtype)
            for dtype in ("fp16", "bf16", "int8")
            for dim in (8, 32, 64, 128, 512)
            for skew in skews
        ],
        "optimizer": [
            four("optimizer", dim, skew, optimizer=optimizer)
            for optimizer in ("sgd", "adagrad", "adam")
            for dim in (16, 64, 256)
            for skew in ("uniform", "1.2", "1.5")
        ],
        "shape": [
            *(
                other((dim,) * 4, skew, bag=1, batch=8192)
                for dim in (16, 128)
                for skew in ("uniform", "1.2")
            ),
            *(other((64,) * 2, skew, bag=100, batch=512) for skew in ("uniform", "1.2", "1.5")),
            *(
                other((dim,) * 4, skew, batch=64)
                for dim in (16, 128)
                for skew in ("uniform", "1.5")
            ),
            *(other((32,) * 4, skew, batch=16384, bag=5) for skew in ("uniform", "1.2")),
            *(other((64,), skew, batch=8192) for skew in ("uniform", "1.2")),
            *(
                other((32,) * 60, skew, batch=256, bag=3, rows=20_000)
                for skew in ("uniform", "1.2")
            ),
            *(
                other((64,) * 4, skew, reduction=reduction, dtype=dtype)
                for reduction in ("mean", "weighted")
                for dtype in ("fp32", "fp16")
                for skew in ("uniform", "1.2")
            ),
            other((8, 192) * 2),
            other((16, 32, 64, 128, 256), "uniform"),
            other((16, 32, 64, 128, 256), "1.05", policy="epoch_lfu"),
            *(other((64,) * 4, "1.2", policy=policy) for policy in ("epoch_lru", "epoch_lfu")),
            *(other((64,) * 4, "1.2", policy="lfu", dtype=dtype) for dtype in ("fp16", "bf16")),
        ],
    }


def draw(cell: Cell, table_rows: int, device: torch.device) -> Tensor:
    """Draws the row numbers of one batch, feature-major."""
    n = len(cell.dims) * cell.batch * cell.bag
    if cell.skew in ("uniform", "hot"):
        ids = torch.randint(table_rows, (n,), device=device)
    else:
        ids = power_law(n, table_rows, float(cell.skew), device)
    if cell.skew == "hot":
        ids = ids.where(torch.rand(n, device=device) >= 0.9, 7)
    return ids
