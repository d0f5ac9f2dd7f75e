"""Time per id of a batch in tables of 10^6 rows up to the largest that fits, compared with
FBGEMM's.

    python -m benchmarks id_cost --out benchmarks/results/id_cost.csv \\
        --plot docs/performance/id_cost.svg

A step is forward, backward and update with row-wise Adagrad, eager through torch, for one table,
bags of one id and ``--batch`` uniform ids. FBGEMM's static table gets row numbers; the hash table
finds or inserts them as ids, and has all of them. Both are measured in one run on the same batches,
one after the other, each alone in memory.

``hkv_ms`` and ``fbgemm_ms`` are milliseconds per step, the median of five rounds of ``--steps``
back-to-back steps; ``ratio`` is ``hkv_ms / fbgemm_ms``. ``ordered_ms`` is the hash table's time
with the same ids in the order of their slots, which is the most that processing a batch page by
page could save. ``create_ms`` is the time to create the hash table, and ``fill_mids`` the rate of
filling it to a load factor of ``--load``, in millions of new ids per second. ``hkv_gb`` and
``fbgemm_gb`` are the sizes of the tables.

Without ``--rows``, sizes are the powers of ten from 10^6 on, and the largest multiple (1 to 9) of a
power of ten with which the hash table and a step fit in free memory (4 GB on a CPU). Sizes that do
not fit are omitted.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from benchmarks.timing import steps_ms
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform, table_memory

KEYS = ("dim", "rows", "batch")
_LEARNING_RATE = 0.01
_EPS = 1e-8
_RANGE = 0.05
_MIN = 10**6
#: New ids per call that fills the table.
_FILL = 1 << 22
#: Number of different batches, whose rows together exceed a GPU's cache.
_BATCHES = 8
_CPU_BYTES = 4 * 10**9
#: Other memory: of the process, and per id of a step besides rows.
_OTHER_BYTES = 2 * 10**9
_ID_BYTES = 200


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a table.

    Attributes:
        rows: number of ids in the table.
        dim: number of columns.
        load: the hash table's load factor.
    """

    rows: int
    dim: int
    load: float

    @property
    def capacity(self) -> int:
        """Returns the capacity of the hash table."""
        return int(self.rows / self.load)

    @property
    def hkv_bytes(self) -> int:
        """Returns the bytes of the hash table."""
        return table_memory(self.capacity, self.dim, 1, "lru").bytes

    @property
    def fbgemm_bytes(self) -> int:
        """Returns the bytes of FBGEMM's rows and states."""
        return self.rows * 4 * (self.dim + 1)

    def bytes(self, batch: int) -> int:
        """Returns the bytes of the larger side, including the memory of a step."""
        # Outputs, their gradients, and the same again to sum the gradients of equal ids.
        step = batch * (6 * 4 * self.dim + _ID_BYTES + 8 * _BATCHES)
        return max(self.hkv_bytes, self.fbgemm_bytes) + step + _OTHER_BYTES


class HashSide:
    """The hash table, filled.

    Args:
        size: size of the table.
        batch: number of ids per step.
        device: device of the table.

    Attributes:
        create_ms: milliseconds to create the table.
        fill_mids: rate of filling it, in millions of new ids per second.
    """

    def __init__(self, size: Size, batch: int, device: torch.device) -> None:
        spec = TableSpec("t", size.capacity, size.dim, initializer=Uniform(-_RANGE, _RANGE))
        begin = _now(device)
        self._group = TableGroup([spec], [0], RowWiseAdagrad(eps=_EPS), device)
        created = _now(device)
        for first in range(0, size.rows, _FILL):
            ids = torch.arange(first, min(first + _FILL, size.rows), device=device)
            ends = torch.arange(2, device=device) * len(ids)
            self._group.find_or_insert(ids, ends, 1)
        filled = _now(device)
        self.create_ms = 1000 * (created - begin)
        self.fill_mids = size.rows / (filled - created) / 1e6
        num_entries = int(self._group.sizes()[0])
        if num_entries != size.rows:
            raise RuntimeError(
                f"{size.rows - num_entries} of {size.rows} ids found no place: --load must be "
                f"lower than {size.load}."
            )
        self._batch = batch
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._rate = torch.full((), _LEARNING_RATE, device=device)

    def slots_of(self, ids: Tensor) -> Tensor:
        """Returns the slots of ids, int64 ``[n]``."""
        ends = torch.arange(2, device=ids.device) * len(ids)
        return self._group.find(ids, ends, 1)

    def in_slot_order(self, ids: Tensor) -> Tensor:
        """Sorts ids by their slots."""
        return ids[self.slots_of(ids).argsort()]

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns pooled rows."""
        args = (ids, offsets, None, self._batch, False, self._rate)
        return self._group.train_lookup(self._anchor, *args)


def make_fbgemm(size: Size, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Creates FBGEMM's static table."""
    on_gpu = device.type == "cuda"
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(size.rows, size.dim, place, compute)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=_LEARNING_RATE,
        eps=_EPS,
        pooling_mode=PoolingMode.SUM,
        device=device,
    )
    table.init_embedding_weights_uniform(-_RANGE, _RANGE)
    return table


