"""Training steps on a GPU: a ``TableGroup`` compared with FBGEMM's static tables.

    python -m benchmarks.training_step --out benchmarks/results/training_step.csv

A step is forward, backward and optimizer. Both sides run in one process on the same ids, eager
through torch. FBGEMM gets row numbers; the group finds or inserts them as ids in every step, and
already has all of them. ``ms`` are milliseconds per step of 20 back-to-back steps, ``single_ms``
those of a step that begins when the device is idle, and ``replayed_ms`` those of back-to-back
replays of the group's step as a CUDA graph. ``ratio`` is the group's ``ms`` divided by FBGEMM's.
``peak_bytes`` is the peak of the additional bytes per id that a step requests from torch, without
the output. The group's tables are filled to a load factor of ``--load``.

    python -m benchmarks.training_step --deterministic \\
        --out benchmarks/results/training_step_deterministic.csv

compares two groups instead, one after the other on the same ids, the second in deterministic mode;
``ratio`` is the ratio of their ``ms``, deterministic / default. They also have all ids.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
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

from benchmarks.environment import report
from benchmarks.ids import power_law
from torchrec_hkv.hash_table import (
    AdamW,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
    table_memory,
)

LEARNING_RATE = 0.01
OPTIMIZERS = {
    "rowwise_adagrad": (RowWiseAdagrad(eps=1e-8), EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    "adam": (AdamW(eps=1e-8), EmbOptimType.ADAM),
}
#: Key columns: a new run replaces rows with the same key in the file.
KEYS = ("workload", "optimizer")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables of one shape, and the distribution of their ids."""

    tables: int
    rows: int
    dim: int
    batch: int
    bag: int
    power: float = 0.0  # exponent of the power law; 0 for uniform ids
    hot: float = 0.0  # share of positions that have the same id

    def draw(self, device: torch.device) -> Tensor:
        """Draws the row numbers of one batch, feature-major."""
        n = self.tables * self.batch * self.bag
        if self.power:
            ids = power_law(n, self.rows, self.power, device)
        else:
            ids = torch.randint(self.rows, (n,), device=device)
        return ids.where(torch.rand(n, device=device) >= self.hot, 7)


WORKLOADS = {
    "S1": Workload(26, 1_000_000, 128, 8192, 10),
    "S2": Workload(26, 1_000_000, 128, 8192, 10, power=1.05),
    "S3": Workload(1, 10_000_000, 128, 1 << 20, 1),
    "S2 hot": Workload(26, 1_000_000, 128, 8192, 10, power=1.05, hot=0.5),
    "S4": Workload(26, 1_000_000, 64, 8192, 1),
}


class HashTables:
    """The group's side.

    Args:
        work: the tables, all of whose rows are inserted.
        optimizer: a key of :data:`OPTIMIZERS`.
        load: load factor of the filled tables.
        device: a GPU.
        hbm_share: share of the rows that fit in HBM.
        deterministic: whether tables are in deterministic mode.
    """

    def __init__(
        self,
        work: Workload,
        optimizer: str,
        load: float,
        device: torch.device,
        hbm_share: float = 1.0,
        deterministic: bool = False,
    ) -> None:
        capacity = int(work.rows / load)
        hbm_bytes = None
        if hbm_share < 1:
            width = OPTIMIZERS[optimizer][0].state_width(work.dim)
            memory = table_memory(capacity, work.dim, width, "lru")
            rows = int(hbm_share * work.rows)
            # Like in FBGEMM, HBM also holds the row-wise states of all rows.
            states = memory.num_slots * memory.state_bytes if width == 1 else 0
            hbm_bytes = memory.index_bytes + rows * (memory.row_bytes + 3) + states
        specs = [
            TableSpec(
                f"t{t}",
                capacity,
                work.dim,
                hbm_bytes=hbm_bytes,
                initializer=Uniform(-0.05, 0.05),
                deterministic=deterministic,
            )
            for t in range(work.tables)
        ]
        self.batch = work.batch
        self.group = TableGroup(
            specs, list(range(work.tables)), OPTIMIZERS[optimizer][0], device=device
        )
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self.learning_rate = torch.full((), LEARNING_RATE, device=device)
        for part in torch.arange(work.rows, device=device).split(1 << 18):
            ends = torch.arange(work.tables + 1, device=device) * len(part)
            self.group.find_or_insert(part.repeat(work.tables), ends, 1)
        counted = self.group.counters()
        if any(table["size"] != work.rows for table in counted):
            raise RuntimeError("a table has no room for an id; --load must be lower.")

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Returns pooled rows."""
        return self.group.train_lookup(
            self.anchor, ids, offsets, None, self.batch, False, self.learning_rate
        )


def make_fbgemm(
    work: Workload, optimizer: str, device: torch.device, cached_share: float | None = None
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Creates FBGEMM's side. With a cached share, rows are in host memory, and this share is
    cached."""
    place = EmbeddingLocation.DEVICE if cached_share is None else EmbeddingLocation.MANAGED_CACHING
    shape = (work.rows, work.dim, place, ComputeDevice.CUDA)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [shape] * work.tables,
        optimizer=OPTIMIZERS[optimizer][1],
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
        device=device,
        **({} if cached_share is None else {"cache_load_factor": cached_share}),
    )
    tables.init_embedding_weights_uniform(-0.05, 0.05)
    return tables