def measure(size: Size, batch: int, steps: int, device: torch.device) -> dict[str, object]:
    """Measures one row."""
    ids = [torch.randint(size.rows, (batch,), device=device) for _ in range(_BATCHES)]
    offsets = torch.arange(batch + 1, device=device)
    grad = torch.randn(batch, size.dim, device=device)

    def time_of(side: HashSide | SplitTableBatchedEmbeddingBagsCodegen, ids: list[Tensor]) -> float:
        def step(at: int) -> None:
            side.forward(ids[at % _BATCHES], offsets).backward(grad)

        return steps_ms(step, steps, device)

    table = make_fbgemm(size, device)
    fbgemm_ms = time_of(table, ids)
    del table
    _free(device)
    side = HashSide(size, batch, device)
    hkv_ms = time_of(side, ids)
    ordered_ms = time_of(side, [side.in_slot_order(batch_ids) for batch_ids in ids])
    figures = {
        "hkv_ms": hkv_ms,
        "fbgemm_ms": fbgemm_ms,
        "ratio": hkv_ms / fbgemm_ms,
        "ordered_ms": ordered_ms,
        "create_ms": side.create_ms,
        "fill_mids": side.fill_mids,
        "hkv_gb": size.hkv_bytes / 1e9,
        "fbgemm_gb": size.fbgemm_bytes / 1e9,
    }
    row = {
        "dim": size.dim,
        "rows": size.rows,
        "batch": batch,
        "load": size.load,
        **{name: float(f"{value:.4g}") for name, value in figures.items()},
        "fbgemm_gpu": fbgemm_gpu.__version__,
    }
    del side
    _free(device)
    return row


def fitting(dim: int, load: float, batch: int, memory: int) -> list[int]:
    """Returns the powers of ten from 10^6 on, and the largest one-digit multiple of one, that fit.

    Args:
        dim: number of columns.
        load: the hash table's load factor.
        batch: number of ids per step.
        memory: available bytes.
    """

    def fits(rows: int) -> bool:
        return Size(rows, dim, load).bytes(batch) <= memory

    rows, power = [], _MIN
    while fits(power):
        rows.append(power)
        power *= 10
    maximum = [digit * power // 10 for digit in range(2, 10) if fits(digit * power // 10)]
    return rows + maximum[-1:] if rows else []


def _rows(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, object]]:
    memory = int(args.memory_gb * 1e9) if args.memory_gb else free_bytes(device)
    # Warms up, so that the memory of the device's first use does not count for a table.
    measure(Size(1000, 8, args.load), 64, 1, device)
    for dim in args.dims:
        sizes = args.rows or fitting(dim, args.load, args.batch, memory)
        for rows in sizes:
            size = Size(rows, dim, args.load)
            needed = size.bytes(args.batch)
            if needed > memory:
                print(f"left out: {rows} rows of {dim} columns take {needed / 1e9:.1f} GB.")
                continue
            yield measure(size, args.batch, args.steps, device)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that tables may take."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _CPU_BYTES


def _now(device: torch.device) -> float:
    """Waits for the device; returns the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def plot(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draws milliseconds per step of both sides, and their ratio, over the rows of the table.

    Args:
        rows: rows of a run.
        path: output file; its suffix is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "id_cost"}):  # equal rows give equal files
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        times, ratios = figure.subplots(1, 2)
        for at, dim in enumerate(sorted({row["dim"] for row in rows})):
            of_dim = sorted((row for row in rows if row["dim"] == dim), key=lambda row: row["rows"])
            sizes, color = [row["rows"] for row in of_dim], f"C{at}"
            times.plot(
                sizes, [r["hkv_ms"] for r in of_dim], "o-", color=color, label=f"{dim} columns"
            )
            times.plot(sizes, [r["fbgemm_ms"] for r in of_dim], "x:", color=color)
            ratios.plot(
                sizes, [r["ratio"] for r in of_dim], "o-", color=color, label=f"{dim} columns"
            )
        times.set(xscale="log", xlabel="rows", ylabel="ms a step", ylim=(0, None))
        times.legend(title="dotted: FBGEMM's")
        ratios.set(xscale="log", xlabel="rows", ylabel="ms over FBGEMM's", ylim=(0, None))
        ratios.legend()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, writes, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=AtLeast(1), nargs="+", default=[16, 64, 128])
    parser.add_argument("--rows", type=AtLeast(1), nargs="+", help="sizes; default: all that fit")
    parser.add_argument("--batch", type=AtLeast(1), default=1 << 20, help="ids of a step")
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--steps", type=AtLeast(1), default=20)
    parser.add_argument("--memory-gb", type=float, help="that tables may take")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--plot", type=Path, help="picture")
    args = parser.parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    measured: list[dict[str, object]] = []

    def kept() -> Iterator[dict[str, object]]:
        for row in _rows(args, device):
            measured.append(row)
            yield row

    report(kept(), args.out, KEYS)
    if args.plot is not None:
        plot(measured, args.plot)


if __name__ == "__main__":
    main()