def milliseconds(step: Callable[[int], None], steps: int, rounds: int = 5) -> tuple[float, float]:
    """Returns milliseconds per step: back to back, and single."""

    def timed(first: int, last: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for at in range(first, last):
            step(at)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / (last - first)

    timed(0, 3)
    together = [timed(0, steps) for _ in range(rounds)]
    single = [timed(at, at + 1) for at in range(steps)]
    return statistics.median(together), statistics.median(single)


def replayed(tables: HashTables, ids: list[Tensor], offsets: Tensor, grad: Tensor) -> float:
    """Returns milliseconds of back-to-back replays of the group's step as a CUDA graph."""
    static = ids[0].clone()

    def run() -> None:
        tables.forward(static, offsets).backward(grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(lambda at: graph.replay(), 20)[0]


class StepTimer:
    """The steps of a workload, with the same ids for all sides.

    Args:
        work: the workload.
    """

    def __init__(self, work: Workload) -> None:
        device = torch.device("cuda")
        self._batches = [work.draw(device) for _ in range(4)]
        self._offsets = torch.arange(work.tables * work.batch + 1, device=device) * work.bag
        self._grad = torch.randn(work.batch, work.tables * work.dim, device=device)

    def times(self, side: str, forward: Callable[[Tensor, Tensor], Tensor]) -> dict[str, float]:
        """Returns milliseconds and memory of a step, as columns of this side."""

        def step(at: int) -> None:
            forward(self._batches[at % 4], self._offsets).backward(self._grad)

        together, single = milliseconds(step, 20)
        return {
            f"{side}_ms": together,
            f"{side}_single_ms": single,
            f"{side}_peak_bytes": self._peak_bytes(forward),
        }

    def _peak_bytes(self, forward: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Returns the peak bytes per id of a step after the first, without its output."""

        def requested(what: str) -> int:
            # Not the bytes of the allocator's blocks, which may be larger by up to 1 MiB each.
            return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        out = forward(self._batches[0], self._offsets)
        out.backward(self._grad)
        step_bytes = requested("peak") - before - out.nbytes
        return step_bytes / self._batches[0].numel()

    def table_times(self, side: str, tables: HashTables) -> dict[str, float]:
        """Like :meth:`times`, for a group of hash tables, and also as a CUDA graph."""
        times = self.times(side, tables.forward)
        as_graph = replayed(tables, self._batches, self._offsets, self._grad)
        return times | {f"{side}_replayed_ms": as_graph}


def compare(work: Workload, optimizer: str, load: float) -> dict[str, float]:
    """Returns milliseconds of both sides."""
    device = torch.device("cuda")
    steps = StepTimer(work)
    result = steps.times("fbgemm", make_fbgemm(work, optimizer, device))
    result |= steps.table_times("hkv", HashTables(work, optimizer, load, device))
    return result | {"ratio": result["hkv_ms"] / result["fbgemm_ms"]}


def compare_modes(work: Workload, optimizer: str, load: float) -> dict[str, float]:
    """Returns milliseconds without and with deterministic mode."""
    device = torch.device("cuda")
    steps = StepTimer(work)
    result: dict[str, float] = {}
    for side in ("plain", "deterministic"):
        ordered = side == "deterministic"
        tables = HashTables(work, optimizer, load, device, deterministic=ordered)
        result |= steps.table_times(side, tables)
        del tables  # there may be no memory for two groups
        torch.cuda.empty_cache()
    return result | {"ratio": result["deterministic_ms"] / result["plain_ms"]}


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields one row per workload and optimizer."""
    for name in args.workloads:
        for optimizer in args.optimizers:
            sides = compare_modes if args.deterministic else compare
            times = sides(WORKLOADS[name], optimizer, args.load)
            torch.cuda.empty_cache()
            row = {key: round(value, 3) for key, value in times.items()}
            versions = {} if args.deterministic else {"fbgemm_gpu": fbgemm_gpu.__version__}
            yield {"workload": name, "optimizer": optimizer, **row, **versions}


def workload_parser(description: str) -> argparse.ArgumentParser:
    """Creates a parser with options for workloads, optimizers and a load factor."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    parser.add_argument("--load", type=float, default=0.8, help="load factor of the hash tables")
    return parser


def main() -> None:
    """Parses arguments, measures, writes."""
    parser = workload_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--deterministic", action="store_true", help="deterministic mode beside the other"
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    report(measure(args), args.out, KEYS)


if __name__ == "__main__":
    main()
